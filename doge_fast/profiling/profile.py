"""Cost of generalization estimation: the time of each phase against the machine's limits.

The ratio of a DoGE step to a plain step is measured on alternated whole steps without observers.
The phases are timed in other steps, at the names of `doge_fast.tracing`. Bytes are the least that a
phase can move; bandwidth is measured in the same process.
"""

import json
import logging
import math
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from doge_fast import atomic_file, tracing
from doge_fast.alternation import alternated, ratio_of, synchronize
from doge_fast.flat_buffer import FlatBuffer
from doge_fast.info import device_name, versions
from doge_fast.kernels import chosen
from doge_fast.kernels.dispatch import OPERATORS
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.pipeline import failures, tables
from doge_fast.pipeline.config import ModelConfig, ProfileConfig
from doge_fast.pipeline.config.ranges import Device, check_paths
from doge_fast.pipeline.model import build_model, load_architecture
from doge_fast.pipeline.records import check_out
from doge_fast.pipeline.sizes import SIZES
from doge_fast.pipeline.trainer import device_of
from doge_fast.profiling.roofline import Bandwidth, Traffic, bandwidth
from doge_fast.weights.weights_file import plain

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")
WARM_UP = 2
# Sizes of the family for CPUs.
SMALL_VOCABULARY, PAPER_VOCABULARY = 4096, 50_304
SMALL = ("micro", "tiny", "mini", "small")


