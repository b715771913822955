"""What must hold whatever the numbers are: laws that the tests of operators and method share."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

Gram = Callable[[Tensor], Tensor]


def normalised_error(actual_KK: Tensor, exact_KK: Tensor) -> float:
    """max |actual_ij - exact_ij| / (||g_i|| ||g_j||): the error of a cosine."""
    norms_K = exact_KK.diagonal().sqrt()
    scale_KK = norms_K.outer(norms_K)
    error_KK = (actual_KK.double() - exact_KK).abs()
    # A zero row must be exactly zero.
    assert not error_KK[scale_KK == 0].any()
    return (error_KK / scale_KK)[scale_KK > 0].max().item()


def assert_symmetric(gram_KK: Tensor) -> None:
    """To the last bit."""
    assert torch.equal(gram_KK, gram_KK.T)


def assert_psd(gram_KK: Tensor, tolerance: float) -> None:
    """No eigenvalue below -`tolerance` K for unit rows: an error e per entry moves one by K e."""
    scale_K = gram_KK.diagonal().clamp(min=torch.finfo(gram_KK.dtype).tiny).rsqrt()
    cosines_KK = gram_KK * scale_K.outer(scale_K)
    assert torch.linalg.eigvalsh(cosines_KK).min() >= -tolerance * len(gram_KK)


def assert_row_permutation_equivariant(gram: Gram, grads_KN: Tensor, tolerance: float) -> None:
    """Rows in another order give the same products in that order."""
    order_K = torch.randperm(len(grads_KN)).to(grads_KN.device)
    expected_KK = gram(grads_KN)[order_K][:, order_K]
    assert normalised_error(gram(grads_KN[order_K]), expected_KK) <= tolerance


def assert_scales_quadratically(gram: Gram, grads_KN: Tensor) -> None:
    """Twice the rows, four times the products: exact, two being a power of two."""
    # In the same layout, which may settle the order of a sum.
    grads_KN = grads_KN.contiguous()
    assert torch.equal(gram(2 * grads_KN), 4 * gram(grads_KN))


def assert_additive_over_columns(
    gram: Callable[[Sequence[Tensor]], Tensor], grads_KN: Tensor, tolerance: float
) -> None:
    """The products of shards add up, called together or apart; an empty shard adds nothing."""
    cut = grads_KN.shape[1] // 3
    shards = [grads_KN[:, :cut], grads_KN[:, cut:cut], grads_KN[:, cut:]]
    whole_KK = gram([grads_KN])
    assert normalised_error(gram(shards), whole_KK) <= tolerance
    assert normalised_error(sum(gram([shard]) for shard in shards), whole_KK) <= tolerance


def assert_simplex(alpha_K: Tensor, ulps: float | None = None) -> None:
    """Non-negative, finite, and one in sum within K (or `ulps`) units in the last place."""
    assert alpha_K.isfinite().all()
    assert (alpha_K >= 0).all()
    slack = (len(alpha_K) if ulps is None else ulps) * torch.finfo(alpha_K.dtype).eps
    assert abs(alpha_K.double().sum().item() - 1) <= slack


def assert_torch_knows(
    name: str, arguments: Sequence[Any], implementation: str, *, changed: Tensor | None = None
) -> None:
    """Schema and fake kernel say what the operator does, and autograd sees what it changes.

    Args:
        name: of the operator, in `torch.ops.doge_fast`.
        changed: a result among the arguments, if there is one.
    """
    operator = getattr(torch.ops.doge_fast, name).default
    options = {"implementation": implementation}
    torch.library.opcheck(operator, tuple(arguments), options)
    if changed is None:
        return
    factor = torch.ones_like(changed, requires_grad=True)
    product = (factor * changed).sum()
    operator(*arguments, **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    # Gradients are data: nothing is recorded.
    assert not changed.requires_grad
