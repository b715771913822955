"""metrics.jsonl: one line a step, only appended to, and the averages that are read from it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline.records.runs import METRICS, Json
from doge_fast.weights_file import plain

# The running average has converged where its last fifth changed it little.
DRIFT_FROM = 0.8


def append_metrics(run: Path, line: Mapping[str, Any]) -> None:
    """Append one line to metrics.jsonl, in one write.

    Args:
        run: the run directory.
        line: {"step": int, "kind": "train" | "eval", ...}; see `plain`.

    Raises:
        ValueError: `step` or `kind` is missing or is something else.
    """
    record = plain(line)
    _check_line(record, "A line of metrics.jsonl")
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with (run / METRICS).open("ab", buffering=0) as file:
        file.write(text.encode())


def resume_metrics(run: Path, *, step: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, so the record equals the uninterrupted run's.

    A torn last line is dropped, and so is every line past `step`. A negative `step`
    empties the file: the run starts from the beginning.

    Raises:
        ValueError: a line before the last is not a metrics line.
    """
    path = run / METRICS
    if not path.exists():
        return
    lines = [line for line in _parse_metrics(path) if line["step"] <= step]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    beside = path.with_name(f".{METRICS}.cut")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def read_metrics(run: Path, *, kind: Literal["train", "eval"] | None = None) -> list[Json]:
    """The lines of metrics.jsonl in order, of one kind or all; a torn last line is left out.

    Raises:
        ValueError: there is no such file, or a line before the last is not a metrics line.
    """
    path = run / METRICS
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run in {run} has not logged a step.")
    return [line for line in _parse_metrics(path) if kind in (None, line["kind"])]


def average_between(first: Json, last: Json) -> dict[str, float]:
    """Mean of the domain weights over the steps after one line of metrics.jsonl, up to another.

    mean over (a, t]  =  (t mean_t - a mean_a) / (t - a)

    Args:
        first: a line with `alpha_mean`, whose step a and all before are left out; of step 0: none.
        last: a later one, of step t; if it is the same, the mean up to it.

    Returns:
        {domain: weight}, summing to one; what is not finite is NaN.
    """
    until, start = last["step"], first["step"]
    # What is not finite is recorded as null.
    begins, ends = (
        {name: math.nan if mean is None else mean for name, mean in line["alpha_mean"].items()}
        for line in (first, last)
    )
    if start in (0, until):
        return ends
    sums = {name: max(0.0, until * mean - start * begins[name]) for name, mean in ends.items()}
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()}


def lines_of_average(lines: Sequence[Json], average_from: float) -> tuple[Json, Json]:
    """Between which lines the average is taken, and where its last fifth begins.

    Args:
        lines: those of metrics.jsonl with `alpha_mean`, from step 0 on.
        average_from: share of the steps so far that the average leaves out.

    Returns:
        (the last line that is left out, the last one before the last fifth of what is not).
    """
    until = lines[-1]["step"]
    first = [line for line in lines if line["step"] <= average_from * until][-1]
    fifth = first["step"] + DRIFT_FROM * (until - first["step"])
    return first, [line for line in lines if line["step"] <= fifth][-1]


def drift(
    lines: Sequence[Json], average: Mapping[str, float], *, average_from: float = 0.0
) -> float:
    """How far the average domain weights moved in the last fifth of the steps that they average.

    drift  =  sum_j | alpha_bar_j(T) - alpha_bar_j(a + 0.8 (T - a)) |

    Args:
        lines: those of metrics.jsonl with `alpha_mean`, of a run at its last step T; the last at or
            before a step counts.
        average: {domain: alpha_bar_j(T)}.
        average_from: share of the steps that the average leaves out, a / T.
    """
    first, before = lines_of_average(lines, average_from)
    known = average_between(first, before)
    return sum(abs(weight - known[name]) for name, weight in average.items())


def _parse_metrics(path: Path) -> list[Json]:
    """Every complete line; what follows the last line break was torn by a kill."""
    complete = path.read_bytes().split(b"\n")[:-1]
    lines = []
    for n, text in enumerate(complete, start=1):
        where = f"{path}, line {n}"
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where}, must hold a JSON object and does not: {error}. The file was changed by "
                "something other than a run; restore it, or start the run anew elsewhere."
            ) from None
        _check_line(line, where)
        lines.append(line)
    return lines


def _check_line(line: Any, where: str) -> None:
    step, kind = (line.get("step"), line.get("kind")) if isinstance(line, dict) else (None, None)
    if not isinstance(step, int) or isinstance(step, bool) or kind not in ("train", "eval"):
        raise ValueError(
            f'{where} needs an integer "step" and a "kind" of "train" or "eval"; '
            f"it has step {step!r} and kind {kind!r}."
        )
