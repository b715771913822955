"""Counts what a device would be given to do."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class LaunchCounter(TorchDispatchMode):
    """Names of the dispatched operators that make no view, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
