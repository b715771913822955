"""metrics.jsonl: one line a step, only appended to."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from doge_fast import atomic_file
from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.runs import METRICS, Json
from doge_fast.pipeline.records.shapes import WAY_OUT, MetricsLine, check_shape
from doge_fast.weights.weights_file import plain


def append_metrics(run: Path, line: Mapping[str, Any]) -> None:
    """Append {"step", "kind": "train" | "eval", ...}, in one write where there is room for it.

    Where something else has cut the file within a line, what is left of that line goes.

    Raises:
        OSError: the line is not written, or not all of it.
    """
    text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n"
    # Buffered: what the system leaves of a line is written again, which says what is wrong.
    with (run / METRICS).open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.truncate((run / METRICS).read_bytes().rfind(b"\n") + 1)
        file.write(text.encode())


def keep_metrics(run: Path) -> Json:
    """Have metrics.jsonl on the disk; its {"lines", "bytes", "sha256"}, as a checkpoint keeps them.

    `resume_metrics` takes them.
    """
    path = run / METRICS
    path.touch()
    atomic_file.keep(path)
    content = path.read_bytes()
    return {"lines": content.count(b"\n"), "bytes": len(content), "sha256": _sha256(content)}


def resume_metrics(run: Path, written: Any) -> None:
    """Cut metrics.jsonl back to a checkpoint, so the record equals the uninterrupted run's.

    Args:
        run: the run directory.
        written: what `keep_metrics` said at the checkpoint; None empties the file, for the run
            starts from the beginning.

    Raises:
        ValueError: the file is not what it was; it is left as it is.
    """
    path = run / METRICS
    content = path.read_bytes() if path.exists() else b""
    kept = b""
    if written is not None:
        known = written if isinstance(written, dict) else {}
        size, lines = known.get("bytes"), known.get("lines")
        if not isinstance(size, int) or not isinstance(lines, int):
            raise ValueError(f"its manifest does not say what {METRICS} held")
        kept = content[:size]
        if _sha256(kept) != known.get("sha256"):
            raise ValueError(_difference(content, lines))
    # Whatever came after the checkpoint goes, a torn last line with it.
    if kept != content:
        atomic_file.write(path, kept)


def _difference(content: bytes, num_lines: int) -> str:
    """What is wrong with a file that held so many lines."""
    lines = content.splitlines(keepends=True)[:num_lines]
    for number, text in enumerate(lines, start=1):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return f"line {number} of {METRICS} is damaged"
    if len(lines) < num_lines:
        return f"{METRICS} holds {len(lines)} of the {num_lines} lines that it held then"
    return f"{METRICS} holds other lines than it held then"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_metrics(run: Path, *, kind: Literal["train", "eval"] | None = None) -> list[Json]:
    """The lines of metrics.jsonl in order, of one kind or all; a torn last line is left out.

    Raises:
        ValueError: there is no such file, or a line before the last is not a metrics line.
    """
    return [line for line, _ in _read(run) if kind in (None, line["kind"])]


def read_lines(run: Path) -> list[MetricsLine]:
    """As `read_metrics`, each line of its class."""
    return [shape for _, shape in _read(run)]


def _read(run: Path) -> list[tuple[Json, MetricsLine]]:
    path = run / METRICS
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run in {run} has not logged a step.")
    lines: list[tuple[Json, MetricsLine]] = []
    # What follows the last line break was torn by a kill.
    for n, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        where = f"{path}, line {n}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileFailure(
                f"{where}, must hold a JSON object and does not: {error}. {WAY_OUT}"
            ) from None
        lines.append((line, check_shape(line, MetricsLine, f"{where},")))
        first, _ = lines[0]
        for key in ("alpha", "alpha_mean"):
            if key in line and line[key].keys() != first.get(key, line[key]).keys():
                raise FileFailure(
                    f"{where}, is damaged: {key} is of {', '.join(line[key])}, and in line 1 of "
                    f"{', '.join(first[key])}. {WAY_OUT}"
                )
    return lines
