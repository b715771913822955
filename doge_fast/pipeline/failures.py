"""Errors for the user, and how a command ends on an error: exit code and printed text.

The command line calls `ending_of` once for any exception. It prints the message of a `UserError`;
file and message of an error of the operating system; the traceback of any other.
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
"""Exit codes: a cause outside the input (a full disk, a damaged file, another process); an error in
the input; Ctrl-C."""

ENDING_SIGNALS = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
"""Signals of a cluster (SIGTERM) and of a closed terminal (SIGHUP, absent on Windows)."""

NO_CHECKPOINT = "No checkpoint has been written; the same command begins anew."
# Errors for a path in the input that does not exist or has another kind.
_NAMED_WRONG = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)


class UserError(ValueError):
    """The input is wrong; the message is a sentence for the user."""

    code = USAGE


class FileFailure(UserError):
    """A file cannot be read or written, or has unexpected contents."""

    code = WORLD


class Diverged(UserError):
    """Losses or gradients are no longer finite, so the result would mean nothing."""

    code = WORLD


class Terminated(BaseException):
    """SIGTERM or SIGHUP was received. Not an Exception, so that `except Exception` lets it pass."""

    def __init__(self, number: int, told: str = "") -> None:
        super().__init__(told)
        self.name, self.code = signal.Signals(number).name, 128 + number


class Ending(NamedTuple):
    """Exit code and printed text of a command that ends with an error."""

    code: int
    sentence: str


@contextmanager
def reading(file: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a library's error while it reads a file into a FileFailure; an OSError passes."""
    try:
        yield
    except (FileFailure, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            if error.filename is None:
                # Arrow does not name the file.
                error.filename = os.fspath(file)
            raise
        raise FileFailure(f"{file} cannot be read: {one_line(error)}.") from error


@contextmanager
def given_to_core() -> Iterator[None]:
    """Turn a ValueError of the optimizer's modules into a UserError: its cause is in the input."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextmanager
def writing(file: Path, *, makes_directory: bool = True) -> Iterator[None]:
    """Make an OSError within the block name the file that the user gave."""
    try:
        if makes_directory:
            file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        # The error may name the temporary file beside it.
        error.filename = str(file)
        raise


def ending_of(error: BaseException, directory: Path | None = None) -> Ending:
    """Exit code and text to print for an error.

    `directory` is the command's output directory, named for errors without a file.
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
    """The first line of an error's message, or its class if the message is empty.

    A first line that ends in a colon is joined with the second one.
    """
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


late: list[BaseException] = []
"""Errors for signals received after the last step of a run, which then completed."""


def raise_late() -> None:
    """Raise the error of a late signal; called between two runs."""
    if late:
        raise late.pop()


def raise_terminated(number: int, frame: object) -> None:
    """Handler of `ENDING_SIGNALS`: raise, so that context managers clean up as at Ctrl-C."""
    raise Terminated(number)
