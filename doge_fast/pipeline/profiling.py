"""What generalization estimation costs: each phase of a step against the machine's limits.

A plain step and a DoGE step on the same model, random tokens and micro-batches. Their ratio comes
from whole steps, alternated, with nobody watching; the phases from other steps, in which each
range that the optimizer names (`doge_fast.tracing`) is timed. Bytes are the least that a phase can
move; bandwidth is measured in the same process.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as operators_seen

import doge_fast.combining
import doge_fast.flat_buffer
import doge_fast.optimizer
from doge_fast.info import device_name, versions
from doge_fast.kernels import chosen
from doge_fast.kernels.dispatch import OPERATORS
from doge_fast.kernels.roofline import Bandwidth, bandwidth
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.pipeline.config import ModelConfig, ProfileConfig
from doge_fast.pipeline.model import SIZES, build_model, load_architecture

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
# More than any machine has, and fewer than a process can start.
MOST_THREADS = 1024
WARM_UP = 2
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")
# Those of the family that are made for CPUs.
SMALL_VOCABULARY, PAPER_VOCABULARY = 4096, 50_304
SMALL = ("tiny", "mini", "small")


class Traffic(NamedTuple):
    """Bytes that must be read and written."""

    read: int
    written: int

    def seconds(self, limits: Bandwidth) -> float:
        """The time this takes at the measured limits; what is read beside a write is a copy."""
        copied = min(self.read, self.written)
        seconds: float = 2 * copied / limits.copy + (self.read - copied) / limits.read
        return seconds


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


class _Vocabulary:
    """As much of a tokenizer as a fresh model asks for."""

    eos_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
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


class _Side:
    """One of the two steps that are compared; calling it runs one."""

    def __init__(self, config: ProfileConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = _model(config).to(device)
        self.inner = _inner_optimizer(config, self.model, device)
        self.tokens = _tokens(config, self.model, device)
        self.range: Callable[[str], Any] = lambda name: nullcontext()

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss, summed over the domains of a stacked batch."""
        with self.range("forward"), self._autocast():
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            # One mean per domain; all have as many sequences.
            num_parts = self.num_rows if self.config.mode == "stacked" else 1
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            return losses.view(num_parts, -1).mean(1).sum() / self.config.micro_batches

    @property
    def num_rows(self) -> int:
        """R: training domains and targets."""
        return self.config.domains + self.config.targets

    def backward(self, loss: Tensor) -> None:
        """Timed."""
        with self.range("backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    def _autocast(self) -> Any:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class _Plain(_Side):
    name = "plain"

    def __call__(self) -> None:
        if self.config.mode == "stacked":
            for batch in self.tokens.unbind(1):
                self.backward(self.loss(batch.flatten(0, 1)) / self.num_rows)
        else:
            for of_domain in self.tokens:
                for batch in of_domain:
                    self.backward(self.loss(batch) / self.num_rows)
        with self.range("inner_step"):
            self.inner.step()
        self.inner.zero_grad()


class _Doge(_Side):
    name = "doge"

    def __init__(self, config: ProfileConfig, device: torch.device) -> None:
        super().__init__(config, device)
        domains = [f"domain {i}" for i in range(config.domains)]
        targets = {f"target {i}": 1.0 for i in range(config.targets)}
        dtype = config.buffer_dtype
        self.optimizer = DoGEOptimizer(
            self.inner,
            domains=domains,
            target=targets or "universal",
            # Large: the weights stay near uniform, and the step costs the same.
            mu=1e6,
            micro_batches=config.micro_batches,
            buffer_dtype=None if dtype == "auto" else getattr(torch, dtype),
        )

    def __call__(self) -> None:
        if self.config.mode == "stacked":
            sizes = dict.fromkeys(self.optimizer.rows, self.tokens.shape[2])
            for batch in self.tokens.unbind(1):
                with self.optimizer.stacked(self.model, sizes):
                    self.backward(self.loss(batch.flatten(0, 1)))
        else:
            for name, of_domain in zip(self.optimizer.rows, self.tokens, strict=True):
                for batch in of_domain:
                    with self.optimizer.domain(name):
                        self.backward(self.loss(batch))
        self.optimizer.step()
        self.optimizer.zero_grad()


SIDES: dict[str, type[_Plain] | type[_Doge]] = {"plain": _Plain, "doge": _Doge}


def profile(config: ProfileConfig) -> Profile:
    """Measure a step, its phases and its memory.

    Writes `config.json`, `config.trace` and `config.trace_operators` where they are asked for.

    Raises:
        ValueError: a setting outside its range, an unknown model, a device that is not there.
    """
    device = _device(config)
    _check(config)
    with _threads(config.threads):
        measured = _of_steps(config, device)
        if config.memory:
            # What this process held is free again: on a GPU its children need the space.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            measured = replace(
                measured, memory=_memory(config, _extra_bytes(config, measured), device)
            )
    if config.json is not None:
        _write(config.json, {"schema_version": SCHEMA_VERSION, **asdict(measured)})
    return measured


