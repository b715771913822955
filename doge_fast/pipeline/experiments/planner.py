"""The runs of an experiment, each made once: what every arm of every table asks for.

Runs of one seed start from the same numbers and see their data in the same order, whatever the
arm, so arms are compared seed by seed.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from doge_fast.pipeline.experiments.jobs import Job
from doge_fast.pipeline.experiments.presets import doremi_steps, rates_of
from doge_fast.pipeline.records.shapes import (
    RUNS,
    ArmRecord,
    CostGroup,
    ExperimentRecord,
    ExperimentSettings,
    Group,
    Method,
    PerplexityGroup,
)
from doge_fast.weights.weights_file import plain

Runs = dict[int, Path]
"""The runs of an arm: {seed: its directory}."""


@dataclass(frozen=True)
class Plan:
    """Runs in an order in which each finds what it needs, and the tables they end in."""

    record: ExperimentRecord
    """What was asked for, and the tables."""
    jobs: list[Job]

    def needed_by(self, job: Job) -> list[str]:
        """Names of the runs that a run reads."""
        config = job.config
        read: list[Any] = [config.model.model, config.corpus.tokenizer]
        read += [getattr(config, each, None) for each in ("weights", "reference", "selection")]
        paths = [Path(path) for path in read if path is not None]
        return [
            each.name
            for each in self.jobs
            if any(each.config.out in (path, *path.parents) for path in paths)
        ]

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
    """Puts runs of every seed into an experiment's plan, each once.

    Args:
        config: as it was asked for.
        names: domains that the corpus holds.
        out: the experiment's directory.
    """

    def __init__(self, config: ExperimentConfig, names: Sequence[str], out: Path) -> None:
        self.config = config
        self.names, self.out = tuple(names), out
        self.domains = config.corpus.domains or self.names
        self.jobs: dict[Path, Job] = {}

    def plan(self, title: str, question: str, *groups: Group) -> Plan:
        """All that was asked for so far."""
        config, jobs = self.config, list(self.jobs.values())
        record = ExperimentRecord(
            name=config.name,
            preset=config.preset,
            title=title,
            question=question,
            settings=ExperimentSettings(config.seeds, config.rates.eval_blocks),
            data=config.corpus.data,
            runs=tuple(job.name for job in jobs),
            groups=groups,
            config=plain(config),
        )
        return Plan(record, jobs)

    def arm(self, label: str, about: str, runs: Runs, **more: Any) -> ArmRecord:
        """An arm of a table."""
        return ArmRecord(label, about, _names(runs), **more)

    def uniform(self, name: str = "uniform", **more: Any) -> ArmRecord:
        """The arm that others are compared with; `more` as for `base`."""
        base = self.base(name, "uniform", **more)
        return self.arm("uniform", "baseline", base, is_baseline=True)

    def doge(self, name: str = "doge", **more: Any) -> ArmRecord:
        """The arm at learned weights."""
        return self.arm("DoGE", "learned", self.base(name, self.proxy(), **more))

    def perplexities(
        self, arms: Sequence[ArmRecord], title: str = "", **more: Any
    ) -> PerplexityGroup:
        """The table of what base models reach on every domain."""
        title = title or f"Base models of size {self.config.base.models[0]}"
        return PerplexityGroup(title, tuple(arms), self.domains, **more)

    def proxy(self, name: str = "doge", **more: Any) -> Runs:
        """Learn weights; `more` are fields of `ProxyConfig`, or as for `_add`."""
        told = self.config.proxy
        own: dict[str, Any] = {
            "model": told.model,
            "steps": told.steps,
            "sequences_per_domain": told.sequences_per_domain,
            "mu": told.mu,
            "score": told.score,
            "domain_max_grad_norm": told.domain_max_grad_norm or None,
        }
        return self._add(ProxyConfig, name, **(own | more))

    def base(self, name: str, source: str | Runs, **more: Any) -> Runs:
        """Train at a baseline's weights, or at those that runs have learned; `more` as above."""
        told = self.config.base
        weights: Any = source
        if not isinstance(source, str):
            weights = {seed: str(run) for seed, run in source.items()}
        own: dict[str, Any] = {
            "model": told.models[0],
            "steps": told.steps,
            "is_measured": True,
            "weights": weights,
            "batch_size": told.batch_size,
        }
        return self._add(BaseConfig, name, **(own | more))

    def finetuned(self, bases: Runs, target: str) -> Runs:
        """Go on with base models on the target alone."""
        told = self.config.base
        models = {seed: str(base / "model") for seed, base in bases.items()}
        outs, corpora = {}, {}
        for seed, base in bases.items():
            outs[seed] = base.with_name(f"finetuned-{base.name.removeprefix('base-')}")
            corpora[seed] = replace(self.config.corpus, domains=(target,), tokenizer=models[seed])
        return self._add(
            BaseConfig,
            "",
            out=outs,
            corpus=corpora,
            model=models,
            is_pretrained=True,
            steps=told.finetune_steps,
            rates=(told.finetune_learning_rate, told.finetune_learning_rate / 5),
            is_measured=True,
            batch_size=told.batch_size,
        )

    def reference(self, steps: int) -> Runs:
        """DoReMi's first model: uniform weights, the proxy's size."""
        model = self.config.proxy.model
        return self.base(f"reference-{steps}", "uniform", model=model, steps=steps)

    def doremi(self, steps: int, variant: Literal["doremi", "doge"] = "doremi") -> Runs:
        """Learn weights by excess loss, after a reference of the same size and length."""
        return self._add(
            DoReMiConfig,
            f"{steps}" if variant == "doremi" else f"{steps}-{variant}",
            reference=self.reference(steps),
            model=self.config.proxy.model,
            steps=steps,
            batch_size=self.config.base.batch_size,
            variant=variant,
        )

    def doremis(self) -> list[tuple[int, str, Runs]]:
        """(steps, label, DoReMi of this length), for each length."""
        lengths = doremi_steps(self.config)
        return [(steps, f"DoReMi, {steps} steps", self.doremi(steps)) for steps in lengths]

    def selected(self, name: str) -> Runs:
        """Learn weights from the gradients of a selection."""
        told, proxy = self.config.selection, self.config.proxy
        peak, _ = rates_of(self.config, proxy.model)
        scored = self._add(
            SelectConfig,
            "cancellation",
            model=proxy.model,
            steps=told.steps,
            # The first steps of a long training, whose rate has hardly begun to fall.
            rates=(peak, peak),
            strategies=told.strategies,
            batch_size=proxy.sequences_per_domain * len(self.domains),
        )
        files = {seed: run / f"selection-{name}.json" for seed, run in scored.items()}
        return self.proxy(name, selection=files)

    def cost(self) -> CostGroup:
        """What it takes to learn weights: tab:robust's last row."""
        methods = [Method("DoGE", tuple((name,) for name in _names(self.proxy())))]
        for steps, label, runs in self.doremis():
            pairs = zip(_names(self.reference(steps)), _names(runs), strict=True)
            methods.append(Method(label, tuple(pairs)))
        return CostGroup("What learning the weights costs", tuple(methods))

    def check_known(self, what: str, names: Sequence[str]) -> None:
        """Raise ValueError where the corpus lacks a domain that is asked for."""
        named.check(what, names, self.names, self.config.corpus.data)

    def _add(self, kind: type[StageConfig], name: str, **told: Any) -> Runs:
        """Runs of a stage in the plan; what is {seed: ...} differs by seed. See `_job`."""
        runs: Runs = {}
        for seed in self.config.seeds:
            own = {
                key: each[seed] if isinstance(each, dict) else each for key, each in told.items()
            }
            job = self._job(kind, name, seed, **own)
            known = self.jobs.setdefault(job.config.out, job)
            assert known.config == job.config, f"two plans for {job.config.out}"
            if job.is_measured:
                self.jobs[job.config.out] = job
            runs[seed] = job.config.out
        return runs

    def _job(
        self,
        kind: type[StageConfig],
        name: str,
        seed: int,
        *,
        model: str,
        steps: int,
        domains: Sequence[str] | None = None,
        rates: tuple[float, float] | None = None,
        is_pretrained: bool = False,
        is_measured: bool = False,
        **fields: Any,
    ) -> Job:
        """`fields` are those of the stage's configuration that are not made here."""
        told = self.config.rates
        peak, end = rates or rates_of(self.config, model)
        training = TrainingConfig(
            steps=steps,
            learning_rate=peak,
            min_learning_rate=end,
            seed=seed,
            # Whether it is lost; tables are measured afterwards.
            eval_blocks=min(64, told.eval_blocks or 64),
            dtype=told.dtype,
            device=told.device,
        )
        made: dict[str, Any] = {
            "out": self._path(kind.stage, name, seed),
            "corpus": replace(self.config.corpus, domains=tuple(domains or self.domains)),
            "model": ModelConfig(model=model, pretrained=is_pretrained),
            "training": training,
        }
        return Job(kind(**(made | fields)), is_measured, told.eval_blocks)

    def _path(self, stage: str, name: str, seed: int) -> Path:
        # A domain or a model may be called anything; a directory may not.
        plain = re.sub(r"[^\w.-]+", "-", name)
        if plain != name:
            plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        return self.out / RUNS / f"{stage}-{plain}-seed{seed}"


def _names(runs: Runs) -> tuple[str, ...]:
    return tuple(run.name for run in runs.values())
