"""Runs put in order: an experiment's record, or one of the same form made from loose runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arms import Arm, Comparison, compared
from doge_fast.pipeline.reporting.grouping import named, proxies_of, record_of
from doge_fast.pipeline.reporting.proxies import Proxy, known_weights
from doge_fast.pipeline.reporting.runs import Run, open_runs
from doge_fast.pipeline.reporting.statistics import stat_of
from doge_fast.pipeline.reporting.wording import Stat

RUNS = "runs"


@dataclass(frozen=True)
class Study:
    """What a report is made of."""

    record: Json
    """`title`, `question`, `settings`, and the `groups` of runs behind each table."""
    runs: Mapping[str, Run] = field(repr=False)
    """By the name that the groups call them."""
    proxies: tuple[Proxy, ...]
    path: Path | None = None
    """The experiment's directory; None: loose runs."""

    @property
    def is_experiment(self) -> bool:
        """Whether somebody planned these runs, and knows which are missing."""
        return self.path is not None

    @property
    def groups(self) -> list[Json]:
        """What is set against what."""
        return list(self.record["groups"])

    @property
    def shown(self) -> list[Run]:
        """Runs that learn weights or train at them, in the order they were named."""
        return [run for run in self.runs.values() if run.stage != "select"]

    @cached_property
    def colors(self) -> dict[str, int]:
        """Domain -> its place in the palette, the same in every figure.

        In order of first appearance, training domains before targets.
        """
        names = [name for run in self.shown for name in run.domains]
        names += [name for run in self.shown for name in run.targets]
        names += [name for proxy in self.proxies if proxy.has_steps for name in proxy.rows]
        return {name: place for place, name in enumerate(dict.fromkeys(names))}

    @cached_property
    def unmeasured(self) -> list[str]:
        """Runs of the plan whose end, or whose perplexities, are not known."""
        if not self.is_experiment:
            return []
        compared = {
            name for group in self.groups for name in _planned(group, "perplexity", "targets")
        }
        blocks = self.record["settings"].get("eval_blocks")
        return [
            name
            for name in self.record["runs"]
            if name not in self.runs
            or not self.runs[name].is_complete
            or (name in compared and not is_measured(self.runs[name].path, blocks))
        ]

    @cached_property
    def unscored(self) -> list[str]:
        """Runs of the plan that have not been scored on the tasks it names."""
        missing = {
            name
            for group in self.groups
            for name in _planned(group, "tasks")
            if name not in self.runs or not is_scored(self.runs[name].path, group)
        }
        return [name for name in self.record["runs"] if name in missing]

    def runs_of(self, arm: Json) -> list[Run]:
        """Those of an arm that are there."""
        return [self.runs[name] for name in arm["runs"] if name in self.runs]

    def arm(self, arm: Json, until: float = 1.0) -> Arm:
        """An arm with its losses at the end, or as measured last before a share of the steps."""
        runs, losses = {}, {}
        for name in (name for name in arm["runs"] if name in self.runs):
            run = self.runs[name]
            if until < 1:
                found = run.losses_until(until)
            else:
                found = None if name in self.unmeasured else run.losses()
            if found is not None:
                runs[run.seed], losses[run.seed] = run, found
        is_baseline, baseline = bool(arm.get("is_baseline")), arm.get("baseline")
        return Arm(arm["label"], arm["about"], runs, losses, is_baseline, baseline)

    def comparison(self, group: Json) -> Comparison:
        """The arms of a group over their common seeds."""
        until = group.get("until", 1.0)
        return compared(group, [self.arm(arm, until) for arm in group["arms"]])

    def scores(self, group: Json) -> dict[str, dict[int, Json]]:
        """{arm: {seed: fewshot.json}} of the runs that were scored as the group says."""
        return {
            arm["label"]: {
                run.seed: run.few_shot
                for run in self.runs_of(arm)
                if run.few_shot and ("tasks" not in group or is_scored(run.path, group))
            }
            for arm in group["arms"]
        }

    def weights(self, arm: Json) -> dict[str, Stat]:
        """{domain: weight} of an arm over its seeds; the group says those that no run learned."""
        seeds = [arm["weights"]] if "weights" in arm else known_weights(self.runs_of(arm))
        names = [name for name in (seeds or [{}])[0] if all(name in each for each in seeds)]
        return {name: stat_of(each[name] for each in seeds) for name in names}


def _planned(group: Json, *kinds: str) -> Iterator[str]:
    """Runs of a group's arms, whether these stand in rows or not, where it is of such a kind."""
    if group["kind"] in kinds:
        for part in (group, *group.get("rows", ())):
            yield from (name for arm in part.get("arms", ()) for name in arm["runs"])


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / records.EVALUATION).exists():
        return False
    corpus = records.read_config(run)["corpus"]
    entries = {**corpus["domains"], **corpus["targets"]}
    most = math.inf if blocks is None else blocks
    wanted = {name: min(most, each["validation_blocks"]) for name, each in entries.items()}
    return bool(records.read_evaluation(run)["blocks"] == wanted)


def is_scored(run: Path, group: Json) -> bool:
    """Whether fewshot.json holds just the group's tasks, scored as it says."""
    if not (run / records.FEWSHOT).exists():
        return False
    record = records.read_few_shot(run)
    asked = ("shots", "task_limit", "task_data_sha256")
    return list(record["tasks"]) == group["tasks"] and all(
        record.get(key) == group[key] for key in asked if key in group
    )


def open_study(runs: Sequence[Path]) -> Study:
    """Read an experiment's directory, or runs that lie anywhere.

    Args:
        runs: run directories, or one directory that holds them or is an experiment's.

    Raises:
        ValueError: none is named, one is not a run and holds none, none learns weights or trains
            at them, or a record is not what it should be.
    """
    is_experiment = len(runs) == 1 and (Path(runs[0]) / records.EXPERIMENT).exists()
    path = Path(runs[0]) if is_experiment else None
    if path is not None and not any((path / RUNS).glob("*/config.json")):
        raise ValueError(f"No run of the experiment in {path} has begun.")
    opened = named(open_runs(runs if path is None else [path / RUNS]))
    told = {name: run for name, run in opened.items() if run.stage != "select"}
    if not told:
        raise ValueError(
            "A report needs a run that learns weights or trains at them; got runs of select alone."
        )
    proxies = proxies_of(list(told.values()))
    record = record_of(told, proxies) if path is None else records.read_experiment(path)
    return Study(record, opened, proxies, path)
