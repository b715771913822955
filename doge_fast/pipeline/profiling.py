"""What generalization estimation costs: each phase of a step against the machine's limits.

The ratio of a DoGE step to a plain one comes from whole steps, alternated, with nobody observing;
the phases from other steps, in which each phase that is named (`doge_fast.tracing`) is timed. Bytes
are the least that a phase can move; bandwidth is measured in the same process.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from doge_fast import atomic_file
from doge_fast.alternation import alternated, ratio_of, synchronize
from doge_fast.info import device_name, versions
from doge_fast.kernels import chosen
from doge_fast.kernels.dispatch import OPERATORS
from doge_fast.pipeline import failures, tables
from doge_fast.pipeline.config import ProfileConfig
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.profile_steps import (
    WARM_UP,
    ProfiledDogeStep,
    ProfiledPlainStep,
    Traffic,
)
from doge_fast.pipeline.roofline import Bandwidth, bandwidth
from doge_fast.tracing import observed
from doge_fast.weights.weights_file import plain

SCHEMA_VERSION = 1
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")


class TimedSpan(NamedTuple):
    """One range of one step; seconds since the recording began."""

    side: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TimedPhase:
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
    phases: tuple[TimedPhase, ...]
    """Of other DoGE steps than the timed ones; "other" is what no phase covers."""
    read_bandwidth: float
    copy_bandwidth: float
    """Bytes per second; a copy counts both ways."""
    bandwidth_spread: float
    """How far their quartiles lie apart, over the median."""
    extra_bytes: int
    """What a DoGE step keeps beside a plain one: R x N x itemsize with padding (R + 1 where one
    backward pass fills all rows: the combined gradient)."""


def profile(config: ProfileConfig) -> Profile:
    """Measure a step and its phases.

    Writes `config.json` where it is asked for.

    Raises:
        ValueError: a setting outside its range, an unknown model, a device that is not there.
    """
    config = replace(config, device=str(_device(config)))
    _check(config)
    measured = _of_steps(config)
    if config.json is not None:
        record = {"schema_version": SCHEMA_VERSION, **asdict(measured)}
        atomic_file.write(config.json, json.dumps(record, indent=1) + "\n")
    return measured


def _of_steps(config: ProfileConfig) -> Profile:
    plain_step, doge_step = ProfiledPlainStep(config), ProfiledDogeStep(config)
    device = plain_step.device
    calls = {step.name: step for step in (plain_step, doge_step)}
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    times = alternated(calls, rounds=config.steps, device=device)
    ratio = ratio_of(times["doge"], times["plain"])
    spans = _spans(list(calls.values()), config.steps)
    limits = bandwidth(device)
    return Profile(
        settings=plain(config),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        implementations={operator: chosen(device, operator) for operator in OPERATORS},
        num_parameters=sum(p.numel() for p in doge_step.parameters),
        num_rows=doge_step.optimizer.buffer.num_rows,
        row_bytes=doge_step.optimizer.buffer.num_bytes,
        tokens=doge_step.tokens.numel(),
        plain_ms=ratio.baseline_ms,
        doge_ms=ratio.variant_ms,
        overhead=ratio.ratio,
        overhead_low=ratio.low,
        overhead_high=ratio.high,
        phases=_phases(spans, doge_step.least_traffic(), limits),
        read_bandwidth=limits.read,
        copy_bandwidth=limits.copy,
        bandwidth_spread=limits.spread,
        extra_bytes=doge_step.extra_bytes,
    )


def _spans(steps: list[ProfiledPlainStep], num_rounds: int) -> list[TimedSpan]:
    """The phases of a step of each in every round, each phase before the one that it is part of."""
    device = steps[0].device
    marks: list[tuple[str, str, Any, Any]] = []
    side = ""

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = _now(device)
        try:
            yield
        finally:
            marks.append((side, name, start, _now(device)))

    zero = _now(device)
    with observed(timed):
        for _ in range(num_rounds):
            for step in steps:
                side = step.name
                with timed("step"):
                    step()
    synchronize(device)
    return [TimedSpan(of, name, _seconds(zero, a), _seconds(zero, b)) for of, name, a, b in marks]


def _now(device: torch.device) -> Any:
    """A mark on the host's clock, or in the device's queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(zero: Any, mark: Any) -> float:
    return float(mark - zero if isinstance(mark, float) else zero.elapsed_time(mark) / 1e3)


