"""What a report says of proxies: their weights, how far these have moved, and what may be wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from doge_fast.pipeline import records
from doge_fast.pipeline.config import MIX, UNIVERSAL
from doge_fast.pipeline.config.stages import target_of
from doge_fast.pipeline.reporting.runs import RecordedRun, open_runs
from doge_fast.pipeline.reporting.statistics import Stat, share_text, stat_of
from doge_fast.pipeline.wording import as_ascii, listed, plural, wrapped
from doge_fast.weights import diagnosis
from doge_fast.weights.projection import effective_domains

Floats = npt.NDArray[np.float64]
# The average has settled where its last fifth changed it little,
_DRIFT_FROM = 0.8
# by at most so much of its distance from uniform.
MOST_DRIFT = 0.05
# Weights have hardly moved if each is within this share of the uniform weight.
_UNMOVED = 0.02
# As a share of the uniform weight. In docs/evidence.md a domain at half of it lost a quarter of its
# perplexity. One at a twentieth lost nothing, since similar domains made up for it.
_STARVED = 1 / 3


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


@dataclass(frozen=True)
class Proxy:
    """Proxy runs that differ in nothing but their seed."""

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return self.runs[0].domains

    @property
    def is_doremi(self) -> bool:
        """Whether DoReMi, the baseline, learned the weights, from excess loss instead of W."""
        return self.runs[0].record.stage == "doremi"

    @property
    def target(self) -> str:
        """The targets of the weights, in words."""
        items, names = self.runs[0].config.target, []
        if self.is_doremi or items == (UNIVERSAL,):
            return "all domains"
        for item in items:
            name, weight = target_of(item)
            name = "a held-out mixture of all domains" if name == MIX else name
            names.append(f"{name} ({weight})" if weight and len(items) > 1 else name)
        return listed(names)

    @cached_property
    def arm(self) -> records.ArmRecord:
        """Its label and runs, as a column of a table."""
        about = "learned by DoReMi" if self.is_doremi else f"learned for {self.target}"
        return records.ArmRecord(self.label, about, tuple(run.name for run in self.runs))

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty if no run has logged a step."""
        return mean_weights(self.runs)

    @property
    def has_steps(self) -> bool:
        """Whether all seeds have logged a step after step 0, so that there is a course to draw."""
        return bool(len(self.series("alpha_mean")[0]) > 1)

    def series(self, key: Literal["alpha", "alpha_mean"]) -> tuple[Floats, Floats]:
        """(steps [T], weights [S, T, K]) of the steps that all S seeds have logged."""
        by_step = [{line.step: getattr(line, key) for line in run.train} for run in self.runs]
        known = [{step for step, weights in each.items() if weights} for each in by_step]
        steps = sorted(set.intersection(*known))
        values = [[[each[t].get(name) for name in self.domains] for t in steps] for each in by_step]
        # A domain that a line lacks is nan.
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @cached_property
    def movement(self) -> Movement:
        """How far the running average has moved, at every step; see `movement_of`."""
        steps_T, mean_STK = self.series("alpha_mean")
        return movement_of(steps_T, mean_STK)

    @property
    def has_moved(self) -> bool:
        """Whether a weight is 2 % or more away from uniform; always true for a single domain."""
        uniform = 1 / len(self.domains)
        furthest = max(abs(stat.mean - uniform) for stat in self.weights.values())
        return furthest >= _UNMOVED * uniform or len(self.domains) == 1

    def summary(self) -> str:
        """The largest and smallest weights, and whether the result has settled."""
        if not self.has_steps:
            return f"{self.label}: has not logged a step yet."
        uniform = 1 / len(self.domains)
        ranked = sorted(self.weights.items(), key=lambda item: -item[1].mean)
        most = [ranked[0], *(item for item in ranked[1:2] if item[1].mean > uniform)]
        top = listed(
            f"{name} {share_text(stat)} ({stat.mean / uniform:.1f}\N{NO-BREAK SPACE}× uniform)"
            for name, stat in most
        )
        least = f", least to {ranked[-1][0]} {share_text(ranked[-1][1])}" if ranked[1:] else ""
        is_uniform = most[0][1].mean - ranked[-1][1].mean < 1e-9 and len(ranked) > 1
        where = "the weights are uniform" if is_uniform else f"most goes to {top}{least}"
        count = effective_domains(stat.mean for stat in self.weights.values())
        moved = self.movement
        seeds = "" if moved.spread is None else f", and seeds differ by {_share(moved.spread)}"
        state = "has settled" if moved.is_settled else "is still moving"
        return (
            f"{self.label}, for {self.target}: {where}; effectively "
            f"{count:.1f} of {plural(len(self.domains), 'domain')}. The result "
            f"{state if self.has_moved else 'has hardly moved'}: the last fifth of the "
            f"{int(moved.steps[-1])} steps moved {_share(moved.drift)} of the tokens between "
            f"domains; it lies {_share(moved.distance)} from uniform weights{seeds}."
        )

    def warnings(self) -> Iterator[str]:
        """Sentences on possible faults of the weights, with remedies."""
        if not self.has_steps:
            return
        lines = [line for run in self.runs for line in run.train if line.lr is not None]
        lost = sum(line.skipped for line in lines)
        if sentence := diagnosis.skipped(lost, len(lines), "logged steps"):
            yield sentence
            return
        config, number = self.runs[0].config, len(self.domains)
        is_universal = self.is_doremi or self.runs[0].target_names <= {UNIVERSAL, MIX}
        slower, faster, other = "larger --mu", "A smaller --mu or more", " or --target mix"
        if self.is_doremi:
            slower, faster, other = "smaller --step-size", "A larger --step-size or more", ""
        elif config.score == "aligned":
            faster = "More"
        starved = [name for name, stat in self.weights.items() if stat.mean < _STARVED / number]
        # Seed by seed: if seeds collapse onto different domains, their mean has not collapsed.
        last_SK = self.series("alpha")[1][:, -1]
        seeds = (dict(zip(self.domains, last_K, strict=True)) for last_K in last_SK.tolist())
        sentences = filter(None, map(diagnosis.collapsed, seeds))
        if is_universal and (sentence := next(sentences, None)):
            yield f"{sentence} A {slower} or more --smoothing keeps them apart."
        elif self.has_moved:
            if starved and is_universal:
                yield (
                    f"{listed(starved)} would be read less than a third as often as at uniform "
                    f"weights, and a small model tends to pay for it there. Try a {slower}{other}, "
                    "or set a floor: doge-fast weights constrain --floor."
                )
        elif diagnosis.have_equal_scores(
            number, config.domain_max_grad_norm, is_universal=config.target == (UNIVERSAL,)
        ):
            yield (
                "the weights hardly left uniform: two domains whose gradients are clipped to one "
                "norm have equal scores, whatever --mu is. Use --domain-max-grad-norm 0."
            )
        else:
            yield f"the weights hardly left uniform. {faster} steps would move them."
        if self.has_moved and not self.movement.is_settled:
            yield "the weights are still drifting; more steps would change the result."


