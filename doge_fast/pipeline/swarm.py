"""What a swarm of base models at many mixtures says of any mixture: two laws, fitted and judged.

R runs, K training domains, D of them aimed at. For every domain d a law gives the held-out loss:

    linear in logarithms    l_d(w) = a_d + sum_j b_dj log(w_j + f / K)
    mixing law              l_d(w) = c_d + exp(a_d + sum_j b_dj w_j)

with a term for the seed of each run, which runs of one seed share. The regressor is scikit-learn's
ridge regression; its penalty, f and c_d are chosen by cross-validation within the runs that it is
fitted to, and the law by the error on runs that were left out of all that.

Source: RegMix (Liu et al., 2024): small models at drawn mixtures, a regression, the mean of the
mixtures that it finds best. Data Mixing Laws (Ye et al., 2024): the second law.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from doge_fast.pipeline import records
from doge_fast.pipeline.records.movement import Floats

LINEAR, MIXING = "linear in log-weights", "mixing law"
LEAST_RUNS = 8
_FOLDS = 5
_INNER_FOLDS = 3
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
# f: the share of a uniform weight below which less text makes no difference.
_FLOORS = (0.03, 0.1, 0.3, 1.0)
# c_d, as shares of the domain's lowest loss in the swarm.
_ASYMPTOTES = (0.0, 0.5, 0.8, 0.95)
# Simple laws hold nearby alone, so runs whose mean loss is so much above the lowest of their seed
# are left out; never more than half of all.
_REACH = 0.1
# Of a weight, for slopes; less than it is rounding.
_NUDGE = 1e-6
_BOOTSTRAPS = 200


@dataclass(frozen=True)
class Swarm:
    """Runs, their mixtures and what they came to; hashable, so that it is fitted once."""

    names: tuple[str, ...]
    """Training domains, [K]."""
    weights: tuple[tuple[float, ...], ...]
    """[R, K]."""
    losses: tuple[tuple[float, ...], ...]
    """[R, D]: held-out, in nats per token."""
    seeds: tuple[int, ...]
    """[R]."""


class Error(NamedTuple):
    """Of a law on runs that it was not fitted to, root mean square, in nats."""

    average: float
    """Of the mean loss over the domains."""
    domain: float
    """Of one domain's loss."""


@dataclass(frozen=True)
class Regression:
    """The better of the laws, fitted.

    Its own uncertainty is that of a bootstrap over the runs: what is asked of it is asked of every
    refit too, in the order of the first axis [B].
    """

    swarm: Swarm
    """What it is fitted to."""
    errors: dict[str, Error]
    """Of each law."""
    law: str
    """The one with the smaller error of the average."""
    model: Any
    refits: tuple[Any, ...]
    best_K: Floats
    """The mean of `best_BK`: where refits disagree, for a law hardly curves there, a single one
    would end in a corner."""
    best_BK: Floats
    """The mixture that each refit predicts to be best, of those whose weights all lie between the
    least and the greatest that the swarm has of a domain: nothing is known beyond."""

    def loss(self, weights_RK: Floats) -> Floats:
        """[R]: mean loss over the domains, at weights."""
        return _mean_loss(self.model, self.swarm, weights_RK)

    def loss_B(self, weights_RK: Floats) -> Floats:
        """[B, R]: likewise of every refit."""
        return np.stack([_mean_loss(model, self.swarm, weights_RK) for model in self.refits])

    def has_tried(self, weights_K: Floats) -> bool:
        """Whether all weights lie in the range that the swarm has of their domains."""
        tried_RK = np.array(self.swarm.weights)
        is_below_K = weights_K < tried_RK.min(0) - _NUDGE
        is_above_K = weights_K > tried_RK.max(0) + _NUDGE
        return not (is_below_K | is_above_K).any()

    @property
    def spread(self) -> Error:
        """Standard deviations of the swarm's losses, each about its seed's mean."""
        losses_RD, seeds_R = np.array(self.swarm.losses), np.array(self.swarm.seeds)
        for seed in set(self.swarm.seeds):
            losses_RD[seeds_R == seed] -= losses_RD[seeds_R == seed].mean(0)
        return _error_of(losses_RD)


def read(runs: Sequence[Path], aim: Sequence[str]) -> Swarm:
    """The swarm that lies in run directories, all measured on the domains of `aim`."""
    weights: list[tuple[float, ...]] = []
    losses: list[tuple[float, ...]] = []
    seeds: list[int] = []
    names: tuple[str, ...] = ()
    for run in runs:
        config = records.read_config(run)
        names = names or tuple(config["corpus"]["domains"])
        found = records.weights_by_name(records.read_weights(run, domains=names))
        own, seed = tuple(found.values()), int(config["config"]["training"]["seed"])
        if (own, seed) in zip(weights, seeds, strict=True):
            # One run under two names.
            continue
        measured = records.read_evaluation(run)["loss"]
        weights.append(own)
        losses.append(tuple(float(measured[name]) for name in aim))
        seeds.append(seed)
    return Swarm(names, tuple(weights), tuple(losses), tuple(seeds))


@functools.lru_cache(maxsize=8)
def fitted(swarm: Swarm) -> Regression:
    """Fit both laws to the runs that are not far from the best, and keep the better one.

    Raises:
        ValueError: there are fewer than `LEAST_RUNS` runs, or a loss is not finite.
    """
    from sklearn import config_context

    if len(swarm.losses) < LEAST_RUNS or not np.isfinite(swarm.losses).all():
        raise ValueError(
            f"A regression over mixtures needs {LEAST_RUNS} runs and more, with finite losses; got "
            f"{len(swarm.losses)}."
        )
    # Checked above; thousands of small fits spend most of their time on checks.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        return _fitted(_near(swarm))


