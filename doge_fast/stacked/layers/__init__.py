"""Rules of module classes, for the rows of a stacked pass."""

from doge_fast.stacked.layers.embedding import Lookup
from doge_fast.stacked.layers.linear import Outer
from doge_fast.stacked.layers.registry import register, rule_of
from doge_fast.stacked.layers.rule import LayerRule
from doge_fast.stacked.layers.token_sums import Sum

__all__ = ["LayerRule", "Lookup", "Outer", "Sum", "register", "rule_of"]
