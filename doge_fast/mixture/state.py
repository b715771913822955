"""The state of a mixture: the numbers that determine all batches from a step on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from doge_fast.mixture.counts import MixtureCounts, Totals

STATE_VERSION = 1


def state_of(counts: MixtureCounts, sizes: Mapping[str, int], step: int) -> dict[str, Any]:
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


def restore(counts: MixtureCounts, sizes: Mapping[str, int], state: Mapping[str, Any]) -> None:
    """Set the counts to a state.

    Raises:
        ValueError: the state is malformed, from a later version, or of other domains, sizes or
            batch size; the counts are unchanged then.
    """
    try:
        if state["version"] > STATE_VERSION:
            raise ValueError(f"it has version {state['version']}; update doge_fast to read it")
        # Another mixture could not resume bitwise.
        expected = {
            "domains": list(sizes),
            "sizes": list(sizes.values()),
            "batch_size": counts.batch_size,
        }
        for key, value in expected.items():
            if state[key] != value:
                raise ValueError(f"it is of {key} {state[key]}, and the mixture has {value}")
        step = int(state["step"])
        drawn_K = np.array(state["drawn"], dtype=np.int64)
        surplus_K = np.array(state["surplus"], dtype=np.int64)
        if not drawn_K.shape == surplus_K.shape == (len(sizes),):
            raise ValueError(f"drawn and surplus must hold {len(sizes)} numbers each")
        if step < 0 or int(drawn_K.sum()) != step * counts.batch_size:
            raise ValueError(
                f"step {step} follows batches of {drawn_K.sum()} rows in all, and that is not "
                f"{step} times {counts.batch_size}"
            )
        first_steps = [int(first_step) for first_step, _ in state["history"]]
        weights_PK = [np.array(weights, dtype=np.float64) for _, weights in state["history"]]
        if any(weights_K.shape != (len(sizes),) for weights_K in weights_PK):
            raise ValueError(f"its history must hold {len(sizes)} weights for each change")
        counts.restart(
            int(state["seed"]), first_steps, weights_PK, Totals(step, drawn_K, surplus_K)
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            "A mixture's state is what state_dict() of the same mixture returns; this one: "
            f"{reason}."
        ) from error
