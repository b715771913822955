"""Writing weights.json, and JSON files in general, so that a reader never sees half of one.

The optimizer, which needs torch alone, and every stage of the pipeline write through here;
docs/weights.md describes the file.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


def write(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a record of domain weights; `schema_version` is added where it is missing.

    Args:
        path: the file.
        record: {"method", "domains": [{"name", "weight", ...}], ...}.
    """
    write_json(Path(path), {"schema_version": SCHEMA_VERSION, **record})


def plain(value: Any) -> Any:
    """`value` as JSON holds it: dataclasses, paths, arrays and tensors become plain values.

    Non-finite numbers become None, for JSON has no word for them.
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
    """Write `value` (see `plain`) as JSON: beside `path`, then renamed over it."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner reads; a record is for everybody.
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _umask() -> int:
    """The process's file mode mask; reading it is setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
