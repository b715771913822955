"""Workers share an experiment: each run is made once, by whoever claims it, to the same bits."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import Timeout

from doge_fast import cli, failures
from doge_fast.pipeline import records
from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.experiments import runner
from doge_fast.pipeline.experiments.planner import Job
from doge_fast.pipeline.experiments.queue import EVENTS, Queue, devices_of
from doge_fast.pipeline.experiments.runner import run_experiment
from tests.pipeline.stages import lines_of

Make = Callable[..., ExperimentConfig]

# A queue that is wrong waits for ever.
pytestmark = pytest.mark.timeout(180)


# The loop, on runs that are files.


class Runs:
    """Runs that take a moment, in a folder of their own."""

    def __init__(self, folder: Path, failing: tuple[str, ...] = ()) -> None:
        self.folder, self.failing, self.made = folder, failing, list[str]()
        folder.mkdir()

    def make(self, name: str) -> None:
        assert all((self.folder / each).exists() for each in NEEDS[name])
        time.sleep(0.05)
        if name in self.failing:
            raise ValueError(f"{name} cannot be.\nIn two lines.")
        assert not (self.folder / name).exists()
        (self.folder / name).touch()
        self.made.append(name)

    def work(self, queue: Queue, needs: dict[str, list[str]], worker: str = "") -> None:
        def is_made(name: str) -> bool:
            return (self.folder / name).exists()

        queue.work(needs, self.make, is_made=is_made, worker=worker)


def events_of(folder: Path) -> list[str]:
    return (folder / EVENTS).read_text().splitlines()


NEEDS = {"a": [], "b": ["a"], "c": [], "d": ["b", "c"], "e": []}


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doge_fast.pipeline.experiments.queue._PAUSE_S", 0.01)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("lease", [None, 5.0])
def test_every_run_is_made_once_and_after_what_it_reads(
    tmp_path: Path, lease: float | None
) -> None:
    runs = Runs(tmp_path / "runs")
    with ThreadPoolExecutor(3) as pool:
        done = [
            pool.submit(runs.work, Queue(tmp_path / "queue", lease), NEEDS, f"worker {i}")
            for i in range(3)
        ]
    assert [each.result() for each in done] == [None] * 3
    assert sorted(runs.made) == sorted(NEEDS)
    for name, needed in NEEDS.items():
        assert all(runs.made.index(each) < runs.made.index(name) for each in needed)
    told = events_of(tmp_path / "queue")
    assert len(told) == 2 * len(NEEDS)
    # Whoever is first to claim is not always first to say so.
    assert any(re.fullmatch(r"run 1 of 5: a begins on worker [012]", line) for line in told)


@pytest.mark.usefixtures("no_pause")
def test_a_failure_stops_what_reads_it_and_nothing_else(tmp_path: Path) -> None:
    runs, queue = Runs(tmp_path / "runs", failing=("a",)), Queue(tmp_path / "queue")
    runs.work(queue, NEEDS)
    assert runs.made == ["c", "e"]
    assert queue.failure("a") == "a cannot be"
    assert "Traceback" in (tmp_path / "queue" / "a.failed").read_text()
    assert [line for line in events_of(queue.folder) if "failed" in line] == [
        "run 1 of 5: a failed: a cannot be"
    ]
    # Another worker does not try it again, the next command does.
    runs.failing = ()
    runs.work(queue, NEEDS)
    assert runs.made == ["c", "e"]
    queue.forget_failures()
    runs.work(queue, NEEDS)
    assert runs.made == ["c", "e", "a", "b", "d"]


@pytest.mark.usefixtures("no_pause")
def test_a_run_that_is_never_complete_is_not_made_for_ever(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.work({"a": []}, lambda _: None, is_made=lambda _: False)
    assert queue.failure("a") == "a was made and is not complete"


@pytest.mark.parametrize("lease", [None, 2.0])
def test_a_claim_ends_with_its_process_and_not_before(tmp_path: Path, lease: float | None) -> None:
    queue = Queue(tmp_path, lease)
    holder = (
        "import sys, time; from pathlib import Path\n"
        "from doge_fast.pipeline.experiments.queue import Queue\n"
        f"claim = Queue(Path(sys.argv[1]), {lease}).lock('a').acquire()\n"
        "print('mine', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        lock = queue.lock("a")
        until = time.monotonic() + (1.5 * lease if lease else 0.2)
        while time.monotonic() < until:
            with pytest.raises(Timeout):
                lock.acquire(timeout=0)
            time.sleep(0.1)
        process.kill()
    with lock.acquire(timeout=30):
        pass


def test_a_lease_of_another_machine_ends_when_its_heartbeat_stands_still(tmp_path: Path) -> None:
    lease = 1.0
    mine, other = (Queue(tmp_path, lease).lock("a") for _ in range(2))
    with other.acquire():
        marker = Path(other.lock_file).read_text()
    # As the machine would have left it, whose processes cannot be asked for here.
    host = os.uname().nodename
    assert host in marker
    Path(other.lock_file).write_text(marker.replace(host, "elsewhere"))
    start = time.monotonic()
    with mine.acquire(timeout=30):
        assert time.monotonic() - start >= lease


# The experiment.


@pytest.fixture
def shared(experiment: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an experiment of a few runs that save often, whose workers compute as this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(**changes: object) -> ExperimentConfig:
        config = experiment("proxy_vs_base", proxy={"steps": 40}, base={"steps": 40})
        assert config.out is not None
        return replace(config, **{"out": config.out.with_name("shared"), **changes})  # type: ignore[arg-type]

    return make


def weights_in(config: ExperimentConfig) -> dict[str, str]:
    """SHA-256 of every run's model."""
    assert config.out is not None
    files = sorted(config.out.glob("runs/*/model/model.safetensors"))
    return {file.parts[-3]: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextmanager
def running(config: ExperimentConfig) -> Iterator[list[str]]:
    """Runs an experiment beside the test; the list has the lines that it returns, in the end."""
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(run_experiment(config)))
    thread.start()
    yield lines
    thread.join(300)
    assert not thread.is_alive()


