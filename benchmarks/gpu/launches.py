"""A few launches of every kernel, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.launches

Small and odd: what a kernel reads past its rows lies outside of an allocation, where torch's
allocator gives each tensor its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1). Results are checked too.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch

from benchmarks import cases
from benchmarks.gpu.checks import Rows, checked, segment_sums
from benchmarks.gpu.session import Row
from benchmarks.problems import BLOCKS, MATRIX, OperatorProblem

# Pairs of rows, tiles of 16, 24 and 56 rows, and more than CUDA's take.
NUM_ROWS = (2, 7, 13, 22, 50, 128)
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {MATRIX: (4_099,), BLOCKS: (1, 65, 768, 2_050)}


def launches(device: torch.device) -> Iterator[Row]:
    """A row for each call of each implementation that is timed on the device."""
    names = cases.timed_implementations(device)
    for dtype in DTYPES:
        for num_rows in NUM_ROWS:
            for shape, sizes in SIZES.items():
                problem = OperatorProblem(num_rows, dtype, shape, sizes)
                arena = Rows(problem, device)
                for name in names:
                    yield checked(cases.gram_case(arena, problem, [name]), name)
                    yield checked(cases.weighted_sum_case(arena, problem, [name]), name)
        arena = Rows(OperatorProblem(2, dtype, BLOCKS, SIZES[BLOCKS]), device)
        for add in (False, True):
            case = cases.accumulate_case(arena, names, add=add)
            for name in case.ours:
                yield checked(case, name)
        for name in names:
            yield from segment_sums(device, name, dtype, 70)
    for num_rows in NUM_ROWS:
        case = cases.reweight_case(num_rows, device, names)
        for name in case.ours:
            yield checked(case, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch and count; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    rows = list(launches(torch.empty(0, device=parser.parse_args(arguments).device).device))
    wrong = [row for row in rows if not row["correct"]]
    for row in wrong:
        print(f"WRONG: {row}")
    print(f"{len(rows)} launches, {len(wrong)} with wrong results")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