def _of_steps(config: ProfileConfig, device: torch.device) -> Profile:
    """All but the memory."""
    plain, doge = _Plain(config, device), _Doge(config, device)
    pairs = _alternated(plain, doge, config.steps)
    spans = _watched(plain, doge, config.steps)
    limits = bandwidth(device)
    if config.trace is not None:
        _write(config.trace, trace_of(spans))
    if config.trace_operators is not None:
        _write_operators(config.trace_operators, doge)
    ratios = [ours / theirs for theirs, ours in pairs]
    low, high = _quartiles(ratios)
    return Profile(
        settings={
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(replace(config, device=str(device))).items()
        },
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        implementations={operator: chosen(device, operator) for operator in OPERATORS},
        num_parameters=_num_parameters(doge),
        num_rows=doge.num_rows,
        row_bytes=doge.optimizer.buffer.num_bytes,
        tokens=doge.tokens.numel(),
        plain_ms=1e3 * statistics.median(theirs for theirs, _ in pairs),
        doge_ms=1e3 * statistics.median(ours for _, ours in pairs),
        overhead=statistics.median(ratios),
        overhead_low=low,
        overhead_high=high,
        phases=_phases(spans, doge, limits),
        read_bandwidth=limits.read,
        copy_bandwidth=limits.copy,
        bandwidth_spread=limits.spread,
    )


def table(measured: Profile) -> str:
    """The measurements as text, within 100 columns but for the names of models and devices."""
    return "\n".join(
        [
            *_heading(measured),
            "",
            f"{'phase':<14}{'ms':>10}{'share':>9}{'least MB':>12}{'GB/s':>9}{'of bandwidth':>15}",
            *(_line(phase) for phase in measured.phases),
            *_footnotes(measured),
        ]
    )


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


def _line(phase: Phase) -> str:
    line = f"{phase.name:<14}{phase.milliseconds:>10.3f}{100 * phase.share:>7.1f} %"
    if not phase.num_bytes:
        return f"{line}{'-':>12}{'-':>9}{'-':>15}"
    rate = phase.num_bytes / phase.milliseconds / 1e6 if phase.milliseconds else 0.0
    least = f"{phase.num_bytes / 1e6:.1f}" if phase.num_bytes >= 5e4 else "< 0.1"
    return f"{line}{least:>12}{rate:>9.1f}{100 * phase.fraction:>13.0f} %"


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


def print_peak(side: str, settings: str) -> None:
    """Print the peak memory of steps of `side`; run in a process of its own."""
    config = ProfileConfig(**json.loads(settings))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config)
    step = SIDES[side](config, device)
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


def _alternated(plain: _Plain, doge: _Doge, num_pairs: int) -> list[tuple[float, float]]:
    """Seconds of (plain, DoGE) steps, the order swapped from pair to pair."""
    for _ in range(WARM_UP):
        plain()
        doge()
    pairs = []
    for number in range(num_pairs):
        found: dict[str, float] = {}
        for side in (plain, doge) if number % 2 else (doge, plain):
            _synchronize(side.device)
            start = time.perf_counter()
            side()
            _synchronize(side.device)
            found[side.name] = time.perf_counter() - start
        pairs.append((found["plain"], found["doge"]))
    return pairs