def _share(distance_T: Floats) -> str:
    """The last sum of absolute differences as a share of the tokens, to two digits."""
    percent = 50 * distance_T[-1]
    return f"{percent:.{1 if percent >= 1 else 2}f}\N{NO-BREAK SPACE}%"


def mean_weights(runs: Sequence[RecordedRun]) -> dict[str, Stat]:
    """{domain: weight} over runs, of the domains that all of them have.

    Runs without weights.json are left out. If no run has one, the last running averages count.
    """
    weights = [records.weights_by_name(run.weights) for run in runs if run.weights is not None]
    if not weights:
        averages = ([line.alpha_mean for line in run.train if line.alpha_mean] for run in runs)
        weights = [steps[-1] for steps in averages if steps]
    names = [name for name in (weights or [{}])[0] if all(name in other for other in weights)]
    return {name: stat_of(by_name[name] for by_name in weights) for name in names}


def warnings_on(run: Path) -> list[str]:
    """Warnings on the weights of a run, whether it is complete or not."""
    try:
        return list(Proxy(run.name, tuple(open_runs([run]))).warnings())
    except ValueError as error:
        # Damaged metrics are no reason to fail: the weights themselves exist.
        return [str(error)]


def remarks_on(run: Path) -> list[str]:
    """Summary and warnings on the weights of a run of stage one, for a terminal."""
    proxy = Proxy(run.resolve().name, tuple(open_runs([run])))
    warnings = [*proxy.runs[0].record.warnings]
    warnings += [f"{proxy.label}: {sentence}" for sentence in proxy.warnings()]
    remarks = [proxy.summary(), *(f"Warning: {each}" for each in warnings)]
    return [as_ascii(wrapped(each)) for each in remarks]
