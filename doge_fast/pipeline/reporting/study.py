"""The runs of a report, and the tables that compare them.

The experiment.json of a search or an experiment lists its tables. Other runs are sorted into tables
here; their base models may differ only in weights and seed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from doge_fast.pipeline import records
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.runs import LEARNING, RecordedRun, open_runs
from doge_fast.pipeline.reporting.statistics import Line, Losses
from doge_fast.pipeline.wording import count_text, is_even, listed, plural

GroupKind = TypeVar("GroupKind")
_BASELINES, _GIVEN = {"uniform": "baseline", "natural": "by tokens"}, "from a file"


@dataclass(frozen=True)
class Study:
    """Runs, and the tables that they fill."""

    title: str
    question: str
    runs: Mapping[str, RecordedRun] = field(repr=False)
    """By name."""
    proxies: tuple[Proxy, ...]
    groups: tuple[records.Group, ...]
    """The tables."""
    plan: records.ExperimentRecord | None = None
    """The record of an experiment; it lists all runs, also missing ones."""
    directory: Path | None = None
    """The experiment's."""

    @cached_property
    def search(self) -> records.Json | None:
        """weights.json of a complete search."""
        if not self.of(records.TemperatureGroup) or self.directory is None:
            return None
        return records.read_weights(self.directory)

    @property
    def shown(self) -> list[RecordedRun]:
        """Runs that learn weights or train at them."""
        return [run for run in self.runs.values() if run.record.stage != "select"]

    def of(self, kind: type[GroupKind]) -> list[GroupKind]:
        """The tables of a class."""
        return [group for group in self.groups if isinstance(group, kind)]

    @cached_property
    def unmeasured(self) -> list[str]:
        """Planned runs that are missing, not complete, or lack perplexities that a table needs."""
        if self.plan is None:
            return []
        arms = [arm for group in self.of(records.PerplexityGroup) for arm in group.arms]
        needed = {name: None for arm in arms for name in arm.runs}
        # The plan of a search has diverged runs too, which its tables leave out.
        planned = needed if self.of(records.TemperatureGroup) else self.plan.runs
        blocks = self.plan.settings.eval_blocks
        return [
            name
            for name in planned
            if name not in self.runs
            or not self.runs[name].is_complete
            or (name in needed and not records.is_measured(self.runs[name].path, blocks))
        ]

    def runs_of(self, names: Iterable[str]) -> list[RecordedRun]:
        """The existing runs with these names."""
        return [self.runs[name] for name in names if name in self.runs]

    def losses(self, arm: records.ArmRecord) -> Losses:
        """{seed: held-out losses at the end} of an arm's models that are measured."""
        runs = [run for run in self.runs_of(arm.runs) if run.name not in self.unmeasured]
        return {
            run.config.training.seed: losses for run in runs if (losses := run.losses()) is not None
        }

    def lines(self, group: records.PerplexityGroup) -> list[Line]:
        """One line per domain and, for several domains, their average.

        They have the measured arms only, on the seeds that all of these share or, without such, on
        each arm's seeds. Domains that some arm was not measured on are left out.
        """
        arms = {arm.label: losses for arm in group.arms if (losses := self.losses(arm))}
        common = set.intersection(*map(set, arms.values())) if arms else set()
        for label, losses in arms.items():
            arms[label] = {s: each for s, each in losses.items() if s in (common or losses)}
        measured = [each for losses in arms.values() for each in losses.values()]
        names = [name for name in group.aim if measured and all(name in each for each in measured)]
        lines = [Line(name, arms, {name: 1}) for name in names]
        if len(names) < 2:
            return lines
        aim = self._aim(names)
        label = "average" if is_even(aim) else "weighted average"
        return [*lines, Line(label, arms, aim, is_total=True)]

    def _aim(self, names: Collection[str]) -> dict[str, float]:
        """{domain: its weight in the average}: a search's objective, or the target of the weights.

        Equal where the runs were made for no such target, or for several.
        """
        if searched := self.of(records.TemperatureGroup):
            return {name: searched[0].aim.get(name, 1) for name in names}
        aims = [records.target_shares(run.weights or {}, names) for run in self.shown]
        known = [aim for aim in aims if aim]
        is_one = known and all(aim == known[0] for aim in known)
        return known[0] if is_one else dict.fromkeys(names, 1.0)


