"""Opens tokenizers, models and data sets of the Hub, and works offline if it does not answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
from huggingface_hub import constants, get_session

Opened = TypeVar("Opened")

_SECONDS = 10


def from_pretrained(opener: Callable[..., Opened], name: str, **options: Any) -> Opened:
    """Call `opener`, a `from_pretrained` of transformers, with a folder, file or Hub id.

    Code that comes with a model is never run.
    """
    if Path(name).exists():
        return opener(name, trust_remote_code=False, **options)
    with asked_once():
        return opener(name, trust_remote_code=False, **options)


@contextmanager
def asked_once() -> Iterator[None]:
    """Try the Hub once; if it does not answer, the libraries work offline inside the context.

    Otherwise they would retry for minutes. Cached files open offline too.
    """
    try:
        # Any answer counts: errors in it are reported when something is opened.
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
