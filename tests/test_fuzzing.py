"""The inputs of tests/corpus/, as they are and changed: each parser gives a value or a sentence."""

from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing import CORPUS, PARSERS, run_one

INPUTS = sorted(file for file in CORPUS.rglob("*") if file.is_file())
# What has ended other programs, put anywhere.
PIECES = [b"", b"\x00", b"\xff", b"1e999", b"NaN", b'{"a":', b"\n\n", b"-1"]
PIECES += [b"[" * 3000, b"9" * 5000]


def test_every_parser_has_inputs() -> None:
    assert {file.parent.name for file in INPUTS} == set(PARSERS)


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_known_inputs_end_in_a_value_or_a_sentence(file: Path) -> None:
    run_one(file.parent.name, file.read_bytes())


@pytest.mark.parametrize("name", PARSERS)
# What is found is short enough as it is.
@settings(phases=[Phase.generate])
@given(st.data())
def test_changed_inputs_do_so_too(name: str, data: st.DataObject) -> None:
    known = [file.read_bytes() for file in INPUTS if file.parent.name == name]
    whole = data.draw(st.sampled_from(known))
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=12) | st.just(whole))
    run_one(name, whole[:first] + piece + whole[last:])
