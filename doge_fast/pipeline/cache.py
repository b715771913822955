"""Cache of costly data sets, each made once with `datasets`.

`datasets` locks a data set while it is made, renames it when it is complete, and maps it into
memory. So a second process waits, and a killed one leaves nothing that looks complete.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from doge_fast.kernels.build import cache_dir
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.failures import reading


def folder(config: CorpusConfig) -> Path:
    """The folder of the data sets; its root is created if absent."""
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir()
    # The default root is private: compiled operators are loaded from it.
    root.mkdir(mode=0o777 if config.cache_dir else 0o700, parents=True, exist_ok=True)
    return root / "corpora"


def cached(
    config: CorpusConfig,
    key: str,
    rows: Callable[[], Iterator[Mapping[str, Any]]],
    **features: Any,
) -> datasets.Dataset:
    """The data set with this key; made from `rows()` if it is absent.

    Raises:
        Exception: an error of `rows`, unchanged.
        FileFailure: the cache is damaged.
        OSError: the cache cannot be read or written.
    """
    place = folder(config)
    # The folder that `datasets` uses; named in errors without a file name.
    made = place / "generator" / f"default-fingerprint={key}"
    had_bars = not datasets.are_progress_bars_disabled()
    # Our bars count documents, and off a terminal they are lines of the log.
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(features),
            cache_dir=str(place),
            fingerprint=key,
        )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.filename is None:
            cause.filename = str(made)
        raise cause from None
    except (OSError, pa.ArrowInvalid):
        with reading(made):
            raise
    finally:
        if had_bars:
            datasets.enable_progress_bars()


def digest(value: Any) -> str:
    """The first 32 hex digits of the SHA-256 of a JSON value; short enough to name a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def text_hash(text: str) -> int:
    """A 64-bit hash of a text, equal on all machines; selects files and documents."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
