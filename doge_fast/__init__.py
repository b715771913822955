"""DoGE: learn how much of each domain a language model should be pretrained on.

`DoGEOptimizer` wraps the optimizer of a small proxy model; its average domain weights are how
often a large model should see each domain.
"""

from doge_fast.generalization import Score
from doge_fast.optimizer import DoGEOptimizer, LastStep

__version__ = "0.1.0"

__all__ = ["DoGEOptimizer", "LastStep", "Score", "__version__"]
