"""Embeddings: the gradient of a vector is the sum over the tokens that looked it up."""

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
    """sum_t onehot(id_t) right_t^T, the gradient of a table [V, D] of vectors that ids look up."""

    ids: Tensor
    """[B, ...] int: the vector that `right_t` is added to."""
    right: Tensor
    """[B, ..., D]"""

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
            ids_GT = part.by_domain(self.ids)
            right_GTD = part.by_domain(self.right, self.right.shape[-1])
            for out_VD, ids_T, right_TD in zip(out[domains], ids_GT, right_GTD, strict=True):
                if out_VD.dtype == right_TD.dtype:
                    out_VD = out_VD if adds else out_VD.zero_()
                    out_VD.index_add_(0, ids_T, right_TD)
                else:
                    value_VD = torch.zeros_like(out_VD, dtype=right_TD.dtype)
                    put(out_VD, value_VD.index_add_(0, ids_T, right_TD), adds)

    def _write_sorted(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """Sum by `segment_sum`, over tokens sorted by domain and vector."""
        # Not index_add_: on a GPU its atomic additions have no fixed order.
        num_domains, num_vectors, width = out.shape
        ids_T, right_TD = run.tokens(self.ids), run.tokens(self.right, width)
        device = out.device
        # A token's key is its vector's place in `out`: domain * V + id.
        if run.is_equal:
            domain_G1 = torch.arange(num_domains, device=device)[:, None]
            key_T = (ids_T.view(num_domains, -1) + domain_G1 * num_vectors).flatten()
        else:
            token_T = torch.arange(len(ids_T), device=device)
            ends_G = run.token_borders(len(ids_T), device)[1:]
            key_T = ids_T + torch.bucketize(token_T, ends_G, right=True) * num_vectors
        key_T, order = key_T.sort(stable=True)
        segment_sum(right_TD, out, add=adds, segment_T=key_T, order=order)
