"""A parameter's gradient as a sum over tokens: `Outer`, `Lookup` or `Sum`, as a rule yields it.

The row of a domain is the sum over its tokens.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from doge_fast.kernels import segment_sum
from doge_fast.kernels.schema import sum_dtype
from doge_fast.stacked.layers.batch import DomainRun

# Devices on which each domain's sum over tokens is a call of its own: on a CPU torch's kernels are
# the fastest. Elsewhere launches cost more, and torch's atomic additions have no fixed order.
ONE_BY_ONE = ("cpu",)


class TokenSum(Protocol):
    """A parameter's gradient as a rule yields it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the gradient is computed in."""

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """Write the gradients of the run's G domains into `out`, or add them.

        `out` is [G, *shape of the parameter], of any floating dtype; `out.stride(0)` is arbitrary.
        """


class Sum(NamedTuple):
    """sum_t values_t, the gradient of a gain or a bias."""

    values: Tensor
    """[B, ..., *shape of the parameter]"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the gradient is computed in."""
        return self.values.dtype

    def write(self, run: DomainRun, out: Tensor, adds: bool) -> None:
        """As `TokenSum.write`."""
        num_columns = out[0].numel()
        # One launch for domains of unequal sizes, as torch.sum below is for equal ones.
        if not run.is_equal and not sums_one_by_one(self.values):
            values_TN = run.tokens(self.values, num_columns)
            borders = run.token_borders(len(values_TN), out.device)
            segment_sum(values_TN, out.view(len(out), 1, -1), add=adds, borders=borders)
            return
        for domains, part in run.equal_parts:
            values_GTN = part.by_domain(self.values, num_columns)
            # torch.sum can write into rows of its dtype without a temporary.
            if adds or out.dtype != self.values.dtype:
                put(out[domains], values_GTN.sum(1), adds)
            else:
                torch.sum(values_GTN, 1, out=out[domains].view(-1, num_columns))


def sums_one_by_one(values: Tensor) -> bool:
    """Whether a sum over tokens is one call per domain."""
    return values.device.type in ONE_BY_ONE


def put(out: Tensor, gradient: Tensor, adds: bool) -> None:
    """out = or += a gradient with the same number of elements; the dtypes may differ."""
    value = gradient.view(out.shape)
    if adds:
        out.add_(value)
    else:
        out.copy_(value)


def exact(values: Tensor) -> Tensor:
    """The values in float32, or in float64."""
    return values.to(sum_dtype(values.dtype))