def _near(swarm: Swarm) -> Swarm:
    """Without the runs that are far from the best of their seed."""
    above_R, seeds_R = np.mean(swarm.losses, axis=1), np.array(swarm.seeds)
    for seed in set(swarm.seeds):
        above_R[seeds_R == seed] -= above_R[seeds_R == seed].min()
    kept = max(LEAST_RUNS, -(-len(above_R) // 2))
    is_near_R = above_R <= max(_REACH, np.sort(above_R)[kept - 1])

    def near(rows: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(row for row, is_near in zip(rows, is_near_R, strict=True) if is_near)

    return Swarm(swarm.names, near(swarm.weights), near(swarm.losses), near(swarm.seeds))


def _fitted(swarm: Swarm) -> Regression:
    from sklearn.base import clone
    from sklearn.model_selection import GroupKFold, cross_val_predict

    inputs_RX = _with_seed(np.array(swarm.weights), np.array(swarm.seeds), swarm)
    losses_RD, laws = np.array(swarm.losses), _laws(swarm)
    # Runs of one mixture are left out together, whatever their seeds.
    mixtures_R = [swarm.weights.index(weights) for weights in swarm.weights]
    folds = GroupKFold(min(_FOLDS, len(set(mixtures_R))), shuffle=True, random_state=0)
    errors = {}
    for name, law in laws.items():
        left_out = cross_val_predict(law, inputs_RX, losses_RD, cv=folds, groups=mixtures_R)
        errors[name] = _error_of(left_out - losses_RD)
    law = min(errors, key=lambda name: errors[name].average)
    model = laws[law].fit(inputs_RX, losses_RD).best_estimator_
    draw = np.random.default_rng(0)
    refits = []
    for _ in range(_BOOTSTRAPS):
        drawn_R = draw.integers(len(losses_RD), size=len(losses_RD))
        refits.append(clone(model).fit(inputs_RX[drawn_R], losses_RD[drawn_R]))
    best_BK = np.stack([_best_of(each, swarm) for each in refits])
    return Regression(swarm, errors, law, model, tuple(refits), best_BK.mean(0), best_BK)


def _error_of(differences_RD: Floats) -> Error:
    average = float(np.sqrt((differences_RD.mean(1) ** 2).mean()))
    return Error(average, float(np.sqrt((differences_RD**2).mean())))


def _best_of(model: Any, swarm: Swarm) -> Floats:
    """argmin of the predicted mean loss, within the range of the swarm's weights."""
    tried_RK = np.array(swarm.weights)
    number = len(swarm.names)

    def loss_and_slope(weights_K: Floats) -> tuple[float, Floats]:
        nudged = np.vstack([np.zeros(number), _NUDGE * np.eye(number)])
        losses = _mean_loss(model, swarm, weights_K + nudged)
        return float(losses[0]), (losses[1:] - losses[0]) / _NUDGE

    found = optimize.minimize(
        loss_and_slope,
        tried_RK[np.argmin(_mean_loss(model, swarm, tried_RK))],
        jac=True,
        method="SLSQP",
        bounds=list(zip(tried_RK.min(0), tried_RK.max(0), strict=True)),
        constraints={
            "type": "eq",
            "fun": lambda weights_K: weights_K.sum() - 1,
            "jac": np.ones_like,
        },
    )
    best_K: Floats = found.x / found.x.sum()
    return best_K


def _mean_loss(model: Any, swarm: Swarm, weights_RK: Floats) -> Floats:
    """[R]: over the domains, and over the seeds that there are."""
    seeds = sorted(set(swarm.seeds))
    inputs = [_with_seed(weights_RK, np.full(len(weights_RK), seed), swarm) for seed in seeds]
    losses = model.predict(np.concatenate(inputs)).mean(1)
    mean: Floats = losses.reshape(len(seeds), -1).mean(0)
    return mean


def _with_seed(weights_RK: Floats, seeds_R: Any, swarm: Swarm) -> Floats:
    """[R, K + S]: weights, and a column of zeros and ones for each of the S seeds."""
    return np.column_stack([weights_RK, seeds_R[:, None] == sorted(set(swarm.seeds))])


def _laws(swarm: Swarm) -> dict[str, Any]:
    """{law: a regressor that chooses its own penalty and constants}."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV, KFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    number, lowest_D = len(swarm.names), np.array(swarm.losses).min(0)

    def logs(floor: float) -> Any:
        """Of the weights; the seeds' columns stay as they are."""
        return FunctionTransformer(
            lambda inputs_RX: np.column_stack(
                [np.log(inputs_RX[:, :number] + floor), inputs_RX[:, number:]]
            )
        )

    def above(asymptote_D: Floats) -> Any:
        return FunctionTransformer(
            lambda losses_RD: np.log(losses_RD - asymptote_D),
            inverse_func=lambda logs_RD: np.exp(logs_RD) + asymptote_D,
            check_inverse=False,
        )

    floors = [logs(share / number) for share in _FLOORS]
    asymptotes = [above(share * lowest_D) for share in _ASYMPTOTES]
    linear = make_pipeline(floors[0], StandardScaler(), Ridge())
    ridge = make_pipeline(StandardScaler(), Ridge())
    mixing = TransformedTargetRegressor(ridge, transformer=asymptotes[0])
    grids = {
        LINEAR: (linear, {"functiontransformer": floors, "ridge__alpha": _PENALTIES}),
        MIXING: (mixing, {"transformer": asymptotes, "regressor__ridge__alpha": _PENALTIES}),
    }
    folds = KFold(_INNER_FOLDS, shuffle=True, random_state=1)
    return {
        law: GridSearchCV(model, grid, cv=folds, scoring="neg_mean_squared_error")
        for law, (model, grid) in grids.items()
    }
