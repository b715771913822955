"""`doge-fast export`: files in, one text out; what a person should know goes to the log."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import records
from doge_fast.pipeline.config import ExportConfig
from doge_fast.pipeline.exports.mixture import Paths, Settings
from doge_fast.pipeline.exports.registry import Exported, export, import_weights, listing
from doge_fast.pipeline.exports.text import parsed_yaml, to_json

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
    if config.out is not None:
        records.check_out(_place(config.out, config), _read(config))
    paths = read_paths(config.paths, "paths")
    settings = _settings(config)
    record = _record(config, config.file, paths, settings)
    if config.to is None:
        return _keep(config, record)
    made = export(
        record,
        to=config.to,
        paths=paths,
        valid_paths=read_paths(config.valid_paths, "valid-paths"),
        test_paths=read_paths(config.test_paths, "test-paths"),
        settings=settings,
    )
    _tell(made)
    return _write(config.out, made.text)


def _place(out: Path, config: ExportConfig) -> Path:
    """The file; weights.json in a directory where it is a record that is written."""
    return out / records.WEIGHTS if config.to is None and out.is_dir() else out


def _read(config: ExportConfig) -> list[Path]:
    """The files that an export begins from."""
    tables = [config.paths, config.valid_paths, config.test_paths]
    named = [Path(table[0]) for table in tables if len(table) == 1]
    return [path for path in (config.file, config.phases, *named) if path is not None]


def _record(
    config: ExportConfig, file: Path, paths: Paths, settings: Settings
) -> Mapping[str, Any]:
    """weights.json, or what a framework's file becomes; with the phases that were asked for."""
    if config.from_ is not None:
        record: Mapping[str, Any] = import_weights(
            _text(file), source=config.from_, paths=paths, settings=settings
        ) | {"file": str(file)}
    else:
        record = with_counts(records.read_weights(file), file)
    return record if config.phases is None else _with_phases(record, config.phases)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as text: {error}.") from None


def with_counts(record: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The record, with what it lacks of documents, tokens and steps from the run's config.json.

    Args:
        record: what `read_weights` returned.
        file: a run directory, or weights.json in one or elsewhere.
    """
    run = file if file.is_dir() else file.parent
    if not (run / records.CONFIG).exists() or (run / records.WEIGHTS) not in (
        file,
        file / records.WEIGHTS,
    ):
        return record
    about = records.read_config(run)
    known = about["corpus"].get("domains", {})
    steps = about["config"].get("training", {}).get("steps")
    own = {"steps": steps} if steps and "stages" in record else {}
    return own | {**record, "domains": [_filled(entry, known) for entry in record["domains"]]}


def _filled(entry: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    held = known.get(entry["name"], {})
    counts = {"tokens": held.get("train_tokens"), "documents": held.get("documents")}
    return {key: value for key, value in counts.items() if value} | dict(entry)


def _with_phases(record: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The record with the phases of another file: a list of them, or a record that has some."""
    path = file / records.WEIGHTS if file.is_dir() else file
    parsed = _parsed(path)
    value = parsed
    if isinstance(parsed, dict):
        parsed = with_counts(parsed, file) if "domains" in parsed else parsed
        value = parsed.get("phases") or parsed.get("stages")
    if not isinstance(value, list) or not value:
        raise ValueError(
            f'{path} must hold phases, a list of {{"first_step", "weights"}}, by itself or under '
            '"phases" or "stages"; it holds none.'
        )
    names = [entry["name"] for entry in record["domains"]]
    steps = parsed.get("steps") if isinstance(parsed, dict) else None
    # Steps of the run that the phases are of, not of the one that the weights are of.
    return {**record, "steps": steps, "phases": [_completed(each, names) for each in value]}


def _completed(phase: Any, names: Sequence[str]) -> Any:
    """A phase may leave out domains, which then have no weight in it."""
    if not isinstance(phase, dict) or not isinstance(phase.get("weights"), dict):
        return phase
    return phase | {"weights": dict.fromkeys(names, 0.0) | phase["weights"]}


def read_paths(arguments: Sequence[str], flag: str) -> dict[str, Any]:
    """Paths by domain: NAME=PATH, a name again for a further path; or a JSON or YAML file.

    Raises:
        ValueError: an argument is neither, or the file does not hold a mapping.
    """
    if len(arguments) == 1 and "=" not in arguments[0] and arguments[0].endswith(_FILES):
        value = _parsed(Path(arguments[0]))
        if not isinstance(value, dict):
            raise ValueError(f"{arguments[0]} must map domains to paths; it holds {value!r}.")
        return value
    found: dict[str, Any] = {}
    for argument in arguments:
        name, is_pair, path = argument.partition("=")
        if not (is_pair and name and path):
            raise ValueError(
                f"--{flag} takes NAME=PATH ..., or one JSON or YAML file that maps names to paths; "
                f"got {argument!r}."
            )
        found.setdefault(name, []).append(path)
    return found


def _parsed(file: Path) -> Any:
    text = _text(file)
    if file.suffix != ".json":
        return parsed_yaml(text, str(file))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} must hold JSON and does not: {error}.") from None


def _settings(config: ExportConfig) -> Settings:
    return Settings(
        decimals=config.decimals,
        rows=config.rows,
        mean_doc_tokens=_numbers(config.mean_doc_tokens),
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        budget_tokens=_whole(config.budget_tokens),
        steps=config.steps,
        seed=config.seed,
        local_dir=config.local_dir,
        is_constant=config.constant,
    )


def _whole(budget: float | None) -> int | None:
    if budget is not None and not math.isfinite(budget):
        raise ValueError(f"budget_tokens must be a number of tokens; got {budget}.")
    return None if budget is None else int(budget)


def _numbers(arguments: Sequence[str]) -> dict[str, float]:
    found = {}
    for argument in arguments:
        name, _, number = argument.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"--mean-doc-tokens takes NAME=NUMBER ...; got {argument!r}.")
    return found


def _tell(made: Exported) -> None:
    """What was left out always; the rest where the text does not say it."""
    for line in made.warnings:
        _LOG.warning(line)
    if not made.has_comments:
        for line in made.notes:
            _LOG.info(line)


def _keep(config: ExportConfig, record: Mapping[str, Any]) -> list[str]:
    if config.out is None:
        return [to_json(record).rstrip("\n")]
    file = _place(config.out, config)
    try:
        records.write_weights(file, record)
    except OSError as error:
        raise _unwritten(file, error) from None
    return [f"weights: {file}"]


def _write(out: Path | None, text: str) -> list[str]:
    if out is None:
        return [text.rstrip("\n")]
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritten(out, error) from None
    return [f"written: {out}"]


def _unwritten(file: Path, error: OSError) -> ValueError:
    return ValueError(f"{file} cannot be written: {error.strerror}.")
