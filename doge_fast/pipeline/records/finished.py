"""Whether a run is complete: `model/` is the last thing that it leaves, whole or not there."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.manifest import MANIFEST, read_manifest
from doge_fast.pipeline.records.runs import read_json

MODEL = "model"


def is_finished(out: Path) -> bool:
    """Whether the run in `out` came to its end; `model/` is the last thing that it leaves."""
    try:
        return check_model(out, is_hashed=False)
    except ValueError:
        return False


def check_finished(run: Path) -> None:
    """Raise ValueError where a run has no model yet, or a damaged one; reads all of it."""
    if not check_model(run):
        raise ValueError(
            f"{run} has no {MODEL}/: its run is not complete. Repeat the command that began it; it "
            "resumes."
        )


def check_model(out: Path, *, is_hashed: bool = True) -> bool:
    """Whether a run has left a model; an empty folder is none.

    Args:
        out: the run directory.
        is_hashed: read all of it; False: what takes no time.

    Raises:
        FileFailure: it has left one that is damaged.
    """
    folder = out / MODEL
    if not any(folder.glob("*")):
        return False
    try:
        if (folder / MANIFEST).exists():
            read_manifest(folder, is_hashed=is_hashed)
        else:
            _check_unlisted(folder)
    except ValueError as error:
        raise FileFailure(
            f"{folder} is damaged: {str(error).rstrip('.')}. Restore it, or remove the folder and "
            "repeat the command that began the run."
        ) from None
    return True


def _check_unlisted(folder: Path) -> None:
    """Of a model that no manifest describes: an earlier version's, or somebody's own."""
    read_json(folder / "config.json")
    weights = list(folder.glob("*.safetensors"))
    for file in weights:
        try:
            # Its header says how long it is.
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file.name} is not whole ({error})") from None
    if not weights:
        raise ValueError("it holds no .safetensors")
