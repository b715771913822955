"""What generalization estimation costs: each phase of a step against the machine's limits.

The ratio of a DoGE step to a plain one comes from whole steps, alternated, with nobody observing;
the phases from other steps, in which each phase that is named (`doge_fast.tracing`) is timed. Bytes
are the least that a phase can move; bandwidth is measured in the same process.
"""

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
    ProfiledStep,
    Traffic,
)
from doge_fast.pipeline.roofline import Bandwidth, bandwidth
from doge_fast.pipeline.training import device_of
from doge_fast.tracing import observed
from doge_fast.weights.weights_file import plain

SCHEMA_VERSION = 1
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")


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
    check_ranges(config)
    config = replace(config, device=str(_device(config)))
    if config.json is not None:
        _check_writable(config.json)
    # The plain side is built first, and refuses what cannot fit.
    plain_step, doge_step = (ProfiledStep(config, is_doge=each) for each in (False, True))
    device = plain_step.device
    calls = {step.name: step for step in (plain_step, doge_step)}
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    times = alternated(calls, rounds=config.steps, device=device)
    ratio = ratio_of(times["doge"], times["plain"])
    rounds = _timed(plain_step, doge_step, config.steps)
    limits = bandwidth(device)
    measured = Profile(
        settings=plain(config),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        implementations={operator: chosen(device, operator) for operator in OPERATORS},
        num_parameters=sum(p.numel() for p in doge_step.parameters),
        num_rows=doge_step.buffer.num_rows,
        row_bytes=doge_step.buffer.num_bytes,
        tokens=doge_step.tokens.numel(),
        plain_ms=ratio.baseline_ms,
        doge_ms=ratio.variant_ms,
        overhead=ratio.ratio,
        overhead_low=ratio.low,
        overhead_high=ratio.high,
        phases=_phases(rounds, doge_step.least_traffic(), limits),
        read_bandwidth=limits.read,
        copy_bandwidth=limits.copy,
        bandwidth_spread=limits.spread,
        extra_bytes=doge_step.extra_bytes,
    )
    if config.json is not None:
        record = {"schema_version": SCHEMA_VERSION, **asdict(measured)}
        atomic_file.write(config.json, json.dumps(record, indent=1) + "\n")
    return measured


def _timed(
    plain_step: ProfiledStep, doge_step: ProfiledStep, num_rounds: int
) -> list[dict[str, float]]:
    """{phase: seconds of its own} of the DoGE step of each round; "step" is the whole one."""
    device = doge_step.device
    recorded: list[list[_Mark]] = []
    open_marks: list[_Mark] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        mark = _Mark(name, open_marks[-1] if open_marks else None, _now(device))
        open_marks.append(mark)
        try:
            yield
        finally:
            mark.end = _now(device)
            recorded[-1].append(open_marks.pop())

    for _ in range(num_rounds):
        plain_step()
        recorded.append([])
        with observed(timed), timed("step"):
            doge_step()
    synchronize(device)
    rounds = []
    for marks in recorded:
        own: dict[str, float] = defaultdict(float)
        for mark in marks:
            own[mark.name] += mark.seconds()
            if mark.outer is not None and mark.outer.name != "step":
                own[mark.outer.name] -= mark.seconds()
        rounds.append(own)
    return rounds


@dataclass
class _Mark:
    """A range of a step on the host's clock, or in the device's queue."""

    name: str
    outer: "_Mark | None"
    start: Any
    end: Any = None

    def seconds(self) -> float:
        """Of a range that the device has come to the end of."""
        if isinstance(self.start, float):
            return float(self.end - self.start)
        return float(self.start.elapsed_time(self.end)) / 1e3


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _phases(
    rounds: Sequence[dict[str, float]], least: dict[str, Traffic], limits: Bandwidth
) -> tuple[TimedPhase, ...]:
    """The DoGE step taken apart; medians over its steps. "other" is what no phase covers."""
    whole = statistics.median(own["step"] for own in rounds)
    for own in rounds:
        own["other"] = 2 * own["step"] - math.fsum(own.values())
    phases = []
    for name in (*PHASES, "other"):
        seconds = statistics.median(own[name] for own in rounds)
        traffic = least.get(name, Traffic(0, 0))
        fraction = traffic.seconds(limits) / seconds if seconds > 0 else 0.0
        phases.append(TimedPhase(name, 1e3 * seconds, seconds / whole, sum(traffic), fraction))
    return tuple(phases)


def _check_writable(file: Path) -> None:
    """What cannot be written is refused before anything is measured."""
    with failures.writing(file):
        was_there = file.exists()
        file.open("a").close()
        if not was_there:
            # Not the link that leads there.
            file.resolve().unlink()


def _device(config: ProfileConfig) -> torch.device:
    found = device_of(config.device)
    if found.type in ("cpu", "cuda"):
        return found
    if config.device == "auto":
        return torch.device("cpu")
    raise ValueError(f"device must be auto, cpu or cuda; got {config.device!r}.")


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
