"""The runs of a report: which of them learned weights, and which are compared in which table.

A search has its tables in experiment.json, and so has a kept record of an experiment. Other runs
are sorted into tables here; their base models differ in weights and seed alone.
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

# Hardly moved: no domain is further than this from uniform, as a share of uniform.
_UNMOVED = 0.02
# Of uniform: in docs/evidence.md a domain at a half of uniform lost a quarter already, and one at a
# twentieth nothing, for others stood in for it.
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
        """Whether excess loss over a reference moved its weights, the baseline, and not W."""
        return self.runs[0].record.stage == "doremi"

    @property
    def target(self) -> str:
        """For whom the weights are, in words."""
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
        """Its runs under its label, as a column of a table."""
        about = "learned by DoReMi" if self.is_doremi else f"learned for {self.target}"
        return records.ArmRecord(self.label, about, tuple(run.name for run in self.runs))

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty where no run has a step."""
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
        # Of a domain that a line lacks: nan.
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @cached_property
    def movement(self) -> Movement:
        """How far the running average has moved, at every step; see `movement_of`."""
        steps_T, mean_STK = self.series("alpha_mean")
        return movement_of(steps_T, mean_STK)

    @property
    def has_moved(self) -> bool:
        """Whether a weight is 2 % or more away from uniform; of a single domain always."""
        uniform = 1 / len(self.domains)
        furthest = max(abs(stat.mean - uniform) for stat in self.weights.values())
        return furthest >= _UNMOVED * uniform or len(self.domains) == 1

    def summary(self) -> str:
        """What it learned, and whether its average has settled."""
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
            f"{count:.1f} of {plural(len(self.domains), 'domain')}. The running average "
            f"{state if self.has_moved else 'has hardly moved'}: the last fifth of the "
            f"{int(moved.steps[-1])} steps moved {_share(moved.drift)} of the tokens between "
            f"domains; the average lies {_share(moved.distance)} from uniform weights{seeds}."
        )

    def warnings(self) -> Iterator[str]:
        """What may be wrong with its weights, and what to do about it, a sentence each."""
        if not self.has_steps:
            return
        lines = [line for run in self.runs for line in run.train if line.lr is not None]
        lost = sum(line.skipped for line in lines)
        if sentence := diagnosis.skipped(lost, len(lines), "logged steps"):
            yield sentence
            return
        config, number = self.runs[0].config, len(self.domains)
        is_universal = self.is_doremi or self.runs[0].target_names <= {UNIVERSAL, MIX}
        slower, faster, other = "larger mu", "smaller mu", " or --target mix"
        if self.is_doremi:
            slower, faster, other = "smaller step_size", "larger step_size", ""
        starved = [name for name, stat in self.weights.items() if stat.mean < _STARVED / number]
        # Of each seed: the mean over seeds that collapsed onto different domains has not collapsed.
        last_SK = self.series("alpha")[1][:, -1]
        seeds = (dict(zip(self.domains, last_K, strict=True)) for last_K in last_SK.tolist())
        sentences = filter(None, map(diagnosis.collapsed, seeds))
        if is_universal and (sentence := next(sentences, None)):
            yield f"{sentence} A {slower} or more smoothing keeps them apart."
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
                "norm have equal scores, whatever mu is. Use --domain-max-grad-norm 0."
            )
        else:
            yield f"the weights hardly left uniform. A {faster} or more steps would move them."
        if self.has_moved and not self.movement.is_settled:
            yield (
                "the running average of the weights is still drifting; more steps would change "
                "the result."
            )


def _share(distance_T: Floats) -> str:
    """The last sum of absolute differences as a share of the tokens, to two digits."""
    percent = 50 * distance_T[-1]
    return f"{percent:.{1 if percent >= 1 else 2}f}\N{NO-BREAK SPACE}%"


