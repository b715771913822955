"""What is dear to make is a data set in the cache of `datasets`, made once.

`datasets` locks what it makes, gives it its name when it is whole, and maps it into memory: who
comes second waits, and a process that is killed leaves nothing that is taken for complete.
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
    """Where data sets are kept; made where it is absent."""
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir()
    # By default for this user alone: compiled operators are loaded from there.
    root.mkdir(mode=0o777 if config.cache_dir else 0o700, parents=True, exist_ok=True)
    return root / "corpora"


def cached(
    config: CorpusConfig,
    key: str,
    rows: Callable[[], Iterator[Mapping[str, Any]]],
    **features: Any,
) -> datasets.Dataset:
    """The data set of this key; `rows` are asked for where it is absent.

    Raises:
        Exception: what `rows` raise, as it is.
        FileFailure: the cache is damaged.
        OSError: what the system says of the cache.
    """
    place = folder(config)
    # As `datasets` names it, for errors that name nothing.
    made = place / "generator" / f"default-fingerprint={key}"
    had_bars = not datasets.are_progress_bars_disabled()
    # Ours count documents, and where nobody looks there is none.
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
    """SHA-256 of a value that JSON can hold, shortened to what names a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def text_hash(text: str) -> int:
    """64 bits of a text, the same everywhere, by which files and documents are drawn."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
