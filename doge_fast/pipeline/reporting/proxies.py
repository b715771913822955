"""Runs that learned weights: what they learned, over the steps, and whether it has settled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.records.movement import Floats, Movement, movement_of
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.statistics import nan_mean, stat_of
from doge_fast.pipeline.reporting.wording import Stat, listed, to_floats

UNIVERSAL, WORST, MIX = "universal", "worst", "mix"


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
        return self.is_doremi or set(self.first.config["target"]) <= {UNIVERSAL, WORST, MIX}

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
        if names == [WORST]:
            return "the domains that improve least"
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
            [[line[key].get(name) for name in names] for line in _lines(run, steps)]
            for run in self.runs
        ]
        # A null becomes nan.
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
        rates = [[[line["lr"]] for line in _lines(run, steps)] for run in self.runs]
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
    def movement(self) -> Movement:
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
