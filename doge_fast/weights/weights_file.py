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
    return _sha256({name: value for name, value in record.items() if name != "sha256"}).hexdigest()


def fingerprint_of(value: Any) -> float:
    """The first 48 bits of a value's SHA-256, which a float holds exactly."""
    return float(int.from_bytes(_sha256(value).digest()[:6], "big"))


def _sha256(value: Any) -> "hashlib._Hash":
    """The hash of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode())


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
    """Write `value` (see `plain`) as JSON, whole or not at all.

    UnicodeEncodeError, a ValueError, if a path in it is not UTF-8; nothing is written then.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    atomic_file.write(path, f"{text}\n")
