"""Which files are a corpus: one function says of each its domain, its split and its kind.

Nothing in a folder steers what is read but the names of files and folders, and a path is never a
pattern.
"""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline import cache
from doge_fast.pipeline.wording import first_few

_log = logging.getLogger("doge_fast")

Kind = Literal["parquet", "arrow", "json", "text"]
Split = Literal["train", "validation", "test"]

KINDS: Mapping[str, Kind] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
    # What `save_to_disk` of datasets leaves.
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSED = ("json", "text")
KINDS_TOLD = f"{', '.join(KINDS)} ({', '.join(COMPRESSIONS)} of json and text)"

# Files about a data set, which are none of its rows.
_ABOUT = re.compile(
    r"(readme|licen[cs]e)(\..*)?|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|cache-[0-9a-f]+\.arrow",
    re.IGNORECASE,
)
# What is likely text that was meant to be read.
_DATA = re.compile(r".*\.(csv|tsv|bz2|xz|zip|tar|tgz)", re.IGNORECASE)
_WORDS: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "heldout", "holdout"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@dataclass(frozen=True)
class CorpusFile:
    """A file that is read."""

    path: Path
    domain: str
    """By its name or folder; empty where a column says it."""
    split: Split
    kind: Kind


@functools.cache
def tell_once(line: str, level: int = logging.INFO) -> None:
    """Log a line the first time only, since all runs of a search read the same corpus."""
    _log.log(level, "%s", line)


def list_files(data: Path, chosen: Collection[str] | None) -> dict[str, list[CorpusFile]]:
    """{domain: its files that are read, in the order of their paths}; logs what is, and is not.

    Below the folder is a file or a folder of them for each domain.

    `chosen` are the domains that are asked for, so that other entries may be anything; empty: all;
    None: a column says the domain, so all files are of one kind of row.

    Raises:
        ValueError: something in the folder is neither text of one domain nor plainly something
            else.
    """
    # {why: paths below the folder}.
    left_out: dict[str, list[str]] = {}
    # Paths that have the word of a held-out split, not at the end, and are trained on.
    doubtful: list[str] = []
    found: list[CorpusFile] = []
    for path in _walk(data):
        inside = path.relative_to(data)
        if why := _reason_to_leave(path, has_column=chosen is None):
            left_out.setdefault(why, []).append(str(inside))
            continue
        first, *others = inside.parts
        name = first if others else stem_of(first)
        domain, told = ("", inside.parts) if chosen is None else (name, others)
        # The first folder or file name that states a split decides.
        split: Split = next(filter(None, map(split_of, told)), "train")
        found.append(CorpusFile(path, domain, split, kind_of(path)))
        if split == "train" and any(map(_mentions_held_out, told)):
            doubtful.append(str(inside))
    _check_twice(file for file in found if not chosen or file.domain in chosen)
    files: dict[str, list[CorpusFile]] = {}
    for file in found:
        files.setdefault(file.domain, []).append(file)
    if chosen is not None:
        _check_domains(data, files, chosen)
    for name, own in files.items():
        splits = {file.split for file in own}
        if "validation" in splits and "test" in splits:
            tests = [str(f.path.relative_to(data)) for f in own if f.split == "test"]
            left_out.setdefault("a validation split is held out already", []).extend(tests)
            files[name] = [file for file in own if file.split != "test"]
    _tell(data, files, left_out)
    if doubtful:
        _log.warning(
            "%s: %s: the name has the word of a held-out split, and the text is trained on. "
            "Have it end with that word, as c4-validation, to hold it out.",
            *(data, first_few(doubtful)),
        )
    return files


def _tell(
    data: Path, files: Mapping[str, Sequence[CorpusFile]], left_out: Mapping[str, Sequence[str]]
) -> None:
    """Log what is read, and what is not."""
    read = []
    for domain, own in files.items():
        told = first_few([str(file.path.relative_to(data)) for file in own])
        read.append(f"{domain} of {told}" if domain else told)
    tell_once(f"{data}: read are {'; '.join(read)}.")
    for why, names in left_out.items():
        is_data = any(map(_DATA.fullmatch, names))
        level = logging.WARNING if is_data else logging.INFO
        tell_once(f"{data}: not read are {first_few(names)}: {why}.", level)


def kind_of(path: Path) -> Kind:
    """How a file is read; ValueError where its name ends in nothing that is."""
    kind = _kind(path.name)
    if kind is None:
        raise ValueError(f"A file of documents ends in {KINDS_TOLD}; this is {path}.")
    return kind


def stem_of(name: str) -> str:
    """The name without the ending that says how the file is read."""
    return _without(_without(name, COMPRESSIONS), KINDS)


def split_of(name: str) -> Split | None:
    """The split that the name of a file or folder states; None where it states none.

    It does with its last word, numbers aside: "validation", "c4-train.00000-of-00001.jsonl",
    "wiki.valid.txt" do; "dev-blog.jsonl" and "test_bench.jsonl" do not, for they begin so only.
    """
    words = _words(name)
    return _WORDS.get(words[-1]) if words else None


