"""The runs of an experiment, each made once: what every arm of every table asks for.

Runs of one seed start from the same numbers and see their data in the same order, whatever the
arm, so arms are compared seed by seed.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline import named
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DoReMiConfig,
    ExperimentConfig,
    ModelConfig,
    ProxyConfig,
    SelectConfig,
    StageConfig,
    TrainingConfig,
)
from doge_fast.pipeline.experiments.presets import doremi_steps, rates_of, with_mu

Json = dict[str, Any]
# For a seed, what `BaseConfig.weights` says.
Source = Callable[[int], str | Path]
RUNS = "runs"


@dataclass(frozen=True)
class Drawn:
    """Weights to be drawn from a Dirichlet distribution, in the file that a base run reads."""

    around: str | Path
    """As `BaseConfig.weights`: a baseline, or a run that learns weights."""
    concentration: float
    """Times the number of domains."""
    number: int
    """Of the draw."""


@dataclass(frozen=True)
class Best:
    """The weights that are best by the regression over a swarm, in the file that a run reads."""

    swarm: tuple[Path, ...]
    apart: tuple[str, ...]
    """Names of runs that are judged by it, and not part of it."""


@dataclass(frozen=True)
class Job:
    """A run, and whether its model is measured on held-out text afterwards."""

    config: StageConfig
    is_measured: bool
    recipe: Drawn | Best | None = None
    """Of the weights, where they are made when the run begins."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.config.out.name

    @property
    def stage(self) -> str:
        """The verb that makes it."""
        return type(self.config).__name__.removesuffix("Config").lower()


@dataclass
class Plan:
    """Runs in an order in which each finds what it needs, and the tables they end in."""

    title: str
    question: str
    jobs: list[Job] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)
    corpora: Sequence[Callable[[], None]] = ()
    """What makes the corpora that the runs read, each unless it is there."""

    def needed_by(self, job: Job) -> list[str]:
        """Names of the runs that a run reads."""
        read = {part for path in _paths_of(job) for part in path.parts}
        return [each.name for each in self.jobs if each.name in read]

    def waves(self) -> list[list[Job]]:
        """The runs in groups: those of one can be made side by side once the earlier ones are."""
        place: dict[str, int] = {}
        for job in self.jobs:
            place[job.name] = 1 + max((place[name] for name in self.needed_by(job)), default=-1)
        return [
            [job for job in self.jobs if place[job.name] == wave]
            for wave in range(max(place.values(), default=-1) + 1)
        ]


def _paths_of(job: Job) -> list[Path]:
    """What a run may read of other runs."""
    config = job.config
    read: list[str | Path | None] = [config.model.model, config.corpus.tokenizer]
    if isinstance(config, BaseConfig):
        read.append(config.weights)
    if isinstance(config, DoReMiConfig):
        read.append(config.reference)
    if isinstance(config, ProxyConfig):
        read.append(config.selection)
    if isinstance(job.recipe, Drawn):
        read.append(job.recipe.around)
    if isinstance(job.recipe, Best):
        read.extend(job.recipe.swarm)
    return [Path(each) for each in read if each is not None]


def at(baseline: str) -> Source:
    """Weights that need no run, whatever the seed."""
    return lambda seed: baseline


