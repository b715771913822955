"""`doge-fast export`: files in, one text out; what a person should know goes to the log."""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from doge_fast import atomic_file
from doge_fast.pipeline import failures, named, records, strict_yaml
from doge_fast.pipeline.config import ExportConfig
from doge_fast.pipeline.exports.registry import export, listing
from doge_fast.weights.weights_file import unique_keys

_LOG = logging.getLogger(__name__)
_FILES = (".json", ".yaml", ".yml")


def run(config: ExportConfig) -> list[str]:
    """Write weights for a framework; the text, or where it was written."""
    if config.list:
        return [listing()]
    if config.file is None or not config.to:
        raise ValueError(
            "export needs a file, and --to TARGET to write it for; --list says which targets there "
            "are."
        )
    if config.out is not None:
        given = (config.paths, config.valid_paths, config.test_paths)
        tables = [Path(words[0]) for words in given if len(words) == 1]
        records.check_out(config.out, [config.file, *tables])
    weights = records.read_weights(config.file)
    names = list(records.weights_by_name(weights))
    made = export(
        weights,
        to=config.to,
        paths=_paths(config.paths, "paths", names),
        valid_paths=_paths(config.valid_paths, "valid-paths", names),
        test_paths=_paths(config.test_paths, "test-paths", names),
        decimals=config.decimals,
        rows=config.rows,
        mean_doc_tokens=named.numbers(config.mean_doc_tokens, "mean_doc_tokens"),
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        budget_tokens=None if config.budget_tokens is None else int(config.budget_tokens),
        seed=config.seed,
    )
    # What was left out is said always, the rest where the text does not say it.
    for line in made.warnings:
        _LOG.warning(line)
    for line in () if made.has_comments else made.notes:
        _LOG.info(line)
    if config.out is None:
        return [made.text.rstrip("\n")]
    with failures.writing(config.out, makes_directory=False):
        atomic_file.write(config.out, made.text)
    return [f"written: {config.out}"]


def _paths(words: Sequence[str], flag: str, names: Sequence[str]) -> dict[str, Any]:
    """Paths by domain: NAME=PATH, a name again for a further path; or a JSON or YAML file."""
    if len(words) == 1 and _is_table(words[0], names):
        value = _parsed(Path(words[0]))
        if not isinstance(value, dict):
            raise ValueError(f"{words[0]} must map domains to paths; it holds {value!r}.")
        for name in value:
            if not isinstance(name, str):
                raise ValueError(
                    f"{words[0]} must map domains to paths; {name!r} is no text. Write the name of "
                    "a domain in quotes."
                )
        return value
    found: dict[str, list[str]] = {}
    for word in words:
        # A path may hold "=", and so may the name of a domain.
        known = [name for name in names if word.startswith(f"{name}=")]
        name = max(known, key=len) if known else word.partition("=")[0]
        path = word[len(name) + 1 :]
        if not (name and path):
            raise ValueError(
                f"--{flag} takes NAME=PATH ..., or one JSON or YAML file; got {word!r}."
            )
        found.setdefault(name, []).append(path)
    return dict(found)


def _is_table(word: str, names: Sequence[str]) -> bool:
    """Whether a word is a file of paths and not NAME=PATH; the name of a file may hold "="."""
    is_pair = any(word.startswith(f"{name}=") for name in names)
    is_named = "=" not in word or Path(word).is_file()
    return word.endswith(_FILES) and is_named and not is_pair


def _parsed(file: Path) -> Any:
    """What a JSON or YAML file holds."""
    parse: Callable[[str], Any] = strict_yaml.load
    if file.suffix == ".json":
        parse = functools.partial(json.loads, object_pairs_hook=unique_keys)
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} must hold JSON or YAML and does not: {reason}.") from None
