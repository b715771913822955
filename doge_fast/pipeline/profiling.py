"""What generalization estimation costs: each phase of a step against the machine's limits.

A plain step and a DoGE step on the same model, random tokens and micro-batches. Their ratio comes
from whole steps, alternated (`doge_fast.alternation`), with nobody observing; the phases from other
steps, in which each phase that is named (`doge_fast.tracing`) is timed. Bytes are the least that a
phase can move; bandwidth is measured in the same process.
"""

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as operators_seen

from doge_fast.alternation import alternated, ratio_of, synchronize
from doge_fast.info import device_name, versions
from doge_fast.kernels import chosen
from doge_fast.kernels.dispatch import OPERATORS
from doge_fast.kernels.roofline import Bandwidth, bandwidth
from doge_fast.pipeline.config import ProfileConfig
from doge_fast.pipeline.profile_report import SIDES, Phase, Profile, Span, trace_of
from doge_fast.pipeline.profile_steps import STEPS, DogeStep, PlainStep, Traffic
from doge_fast.tracing import observed
from doge_fast.weights_file import plain

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
# More than any machine has, and fewer than a process can start.
MOST_THREADS = 1024
WARM_UP = 2
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")


def profile(config: ProfileConfig) -> Profile:
    """Measure a step, its phases and its memory.

    Writes `config.json`, `config.trace` and `config.trace_operators` where they are asked for.

    Raises:
        ValueError: a setting outside its range, an unknown model, a device that is not there.
    """
    device = _device(config)
    _check(config)
    with _threads(config.threads):
        measured, formula = _of_steps(config, device)
        if config.memory:
            # What this process held is free again: on a GPU its children need the space.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            measured = replace(measured, memory=_memory(config, formula, device))
    if config.json is not None:
        _write(config.json, {"schema_version": SCHEMA_VERSION, **asdict(measured)})
    return measured


def _of_steps(config: ProfileConfig, device: torch.device) -> tuple[Profile, int]:
    """All but the memory, and what that should be by its formula."""
    plain_step, doge_step = PlainStep(config, device), DogeStep(config, device)
    calls = {step.name: step for step in (plain_step, doge_step)}
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    times = alternated(calls, rounds=config.steps, device=device)
    ratio = ratio_of(times["doge"], times["plain"])
    spans = _spans(list(calls.values()), config.steps)
    limits = bandwidth(device)
    if config.trace is not None:
        _write(config.trace, trace_of(spans))
    if config.trace_operators is not None:
        _write_operators(config.trace_operators, doge_step)
    measured = Profile(
        settings=plain(replace(config, device=str(device))),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        implementations={operator: chosen(device, operator) for operator in OPERATORS},
        num_parameters=sum(p.numel() for p in doge_step.parameters),
        num_rows=doge_step.num_rows,
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
    )
    return measured, doge_step.extra_bytes


