"""The (K, N, dtype) that every benchmark of the operators shares, cut into blocks as a model cuts.

Block sizes are those of a GPT-2-shaped network: two embeddings, twelve tensors a layer, the last
norm. Most blocks are tiny and most columns are in a few, which is what the operators meet.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements: rows start on a cache line, as in the flat buffer.
ALIGNMENT = 64


@dataclass(frozen=True)
class OperatorProblem:
    """Rows of K domains over the parameters of a GPT-2-shaped model."""

    name: str
    num_rows: int
    num_layers: int
    width: int
    vocab_size: int
    dtype: torch.dtype = torch.float32

    def sizes(self) -> list[int]:
        """Columns per block, in the order of the model's parameters."""
        width = self.width
        layer = [
            *(width, width),
            *(3 * width * width, 3 * width),
            *(width * width, width),
            *(width, width),
            *(4 * width * width, 4 * width),
            *(4 * width * width, width),
        ]
        return [self.vocab_size * width, 1024 * width, *(layer * self.num_layers), width, width]

    @property
    def num_columns(self) -> int:
        """N."""
        return sum(self.sizes())

    @property
    def num_bytes(self) -> int:
        """Of all rows: what one pass must read."""
        return self.num_rows * self.num_columns * self.dtype.itemsize

    def blocks(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """The rows, [K, n_p] per parameter, random and already touched."""
        generator = torch.Generator(device).manual_seed(0)
        return [self._block(size, device, generator) for size in self.sizes()]

    def coefficients(self, device: torch.device | str = "cpu") -> Tensor:
        """[K] float64, all different from zero, summing to one."""
        ramp_K = torch.arange(1, self.num_rows + 1, dtype=torch.float64, device=device)
        return ramp_K / ramp_K.sum()

    def _block(self, size: int, device: torch.device | str, generator: torch.Generator) -> Tensor:
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        memory = torch.zeros(self.num_rows, stride, dtype=self.dtype, device=device)
        return memory[:, :size].normal_(generator=generator)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, K={self.num_rows}, N={self.num_columns / 1e6:.0f}M, {dtype}"


# For two cores and a few gigabytes.
SMALL = OperatorProblem("6 layers of 512", 7, 6, 512, 16_384)
CPU_PROBLEMS = (
    SMALL,
    OperatorProblem("6 layers of 512", 7, 6, 512, 16_384, torch.bfloat16),
    OperatorProblem("2 layers of 256", 22, 2, 256, 16_384),
    OperatorProblem("2 layers of 256", 50, 2, 256, 16_384),
)
# The paper's proxy and its larger models, with as many domains as its three corpora have.
GPU_PROBLEMS = (
    OperatorProblem("12 layers of 768", 7, 12, 768, 50_257),
    OperatorProblem("12 layers of 768", 7, 12, 768, 50_257, torch.bfloat16),
    OperatorProblem("12 layers of 768", 22, 12, 768, 50_257),
    OperatorProblem("12 layers of 768", 22, 12, 768, 50_257, torch.bfloat16),
    OperatorProblem("12 layers of 768", 50, 12, 768, 50_257, torch.bfloat16),
    OperatorProblem("36 layers of 1200", 7, 36, 1200, 50_257, torch.bfloat16),
)
