"""Runs that learned weights: what they learned, over the steps, and whether it has settled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import Floats, nan_mean, stat_of
from doge_fast.pipeline.reporting.wording import Stat, listed, to_float, to_floats

UNIVERSAL, MIX = "universal", "mix"
# Of the distance from uniform: what the last fifth of the steps may still have moved.
MOST_DRIFT = 0.05


@dataclass(frozen=True)
class Proxy:
    """Proxy runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Stands for all seeds in what they share."""
        return self.runs[0]

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return self.first.domains

    @property
    def is_doremi(self) -> bool:
        """Whether excess loss over a reference moved its weights, the baseline, and not W."""
        return self.first.stage == "doremi"

    @property
    def is_for_all_domains(self) -> bool:
        """Whether every training domain is to get better."""
        return self.is_doremi or set(self.first.config["target"]) <= {UNIVERSAL, MIX}

    @property
    def about(self) -> str:
        """Where the weights come from, in words."""
        return "learned by DoReMi" if self.is_doremi else f"learned for {self.target}"

    @property
    def target(self) -> str:
        """For whom the weights are, in words."""
        names = [UNIVERSAL] if self.is_doremi else list(self.first.config["target"])
        if names == [UNIVERSAL]:
            return "all domains"
        return listed(_target_word(name, alone=len(names) == 1) for name in names)

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty where no run has a step."""
        known = known_weights(self.runs)
        return {name: stat_of(each[name] for each in known) for name in self.domains if known}

    @property
    def has_steps(self) -> bool:
        """Whether there is something to draw: a step past the first line that all seeds logged."""
        return bool(self._common_steps("excess" if self.is_doremi else "gain"))

    @property
    def rows(self) -> tuple[str, ...]:
        """Domains and targets that the proxy saw, in the order of the Gram matrix."""
        if self.is_doremi:
            return self.domains
        return tuple(next(line["rows"] for line in self.first.train if "rows" in line))

    def series(self, key: str, names: Sequence[str]) -> tuple[Floats, Floats]:
        """(steps [T], values [S, T, len(names)]) of the steps that all S seeds have logged."""
        steps = self._common_steps(key)
        values = [
            [[to_float(line[key].get(name)) for name in names] for line in _lines(run, steps)]
            for run in self.runs
        ]
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    def cosine(self) -> Floats:
        """[R, R]: cosines between the gradients of `rows`, mean over steps and seeds."""
        lines = [line["cosine"] for run in self.runs for line in run.train if "cosine" in line]
        return nan_mean(np.array(lines, dtype=np.float64))

    def mean_over_steps(self, key: str) -> Floats:
        """[K]: mean of W or a part of it, every step weighing as much as its learning rate.

        The logarithm of a domain weight moves by lr * W / mu (eq. update_dw), so this is what
        moved the weights, up to the common factor.
        """
        steps, values_STK = self._common_steps("gain"), self.series(key, self.domains)[1]
        rates = [[[to_float(line["lr"])] for line in _lines(run, steps)] for run in self.runs]
        lr_ST1 = np.asarray(rates, dtype=np.float64)
        gain_STK = np.ma.masked_invalid(values_STK)
        weights_STK = np.broadcast_to(lr_ST1, gain_STK.shape)
        average = np.ma.average(gain_STK, axis=(0, 1), weights=weights_STK)
        mean_K: Floats = np.ma.filled(average, math.nan)
        return mean_K

    def _common_steps(self, key: str) -> list[int]:
        steps = [{line["step"] for line in run.train if key in line} for run in self.runs]
        return sorted(set.intersection(*steps))

    @cached_property
    def movement(self) -> "Movement":
        """How far the running average has moved, at every step; see `movement_of`."""
        steps_T, mean_STK = self.series("alpha_mean", self.domains)
        return movement_of(steps_T, mean_STK, self.first.config.get("average_from", 0.0))


def _lines(run: Run, steps: Sequence[int]) -> list[records.Json]:
    by_step = {line["step"]: line for line in run.train}
    return [by_step[step] for step in steps]


def _target_word(item: str, *, alone: bool) -> str:
    name, _, weight = item.partition("=")
    word = "a held-out mixture of all domains" if name == MIX else name
    return word if alone or not weight else f"{word} ({weight})"


def known_weights(runs: Sequence[Run]) -> list[dict[str, float]]:
    """The weights that each run found or used; where none is finished, their averages so far."""
    found = [records.weights_by_name(run.weights) for run in runs if run.weights]
    so_far = (
        next((line["alpha_mean"] for line in reversed(run.train) if "alpha_mean" in line), None)
        for run in runs
    )
    return found or [to_floats(average) for average in so_far if average]


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


def movement_of(steps_T: Floats, mean_STK: Floats, average_from: float) -> Movement:
    """How far the averages of S seeds have moved at each of T logged steps.

    drift(t)     =  sum_j | alpha_bar_j(a, t) - alpha_bar_j(a, a + 0.8 (t - a)) |
    distance(t)  =  sum_j | alpha_bar_j(a, t) - 1 / K |

    alpha_bar(a, t) is the mean over the steps after a, and a the steps that the average leaves
    out. Between two logged steps the weights count as constant, so that the sum of the weights is
    interpolated and no step is rounded to the nearest line.

    Args:
        steps_T: logged steps, ascending.
        mean_STK: the running average over all steps so far.
        average_from: share of all steps that the result leaves out.
    """
    sums_STK = steps_T[:, None] * mean_STK
    left_out = max(step for step in (0.0, *steps_T) if step <= average_from * steps_T[-1])
    start_T = np.where(steps_T > left_out, left_out, 0.0)
    now_STK = _mean_between(start_T, steps_T, steps_T, sums_STK, mean_STK)
    fifth_T = start_T + records.DRIFT_FROM * (steps_T - start_T)
    before_STK = _mean_between(start_T, fifth_T, steps_T, sums_STK, mean_STK)
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


def _mean_between(
    start_T: Floats, end_T: Floats, steps_T: Floats, sums_STK: Floats, mean_STK: Floats
) -> Floats:
    """[S, T, K]: mean of the weights after each start up to each end; at the start, so far."""

    def summed(at_T: Floats) -> Floats:
        columns = [
            [np.interp(at_T, [0.0, *steps_T], [0.0, *sums_T]) for sums_T in sums_TK.T]
            for sums_TK in sums_STK
        ]
        return np.moveaxis(np.asarray(columns), 1, 2)

    length_T1 = (end_T - start_T)[:, None]
    ratio = (summed(end_T) - summed(start_T)) / np.where(length_T1 > 0, length_T1, math.nan)
    return np.where(length_T1 > 0, ratio, mean_STK)
