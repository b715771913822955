"""Stage one: a proxy model learns the domain weights.

The weights that count are the average over the run, alpha_bar = mean_t alpha^(t); the last ones
are kept beside them.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.pipeline import records, stage
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.domains import Batch, Corpus, mix_sampler, proxy_batch
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.wording import listed, to_floats
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import Stage
from doge_fast.pipeline.trainer import ByName, RecordedTrainer
from doge_fast.pipeline.weights.warm_start import warm_start
from doge_fast.step import parameters
from doge_fast.weights import scores as generalization
from doge_fast.weights.objective import UNIVERSAL, WORST
from doge_fast.weights.state import DomainWeights
from doge_fast.weights.subset import has_halves

Target = str | dict[str, float]

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
        ValueError: a setting is out of its range, the corpus is not what it should be, or the
            directory holds another run; nothing has been written.
        Diverged: the training computes no numbers any more; there are no weights.

    Source: DoGE, Algorithms 1 and 2, stage one.
    """
    return Run(stage.run(ProxyStage(config)))


class ProxyTrainer(RecordedTrainer, DoGETrainer):
    """DoGETrainer over ready-made batches, with records and whole checkpoints."""


class ProxyStage(Stage[ProxyConfig]):
    """Domains weighed while a proxy learns them."""

    name = "proxy"
    further = "doge-fast proxy --init-weights"
    trainer = ProxyTrainer

    def check(self) -> None:
        """Beside its own settings, the words of the target."""
        self.target = parse_target(self.config.target)

    def prepare(self, recorded: Json) -> None:
        """Where the weights start and how they move: everything that the optimizer would refuse."""
        corpus, config = self.corpus, self.config
        # A resumed run keeps the weights and the mu it began with, whatever became of the file.
        initial = recorded.get("initial") or _initial(config, corpus)
        mu = recorded.get("resolved", {}).get("mu", config.mu)
        options: dict[str, Any] = {
            "domains": corpus.names,
            "target": self.target,
            "score": config.score,
            # On the command line 0 is easier to say than None.
            "domain_max_grad_norm": config.domain_max_grad_norm or None,
            "smoothing": config.smoothing,
            "initial": initial and initial["weights"],
            "target_mu": config.target_mu,
        }
        moved = DomainWeights.of(lr=config.training.learning_rate, mu=mu, **options)
        self.mu, self.rows = moved.rule.mu, moved.objective.rows
        self.target_mu = moved.rule.target_mu
        if moved.rule.score.bounds is not None:
            self.most_score = moved.rule.score.bounds[1]
        in_halves = has_halves(moved.objective, moved.rule.score)
        if in_halves and config.sequences_per_domain % 2:
            raise ValueError(
                f"the score {config.score!r} compares the halves of each domain's batch; give "
                f"sequences_per_domain (--sequences-per-domain) an even number instead of "
                f"{config.sequences_per_domain}."
            )
        self.num_in_halves = in_halves * len(corpus.names)
        uniform = dict(zip(corpus.names, moved.read("alpha").tolist(), strict=True))
        self.start = initial["weights"] if initial else uniform
        self.options = options | {"mu": self.mu, "mode": config.mode}
        size, seed = config.sequences_per_domain, config.training.seed
        self.mix = mix_sampler(corpus, size=size, seed=seed)
        resolved = {} if config.mu is not None else {"mu": self.mu}
        self.resolved = {"initial": initial, "resolved": resolved}
        self.outline = [("target", ", ".join(config.target)), ("mu", f"{self.mu:g}")]
        if self.target_mu is not None:
            self.outline.append(("target mu", f"{self.target_mu:g}"))

    def fit(self, model: PreTrainedModel) -> None:
        """The parameters that are selected."""
        if self.config.selection is not None:
            self.options["selection"] = _read_selection(self.config.selection, model)

    def batch(self, step: int) -> dict[str, Batch]:
        """As many blocks of every domain."""
        size, seed = self.config.sequences_per_domain, self.config.training.seed
        return proxy_batch(self.corpus, step, size=size, seed=seed, mix=self.mix)

    def tokens(self, steps: int) -> dict[str, int]:
        """As many of every row, targets and "mix" among them."""
        each = steps * self.config.sequences_per_domain * self.corpus.block_size
        return dict.fromkeys(self.rows, each)

    def measure(self, trainer: "ProxyTrainer", step: int) -> Json:
        """What a step leaves in the records; everything K x K, read when the line is written."""
        doge, last = trainer.doge, trainer.doge.last
        assert last is not None
        losses_R = torch.stack([trainer.domain_losses[name] for name in doge.rows])
        return {
            "loss": ByName(doge.rows, losses_R),
            "alpha": ByName(doge.domains, last.alpha),
            "alpha_mean": ByName(doge.domains, doge.alpha_mean),
            **({"tau": ByName(doge.rows, doge.tau)} if self.target_mu else {}),
            "gain": ByName(doge.domains, last.gain),
            "influence": ByName(doge.domains, last.influence),
            "difficulty": ByName(doge.domains, last.difficulty),
            "grad_norm": ByName(doge.rows, last.grad_norms),
            "rows": list(doge.rows),
            "cosine": generalization.cosine(last.gram),
            "combined_norm": last.combined_norm,
            "skipped": last.skipped,
            "tokens": self.tokens(step),
        }

    def is_lost(self, trainer: "ProxyTrainer") -> Tensor:
        """Also where a gradient was not finite, and the step was skipped."""
        last = trainer.doge.last
        assert last is not None
        return super().is_lost(trainer).logical_or(last.skipped)

    def lost_domains(self, trainer: "ProxyTrainer") -> list[str]:
        """Rows of which the last step has no numbers."""
        last, losses = trainer.doge.last, trainer.domain_losses
        assert last is not None
        norms = ByName(trainer.doge.rows, last.grad_norms).read()
        return [name for name in norms if not math.isfinite(norms[name] + float(losses[name]))]

    def num_lost(self, trainer: "ProxyTrainer") -> int:
        """Those that the optimizer skipped; a checkpoint keeps their number."""
        return trainer.doge.num_skipped

    def end(self, trainer: "ProxyTrainer") -> None:
        """The average of the weights, then the model."""
        config, initial = self.config, self.resolved["initial"]
        self.write_learned(
            # Not trainer.weights, which would warn of what the lines and the verb's answer say.
            self._average(ByName(trainer.doge.domains, trainer.doge.alpha_mean).read()),
            trainer.doge.alpha,
            {},
            method="doge",
            score=config.score,
            target=self.target,
            mu=self.mu,
            **({"target_mu": self.target_mu} if self.target_mu else {}),
            average_from=config.average_from,
            **({"initial": initial} if initial else {}),
        )
        super().end(trainer)

    def _average(self, mean: Mapping[str, float]) -> dict[str, float]:
        """Of the mean over all T steps, that over those after `average_from` of them.

        mean over (a, T]  =  (T mean_T - a mean_a) / (T - a)
        """
        steps, lines = self.config.training.steps, records.read_metrics(self.out, kind="train")
        first = [line for line in lines if line["step"] <= self.config.average_from * steps][-1]
        if not first["step"]:
            return dict(mean)
        before = to_floats(first["alpha_mean"])
        sums = {n: max(0.0, steps * w - first["step"] * before[n]) for n, w in mean.items()}
        total = sum(sums.values())
        return {name: value / total for name, value in sums.items()}


