"""Everything that parses, handed bytes: what comes of them is a value or one sentence.

The inputs of tests/corpus/, one of each kind that was worth it, as they are and changed.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from doge_fast import cancellation, cli
from doge_fast.kernels.build import needed_architectures
from doge_fast.mixture import DomainMixture
from doge_fast.pipeline import named, proxy, records
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.config.fields import filled, read_file
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.records import metrics, runs
from doge_fast.pipeline.records.shapes import EvaluationRecord, ExperimentRecord, FewShotRecord
from doge_fast.weights import checkpoint
from doge_fast.weights.objective import Objective

CORPUS = Path(__file__).with_name("corpus")
Parser = Callable[[bytes], object]


@cache
def _folder() -> Path:
    """Where an input becomes a file."""
    return Path(tempfile.mkdtemp(prefix="doge-fast-fuzz-"))


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _words(data: bytes) -> list[str]:
    return _text(data).split("\n")


def _json(data: bytes) -> Any:
    """What a program read before it asked us; None where it could not."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _weights(data: bytes) -> object:
    record = records.read_weights(_file("weights.json", data))
    # What is read can be written, and is what it was.
    copy = _folder() / "copy.json"
    records.write_weights(copy, record)
    assert records.weights_by_name(records.read_weights(copy)) == records.weights_by_name(record)
    return record


def _metrics(data: bytes) -> object:
    _file(runs.METRICS, data)
    lines = metrics.read_metrics(_folder())
    # What a checkpoint has noted of the file is what it goes on with.
    written = metrics.keep_metrics(_folder())
    metrics.append_metrics(_folder(), {"step": 9, "kind": "train"})
    metrics.resume_metrics(_folder(), written)
    assert (_folder() / runs.METRICS).read_bytes() == data
    return lines


def _fields(data: bytes) -> object:
    given = read_file(_file("fields.yaml", data), "proxy")
    config = filled(ProxyConfig(out=Path("run")), given)
    check_ranges(config)
    return config


def _command(data: bytes) -> object:
    words = [word for word in _words(data) if word]
    if not words:
        return None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = 0
        try:
            return cli.parse(words)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
    assert code in (0, 2)
    return None


def _run(data: bytes) -> object:
    _file(records.CONFIG, data)
    return records.read_config(_folder())


def _measures(data: bytes) -> object:
    for name in ("evaluation.json", "fewshot.json", "experiment.json"):
        _file(name, data)
    for kind in (EvaluationRecord, FewShotRecord, ExperimentRecord):
        with contextlib.suppress(ValueError):
            records.load(_folder(), kind)
    return None


def _small_words(data: bytes) -> object:
    """Flags whose words we take apart ourselves."""
    words = _words(data)
    for parse in (
        lambda: proxy.parse_target(words),
        lambda: named.numbers(words, "floor"),
        lambda: cancellation.parse_strategy(_text(data)),
        lambda: Objective.of(words),
        lambda: needed_architectures(";".join(words), [(8, 0), (9, 0)]),
    ):
        with contextlib.suppress(ValueError):
            parse()
    return None


@cache
def _mixture() -> DomainMixture:
    return DomainMixture({"a": range(5), "b": range(3)}, batch_size=4)


def _mixture_state(data: bytes) -> object:
    state = _json(data)
    if isinstance(state, dict):
        mixture = _mixture()
        before = mixture.draws(3)
        try:
            mixture.load_state_dict(state)
        except ValueError:
            assert mixture.draws(3) == before
        else:
            mixture.draws(mixture.step)
    return state


def _optimizer_state(data: bytes) -> object:
    """The numbers that parameter groups carry, and the entry by name, without tensors."""
    state = _json(data)
    objective = Objective.of(["a", "b"])
    if isinstance(state, dict):
        with contextlib.suppress(ValueError):
            checkpoint.check(state, objective)
    if isinstance(state, list) and state and all(type(each) in (int, float) for each in state):
        with contextlib.suppress(ValueError):
            checkpoint.unpacked(tuple(map(float, state)), objective)
    return state


PARSERS: dict[str, Parser] = {
    "weights": _weights,
    "metrics": _metrics,
    "fields": _fields,
    "command": _command,
    "run": _run,
    "measures": _measures,
    "words": _small_words,
    "mixture_state": _mixture_state,
    "optimizer_state": _optimizer_state,
}


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
