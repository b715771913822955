"""The runs of a report: the proxies, and the tables that compare runs.

The experiment.json of a search or an experiment lists its tables. Other runs are sorted into tables
here; their base models may differ only in weights and seed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.config import MIX, UNIVERSAL
from doge_fast.pipeline.config.stages import target_of
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records.movement import Floats, Movement, movement_of
from doge_fast.pipeline.reporting.runs import LEARNING, RecordedRun, open_runs
from doge_fast.pipeline.reporting.statistics import Line, Losses, Stat, share_text, stat_of
from doge_fast.pipeline.tables import as_ascii
from doge_fast.pipeline.wording import count_text, listed, plural, wrapped
from doge_fast.weights import diagnosis
from doge_fast.weights.projection import effective_domains

GroupKind = TypeVar("GroupKind")
_BASELINES, _GIVEN = {"uniform": "baseline", "natural": "by tokens"}, "from a file"

# Weights have hardly moved if each is within this share of the uniform weight.
_UNMOVED = 0.02
# As a share of the uniform weight. In docs/evidence.md a domain at half of it lost a quarter of its
# perplexity. One at a twentieth lost nothing, since similar domains made up for it.
_STARVED = 1 / 3


@dataclass(frozen=True)
class Proxy:
    """Proxy runs that differ in nothing but their seed."""

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return self.runs[0].domains

    @property
    def is_doremi(self) -> bool:
        """Whether DoReMi, the baseline, learned the weights, from excess loss instead of W."""
        return self.runs[0].record.stage == "doremi"

    @property
    def target(self) -> str:
        """The targets of the weights, in words."""
        items, names = self.runs[0].config.target, []
        if self.is_doremi or items == (UNIVERSAL,):
            return "all domains"
        for item in items:
            name, weight = target_of(item)
            name = "a held-out mixture of all domains" if name == MIX else name
            names.append(f"{name} ({weight})" if weight and len(items) > 1 else name)
        return listed(names)

    @cached_property
    def arm(self) -> records.ArmRecord:
        """Its label and runs, as a column of a table."""
        about = "learned by DoReMi" if self.is_doremi else f"learned for {self.target}"
        return records.ArmRecord(self.label, about, tuple(run.name for run in self.runs))

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty if no run has logged a step."""
        return mean_weights(self.runs)

    @property
    def has_steps(self) -> bool:
        """Whether all seeds have logged a step after step 0, so that there is a course to draw."""
        return bool(len(self.series("alpha_mean")[0]) > 1)

    def series(self, key: Literal["alpha", "alpha_mean"]) -> tuple[Floats, Floats]:
        """(steps [T], weights [S, T, K]) of the steps that all S seeds have logged."""
        by_step = [{line.step: getattr(line, key) for line in run.train} for run in self.runs]
        known = [{step for step, weights in each.items() if weights} for each in by_step]
        steps = sorted(set.intersection(*known))
        values = [[[each[t].get(name) for name in self.domains] for t in steps] for each in by_step]
        # A domain that a line lacks is nan.
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @cached_property
    def movement(self) -> Movement:
        """How far the running average has moved, at every step; see `movement_of`."""
        steps_T, mean_STK = self.series("alpha_mean")
        return movement_of(steps_T, mean_STK)

    @property
    def has_moved(self) -> bool:
        """Whether a weight is 2 % or more away from uniform; always true for a single domain."""
        uniform = 1 / len(self.domains)
        furthest = max(abs(stat.mean - uniform) for stat in self.weights.values())
        return furthest >= _UNMOVED * uniform or len(self.domains) == 1

    def summary(self) -> str:
        """The largest and smallest weights, and whether the result has settled."""
        if not self.has_steps:
            return f"{self.label}: has not logged a step yet."
        uniform = 1 / len(self.domains)
        ranked = sorted(self.weights.items(), key=lambda item: -item[1].mean)
        most = [ranked[0], *(item for item in ranked[1:2] if item[1].mean > uniform)]
        top = listed(
            f"{name} {share_text(stat)} ({stat.mean / uniform:.1f}\N{NO-BREAK SPACE}× uniform)"
            for name, stat in most
        )
        least = f", least to {ranked[-1][0]} {share_text(ranked[-1][1])}" if ranked[1:] else ""
        count = effective_domains(stat.mean for stat in self.weights.values())
        moved = self.movement
        seeds = "" if moved.spread is None else f", and seeds differ by {_share(moved.spread)}"
        state = "has settled" if moved.is_settled else "is still moving"
        return (
            f"{self.label}, for {self.target}: most goes to {top}{least}; effectively "
            f"{count:.1f} of {plural(len(self.domains), 'domain')}. The result "
            f"{state if self.has_moved else 'has hardly moved'}: the last fifth of the "
            f"{int(moved.steps[-1])} steps moved {_share(moved.drift)} of the tokens between "
            f"domains; it lies {_share(moved.distance)} from uniform weights{seeds}."
        )

    def warnings(self) -> Iterator[str]:
        """Sentences on possible faults of the weights, with remedies."""
        if not self.has_steps:
            return
        lines = [line for run in self.runs for line in run.train if line.lr is not None]
        lost = sum(line.skipped for line in lines)
        if sentence := diagnosis.skipped(lost, len(lines), "logged steps"):
            yield sentence
            return
        config, number = self.runs[0].config, len(self.domains)
        is_universal = self.is_doremi or self.runs[0].target_names <= {UNIVERSAL, MIX}
        slower, faster, other = "larger --mu", "A smaller --mu or more", " or --target mix"
        if self.is_doremi:
            slower, faster, other = "smaller --step-size", "A larger --step-size or more", ""
        elif config.score == "aligned":
            faster = "More"
        starved = [name for name, stat in self.weights.items() if stat.mean < _STARVED / number]
        # Seed by seed: if seeds collapse onto different domains, their mean has not collapsed.
        last_SK = self.series("alpha")[1][:, -1]
        seeds = (dict(zip(self.domains, last_K, strict=True)) for last_K in last_SK.tolist())
        sentences = filter(None, map(diagnosis.collapsed, seeds))
        if is_universal and (sentence := next(sentences, None)):
            yield f"{sentence} A {slower} or more --smoothing keeps them apart."
        elif self.has_moved:
            if starved and is_universal:
                yield (
                    f"{listed(starved)} would be read less than a third as often as at uniform "
                    f"weights, and a small model tends to pay for it there. Try a {slower}{other}, "
                    "or set a floor: doge-fast weights constrain --floor."
                )
        elif diagnosis.have_equal_scores(
            number, config.domain_max_grad_norm, is_universal=config.target == (UNIVERSAL,)
        ):
            yield (
                "the weights hardly left uniform: two domains whose gradients are clipped to one "
                "norm have equal scores, whatever --mu is. Use --domain-max-grad-norm 0."
            )
        else:
            yield f"the weights hardly left uniform. {faster} steps would move them."
        if self.has_moved and not self.movement.is_settled:
            yield "the weights are still drifting; more steps would change the result."


