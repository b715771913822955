"""The files of a run directory: their names, and what every one of them is checked for."""

import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from doge_fast.weights_file import SCHEMA_VERSION

CONFIG = "config.json"
METRICS = "metrics.jsonl"
WEIGHTS = "weights.json"
EVALUATION = "evaluation.json"
EXPERIMENT = "experiment.json"
FEWSHOT = "fewshot.json"

Json = dict[str, Any]

_REPORTED_PACKAGES = (
    "doge-fast",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """Version of Python and of every installed package that decides a run's numbers."""
    found = {"python": python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_json(path: Path) -> Json:
    """The object that the file holds.

    Raises:
        ValueError: there is no such file, it is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must hold JSON and does not: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(value).__name__}.")
    return value


def read_record(path: Path, keys: Iterable[str], *, absent: str, has_schema: bool = True) -> Json:
    """A record of a directory, with every key that a reader will ask for.

    Args:
        path: the file.
        keys: what it must hold.
        absent: what is said where there is none.
        has_schema: whether it says which schema it follows.

    Raises:
        ValueError: it is absent, not JSON, of a future schema, or lacks a key.
    """
    if not path.exists():
        raise ValueError(absent)
    record = read_json(path)
    if has_schema:
        check_schema(record, path)
    check_keys(record, keys, path)
    return record


def check_schema(record: Json, path: Path, *, way_out: str = "") -> None:
    """A record of another schema is refused before any of it is believed."""
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"{path} must say which schema it follows, as an integer schema_version; "
            f"it says {version!r}.{way_out}"
        )
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} follows schema {version}; this version of doge_fast reads up to "
            f"{SCHEMA_VERSION}. Upgrade doge_fast to read it."
        )


def check_keys(record: Mapping[str, Any], keys: Iterable[str], path: Path) -> None:
    """Every key that a reader will ask for is there."""
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"{path} must hold {', '.join(keys)}; it lacks {', '.join(missing)}.")


def check_empty(out: Path) -> None:
    """A directory with somebody else's files is not made a run."""
    if not out.is_dir():
        return
    # What a run leaves that was killed while it wrote its very first file.
    torn = (f".{CONFIG}.", f".{EXPERIMENT}.")
    held = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(torn))
    if held:
        raise ValueError(
            f"A new run needs an empty directory; {out} holds {', '.join(held[:3])}"
            f"{', ...' if len(held) > 3 else ''} and no {CONFIG}. Name another directory."
        )
