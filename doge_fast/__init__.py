"""DoGE: learn how much of each domain a language model should be pretrained on.

`DoGEOptimizer` wraps the optimizer of a small proxy model; its average domain weights are how
often a large model should see each domain. `DomainMixture` draws batches at such weights.
"""

from typing import TYPE_CHECKING, Any

from doge_fast.generalization import Score
from doge_fast.kernels.reweight.packing import LastStep
from doge_fast.optimizer import DoGEOptimizer

if TYPE_CHECKING:
    from doge_fast.mixture import DomainMixture

__version__ = "0.1.0"

__all__ = ["DoGEOptimizer", "DomainMixture", "LastStep", "Score", "__version__"]


def __getattr__(name: str) -> Any:
    # When it is asked for: it needs numpy, and the optimizer does not.
    if name == "DomainMixture":
        from doge_fast.mixture import DomainMixture

        return DomainMixture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
