"""How long steps and operators take on a device; what is wrong is not timed.

Between rows everything is given back: a wrapped optimizer is a cycle and holds its rows until a
collection, which for a large model is half of a GPU.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks import anchor, models, operators, optimizer_step, protocol, steps
from benchmarks.gpu.session import Row, Session
from benchmarks.models import PAPER, Shape
from benchmarks.steps import Problem

STEP_ROWS = (7, 22, 50)
# Sizes and domains of what is compared with the fastest plain step.
ANCHORS = (("82M", 7), ("82M", 50), ("124M", 7), ("82M", 22))
# Asked first, and before the others' turn.
FIRST_SIZES = ("82M", "124M")
# Of the memory: rows in float32 are kept where they take less than this.
ROWS_SHARE = 0.5
# Of the rows of an operator: the paper's 82M columns at 22 of bfloat16 and at 7 of float32, and no
# more than leaves room for the float64 truth.
OPERATOR_BYTES, OPERATOR_SHARE = 4 << 30, 1 / 6

# What is timed of a step, by its name in the record: over plain steps, and over the paper's.
KINDS: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in steps.MODES}
ALIGNED: dict[str, Any] = {"mode": steps.STACKED, "score": "aligned"}
ALIGNED_KINDS = {
    "aligned / paper's": ALIGNED,
    "aligned, rows not kept / paper's": {**ALIGNED, "keep_rows": False},
}


def first_steps(session: Session) -> Iterator[Row]:
    """The sizes that are asked first: one after another and stacked, side by side."""
    sizes = {name: PAPER[name] for name in FIRST_SIZES}
    if session.quick:
        sizes = {"tiny": Shape(1, 2, 64, 256, 32)}
    yield from _steps(session, sizes, KINDS)
    # Last: what is asked of a step comes before it if the section is cut.
    yield from _steps(session, sizes, ALIGNED_KINDS)


def further_steps(session: Session) -> Iterator[Row]:
    """The paper's other sizes."""
    sizes = {name: shape for name, shape in PAPER.items() if name not in FIRST_SIZES}
    if session.quick:
        sizes = {"tiny, 2 layers": Shape(2, 2, 64, 256, 32)}
    return _steps(session, sizes, KINDS)


def _steps(
    session: Session, sizes: Mapping[str, Shape], kinds: Mapping[str, dict[str, Any]]
) -> Iterator[Row]:
    """128 x 512 tokens, bfloat16 autocast, over plain training with the same batches."""
    num_rows = STEP_ROWS[: 1 if session.quick else None]
    for num_domains, model, (kind, options) in itertools.product(num_rows, sizes, kinds.items()):
        problem = step_problem(session, sizes[model], num_domains, **options)
        row: Row = {"model": model, "domains": num_domains, "mode": kind, "problem": str(problem)}
        try:
            row |= optimizer_step.measure(
                problem,
                session.device,
                pairs=3 if session.quick else 15,
                seconds=1.0 if session.quick else 8.0,
                with_memory=False,
            ) | {"mode": kind}
        except torch.cuda.OutOfMemoryError as failure:
            row["skipped"] = f"out of memory: {str(failure).splitlines()[0]}"
        yield row
        protocol.release(session.device)


def step_problem(
    session: Session, shape: Shape, num_domains: int, mode: str, **options: Any
) -> Problem:
    """Rows in their gradients' types, if the memory has room for float32; else in bfloat16."""
    bar = optimizer_step.bar_of(mode, num_domains, options.get("score", "paper"))
    problem = Problem(
        shape,
        num_domains,
        max(8, 2 * num_domains) if session.quick else optimizer_step.GPU_SEQUENCES,
        mode=mode,
        # A CPU may take a hundred times as long for it.
        autocast="bfloat16" if session.on_gpu else None,
        bar=None if session.quick else bar,
        **options,
    )
    rows_bytes = 4 * problem.num_rows * models.num_parameters(shape)
    is_large = session.on_gpu and rows_bytes > ROWS_SHARE * session.free_bytes()
    return replace(problem, buffer_dtype="bfloat16" if is_large and problem.keep_rows else None)


def anchors(session: Session) -> Iterator[Row]:
    """Compiled DoGE steps over the fastest plain one; the candidates are tried once a model."""
    asked = ANCHORS[: 1 if session.quick else None]
    sizes = {"tiny": Shape(1, 2, 64, 256, 32)} if session.quick else PAPER
    fastest: dict[str, tuple[str, int]] = {}
    for name, num_domains in asked:
        model = "tiny" if session.quick else name
        problem = step_problem(session, sizes[model], num_domains, steps.STACKED)
        problem = replace(problem, bar=None if session.quick else anchor.GPU_BARS[num_domains])
        row: Row = {"model": model, "domains": num_domains, "problem": str(problem)}
        try:
            row |= anchor.measure(
                problem,
                session.device,
                pairs=3 if session.quick else 15,
                seconds=1.0 if session.quick else 8.0,
                plain=fastest.get(model),
            )
            fastest[model] = row["plain_kind"]
        except torch.cuda.OutOfMemoryError as failure:
            row["skipped"] = f"out of memory: {str(failure).splitlines()[0]}"
        yield row
        protocol.release(session.device)


def operator_times(session: Session) -> Iterator[Row]:
    """The ratio table of `benchmarks.operators`, all implementations side by side."""
    # What is asked first comes first: a section that is cut has seen it.
    large = tuple(operators.BY_SHAPE)
    first = (*large, "cross_entropy")
    others = tuple(name for name in operators.OPERATORS if name not in first)
    rounds: list[tuple[tuple[str, ...], tuple[int, ...], tuple[torch.dtype, ...]]] = [
        (large, (7, 22), (torch.bfloat16,)),
        (large, (7, 22), (torch.float32,)),
        (("cross_entropy",), (7,), (torch.bfloat16,)),
        (others, (7, 22, 50), (torch.float32, torch.bfloat16)),
        (large, (50, 128, 2), (torch.bfloat16, torch.float32)),
        ((*large, "accumulate"), (7, 22, 50), (torch.float16,)),
        (large, (7, 22), (torch.float64,)),
    ]
    if session.quick:
        quick = (torch.float32, torch.bfloat16)
        rounds = [(first, (7,), quick), (others, (7,), quick)]
    num_bytes = min(OPERATOR_BYTES, int(session.free_bytes() * OPERATOR_SHARE))
    for names, num_rows, dtypes in rounds:
        found = operators.all_cases(
            session.device,
            num_bytes=4_000_000 if session.quick else num_bytes,
            operators=names,
            num_rows=num_rows,
            dtypes=dtypes,
            with_fallback=True,
        )
        for case in found:
            yield from operators.measure(
                case,
                rounds=3 if session.quick else 11,
                seconds=0.1 if session.quick else 1.0,
                # What is slow stays slow: no second try.
                attempts=1,
            )
            # It holds the memory of its dtype, and the next may be of another.
            del case
            protocol.release(session.device)
