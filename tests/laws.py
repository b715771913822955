"""What must hold whatever the numbers are: laws that the tests of operators and method share."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def normalised_error(actual_KK: Tensor, exact_KK: Tensor) -> float:
    """max |actual_ij - exact_ij| / (||g_i|| ||g_j||): the error of a cosine."""
    norms_K = exact_KK.diagonal().sqrt()
    scale_KK = norms_K.outer(norms_K)
    error_KK = (actual_KK.double() - exact_KK).abs()
    # A zero row must be exactly zero.
    assert not error_KK[scale_KK == 0].any()
    return (error_KK / scale_KK)[scale_KK > 0].max().item()


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
