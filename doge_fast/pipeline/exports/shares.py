"""Decimals that sum to one: what a float64 weight becomes before a framework reads it.

Rounding each weight by itself leaves sums like 0.9999, which some loaders refuse and others
renormalise in silence. Here the arithmetic is rational and the rounding is by largest remainder, so
the printed numbers sum to one as decimals, whatever the number of domains.
"""

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

Key = TypeVar("Key")

# float64 repeats a decimal of so many places.
MAX_DECIMALS = 15


def normalised(weights: Mapping[Key, float | Fraction]) -> dict[Key, Fraction]:
    """w_j / sum_i w_i, exactly.

    Args:
        weights: each >= 0, at least one > 0.

    Raises:
        ValueError: all are zero.
    """
    total = sum((Fraction(weight) for weight in weights.values()), Fraction(0))
    if not total:
        raise ValueError(f"At least one weight must be above zero; all {len(weights)} are zero.")
    return {key: Fraction(weight) / total for key, weight in weights.items()}


def largest_remainder(weights: Mapping[Key, float | Fraction], decimals: int) -> dict[Key, Decimal]:
    """Round to so many decimals that sum to exactly one.

    Every weight is rounded down; what is missing goes, one unit of the last place each, to those
    that lost most. So each is within one unit of its weight, and none changes its place with one
    that is larger. Equal losses are served in the order of their keys, not of the mapping.

    Args:
        weights: {key: weight >= 0}, in any scale.
        decimals: places after the point, 1 to 15.

    Returns:
        {key: Decimal >= 0}, in the order of `weights`.

    Raises:
        ValueError: `decimals` is out of its range, or all weights are zero.
    """
    if not 1 <= decimals <= MAX_DECIMALS:
        raise ValueError(
            f"decimals must be 1 to {MAX_DECIMALS}, which float64 can repeat; got {decimals}."
        )
    scale = 10**decimals
    scaled = {key: part * scale for key, part in normalised(weights).items()}
    units = {key: int(part) for key, part in scaled.items()}
    by_loss = sorted(scaled, key=lambda key: (units[key] - scaled[key], str(key)))
    for key in by_loss[: scale - sum(units.values())]:
        units[key] += 1
    return {key: Decimal(count).scaleb(-decimals) for key, count in units.items()}


def by_document(
    parts: Mapping[str, Fraction], mean_doc_tokens: Mapping[str, float]
) -> dict[str, Fraction]:
    """Shares of documents that make given shares of tokens.

    q_j  =  (w_j / l_j) / sum_i (w_i / l_i),     l_j the mean tokens of a document

    Args:
        parts: {domain: w_j}, shares of tokens.
        mean_doc_tokens: {domain: l_j > 0}, of every domain with w_j > 0.
    """
    return normalised(
        {n: part / Fraction(mean_doc_tokens[n]) if part else part for n, part in parts.items()}
    )


def by_token(
    parts: Mapping[str, Fraction], mean_doc_tokens: Mapping[str, float]
) -> dict[str, Fraction]:
    """The inverse of `by_document`: shares of tokens that shares of documents make."""
    return normalised(
        {n: part * Fraction(mean_doc_tokens[n]) if part else part for n, part in parts.items()}
    )
