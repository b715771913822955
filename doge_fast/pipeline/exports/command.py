"""`doge-fast export`: reads weights, writes one text; warnings and notes go to the log."""

import logging
from collections.abc import Sequence

from doge_fast import atomic_file
from doge_fast.pipeline import failures, named, records
from doge_fast.pipeline.config import ExportConfig
from doge_fast.pipeline.exports.registry import export, listing
from doge_fast.pipeline.failures import UserError

_LOG = logging.getLogger(__name__)


def run(config: ExportConfig) -> list[str]:
    """Write weights for a framework; the text, or where it was written."""
    if config.list:
        return [listing()]
    if config.file is None or not config.to:
        raise UserError(
            "export needs a file, and --to TARGET to write it for; --list says which targets there "
            "are."
        )
    if config.out is not None:
        records.check_out(config.out, [config.file])
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
        mean_doc_tokens=named.numbers(config.mean_doc_tokens, "--mean-doc-tokens"),
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    for line in made.warnings:
        _LOG.warning(line)
    for line in made.notes:
        _LOG.info(line)
    if config.out is None:
        return [made.text.rstrip("\n")]
    with failures.writing(config.out, makes_directory=False):
        atomic_file.write(config.out, made.text)
    return [f"written: {config.out}"]


def _paths(words: Sequence[str], flag: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Paths by domain: NAME=PATH, a name again for a further path."""
    by_domain: dict[str, list[str]] = {}
    for word in words:
        # A path may hold "=", and so may the name of a domain.
        known = [name for name in names if word.startswith(f"{name}=")]
        name = max(known, key=len) if known else word.partition("=")[0]
        path = word[len(name) + 1 :]
        if not (name and path):
            raise UserError(
                f"--{flag} takes NAME=PATH ...; got {word!r}. A file of many goes to --config, as "
                f"{flag.replace('-', '_')}: [NAME=PATH, ...]."
            )
        by_domain.setdefault(name, []).append(path)
    return by_domain
