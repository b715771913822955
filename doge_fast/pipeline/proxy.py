"""Stage one: a proxy model learns the domain weights.

The result is the average weights over the run, alpha_bar = mean_t alpha^(t); the last weights are
recorded too.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.pipeline import records, stage
from doge_fast.pipeline.config import ProxyConfig, parse_target
from doge_fast.pipeline.domains import Batch, Corpus, mix_sampler, proxy_batch
from doge_fast.pipeline.failures import UserError, given_to_core
from doge_fast.pipeline.progress import tell_once
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.trainer import ByName, RecordedTrainer, from_first
from doge_fast.step.parameters import resolve
from doge_fast.weights.aligned import WAITING_STEPS
from doge_fast.weights.diagnosis import have_equal_scores
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import cosine


def learn_weights(config: ProxyConfig) -> Run:
    """Learn domain weights with a proxy model; write them to a run directory.

    The directory holds config.json, metrics.jsonl (weights and average weights from step 0),
    weights.json and model/. The same call resumes a killed run, with bitwise the same result, and
    leaves a complete run unchanged.

    Args:
        config: corpus, model and training of the proxy.

    Returns:
        The run: its directory, weights and figures.

    Raises:
        UserError: the corpus is unusable, or the directory holds another run; nothing has been
            written.
        Diverged: losses or gradients are no longer finite; no weights are written.

    Source: DoGE, Algorithms 1 and 2, stage one.
    """
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if existing.is_complete:
        return Run(config.out)
    trainer = proxy_trainer(config, existing)
    # The rule "aligned" has no mu.
    resolved = {} if config.mu is not None or trainer.mu is None else {"mu": trainer.mu}
    with stage.directory(trainer, existing, resolved=resolved) as checkpoint:
        trainer.go_on(checkpoint)
        from_first(lambda: _write_proxy_weights(trainer))
    return Run(config.out)


def proxy_trainer(config: ProxyConfig, existing: ExistingRun) -> "ProxyTrainer":
    """Read the corpus, build the model, wrap the optimizer; return the run's trainer."""
    selection = None if config.selection is None else _read_selection(config.selection)

    def check(model: nn.Module, *_: object) -> None:
        if selection is not None:
            with given_to_core():
                resolve(selection, model.parameters(), dict(model.named_parameters()))

    corpus, model = stage.corpus_and_model(config, existing, check=check)
    if len(corpus.names) == 1:
        tell_once(
            f"{config.corpus.data} has one domain to train on, {corpus.names[0]}: it gets all the "
            "weight, and there is nothing to learn.",
            logging.WARNING,
        )
    # A resumed run keeps its mu even if the default has changed since.
    resolved = {} if existing.record is None else existing.record.resolved
    mu = resolved.get("mu", config.mu)
    objective = Objective.of(corpus.names, parse_target(config.target))
    # The demo prepares its proxy twice, to time a few steps.
    tell_once(f"{config.out}: {_rule_line(config, objective)}")
    if config.score != "aligned" and have_equal_scores(
        len(corpus.names), config.domain_max_grad_norm, is_universal=objective.has_equal_targets
    ):
        tell_once(
            f"{config.out}: two domains whose gradients are clipped to one norm have equal scores, "
            "and stay at uniform weights whatever --mu is. Use --domain-max-grad-norm 0.",
            logging.WARNING,
        )
    return ProxyTrainer(config, corpus, model, objective=objective, mu=mu, selection=selection)


def _rule_line(config: ProxyConfig, objective: Objective) -> str:
    """A line for the log that names the score in use, and the alternative."""
    if config.score == "aligned" and objective.has_equal_targets:
        return (
            "all domains are targets alike, so uniform weights are the aligned ones, and there is "
            "nothing to learn. Name a target, or use --score paper."
        )
    if config.score == "aligned" and config.training.steps <= WAITING_STEPS:
        return f"the aligned rule leaves uniform weights in its first {WAITING_STEPS} steps"
    if config.score == "aligned":
        return "weights by the aligned rule; --score paper for the paper's"
    universal = ", since uniform weights are the aligned ones where all domains are targets alike"
    return f"weights by the {config.score} score{universal if objective.has_equal_targets else ''}"


class ProxyTrainer(RecordedTrainer, DoGETrainer):
    """DoGETrainer over ready-made batches with equally many blocks of every domain."""

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
            # The command line writes 0 for None.
            domain_max_grad_norm=config.domain_max_grad_norm or None,
            smoothing=config.smoothing,
            selection=selection,
            mode=config.mode,
        )
        # Created here so that its errors come before anything is written.
        self.create_optimizer()
        self.mu = self.doge.mu

    def batch(self, step: int) -> dict[str, Batch]:
        """Equally many blocks of every domain."""
        size, seed = self.config.sequences_per_domain, self.config.training.seed
        return proxy_batch(self.corpus, step, size=size, seed=seed, mix=self.mix)

    def tokens(self, steps: int) -> dict[str, int]:
        """{domain, target or "mix": its tokens}, equal for all."""
        each = steps * self.config.sequences_per_domain * self.corpus.block_size
        return dict.fromkeys(self.names, each)

    def first_weights(self) -> dict[str, float]:
        """The initial weights; uniform."""
        return ByName(self.doge.domains, self.doge.alpha).read()

    def line(self, step: int) -> Json:
        """Losses, weights and scores of the step; small tensors, read when the line is written."""
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
        """Whether the loss is not finite, or the optimizer skipped the step."""
        last = self.doge.last
        assert last is not None
        return super().is_lost().logical_or(last.skipped)

    def num_lost(self) -> int:
        """Number of steps that the optimizer skipped."""
        return self.doge.num_skipped

    def lost_domains(self) -> list[str]:
        """Rows with a non-finite loss or gradient in the last step."""
        last, losses = self.doge.last, self.domain_losses
        assert last is not None
        norms = ByName(self.doge.names, last.grad_norms).read()
        return [name for name in norms if not math.isfinite(norms[name] + float(losses[name]))]


def _write_proxy_weights(trainer: ProxyTrainer) -> None:
    """Write the average weights, then the model."""
    config, doge = trainer.config, trainer.doge
    # Not trainer.weights: it would repeat warnings that weights.json and the command print.
    mean = ByName(doge.domains, doge.alpha_mean).read()
    stage.leave_learned_weights(
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
    """Read a JSON list of parameter names, as `select` writes it."""
    names = records.parse_json(path.read_bytes(), path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"selection must be a JSON list of parameter names; {path} is not.")
    return names