def _watched(plain: _Plain, doge: _Doge, num_steps: int) -> list[Span]:
    """Ranges of as many steps of both sides."""
    clock = _Clock(plain.device)
    modules: tuple[Any, ...] = (
        doge_fast.optimizer,
        doge_fast.combining,
        doge_fast.flat_buffer,
    )
    originals = [module.phase for module in modules]
    try:
        for module in modules:
            module.phase = clock.range
        for side in (plain, doge):
            side.range = clock.range
        for _ in range(num_steps):
            for side in (plain, doge):
                clock.side = side.name
                with clock.range("step"):
                    side()
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.phase = original
        for side in (plain, doge):
            side.range = lambda name: nullcontext()
    return clock.spans()


def _phases(spans: list[Span], doge: _Doge, limits: Bandwidth) -> tuple[Phase, ...]:
    """The DoGE step taken apart; medians over its steps."""
    steps = [span for span in spans if span.side == "doge" and span.name == "step"]
    per_step: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        inside = [
            span
            for span in spans
            if span.side == "doge" and step.start <= span.start and span.end <= step.end
        ]
        seconds = dict.fromkeys(PHASES, 0.0)
        for span in inside:
            if span.name in seconds:
                seconds[span.name] += span.end - span.start
        # Rows are written in the middle of a backward pass.
        backwards = [span for span in inside if span.name == "backward"]
        seconds["backward"] -= sum(
            span.end - span.start
            for span in inside
            if span.name == "accumulate"
            and any(b.start <= span.start and span.end <= b.end for b in backwards)
        )
        for name, value in seconds.items():
            per_step[name].append(value)
        per_step["other"].append(step.end - step.start - sum(seconds.values()))
    whole = statistics.median(step.end - step.start for step in steps)
    least = _least_traffic(doge)
    found = []
    for name in (*PHASES, "other"):
        seconds_of = statistics.median(per_step[name])
        traffic = least.get(name, Traffic(0, 0))
        found.append(
            Phase(
                name=name,
                milliseconds=1e3 * seconds_of,
                share=seconds_of / whole,
                num_bytes=sum(traffic),
                fraction=traffic.seconds(limits) / seconds_of if seconds_of > 0 else 0.0,
            )
        )
    return tuple(found)


