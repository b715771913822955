"""Where ranks talk: the only files that call torch.distributed."""

from doge_fast.distributed.exchanges import exchange_of
from doge_fast.distributed.wrappers import bare, without_reduction

__all__ = ["bare", "exchange_of", "without_reduction"]
