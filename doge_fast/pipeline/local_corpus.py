"""Seven domains of real text found in the Python environment itself, for those without a corpus.

Nothing is downloaded: an environment that can run the pipeline holds some hundred megabytes
of text. The domains differ enough to be told apart by their gradients, and three of them are
English prose, so there is an out-of-domain story too: take `reference`, half a megabyte of
language reference, as the target, and learn which of the others it is best learned from.

    stdlib      the standard library's source
    packages    source of installed packages, half of their files
    docstrings  prose of the docstrings in the other half
    tests       test code of the standard library and of packages that ship theirs
    headers     C and C++ headers that ship with torch and others
    metadata    package descriptions, licences, changelogs, readmes
    reference   the language reference as `help()` shows it

Which files are taken follows from their paths and texts alone: sorted by a hash, spread over
the packages, without repeats. A source that a machine lacks makes its domain smaller or absent.
"""

import functools
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

# Part of the cache's key: changes when the same environment would give other text.
_FORMAT = 1
_CHARS_PER_DOMAIN = 3_000_000
# Without this a single large package would be most of a domain.
_SHARE_PER_PACKAGE = 0.2
_VALIDATION_FRACTION = 0.05
_MIN_CHARS = 400
# Longer files are tables of numbers more often than text.
_MAX_CHARS = 100_000
# A document that shares more than this of its longer lines with earlier ones repeats them.
_MAX_REPEATED = 0.3
_LINE_CHARS = 25
# A domain with less cannot be split and learned from.
_MIN_DOCUMENTS = 8
_MIN_DOMAIN_CHARS = 50_000

_TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "idle_test"})
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3"})
_HEADERS = frozenset({".h", ".hpp", ".cuh", ".cu", ".cpp", ".hh"})
_METADATA = re.compile(r"(METADATA|LICEN[CS]E|COPYING|NOTICE|AUTHORS|README|CHANGE)", re.IGNORECASE)
_PROSE = frozenset({"", ".txt", ".md", ".rst", ".mit", ".bsd", ".apache"})


@dataclass(frozen=True)
class LocalDomain:
    """Documents of one domain; no document, nor a near copy of it, is in both splits."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def fingerprint() -> str:
    """Changes when the environment would give other text: Python or an installed package."""
    installed = sorted(
        {f"{found.metadata['Name']}=={found.version}" for found in metadata.distributions()}
    )
    facts = [_FORMAT, sys.version, sysconfig.get_path("stdlib"), installed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def load(*, stdlib: Path | None = None, site: Path | None = None) -> dict[str, LocalDomain]:
    """The domains that this environment has text for, in the order of their names.

    Deterministic: the same environment gives the same text in the same order. Takes seconds.

    Args:
        stdlib: the standard library's folder; None: that of this Python.
        site: the folder of installed packages; None: that of this Python.

    Returns:
        {domain: its documents}. No text is in two domains; each has at most 3 MB, and domains
        with less than 50 kB are left out.

    Raises:
        RuntimeError: fewer than two domains are found, as in an environment without sources.
    """
    seen: set[int] = set()
    environment = _environment(stdlib, site)
    domains = {name: _select(read(environment), seen) for name, read in _SOURCES.items()}
    found = {name: _split(domains[name]) for name in sorted(domains) if _is_enough(domains[name])}
    if len(found) < 2:
        raise RuntimeError(
            f"A mixture needs two domains; this Python environment has text for {len(found)} "
            f"({', '.join(found)}). Point the corpus's data at a directory of your own."
        )
    return found


def save(directory: Path) -> None:
    """Write the domains as `directory`/<domain>/{train,validation}.jsonl, column "text".

    Raises:
        RuntimeError: as `load`; nothing is written.
    """
    for name, domain in load().items():
        (directory / name).mkdir(parents=True)
        for split in ("train", "validation"):
            documents: tuple[str, ...] = getattr(domain, split)
            lines = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
            text = "".join(f"{line}\n" for line in lines)
            (directory / name / f"{split}.jsonl").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class _Environment:
    """Files below the standard library and below the folder of installed packages."""

    stdlib: Path
    stdlib_files: tuple[Path, ...]
    site: Path
    site_files: tuple[Path, ...]


def _environment(stdlib: Path | None, site: Path | None) -> _Environment:
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    site = site or Path(sysconfig.get_path("purelib"))
    return _Environment(stdlib, tuple(_walk(stdlib)), site, tuple(_walk(site)))


@dataclass(frozen=True)
class _Document:
    """How to read a text, and the package whose share it counts against."""

    package: str
    read: Callable[[], str | None]


def _select(documents: Iterable[_Document], seen: set[int]) -> list[str]:
    """Documents in their order until the domain is full, none repeating what was `seen`."""
    used: Counter[str] = Counter()
    full: set[str] = set()
    chosen: list[str] = []
    for document in documents:
        # Before it is read: most files are of packages that have had their share.
        if document.package in full:
            continue
        text = document.read() or ""
        if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
            continue
        if used.total() + len(text) > _CHARS_PER_DOMAIN:
            break
        if used[document.package] + len(text) > _SHARE_PER_PACKAGE * _CHARS_PER_DOMAIN:
            full.add(document.package)
        elif _is_new(text, seen):
            used[document.package] += len(text)
            chosen.append(text)
    return chosen


def _is_new(text: str, seen: set[int]) -> bool:
    """Whether most longer lines of the text are new; if so, `seen` remembers them."""
    lines = {hash_ for hash_ in map(_line_hash, text.splitlines()) if hash_ is not None}
    if not lines or len(lines & seen) > _MAX_REPEATED * len(lines):
        return False
    seen |= lines
    return True


def _line_hash(line: str) -> int | None:
    """Of the line without its case and white space; None where too short to tell anything."""
    letters = "".join(line.lower().split())
    return hash(letters) if len(letters) >= _LINE_CHARS else None


def _is_enough(documents: Sequence[str]) -> bool:
    return len(documents) >= _MIN_DOCUMENTS and sum(map(len, documents)) >= _MIN_DOMAIN_CHARS


def _split(documents: Sequence[str]) -> LocalDomain:
    """Whole documents, in the order of their hashes, are held out until they are the share."""
    goal = _VALIDATION_FRACTION * sum(map(len, documents))
    held_out: set[str] = set()
    held_chars = 0
    for text in sorted(documents, key=_text_hash):
        if held_chars >= goal:
            break
        held_out.add(text)
        held_chars += len(text)
    return LocalDomain(
        train=tuple(text for text in documents if text not in held_out),
        validation=tuple(text for text in documents if text in held_out),
    )


def _text_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _reference(_: _Environment) -> Iterator[_Document]:
    """Topics of the language reference; each its own package, for there is no other."""
    for topic in sorted(topics):
        yield _Document(topic, functools.partial(topics.get, topic))


def _stdlib(found: _Environment) -> Iterator[_Document]:
    files = [file for file in found.stdlib_files if _is_source(file) and not _is_test(file)]
    yield from _read(files, root=found.stdlib, depth=1)


def _tests(found: _Environment) -> Iterator[_Document]:
    """Those of the standard library, which fill one package's share, then the packages'."""
    for root, files in ((found.stdlib, found.stdlib_files), (found.site, found.site_files)):
        tests = [file for file in files if _is_source(file) and _is_test(file)]
        yield from _read(tests, root=root, depth=1)


def _headers(found: _Environment) -> Iterator[_Document]:
    files = [file for file in found.site_files if file.suffix in _HEADERS]
    yield from _read(files, root=found.site, depth=4)


def _metadata(found: _Environment) -> Iterator[_Document]:
    files = [
        file
        for file in found.site_files
        if file.suffix.lower() in _PROSE and _METADATA.match(file.name)
    ]
    yield from _read(files, root=found.site, depth=1)


def _packages(found: _Environment) -> Iterator[_Document]:
    yield from _read(_half(found, is_first=True), root=found.site, depth=1)


def _docstrings(found: _Environment) -> Iterator[_Document]:
    files = _half(found, is_first=False)
    yield from _read(files, root=found.site, depth=1, read=_docstrings_of)


def _half(found: _Environment, *, is_first: bool) -> list[Path]:
    """Half of the packages' source files, by a hash of the path."""
    return [
        file
        for file in found.site_files
        if _is_source(file)
        and not _is_test(file)
        and (_path_hash(file, found.site)[0] < 128) == is_first
    ]


