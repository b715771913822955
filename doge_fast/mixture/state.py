"""The state of a mixture: plain numbers that decide all batches from a step on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from doge_fast.mixture.counts import checked_weights
from doge_fast.mixture.steering import SteeredCounts, Totals
from doge_fast.weights.simplex import is_integer, is_number

STATE_VERSION = 1
# Counts are int64.
_TOO_LARGE = 1 << 62

_KEYS = (
    *("version", "domains", "sizes", "seed", "batch_size"),
    *("step", "history", "drawn", "surplus"),
)


def state_of(counts: SteeredCounts, sizes: Mapping[str, int | None], step: int) -> dict[str, Any]:
    """What `DomainMixture.state_dict` returns."""
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
    counts: SteeredCounts, sizes: Mapping[str, int | None], state: Mapping[str, Any]
) -> None:
    """Let the counts continue those of a state.

    Raises:
        ValueError: the state was not written by `state_of`, by a later version, or for other
            domains, sizes or batches; the counts are as before.
    """
    _check_keys(state)
    _check_same_mixture(counts, sizes, state)
    _check_numbers(state, len(sizes))
    counts.restore(
        state["seed"],
        [first_step for first_step, _ in state["history"]],
        # As they were, to the bit: normalising them once more might change the last one.
        [np.array(weights, dtype=np.float64) for _, weights in state["history"]],
        Totals(
            state["step"],
            np.array(state["drawn"], dtype=np.int64),
            np.array(state["surplus"], dtype=np.int64),
        ),
    )


def _check_keys(state: Mapping[str, Any]) -> None:
    if missing := [key for key in _KEYS if key not in state]:
        raise ValueError(
            f"A mixture's state is what state_dict() returns; this one lacks {missing}."
        )
    for key in ("version", "seed", "batch_size", "step"):
        if not _are_integers([state[key]]):
            raise ValueError(f"The state's {key} must be an integer; it is {state[key]!r}.")
    if state["step"] < 0:
        raise ValueError(f"The state's step must be at least 0; it is {state['step']}.")
    if state["version"] > STATE_VERSION:
        raise ValueError(
            f"The state has version {state['version']}; this library reads up to "
            f"{STATE_VERSION}. Update doge_fast."
        )


def _check_same_mixture(
    counts: SteeredCounts, sizes: Mapping[str, int | None], state: Mapping[str, Any]
) -> None:
    expected = {
        "domains": list(sizes),
        "sizes": list(sizes.values()),
        "batch_size": counts.batch_size,
    }
    for key, value in expected.items():
        if state[key] != value:
            raise ValueError(
                f"The state is of a mixture with {key} {state[key]}; this one has {value}. "
                "Only the same rows in batches of the same size go on to the bit."
            )


def _check_numbers(state: Mapping[str, Any], num_domains: int) -> None:
    for key in ("drawn", "surplus"):
        if not _are_integers(state[key]):
            raise ValueError(f"The state's {key} must be integers; it is {state[key]!r}.")
    history = state["history"]
    if not isinstance(history, list | tuple) or not all(map(_is_change, history)):
        raise ValueError(
            f"The state's history must be [first step, weights] of every change; it is {history!r}."
        )
    first_steps = [first_step for first_step, _ in state["history"]]
    if first_steps[:1] != [0] or first_steps != sorted(set(first_steps)):
        raise ValueError(
            f"The state's history must begin at step 0 and go up; it has {first_steps}."
        )
    vectors = [weights for _, weights in state["history"]]
    for weights in vectors:
        checked_weights(weights)
    lengths = {len(vector) for vector in (*vectors, state["drawn"], state["surplus"])}
    if lengths != {num_domains}:
        raise ValueError(
            f"The state's weights and counts must have {num_domains} numbers, one for each "
            f"domain; they have {sorted(lengths)}."
        )
    if sum(state["drawn"]) != state["step"] * state["batch_size"]:
        raise ValueError(
            f"The state's {state['step']} batches of {state['batch_size']} rows must add up; it "
            f"counts {sum(state['drawn'])} rows."
        )


def _are_integers(values: Any) -> bool:
    """Whether they are a list of integers that numpy holds."""
    return isinstance(values, list | tuple) and all(
        is_integer(value) and abs(value) < _TOO_LARGE for value in values
    )


def _is_change(change: Any) -> bool:
    """Whether it is a step and numbers."""
    return (
        isinstance(change, list | tuple)
        and len(change) == 2
        and _are_integers(change[:1])
        and isinstance(change[1], list | tuple)
        and all(map(is_number, change[1]))
    )
