"""What generalization estimation costs: each phase of a step against the machine's limits.

The ratio of a DoGE step to a plain one comes from whole steps, alternated, with nobody observing;
the phases from other steps, in which each phase that is named (`doge_fast.tracing`) is timed. Bytes
are the least that a phase can move; bandwidth is measured in the same process.
"""

import json
import logging
import math
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from doge_fast.pipeline.config.ranges import Device, check
from doge_fast.pipeline.model import build_model, load_architecture
from doge_fast.pipeline.records import check_out
from doge_fast.pipeline.sizes import SIZES
from doge_fast.pipeline.training import device_of
from doge_fast.profiling.roofline import Bandwidth, Traffic, bandwidth
from doge_fast.weights.weights_file import plain

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PHASES = ("forward", "backward", "accumulate", "gram", "reweight", "weighted_sum", "inner_step")
WARM_UP = 2
# Those of the family that are made for CPUs.
SMALL_VOCABULARY, PAPER_VOCABULARY = 4096, 50_304
SMALL = ("micro", "tiny", "mini", "small")


class ProfiledStep:
    """A step of AdamW alone, or of `DoGEOptimizer` around it; calling it runs one."""

    def __init__(self, config: ProfileConfig, *, is_doge: bool) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.is_stacked = config.mode == "stacked"
        # R: training domains and targets.
        self.num_rows = config.domains + config.targets
        torch.manual_seed(0)
        model: Any = build_model(
            ModelConfig(model=config.model),
            cast(Any, _Vocabulary(range(_vocab_size(config)))),
            block_size=config.sequence_length,
        )
        # Dropout would draw numbers, other ones for each side.
        self.model = model.train(False).to(self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        parameters: Any = self.model.named_parameters()
        fused = self.device.type == "cuda" or None
        self.inner = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)
        # [R, sequences of a row, L], the same for both steps.
        shape = (self.num_rows, config.sequences, config.sequence_length)
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
            # Large: the weights stay near uniform, and the step costs the same.
            mu=1e6,
            buffer_dtype=None if dtype == "auto" else getattr(torch, dtype),
        )

    def __call__(self) -> None:
        """Run a step."""
        optimizer = self.optimizer
        if optimizer is None:
            for batch in self.batches:
                # The mean over all rows is learned from.
                self.learn(batch, self.num_rows)
            with tracing.phase("doge_fast.inner_step"):
                self.inner.step()
            self.inner.zero_grad()
            return
        if self.is_stacked:
            sizes = dict.fromkeys(optimizer.names, self.config.sequences)
            with optimizer.stacked(self.model, sizes):
                self.learn(self.batches[0])
        else:
            for name, batch in zip(optimizer.names, self.batches, strict=True):
                with optimizer.domain(name):
                    self.learn(batch)
        optimizer.step()
        optimizer.zero_grad()

    def learn(self, tokens: Tensor, num_losses: int = 1) -> None:
        """Forward and backward: the mean loss of a token, summed over a stacked batch's domains."""
        is_mixed = self.config.dtype == "bfloat16"
        with (
            tracing.phase("doge_fast.forward"),
            torch.autocast(self.device.type, torch.bfloat16, is_mixed),
        ):
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
            # One mean per domain; all have as many sequences.
            num_parts = self.num_rows if self.is_stacked else 1
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            loss = losses.view(num_parts, -1).mean(1).sum() / num_losses
        with tracing.phase("doge_fast.backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    @property
    def buffer(self) -> FlatBuffer:
        """The rows of a DoGE step."""
        assert self.optimizer is not None
        return self.optimizer.buffer

    @property
    def extra_bytes(self) -> int:
        """What this step keeps and a plain one does not.

        Where one backward pass fills all rows, plain training has no gradient yet at its peak, and
        the combined one, which lasts from step to step, counts too.
        """
        is_one_pass = self.is_stacked or len(self.tokens) == 1
        combined: int = sum(each.nbytes for each in self.parameters)
        return self.buffer.num_bytes + is_one_pass * combined

    def least_traffic(self) -> dict[str, Traffic]:
        """What each phase cannot avoid to move, activations left aside.

        Forward reads the parameters once per pass, backward reads them and writes a gradient;
        accumulation reads a gradient and writes a row (stacked, the backward pass writes it); the
        Gram matrix reads all rows once, the weighted sum those of the training domains; the wrapped
        optimizer reads gradient, parameter and state and writes the latter two.
        """
        R = self.num_rows
        once = sum(each.nbytes for each in self.parameters)
        rows = sum(block.rows_BN.nbytes for block in self.buffer.blocks)
        states = (value for of_param in self.inner.state.values() for value in of_param.values())
        state = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
        if self.is_stacked:
            forward = once
            backward, accumulate = Traffic(forward, rows), Traffic(0, 0)
        else:
            forward = once * R
            backward, accumulate = Traffic(forward, forward), Traffic(forward, rows)
        square = 8 * R**2
        return {
            "forward": Traffic(forward, 0),
            "backward": backward,
            "accumulate": accumulate,
            "gram": Traffic(rows, square),
            "reweight": Traffic(2 * square, square),
            "weighted_sum": Traffic(rows * (R - self.config.targets) // R, once),
            "inner_step": Traffic(2 * once + state, once + state),
        }


class _Vocabulary(list[int]):
    """As much of a tokenizer as a fresh model asks for."""

    eos_token_id = 0

    def get_vocab(self) -> dict[int, int]:
        """Every token is its number."""
        return dict(zip(self, self, strict=True))


def _vocab_size(config: ProfileConfig) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    if config.model in SIZES:
        return SMALL_VOCABULARY if config.model in SMALL else PAPER_VOCABULARY
    return int(load_architecture(config.model).vocab_size)


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
        UserError: an unknown model, a device that is not there.
    """
    check(config)
    config = replace(config, device=cast(Device, device_of(config.device).type))
    if config.json is not None:
        check_out(config.json, [])
        # What cannot be written is refused before anything is measured.
        with failures.writing(config.json):
            was_there = config.json.exists()
            config.json.open("a").close()
            if not was_there:
                # Not the link that leads there.
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
    """{phase: seconds of its own} of the DoGE step of each round; "step" is the whole one."""
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
