"""What a report is made of: runs, and the tables that they are for.

An experiment has planned its tables. Other runs are put into tables of the same classes: their base
models are one comparison, and differ in nothing but weights and seed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from doge_fast.pipeline import records
from doge_fast.pipeline.records.shapes import (
    ArmRecord,
    CostGroup,
    ExperimentRecord,
    Group,
    Method,
    PerplexityGroup,
    TargetsGroup,
    WeightsGroup,
)
from doge_fast.pipeline.reporting.proxies import Proxy, known_weights, mean_weights
from doge_fast.pipeline.reporting.runs import LEARNING, RecordedRun, open_runs
from doge_fast.pipeline.reporting.statistics import Arm, Line, lines_of
from doge_fast.pipeline.reporting.wording import Stat, count_text, listed, plural

Kind = TypeVar("Kind")
RUNS = "runs"
_BASELINES = {"uniform": "baseline", "natural": "by tokens"}


@dataclass(frozen=True)
class Study:
    """What a report is made of."""

    title: str
    question: str
    runs: Mapping[str, RecordedRun] = field(repr=False)
    """By their names."""
    proxies: tuple[Proxy, ...]
    groups: tuple[Group, ...]
    """What is set against what."""
    plan: ExperimentRecord | None = None
    """Of an experiment, which knows which runs are missing."""

    @property
    def shown(self) -> list[RecordedRun]:
        """Runs that learn weights or train at them."""
        return [run for run in self.runs.values() if run.record.stage != "select"]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The tables of a class."""
        return [group for group in self.groups if isinstance(group, kind)]

    @cached_property
    def unmeasured(self) -> list[str]:
        """Runs of the plan whose end, or whose perplexities, are not known."""
        if self.plan is None:
            return []
        arms = [arm for group in self.of(PerplexityGroup) for arm in group.arms]
        arms += [arm for group in self.of(TargetsGroup) for row in group.rows for arm in row.arms]
        needed = {name for arm in arms for name in arm.runs}
        blocks = self.plan.settings.eval_blocks
        return [
            name
            for name in self.plan.runs
            if name not in self.runs
            or not self.runs[name].is_complete
            or (name in needed and not records.is_measured(self.runs[name].path, blocks))
        ]

    def runs_of(self, names: Iterable[str]) -> list[RecordedRun]:
        """Those that are there."""
        return [self.runs[name] for name in names if name in self.runs]

    def arm(self, arm: ArmRecord) -> Arm:
        """An arm with its losses at the end."""
        losses = {
            run.seed: found
            for run in self.runs_of(arm.runs)
            if run.name not in self.unmeasured and (found := run.losses()) is not None
        }
        return Arm(arm.label, arm.about, losses, arm.is_baseline, arm.baseline)

    def lines(self, group: PerplexityGroup | TargetsGroup) -> list[Line]:
        """The lines of a table of perplexities, as far as they are known."""
        if isinstance(group, PerplexityGroup):
            return lines_of(group.aim, [self.arm(arm) for arm in group.arms])
        return [
            Line(row.target, {arm.label: self.arm(arm) for arm in row.arms}, [row.target])
            for row in group.rows
        ]

    def weights(self, arm: ArmRecord) -> dict[str, Stat]:
        """{domain: weight} of an arm over its seeds."""
        return mean_weights(known_weights(self.runs_of(arm.runs)))


def open_study(runs: Sequence[Path]) -> Study:
    """Read an experiment's directory, or run directories.

    Raises:
        ValueError: none is named, one is not a run and holds none, two have one name, none learns
            weights or trains at them, base models differ in more than weights and seed, or a
            record is not what it should be.
    """
    is_experiment = len(runs) == 1 and (Path(runs[0]) / records.EXPERIMENT).exists()
    path = Path(runs[0]) if is_experiment else None
    if path is not None and not any((path / RUNS).glob("*/config.json")):
        raise ValueError(f"No run of the experiment in {path} has begun.")
    plan = None if path is None else records.load(path, ExperimentRecord)
    found = open_runs(runs if path is None else [path / RUNS])
    if plan is not None and plan.settings.proxy and Path(plan.settings.proxy).is_dir():
        found += open_runs([Path(plan.settings.proxy)])
    opened = {run.name: run for run in found}
    if all(run.record.stage == "select" for run in found):
        raise ValueError(
            "A report needs a run that learns weights or trains at them; got runs of select alone."
        )
    if len(opened) < len(found):
        names = [run.name for run in found]
        twice = next(run.path for run in found if names.count(run.name) > 1)
        raise ValueError(
            f"Runs of one report need names of their own; {twice} shares its name. Rename it."
        )
    proxies = _proxies_of(found)
    if plan is not None:
        return Study(plan.title, plan.question, opened, proxies, plan.groups, plan)
    bases = _comparable(found)
    if len(proxies) == 1:
        proxies = (Proxy("learned weights", proxies[0].runs),)
    number = plural(sum(len(proxy.runs) for proxy in proxies), "proxy run")
    question = f"{number}, {plural(len(bases), 'base model')}"
    return Study("Domain weights", question, opened, proxies, tuple(_groups(bases, proxies)))


