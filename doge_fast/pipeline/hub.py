"""Tokenizers, configurations and models by name: a folder here, the Hub's cache, then the Hub."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
from huggingface_hub import HfApi, constants, get_session

from doge_fast.pipeline.failures import one_line

Opened = TypeVar("Opened")

_SECONDS = 10


def from_pretrained(opener: Callable[..., Opened], name: str, **options: Any) -> Opened:
    """What `opener`, a `from_pretrained` of transformers, makes of a folder, file or Hub id.

    What is in the cache is not asked for again, and a Hub that does not answer is asked once,
    where transformers would try for minutes. Code that comes with a model is never run.

    Raises:
        OSError: a path that is not there.
        Exception: whatever the opener or the Hub raises.
    """
    options["trust_remote_code"] = False
    path = Path(name).expanduser()
    if path.exists():
        return opener(str(path), **options)
    if name.startswith((".", "/", "~")):
        raise OSError(f"{name} is not a folder or a file")
    try:
        return opener(name, local_files_only=True, **options)
    except (OSError, ValueError):
        try:
            HfApi().model_info(name, timeout=_SECONDS)
        except Exception as error:
            told = f"it is not in the cache, and the Hub says: {one_line(error)}"
            raise OSError(told) from error
        return opener(name, **options)


@contextmanager
def asked_once() -> Iterator[None]:
    """Within, a Hub that does not answer counts as off, where datasets would try for long.

    What is in the cache opens all the same.
    """
    try:
        # Whatever it answers: whoever opens a data set says what is wrong with that.
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        is_off = False
    except Exception:
        is_off = True
    switches: tuple[Any, ...] = (datasets.config, constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    for switch in switches:
        switch.HF_HUB_OFFLINE = switch.HF_HUB_OFFLINE or is_off
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