def _phases(
    spans: list[TimedSpan], least: dict[str, Traffic], limits: Bandwidth
) -> tuple[TimedPhase, ...]:
    """The DoGE step taken apart; medians over its steps. "other" is what no phase covers."""
    steps: list[dict[str, float]] = [defaultdict(float)]
    for span, own in _own_seconds([span for span in spans if span.side == "doge"]):
        steps[-1]["other" if span.name == "step" else span.name] += own
        if span.name == "step":
            steps[-1]["step"] = span.end - span.start
            steps.append(defaultdict(float))
    phases = []
    for name in (*PHASES, "other"):
        seconds, whole = (statistics.median(step[n] for step in steps[:-1]) for n in (name, "step"))
        traffic = least.get(name, Traffic(0, 0))
        fraction = traffic.seconds(limits) / seconds if seconds > 0 else 0.0
        phases.append(TimedPhase(name, 1e3 * seconds, seconds / whole, sum(traffic), fraction))
    return tuple(phases)


def _own_seconds(spans: list[TimedSpan]) -> Iterator[tuple[TimedSpan, float]]:
    """Spans in the order in which they end, each with the time that none inside it takes."""
    ended: list[TimedSpan] = []
    for span in spans:
        own = span.end - span.start
        while ended and ended[-1].start >= span.start:
            inner = ended.pop()
            own -= inner.end - inner.start
        ended.append(span)
        yield span, own


def _check(config: ProfileConfig) -> None:
    check_ranges(config)
    if config.json is not None:
        # What cannot be written is refused before anything is measured.
        with failures.writing(config.json):
            was_there = config.json.exists()
            config.json.open("a").close()
            if not was_there:
                # Not the link that leads there.
                config.json.resolve().unlink()


def _device(config: ProfileConfig) -> torch.device:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    name = best if config.device == "auto" else config.device
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or name == kind):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}.")
    if kind == "cpu":
        return torch.device(name)
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise ValueError(
            f"device is {name!r}, and torch {torch.__version__} sees {count} GPUs. Pass "
            "--device cpu."
        )
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def table(measured: Profile) -> str:
    """The measurements as text: what ran where, each phase of the step, the cost of the whole."""
    settings = measured.settings
    threads = f"{measured.threads} threads, " if settings["device"] == "cpu" else ""
    header = ["phase", "ms", "share", "least MB", "GB/s", "of bandwidth"]
    rows = [_row(phase) for phase in measured.phases]
    lines = [
        f"{settings['model']}: {measured.num_parameters / 1e6:.2f}M parameters, "
        f"{measured.num_rows} rows, {measured.tokens} tokens a step, {settings['mode']}, "
        f"{settings['dtype']}",
        f"{measured.device}, {threads}torch {measured.versions['torch']}",
        f"reads {measured.read_bandwidth / 1e9:.1f} GB/s, copies "
        f"{measured.copy_bandwidth / 1e9:.1f} GB/s (quartiles within "
        f"{100 * measured.bandwidth_spread:.0f} %)",
        "operators: " + ", ".join(f"{k} {v}" for k, v in measured.implementations.items()),
        "",
        tables.text(tables.table_of(header, rows)),
    ]
    if any(phase.fraction > 1 for phase in measured.phases):
        lines.append(
            f"Above 100 %: some of the {measured.row_bytes / 1e6:.1f} MB of rows were still in "
            "the caches."
        )
    lines += [
        "",
        f"DoGE step {measured.doge_ms:.1f} ms, plain step {measured.plain_ms:.1f} ms: "
        f"{measured.overhead:.3f} [{measured.overhead_low:.3f}, {measured.overhead_high:.3f}] "
        f"(median and quartiles of {settings['steps']} pairs)",
        f"memory: a DoGE step keeps {measured.extra_bytes / 1e6:.1f} MB beside a plain one",
    ]
    return "\n".join(lines)


def _row(phase: TimedPhase) -> list[str]:
    row = [phase.name, f"{phase.milliseconds:.3f}", f"{100 * phase.share:.1f} %"]
    if not phase.num_bytes:
        return [*row, "-", "-", "-"]
    least = f"{phase.num_bytes / 1e6:.1f}" if phase.num_bytes >= 5e4 else "< 0.1"
    rate = phase.num_bytes / phase.milliseconds / 1e6 if phase.milliseconds else 0.0
    return [*row, least, f"{rate:.1f}", f"{100 * phase.fraction:.0f} %"]
