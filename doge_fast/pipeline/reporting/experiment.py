"""An experiment's directory as its records tell it: its runs, and which of them are measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.runs import Run, open_runs
from doge_fast.pipeline.reporting.statistics import Difference, paired_difference
from doge_fast.pipeline.reporting.study import mean_loss
from doge_fast.pipeline.reporting.wording import Stat, exp_or_inf, stat_of, to_floats

RUNS = "runs"


class Measured(NamedTuple):
    """An arm: its label and the held-out losses of each seed that was measured."""

    label: str
    about: str
    losses: dict[int, dict[str, float]]
    runs: list[Run]
    is_baseline: bool
    baseline: str | None

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`, over seeds."""
        return stat_of(exp_or_inf(mean_loss(each, names)) for each in self.losses.values())

    def against(self, other: "Measured", names: Sequence[str]) -> Difference | None:
        """Difference of the mean loss over `names`, seed by seed; None without a common seed."""
        seeds = [seed for seed in self.losses if seed in other.losses]
        if not seeds:
            return None
        return paired_difference(
            [mean_loss(self.losses[seed], names) for seed in seeds],
            [mean_loss(other.losses[seed], names) for seed in seeds],
        )


@dataclass
class Experiment:
    """An experiment's directory, as its records tell it."""

    path: Path
    record: Json
    runs: Mapping[str, Run] = field(repr=False)

    def is_complete(self, name: str) -> bool:
        """Whether a run came to its end."""
        run = self.runs.get(name)
        return run is not None and run.last_step >= run.steps

    @cached_property
    def missing(self) -> list[str]:
        """Runs of the plan that are not there, not complete, or not measured as the plan says."""
        unscored = {
            name
            for group in self.record["groups"]
            if group["kind"] == "tasks"
            for arm in group["arms"]
            for name in arm["runs"]
            if not is_scored(self.path / RUNS / name, group)
        }
        return [name for name in self.record["runs"] if name in {*self.unmeasured, *unscored}]

    @cached_property
    def unmeasured(self) -> list[str]:
        """Those whose perplexities are not known."""
        blocks = self.record["settings"].get("eval_blocks")
        compared = {
            name
            for group in self.record["groups"]
            for arm in [
                *group.get("arms", []),
                *(a for r in group.get("rows", []) for a in r["arms"]),
            ]
            if group["kind"] in ("perplexity", "targets")
            for name in arm["runs"]
        }
        return [
            name
            for name in self.record["runs"]
            if not self.is_complete(name)
            or (name in compared and not is_measured(self.runs[name].path, blocks))
        ]

    def scores(self, group: Json) -> dict[str, dict[int, Json]]:
        """{arm: {seed: fewshot.json}} of the runs that were scored on the group's tasks."""
        return {
            arm["label"]: {
                run.seed: run.few_shot
                for name in arm["runs"]
                if (run := self.runs.get(name)) is not None
                and run.few_shot is not None
                and is_scored(run.path, group)
            }
            for arm in group["arms"]
        }

    def measured(self, arm: Json, until: float = 1.0) -> Measured:
        """An arm's losses at the end, or as measured last before a share of the steps."""
        losses: dict[int, dict[str, float]] = {}
        runs = [self.runs[name] for name in arm["runs"] if name in self.runs]
        for run in (run for run in runs if until < 1 or run.name not in self.unmeasured):
            found = run.losses() if until >= 1 else _losses_until(run, until)
            if found is not None:
                losses[run.seed] = found
        return Measured(
            arm["label"],
            arm["about"],
            losses,
            runs,
            bool(arm.get("is_baseline")),
            arm.get("baseline"),
        )

    def weights(self, arm: Json) -> dict[int, dict[str, float]]:
        """{seed: {domain: weight}} of the runs that have learned some."""
        return {
            run.seed: records.weights_by_name(run.weights)
            for name in arm["runs"]
            if (run := self.runs.get(name)) is not None and run.weights is not None
        }


def open_experiment(path: Path) -> Experiment:
    """Read an experiment's records.

    Raises:
        ValueError: `path` is not an experiment's directory, or a record is not what it should be.
    """
    record = records.read_experiment(path)
    opened = open_runs([path / RUNS]) if any((path / RUNS).glob("*/config.json")) else []
    return Experiment(path, record, {run.name: run for run in opened})


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / records.EVALUATION).exists():
        return False
    corpus = records.read_config(run)["corpus"]
    held_out = {
        name: entry["validation_blocks"]
        for name, entry in {**corpus["domains"], **corpus["targets"]}.items()
    }
    wanted = {
        name: count if blocks is None else min(blocks, count) for name, count in held_out.items()
    }
    return bool(records.read_evaluation(run)["blocks"] == wanted)


def is_scored(run: Path, group: Json) -> bool:
    """Whether fewshot.json holds just the group's tasks, scored as it says."""
    if not (run / records.FEWSHOT).exists():
        return False
    record = records.read_few_shot(run)
    return list(record["tasks"]) == group["tasks"] and all(
        record.get(key) == value
        for key, value in {
            "shots": group["shots"],
            "task_limit": group["task_limit"],
            "task_data_sha256": group["task_data_sha256"],
        }.items()
    )


def _losses_until(run: Run, until: float) -> dict[str, float] | None:
    lines = [line for line in run.evals if line["step"] <= until * run.steps]
    return to_floats(lines[-1]["loss"]) if lines else None
