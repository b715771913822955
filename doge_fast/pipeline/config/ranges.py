"""Types of fields with their ranges; pydantic refuses other values when the object is made."""

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, ConfigDict, Strict

# An argument that is no field is refused; readers of records ignore it. Validators are built when
# first used, so not for `--help`. Errors hide their input: for a rule on two fields it would be all
# fields.
EXACT = ConfigDict(extra="forbid", defer_build=True, hide_input_in_errors=True)


def _whole(value: Any) -> Any:
    # JSON may hold a large count as 1e9.
    return int(value) if isinstance(value, float) and value.is_integer() else value


# torch, numpy and Arrow count in 64 bits. Strict: True is no number, and neither is text.
CountOrZero = Annotated[int, BeforeValidator(_whole), Strict(), Ge(0), Le(2**63 - 1)]
Count = Annotated[CountOrZero, Ge(1)]
# numpy takes no more.
Seed = Annotated[CountOrZero, Le(2**32 - 1)]
PositiveOrZero = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
Positive = Annotated[PositiveOrZero, Gt(0)]
# A fraction less than one.
Share = Annotated[PositiveOrZero, Lt(1)]
# No value was given; a stage fills in the default for its model's size (`pipeline.sizes`).
OF_SIZE: Any = None
Value = TypeVar("Value")
if TYPE_CHECKING:
    OfSize = Annotated[Value, OF_SIZE]
else:
    OfSize = Value | None
# A path, a Hub id or a keyword; `~` is expanded here if no shell did it.
Place = Annotated[str, AfterValidator(os.path.expanduser)]
# CUDA_VISIBLE_DEVICES says which GPU is the first.
Device = Literal["auto", "cpu", "cuda"]


def check_paths(config: Any) -> None:
    """Check that the paths in a configuration exist.

    Its values were checked when it was made. Functions that take a configuration call this first,
    the command line before it loads torch. Devices and the corpus are checked later.

    Raises:
        UserError: a path that must be there is not.
    """
    for value in vars(config).values():
        if dataclasses.is_dataclass(value):
            check_paths(value)
    if hasattr(config, "_check"):
        config._check()
