"""Everything that parses, handed bytes: what comes of them is a value or one sentence.

`make fuzz` runs each parser below under atheris, which changes its inputs until they reach other
lines; tests/corpus/ keeps one input of each kind that was worth it, and tests/test_fuzzing.py runs
those, cut and changed, in seconds.

    python -m tests.fuzzing [PARSER ...] [--seconds N]
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).with_name("corpus")
Parser = Callable[[bytes], object]


def _instrumented() -> contextlib.AbstractContextManager[object]:
    """Under atheris it sees which lines of ours an input reaches."""
    if "atheris" not in sys.modules:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["doge_fast"], enable_loader_override=False)


with _instrumented():
    from doge_fast import cancellation, cli
    from doge_fast.kernels import compilers
    from doge_fast.mixture import DomainMixture
    from doge_fast.pipeline import named, proxy, records
    from doge_fast.pipeline.config import ProxyConfig
    from doge_fast.pipeline.config.fields import filled, read_file
    from doge_fast.pipeline.config.ranges import check as check_ranges
    from doge_fast.pipeline.records import metrics, runs
    from doge_fast.weights import checkpoint
    from doge_fast.weights.objective import Objective


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
    _file(runs.CONFIG, data)
    return records.read_config(_folder())


def _measures(data: bytes) -> object:
    for name in ("evaluation.json", "fewshot.json", "experiment.json"):
        _file(name, data)
    for read in (records.read_evaluation, records.read_few_shot, records.read_experiment):
        with contextlib.suppress(ValueError):
            read(_folder())
    return None


def _small_words(data: bytes) -> object:
    """Flags whose words we take apart ourselves."""
    words = _words(data)
    for parse in (
        lambda: proxy.parse_target(words),
        lambda: named.numbers(words, "floor"),
        lambda: cancellation.parse_strategy(_text(data)),
        lambda: Objective.of(words),
        lambda: compilers.architecture_flags(words, (80, 86, 90)),
    ):
        with contextlib.suppress(ValueError, compilers.BuildError):
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


def _fuzz(name: str, seconds: int, corpus: Path) -> None:
    """In a process of its own: atheris ends it."""
    import atheris

    flags = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=4096"]
    place = corpus.parent / f"{name}-"
    atheris.Setup(
        [sys.argv[0], *flags, f"-artifact_prefix={place}", "-print_final_stats=1", str(corpus)],
        lambda data: run_one(name, data),
    )
    atheris.Fuzz()


def main() -> int:
    """Each parser for its share of the time; 1 where one failed, the input shown."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("parsers", nargs="*", default=list(PARSERS))
    parser.add_argument("--seconds", type=int, default=600, help="of all parsers together")
    parser.add_argument("--found", type=Path, help="where inputs are kept that reached other lines")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    share = max(1, given.seconds // len(given.parsers))
    if given.inside:
        _fuzz(given.parsers[0], share, given.found)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        found = given.found or Path(folder)
        for name in given.parsers:
            corpus = found / name
            shutil.copytree(CORPUS / name, corpus, dirs_exist_ok=True)
            program = (
                "import atheris, runpy; runpy.run_module('tests.fuzzing', run_name='__main__')"
            )
            words = [name, "--inside", "--seconds", str(share), "--found", str(corpus)]
            ended = subprocess.run(
                [sys.executable, "-c", program, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            facts = [line for line in ended.stdout.splitlines() if "number_of_executed" in line]
            print(f"{name}: {' '.join(facts) or 'failed'}", flush=True)
            if ended.returncode:
                failed.append(name)
                print(ended.stdout[-3000:], flush=True)
                for file in found.glob(f"{name}-*"):
                    print(f"{file.name}: {file.read_bytes()!r}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
