"""The checks of operators, small, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.launches

Sizes are odd: what a kernel reads past its rows lies outside of an allocation, where torch's
allocator gives each tensor its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1).
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks.gpu.checks import correctness
from benchmarks.gpu.session import Session


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch and count; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = torch.empty(0, device=parser.parse_args(arguments).device).device
    rows = list(correctness(Session(device, quick=True)))
    wrong = [row for row in rows if not row["correct"]]
    for row in wrong:
        print(f"WRONG: {row}")
    print(f"{len(rows)} launches, {len(wrong)} with wrong results")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
