"""config.json, and what holds of every file of a run directory: names, schema, required keys."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.shapes import (
    CONFIG,
    EXPERIMENT,
    STAGES,
    WAY_OUT,
    Asked,
    ConfigRecord,
    Loaded,
    Stage,
    check_shape,
)
from doge_fast.weights.weights_file import SCHEMA_VERSION, plain, unique_keys, write_json

METRICS = "metrics.jsonl"
WEIGHTS = "weights.json"
CHECKPOINTS = "checkpoints"
# Where one is written, among them.
WRITING = ".writing"

Json = dict[str, Any]

# Where a run lies, where its blocks are cached, who is told and when it gives up do not change what
# it computes; nor does what is asked of a select run's scores, once they are there.
_NOT_COMPARED = (
    *("out", "corpus.cache_dir", "training.report_to", "training.max_skipped_steps"),
    *("strategies", "reading"),
)
# Says whether to run at all.
_NOT_KEPT = ("dry_run",)

_REPORTED_PACKAGES = (
    *("doge-fast", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"),
)


def check_run(out: Path, *, stage: Stage, config: Any) -> Json | None:
    """config.json of `out` where it holds this very run already, so that it can be resumed.

    Writes nothing, so it can be asked before the corpus is packed. A setting that did not exist
    when the run was made counts as its default. None: the run is a new one.

    Raises:
        ValueError: `out` is a file, holds files but no config.json, or holds another run.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"A run needs a directory; {out} is a file. Name another one.")
    if not (out / CONFIG).exists():
        check_empty(out)
        return None
    recorded = read_config(out)
    if recorded["stage"] != stage:
        raise ValueError(
            f"{out} holds a {recorded['stage']} run; this is the {stage} stage. "
            "Name another directory."
        )
    before = _kept(recorded["config"])
    check_same("configuration", out, before, _kept(config), _NOT_COMPARED)
    return recorded


def check_corpus(out: Path, recorded: Json, corpus: Mapping[str, Any]) -> None:
    """Raise ValueError where a run, by its config.json, began with another corpus than this."""
    before, now = recorded["corpus"], plain(corpus)
    digests = [name for name in _flat(now) if name.endswith(".digest")]
    check_same("corpus", out, before, now, digests)
    if changed := changed_domains(before, now):
        raise ValueError(
            f"{out} began with another text: the blocks of {', '.join(changed)} are as many as "
            "then, and hold something else or stand in another order. Restore the files of the "
            "corpus, or name another directory."
        )


def changed_domains(before: Json, now: Json) -> list[str]:
    """Domains and targets of two descriptions of a corpus whose blocks differ, where both say."""
    found = []
    for name, of in (before["domains"] | before["targets"]).items():
        digest = (now["domains"] | now["targets"]).get(name, {}).get("digest")
        if of.get("digest") and digest and of["digest"] != digest:
            found.append(name)
    return found


def _kept(config: Any) -> Any:
    """What config.json keeps of a stage's settings."""
    return {name: value for name, value in plain(config).items() if name not in _NOT_KEPT}


