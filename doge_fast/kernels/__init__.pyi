# The signatures of the sources in kernels/, for type checkers. tests/test_layout.py compares them.

from collections.abc import Sequence

import torch
from torch import Tensor

def accumulate(
    grads: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    add: bool,
    implementation: str | None = None,
) -> None: ...
def fill(grads: Sequence[Tensor], rows: Sequence[Tensor], *, add: bool) -> None: ...
def chosen(device: torch.device | str = "cpu", operator: str = "gram") -> str: ...
def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    shares_T: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor: ...
def implementations(device: torch.device | str = "cpu") -> dict[str, str | None]: ...
def gram(
    grads: Tensor | Sequence[Tensor],
    *,
    second_moments: Tensor | Sequence[Tensor | None] | None = None,
    eps: float = 0.0,
    halves: bool = False,
    implementation: str | None = None,
) -> Tensor: ...
def gram_and_sum(
    grads: Tensor | Sequence[Tensor],
    coefficients_R: Tensor,
    *,
    out: Tensor | Sequence[Tensor],
    second_moments: Tensor | Sequence[Tensor | None] | None = None,
    eps: float = 0.0,
    halves: bool = False,
    implementation: str | None = None,
) -> Tensor: ...
def scale_rows(
    values_RN: Tensor, factors_R: Tensor, *, implementation: str | None = None
) -> None: ...
def segment_sum(
    values_TD: Tensor,
    out_GRD: Tensor,
    *,
    add: bool = False,
    borders: Tensor | None = None,
    segment_T: Tensor | None = None,
    order: Tensor | None = None,
    factor_TD: Tensor | None = None,
    mean_T: Tensor | None = None,
    rstd_T: Tensor | None = None,
    bias_GRD: Tensor | None = None,
    implementation: str | None = None,
) -> None: ...
def weighted_sum(
    grads: Tensor | Sequence[Tensor],
    coefficients_R: Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    implementation: str | None = None,
) -> Tensor | list[Tensor]: ...
