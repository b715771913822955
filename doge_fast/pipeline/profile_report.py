"""What a profile says: its numbers, as a table for people and a timeline for trace viewers.

`profiling` measures them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from doge_fast.pipeline import tables

SIDES = ("plain", "doge")


class Span(NamedTuple):
    """One range of one step; seconds since the recording began."""

    side: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Phase:
    """One line of the table."""

    name: str
    milliseconds: float
    """Median over the steps, of all its ranges in a step."""
    share: float
    """Of the step it was seen in."""
    num_bytes: int
    """The least that it can move."""
    fraction: float
    """Of the bandwidth that was measured: the time that those bytes must take over its own."""


@dataclass(frozen=True)
class Profile:
    """Everything that was measured; `--json` writes these fields and a `schema_version`."""

    settings: dict[str, Any]
    """The fields of `ProfileConfig`, the device settled."""
    device: str
    threads: int
    versions: dict[str, str]
    implementations: dict[str, str]
    """Of each operator."""
    num_parameters: int
    """Those that train."""
    num_rows: int
    """R, training domains and targets."""
    row_bytes: int
    """Of all rows, padding included."""
    tokens: int
    """Of a step, all rows together."""
    plain_ms: float
    doge_ms: float
    """Medians of whole steps."""
    overhead: float
    """Median over pairs of DoGE step / plain step."""
    overhead_low: float
    overhead_high: float
    """Quartiles."""
    phases: tuple[Phase, ...]
    """Of other DoGE steps than the timed ones; "other" is what no phase covers."""
    read_bandwidth: float
    copy_bandwidth: float
    """Bytes per second; a copy counts both ways."""
    bandwidth_spread: float
    """How far their quartiles lie apart, over the median."""
    memory: dict[str, int] | None = None
    """Bytes: the peak of a `plain` and of a `doge` step, the `extra` of the latter and the
    `formula` for it, R x N x itemsize with padding (R + 1 where one backward pass fills all rows:
    the combined gradient); None: not measured."""


def table(measured: Profile) -> str:
    """The measurements as text: what ran where, each phase of the step, the cost of the whole."""
    header = ["phase", "ms", "share", "least MB", "GB/s", "of bandwidth"]
    rows = [_row(phase) for phase in measured.phases]
    phases = tables.text(tables.table_of(header, rows))
    return "\n".join([*_heading(measured), "", phases, *_footnotes(measured)])


def _heading(measured: Profile) -> list[str]:
    settings = measured.settings
    threads = f"{measured.threads} threads, " if settings["device"] == "cpu" else ""
    return [
        f"{settings['model']}: {measured.num_parameters / 1e6:.2f}M parameters, "
        f"{measured.num_rows} rows, {measured.tokens} tokens a step, {settings['mode']}, "
        f"{settings['dtype']}",
        f"{measured.device}, {threads}torch {measured.versions['torch']}",
        f"reads {measured.read_bandwidth / 1e9:.1f} GB/s, copies "
        f"{measured.copy_bandwidth / 1e9:.1f} GB/s (quartiles within "
        f"{100 * measured.bandwidth_spread:.0f} %)",
        "operators: " + ", ".join(f"{k} {v}" for k, v in measured.implementations.items()),
    ]


def _row(phase: Phase) -> list[str]:
    row = [phase.name, f"{phase.milliseconds:.3f}", f"{100 * phase.share:.1f} %"]
    if not phase.num_bytes:
        return [*row, "-", "-", "-"]
    least = f"{phase.num_bytes / 1e6:.1f}" if phase.num_bytes >= 5e4 else "< 0.1"
    rate = phase.num_bytes / phase.milliseconds / 1e6 if phase.milliseconds else 0.0
    return [*row, least, f"{rate:.1f}", f"{100 * phase.fraction:.0f} %"]


def _footnotes(measured: Profile) -> list[str]:
    lines = []
    if any(phase.fraction > 1 for phase in measured.phases):
        lines.append(
            f"Above 100 %: some of the {measured.row_bytes / 1e6:.1f} MB of rows were still in "
            "the caches."
        )
    lines += [
        "",
        f"DoGE step {measured.doge_ms:.1f} ms, plain step {measured.plain_ms:.1f} ms: "
        f"{measured.overhead:.3f} [{measured.overhead_low:.3f}, {measured.overhead_high:.3f}] "
        f"(median and quartiles of {measured.settings['steps']} pairs)",
    ]
    if (memory := measured.memory) is not None:
        lines.append(
            f"peak memory: plain {memory['plain'] / 1e6:.0f} MB, DoGE {memory['doge'] / 1e6:.0f} "
            f"MB: {memory['extra'] / 1e6:+.1f} MB; by its formula: "
            f"{memory['formula'] / 1e6:.1f} MB"
        )
    return lines


def trace_of(spans: list[Span]) -> dict[str, Any]:
    """A timeline in the trace event format: one track for each side, phases inside steps."""
    tracks = {side: number for number, side in enumerate(SIDES)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "doge_fast"}}
    ]
    for side, number in tracks.items():
        track = {"ph": "M", "pid": 0, "tid": number, "name": "thread_name"}
        events.append(track | {"args": {"name": f"{side} step"}})
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.side],
                "name": span.name,
                "cat": span.side,
                "ts": 1e6 * span.start,
                "dur": max(0.0, 1e6 * (span.end - span.start)),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