class _Clock:
    """Ranges with a name, on the host's clock or the device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = ""
        self._marks: list[tuple[str, str, Any, Any]] = []
        self._zero = self._now()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        start = self._now()
        try:
            yield
        finally:
            self._marks.append((self.side, name, start, self._now()))

    def spans(self) -> list[Span]:
        """All ranges so far. Waits for the device."""
        synchronize(self.device)
        return [
            Span(side, name, self._since(start), self._since(end))
            for side, name, start, end in self._marks
        ]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _since(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return float(mark - self._zero)
        return float(self._zero.elapsed_time(mark)) / 1e3


def _spans(steps: list[PlainStep], num_rounds: int) -> list[Span]:
    """The phases of a step of each in every round, each phase before the one that it is part of."""
    clock = _Clock(steps[0].device)
    with observed(clock.range):
        for _ in range(num_rounds):
            for step in steps:
                clock.side = step.name
                with clock.range("step"):
                    step()
    return clock.spans()


def _phases(spans: list[Span], least: dict[str, Traffic], limits: Bandwidth) -> tuple[Phase, ...]:
    """The DoGE step taken apart; medians over its steps. "other" is what no phase covers."""
    of_steps: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for span, own in _own_seconds([span for span in spans if span.side == "doge"]):
        seconds[span.name] += own
        if span.name == "step":
            of_steps["step"].append(span.end - span.start)
            of_steps["other"].append(own)
            for name in PHASES:
                of_steps[name].append(seconds[name])
            seconds.clear()
    medians = {name: statistics.median(values) for name, values in of_steps.items()}
    return tuple(
        Phase(
            name=name,
            milliseconds=1e3 * medians[name],
            share=medians[name] / medians["step"],
            num_bytes=sum(least.get(name, ())),
            fraction=least[name].seconds(limits) / medians[name]
            if name in least and medians[name] > 0
            else 0.0,
        )
        for name in (*PHASES, "other")
    )


def _own_seconds(spans: list[Span]) -> Iterator[tuple[Span, float]]:
    """Every span with the time that no span inside it takes: rows are written while a backward
    pass runs. Spans come in the order in which they end.
    """
    ended: list[Span] = []
    for span in spans:
        own = span.end - span.start
        while ended and ended[-1].start >= span.start:
            inner = ended.pop()
            own -= inner.end - inner.start
        ended.append(span)
        yield span, own


def print_peak(side: str, settings: str) -> None:
    """Print the peak memory of steps of `side`; run in a process of its own."""
    config = ProfileConfig(**json.loads(settings))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config)
    step = STEPS[side](config, device)
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        print(torch.cuda.max_memory_allocated(device))
        return
    # 5 resets the high-water mark of the resident set (man 5 proc).
    Path("/proc/self/clear_refs").write_text("5")
    step()
    step()
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) * 1024)


def _memory(config: ProfileConfig, formula: int, device: torch.device) -> dict[str, int] | None:
    """Peaks of both sides and what the difference should be; None where it cannot be measured."""
    try:
        base, ours = (_peak_of(side, config, device) for side in SIDES)
    except RuntimeError as error:
        # The rest was measured, and is not lost.
        _log.warning("%s", error)
        return None
    return {"plain": base, "doge": ours, "extra": ours - base, "formula": formula}


def _peak_of(side: str, config: ProfileConfig, device: torch.device) -> int:
    """Peak bytes of a step of `side`, in a process of its own.

    Raises:
        RuntimeError: that process failed, for want of memory or of a way to measure it.
    """
    environment = {
        **os.environ,
        # glibc otherwise keeps freed memory, and the peak would be that of an earlier moment.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    # Paths are no JSON, and the child writes no files; auto has been settled.
    nothing = {"json": None, "trace": None, "trace_operators": None}
    settings = asdict(replace(config, **nothing, device=str(device)))  # type: ignore[arg-type]
    code = (
        "import sys; from doge_fast.pipeline.profiling import print_peak; print_peak(*sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, side, json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"The peak memory of a {side} step could not be measured: {reason[-1]}")
    return int(done.stdout.split()[-1])


# Of what a number may be; None, where a setting may be that, is not looked at.
_LEAST = {
    **{"domains": 1, "targets": 0, "sequences": 1, "micro_batches": 1, "sequence_length": 2},
    **{"steps": 1, "threads": 1, "vocab_size": 1},
}


def _check(config: ProfileConfig) -> None:
    for name, least in _LEAST.items():
        if (value := getattr(config, name)) is not None and value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}.")
    if config.sequences % config.micro_batches:
        raise ValueError(
            f"micro_batches must divide the sequences of a domain; got {config.sequences} "
            f"sequences in {config.micro_batches} micro-batches."
        )
    if config.threads is not None and config.threads > MOST_THREADS:
        raise ValueError(f"threads must be at most {MOST_THREADS}; got {config.threads}.")
    _check_files(config)


def _check_files(config: ProfileConfig) -> None:
    """What cannot be written is said before anything is measured."""
    files = [getattr(config, name) for name in ("json", "trace", "trace_operators")]
    wanted = [path for path in files if path is not None]
    if len({path.absolute() for path in wanted}) < len(wanted):
        raise ValueError(f"json, trace and trace_operators must be different files; got {wanted}.")
    for path in wanted:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a"):
                pass
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error


def _device(config: ProfileConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}.")
    if device.type == "cpu":
        return device
    index, count = device.index, torch.cuda.device_count()
    if (index or 0) >= count:
        raise ValueError(
            f"device is {name!r}, and torch {torch.__version__} sees {count} GPUs. Pass "
            "--device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Let torch take so many inside, and as many as before afterwards."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


def _write_operators(path: Path, doge: DogeStep) -> None:
    """One DoGE step as torch's profiler sees it."""
    activities = [ProfilerActivity.CPU]
    if doge.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with operators_seen(activities=activities) as seen:
        doge()
        synchronize(doge.device)
    seen.export_chrome_trace(str(path))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
