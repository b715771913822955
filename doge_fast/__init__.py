"""DoGE: learn how much of each domain a language model should be pretrained on.

`DoGEOptimizer` wraps the optimizer of a small proxy model; its average domain weights are how
often a large model should see each domain. `DomainMixture` draws batches at such weights.
"""

from doge_fast.generalization import Score
from doge_fast.mixture import DomainMixture
from doge_fast.optimizer import DoGEOptimizer, LastStep

__version__ = "0.1.0"

__all__ = ["DoGEOptimizer", "DomainMixture", "LastStep", "Score", "__version__"]
