"""Batches drawn from named domains, at weights that can change during the run."""

from doge_fast.mixture.dataset import DomainMixture
from doge_fast.mixture.samplers import MixtureBatches

__all__ = ["DomainMixture", "MixtureBatches"]
