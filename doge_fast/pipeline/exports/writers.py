"""One function for each target: it makes the text, or the values of its Python template's words."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import yaml

from doge_fast.pipeline.baselines import MAX_EPOCHS
from doge_fast.pipeline.exports.blend import REMOTE, Blend, BlendSplit, name_of_file
from doge_fast.pipeline.failures import UserError

# Megatron's: prefixes of indexed data sets, each after its weight. Weights count samples, which are
# sequences of one length, so shares of tokens are taken as they are.
_FLAGS: dict[BlendSplit, str] = {
    "train": "--train-data-path",
    "valid": "--valid-data-path",
    "test": "--test-data-path",
}


def _prefixes(blend: Blend, split: BlendSplit = "train") -> list[tuple[str, str]]:
    """[(share, prefix)] of a split; empty where it has no paths."""
    shares = []
    for share, path in blend.weighted_paths(split):
        if re.search(r"\s", path):
            raise UserError(
                "Megatron splits its lists at white space, and then reads none of the weights; "
                f"{path!r} has white space. Rename it, or link to it from a path without white "
                "space."
            )
        shares.append((_plain(share), path.removesuffix(".bin").removesuffix(".idx")))
    counts = Counter(prefix for _, prefix in shares)
    if twice := sorted(prefix for prefix, count in counts.items() if count > 1):
        raise UserError(
            f"A .bin and its .idx are one path, their prefix; {', '.join(twice)} is given twice. "
            "Name it once."
        )
    return shares


def _megatron(blend: Blend) -> str:
    """A flag for each split that has paths, with its words."""
    words = {flag: sum(_prefixes(blend, split), ()) for split, flag in _FLAGS.items()}
    given = {flag: shlex.join(each) for flag, each in words.items() if each}
    if len(given) == 1:
        given = {"--data-path": given[_FLAGS["train"]]}
    return " \\\n".join(f"{flag} {each}" for flag, each in given.items()) + "\n"


def _bridge(blend: Blend) -> str:
    shares, prefixes = zip(*_prefixes(blend), strict=True)
    lists = _sequence(map(_string, prefixes), "    "), _sequence(shares, "    ")
    return f"cfg.dataset.blend = [\n    {lists[0]},\n    {lists[1]},\n]\n"


# Frameworks that read their mixture from YAML.


def _olmo(blend: Blend) -> str:
    sources = [
        {
            "source_name": name,
            "target_ratio": share,
            "paths": blend.paths_of(name),
            "max_repetition_ratio": MAX_EPOCHS,
            "max_source_fraction": 1.0,
        }
        for name, share in blend.shares().items()
    ]
    return _to_yaml({"sources": sources})


def _nanotron(blend: Blend) -> str:
    shares, folders = zip(*blend.weighted_paths(), strict=True)
    dataset = {"dataset_folder": folders, "dataset_weights": shares}
    data = {"seed": blend.seed, "num_loading_workers": 1, "dataset": dataset}
    stage = {"name": "training", "start_training_step": 1, "data": data}
    return _to_yaml({"data_stages": [stage]})


# Frameworks that take their mixture in Python: the values of the words in their templates.

# The reader that a suffix asks for, by the name that `datasets` gives it.
_READERS = {
    **{".jsonl": "json", ".json": "json", ".parquet": "parquet"},
    **{".csv": "csv", ".txt": "text", ".arrow": "arrow"},
}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


def _reader_of(paths: Sequence[str]) -> str | None:
    """json, parquet, csv, text or arrow, as the suffixes of a domain's paths say; else None."""
    readers = set()
    for path in paths:
        suffixes = PurePosixPath(path.split(REMOTE)[-1]).suffixes
        kept = ["", *(suffix for suffix in suffixes if suffix not in _PACKED)]
        readers.add(_READERS.get(kept[-1]))
    if len(readers) > 1:
        raise UserError(f"The files of a domain must be of one kind; {', '.join(paths)} are not.")
    return readers.pop()


def _to_load(paths: Sequence[str]) -> str:
    """Arguments of load_dataset for a domain: a reader and its files, or one folder or Hub id."""
    reader = _reader_of(paths)
    if reader is None and len(paths) > 1:
        raise UserError(
            f"load_dataset takes one directory or Hub id; got {', '.join(paths)}. Name files "
            "(jsonl, parquet, csv, txt, arrow), or make each a domain."
        )
    names = [
        name_of_file(path, "load_dataset", is_pattern=False, can_escape=reader is not None)
        for path in paths
    ]
    if reader is None:
        return _string(names[0])
    return f"{_string(reader)}, data_files=[{', '.join(map(_string, names))}]"


