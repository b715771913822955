"""The operators under pytest-benchmark: its table and its JSON, one group per problem.

    pytest benchmarks/test_operators.py --megabytes 256
    pytest benchmarks/test_operators.py -k "gram and float32" --benchmark-json gram.json

Each group holds our implementations and plain torch's formulations of the same thing. Ours are
checked against float64 first and fail, untimed, where they are wrong; the error of the others is
in `extra_info`. What came of pairing them stands in the table of `python -m benchmarks.operators`.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import cases, protocol
from benchmarks.cases import Case
from benchmarks.problems import BLOCKS, DTYPES, MATRIX, NUM_ROWS, SHAPES, Arena
from doge_fast.alternation import synchronize
from doge_fast.kernels.dispatch import MODULES

NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
IMPLEMENTATIONS = ("cpp", "triton", "cuda")
PLAIN = {
    ("gram", MATRIX): ("mm(x, x.T)", "chunked bmm", "dot of each pair"),
    ("gram", BLOCKS): ("mm of each block", "cat, mm", "cat, chunked bmm"),
    ("weighted_sum", MATRIX): ("a @ x", "foreach mul, add"),
    ("weighted_sum", BLOCKS): ("a @ x", "foreach mul, add"),
    ("accumulate", BLOCKS): ("foreach", "loop"),
    ("segment_sum", MATRIX): ("products, sum",),
    ("reweight", MATRIX): ("small operators",),
}


def runs(operator: str, shape: str) -> list[tuple[str, str]]:
    """(whose, which) of all that may run; what cannot is skipped with its reason."""
    ours = [("ours", name) for name in IMPLEMENTATIONS if (operator, name) in MODULES]
    return ours + [("plain", name) for name in PLAIN[operator, shape]]


def case_and_run(
    operator: str, shapes: tuple[str, ...] = SHAPES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize over the shapes and, for each, over all that may run."""
    parameters = [(shape, *run) for shape in shapes for run in runs(operator, shape)]
    return pytest.mark.parametrize(("shape", "whose", "which"), parameters)


@functools.lru_cache(maxsize=1)
def arena(name: str, megabytes: float, device: str) -> Arena:
    """One at a time: pytest goes through the dtypes in order."""
    return Arena(getattr(torch, name), int(megabytes * 1e6), device)


@pytest.mark.parametrize("dtype", NAMES, scope="module")
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@case_and_run("gram")
def test_gram(
    benchmark: Any, options: Any, dtype: str, num_rows: int, shape: str, whose: str, which: str
) -> None:
    memory = arena(dtype, options.megabytes, options.device)
    problem = memory.problem(num_rows, shape)
    case = cases.gram_case(memory, problem, runnable(which, whose, memory.device))
    run(benchmark, options, case, whose, which)


@pytest.mark.parametrize("dtype", NAMES, scope="module")
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@case_and_run("weighted_sum")
def test_weighted_sum(
    benchmark: Any, options: Any, dtype: str, num_rows: int, shape: str, whose: str, which: str
) -> None:
    memory = arena(dtype, options.megabytes, options.device)
    problem = memory.problem(num_rows, shape)
    case = cases.weighted_sum_case(memory, problem, runnable(which, whose, memory.device))
    run(benchmark, options, case, whose, which)


@pytest.mark.parametrize("dtype", NAMES, scope="module")
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@case_and_run("accumulate", (BLOCKS,))
def test_accumulate(
    benchmark: Any, options: Any, dtype: str, add: bool, shape: str, whose: str, which: str
) -> None:
    memory = arena(dtype, options.megabytes, options.device)
    case = cases.accumulate_case(memory, runnable(which, whose, memory.device), add=add)
    run(benchmark, options, case, whose, which)


@pytest.mark.parametrize("dtype", NAMES, scope="module")
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@case_and_run("segment_sum", (MATRIX,))
def test_segment_sum(
    benchmark: Any, options: Any, dtype: str, num_rows: int, shape: str, whose: str, which: str
) -> None:
    memory = arena(dtype, options.megabytes, options.device)
    case = cases.segment_sum_case(memory, num_rows, runnable(which, whose, memory.device))
    run(benchmark, options, case, whose, which)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@case_and_run("reweight", (MATRIX,))
def test_reweight(
    benchmark: Any, options: Any, num_rows: int, shape: str, whose: str, which: str
) -> None:
    device = torch.device(options.device)
    case = cases.reweight_case(num_rows, device, runnable(which, whose, device))
    run(benchmark, options, case, whose, which)


def runnable(which: str, whose: str, device: torch.device) -> list[str]:
    """The implementation, or a skip with its reason."""
    if whose == "plain":
        return []
    if which not in cases.timed_implementations(device):
        reason = cases.implementations(device)[which]
        pytest.skip(f"{which} on {device}: {reason or 'its time means nothing here'}")
    return [which]


def run(benchmark: Any, options: Any, case: Case, whose: str, which: str) -> None:
    """Check, then time, cold."""
    calls = case.ours if whose == "ours" else case.plain
    if which not in calls:
        pytest.skip(f"{which} is no formulation of {case}")
    call = calls[which]
    try:
        error = case.error(call)
    except RuntimeError as failure:
        if whose == "ours":
            raise
        pytest.skip(f"{which}: {failure}")
    assert whose == "plain" or error <= case.tolerance
    before = None if case.is_small else protocol.cold(case.num_bytes, case.device)

    def setup() -> None:
        if before is not None:
            before()
        synchronize(case.device)

    def timed() -> None:
        call()
        synchronize(case.device)

    benchmark.group = str(case)
    benchmark.extra_info |= {"bytes": case.num_bytes, "error": f"{error:.1e}"}
    benchmark.pedantic(timed, setup=setup, rounds=options.rounds, warmup_rounds=1)
