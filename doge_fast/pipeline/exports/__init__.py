# ruff: noqa: F401
# mypy: implicit-reexport
"""Domain weights -> what each training framework takes, and back."""

from doge_fast.pipeline.exports.blend import (
    Blend,
    Found,
    Phase,
    Settings,
    Target,
    by_document,
    by_token,
    largest_remainder,
)
from doge_fast.pipeline.exports.registry import Exported, export, import_weights, listing, targets
