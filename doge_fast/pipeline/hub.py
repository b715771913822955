"""Tokenizers, configurations, models and data sets of the Hub, which is asked once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
from huggingface_hub import constants, get_session

Opened = TypeVar("Opened")

_SECONDS = 10


def from_pretrained(opener: Callable[..., Opened], name: str, **options: Any) -> Opened:
    """What `opener`, a `from_pretrained` of transformers, makes of a folder, file or Hub id.

    Code that comes with a model is never run.
    """
    if Path(name).exists():
        return opener(name, trust_remote_code=False, **options)
    with asked_once():
        return opener(name, trust_remote_code=False, **options)


@contextmanager
def asked_once() -> Iterator[None]:
    """Within, a Hub that does not answer counts as off, where libraries would try for minutes.

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