class ProfiledStep:
    """A callable that runs one step of AdamW, alone or wrapped in `DoGEOptimizer`."""

    def __init__(self, config: ProfileConfig, *, is_doge: bool) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.is_stacked = config.mode == "stacked"
        self.is_aligned = config.score == "aligned"
        # Training domains and targets.
        self.num_names = config.domains + config.targets
        torch.manual_seed(0)
        model: Any = build_model(
            ModelConfig(model=config.model),
            cast(Any, _Vocabulary(range(_vocab_size(config)))),
            block_size=config.sequence_length,
        )
        # No dropout: its random numbers would differ between the two steps.
        self.model = model.train(False).to(self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        parameters: Any = self.model.named_parameters()
        fused = self.device.type == "cuda" or None
        self.inner = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)
        # [names, sequences of one, L], the same for both steps.
        shape = (self.num_names, config.sequences, config.sequence_length)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        self.tokens = tokens.to(self.device)
        self.batches = [self.tokens.flatten(0, 1)] if self.is_stacked else list(self.tokens)
        self.optimizer = self._wrapped() if is_doge else None

    def _wrapped(self) -> DoGEOptimizer:
        config = self.config
        dtype = config.buffer_dtype
        return DoGEOptimizer(
            self.inner,
            domains=[f"domain {i}" for i in range(config.domains)],
            target={f"target {i}": 1.0 for i in range(config.targets)} or "universal",
            score=config.score,
            # A large mu keeps the weights near uniform; it does not change the cost.
            mu=None if self.is_aligned else 1e6,
            buffer_dtype=None if dtype == "auto" else getattr(torch, dtype),
        )

    def __call__(self) -> None:
        """Run a step."""
        optimizer = self.optimizer
        if optimizer is None:
            for batch in self.batches:
                # The step trains on the mean over all names.
                self.learn(batch, self.num_names)
            with tracing.phase("doge_fast.inner_step"):
                self.inner.step()
            self.inner.zero_grad()
            return
        if self.is_stacked:
            sizes = dict.fromkeys(optimizer.names, self.config.sequences)
            with optimizer.stacked(self.model, sizes, keep_rows=False):
                self.learn(self.batches[0])
        else:
            for name, batch in zip(optimizer.names, self.batches, strict=True):
                with self._domain(optimizer, name):
                    self.learn(batch)
        optimizer.step()
        optimizer.zero_grad()

    def _domain(self, optimizer: DoGEOptimizer, name: str) -> AbstractContextManager[None]:
        if self.is_aligned:
            # Both halves in one pass, which a stacked batch of one domain is.
            return optimizer.stacked(self.model, {name: self.config.sequences})
        return optimizer.domain(name)

    def learn(self, tokens: Tensor, num_losses: int = 1) -> None:
        """Forward and backward of the mean token loss, summed over a stacked batch's domains."""
        is_mixed = self.config.dtype == "bfloat16"
        with (
            tracing.phase("doge_fast.forward"),
            torch.autocast(self.device.type, torch.bfloat16, is_mixed),
        ):
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            # A mean for each name; all have equally many sequences.
            num_parts = self.num_names if self.is_stacked else 1
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            loss = losses.view(num_parts, -1).mean(1).sum() / num_losses
        with tracing.phase("doge_fast.backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    @property
    def buffer(self) -> FlatBuffer:
        """The flat buffer of a DoGE step."""
        assert self.optimizer is not None
        return self.optimizer.buffer

    @property
    def extra_bytes(self) -> int:
        """Bytes that a DoGE step keeps in addition to a plain step.

        They hold the flat buffer. If one backward pass fills all rows, the combined gradient
        counts too: it lasts between steps, while plain training holds no gradient at its peak.
        """
        is_one_pass = self.is_stacked or len(self.tokens) == 1
        combined: int = sum(each.nbytes for each in self.parameters)
        return self.buffer.num_bytes + is_one_pass * combined

    def least_traffic(self) -> dict[str, Traffic]:
        """Least traffic of each phase, without activations.

        Forward reads the parameters once per pass; backward reads them and writes a gradient.
        Accumulation reads a gradient and writes a row; if stacked, the backward pass writes the
        rows, as it does with the aligned rule. The Gram matrix reads all rows once, the weighted
        sum those of the training domains. The aligned rule's Gram matrix reads the second moments
        too, and its pass writes the combined gradient, of which the norm is read. The wrapped
        optimizer reads gradient, parameter and state and writes the latter two.
        """
        R = self.buffer.num_rows
        once = sum(each.nbytes for each in self.parameters)
        # Rows that are not kept have given their memory back.
        rows = R * sum(b.num_columns * b.rows_BN.dtype.itemsize for b in self.buffer.blocks)
        states = (value for of_param in self.inner.state.values() for value in of_param.values())
        state = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
        forward = once if self.is_stacked else once * self.num_names
        if self.is_stacked or self.is_aligned:
            backward, accumulate = Traffic(forward, rows), Traffic(0, 0)
        else:
            backward, accumulate = Traffic(forward, forward), Traffic(forward, rows)
        square = 8 * R**2
        if self.is_aligned:
            moments = sum(of_param["exp_avg_sq"].nbytes for of_param in self.inner.state.values())
            gram, weighted_sum = Traffic(rows + moments, square + once), Traffic(once, 0)
        else:
            gram = Traffic(rows, square)
            weighted_sum = Traffic(rows * self.config.domains // R, once)
        return {
            "forward": Traffic(forward, 0),
            "backward": backward,
            "accumulate": accumulate,
            "gram": gram,
            "reweight": Traffic(2 * square, square),
            "weighted_sum": weighted_sum,
            "inner_step": Traffic(2 * once + state, once + state),
        }


class _Vocabulary(list[int]):
    """The part of a tokenizer's interface that `build_model` needs."""

    eos_token_id = 0

    def get_vocab(self) -> dict[int, int]:
        """{id: id}."""
        return dict(zip(self, self, strict=True))


def _vocab_size(config: ProfileConfig) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    if config.model in SIZES:
        return SMALL_VOCABULARY if config.model in SMALL else PAPER_VOCABULARY
    return int(load_architecture(config.model).vocab_size)


@dataclass(frozen=True)
class TimedPhase:
    """A phase of the DoGE step; one line of the table."""

    name: str
    milliseconds: float
    """Median over steps of the phase's time in a step."""
    share: float
    """Its fraction of the median step."""
    num_bytes: int
    """Least bytes that it can move."""
    fraction: float
    """Fraction of the measured bandwidth: the least time for these bytes over the phase's time."""


@dataclass(frozen=True)
class Profile:
    """The measurements; `--json` writes these fields and a `schema_version`."""

    settings: dict[str, Any]
    """The fields of `ProfileConfig`, with the actual device for "auto"."""
    device: str
    threads: int
    versions: dict[str, str]
    implementations: dict[str, str]
    """{operator: implementation in use}."""
    num_parameters: int
    """Number of trainable parameters."""
    num_rows: int
    """R, the number of training domains and targets; with the aligned rule twice that."""
    row_bytes: int
    """Bytes of the memory that rows are in, padding included."""
    tokens: int
    """Tokens of a step, over all rows."""
    plain_ms: float
    doge_ms: float
    """Median of whole steps, as `plain_ms`."""
    overhead: float
    """Median over pairs of the ratio DoGE step / plain step."""
    overhead_low: float
    overhead_high: float
    """Upper quartile of the ratio; `overhead_low` is the lower one."""
    phases: tuple[TimedPhase, ...]
    """Phases of separate DoGE steps; "other" is the time outside all phases."""
    read_bandwidth: float
    copy_bandwidth: float
    """Bytes per second, as `read_bandwidth`; a copy counts bytes read and bytes written."""
    bandwidth_spread: float
    """Interquartile range over median, the larger of read and copy."""
    extra_bytes: int
    """Bytes that a DoGE step keeps in addition to a plain one: the memory of rows, and a combined
    gradient if one backward pass fills all rows."""


def profile(config: ProfileConfig) -> Profile:
    """Measure a step and its phases; write the measurements to `config.json`, if given.

    Raises:
        UserError: the model is unknown, or the device is absent.
    """
    check_paths(config)
    config = replace(config, device=cast(Device, device_of(config.device).type))
    if config.json is not None:
        check_out(config.json, [])
        # Test that the file can be written before measuring.
        with failures.writing(config.json):
            was_there = config.json.exists()
            config.json.open("a").close()
            if not was_there:
                # If the path is a link, keep the link.
                config.json.resolve().unlink()
    plain_step, doge_step = (ProfiledStep(config, is_doge=each) for each in (False, True))
    device = plain_step.device
    calls = {"plain": plain_step, "doge": doge_step}
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
        with failures.writing(config.json):
            atomic_file.write(config.json, json.dumps(record, indent=1) + "\n")
    return measured


def _timed(
    plain_step: ProfiledStep, doge_step: ProfiledStep, num_rounds: int
) -> list[dict[str, float]]:
    """{phase: seconds, without phases inside it} for the DoGE step of each round.

    "step" is the whole step.
    """
    device = doge_step.device
    recorded: list[list[_Mark]] = []
    open_marks: list[_Mark] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        mark = _Mark(
            name.removeprefix("doge_fast."), open_marks[-1] if open_marks else None, _now(device)
        )
        open_marks.append(mark)
        try:
            yield
        finally:
            mark.end = _now(device)
            recorded[-1].append(open_marks.pop())

    for _ in range(num_rounds):
        plain_step()
        recorded.append([])
        with tracing.observed(timed), timed("step"):
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
    """A range of a step; start and end are host times or CUDA events."""

    name: str
    outer: "_Mark | None"
    start: Any
    end: Any = None

    def seconds(self) -> float:
        """Duration; the device must have finished the range."""
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
    """Median time of each phase of the DoGE step; "other" is the time outside all phases."""
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


def profile_table(measured: Profile) -> str:
    """The measurements as text: setting, phases of the step, cost of the whole step."""
    settings = measured.settings
    threads = f"{measured.threads} threads, " if settings["device"] == "cpu" else ""
    header = ["phase", "ms", "share", "least MB", "GB/s", "of bandwidth"]
    rows = [_row(phase) for phase in measured.phases]
    lines = [
        f"{settings['model']}: {measured.num_parameters / 1e6:.2f}M parameters, "
        f"{measured.num_rows} rows, {measured.tokens} tokens a step, {settings['mode']}, "
        f"score {settings['score']}, {settings['dtype']}",
        f"{measured.device}, {threads}torch {measured.versions['torch']}",
        f"reads {measured.read_bandwidth / 1e9:.1f} GB/s, copies "
        f"{measured.copy_bandwidth / 1e9:.1f} GB/s (quartiles within "
        f"{100 * measured.bandwidth_spread:.0f} %)",
        textwrap.fill(
            "operators: " + ", ".join(map(" ".join, measured.implementations.items())), 100
        ),
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