def open_run(
    out: Path,
    *,
    stage: Stage,
    config: Any,
    corpus: Mapping[str, Any],
    initial: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Make `out` the directory of a new run; `check_run` has found none there.

    Args:
        out: the run directory; made where absent.
        stage: which one.
        config: its dataclass.
        corpus: as `CorpusRecord` has it.
        initial: what the run begins with that was read elsewhere: recorded once, so that resuming
            it asks nothing of what became of that place.
        resolved: settings whose default was taken, as numbers: likewise.
        warnings: what to know of the corpus before believing a number: kept for the report.
    """
    optional = {"initial": initial, "resolved": resolved, "warnings": warnings}
    record = {
        "schema_version": SCHEMA_VERSION,
        "stage": stage,
        "config": _kept(config),
        "corpus": corpus,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: value for name, value in optional.items() if value},
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CONFIG, record)


def read_config(run: Path) -> Json:
    """config.json of a run directory, settings that it lacks as their defaults.

    Raises:
        ValueError: it is absent or damaged.
    """
    load(run, ConfigRecord)
    record = read_json(run / CONFIG)
    told: Any = check_shape(record["config"], STAGES[record["stage"]], f"{run / CONFIG}, config")
    return record | {"config": _over(_kept(told), record["config"])}


def load_config(run: Path) -> tuple[ConfigRecord, Asked]:
    """config.json, and what a report reads of its configuration; also of earlier releases' runs.

    Raises:
        ValueError: as `read_config`.
    """
    loaded = load(run, ConfigRecord)
    # What a default came to, in its place.
    told = loaded.config | loaded.resolved
    return loaded, check_shape(told, Asked, f"{run / CONFIG}, config")


def _over(defaults: Json, recorded: Json) -> Json:
    """What was recorded; a setting that came later counts as its default."""
    both = {
        name: _over(defaults[name], value) if isinstance(defaults.get(name), dict) else value
        for name, value in recorded.items()
    }
    return defaults | both


def check_same(what: str, out: Path, recorded: Json, asked: Json, ignored: Sequence[str]) -> None:
    """Raise ValueError where a recorded object of `out` is another than the one asked for.

    `ignored` are dotted names of what may differ.
    """
    before, now = _flat(recorded), _flat(asked)
    pairs = {name: (before.get(name, "absent"), now.get(name, "absent")) for name in before | now}
    differing = [
        name for name, pair in pairs.items() if name not in ignored and not _is_same(*pair)
    ]
    if differing:
        first, *others = differing
        was, is_now = pairs[first]
        also = f" (also {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"
        raise ValueError(
            f"{out} holds another run: the {what}'s {first} is {was!r} there and {is_now!r} here"
            f"{also if others else ''}. Name another directory, or repeat the recorded run to "
            "resume it."
        )


def _is_same(recorded: Any, asked: Any) -> bool:
    """Equal, or one path said in two ways; a word without a slash, as `uniform`, is no path."""
    if all(isinstance(value, str) and os.sep in value for value in (recorded, asked)):
        recorded, asked = os.path.abspath(recorded), os.path.abspath(asked)
    return bool(recorded == asked)


def _flat(value: Any, prefix: str = "") -> Json:
    """{"a": {"b": 1}} -> {"a.b": 1}; a list is one value, an empty object too."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: Json = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def versions() -> dict[str, str]:
    """Version of Python and of every installed package that decides a run's numbers."""
    found = {"python": python_version()}
    for package in _REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read_json(path: Path) -> Json:
    """The object that the file holds; ValueError where it is absent or holds another thing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        raise FileFailure(f"{path} must hold JSON and does not: {error}. {WAY_OUT}") from None
    if not isinstance(value, dict):
        held = _JSON_NAMES.get(type(value), "a number")
        raise FileFailure(f"{path} must hold a JSON object; it holds {held}. {WAY_OUT}")
    return value


_JSON_NAMES = {type(None): "null", bool: "true or false", list: "a list", str: "a string"}


def load(folder: Path, kind: type[Loaded]) -> Loaded:
    """A record of a directory, of a schema that is known and with all that a reader asks for.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    path = folder / kind.file
    if not path.exists():
        raise ValueError(kind.absent.format(folder))
    record = read_json(path)
    if kind.has_schema:
        check_schema(record, path)
    return check_shape(record, kind, path)


def check_schema(record: Json, path: str | Path, *, way_out: str = "") -> None:
    """A record of another schema is refused before any of it is believed."""
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileFailure(
            f"{path} must say which schema it follows, as an integer schema_version; "
            f"it says {version!r}.{way_out}"
        )
    if version > SCHEMA_VERSION:
        raise FileFailure(
            f"{path} follows schema {version}; this version of doge_fast reads up to "
            f"{SCHEMA_VERSION}. Upgrade doge_fast to read it."
        )


def check_empty(out: Path) -> None:
    """A directory with somebody else's files is not made a run."""
    if not out.is_dir():
        return
    # What a run leaves that was killed while it wrote its very first file.
    torn = (f".{CONFIG}.", f".{EXPERIMENT}.")
    held = sorted(
        entry.name
        for entry in out.iterdir()
        if not (entry.name.startswith(torn) or _is_a_lock(entry))
    )
    if held:
        raise ValueError(
            f"A new run needs an empty directory; {out} holds {', '.join(held[:3])}"
            f"{', ...' if len(held) > 3 else ''} and no {CONFIG}. Name another directory."
        )


def _is_a_lock(entry: Path) -> bool:
    """A folder of checkpoints without any: of a run that has only just begun."""
    hidden = (each.name.startswith(".") for each in entry.glob("*"))
    return entry.name == CHECKPOINTS and all(hidden)
