"""What the tests of every stage do with a run: compare it, kill it on the way, type it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doge_fast.pipeline import records
from doge_fast.pipeline.trainer import RecordedTrainer

# The domains of `small_corpus`.
NAMES = ["code", "prose", "table", "verse"]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The records without what a clock says."""
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in records.read_metrics(run)
    ]


def assert_same_run(run: Path, other: Path) -> None:
    """The same records, and bit for bit the same results."""
    assert lines_of(run) == lines_of(other)
    found, expected = results_of(run), results_of(other)
    assert found.keys() == expected.keys()
    for file, content in found.items():
        assert content == expected[file], file


def results_of(run: Path) -> dict[str, bytes]:
    """All files but what says where the run lies, how long it took and where it stood."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in run.rglob("*")
        if file.is_file()
        and file.name not in (records.CONFIG, records.METRICS)
        and run / records.CHECKPOINTS not in file.parents
    }


def write_weights(path: Path, weights: Mapping[str, float]) -> Path:
    """A weights.json of somebody's own."""
    entries = [{"name": name, "weight": weight} for name, weight in weights.items()]
    records.write_weights(path, {"domains": entries})
    return path


def words_of(config: Any) -> list[str]:
    """The words after a verb that make this dataclass, from a file beside its run."""
    file = config.out.with_suffix(".json")
    records.write_json(file, config)
    return ["--config", str(file)]


class Killed(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


@contextmanager
def interrupted_at(
    monkeypatch: pytest.MonkeyPatch, method: str, count: int, action: Callable[[], object]
) -> Iterator[None]:
    """The given call of a trainer's method, counted from 1, comes after an action."""
    original, calls = getattr(RecordedTrainer, method), itertools.count(1)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            action()
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RecordedTrainer, method, interrupted)
        yield
    assert next(calls) > count


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, method: str, count: int) -> Iterator[None]:
    """The given call of a trainer's method never returns."""

    def die() -> None:
        raise Killed

    with interrupted_at(monkeypatch, method, count, die), pytest.raises(Killed):
        yield
