# ruff: noqa: F401
# mypy: implicit-reexport
"""Domain weights -> what each training framework takes."""

from doge_fast.pipeline.exports.blend import (
    Blend,
    ExportTarget,
    by_document,
    largest_remainder,
)
from doge_fast.pipeline.exports.registry import Exported, export, listing, targets
