"""`doge-fast export`: files in, one text out; what a person should know goes to the log."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast import atomic_file
from doge_fast.pipeline import failures, named, records
from doge_fast.pipeline.config import ExportConfig
from doge_fast.pipeline.exports.blend import Paths
from doge_fast.pipeline.exports.registry import export, import_weights, listing
from doge_fast.pipeline.exports.text import from_yaml, to_json

_LOG = logging.getLogger(__name__)
_FILES = (".json", ".yaml", ".yml")


def run(config: ExportConfig) -> list[str]:
    """Export weights to a framework, import them from one, or both in turn.

    Args:
        config: the file, the target, the paths.

    Returns:
        The text, or where it was written.

    Raises:
        ValueError: what was asked cannot be done; nothing has been written.
    """
    if config.list:
        return [listing()]
    if config.file is None or not (config.to or config.from_):
        raise ValueError(
            "export needs a file, and --to TARGET to write it for a framework or --from TARGET to "
            "read a framework's; --list says which targets there are."
        )
    out = config.out
    if out is not None:
        if config.to is None and out.is_dir():
            out = out / records.WEIGHTS
        given = (config.paths, config.valid_paths, config.test_paths)
        tables = [Path(words[0]) for words in given if len(words) == 1]
        read = [config.file, *tables, *([config.phases] if config.phases else [])]
        records.check_out(out, read)
    paths, settings = _paths(config.paths, "paths"), _settings(config)
    record: Mapping[str, Any]
    if config.from_ is None:
        record = _with_steps(records.read_weights(config.file), config.file)
    else:
        text = _text(config.file)
        found = import_weights(text, source=config.from_, paths=paths, **settings)
        record = found | {"file": str(config.file)}
    if config.phases is not None:
        record = _with_phases(record, config.phases)
    text = to_json(record) if config.to is None else _exported(config, record, paths, settings)
    if out is None:
        return [text.rstrip("\n")]
    with failures.writing(out, makes_directory=False):
        if config.to is None:
            records.write_weights(out, record)
        else:
            atomic_file.write(out, text)
    return [f"{'weights' if config.to is None else 'written'}: {out}"]


def _exported(
    config: ExportConfig, record: Mapping[str, Any], paths: Paths, settings: Mapping[str, Any]
) -> str:
    """The text; what was left out is said always, the rest where the text does not say it."""
    assert config.to is not None
    made = export(
        record,
        to=config.to,
        paths=paths,
        valid_paths=_paths(config.valid_paths, "valid-paths"),
        test_paths=_paths(config.test_paths, "test-paths"),
        **settings,
    )
    for line in made.warnings:
        _LOG.warning(line)
    for line in () if made.has_comments else made.notes:
        _LOG.info(line)
    return made.text


def _with_steps(record: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The record of a base run in stages, with the steps that its config.json has."""
    run = file if file.is_dir() else file.parent
    is_own = file in (run, run / records.WEIGHTS) and (run / records.CONFIG).exists()
    if not is_own or "stages" not in record:
        return record
    return {"steps": records.read_config(run)["config"]["training"]["steps"], **record}


def _with_phases(record: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The record with the phases of another file: a list of them, or a record that has some."""
    path = file / records.WEIGHTS if file.is_dir() else file
    parsed = _parsed(path)
    found, steps = parsed, None
    if isinstance(parsed, dict):
        parsed = _with_steps(parsed, file)
        found, steps = parsed.get("phases") or parsed.get("stages"), parsed.get("steps")
    if not isinstance(found, list) or not found:
        raise ValueError(
            f'{path} must hold phases, a list of {{"first_step", "weights"}}, by itself or under '
            '"phases" or "stages"; it holds none.'
        )
    # A phase may leave out domains, which then have no weight in it.
    nothing = {entry["name"]: 0.0 for entry in record["domains"]}
    phases = [
        each | {"weights": nothing | each["weights"]}
        if isinstance(each, dict) and isinstance(each.get("weights"), dict)
        else each
        for each in found
    ]
    # Steps of the run that the phases are of, not of the one that the weights are of.
    return {**record, "steps": steps, "phases": phases}


def _paths(words: Sequence[str], flag: str) -> dict[str, Any]:
    """Paths by domain: NAME=PATH, a name again for a further path; or a JSON or YAML file."""
    if len(words) == 1 and "=" not in words[0] and words[0].endswith(_FILES):
        value = _parsed(Path(words[0]))
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{words[0]} must map domains to paths; it holds {value!r}.")
        return value
    found: dict[str, list[str]] = {}
    for word in words:
        # A path may hold "=".
        name, _, path = word.partition("=")
        if not (name and path):
            raise ValueError(
                f"--{flag} takes NAME=PATH ..., or one JSON or YAML file; got {word!r}."
            )
        found.setdefault(name, []).append(path)
    return dict(found)


def _parsed(file: Path) -> Any:
    text = _text(file)
    if file.suffix != ".json":
        return from_yaml(text, str(file))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must hold JSON and does not: {error}.") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as text: {error}.") from None


def _settings(config: ExportConfig) -> dict[str, Any]:
    """Fields of `Settings`."""
    same = ("decimals", "rows", "seq_length", "batch_size", "steps", "seed", "local_dir")
    return {name: getattr(config, name) for name in same} | {
        "mean_doc_tokens": named.numbers(config.mean_doc_tokens, "mean_doc_tokens"),
        "budget_tokens": None if config.budget_tokens is None else int(config.budget_tokens),
        "is_constant": config.constant,
    }