def open_study(runs: Sequence[Path]) -> Study:
    """Read an experiment's directory, or run directories.

    Raises:
        UserError: no directory is named, one is no run and holds none, two runs share a name, no
            run learns weights or trains at them, base models differ in more than weights and seed,
            or a record has the wrong form.
    """
    plan = directory = None
    if len(runs) == 1 and (path := Path(runs[0]) / records.EXPERIMENT).exists():
        directory = path.parent
        runs = [directory / records.RUNS]
        if not any(runs[0].glob("*/config.json")):
            raise UserError(f"No run of the experiment in {directory} has begun.")
        plan = records.load(directory, records.ExperimentRecord)
        if plan.settings.proxy and _is_searched(Path(plan.settings.proxy), directory):
            runs = [*runs, Path(plan.settings.proxy)]
    all_runs = open_runs(runs)
    if all(run.record.stage == "select" for run in all_runs):
        raise UserError(
            "A report needs a run that learns weights or trains at them; got runs of select alone."
        )
    opened = {run.name: run for run in all_runs}
    if twice := [run.path for run in all_runs if opened[run.name] is not run]:
        raise UserError(
            f"Runs of one report need names of their own; {twice[0]} shares its name. Rename it."
        )
    # {settings: runs that differ only in seed and weights}.
    alike: dict[str, list[RecordedRun]] = {}
    for run in all_runs:
        alike.setdefault(run.settings(), []).append(run)
    proxies = _proxies_of(alike.values())
    if plan is not None:
        return Study(plan.title, plan.question, opened, proxies, plan.groups, plan, directory)
    bases = _comparable(alike.values())
    if len(proxies) == 1:
        proxies = (Proxy("learned weights", proxies[0].runs),)
    number = plural(sum(len(proxy.runs) for proxy in proxies), "proxy run")
    question = f"{number}, {plural(len(bases), 'base model')}"
    return Study("Domain weights", question, opened, proxies, tuple(_groups(bases, proxies)))


def _is_searched(proxy: Path, search: Path) -> bool:
    """Whether a search's proxy still exists, with the weights that the search used."""
    if not all((proxy / name).exists() for name in (records.CONFIG, records.WEIGHTS)):
        return False
    now, then = (
        records.weights_by_name(records.read_weights(each))
        for each in (proxy, search / records.MIXTURES / "1.json")
    )
    return records.is_same_mixture(now, then)


def _proxies_of(alike: Iterable[list[RecordedRun]]) -> tuple[Proxy, ...]:
    """Runs that learned weights, grouped over seeds."""
    groups = [group for group in alike if group[0].record.stage in LEARNING]
    for group in groups:
        _refuse_one_seed(group)
    # Weights for all domains come before those for a target, DoReMi's last.
    groups.sort(key=lambda group: (group[0].record.stage == "doremi", bool(group[0].targets)))
    labels = [group[0].stem for group in groups]
    return tuple(
        Proxy(label if labels.count(label) == 1 else group[0].name, tuple(group))
        for label, group in zip(labels, groups, strict=True)
    )