def mean_weights(runs: Sequence[RecordedRun]) -> dict[str, Stat]:
    """{domain: weight} over runs, of the domains that all of them have.

    A run without weights.json does not count, unless none has one: then their running averages do.
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
    """By their names."""
    proxies: tuple[Proxy, ...]
    groups: tuple[records.Group, ...]
    """The tables."""
    plan: records.ExperimentRecord | None = None
    """Of an experiment, which knows which runs are missing."""
    directory: Path | None = None
    """The experiment's."""

    @cached_property
    def search(self) -> records.Json | None:
        """weights.json of a search that has come to its end."""
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
        """Runs of the plan whose end, or whose perplexities, are not known."""
        if self.plan is None:
            return []
        arms = [arm for group in self.of(records.PerplexityGroup) for arm in group.arms]
        arms += [
            arm for group in self.of(records.TargetsGroup) for row in group.rows for arm in row.arms
        ]
        needed = {name: None for arm in arms for name in arm.runs}
        # A search begins runs that its tables leave out: those that diverged.
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
        """The runs of these names that exist."""
        return [self.runs[name] for name in names if name in self.runs]

    def losses(self, arm: records.ArmRecord) -> Losses:
        """{seed: held-out losses at the end} of an arm's models that are measured."""
        runs = [run for run in self.runs_of(arm.runs) if run.name not in self.unmeasured]
        return {
            run.config.training.seed: losses for run in runs if (losses := run.losses()) is not None
        }

    def lines(self, group: records.PerplexityGroup | records.TargetsGroup) -> list[Line]:
        """A line a target; or a line a domain, then of several their average, measured arms alone.

        These are taken with the seeds that all of them have, or, without such, each with its own.
        Domains that one of them was not measured on are left out.
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
        # That of a search is its objective.
        aim = next((each.aim for each in self.of(records.TemperatureGroup)), {})
        total = Line("average", arms, {name: aim.get(name, 1) for name in names}, is_total=True)
        return [*lines, total] if len(names) > 1 else lines


def open_study(runs: Sequence[Path]) -> Study:
    """Read an experiment's directory, or run directories.

    Raises:
        UserError: none is named, one is not a run and holds none, two have one name, none learns
            weights or trains at them, base models differ in more than weights and seed, or a
            record is not what it should be.
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
    # Runs that differ in nothing but seed and weights.
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
    """Whether a search's proxy is there, with the weights that it had then."""
    if not all((proxy / name).exists() for name in (records.CONFIG, records.WEIGHTS)):
        return False
    now, then = (
        records.weights_by_name(records.read_weights(each))
        for each in (proxy, search / records.MIXTURES / "1.json")
    )
    return records.is_same_mixture(now, then)


def _proxies_of(alike: Iterable[list[RecordedRun]]) -> tuple[Proxy, ...]:
    """Runs that learned weights, the seeds of each together."""
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
    """The tables of runs that no experiment has planned."""
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
    """Names of DoReMi's two runs, or of a proxy's one."""
    return tuple(filter(None, (Path(run.config.reference).name, run.name)))


def _arms(bases: Sequence[RecordedRun], proxies: Sequence[Proxy]) -> Iterator[records.ArmRecord]:
    """Base models by their weights: baselines, what was learned, weights of other files."""
    about = _BASELINES | {proxy.label: proxy.arm.about for proxy in proxies}
    # By the source and, of a file, which may have changed, by what it held.
    by_source: dict[tuple[str, str], list[RecordedRun]] = {(label, ""): [] for label in about}
    for run in bases:
        source = _source(run, proxies)
        held = "" if source in about or run.weights is None else str(run.weights["domains"])
        by_source.setdefault((source, held), []).append(run)
    sources = [source for source, _ in by_source]
    for (source, _), runs in by_source.items():
        if runs:
            _refuse_one_seed(runs)
            # A text of many domains is no label.
            is_label = sources.count(source) == 1 and not records.is_typed(source)
            label = source if is_label else f"weights of {runs[0].name}"
            names = tuple(run.name for run in runs)
            yield records.ArmRecord(label, about.get(label, _GIVEN), names, label == "uniform")


def _refuse_one_seed(runs: Sequence[RecordedRun]) -> None:
    """Refuse two runs that differ in nothing, or in a proxy of their own."""
    by_seed: dict[int, RecordedRun] = {}
    for run in runs:
        other = by_seed.setdefault(run.config.training.seed, run)
        if other is not run:
            raise UserError(
                f"{other.name} and {run.name} are of one arm and have one seed, "
                f"{run.config.training.seed}. Name one of them, or train one with another --seed."
            )


def _comparable(alike: Collection[list[RecordedRun]]) -> list[RecordedRun]:
    """Base models that differ in weights and seed alone; references of DoReMi beside."""
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
    """Label of what a base run took its weights from: a word, a proxy run, or a file's path."""
    weights = Path(run.config.weights)
    folder = (weights.parent if weights.name == records.WEIGHTS else weights).resolve()
    # Where runs have been moved, the one of that name, if these are its weights.
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
    """What to know of the weights that a run has learned, finished or not."""
    try:
        return list(Proxy(run.name, tuple(open_runs([run]))).warnings())
    except ValueError as error:
        # The weights are there, whatever became of the lines about the way to them.
        return [str(error)]


def remarks_on(run: Path) -> list[str]:
    """The weights of a run of stage one, and what to know before using them: for a terminal."""
    proxy = Proxy(run.resolve().name, tuple(open_runs([run])))
    warnings = [*proxy.runs[0].record.warnings]
    warnings += [f"{proxy.label}: {sentence}" for sentence in proxy.warnings()]
    remarks = [proxy.summary(), *(f"Warning: {each}" for each in warnings)]
    return [as_ascii(wrapped(each)) for each in remarks]
