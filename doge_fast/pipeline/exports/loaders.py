"""Frameworks that take their mixture in Python: what their templates in targets.yaml lack."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from doge_fast.pipeline.exports.blend import REMOTE, Blend, name_of_file
from doge_fast.pipeline.exports.text import mapping, plain, sequence, string, strings

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
        raise ValueError(f"The files of a domain must be of one kind; {', '.join(paths)} are not.")
    return readers.pop() if readers else None


def _opened(paths: Sequence[str]) -> str:
    """What load_dataset opens a domain by: a reader and its files, or one folder or Hub id."""
    reader = _reader_of(paths)
    if reader is None and len(paths) > 1:
        raise ValueError(
            f"load_dataset takes one directory or Hub id; got {', '.join(paths)}. Name files "
            "(jsonl, parquet, csv, txt, arrow), or make each a domain."
        )
    names = [
        name_of_file(path, "load_dataset", is_pattern=False, can_escape=reader is not None)
        for path in paths
    ]
    return f"{string(reader)}, data_files=[{strings(names)}]" if reader else string(names[0])


def _streams(blend: Blend) -> str:
    """{domain: the call that opens it as a stream}."""
    opened = {name: _opened(blend.paths_of(name)) for name in blend.shares()}
    return mapping(
        {n: f'load_dataset({each}, split="train", streaming=True)' for n, each in opened.items()}
    )


def _interleaved(blend: Blend) -> dict[str, object]:
    return {
        "streams": _streams(blend),
        "shares": mapping(blend.shares()),
        "seed": blend.settings.seed,
    }


def _litdata(blend: Blend) -> dict[str, object]:
    loader, imported = "", ""
    if blend.rows == "blocks":
        blend.require("seq_length", why="a TokensLoader cuts blocks of it; else --rows documents")
        # The last token of a block is only predicted.
        loader = f", item_loader=TokensLoader(block_size={(blend.settings.seq_length or 0) + 1})"
        imported = ", TokensLoader"
    shares, folders = zip(*blend.weighted_paths(), strict=True)
    return {
        "imported": imported,
        "folders": sequence(map(string, folders)),
        "loader": loader,
        "seed": blend.settings.seed,
        "shares": sequence(shares, "    ", "()"),
    }


def _torchtitan(blend: Blend) -> dict[str, object]:
    # It looks names up in lower case.
    sources = [
        f"source({string(name.lower())}, {plain(share)}, {_opened(blend.paths_of(name))})"
        for name, share in blend.shares().items()
    ]
    names = {name.lower() for name in blend.shares()}
    if len(names) < len(sources):
        raise ValueError(
            "torchtitan knows data sets by their names in lower case, and two of these are then "
            f"the same: {', '.join(blend.shares())}. Rename one (doge-fast export --to json)."
        )
    return {"sources": sequence(sources, "    "), "seed": blend.settings.seed}


def _mosaic(blend: Blend) -> dict[str, object]:
    settings, rows = blend.settings, blend.rows_in_budget()
    blend.require("batch_size", why="StreamingDataset does not start without one (--batch-size)")
    streams = []
    for name, share in blend.shares().items():
        path = blend.one_path(name)
        place = "remote" if REMOTE in path else "local"
        streams.append(f"Stream({place}={string(path)}, proportion={plain(share)})")
    return {
        "streams": sequence(streams, "    "),
        "seed": settings.seed,
        "epoch": f"    epoch_size={rows},\n" if rows else "",
        "batch_size": settings.batch_size,
    }


WRITERS: Mapping[str, Callable[[Blend], Mapping[str, object]]] = {
    "mosaic-streaming": _mosaic,
    "datasets": _interleaved,
    "torchdata": _interleaved,
    "litdata": _litdata,
    "torchtitan": _torchtitan,
}
