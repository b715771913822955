"""Embeddings: the gradient of a row is the sum over the tokens that looked this row up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.kernels import segment_sum
from doge_fast.stacked.layers.batch import DomainRun
from doge_fast.stacked.layers.rule import Gradients, LayerRule
from doge_fast.stacked.layers.token_sums import put, sums_one_by_one


class EmbeddingRule(LayerRule):
    """y_t = W[id_t], hence dW = sum_t onehot(id_t) dy_t^T."""

    params = ("weight",)

    def covers(self, module: Any) -> bool:
        """False with max_norm, which changes the matrix, and for scaled or sparse gradients."""
        is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return super().covers(module) and is_plain

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The vectors; nothing is saved."""
        return F.embedding(x, module.weight), ()

    def gradients(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Gradients:
        """The gradient of the matrix."""
        if module.padding_idx is not None:
            grad = grad.masked_fill((x == module.padding_idx)[..., None], 0)
        yield module.weight, Lookup(x, grad)


class Lookup(NamedTuple):
    """sum_t onehot(id_t) right_t^T, the gradient of a matrix whose rows are looked up."""

    ids: Tensor
    """[B, ...] int: the row that `right_t` is added to."""
    right: Tensor
    """[B, ..., columns]"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the gradient is computed in."""
        return self.right.dtype

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """As `TokenSum.write`; bitwise reproducible."""
        if not sums_one_by_one(self.right):
            self._write_sorted(run, out, adds)
            return
        for domains, part in run.equal_parts:
            index_GT = part.by_domain(self.ids)
            right_GTC = part.by_domain(self.right, self.right.shape[-1])
            for row_RC, index_T, right_TC in zip(out[domains], index_GT, right_GTC, strict=True):
                if row_RC.dtype == right_TC.dtype:
                    row_RC = row_RC if adds else row_RC.zero_()
                    row_RC.index_add_(0, index_T, right_TC)
                else:
                    value_RC = torch.zeros_like(row_RC, dtype=right_TC.dtype)
                    put(row_RC, value_RC.index_add_(0, index_T, right_TC), adds)

    def _write_sorted(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """Sum by `segment_sum`, over tokens sorted by domain and row."""
        # Not index_add_: on a GPU its atomic additions have no fixed order.
        num_domains, num_rows, width = out.shape
        index_T, right_TC = run.tokens(self.ids), run.tokens(self.right, width)
        device = out.device
        if run.is_equal:
            domain_G1 = torch.arange(num_domains, device=device)[:, None]
            key_T = (index_T.view(num_domains, -1) + domain_G1 * num_rows).flatten()
        else:
            token_T = torch.arange(len(index_T), device=device)
            ends_G = run.token_borders(len(index_T), device)[1:]
            key_T = index_T + torch.bucketize(token_T, ends_G, right=True) * num_rows
        key_T, order = key_T.sort(stable=True)
        borders = torch.searchsorted(key_T, torch.arange(num_domains * num_rows + 1, device=device))
        segment_sum(right_TC, out, add=adds, borders=borders, order=order)
