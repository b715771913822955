"""How far a running average of domain weights has moved, and whether it has settled."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# The average has settled where its last fifth changed it little,
_DRIFT_FROM = 0.8
# by at most so much of its distance from uniform.
MOST_DRIFT = 0.05


@dataclass(frozen=True)
class Movement:
    """How far a running average of domain weights has moved, all as sums of absolute differences.

    Half of such a sum is the share of the tokens that go elsewhere.
    """

    steps: Floats
    """[T]: the steps that were logged."""
    drift: Floats
    """[T]: over the last fifth of the steps up to each, mean over seeds."""
    distance: Floats
    """[T]: from uniform weights, mean over seeds."""
    spread: Floats | None
    """[T]: of a seed from the mean of all, mean over seeds; None for one seed."""

    @property
    def limit(self) -> Floats:
        """[T]: the largest drift that counts as settled; see `is_settled`."""
        part = MOST_DRIFT * self.distance
        return part if self.spread is None else np.minimum(part, self.spread)

    @property
    def is_settled(self) -> bool:
        """Whether more steps would hardly change the result.

        drift  <=  0.05 * distance,     and with several seeds     drift  <=  spread

        An average that leaves uniform at a constant pace has drift = 0.2 * distance, four times
        the limit. One whose weights approach their end as 1 - exp(-t / tau) is below it after
        some 6 tau: twice the steps would then move the average by a tenth of its distance. What
        moves by more than another seed would change is not settled either.
        """
        return bool(self.drift[-1] <= self.limit[-1])


def movement_of(steps_T: Floats, mean_STK: Floats) -> Movement:
    """How far the averages of S seeds have moved at each of T logged steps.

    drift(t)     =  sum_j | alpha_bar_j(t) - alpha_bar_j(0.8 t) |
    distance(t)  =  sum_j | alpha_bar_j(t) - 1 / K |

    alpha_bar(t) is the mean over the steps up to t. Between two logged steps the weights count as
    constant, so that the sum of the weights is interpolated and no step is rounded to the nearest
    line.

    Args:
        steps_T: logged steps, ascending.
        mean_STK: the running average over all steps so far.
    """
    sums_STK = steps_T[:, None] * mean_STK
    now_STK = _mean_until(steps_T, steps_T, sums_STK, mean_STK)
    before_STK = _mean_until(_DRIFT_FROM * steps_T, steps_T, sums_STK, mean_STK)
    uniform = 1 / mean_STK.shape[-1]
    is_several = len(mean_STK) > 1
    return Movement(
        steps=steps_T,
        drift=_distance(now_STK, before_STK),
        distance=_distance(now_STK, np.full_like(now_STK, uniform)),
        spread=_distance(now_STK, now_STK.mean(0, keepdims=True)) if is_several else None,
    )


def _distance(own_STK: Floats, other_STK: Floats) -> Floats:
    """[T]: sum over domains of the absolute difference, mean over seeds."""
    total: Floats = np.abs(own_STK - other_STK).sum(-1).mean(0)
    return total


def _mean_until(end_T: Floats, steps_T: Floats, sums_STK: Floats, mean_STK: Floats) -> Floats:
    """[S, T, K]: mean of the weights up to each end; at step 0 the weights themselves."""
    columns = [
        [np.interp(end_T, [0.0, *steps_T], [0.0, *sums_T]) for sums_T in sums_TK.T]
        for sums_TK in sums_STK
    ]
    summed_STK = np.moveaxis(np.asarray(columns), 1, 2)
    length_T1 = end_T[:, None]
    ratio = summed_STK / np.where(length_T1 > 0, length_T1, np.nan)
    return np.where(length_T1 > 0, ratio, mean_STK)
