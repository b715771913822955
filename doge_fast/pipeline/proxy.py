"""Stage one: a proxy model learns the domain weights.

The weights that count are the average over the run, alpha_bar = mean_t alpha^(t); the last ones
are kept beside them.
"""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.pipeline import stage
from doge_fast.pipeline.config import ProxyConfig, parse_target
from doge_fast.pipeline.domains import Batch, Corpus, mix_sampler, proxy_batch
from doge_fast.pipeline.failures import UserError, given_to_core
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.trainer import ByName, RecordedTrainer, from_first
from doge_fast.step.parameters import resolve
from doge_fast.weights.diagnosis import have_equal_scores
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import cosine

_log = logging.getLogger("doge_fast")


def learn_weights(config: ProxyConfig) -> Run:
    """Learn domain weights with a proxy model; leave them in a run directory.

    The directory holds config.json, metrics.jsonl (weights raw and averaged from step 0),
    weights.json and model/. A run that was killed is resumed by the same call, to the same bits;
    a run that is complete is left as it is.

    Args:
        config: what to learn from, with what, for how long.

    Returns:
        The run: its directory, weights and figures.

    Raises:
        UserError: the corpus is not what it should be, or the directory holds another run;
            nothing has been written.
        Diverged: the training computes no numbers any more; there are no weights.

    Source: DoGE, Algorithms 1 and 2, stage one.
    """
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return Run(config.out)
    trainer = prepare(config, existing)
    # The rule "aligned" has no mu.
    resolved = {} if config.mu is not None or trainer.mu is None else {"mu": trainer.mu}
    with stage.directory(trainer, existing, resolved=resolved) as checkpoint:
        trainer.go_on(checkpoint)
        from_first(lambda: _leave(trainer))
    return Run(config.out)


def prepare(config: ProxyConfig, existing: ExistingRun) -> "ProxyTrainer":
    """The trainer of a run: its corpus read, its model made, its optimizer wrapped."""
    selection = None if config.selection is None else _read_selection(config.selection)

    def check(model: nn.Module, *_: object) -> None:
        if selection is not None:
            with given_to_core():
                resolve(selection, model.parameters(), dict(model.named_parameters()))

    corpus, model = stage.corpus_and_model(config, existing, check=check)
    if len(corpus.names) == 1:
        _log.warning(
            "%s has one domain to train on, %s: it gets all the weight, and there is nothing to "
            "learn.",
            *(config.corpus.data, corpus.names[0]),
        )
    # A resumed run keeps the mu that it began with, whatever becomes of the default.
    resolved = {} if existing.record is None else existing.record.resolved
    mu = resolved.get("mu", config.mu)
    objective = Objective.of(corpus.names, parse_target(config.target))
    _log.info("%s: %s", config.out, _rule_line(config, objective))
    if config.score != "aligned" and have_equal_scores(
        len(corpus.names), config.domain_max_grad_norm, is_universal=objective.has_equal_targets
    ):
        _log.warning(
            "%s: two domains whose gradients are clipped to one norm have equal scores, and stay "
            "at uniform weights whatever mu is. Use --domain-max-grad-norm 0.",
            config.out,
        )
    return ProxyTrainer(config, corpus, model, objective=objective, mu=mu, selection=selection)


def _rule_line(config: ProxyConfig, objective: Objective) -> str:
    """Which rule learns the weights, and which other one there is."""
    if config.score == "aligned" and objective.has_equal_targets:
        return (
            "all domains are targets alike, so uniform weights are the aligned ones, and there is "
            "nothing to learn. Name a target, or use --score paper."
        )
    if config.score == "aligned":
        return "weights by the aligned rule; --score paper for the paper's"
    universal = ", since uniform weights are the aligned ones where all domains are targets alike"
    return f"weights by the {config.score} score{universal if objective.has_equal_targets else ''}"


class ProxyTrainer(RecordedTrainer, DoGETrainer):
    """DoGETrainer over ready-made batches: as many blocks of every domain in each."""

    config: ProxyConfig

    def __init__(
        self,
        config: ProxyConfig,
        corpus: Corpus,
        model: PreTrainedModel,
        *,
        objective: Objective,
        mu: float | None,
        selection: Sequence[str] | None,
    ) -> None:
        size, seed = config.sequences_per_domain, config.training.seed
        self.mix = mix_sampler(corpus, size=size, seed=seed)
        super().__init__(
            config,
            corpus,
            model,
            domains=corpus.names,
            target=objective.target,
            mu=mu,
            score=config.score,
            # On the command line 0 is easier to say than None.
            domain_max_grad_norm=config.domain_max_grad_norm or None,
            smoothing=config.smoothing,
            selection=selection,
            mode=config.mode,
        )
        # What the optimizer refuses is refused before anything is written.
        self.create_optimizer()
        self.mu = self.doge.mu

    def batch(self, step: int) -> dict[str, Batch]:
        """As many blocks of every domain."""
        size, seed = self.config.sequences_per_domain, self.config.training.seed
        return proxy_batch(self.corpus, step, size=size, seed=seed, mix=self.mix)

    def tokens(self, steps: int) -> dict[str, int]:
        """As many of every row, targets and "mix" among them."""
        each = steps * self.config.sequences_per_domain * self.corpus.block_size
        return dict.fromkeys(self.names, each)

    def first_weights(self) -> dict[str, float]:
        """Uniform ones."""
        return ByName(self.doge.domains, self.doge.alpha).read()

    def line(self, step: int) -> Json:
        """What a step leaves in the records; everything K x K, read when the line is written."""
        doge, last = self.doge, self.doge.last
        assert last is not None
        losses_R = torch.stack([self.domain_losses[name] for name in doge.names])
        return {
            "loss": ByName(doge.names, losses_R),
            "alpha": ByName(doge.domains, last.alpha),
            "alpha_mean": ByName(doge.domains, doge.alpha_mean),
            "gain": ByName(doge.domains, last.gain),
            "influence": ByName(doge.domains, last.influence),
            "difficulty": ByName(doge.domains, last.difficulty),
            "grad_norm": ByName(doge.names, last.grad_norms),
            "rows": list(doge.names),
            "cosine": cosine(last.gram),
            "combined_norm": last.combined_norm,
            "skipped": last.skipped,
            "tokens": self.tokens(step),
        }

    def is_lost(self) -> Tensor:
        """Also where a gradient was not finite, and the step was skipped."""
        last = self.doge.last
        assert last is not None
        return super().is_lost().logical_or(last.skipped)

    def num_lost(self) -> int:
        """Those that the optimizer skipped."""
        return self.doge.num_skipped

    def lost_domains(self) -> list[str]:
        """Rows of which the last step has no numbers."""
        last, losses = self.doge.last, self.domain_losses
        assert last is not None
        norms = ByName(self.doge.names, last.grad_norms).read()
        return [name for name in norms if not math.isfinite(norms[name] + float(losses[name]))]


def _leave(trainer: ProxyTrainer) -> None:
    """The average of the weights, then the model."""
    config, doge = trainer.config, trainer.doge
    # Not trainer.weights, which would warn of what the lines and the verb's answer say.
    mean = ByName(doge.domains, doge.alpha_mean).read()
    stage.write_learned(
        trainer,
        mean,
        doge.alpha,
        method="doge",
        score=config.score,
        target=doge.objective.target,
        mu=trainer.mu,
    )
    stage.leave_model(trainer)


def _read_selection(path: Path) -> list[str]:
    """Names of parameters."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"selection must be a JSON file; {path} is not ({error}).") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"selection must be a JSON list of parameter names; {path} is not.")
    return names
