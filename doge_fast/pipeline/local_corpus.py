"""Seven domains of real text from the Python environment itself, for users without a corpus.

Nothing is downloaded: an environment that can run the pipeline holds some hundred megabytes
of text. The domains differ enough for their gradients to differ. Three of them are English prose,
so one can be a held-out target: with `reference`, half a megabyte of language reference, the
weights show which of the others help it.

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

import collections
import functools
import inspect
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

from doge_fast.pipeline import cache
from doge_fast.pipeline.failures import FileFailure

_log = logging.getLogger("doge_fast")

# Part of the cache key; to be changed when the same environment gives other text.
_TEXT_FORMAT = 3
_CHARS_PER_DOMAIN = 3_000_000
# Without this a single large package would be most of a domain.
_SHARE_PER_PACKAGE = 0.2
_MIN_CHARS = 400
# Longer files are tables of numbers more often than text.
_MAX_CHARS = 100_000
# A document that shares more than this of its longer lines with earlier ones repeats them.
_MAX_REPEATED = 0.3
_LINE_CHARS = 25
# A domain with less is too small to split and train on.
_MIN_DOCUMENTS = 8
_MIN_DOMAIN_CHARS = 50_000

_TEST_FOLDERS = frozenset({"test", "tests", "testing", "_testing", "idle_test"})
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3"})
_HEADERS = frozenset({".h", ".hpp", ".cuh", ".cu", ".cpp", ".hh"})
_METADATA = re.compile(r"(METADATA|LICEN[CS]E|COPYING|NOTICE|AUTHORS|README|CHANGE)", re.IGNORECASE)
_PROSE = frozenset({"", ".txt", ".md", ".rst", ".mit", ".bsd", ".apache"})


# The package whose share a text counts against, and how to read it.
_Document = tuple[str, Callable[[], str | None]]
# The string that begins a file, or follows the colon of a class or function. An expression
# rather than a parser, which would take ten times as long.
_DOCSTRING = re.compile(
    r"""(?:\A|:[ \t]*\n)(?:[ \t]*(?:\#[^\n]*)?\n)*[ \t]*[rRuU]?(\"{3}|'{3})(.*?)\1""", re.DOTALL
)


def fingerprint() -> str:
    """Digest of Python and the installed packages, which decide the text."""
    installed = sorted(
        {f"{found.metadata['Name']}=={found.version}" for found in metadata.distributions()}
    )
    return cache.digest([_TEXT_FORMAT, sys.version, sysconfig.get_path("stdlib"), installed])


def collect(*, stdlib: Path | None = None, site: Path | None = None) -> dict[str, list[str]]:
    """{domain: its documents}, sorted by name, if this environment has enough text for it.

    Deterministic: the same environment gives the same text in the same order. Takes seconds. No
    document, nor a near copy of it, is there twice; each domain has at most 3 MB, and domains with
    less than 50 kB are left out. `stdlib` and `site` are folders, by default those of this Python.

    Raises:
        FileFailure: fewer than two domains have text, as in an environment without sources.
    """
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    site = site or Path(sysconfig.get_path("purelib"))
    seen: set[int] = set()
    domains = {name: _chosen(documents, seen) for name, documents in _sources(stdlib, site).items()}
    found = {
        name: texts
        for name, texts in sorted(domains.items())
        if len(texts) >= _MIN_DOCUMENTS and sum(map(len, texts)) >= _MIN_DOMAIN_CHARS
    }
    if len(found) < 2:
        raise FileFailure(
            f"A mixture needs two domains; this Python environment has text for {len(found)} "
            f"({', '.join(found)}). Pass a directory of your own as data (--data)."
        )
    return found


def rows() -> Iterator[Mapping[str, str]]:
    """The documents, each with its domain."""
    _log.info("Collecting text of this Python environment.")
    for name, documents in collect().items():
        yield from ({"text": text, "domain": name} for text in documents)


def _chosen(documents: Iterable[_Document], seen: set[int]) -> list[str]:
    """Documents in their order until the domain is full, without those that repeat `seen`."""
    used: collections.Counter[str] = collections.Counter()
    full: set[str] = set()
    chosen: list[str] = []
    for package, read in documents:
        # Tested before reading: most files are of packages that have used up their share.
        if package in full:
            continue
        text = read() or ""
        if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
            continue
        if used.total() + len(text) > _CHARS_PER_DOMAIN:
            break
        if used[package] + len(text) > _SHARE_PER_PACKAGE * _CHARS_PER_DOMAIN:
            full.add(package)
        elif _is_new(text, seen):
            used[package] += len(text)
            chosen.append(text)
    return chosen


def _is_new(text: str, seen: set[int]) -> bool:
    """Whether most longer lines of the text are new; if so, `seen` remembers them."""
    # Without case and white space; short lines occur in unrelated texts.
    letters = ("".join(line.lower().split()) for line in text.splitlines())
    lines = {hash(line) for line in letters if len(line) >= _LINE_CHARS}
    if not lines or len(lines & seen) > _MAX_REPEATED * len(lines):
        return False
    seen |= lines
    return True


def _sources(stdlib: Path, site: Path) -> dict[str, Sequence[_Document]]:
    """{domain: documents to choose from}, in the order in which the domains choose.

    The first domain with a text keeps it, so small domains come before those that fill up anyway.
    """
    ours, theirs = _by_domain(stdlib, is_stdlib=True), _by_domain(site, is_stdlib=False)
    return {
        # A topic of the language reference is its own package, for there is no other.
        "reference": [(topic, functools.partial(topics.get, topic)) for topic in sorted(topics)],
        **{name: theirs[name] for name in ("metadata", "headers", "docstrings")},
        "stdlib": ours["stdlib"],
        "packages": theirs["packages"],
        # Those of the standard library count as a package's; those of the packages follow.
        "tests": ours["tests"] + theirs["tests"],
    }


def _by_domain(folder: Path, *, is_stdlib: bool) -> dict[str | None, list[_Document]]:
    """{domain: files below a folder}, in the order of their paths' hashes; None: of no domain."""
    paths: list[Path] = []
    for inside, folders, names in os.walk(folder):
        # Leaves out environments and caches inside the folder.
        folders[:] = sorted(set(folders) - _LEFT_OUT_FOLDERS)
        paths += (Path(inside, name).relative_to(folder) for name in names)
    found: dict[str | None, list[_Document]] = collections.defaultdict(list)
    for number, path in sorted((cache.text_hash(path.as_posix()), path) for path in paths):
        name = _domain_of(path, is_stdlib, number < 2**63)
        # Headers lie deep in the folders of one package.
        parts = path.parts[:-1][: 4 if name == "headers" else 1]
        read = _docstrings_of if name == "docstrings" else _file_text
        found[name].append(("/".join(parts) or path.stem, functools.partial(read, folder / path)))
    return found


def _domain_of(file: Path, is_stdlib: bool, is_first_half: bool) -> str | None:
    """The domain of a file, by its name and folders; half of the packages' files are docstrings."""
    if file.suffix == ".py":
        *inside, name = file.parts[-4:]
        if not _TEST_FOLDERS.isdisjoint(inside) or name.startswith(("test_", "conftest")):
            return "tests"
        return "stdlib" if is_stdlib else "packages" if is_first_half else "docstrings"
    if file.suffix in _HEADERS:
        return "headers"
    is_metadata = file.suffix.lower() in _PROSE and _METADATA.match(file.name)
    return "metadata" if is_metadata else None


def _file_text(file: Path) -> str | None:
    """The file as text; None where it is not UTF-8 or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\x00" in text else text


def _docstrings_of(file: Path) -> str:
    """The docstrings of a source file, as they are written."""
    found = _DOCSTRING.findall(_file_text(file) or "")
    prose = (inspect.cleandoc(text) for _, text in found if len(text) >= _LINE_CHARS)
    return "\n\n".join(prose)
