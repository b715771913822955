"""The one style of progress bar, shown where somebody looks and only of what takes a while."""

from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from doge_fast.pipeline import ranks
from doge_fast.pipeline.named import visible

# None: no bar where stderr is no terminal, and none is left of a bar below another.
_STYLE: dict[str, Any] = {
    "disable": None if ranks.is_first() else True,
    "leave": None,
    "dynamic_ncols": True,
}


def bar(total: int, what: str, unit: str, *, initial: int = 0) -> Any:
    """A bar that is moved by hand; its `update`, `set_postfix_str` and `close` are tqdm's.

    Args:
        total: of units.
        what: stands before it.
        unit: in the singular.
        initial: units that are done already.
    """
    options = {"total": total, "initial": initial, "desc": visible(what), "unit": unit}
    return tqdm(**options, **_STYLE)


def over(documents: Iterable[Any], what: str) -> Iterator[Any]:
    """`documents`, with a bar once they have taken a second."""
    yield from tqdm(documents, desc=visible(what), unit=" documents", delay=1, **_STYLE)
