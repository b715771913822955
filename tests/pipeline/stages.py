"""What the tests of every stage do with a run: compare it, kill it on the way, type it."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from doge_fast.pipeline import records
from doge_fast.pipeline.config import flags
from doge_fast.pipeline.config.fields import required

# The domains of `small_corpus`.
NAMES = ["code", "prose", "table", "verse"]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The records without what a clock says."""
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in records.read_metrics(run)
    ]


def assert_same_run(
    run: Path, other: Path, files: Sequence[str] = ("weights.json", "model/model.safetensors")
) -> None:
    """The same records, and bit for bit the same files."""
    assert lines_of(run) == lines_of(other)
    for file in files:
        assert (run / file).read_bytes() == (other / file).read_bytes(), file


def write_weights(path: Path, weights: Mapping[str, float]) -> Path:
    """A weights.json of somebody's own."""
    entries = [{"name": name, "weight": weight} for name, weight in weights.items()]
    records.write_weights(path, {"domains": entries})
    return path


def words_of(config: Any) -> list[str]:
    """The words after a verb that make this dataclass: of each field that is not its default."""
    kind = type(config)
    unsaid = kind(**dict.fromkeys(required(kind), flags._UNSAID))
    words: list[str] = []
    for option in flags.options_of(unsaid, False):
        value = flags._value(config, option.path)
        if value == option.default:
            continue
        if isinstance(value, bool):
            words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            several = value if option.is_several else (value,)
            words += [option.flag, *map(str, several)]
    return words


class Killed(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, trainer: type, method: str, count: int
) -> Iterator[None]:
    """The given call of a trainer's method never returns."""
    original, calls = getattr(trainer, method), itertools.count(1)

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            raise Killed
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, method, dying)
        with pytest.raises(Killed):
            yield


def assert_resumes(
    stage: Callable[[Any], Path], config: Any, whole: Path, killed: AbstractContextManager[None]
) -> None:
    """A run that is killed, its last line torn, comes to the bits of the uninterrupted one."""
    with killed:
        stage(config)
    assert not records.is_finished(config.out)
    with (config.out / records.METRICS).open("a") as torn:
        torn.write('{"step": 7, "kind": "tr')
    stage(config)
    assert_same_run(config.out, whole)
    assert not (config.out / records.CHECKPOINTS).exists()
