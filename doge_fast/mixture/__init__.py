"""Batches from named domains at weights that may change."""

from doge_fast.mixture.dataset import DomainMixture
from doge_fast.mixture.samplers import MixtureBatches, MixtureStream

__all__ = ["DomainMixture", "MixtureBatches", "MixtureStream"]
