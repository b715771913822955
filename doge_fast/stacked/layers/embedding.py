"""Embeddings: the gradient of a row of the matrix is the sum over the tokens that looked it up."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import Outer, TokenSum


class EmbeddingRule(LayerRule):
    """y_t = W[id_t], hence dW = sum_t onehot(id_t) dy_t^T."""

    params = ("weight",)

    def covers(self, module: Any) -> bool:
        """Not where the matrix changes in the forward, or its gradient is another one."""
        is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return super().covers(module) and is_plain

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The vectors."""
        return F.embedding(x, module.weight), ()

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, TokenSum]]:
        """Of the matrix."""
        if module.padding_idx is not None:
            grad = grad.masked_fill((x == module.padding_idx)[..., None], 0)
        yield module.weight, Outer(x, grad)
