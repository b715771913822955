"""What of an experiment's plan is there: which runs are complete, measured and scored."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.runs import Run

RUNS = "runs"


def arms_in(group: Json) -> list[Json]:
    """Every arm of a group, whether in rows or not."""
    rows = (arm for row in group.get("rows", []) for arm in row["arms"])
    return [*group.get("arms", []), *rows]


def unmeasured(record: Json, runs: Mapping[str, Run]) -> list[str]:
    """Runs of the plan whose end, or whose perplexities, are not known."""
    blocks = record["settings"].get("eval_blocks")
    compared = set(_named(record, ("perplexity", "targets")))
    return [
        name
        for name in record["runs"]
        if name not in runs
        or not runs[name].is_complete
        or (name in compared and not is_measured(runs[name].path, blocks))
    ]


def unscored(record: Json, runs: Mapping[str, Run]) -> list[str]:
    """Runs of the plan that have not been scored on the tasks it names."""
    missing = {
        name
        for group in record["groups"]
        for name in _named({"groups": [group]}, ("tasks",))
        if name not in runs or not is_scored(runs[name].path, group)
    }
    return [name for name in record["runs"] if name in missing]


def _named(record: Json, kinds: tuple[str, ...]) -> Iterator[str]:
    for group in record["groups"]:
        if group["kind"] in kinds:
            yield from (name for arm in arms_in(group) for name in arm["runs"])


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
    asked = ("shots", "task_limit", "task_data_sha256")
    return list(record["tasks"]) == group["tasks"] and all(
        record.get(key) == group[key] for key in asked if key in group
    )
