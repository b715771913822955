# Internal: its source in kernels/ is checked by `make typecheck`.

from typing import Any

def __getattr__(name: str) -> Any: ...
