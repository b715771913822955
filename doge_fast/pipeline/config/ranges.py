"""What a field may hold: written at the field, checked here and by pydantic."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from doge_fast.pipeline.named import nearest


@dataclasses.dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`, both included unless they lie `above` or `below`."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def refusal(self, value: Any, *, is_whole: bool) -> str | None:
        """What is wrong with a value, after the field's name; None: nothing."""
        is_number = isinstance(value, int if is_whole else int | float)
        if is_whole and is_number and value > _MOST_WHOLE:
            return f"must be at most {_MOST_WHOLE}; got {value!r}."
        # Not isfinite, which raises where a whole number is too large for a float.
        is_finite = is_number and abs(value) <= sys.float_info.max
        if isinstance(value, bool) or not is_finite:
            return f"must be {'a whole' if is_whole else 'a finite'} number, {self}; got {value!r}."
        is_high = value > self.least if self.above else value >= self.least
        is_low = value < self.most if self.below else value <= self.most
        return None if is_high and is_low else f"must be {self}; got {value!r}."

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Pydantic's hook: records hold the same numbers as configurations."""
        from pydantic_core import PydanticCustomError, core_schema

        def checked(value: Any) -> Any:
            # JSON's writers spell a large count as 1e9 too.
            if source is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            if told := self.refusal(value, is_whole=source is int):
                raise PydanticCustomError("range", "{told}", {"told": told})
            return value

        return core_schema.no_info_plain_validator_function(checked)

    def __str__(self) -> str:
        """What follows "must be"."""
        words = f"{'greater than' if self.above else 'at least'} {self.least:g}"
        if self.most < math.inf:
            words += f" and {'less than' if self.below else 'at most'} {self.most:.0f}"
        return words


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
# numpy takes no more.
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, above=True)]
PositiveOrZero = Annotated[float, Range(0)]
# CUDA_VISIBLE_DEVICES says which GPU is the first.
Device = Literal["auto", "cpu", "cuda"]
# Of a whole that is never all of it.
Share = Annotated[float, Range(0, 1, below=True)]

# torch, numpy and Arrow count in 64 bits.
_MOST_WHOLE = 2**63 - 1


def check(config: Any) -> None:
    """Look at every field of a dataclass and of those inside, and at the rules of its class.

    Rules are in its `_check`. Whoever takes a configuration calls this first, the command line
    before it loads torch; devices and what the corpus holds are looked at later.

    Raises:
        ValueError: a number is out of its range, a word is none of those that are known, two
            fields do not fit, or a path that must be there is not.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value)
        else:
            check_value(field.name, value, hints[field.name])
    if hasattr(config, "_check"):
        config._check()


def is_optional(hint: Any) -> bool:
    """Whether a field of this type may be None."""
    return get_origin(hint) in (Union, UnionType)


def bare(hint: Any) -> Any:
    """The type of a field without None and without its range."""
    if is_optional(hint):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError, a sentence that begins with `name`, unless the value is of this type."""
    assert hint not in (int, float), f"{name} has no range"
    kind, parts = get_origin(hint), get_args(hint)
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ValueError(f"{name} must be text without a NUL, which no file has; got {value!r}.")
    if is_optional(hint):
        for part in parts:
            if value is not None and part is not type(None):
                check_value(name, value, part)
    elif kind is tuple:
        if not isinstance(value, tuple | list):
            raise ValueError(f"{name} must be a tuple of values; got {value!r}.")
        for each in value:
            check_value(name, each, parts[0])
    elif kind is Literal:
        if value not in parts:
            # As torch and others write a device.
            word, _, index = str(value).lower().replace("gpu", "cuda").partition(":")
            told = (
                f"{name} must be one of {', '.join(parts)}; got {value!r}. {nearest(word, parts)}"
            )
            if word == "cuda" and "cuda" in parts and index:
                told += f" CUDA_VISIBLE_DEVICES={index} in the environment chooses which."
            raise ValueError(told.rstrip())
    elif kind is Annotated:
        number, limits = parts[0], parts[1]
        if told := limits.refusal(value, is_whole=number is int):
            raise ValueError(f"{name} {told}")
    elif isinstance(hint, type) and not isinstance(value, hint):
        words: dict[Any, str] = {str: "text (str)", Path: "a pathlib.Path", bool: "true or false"}
        kind_told = words.get(hint, f"a {hint.__name__}")
        raise ValueError(f"{name} must be {kind_told}; got {value!r}.")
