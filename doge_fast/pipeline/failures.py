"""What ends a verb: whose matter it is, in a sentence, with an exit code.

Code raises what its docstrings say, and never asks who called. The command line asks here, once,
what it shall print: for what was foreseen a sentence that names the file and the remedy; for
everything else a sentence that asks for a report, and the traceback.
"""

import dis
import errno
import os
import re
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

WORLD, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: what is wrong lies in the world (a full disk, a damaged file, another process); in
what was typed or given; Ctrl-C."""

ENDING_SIGNALS = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
"""What a cluster sends, and a terminal that is closed, which Windows does not."""

NO_CHECKPOINT = "No checkpoint has been written; the same command begins anew."
_SPACE = "Make room there, or name another place"
_AGAIN = "Then repeat the command; a training goes on from its last checkpoint"
# (what the system said is, what to do)
_REMEDIES = {
    errno.ENOSPC: f"{_SPACE}. {_AGAIN}.",
    errno.EDQUOT: f"{_SPACE}. {_AGAIN}.",
    errno.EFBIG: f"Raise the limit (ulimit -f). {_AGAIN}.",
    errno.EROFS: "Name another place.",
    errno.EACCES: "Change its permissions, or name another.",
    errno.EPERM: "Change its permissions, or name another.",
    errno.EMFILE: f"Raise the limit (ulimit -n). {_AGAIN}.",
    errno.ENFILE: f"Close other programs. {_AGAIN}.",
    errno.EIO: f"Look at the disk. {_AGAIN}.",
    errno.ESTALE: f"Look at the file server. {_AGAIN}.",
    errno.ENOMEM: f"Ask for less, or end other programs. {_AGAIN}.",
    errno.ENOENT: "Name what is there.",
    errno.ENOTDIR: "Name another place: a part of the path is a file.",
    errno.EISDIR: "Name a file.",
    errno.EEXIST: "Name another place.",
    errno.ENAMETOOLONG: "Give it a shorter name.",
    errno.ELOOP: "Remove the links that lead to one another.",
}
# What was named is not there, or is something else.
_NAMED_WRONG = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
_IN_WORDS = re.compile(r"\(os error (\d+)\)")
# torch.save says what the system said where it opens a file, and not where it writes.
_OF_TORCH = re.compile(r"inline_container.*?(?:strerror: (.+))?$", re.MULTILINE)
_NUMBERS = {os.strerror(number): number for number in errno.errorcode}
_MEMORY = ("OutOfMemoryError", "MemoryError")
# What gloo and NCCL say where another rank is gone.
_RANK_IS_LOST = re.compile(
    r"Connection (closed|reset) by peer|Timed out waiting|connectFullMesh failed|gloo/transport"
    r"|NCCL error|NCCL watchdog"
)


class FileFailure(ValueError):
    """A file cannot be read or written, or is not what a program leaves there."""


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
def reading(file: str | os.PathLike[str], way_out: str) -> Iterator[None]:
    """Read a file with what others wrote: what that raises is FileFailure, or an OSError as it is.

    `way_out` is a sentence that says what to do.
    """
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
        raise FileFailure(f"{file} cannot be read: {one_line(error)}. {way_out}") from error


@contextmanager
def writing(file: Path, *, makes_directory: bool = True) -> Iterator[None]:
    """Write a file that somebody named; what fails is said with its name.

    Raises:
        ValueError: the name is no place for a file.
        FileFailure: it cannot be written for another reason.
    """
    try:
        if makes_directory:
            file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        code, sentence = _system_ending(error.errno or errno.EIO)
        kind = ValueError if code == USAGE else FileFailure
        raise kind(f"{file} cannot be written: {sentence}") from error


def ending_of(error: BaseException, directory: Path | None = None) -> Ending | None:
    """What to say of an error, and the exit code; None where nobody foresaw it.

    `directory` is where the verb writes, for errors that name no file.
    """
    if isinstance(error, FileFailure):
        return Ending(WORLD, str(error))
    is_ours = _is_raised_here(error)
    if is_ours and isinstance(error, ValueError):
        return Ending(USAGE, str(error))
    if is_ours and isinstance(error, RuntimeError):
        return Ending(WORLD, str(error))
    if type(error).__name__ in _MEMORY or "can't allocate memory" in str(error):
        return Ending(
            WORLD,
            f"There is not enough memory: {one_line(error)}. Ask for less in a step (fewer "
            "sequences, a shorter block_size, mode=sequential), for a smaller model, or share it "
            "among processes (torchrun).",
        )
    is_over_ranks = (os.environ.get("WORLD_SIZE") or "1") != "1"
    if is_over_ranks and isinstance(error, RuntimeError) and _RANK_IS_LOST.search(str(error)):
        return Ending(
            WORLD,
            f"Another process of this run has ended, or no longer answers: {one_line(error)}. What "
            f"ended it stands in its own output. {_AGAIN}.",
        )
    # What the operating system did not do, in whatever disguise.
    number, file = error_number(error), getattr(error, "filename", None)
    where = file if isinstance(file, str) else (directory or "A file")
    if number is None and _OF_TORCH.search(str(error)):
        return Ending(
            WORLD,
            f"{where}: it could not be written to its end{_room(directory)}. {_SPACE}; or look at "
            f"the disk. {_AGAIN}.",
        )
    if number is None:
        return None
    code, sentence = _system_ending(number)
    return Ending(code, f"{where}: {sentence}")


def _room(directory: Path | None) -> str:
    """A clause: which disk a directory is on, and what is free there; empty without directory."""
    if directory is None:
        return ""
    there = directory.resolve()
    mount = next(each for each in (there, *there.parents) if os.path.ismount(each))
    usage = shutil.disk_usage(mount)
    return f", and the disk at {mount} has {usage.free:,} of {usage.total:,} bytes free"


def _system_ending(number: int) -> Ending:
    code = USAGE if number in _NAMED_WRONG else WORLD
    remedy = _REMEDIES.get(number, f"{_AGAIN.removeprefix('Then ').capitalize()}.")
    return Ending(code, f"{os.strerror(number)}. {remedy}")


def error_number(error: BaseException) -> int | None:
    """errno of a failure of the system; libraries that write files have their own words for it."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := _IN_WORDS.search(str(error)):
        return int(found[1])
    found = _OF_TORCH.search(str(error))
    return _NUMBERS.get((found[1] or "").rstrip(".")) if found else None


def _is_raised_here(error: BaseException) -> bool:
    """Whether a `raise` of this package made it, with a text for the user.

    What float() or a library raises was written for a programmer.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_globals.get("__name__", "").split(".")[0] != "doge_fast":
        return False
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return dis.opname[instruction] == "RAISE_VARARGS"


def unforeseen(error: BaseException) -> Ending:
    """The ending of what nobody foresaw, with its traceback."""
    told = f"This was not foreseen: {type(error).__name__}: {one_line(error)}"
    text = "".join(traceback.format_exception(error)).rstrip()
    return Ending(WORLD, f"{told}. Please report it with the command and these lines:\n{text}")


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
