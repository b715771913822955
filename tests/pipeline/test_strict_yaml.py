"""What people write is read as they meant it, or refused."""

from pathlib import Path

import pytest

from doge_fast.pipeline.config.fields import read_file
from doge_fast.pipeline.exports.command import _paths


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("steps: 3\nsteps: 4\n", "'steps' is there twice"),
        ('{"model": {"seed": 1, "seed": 1}}', "'seed' is there twice"),
        ("seed: 010\n", "010 is octal to some"),
        ("targets: &a [*a]\n", "Circular"),
    ],
)
def test_what_a_reader_would_pass_over_is_refused(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "fields.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=word):
        read_file(file, "proxy")


def test_what_is_plain_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fields.yaml"
    file.write_text("seed: 0\nsteps: 10\nrate: 0.5\nbase: &b {a: 1}\nmore: {<<: *b, c: -7}\n")
    expected = {"seed": 0, "steps": 10, "rate": 0.5, "base": {"a": 1}, "more": {"a": 1, "c": -7}}
    assert read_file(file, "proxy") == expected


def test_a_domain_with_an_equals_sign_has_paths() -> None:
    words = ["e=f=/data/ef", "e=/data/e", "g=/data/a=b"]
    paths = {"e=f": ["/data/ef"], "e": ["/data/e"], "g": ["/data/a=b"]}
    assert _paths(words, "paths", ["e", "e=f", "g"]) == paths