def process_of(config: ExperimentConfig, name: str) -> int:
    """The process that makes a run, once it has left a checkpoint and is on its way."""
    assert config.out is not None
    folder, events = config.out / "runs" / name, config.out / records.QUEUE / EVENTS
    until = time.monotonic() + 120
    while not list(folder.glob("checkpoints/checkpoint-*")):
        assert time.monotonic() < until
        time.sleep(0.005)
    (line,) = re.findall(rf": {name} begins on .*?(\d+)\)$", events.read_text(), re.MULTILINE)
    assert not (folder / "model").exists()
    return int(line)


FIRST = "proxy-doge-seed0"


def test_the_run_of_a_killed_worker_is_taken_over_and_ends_with_the_same_bits(
    shared: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "doge_fast")
    alone = shared(out=tmp_path / "alone")
    run_experiment(alone)
    caplog.clear()
    corpus = replace(alone.corpus, cache_dir=tmp_path / "cache")
    config = shared(workers=2, corpus=corpus)
    with running(config) as lines:
        os.kill(process_of(config, FIRST), signal.SIGKILL)
    assert lines[-1] == f"report: {config.out / 'report.html'}"  # type: ignore[operator]
    assert weights_in(config) == weights_in(alone)
    assert len(weights_in(alone)) >= 3
    for name in weights_in(alone):
        assert lines_of(config.out / "runs" / name) == lines_of(alone.out / "runs" / name)  # type: ignore[operator]
    assert sum(f"{FIRST} begins on worker" in line for line in caplog.messages) == 2
    assert any("ended with exit code -9" in line for line in caplog.messages)
    logs = "".join(path.read_text() for path in (config.out / "queue").glob("worker-*.log"))  # type: ignore[operator]
    assert f"{FIRST}: resuming at step" in logs
    # The corpus was packed once, before they began.
    packed = re.findall(r"^Making (\w+) in ", "\n".join([*caplog.messages, logs]), re.MULTILINE)
    assert sorted(packed) == ["code", "prose", "table", "tokenizers", "verse"]


