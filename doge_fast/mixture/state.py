"""The state of a mixture: the numbers that determine all batches from a step on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doge_fast.mixture.counts import MixtureCounts, Totals

STATE_VERSION = 1
# Counts are int64.
_TOO_LARGE = 1 << 62


def state_of(counts: MixtureCounts, sizes: Mapping[str, int | None], step: int) -> dict[str, Any]:
    """The result of `DomainMixture.state_dict`."""
    totals = counts.totals(step)
    changes = zip(counts.first_steps, counts.weights_PK, strict=True)
    return {
        "version": STATE_VERSION,
        "domains": list(sizes),
        "sizes": list(sizes.values()),
        "seed": counts.seed,
        "batch_size": counts.batch_size,
        "step": step,
        "history": [[first_step, weights_K.tolist()] for first_step, weights_K in changes],
        "drawn": totals.drawn_K.tolist(),
        "surplus": totals.surplus_K.tolist(),
    }


def restore(
    counts: MixtureCounts, sizes: Mapping[str, int | None], state: Mapping[str, Any]
) -> None:
    """Set the counts to a state.

    Raises:
        ValueError: the state is malformed, from a later version, or of other domains, sizes or
            batch size; the counts are unchanged then.
    """
    try:
        (version,) = _integers([state["version"]], 1)
        if version > STATE_VERSION:
            raise ValueError(f"it has version {version}; update doge_fast to read it")
        (step, seed) = _integers([state["step"], state["seed"]], 2)
        _check_same_mixture(counts, sizes, state)
        drawn_K, surplus_K = (_integers(state[key], len(sizes)) for key in ("drawn", "surplus"))
        if step < 0 or sum(drawn_K) != step * counts.batch_size:
            raise ValueError(
                f"step {step} follows batches of {sum(drawn_K)} rows in all, and that is not "
                f"{step} times {counts.batch_size}"
            )
        first_steps = _integers([first_step for first_step, _ in state["history"]])
        weights_PK = [np.array(weights, dtype=np.float64) for _, weights in state["history"]]
        if any(weights_K.shape != (len(sizes),) for weights_K in weights_PK):
            raise ValueError(f"its history must hold {len(sizes)} weights for each change")
        totals = Totals(step, np.array(drawn_K), np.array(surplus_K))
        counts.restart(seed, first_steps, weights_PK, totals)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            "A mixture's state is what state_dict() of the same mixture returns; this one: "
            f"{reason}."
        ) from error


def _check_same_mixture(
    counts: MixtureCounts, sizes: Mapping[str, int | None], state: Mapping[str, Any]
) -> None:
    """Refuse another mixture: it could not resume bitwise."""
    expected = {
        "domains": list(sizes),
        "sizes": list(sizes.values()),
        "batch_size": counts.batch_size,
    }
    for key, value in expected.items():
        if state[key] != value:
            raise ValueError(f"it is of {key} {state[key]}, and the mixture has {value}")


def _integers(values: Sequence[Any], count: int | None = None) -> list[int]:
    """The values as a list; ValueError unless they are `count` integers that fit in int64."""
    for value in values:
        if type(value) is not int or abs(value) >= _TOO_LARGE:
            raise ValueError(f"it has {value!r} where an integer is needed")
    if count is not None and len(values) != count:
        raise ValueError(f"it has {len(values)} numbers where {count} are needed")
    return list(values)
