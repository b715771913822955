"""What a number may be, written at the field; pydantic refuses others when the object is made."""

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, ConfigDict, Strict

# An argument that is no field is refused; a reader of records passes it over. Validators are built
# when they are first used, which `--help` does not. The input of a rule of two fields is all of
# them, so errors do not show it.
EXACT = ConfigDict(extra="forbid", defer_build=True, hide_input_in_errors=True)


def _whole(value: Any) -> Any:
    # JSON's writers spell a large count as 1e9 too.
    return int(value) if isinstance(value, float) and value.is_integer() else value


# torch, numpy and Arrow count in 64 bits. Strict: True is no number, and neither is text.
CountOrZero = Annotated[int, BeforeValidator(_whole), Strict(), Ge(0), Le(2**63 - 1)]
Count = Annotated[CountOrZero, Ge(1)]
# numpy takes no more.
Seed = Annotated[CountOrZero, Le(2**32 - 1)]
PositiveOrZero = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
Positive = Annotated[PositiveOrZero, Gt(0)]
# Of a whole that is never all of it.
Share = Annotated[PositiveOrZero, Lt(1)]
# Nobody has said it; a stage fills in what the size of its model has (`pipeline.sizes`).
OF_SIZE: Any = None
Value = TypeVar("Value")
if TYPE_CHECKING:
    OfSize = Annotated[Value, OF_SIZE]
else:
    OfSize = Value | None
# A path, a Hub id or a word: `~` is the user's folder also where no shell has expanded it.
Place = Annotated[str, AfterValidator(os.path.expanduser)]
# CUDA_VISIBLE_DEVICES says which GPU is the first.
Device = Literal["auto", "cpu", "cuda"]


def check(config: Any) -> None:
    """Look for the paths that a configuration names.

    Its values were checked when it was made. Whoever takes a configuration calls this first, the
    command line before it loads torch; devices and what the corpus holds are looked at later.

    Raises:
        UserError: a path that must be there is not.
    """
    for value in vars(config).values():
        if dataclasses.is_dataclass(value):
            check(value)
    if hasattr(config, "_check"):
        config._check()
