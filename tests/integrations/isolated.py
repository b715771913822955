"""A check in a process of its own: for what stays behind in classes and in singletons.

One server imports torch once; every check is a fork of it, so a process costs what its check does.
"""

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

TIMEOUT_S = 300

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "doge_fast", "accelerate", "pytest"])


def isolated(check: Callable[..., None], *args: object) -> None:
    """Run `check(*args)` where nothing of ours has been built yet; fail as it fails.

    Args:
        check: a function of a module, so that the process finds it by its name.
        args: what pickle carries.

    Raises:
        AssertionError: the check raised, or warned; with its traceback.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_report, args=(theirs, check, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"{check.__name__} has not ended after {TIMEOUT_S} s"
        failure = ours.recv()
    except EOFError:
        process.join()
        failure = f"{check.__name__} ended its process with code {process.exitcode}"
    finally:
        if process.is_alive():
            process.join(5)
            process.kill()
        process.join()
    assert not failure, failure


def _report(connection: Connection, check: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    # As in every test: what others say of themselves changes with their versions.
    warnings.filterwarnings("error", module=r"(doge_fast|tests)\b")
    warnings.filterwarnings("ignore", "doge_fast runs")
    try:
        check(*args)
    except BaseException:
        connection.send(traceback.format_exc())
    else:
        connection.send("")
