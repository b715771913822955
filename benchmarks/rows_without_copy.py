"""What a step could gain at most if autograd's own tensors were the rows of the flat buffer.

    python -m benchmarks.rows_without_copy

One side of each pair is today's step, which copies every gradient into its row. The other leaves
the copy out and keeps autograd's tensors alive until the step ends, as rows without a copy would;
Gram matrix and weighted sum read the rows of an earlier step, as many bytes. So the second side has
everything that such rows save, and nothing of what a table of pointers would cost.
"""

import argparse
from collections.abc import Sequence

from torch import Tensor

from benchmarks import steps
from benchmarks.optimizer_step import CPU_PROBLEMS
from benchmarks.steps import DogeStep, Problem
from doge_fast.alternation import paired
from doge_fast.flat_buffer import FlatBuffer


class KeepingBuffer(FlatBuffer):
    """Keeps gradients in the place of copying them, once its rows have been made."""

    kept: list[Tensor]

    def receive(self, row: int, param: Tensor, grad: Tensor) -> None:
        """Note that the row is there, and keep the gradient until the step ends."""
        self._blocks[id(param)].written |= 1 << row
        self.kept.append(grad)

    def clear(self) -> None:
        """Begin another step."""
        super().clear()
        self.kept = []


def without_copy(problem: Problem) -> DogeStep:
    """A step that copies no gradient."""
    side = steps.DogeStep(problem, "cpu")
    for _ in range(steps.WARM_UP):
        side()
    buffer = side.optimizer.buffer
    buffer.__class__ = KeepingBuffer
    buffer.clear()
    return side


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs of steps per row")
    args = parser.parse_args(arguments)
    for problem in CPU_PROBLEMS:
        sides = without_copy(problem), steps.DogeStep(problem, "cpu")
        ratio = paired(*sides, pairs=args.pairs, device="cpu")
        print(
            f"{problem}\n  without the copy / with it = {ratio.ratio:.3f} "
            f"[{ratio.low:.3f}, {ratio.high:.3f}] ({ratio.pairs} pairs)",
            flush=True,
        )


if __name__ == "__main__":
    main()