class Planner:
    """Makes an experiment's runs, each once.

    Args:
        config: as it was asked for; `config.proxy.mu` becomes a number.
        names: domains that the corpus holds.
        out: the experiment's directory.
    """

    def __init__(self, config: ExperimentConfig, names: Sequence[str], out: Path) -> None:
        self.config, self.names, self.out = with_mu(config, names), tuple(names), out
        self.is_mu_given = config.proxy.mu is not None
        self.jobs: dict[Path, Job] = {}

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains: those asked for, or all."""
        return self.config.corpus.domains or self.names

    def finish(self, title: str, question: str, groups: list[Json]) -> Plan:
        """All that was asked for so far, as a plan."""
        return Plan(title, question, list(self.jobs.values()), groups)

    def over_seeds(self, make: Callable[[int], Path]) -> list[str]:
        """Names of a run for every seed."""
        return [make(seed).name for seed in self.config.seeds]

    def arm(self, label: str, about: str, make: Callable[[int], Path], **more: Any) -> Json:
        """An arm of a table."""
        return {"label": label, "about": about, "runs": self.over_seeds(make), **more}

    def at_weights(self, label: str, about: str, name: str, source: Source, **more: Any) -> Json:
        """An arm of base models at the weights that `source` gives; `more` as for `base`."""
        return self.arm(label, about, self.as_base(name, source, **more))

    def uniform(self) -> Json:
        """The arm that others are compared with."""
        arm = self.at_weights("uniform", "baseline", "uniform", at("uniform"))
        return arm | {"is_baseline": True}

    def natural(self) -> Json:
        """The arm at weights by tokens."""
        return self.at_weights("natural", "by tokens", "natural", at("natural"))

    def doge(self) -> Json:
        """The arm at learned weights."""
        return self.at_weights("DoGE", "learned", "doge", self.proxy)

    def perplexities(
        self, arms: list[Json], paper: str | None, *, title: str | None = None, **more: Any
    ) -> Json:
        """The table of what base models reach on every domain."""
        return {
            "kind": "perplexity",
            "title": title or f"Base models of size {self.config.base.models[0]}",
            "paper": paper,
            "aim": list(self.domains),
            "arms": arms,
            **more,
        }

    def weights(
        self, arms: list[Json], paper: str | None, *, title: str = "Domain weights", **more: Any
    ) -> Json:
        """The table of what proxies learned."""
        return {"kind": "weights", "title": title, "paper": paper, "arms": arms, **more}

    def proxy(
        self,
        seed: int,
        name: str = "doge",
        *,
        target: tuple[str, ...] | None = None,
        domains: Sequence[str] | None = None,
        model: str | None = None,
        is_measured: bool = False,
        steps: int | None = None,
        training: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        """Learn weights; `changes` are fields of `ProxyConfig`, `training` of its training."""
        told = self.config.proxy
        model = model or told.model
        if target is None:
            target = ("mix",) if told.target_batch == "mix" else ("universal",)
        config = ProxyConfig(
            out=self._path("proxy", name, seed),
            corpus=self._corpus(domains),
            model=ModelConfig(model=model),
            training=replace(
                self._training(steps or told.steps, seed, model, eval_points=1),
                **(training or {}),
            ),
            target=target,
            sequences_per_domain=told.sequences_per_domain,
            mu=told.mu,
            score=told.score,
            domain_max_grad_norm=told.domain_max_grad_norm or None,
        )
        return self._add(replace(config, **changes), is_measured)

    def base(
        self,
        seed: int,
        name: str,
        weights: str | Path,
        *,
        model: str | None = None,
        domains: Sequence[str] | None = None,
        targets: tuple[str, ...] = (),
        stages: int = 1,
        steps: int | None = None,
        recipe: Drawn | Best | None = None,
    ) -> Path:
        """Train at weights; those of a recipe are made in the file that they name."""
        told = self.config.base
        model = model or told.models[0]
        config = BaseConfig(
            out=self._path("base", name, seed),
            corpus=self._corpus(domains),
            model=ModelConfig(model=model),
            training=self._training(steps or told.steps, seed, model, told.eval_points),
            weights=str(weights),
            stages=stages,
            targets=targets,
            batch_size=told.batch_size,
        )
        return self._add(config, True, recipe)

    def as_base(self, name: str, source: Source, **more: Any) -> Callable[[int], Path]:
        """`base` of a seed still to come, at the weights that `source` gives for it."""
        return lambda seed: self.base(seed, name, source(seed), **more)

    def finetuned(self, seed: int, source: Callable[[int], Path], target: str) -> Path:
        """Go on with a base model on the target alone."""
        told, base = self.config.base, source(seed)
        rate = told.finetune_learning_rate
        model = base / "model"
        config = BaseConfig(
            out=base.with_name(f"finetuned-{base.name.removeprefix('base-')}"),
            corpus=replace(self.config.corpus, domains=(target,), tokenizer=str(model)),
            model=ModelConfig(model=str(model), pretrained=True),
            training=replace(
                self._training(told.finetune_steps, seed, "", None),
                learning_rate=rate,
                min_learning_rate=rate / 5,
            ),
            batch_size=told.batch_size,
        )
        return self._add(config, True)

    def reference(self, seed: int, steps: int) -> Path:
        """DoReMi's first model: uniform weights, the proxy's size."""
        model = self.config.proxy.model
        return self.base(seed, f"reference-{steps}", "uniform", model=model, steps=steps)

    def doremi(self, seed: int, steps: int, variant: Literal["doremi", "doge"] = "doremi") -> Path:
        """Learn weights by excess loss, after a reference of the same size and length."""
        model = self.config.proxy.model
        suffix = "" if variant == "doremi" else f"-{variant}"
        config = DoReMiConfig(
            out=self._path("doremi", f"{steps}{suffix}", seed),
            reference=self.reference(seed, steps),
            corpus=self._corpus(None),
            model=ModelConfig(model=model),
            training=self._training(steps, seed, model, eval_points=1),
            batch_size=self.config.base.batch_size,
            variant=variant,
        )
        return self._add(config, False)

    def doremis(self) -> list[tuple[int, str, Callable[[int], Path]]]:
        """(steps, label, DoReMi of this length), for each length."""
        return [
            (steps, f"DoReMi, {steps} steps", partial(self.doremi, steps=steps))
            for steps in doremi_steps(self.config)
        ]

    def selected(self, seed: int, name: str) -> Path:
        """Learn weights from the gradients of a selection."""
        return self.proxy(seed, name, selection=self.select(seed) / f"selection-{name}.json")

    def select(self, seed: int) -> Path:
        """Measure the cancellation effect."""
        told, model = self.config.selection, self.config.proxy.model
        training = self._training(told.steps, seed, model, None)
        config = SelectConfig(
            out=self._path("select", "cancellation", seed),
            corpus=self._corpus(None),
            model=ModelConfig(model=model),
            # The first steps of a long training, whose rate has hardly begun to fall.
            training=replace(training, min_learning_rate=training.learning_rate),
            strategies=told.strategies,
            batch_size=self.config.proxy.sequences_per_domain * len(self.domains),
        )
        return self._add(config, False)

    def cost(self) -> Json:
        """What it takes to learn weights: tab:robust's last row."""
        methods = [{"label": "DoGE", "runs": [[name] for name in self.over_seeds(self.proxy)]}]
        for steps, label, make in self.doremis():
            references = self.over_seeds(partial(self.reference, steps=steps))
            pairs = zip(references, self.over_seeds(make), strict=True)
            methods.append({"label": label, "runs": [list(pair) for pair in pairs]})
        return {"kind": "cost", "title": "What learning the weights costs", "methods": methods}

    def check_known(self, what: str, names: Sequence[str]) -> None:
        """Raise ValueError where the corpus lacks a domain that is asked for."""
        named.check(what, names, self.names, self.config.corpus.data)

    def _path(self, kind: str, name: str, seed: int) -> Path:
        # A domain or a model may be called anything; a directory may not.
        plain = re.sub(r"[^\w.-]+", "-", name)
        if plain != name:
            plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        return self.out / RUNS / f"{kind}-{plain}-seed{seed}"

    def _corpus(self, domains: Sequence[str] | None) -> CorpusConfig:
        chosen = tuple(self.domains if domains is None else domains)
        return replace(self.config.corpus, domains=chosen)

    def _training(
        self, steps: int, seed: int, model: str, eval_points: int | None
    ) -> TrainingConfig:
        rates = self.config.rates
        peak, end = rates_of(self.config, model)
        return TrainingConfig(
            steps=steps,
            learning_rate=peak,
            min_learning_rate=end,
            seed=seed,
            eval_every=None if eval_points is None else max(1, steps // eval_points),
            # Points of a curve; tables are measured afterwards.
            eval_blocks=min(64, rates.eval_blocks or 64),
            dtype=rates.dtype,
            device=rates.device,
        )

    def _add(
        self, config: StageConfig, is_measured: bool, recipe: Drawn | Best | None = None
    ) -> Path:
        known = self.jobs.get(config.out)
        assert known is None or known.config == config, f"two plans for {config.out}"
        is_measured = is_measured or (known is not None and known.is_measured)
        self.jobs[config.out] = Job(config, is_measured, recipe)
        return config.out
