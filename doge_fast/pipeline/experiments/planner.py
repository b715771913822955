"""The runs of an experiment, each made once: what every arm of every table asks for.

Runs of one seed start from the same numbers and see their data in the same order, whatever the
arm, so arms are compared seed by seed.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline import named
from doge_fast.pipeline.config import (
    BaseConfig,
    DoReMiConfig,
    ExperimentConfig,
    ModelConfig,
    ProxyConfig,
    SelectConfig,
    StageConfig,
    TrainingConfig,
)
from doge_fast.pipeline.experiments.presets import doremi_steps, rates_of, with_mu
from doge_fast.pipeline.records.shapes import ArmRecord, CostGroup, Group, Method, PerplexityGroup

Make = Callable[[int], Path]
"""Puts the run of a seed in the plan, where it is not there, and says where it will be."""
Source = str | Path | Make
"""The weights of a base run: a baseline or a file, or the run that is to learn them."""
RUNS = "runs"


@dataclass(frozen=True)
class Job:
    """A run, and whether its model is measured on held-out text afterwards."""

    config: StageConfig
    is_measured: bool

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.config.out.name

    @property
    def stage(self) -> str:
        """The verb that makes it."""
        return _verb_of(type(self.config))


def _verb_of(config: type) -> str:
    return config.__name__.removesuffix("Config").lower()


@dataclass(frozen=True)
class Plan:
    """Runs in an order in which each finds what it needs, and the tables they end in."""

    title: str
    question: str
    config: ExperimentConfig
    """What was asked for, mu a number."""
    jobs: list[Job]
    groups: list[Group]

    def needed_by(self, job: Job) -> list[str]:
        """Names of the runs that a run reads."""
        config = job.config
        read: list[Any] = [config.model.model, config.corpus.tokenizer]
        read += [getattr(config, each, None) for each in ("weights", "reference", "selection")]
        parts = {part for path in read if path is not None for part in Path(path).parts}
        return [each.name for each in self.jobs if each.name in parts]

    def waves(self) -> list[list[Job]]:
        """The runs in groups: those of one can be made side by side once the earlier ones are."""
        place: dict[str, int] = {}
        waves: dict[int, list[Job]] = {}
        for job in self.jobs:
            wave = 1 + max((place[name] for name in self.needed_by(job)), default=-1)
            place[job.name] = wave
            waves.setdefault(wave, []).append(job)
        return [waves[wave] for wave in sorted(waves)]


class Planner:
    """Makes an experiment's runs, each once.

    Args:
        config: as it was asked for; `config.proxy.mu` becomes a number.
        names: domains that the corpus holds.
        out: the experiment's directory.
    """

    def __init__(self, config: ExperimentConfig, names: Sequence[str], out: Path) -> None:
        self.config = with_mu(config, names)
        self.names, self.out = tuple(names), out
        self.jobs: dict[Path, Job] = {}

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains: those asked for, or all."""
        return self.config.corpus.domains or self.names

    def plan(self, title: str, question: str, *groups: Group) -> Plan:
        """All that was asked for so far."""
        return Plan(title, question, self.config, list(self.jobs.values()), list(groups))

    def over_seeds(self, make: Make) -> tuple[str, ...]:
        """Names of a run for every seed."""
        return tuple(make(seed).name for seed in self.config.seeds)

    def arm(self, label: str, about: str, make: Make, **more: Any) -> ArmRecord:
        """An arm of a table."""
        return ArmRecord(label, about, self.over_seeds(make), **more)

    def uniform(self, name: str = "uniform", **more: Any) -> ArmRecord:
        """The arm that others are compared with; `more` as for `base`."""
        base = self.base(name, "uniform", **more)
        return self.arm("uniform", "baseline", base, is_baseline=True)

    def natural(self, name: str = "natural", **more: Any) -> ArmRecord:
        """The arm at weights by tokens."""
        return self.arm("natural", "by tokens", self.base(name, "natural", **more))

    def doge(self, name: str = "doge", **more: Any) -> ArmRecord:
        """The arm at learned weights."""
        return self.arm("DoGE", "learned", self.base(name, self.proxy(), **more))

    def perplexities(
        self, arms: Sequence[ArmRecord], title: str = "", **more: Any
    ) -> PerplexityGroup:
        """The table of what base models reach on every domain."""
        title = title or f"Base models of size {self.config.base.models[0]}"
        return PerplexityGroup(title, tuple(arms), self.domains, **more)

    def proxy(self, name: str = "doge", **more: Any) -> Make:
        """Learn weights; `more` are fields of `ProxyConfig`, or as for `_add`."""
        told = self.config.proxy
        own: dict[str, Any] = {
            "model": told.model,
            "steps": told.steps,
            "eval_points": 1,
            "sequences_per_domain": told.sequences_per_domain,
            "mu": told.mu,
            "score": told.score,
            "domain_max_grad_norm": told.domain_max_grad_norm or None,
        }
        return partial(self._add, ProxyConfig, name, **(own | more))

    def base(self, name: str, source: Source, **more: Any) -> Make:
        """Train at weights; `more` are fields of `BaseConfig`, or as for `_add`."""
        told = self.config.base
        own: dict[str, Any] = {
            "model": told.models[0],
            "steps": told.steps,
            "eval_points": told.eval_points,
            "is_measured": True,
            "weights": lambda seed: str(source(seed) if callable(source) else source),
            "batch_size": told.batch_size,
        }
        return partial(self._add, BaseConfig, name, **(own | more))

    def finetuned(self, source: Make, target: str) -> Make:
        """Go on with a base model on the target alone."""
        told = self.config.base

        def make(seed: int) -> Path:
            base = source(seed)
            model = str(base / "model")
            return self._add(
                BaseConfig,
                "",
                seed,
                out=base.with_name(f"finetuned-{base.name.removeprefix('base-')}"),
                corpus=replace(self.config.corpus, domains=(target,), tokenizer=model),
                model=model,
                is_pretrained=True,
                steps=told.finetune_steps,
                rates=(told.finetune_learning_rate, told.finetune_learning_rate / 5),
                is_measured=True,
                batch_size=told.batch_size,
            )

        return make

    def reference(self, steps: int) -> Make:
        """DoReMi's first model: uniform weights, the proxy's size."""
        model = self.config.proxy.model
        return self.base(f"reference-{steps}", "uniform", model=model, steps=steps)

    def doremi(self, steps: int, variant: Literal["doremi", "doge"] = "doremi") -> Make:
        """Learn weights by excess loss, after a reference of the same size and length."""
        return partial(
            self._add,
            DoReMiConfig,
            f"{steps}" if variant == "doremi" else f"{steps}-{variant}",
            reference=self.reference(steps),
            model=self.config.proxy.model,
            steps=steps,
            eval_points=1,
            batch_size=self.config.base.batch_size,
            variant=variant,
        )

    def doremis(self) -> list[tuple[int, str, Make]]:
        """(steps, label, DoReMi of this length), for each length."""
        lengths = doremi_steps(self.config)
        return [(steps, f"DoReMi, {steps} steps", self.doremi(steps)) for steps in lengths]

    def selected(self, name: str) -> Make:
        """Learn weights from the gradients of a selection."""
        told, proxy = self.config.selection, self.config.proxy
        peak, _ = rates_of(self.config, proxy.model)
        select = partial(
            self._add,
            SelectConfig,
            "cancellation",
            model=proxy.model,
            steps=told.steps,
            # The first steps of a long training, whose rate has hardly begun to fall.
            rates=(peak, peak),
            strategies=told.strategies,
            batch_size=proxy.sequences_per_domain * len(self.domains),
        )
        return self.proxy(name, selection=lambda seed: select(seed) / f"selection-{name}.json")

    def cost(self) -> CostGroup:
        """What it takes to learn weights: tab:robust's last row."""
        methods = [Method("DoGE", tuple((name,) for name in self.over_seeds(self.proxy())))]
        for steps, label, make in self.doremis():
            references = self.over_seeds(self.reference(steps))
            pairs = zip(references, self.over_seeds(make), strict=True)
            methods.append(Method(label, tuple(pairs)))
        return CostGroup("What learning the weights costs", tuple(methods))

    def check_known(self, what: str, names: Sequence[str]) -> None:
        """Raise ValueError where the corpus lacks a domain that is asked for."""
        named.check(what, names, self.names, self.config.corpus.data)

    def _add(
        self,
        kind: type[StageConfig],
        name: str,
        seed: int,
        *,
        model: str,
        steps: int,
        domains: Sequence[str] | None = None,
        rates: tuple[float, float] | None = None,
        eval_points: int | None = None,
        is_pretrained: bool = False,
        is_measured: bool = False,
        **fields: Any,
    ) -> Path:
        """A run in the plan; `fields` are those of its configuration that are not made here, or
        what makes them for a seed."""
        told = self.config.rates
        peak, end = rates or rates_of(self.config, model)
        training = TrainingConfig(
            steps=steps,
            learning_rate=peak,
            min_learning_rate=end,
            seed=seed,
            eval_every=None if eval_points is None else max(1, steps // eval_points),
            # Points of a curve; tables are measured afterwards.
            eval_blocks=min(64, told.eval_blocks or 64),
            dtype=told.dtype,
            device=told.device,
        )
        made: dict[str, Any] = {
            "out": self._path(_verb_of(kind), name, seed),
            "corpus": replace(self.config.corpus, domains=tuple(domains or self.domains)),
            "model": ModelConfig(model=model, pretrained=is_pretrained),
            "training": training,
        }
        made |= {key: each(seed) if callable(each) else each for key, each in fields.items()}
        config = kind(**made)
        known = self.jobs.get(config.out)
        assert known is None or known.config == config, f"two plans for {config.out}"
        is_measured = is_measured or (known is not None and known.is_measured)
        self.jobs[config.out] = Job(config, is_measured)
        return config.out

    def _path(self, verb: str, name: str, seed: int) -> Path:
        # A domain or a model may be called anything; a directory may not.
        plain = re.sub(r"[^\w.-]+", "-", name)
        if plain != name:
            plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        return self.out / RUNS / f"{verb}-{plain}-seed{seed}"