def stamp_of(files: Iterable[CorpusFile]) -> str:
    """Changes when a file does: path, split, size, times of modification and of change.

    The last one is the system's own, so a text written over with its size and time kept is seen.
    """
    stats = [(file, file.path.stat()) for file in files]
    return cache.digest(
        [
            (str(file.path.resolve()), file.split, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            for file, stat in stats
        ]
    )


def _walk(folder: Path, around: Sequence[Path] = ()) -> Iterator[Path]:
    """All files below a folder, in the order of their paths; links are followed."""
    here = folder.resolve()
    if any(outer.is_relative_to(here) for outer in around):
        raise ValueError(f"{folder} is a link to a folder around it. Remove it.")
    for path in sorted(folder.iterdir()):
        # What is hidden is told of, whatever it is.
        if path.name.startswith(".") or path.is_file():
            yield path
        elif not path.is_dir():
            raise ValueError(f"{path} is a link to nothing, or no file. Mend it, or remove it.")
        elif _kind(path.name) is not None:
            raise ValueError(f"{path} has the name of a file and is a folder. Rename it.")
        else:
            yield from _walk(path, (*around, here))


def _reason_to_leave(path: Path, *, has_column: bool) -> str | None:
    if path.name.startswith("."):
        return "they are hidden"
    if _ABOUT.fullmatch(path.name):
        return "they are about a data set, by their names"
    kind = _kind(path.name)
    if kind is None:
        return f"they do not end in {KINDS_TOLD}"
    if kind == "text" and has_column:
        return "text has no column that says the domain"
    return None


def _kind(name: str) -> Kind | None:
    plain = _without(name, COMPRESSIONS)
    kind = next((kind for suffix, kind in KINDS.items() if plain.lower().endswith(suffix)), None)
    return None if plain != name and kind not in _COMPRESSED else kind


def _without(name: str, suffixes: Iterable[str]) -> str:
    found = next((suffix for suffix in suffixes if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(found)]


def _words(name: str) -> list[str]:
    """In small letters, without numbers, the "of" between them and the hash of the Hub after it."""
    plain = re.sub(r"\d+[-_ ]of[-_ ]\d+(-[0-9a-f]{8,})?", " ", stem_of(name).lower())
    plain = re.sub("(held|hold)[-_. ]out", r"\1out", plain)
    return [word for word in re.split(r"[-._ \d]+", plain) if word]


def _mentions_held_out(name: str) -> bool:
    words = (word.removesuffix("set") for word in _words(name))
    return any(_WORDS.get(word) in ("validation", "test") for word in words)


def _check_twice(files: Iterable[CorpusFile]) -> None:
    """A text that is there in two forms, or under two names, would count twice."""
    seen: dict[Any, Path] = {}
    for file in files:
        path, stat = file.path, file.path.stat()
        for key in (path.with_name(stem_of(path.name)), (stat.st_dev, stat.st_ino)):
            if (other := seen.setdefault(key, path)) != path:
                told = "are one file" if other.samefile(path) else "differ in their endings alone"
                raise ValueError(
                    f"A text counts once; {other} and {path} {told}. Remove one, or rename it."
                )


def _check_domains(
    data: Path, files: Mapping[str, Sequence[CorpusFile]], chosen: Collection[str]
) -> None:
    """Every entry of the folder is a domain of its own, with text to train on."""
    shown = [entry for entry in sorted(data.iterdir()) if not entry.name.startswith(".")]
    if not files:
        raise ValueError(
            f"{data} must hold a folder or file per domain, of {KINDS_TOLD}; it holds "
            f"{', '.join(entry.name for entry in shown) or 'nothing'}."
        )
    if any(entry.name == "dataset_info.json" for entry in shown):
        raise ValueError(
            f"{data} is one data set as save_to_disk leaves it: name the column that holds a row's "
            "domain with domain_column (--domain-column), or give every domain a folder."
        )
    if not chosen:
        for entry in shown:
            if entry.is_dir() and entry.name not in files:
                raise ValueError(
                    f"{entry} holds no file of {KINDS_TOLD}. Remove it, or name the domains to "
                    "train on with domains (--domains)."
                )
    for name, own in files.items():
        if chosen and name not in chosen:
            continue
        entries = {file.path.relative_to(data).parts[0] for file in own}
        if len(entries) > 1:
            raise ValueError(
                f"A domain is one folder or one file; {data} holds several named {name}: "
                f"{', '.join(sorted(entries))}."
            )
        is_split = split_of(name) if (data / min(entries)).is_file() else name.lower() in _WORDS
        if is_split:
            raise ValueError(
                f"{data / min(entries)} names a split where a domain is expected: name the column "
                "that holds a row's domain with domain_column (--domain-column), or give every "
                "domain a folder."
            )
        if all(file.split != "train" for file in own):
            raise ValueError(
                f"The domain {name} needs training files; {data / name} holds only "
                f"{', '.join(file.path.name for file in own)}."
            )
