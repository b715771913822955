"""Everything that parses, handed bytes: what comes of them is a value or one sentence.

The inputs of tests/corpus/, one of each kind that was worth it, as they are and changed.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.records import runs
from doge_fast.pipeline.records.schema import EvaluationRecord, ExperimentRecord

CORPUS = Path(__file__).with_name("corpus")
# Where an input becomes a file; it goes with the process.
HELD = tempfile.TemporaryDirectory(prefix="doge-fast-fuzz-")
FOLDER = Path(HELD.name)


def _file(name: str, data: bytes) -> Path:
    (FOLDER / name).write_bytes(data)
    return FOLDER / name


def _weights(data: bytes) -> object:
    record = records.read_weights(_file("weights.json", data))
    # What is read can be written, and is what it was.
    copy = FOLDER / "copy.json"
    records.write_weights(copy, record)
    assert records.weights_by_name(records.read_weights(copy)) == records.weights_by_name(record)
    return record


def _metrics(data: bytes) -> object:
    _file(runs.METRICS, data)
    lines = runs.read_metrics(FOLDER)
    # What a checkpoint has noted of the file is what it goes on with.
    written = runs.keep_metrics(FOLDER)
    runs.append_metrics(FOLDER, {"step": 9, "kind": "train"})
    runs.resume_metrics(FOLDER, written)
    assert (FOLDER / runs.METRICS).read_bytes() == data
    return lines


def _fields(data: bytes) -> object:
    return _parsed(["proxy", "--out=run", f"--config={_file('fields.yaml', data)}"])


def _command(data: bytes) -> object:
    words = [word for word in data.decode("utf-8", "surrogateescape").split("\n") if word]
    return _parsed(words) if words else None


def _parsed(words: list[str]) -> object:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return cli.parse(words)
        except SystemExit as end:
            code = end.code
    assert code in (0, 2)
    return None


def _run(data: bytes) -> object:
    _file(records.CONFIG, data)
    return records.load_config(FOLDER)


def _measures(data: bytes) -> object:
    for name in ("evaluation.json", "experiment.json"):
        _file(name, data)
    for kind in (EvaluationRecord, ExperimentRecord):
        with contextlib.suppress(ValueError):
            records.load(FOLDER, kind)
    return None


_ALL = (_weights, _metrics, _fields, _command, _run, _measures)
PARSERS: dict[str, Callable[[bytes], object]] = {each.__name__[1:]: each for each in _ALL}


def run_one(name: str, data: bytes) -> None:
    """Parse; a ValueError is a refusal, and its text is one that can be shown."""
    refusal = "none"
    try:
        PARSERS[name](data)
    except ValueError as error:
        refusal = str(error)
    assert refusal.strip(), "a refusal says something"


INPUTS = sorted(file for file in CORPUS.rglob("*") if file.is_file())
# What has ended other programs, put anywhere.
PIECES = [b"", b"\x00", b"\xff", b"1e999", b"NaN", b'{"a":', b"\n\n", b"-1"]
PIECES += [b"[" * 3000, b"9" * 5000]


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_known_inputs_end_in_a_value_or_a_sentence(file):
    run_one(file.parent.name, file.read_bytes())


@pytest.mark.parametrize("name", PARSERS)
# What is found is short enough as it is.
@settings(phases=[Phase.generate])
@given(st.data())
@pytest.mark.exhaustive
def test_changed_inputs_do_so_too(name, data):
    known = [file.read_bytes() for file in INPUTS if file.parent.name == name]
    whole = data.draw(st.sampled_from(known))
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=12) | st.just(whole))
    run_one(name, whole[:first] + piece + whole[last:])