@pytest.mark.exhaustive
def test_jobs_of_submitit_share_an_experiment_whose_workers_are_killed_and_preempted(
    shared: Make, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    alone = shared(out=tmp_path / "alone")
    run_experiment(alone)
    config = shared(workers=2, submitit=("cluster=local", "timeout_min=10"))
    with running(config):
        # Preempted, it asks for another turn; killed, it does not come back.
        os.kill(process_of(config, FIRST), signal.SIGUSR2)
        second = "base-doge-seed0"
        os.kill(process_of(config, second), signal.SIGKILL)
    assert weights_in(config) == weights_in(alone)
    assert config.out is not None
    told = events_of(config.out / "queue")
    for name in (FIRST, second):
        assert len([line for line in told if f"{name} begins" in line]) == 2
    logs = "".join(path.read_text() for path in (config.out / "queue/jobs").glob("*_log.*"))
    assert "Calling checkpoint method" in logs


def test_what_jobs_of_a_cluster_need_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    words = ["experiment", "universal", "--out", str(tmp_path / "x"), "--submitit", "timeout_min=9"]
    assert cli.main(words) == cli.EXIT_REFUSED
    assert "needs submitit, which is not installed: pip install 'doge-fast[slurm]'" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("word", ["walltime=10", "cluster=nowhere", "name=["])
def test_what_submitit_does_not_take_is_said(shared: Make, word: str) -> None:
    pytest.importorskip("submitit")
    config = shared(submitit=("cluster=local", word))
    with pytest.raises(ValueError, match="submitit does not take these parameters"):
        run_experiment(config)


def test_a_run_that_fails_is_named_and_the_others_are_made(
    experiment: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = experiment("proxy_vs_base")
    train = runner._train

    def failing(job: Job) -> None:
        if job.name == FIRST:
            raise ValueError("The domains are at odds.")
        train(job)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_train", failing)
        patch.setitem(cli.VERBS, "experiment", cli.Verb(ExperimentConfig, runner.run_experiment))
        patch.setattr(cli, "parse", lambda _: config)
        assert cli.main(["experiment", "proxy_vs_base"]) == failures.WORLD
    told = capsys.readouterr().err
    assert "of 3 runs are not complete; the same command tries them again" in told
    assert f"\n{FIRST}: The domains are at odds\n" in told
    assert "reads a run that is not complete" in told
    assert sorted(weights_in(config)) == ["base-uniform-seed0"]
    run_experiment(config)
    assert len(weights_in(config)) == 3


CREW = """
import functools, os, signal, sys, time
from pathlib import Path

import torch

from doge_fast.pipeline.experiments.queue import Queue, run_workers

def work(folder, is_lost, worker):
    (folder / str(os.getpid())).write_text(str(torch.get_num_threads()))
    if is_lost:
        os.kill(os.getpid(), 9)
    time.sleep(600)

if __name__ == "__main__":
    # A shell without job control starts what is in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, is_lost = Path(sys.argv[1]), len(sys.argv) > 2
    (folder / "threads").write_text(str(torch.get_num_threads()))
    loop = functools.partial(work, folder, is_lost)
    run_workers(loop, 2, Queue(folder / "queue").folder, None)
"""


@contextmanager
def crew(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """A program with two workers that wait, or die at once; what each has left, by its process."""
    script = folder / "crew.py"
    script.write_text(CREW)
    left = folder / "left"
    left.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        [sys.executable, script, left, *words], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while len(found := [path for path in left.glob("[0-9]*") if path.read_text()]) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        try:
            yield process, found
        finally:
            # Workers end with it.
            process.kill()


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)]
)
def test_workers_share_the_cores_and_end_with_the_command(tmp_path: Path, end: int) -> None:
    with crew(tmp_path) as (process, left):
        process.send_signal(end)
        assert process.wait(60) != 0
    cores = int((tmp_path / "left" / "threads").read_text())
    assert [path.read_text() for path in left] == [str(max(1, cores // 2))] * 2
    until = time.monotonic() + 30
    for path in left:
        while Path("/proc", path.name).exists():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_command_whose_workers_all_die_ends(tmp_path: Path) -> None:
    with crew(tmp_path, "lost") as (process, _):
        assert process.wait(60) == 0
        assert process.stderr is not None
        told = process.stderr.read()
    for number in (1, 2):
        assert f"worker {number} ended with exit code -9" in told


@pytest.mark.parametrize(
    ("there", "visible", "devices"),
    [
        (0, None, [None, None, None]),
        (2, None, ["0", "1", "0"]),
        (2, "5,GPU-7", ["5", "GPU-7", "5"]),
        (0, "", [None, None, None]),
    ],
)
def test_gpus_are_dealt(there: int, visible: str | None, devices: list[str | None]) -> None:
    assert [devices_of(n, there, visible) for n in (1, 2, 3)] == devices


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"lease": 0.0}, "lease must be greater than 0"),
    ],
)
def test_settings_out_of_range_are_refused(
    experiment: Make, changes: dict[str, float], sentence: str
) -> None:
    config = experiment("early", **changes)
    with pytest.raises(ValueError, match=sentence):
        run_experiment(config)
    assert not config.out.exists()  # type: ignore[union-attr]
