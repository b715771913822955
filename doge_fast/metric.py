"""The metric in which an adaptive optimizer measures its steps: D = 1 / (sqrt(v) + eps).

v is the second moment that Adam, AdamW and their kin keep for every element, `exp_avg_sq`. Their
bias correction is left out: it is one factor for all parameters that have taken equally many steps,
and a rule that asks for a metric does not depend on its scale. A parameter without second moments
(SGD, Adafactor, Muon's matrices, and every parameter before the first step) has the Euclidean
metric, D = 1; beside others it hardly counts, since 1 / sqrt(v) is large. An element that has never
had a gradient, v = 0, is left out: D would be 1 / eps, for a step that AdamW never takes, since its
v has the new gradient in it already.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from doge_fast.flat_buffer import local_of


class Metric:
    """The second moments of an optimizer's parameters, read when a step is combined."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Where v is far above its square it does not matter, so one number serves all groups: that
        # of the first one that has second moments. Adafactor's is a pair, and has another meaning.
        found = (
            group["eps"]
            for group in optimizer.param_groups
            if isinstance(group.get("eps"), (int, float))
            and any("exp_avg_sq" in optimizer.state.get(param, ()) for param in group["params"])
        )
        self._eps = next(found, None)

    @property
    def eps(self) -> float:
        """Added to the roots."""
        return self._eps or 0.0

    def moment_of(self, param: Tensor) -> Tensor | None:
        """[numel] of this rank's part of a parameter, in the order of its rows; None: D = 1."""
        moment = self._optimizer.state.get(param, {}).get("exp_avg_sq")
        if moment is None or self._eps is None:
            return None
        flat: Tensor = local_of(moment).contiguous().view(-1)
        # Some optimizers keep a factor of it under this name.
        return flat if flat.numel() == local_of(param).numel() else None

    def section(self, params: Sequence[Tensor], num_columns: int, index: int) -> Tensor | None:
        """[num_columns]: part `index` of the second moments of all `params`, one after another."""
        moments = [self.moment_of(param) for param in params]
        like = next((moment for moment in moments if moment is not None), None)
        if like is None:
            return None
        # Of a parameter without, the number that makes D = 1; also past the last column, where the
        # rows hold zeros.
        section = torch.full_like(like[:1], (1 - self.eps) ** 2).repeat(num_columns)
        first = -index * num_columns
        for param, moment in zip(params, moments, strict=True):
            last = first + param.numel()
            low, high = max(first, 0), min(last, num_columns)
            if moment is not None and low < high:
                section[low:high] = moment[low - first : high - first]
            first = last
        return section
