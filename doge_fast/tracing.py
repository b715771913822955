"""Names for the phases of a step, seen by torch's profiler and by NVTX."""

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """A range `doge_fast.NAME` in a profile; costs nothing while nobody profiles."""
    if _profiler_enabled():
        return record_function(f"doge_fast.{name}")
    return _NOTHING
