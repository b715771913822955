# Two public functions; the rest is internal, and `make typecheck` checks the source in kernels/.

from typing import Any

from doge_fast.kernels import chosen as chosen
from doge_fast.kernels import implementations as implementations

def __getattr__(name: str) -> Any: ...
