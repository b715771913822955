"""The (K, N, dtype) that every benchmark of the operators shares, and the memory they live in.

Two shapes. "matrix" is one contiguous [K, N], what a user of the bare operators has. "blocks" is
what the optimizer has: one [K, n_p] per parameter of a GPT-2-shaped network, two embeddings,
twelve tensors a layer, the last norm. Most blocks are tiny and most columns are in a few.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_ROWS = (2, 7, 22, 50, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MATRIX, BLOCKS = "matrix", "blocks"
SHAPES = (MATRIX, BLOCKS)
# Elements: rows start on a cache line, as in the flat buffer.
ALIGNMENT = 64
# Rows a multiple of a page apart share their cache sets; the flat buffer avoids it.
PAGE_BYTES = 4096
# Layers, width, vocabulary, positions; the largest that fits is taken.
MODELS = (
    (12, 768, 50_257, 1024),
    (6, 768, 50_257, 1024),
    (6, 512, 16_384, 1024),
    (4, 256, 16_384, 512),
    (4, 256, 8_192, 512),
    (2, 192, 4_096, 256),
    (2, 128, 2_048, 128),
    (1, 64, 1_024, 64),
    (1, 32, 256, 64),
    (1, 16, 64, 16),
)


@dataclass(frozen=True)
class OperatorProblem:
    """Rows of K domains, cut into blocks."""

    num_rows: int
    dtype: torch.dtype
    shape: str
    sizes: tuple[int, ...]
    """Columns of each block."""

    @property
    def num_columns(self) -> int:
        """N."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Of all rows: what one pass must read."""
        return self.num_rows * self.num_columns * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """Without the prefix."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return (
            f"K={self.num_rows} N={self.num_columns / 1e6:.3g}M {self.dtype_name} "
            f"{self.shape} ({len(self.sizes)})"
        )


class Arena:
    """One long piece of memory with random numbers, from which every problem is cut.

    Filled once per dtype, since drawing the numbers takes longer than most measurements. What
    lies between the rows is random too: an operator that reads beyond a row is wrong at once.

    Args:
        num_bytes: of the rows; half as much is there for what an operator writes.
    """

    def __init__(self, dtype: torch.dtype, num_bytes: int, device: torch.device | str) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(0)
        self.values = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.values.normal_(generator=generator)
        self.scratch = torch.zeros(len(self.values) // 2, dtype=dtype, device=device)

    def problem(self, num_rows: int, shape: str) -> OperatorProblem:
        """The largest of this shape that the memory holds."""
        if shape == MATRIX:
            # Not a multiple of a page, and of a cache line.
            columns = len(self.values) // num_rows // 1024 * 1024 - 960
            return OperatorProblem(num_rows, self.dtype, shape, (max(columns, ALIGNMENT),))
        for model in MODELS:
            sizes = tuple(model_sizes(*model))
            if num_rows * sum(self._stride(size) for size in sizes) <= len(self.values):
                return OperatorProblem(num_rows, self.dtype, shape, sizes)
        raise ValueError(
            f"{len(self.values)} elements hold no model of {num_rows} rows; the smallest takes "
            f"{num_rows * sum(model_sizes(*MODELS[-1]))}. Give the benchmark more megabytes."
        )

    def blocks(self, problem: OperatorProblem) -> list[Tensor]:
        """The rows, [K, n_p] each."""
        found, first = [], 0
        for size in problem.sizes:
            stride = size if problem.shape == MATRIX else self._stride(size)
            block = self.values[first : first + problem.num_rows * stride]
            found.append(block.view(problem.num_rows, stride)[:, :size])
            first += problem.num_rows * stride
        return found

    def outputs(self, sizes: Sequence[int]) -> list[Tensor]:
        """Contiguous memory to write to, one tensor per size, from the scratch."""
        return list(_cut(self.scratch, sizes))

    def gradients(self, sizes: Sequence[int]) -> list[Tensor]:
        """Contiguous tensors to read, one per size."""
        return list(_cut(self.values, sizes))

    def _stride(self, size: int) -> int:
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        return stride + ALIGNMENT * (stride * self.dtype.itemsize % PAGE_BYTES == 0)


def model_sizes(num_layers: int, width: int, vocab_size: int, positions: int) -> list[int]:
    """Columns per block, in the order of the parameters of a GPT-2-shaped model."""
    layer = [
        *(width, width),
        *(3 * width * width, 3 * width),
        *(width * width, width),
        *(width, width),
        *(4 * width * width, 4 * width),
        *(4 * width * width, width),
    ]
    return [vocab_size * width, positions * width, *(layer * num_layers), width, width]


def coefficients(num_rows: int, device: torch.device | str) -> Tensor:
    """[K] float64, all different from zero, summing to one."""
    ramp_K = torch.arange(1, num_rows + 1, dtype=torch.float64, device=device)
    return ramp_K / ramp_K.sum()


def largest_model(num_elements: int) -> list[int]:
    """Block sizes of the largest model of at most so many parameters, padding included."""
    for model in MODELS:
        sizes = model_sizes(*model)
        if sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) <= num_elements:
            return sizes
    return [max(1, math.floor(num_elements))]


def _cut(memory: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    first = 0
    for size in sizes:
        yield memory[first : first + size]
        first += -(-size // ALIGNMENT) * ALIGNMENT