def _least_traffic(doge: _Doge) -> dict[str, Traffic]:
    """What each phase cannot avoid to move, activations left aside.

    Forward reads the parameters once per pass, backward reads them and writes a gradient;
    accumulation reads a gradient and writes a row (and reads it, from the second on; stacked, the
    backward pass does both); the Gram matrix reads all rows once, the weighted sum those of the
    training domains; the wrapped optimizer reads gradient, parameter and state and
    writes the latter two.
    """
    config, params = doge.config, [p for p in doge.model.parameters() if p.requires_grad]
    once = sum(p.numel() * p.element_size() for p in params)
    rows = sum(
        block.rows_RN.numel() * block.rows_RN.element_size()
        for block in doge.optimizer.buffer.blocks
    )
    state = sum(
        value.numel() * value.element_size()
        for of_param in doge.inner.state.values()
        for value in of_param.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    is_stacked = config.mode == "stacked"
    num_passes = config.micro_batches * (1 if is_stacked else doge.num_rows)
    num_added = config.micro_batches - 1
    gradients = once * doge.num_rows * config.micro_batches
    square = 8 * doge.num_rows**2
    return {
        "forward": Traffic(once * num_passes, 0),
        "backward": Traffic(once * num_passes + rows * num_added, rows * (1 + num_added))
        if is_stacked
        else Traffic(once * num_passes, once * num_passes),
        "accumulate": Traffic(0, 0)
        if is_stacked
        else Traffic(gradients + rows * num_added, rows * (1 + num_added)),
        "gram": Traffic(rows, square),
        "reweight": Traffic(2 * square, square),
        "weighted_sum": Traffic(rows * config.domains // doge.num_rows, once),
        "inner_step": Traffic(2 * once + state, once + state),
    }


def _extra_bytes(config: ProfileConfig, measured: Profile) -> int:
    """What a DoGE step keeps and a plain one does not.

    Where one backward pass fills all rows, plain training has no gradient yet at its peak, and the
    combined one, which lasts from step to step, counts too.
    """
    is_one_pass = config.mode == "stacked" or measured.num_rows * config.micro_batches == 1
    return measured.row_bytes + is_one_pass * measured.row_bytes // measured.num_rows


def _memory(config: ProfileConfig, formula: int, device: torch.device) -> dict[str, int] | None:
    """Peaks of both sides and what the difference should be; None where it cannot be measured."""
    try:
        plain, ours = (_peak_of(side, config, device) for side in ("plain", "doge"))
    except RuntimeError as error:
        # The rest was measured, and is not lost.
        _log.warning("%s", error)
        return None
    return {"plain": plain, "doge": ours, "extra": ours - plain, "formula": formula}


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


def _model(config: ProfileConfig) -> Any:
    torch.manual_seed(0)
    vocabulary = cast(Any, _Vocabulary(_vocab_size(config)))
    model = build_model(
        ModelConfig(model=config.model), vocabulary, block_size=config.sequence_length
    )
    # Dropout would draw numbers, other ones for each side.
    model.train(False)
    return model


def _vocab_size(config: ProfileConfig) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    if config.model in SIZES:
        return SMALL_VOCABULARY if config.model in SMALL else PAPER_VOCABULARY
    return int(load_architecture(config.model).vocab_size)


def _inner_optimizer(
    config: ProfileConfig, model: torch.nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    kind: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer]
    options = {"fused": True} if device.type == "cuda" else {}
    optimizer: torch.optim.Optimizer = kind(model.named_parameters(), lr=1e-5, **options)
    return optimizer


def _tokens(config: ProfileConfig, model: Any, device: torch.device) -> Tensor:
    """[R, micro-batches, sequences of one, L], the same for both sides."""
    shape = (
        config.domains + config.targets,
        config.micro_batches,
        config.sequences // config.micro_batches,
        config.sequence_length,
    )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, shape, generator=generator).to(device)


def _num_parameters(side: _Side) -> int:
    return sum(p.numel() for p in side.model.parameters() if p.requires_grad)


def _check(config: ProfileConfig) -> None:
    for name in ("domains", "sequences", "micro_batches", "steps"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(config, name)}.")
    if config.targets < 0:
        raise ValueError(f"targets must be at least 0; got {config.targets}.")
    if config.sequence_length < 2:
        raise ValueError(
            f"sequence_length must be at least 2, one token to predict; got "
            f"{config.sequence_length}."
        )
    if config.sequences % config.micro_batches:
        raise ValueError(
            f"micro_batches must divide the sequences of a domain; got {config.sequences} "
            f"sequences in {config.micro_batches} micro-batches."
        )
    for name in ("threads", "vocab_size"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
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
    if config.device == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device()) if _has_gpu() else torch.device("cpu")
        )
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ValueError(
            f"device must be auto, cpu, cuda or cuda:N; got {config.device!r}."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {config.device!r}.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(
                f"device is {config.device!r}, and torch {torch.__version__} sees {count} GPUs. "
                "Pass --device cpu."
            )
        return torch.device("cuda", device.index or 0)
    return device


def _has_gpu() -> bool:
    return torch.cuda.is_available()


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


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write_operators(path: Path, doge: _Doge) -> None:
    """One DoGE step as torch's profiler sees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if doge.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    doge.range = lambda name: record_function(f"doge_fast.{name}")
    try:
        with operators_seen(activities=activities) as seen:
            doge()
            _synchronize(doge.device)
    finally:
        doge.range = lambda name: nullcontext()
    seen.export_chrome_trace(str(path))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