def _read(
    files: Iterable[Path],
    *,
    root: Path,
    depth: int,
    read: Callable[[Path], str | None] | None = None,
) -> Iterator[_Document]:
    """The files' texts in the order of their paths' hashes.

    The first `depth` folders below `root` name the package whose share a file counts against.
    """
    for file in sorted(files, key=lambda file: _path_hash(file, root)):
        parts = file.relative_to(root).parts
        package = "/".join(parts[: min(depth, len(parts) - 1)]) or file.stem
        yield _Document(package, functools.partial(read or _text_of, file))


def _text_of(file: Path) -> str | None:
    """The file as text; None where it is not UTF-8 or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\x00" in text else text


def _docstrings_of(file: Path) -> str:
    """The docstrings of a source file, as they are written."""
    found = _DOCSTRING.findall(_text_of(file) or "")
    prose = (inspect.cleandoc(text) for _, text in found if len(text) >= _LINE_CHARS)
    return "\n\n".join(prose)


def _path_hash(file: Path, root: Path) -> bytes:
    relative = file.relative_to(root).as_posix()
    return hashlib.blake2b(relative.encode(), digest_size=8).digest()


def _is_test(file: Path) -> bool:
    """Test code, by the names of its file and the folders it is in."""
    parts = file.parts[-4:]
    return not _TEST_FOLDERS.isdisjoint(parts[:-1]) or parts[-1].startswith(("test_", "conftest"))


def _is_source(file: Path) -> bool:
    return file.suffix == ".py"


def _walk(root: Path) -> Iterator[Path]:
    """Files below a folder; environments and caches inside it are left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT_FOLDERS)
        yield from (Path(folder, name) for name in files)


# The string that begins a file, or follows the colon of a class or function. An expression
# rather than a parser, which would take ten times as long.
_DOCSTRING = re.compile(
    r"""(?:\A|:[ \t]*\n)(?:[ \t]*(?:\#[^\n]*)?\n)*[ \t]*[rRuU]?(\"{3}|'{3})(.*?)\1""", re.DOTALL
)

# The first that finds a text keeps it: small sources before those that would fill up anyway.
_SOURCES: dict[str, Callable[[_Environment], Iterator[_Document]]] = {
    "reference": _reference,
    "metadata": _metadata,
    "headers": _headers,
    "docstrings": _docstrings,
    "stdlib": _stdlib,
    "packages": _packages,
    "tests": _tests,
}
