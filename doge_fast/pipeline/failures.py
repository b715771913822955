"""What ends a verb: an exit code, and what is printed.

Code raises what its docstrings say, and never asks who called. The command line asks here, once. A
`UserError` is its sentence; an error of the operating system has its own words, after the file; any
other one has its traceback.
"""

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

WORLD, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: what is wrong lies in the world (a full disk, a damaged file, another process); in
what was typed or given; Ctrl-C."""

ENDING_SIGNALS = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
"""What a cluster sends, and a terminal that is closed, which Windows does not."""

NO_CHECKPOINT = "No checkpoint has been written; the same command begins anew."
# What was named is not there, or is something else.
_NAMED_WRONG = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)


class UserError(ValueError):
    """What was typed or given is not right; the text is a sentence for who gave it."""

    code = USAGE


class FileFailure(UserError):
    """A file cannot be read or written, or is not what a program leaves there."""

    code = WORLD


class Terminated(BaseException):
    """SIGTERM or SIGHUP has come. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, number: int, told: str = "") -> None:
        super().__init__(told)
        self.name, self.code = signal.Signals(number).name, 128 + number


class Ending(NamedTuple):
    """How a verb ends."""

    code: int
    sentence: str


@contextmanager
def reading(file: str | os.PathLike[str]) -> Iterator[None]:
    """Read a file with a library, whose words become those of a FileFailure; an OSError passes."""
    try:
        yield
    except (FileFailure, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            if error.filename is None:
                # Arrow does not say which.
                error.filename = os.fspath(file)
            raise
        raise FileFailure(f"{file} cannot be read: {one_line(error)}.") from error


@contextmanager
def given_to_core() -> Iterator[None]:
    """What the optimizer's side refuses here was typed or given."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextmanager
def writing(file: Path, *, makes_directory: bool = True) -> Iterator[None]:
    """Write a file that somebody named; an OSError in it names this file."""
    try:
        if makes_directory:
            file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        # Not the one beside it, which is renamed at the end.
        error.filename = str(file)
        raise


def ending_of(error: BaseException, directory: Path | None = None) -> Ending:
    """What to print of an error, and the exit code.

    `directory` is where the verb writes, for errors that name no file.
    """
    if isinstance(error, UserError | ValidationError):
        return Ending(getattr(error, "code", USAGE), str(error))
    where = "" if directory is None else f"{directory}: "
    if isinstance(error, OSError) and error.errno:
        code = USAGE if isinstance(error, _NAMED_WRONG) else WORLD
        file = error.filename
        return Ending(code, f"{where if file is None else f'{file}: '}{error.strerror}.")
    text = "".join(traceback.format_exception(error)).rstrip()
    return Ending(WORLD, f"{where}{type(error).__name__}: {one_line(error)}\n{text}")


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none.

    And the second where the first one ends in a colon.
    """
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


late: list[BaseException] = []
"""A signal that came after the last step of a run, which was completed."""


def raise_late() -> None:
    """Between two runs: end as the signal that came late asked for."""
    if late:
        raise late.pop()


def raise_terminated(number: int, frame: object) -> None:
    """A handler of `ENDING_SIGNALS`: what is under way is left in order, as at Ctrl-C."""
    raise Terminated(number)