def _interleaved(blend: Blend) -> dict[str, object]:
    opened = {name: _to_load(blend.paths_of(name)) for name in blend.shares()}
    # {domain: the call that opens it as a stream}.
    streams = {
        n: f'load_dataset({each}, split="train", streaming=True)' for n, each in opened.items()
    }
    return {
        "streams": _mapping(streams),
        "shares": _mapping(blend.shares()),
        "seed": blend.seed,
    }


def _litdata(blend: Blend) -> dict[str, object]:
    loader, imported = "", ""
    if blend.rows == "blocks":
        blend.require("seq_length", why="a TokensLoader cuts blocks of it; else --rows documents")
        # The last token of a block is only predicted.
        loader = f", item_loader=TokensLoader(block_size={(blend.seq_length or 0) + 1})"
        imported = ", TokensLoader"
    shares, folders = zip(*blend.weighted_paths(), strict=True)
    return {
        "imported": imported,
        "folders": _sequence(map(_string, folders)),
        "loader": loader,
        "seed": blend.seed,
        "shares": _sequence(shares, "    ", "()"),
    }


def _torchtitan(blend: Blend) -> dict[str, object]:
    # It looks names up in lower case.
    sources = [
        f"source({_string(name.lower())}, {_plain(share)}, {_to_load(blend.paths_of(name))})"
        for name, share in blend.shares().items()
    ]
    names = {name.lower() for name in blend.shares()}
    if len(names) < len(sources):
        raise UserError(
            "torchtitan knows data sets by their names in lower case, and two of these are then "
            f"the same: {', '.join(blend.shares())}. Rename one (doge-fast export --to json)."
        )
    return {"sources": _sequence(sources, "    "), "seed": blend.seed}


def _mosaic(blend: Blend) -> dict[str, object]:
    blend.require("batch_size", why="StreamingDataset does not start without one")
    streams = []
    for name, share in blend.shares().items():
        path = blend.one_path(name)
        place = "remote" if REMOTE in path else "local"
        streams.append(f"Stream({place}={_string(path)}, proportion={_plain(share)})")
    return {
        "streams": _sequence(streams, "    "),
        "seed": blend.seed,
        "batch_size": blend.batch_size,
    }


# Forms that several targets share.


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a share as the float that a framework reads."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quoted where it begins like a number: 1e3 and 0o7 are numbers to some readers."""
    style = "'" if re.match(r"[-+.\d]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(Decimal, lambda dumper, share: dumper.represent_float(float(share)))
_Dumper.add_representer(str, _text)


def _to_yaml(value: Any) -> str:
    """Block YAML in the order given, each path on one line; a decimal is written as a float."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000))


def _plain(value: Decimal | str) -> str:
    """A decimal without an exponent; source text as it is."""
    return f"{value:f}" if isinstance(value, Decimal) else value


def _string(value: str) -> str:
    """A Python literal, quoted as this project quotes."""
    return json.dumps(value, ensure_ascii=False)


def _mapping(items: Mapping[str, Decimal | str]) -> str:
    """A dict of decimals or source texts, an item a line."""
    pairs = (f"{_string(key)}: {_plain(value)}" for key, value in items.items())
    return _sequence(pairs, brackets="{}")


def _sequence(items: Iterable[Decimal | str], indent: str = "", brackets: str = "[]") -> str:
    """A list (or tuple, or dict) of decimals or source texts, an item a line."""
    lines = [f"{indent}    {_plain(item)},\n" for item in items]
    return f"{brackets[0]}\n{''.join(lines)}{indent}{brackets[1]}"


WRITERS: Mapping[str, Callable[[Blend], str | Mapping[str, object]]] = {
    "megatron": _megatron,
    "megatron-bridge": _bridge,
    "olmo-core": _olmo,
    "nanotron": _nanotron,
    "json": lambda blend: json.dumps(blend.numbers(), indent=2, ensure_ascii=False) + "\n",
    "mosaic-streaming": _mosaic,
    "datasets": _interleaved,
    "litdata": _litdata,
    "torchtitan": _torchtitan,
}
