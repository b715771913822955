"""metrics.jsonl: one line a step, only appended to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from doge_fast import atomic_file
from doge_fast.failures import FileFailure
from doge_fast.pipeline.records.runs import METRICS, Json
from doge_fast.pipeline.records.shapes import WAY_OUT, MetricsLine, check_shape
from doge_fast.weights_file import plain


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
    atomic_file.write(path, text)


def read_metrics(run: Path, *, kind: Literal["train", "eval"] | None = None) -> list[Json]:
    """The lines of metrics.jsonl in order, of one kind or all; a torn last line is left out.

    Raises:
        ValueError: there is no such file, or a line before the last is not a metrics line.
    """
    path = run / METRICS
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run in {run} has not logged a step.")
    lines = _parse_metrics(path)
    for n, line in enumerate(lines, start=1):
        check_shape(line, MetricsLine, f"{path}, line {n},")
        _check_domains(line, lines[0], f"{path}, line {n},")
    return [line for line in lines if kind in (None, line["kind"])]


def _check_domains(line: Json, first: Json, where: str) -> None:
    """All lines that have domain weights weigh the domains of the first one."""
    for key in ("alpha", "alpha_mean"):
        if key in line and key in first and line[key].keys() != first[key].keys():
            raise FileFailure(
                f"{where} is damaged: {key} is of {', '.join(line[key])}, and in line 1 of "
                f"{', '.join(first[key])}. {WAY_OUT}"
            )


def _parse_metrics(path: Path) -> list[Json]:
    """Every complete line; what follows the last line break was torn by a kill."""
    complete = path.read_bytes().split(b"\n")[:-1]
    lines = []
    for n, text in enumerate(complete, start=1):
        where = f"{path}, line {n}"
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FileFailure(
                f"{where}, must hold a JSON object and does not: {error}. The file was changed by "
                "something other than a run; restore it, or start the run anew elsewhere."
            ) from None
        _check_line(line, where)
        lines.append(line)
    return lines


def _check_line(line: Any, where: str) -> None:
    step, kind = (line.get("step"), line.get("kind")) if isinstance(line, dict) else (None, None)
    if not isinstance(step, int) or isinstance(step, bool) or kind not in ("train", "eval"):
        raise FileFailure(
            f'{where} needs an integer "step" and a "kind" of "train" or "eval"; '
            f"it has step {step!r} and kind {kind!r}. {WAY_OUT}"
        )