def _share(distance_T: Floats) -> str:
    """The last sum of absolute differences as a share of the tokens, to two digits."""
    percent = 50 * distance_T[-1]
    return f"{percent:.{1 if percent >= 1 else 2}f}\N{NO-BREAK SPACE}%"


def mean_weights(runs: Sequence[RecordedRun]) -> dict[str, Stat]:
    """{domain: weight} over runs, of the domains that all of them have.

    Runs without weights.json are left out. If no run has one, the last running averages count.
    """
    weights = [records.weights_by_name(run.weights) for run in runs if run.weights is not None]
    if not weights:
        averages = ([line.alpha_mean for line in run.train if line.alpha_mean] for run in runs)
        weights = [steps[-1] for steps in averages if steps]
    names = [name for name in (weights or [{}])[0] if all(name in other for other in weights)]
    return {name: stat_of(by_name[name] for by_name in weights) for name in names}


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
        arms += [
            arm for group in self.of(records.TargetsGroup) for row in group.rows for arm in row.arms
        ]
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

    def lines(self, group: records.PerplexityGroup | records.TargetsGroup) -> list[Line]:
        """One line per target; or one per domain and, for several domains, their average.

        Lines per domain have the measured arms only, on the seeds that all of these share or,
        without such, on each arm's seeds. Domains that some arm was not measured on are left out.
        """
        if isinstance(group, records.TargetsGroup):
            return [
                Line(row.target, {arm.label: self.losses(arm) for arm in row.arms}, {row.target: 1})
                for row in group.rows
            ]
        arms = {arm.label: losses for arm in group.arms if (losses := self.losses(arm))}
        common = set.intersection(*map(set, arms.values())) if arms else set()
        for label, losses in arms.items():
            arms[label] = {s: each for s, each in losses.items() if s in (common or losses)}
        measured = [each for losses in arms.values() for each in losses.values()]
        names = [name for name in group.aim if measured and all(name in each for each in measured)]
        lines = [Line(name, arms, {name: 1}) for name in names]
        # In a search the average is its objective.
        aim = next((each.aim for each in self.of(records.TemperatureGroup)), {})
        total = Line("average", arms, {name: aim.get(name, 1) for name in names}, is_total=True)
        return [*lines, total] if len(names) > 1 else lines


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


def warnings_on(run: Path) -> list[str]:
    """Warnings on the weights of a run, whether it is complete or not."""
    try:
        return list(Proxy(run.name, tuple(open_runs([run]))).warnings())
    except ValueError as error:
        # Damaged metrics are no reason to fail: the weights themselves exist.
        return [str(error)]


def remarks_on(run: Path) -> list[str]:
    """Summary and warnings on the weights of a run of stage one, for a terminal."""
    proxy = Proxy(run.resolve().name, tuple(open_runs([run])))
    warnings = [*proxy.runs[0].record.warnings]
    warnings += [f"{proxy.label}: {sentence}" for sentence in proxy.warnings()]
    remarks = [proxy.summary(), *(f"Warning: {each}" for each in warnings)]
    return [as_ascii(wrapped(each)) for each in remarks]
