"""The demonstration's corpus: real text, the same every time, no text twice."""

import json
import os
import sys
from pathlib import Path

import pytest

from doge_fast.pipeline import local_corpus, tokenizer
from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.domains import load_corpus
from tests.processes import printed_by

ALL = ("docstrings", "headers", "metadata", "packages", "reference", "stdlib", "tests")


@pytest.fixture(scope="session")
def installed() -> dict[str, list[str]]:
    """The domains of the environment that runs this test."""
    return local_corpus.collect()


def test_this_environment_has_domains_to_mix(installed):
    assert set(installed) <= set(ALL)
    # Those whose sources are everywhere that the pipeline's dependencies are installed.
    assert set(installed) >= {"docstrings", "headers", "packages", "reference", "stdlib"}
    for name in ("docstrings", "headers", "packages", "stdlib"):
        assert sum(map(len, installed[name])) > 1_000_000, name


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def lines(name: str, count: int = 300) -> str:
    return "".join(f"this is line {index} of the file called {name}\n" for index in range(count))


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    """An environment of a few packages."""
    stdlib, site = tmp_path / "test", tmp_path / "test" / "site-packages"
    for index in range(12):
        write(stdlib, f"module{index}.py", lines(f"module {index}"))
        write(stdlib, f"test/test_{index}.py", lines(f"stdlib test {index}"))
        write(site, f"package{index}/include/{index}.h", lines(f"header {index}"))
        write(site, f"package{index}/tests/case.py", lines(f"package test {index}"))
        write(site, f"package{index}-1.dist-info/METADATA", lines(f"metadata {index}"))
        write(site, f"package{index}/data.json", lines(f"data {index}"))
        for part in range(3):
            prose = lines(f"prose {index} {part}")
            code = lines(f"code {index} {part}").replace("\n", " = 1\n")
            write(site, f"package{index}/{part}.py", f'"""{prose}"""\n{code}')
    return {"stdlib": stdlib, "site": site}


def test_every_file_goes_where_it_belongs(roots):
    found = local_corpus.collect(**roots)
    assert tuple(found) == ALL
    texts = {name: "\n".join(documents) for name, documents in found.items()}
    for index in range(12):
        assert f"called module {index}\n" in texts["stdlib"]
        assert f"called stdlib test {index}\n" in texts["tests"]
        assert f"called package test {index}\n" in texts["tests"]
        assert f"called header {index}\n" in texts["headers"]
        assert f"called metadata {index}\n" in texts["metadata"]
        assert all(f"called data {index}\n" not in text for text in texts.values())
        for part in range(3):
            # Of a source file its code or its prose.
            mark = f"called prose {index} {part}\n"
            assert (mark in texts["docstrings"]) != (mark in texts["packages"])
    assert "code" not in texts["docstrings"]


def test_the_same_environment_gives_the_same_text(roots):
    """In another process too, where strings hash to something else."""
    program = (
        "import sys, json, pathlib\n"
        "from doge_fast.pipeline import local_corpus\n"
        "stdlib, site = map(pathlib.Path, sys.argv[1:])\n"
        "print(json.dumps(local_corpus.collect(stdlib=stdlib, site=site)))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    words = (program, roots["stdlib"], roots["site"])
    output = printed_by(sys.executable, "-c", *words, env=environment)
    assert json.loads(output) == local_corpus.collect(**roots)


def test_near_copies_are_left_out(roots):
    licence = lines("the licence")
    for index in range(12):
        write(
            roots["site"],
            f"package{index}-1.dist-info/LICENSE",
            f"Copyright (c) by somebody whose name is number {index}\n{licence}",
        )
    text = "\n".join(local_corpus.collect(**roots)["metadata"])
    assert text.count("this is line 7 of the file called the licence") == 1


def test_no_package_is_all_of_a_domain(roots):
    for index in range(60):
        write(roots["site"], f"package0/include/more{index}.h", lines(f"more {index}", 500))
    text = "\n".join(local_corpus.collect(**roots)["headers"])
    share = sum(len(line) + 1 for line in text.splitlines() if "more" in line)
    assert 500_000 < share <= 600_000
    assert "called header 11\n" in text


def test_what_cannot_be_read_is_left_out(roots):
    for index in range(12):
        path = roots["stdlib"] / f"module{index}.py"
        path.write_bytes(b"\xff\xfe" + path.read_bytes() if index % 2 else b"short")
    write(roots["site"], "package0/include/0.h", "\x00" + lines("binary"))
    write(roots["site"], "package1/include/1.h", lines("too long", 5000))
    found = local_corpus.collect(**roots)
    assert "stdlib" not in found
    assert "binary" not in "\n".join(found["headers"])
    assert "too long" not in "\n".join(found["headers"])


def test_an_environment_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local_corpus, "topics", {})
    with pytest.raises(ValueError, match="two domains"):
        local_corpus.collect(stdlib=tmp_path, site=tmp_path)


def test_the_fingerprint_follows_the_installed_packages(monkeypatch):
    before = local_corpus.fingerprint()
    assert local_corpus.fingerprint() == before
    fewer = [d for d in local_corpus.metadata.distributions() if d.name != "numpy"]
    monkeypatch.setattr(local_corpus.metadata, "distributions", lambda: fewer)
    assert local_corpus.fingerprint() != before


def test_installed_is_a_corpus_like_any_other(tmp_path, monkeypatch, installed):
    calls = []

    def load() -> dict[str, list[str]]:
        calls.append(1)
        return installed

    monkeypatch.setattr(local_corpus, "collect", load)
    monkeypatch.setattr(tokenizer, "_TOKENIZER_CHARS_PER_DOMAIN", 20_000)
    config = CorpusConfig(cache_dir=tmp_path, vocab_size=400, max_tokens_per_domain=2560)
    corpus = load_corpus(config, targets=["reference"])
    assert set(corpus.names) == set(installed) - {"reference"}
    assert corpus.targets == ("reference",)
    assert all(len(blocks) == 20 for blocks in corpus.train.values())
    load_corpus(config)
    assert len(calls) == 1
