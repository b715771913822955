"""DoGE: learn how much of each domain a language model should be pretrained on.

`DoGEOptimizer` wraps the optimizer of a small proxy model; its average domain weights are how
often a large model should see each domain. `DomainMixture` draws batches at such weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doge_fast.mixture import DomainMixture
    from doge_fast.optimizer import DoGEOptimizer
    from doge_fast.weights.rule import LastStep
    from doge_fast.weights.scores import Score

__version__ = "0.1.0"

__all__ = ["DoGEOptimizer", "DomainMixture", "LastStep", "Score", "__version__"]

# Imported at first use: they need torch, which takes seconds to import, and the command line shows
# weights and help without it.
_HOMES = {
    "DoGEOptimizer": "doge_fast.optimizer",
    "DomainMixture": "doge_fast.mixture",
    "LastStep": "doge_fast.weights.rule",
    "Score": "doge_fast.weights.scores",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({"__doc__", "__file__", "__name__", "__path__", *__all__})