def parse_target(names: Sequence[str]) -> Target:
    """What `target` on the command line means: "universal", "worst" or {name: tau}.

    `names` is one of these words alone; or "mix" and held-out domains, each NAME or NAME=WEIGHT.

    Raises:
        ValueError: no name, one twice, such a word with others, or a weight that is no number
            greater than zero.
    """
    if tuple(names) in ((UNIVERSAL,), (WORST,)):
        return names[0]
    tau: dict[str, float] = {}
    for item in names:
        name, _, weight = item.partition("=")
        if name in tau or name in ("", UNIVERSAL, WORST):
            raise ValueError(
                "target must be universal or worst alone, or distinct names, each NAME or "
                f"NAME=WEIGHT; got {' '.join(names)}."
            )
        try:
            tau[name] = float(weight or 1)
        except ValueError:
            tau[name] = math.nan
        if not 0 < tau[name] < math.inf:
            raise ValueError(f"A target's weight must be a number greater than zero; got {item!r}.")
    if not tau:
        raise ValueError("target must name something: universal, worst, mix, or held-out domains.")
    return tau


def _initial(config: ProxyConfig, corpus: Corpus) -> Json | None:
    """The weights that the run begins with and where they come from, as the records hold it."""
    if config.init_weights is None:
        return None
    start = warm_start(records.read_weights(config.init_weights), corpus.names)
    if start.zeros:
        remains = "" if config.smoothing else ", and a step, which multiplies weights, leaves it"
        _log.warning(
            "%s: the weight at the start is zero for %s%s. A floor (doge-fast weights constrain "
            "--floor) or smoothing lifts it.",
            config.init_weights,
            listed(start.zeros),
            remains,
        )
    return {"source": str(config.init_weights), **asdict(start)}


def _read_selection(path: Path, model: PreTrainedModel) -> list[str]:
    """Names of parameters that the model trains."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"selection must be a JSON file; {path} is not ({error}).") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"selection must be a JSON list of parameter names; {path} is not.")
    by_name = dict(model.named_parameters())
    parameters.resolve(names, (each for each in by_name.values() if each.requires_grad), by_name)
    return names