def _proxies_of(runs: Iterable[RecordedRun]) -> tuple[Proxy, ...]:
    """Runs that learned weights, the seeds of each together."""
    groups = _alike(run for run in runs if run.record.stage in LEARNING)
    # What is asked of all domains comes before what is asked of one, the baseline after both.
    groups.sort(key=lambda group: (group[0].record.stage == "doremi", bool(group[0].targets)))
    labels = [group[0].stem for group in groups]
    return tuple(
        Proxy(label if labels.count(label) == 1 else group[0].name, tuple(group))
        for label, group in zip(labels, groups, strict=True)
    )


def _alike(runs: Iterable[RecordedRun]) -> list[list[RecordedRun]]:
    """Such as differ in nothing but their seed, or in their weights."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(run.settings(), []).append(run)
    return list(groups.values())


# The tables of runs that no experiment has planned.


def _groups(bases: Sequence[RecordedRun], proxies: Sequence[Proxy]) -> Iterator[Group]:
    learned = {
        proxy.label: ArmRecord(proxy.label, proxy.about, tuple(run.name for run in proxy.runs))
        for proxy in proxies
        if proxy.weights
    }
    sources = {run.name: _source(run, proxies) for run in bases}
    # A baseline before what was learned, and that before weights of other files.
    labels = dict.fromkeys((*_BASELINES, *learned, *sources.values()))
    arms = []
    for label in labels:
        names = tuple(name for name, source in sources.items() if source == label)
        about = learned[label].about if label in learned else _BASELINES.get(label, "from a file")
        if names:
            arms.append(ArmRecord(label, about, names, label == "uniform"))
    given = [arm for arm in arms if arm.label not in learned and arm.label not in _BASELINES]
    if learned or given:
        yield WeightsGroup("Domain weights", (*learned.values(), *given))
    if bases:
        first = bases[0]
        about = f"{first.asked.model.model} models, {count_text(first.tokens)} tokens each"
        focus = next((arm.label for arm in arms if arm.label not in _BASELINES), "natural")
        told = (tuple(arms), first.targets, about, focus)
        if first.targets:
            yield PerplexityGroup(f"Base models on {listed(first.targets)}", *told)
        told = (tuple(arms), first.domains, about, focus)
        yield PerplexityGroup("Base models", *told)
    methods = [Method(proxy.label, _takes(proxy)) for proxy in proxies]
    trained = [Method("a base model", tuple((name,) for name in arm.runs)) for arm in arms[:1]]
    yield CostGroup("Cost", (*methods, *trained))


def _comparable(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Base models that differ in weights and seed alone; references of DoReMi beside."""
    references = {Path(run.asked.reference).name for run in runs if run.asked.reference}
    alike = [
        group
        for group in _alike(run for run in runs if run.record.stage == "base")
        if not {run.name for run in group} <= references
    ]
    if len(alike) > 1:
        raise ValueError(
            "Base models of one report share corpus, model, settings and number of tokens; "
            f"{alike[0][0].name} and {alike[1][0].name} do not. Name the runs of one comparison."
        )
    return [run for group in alike for run in group]


def _takes(proxy: Proxy) -> tuple[tuple[str, ...], ...]:
    """Names of DoReMi's two runs for every seed, or of a proxy's one."""
    names = ((Path(run.asked.reference).name, run.name) for run in proxy.runs)
    return tuple(pair[not pair[0] :] for pair in names)


def _source(run: RecordedRun, proxies: Sequence[Proxy]) -> str:
    """Label of what a base run took its weights from: a word, a proxy run, or a file's path."""
    weights = Path(run.asked.weights)
    folder = (weights.parent if weights.name == records.WEIGHTS else weights).resolve()
    # Where runs have been moved, the one of that name.
    for proxy in proxies:
        if any(each.path == folder or each.name == folder.name for each in proxy.runs):
            return proxy.label
    return run.asked.weights
