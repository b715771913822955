"""Write weights.json (docs/weights.md) and other JSON files, whole or not at all."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doge_fast import atomic_file

SCHEMA_VERSION = 1


def write(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a record {"method", "domains": [{"name", "weight", ...}], ...} of domain weights."""
    whole = plain({"schema_version": SCHEMA_VERSION, **record})
    write_json(Path(path), whole | {"sha256": digest_of(whole)})


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of all fields but `sha256`: damage and edits of a file show in it."""
    fields = {name: value for name, value in record.items() if name != "sha256"}
    text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON holds it: dataclasses, paths, arrays and tensors become plain values.

    Non-finite numbers become None: JSON has no literal for them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` (see `plain`) as JSON, whole or not at all; ValueError if it is no UTF-8."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        data = f"{text}\n".encode()
    except UnicodeEncodeError as error:
        line = text.split("\n")[text.count("\n", 0, error.start)].strip()
        raise ValueError(
            f"{path} must be in UTF-8, and its line {line!a} cannot be. Rename what it names."
        ) from None
    atomic_file.write(path, data)


def refusal_of_removed(what: str) -> str:
    """The message that refuses a file of a removed method; `what` is its place and its name."""
    return (
        f"{what} belongs to a method that was removed. Learn new weights, or read it with the "
        "commit that is tagged 'before-the-card'."
    )