def _groups(bases: Sequence[RecordedRun], proxies: Sequence[Proxy]) -> Iterator[records.Group]:
    """The tables of runs that belong to no experiment."""
    arms = list(_arms(bases, proxies))
    learned = [proxy.arm for proxy in proxies if proxy.weights]
    if given := [*learned, *(arm for arm in arms if arm.about == _GIVEN)]:
        yield records.WeightsGroup("Domain weights", tuple(given))
    if bases:
        first = bases[0]
        about = f"{first.config.model.model} models, {count_text(first.tokens)} tokens each"
        focus = next((arm.label for arm in arms if arm.label not in _BASELINES), "natural")
        title = "Base models"
        if first.targets:
            target = f"{title} on {listed(first.targets)}"
            yield records.PerplexityGroup(target, tuple(arms), first.targets, about, focus)
            title = f"{title} on the training domains"
        yield records.PerplexityGroup(title, tuple(arms), first.domains, about, focus)
    methods = [
        records.Method(proxy.label, tuple(map(_with_reference, proxy.runs))) for proxy in proxies
    ]
    trained = [
        records.Method("a base model", tuple((name,) for name in arm.runs)) for arm in arms[:1]
    ]
    yield records.CostGroup("Cost", (*methods, *trained))


def _with_reference(run: RecordedRun) -> tuple[str, ...]:
    """Names of a DoReMi run and its reference, or of a proxy alone."""
    return tuple(filter(None, (Path(run.config.reference).name, run.name)))


def _arms(bases: Sequence[RecordedRun], proxies: Sequence[Proxy]) -> Iterator[records.ArmRecord]:
    """Base models by their weights: baselines, learned weights, weights of other files."""
    about = _BASELINES | {proxy.label: proxy.arm.about for proxy in proxies}
    # By source and, for a file, which may have changed in between, by the weights it had.
    by_source: dict[tuple[str, str], list[RecordedRun]] = {(label, ""): [] for label in about}
    for run in bases:
        source = _source(run, proxies)
        held = "" if source in about or run.weights is None else str(run.weights["domains"])
        by_source.setdefault((source, held), []).append(run)
    sources = [source for source, _ in by_source]
    for (source, _), runs in by_source.items():
        if runs:
            _refuse_one_seed(runs)
            # Weights that were typed are too long for a label.
            is_label = sources.count(source) == 1 and not records.is_typed(source)
            label = source if is_label else f"weights of {runs[0].name}"
            names = tuple(run.name for run in runs)
            yield records.ArmRecord(label, about.get(label, _GIVEN), names, label == "uniform")


def _refuse_one_seed(runs: Sequence[RecordedRun]) -> None:
    """Raise UserError if two runs of one arm have the same seed."""
    by_seed: dict[int, RecordedRun] = {}
    for run in runs:
        other = by_seed.setdefault(run.config.training.seed, run)
        if other is not run:
            raise UserError(
                f"{other.name} and {run.name} are of one arm and have one seed, "
                f"{run.config.training.seed}. Name one of them, or train one with another --seed."
            )


def _comparable(alike: Collection[list[RecordedRun]]) -> list[RecordedRun]:
    """Base models that differ only in weights and seed, without DoReMi's references."""
    references = {Path(run.config.reference).name for group in alike for run in group}
    bases = [
        group
        for group in alike
        if group[0].record.stage == "base" and not {run.name for run in group} <= references
    ]
    if len(bases) > 1:
        raise UserError(
            "Base models of one report share corpus, model, settings and number of tokens; "
            f"{bases[0][0].name} and {bases[1][0].name} do not. Name the runs of one comparison."
        )
    return bases[0] if bases else []


def _source(run: RecordedRun, proxies: Sequence[Proxy]) -> str:
    """Label of the source of a base run's weights: a keyword, a proxy run, or a file's path."""
    weights = Path(run.config.weights)
    folder = (weights.parent if weights.name == records.WEIGHTS else weights).resolve()
    # If runs have been moved, a proxy is recognised by its name and its weights.
    for proxy in proxies:
        for each in proxy.runs:
            is_named = each.path == folder or each.name == folder.name
            if is_named and _weights_agree(run, each):
                return proxy.label
    return run.config.weights


def _weights_agree(base: RecordedRun, proxy: RecordedRun) -> bool:
    """Whether a base model was trained at a proxy's weights, as far as both are known."""
    if base.weights is None or proxy.weights is None or base.weights.get("stages"):
        return True
    used, learned = (records.weights_by_name(run.weights or {}) for run in (base, proxy))
    return used == learned
