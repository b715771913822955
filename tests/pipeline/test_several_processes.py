"""Stages over ranks leave what one process leaves, and go on with another number of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import EvaluateConfig, TemperatureConfig
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.temperature import lines_of, temperature
from tests.pipeline.stages import assert_same_run, killed_at, words_of
from tests.ranks import as_launched

EXHAUSTIVE = pytest.mark.exhaustive


def on_a_rank(stage: Callable[[Any], Any], config: Any, last_pass: int = 0) -> Any:
    """A stage, as each process of torchrun runs it; killed in a pass (1 is the first)."""
    as_launched()
    if not last_pass:
        return stage(config)
    with pytest.MonkeyPatch.context() as patch, killed_at(patch, "training_step", last_pass):
        stage(config)
    return None


def ends_on_a_rank(stage: Callable[[Any], Any], config: Any) -> str:
    """What ends a stage."""
    as_launched()
    with pytest.raises((ValueError, RuntimeError)) as error:
        stage(config)
    return f"{type(error.value).__name__}: {error.value}"


NOT_COMPARED = {"seconds", "source", "out", "run", "sha256", "model_sha256", "drift"}


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of what JSON holds, but for what a clock says and where it lies."""
    if not isinstance(value, (dict, list)):
        yield where, value
        return
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for place, inner in places:
        if place not in NOT_COMPARED:
            yield from leaves(inner, f"{where}/{place}")


def assert_near(ours: Any, theirs: Any, rtol: float) -> None:
    found, expected = dict(leaves(ours)), dict(leaves(theirs))
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        near = pytest.approx(value, rel=rtol, abs=1e-6) if isinstance(value, float) else value
        assert found[place] == near, place


def assert_alike(run: Path, other: Path, rtol: float = 1e-4) -> None:
    """The same files, and the same numbers in them to float32's rounding in some steps of AdamW."""
    assert files(run) == files(other)
    for file in files(run):
        if file.suffix == ".safetensors":
            ours, theirs = load_file(run / file), load_file(other / file)
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
        elif file.name in ("metrics.jsonl", "weights.json", "cancellation.json"):
            texts = [(each / file).read_text() for each in (run, other)]
            lines = [text.splitlines() if file.suffix == ".jsonl" else [text] for text in texts]
            assert_near(*([json.loads(line) for line in each] for each in lines), rtol)


def files(run: Path) -> list[Path]:
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("proxy", {"sequences_per_domain": 3}),
        pytest.param("base", {}, marks=EXHAUSTIVE),
        pytest.param("doremi", {}, marks=EXHAUSTIVE),
        pytest.param("select", {}, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_ranks_leave_what_one_process_leaves(ranks, stage, tmp_path, name, changes):
    call, make = stage(name)
    call(make("alone", **changes))
    ranks.run(2, on_a_rank, call, make("ranks", **changes))
    assert_alike(tmp_path / "ranks", tmp_path / "alone")


@EXHAUSTIVE
def test_the_temperature_over_ranks(ranks, stage, tmp_path):
    call, make = stage("proxy")
    call(make(mu=1e-3))
    asked = TemperatureConfig(
        tmp_path / "proxy", out=tmp_path / "alone", steps=4, seeds=(0,), most_runs=4, device="cpu"
    )
    temperature(asked)
    first, second = ranks.run(2, on_a_rank, temperature, replace(asked, out=tmp_path / "ranks"))
    assert lines_of(first.path) == lines_of(second.path)
    alone, together = (records.read_weights(tmp_path / each) for each in ("alone", "ranks"))
    assert_near(together["points"], alone["points"], 1e-3)
    assert together["inverse_temperature"] == alone["inverse_temperature"]


@EXHAUSTIVE
def test_evaluate_over_ranks(ranks, tmp_path, trained_base):
    measured = EvaluateConfig(run=trained_base, device="cpu", out=tmp_path / "alone.json")
    alone = evaluate(measured)
    together = replace(measured, out=tmp_path / "ranks.json")
    # Every batch of blocks is one rank's, and all batches are those of one process.
    assert ranks.run(3, on_a_rank, evaluate, together) == [alone] * 3
    assert (tmp_path / "ranks.json").read_bytes() == (tmp_path / "alone.json").read_bytes()


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("name", "before", "after", "passes"),
    # A step of select has several passes on a rank.
    [("proxy", 2, 4, 6), ("base", 4, 1, 6), ("doremi", 2, 4, 6), ("select", 4, 2, 12)],
)
def test_a_killed_run_goes_on_with_another_number_of_ranks(
    ranks, stage, tmp_path, name, before, after, passes
):
    call, make = stage(name)
    alone, config = (make(out, save_every=3, eval_every=2) for out in ("alone", "ranks"))
    call(alone)
    ranks.run(before, on_a_rank, call, config, passes)
    (left,) = (config.out / "checkpoints").glob("checkpoint-*")
    assert left.name == "checkpoint-3"
    states = {f"rng_state_{rank}.pth" for rank in range(before)}
    assert states < records.read_manifest(left)["files"].keys()
    ranks.run(after, on_a_rank, call, config)
    assert_alike(tmp_path / "ranks", tmp_path / "alone")


def test_ranks_end_alike_where_nothing_can_go_on(ranks, stage):
    """A training that diverges, and then one whose only checkpoint is damaged."""
    call, make = stage("proxy")
    huge = {"learning_rate": 1e20, "min_learning_rate": 0.0, "warmup_steps": 0}
    config = make(max_skipped_steps=3, save_every=1, **huge)
    first, second = ranks.run(2, ends_on_a_rank, call, config)
    assert first == second
    assert first.startswith(f"Diverged: {config.out} has diverged: up to step 4, 3 steps in a row")
    assert not (config.out / "weights.json").exists()
    (left,) = (config.out / "checkpoints").glob("checkpoint-*")
    (left / "optimizer.pt").unlink()
    first, second = ranks.run(2, ends_on_a_rank, call, config)
    assert first == second
    assert "no checkpoint is whole (checkpoint-1 is damaged: optimizer.pt is missing)" in first


def torchrun(num_ranks: int, *words: str) -> subprocess.Popen[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks))
    return subprocess.Popen(
        [*launcher, "-m", "doge_fast", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@EXHAUSTIVE
@pytest.mark.timeout(300)
def test_sigterm_under_torchrun_leaves_a_checkpoint_and_loses_nothing(proxy):
    """torchrun passes on what it is sent."""
    whole, config = (proxy(out, steps=60) for out in ("whole", "ranks"))
    # Under torchrun as well: other numbers of threads add up in another order.
    own = ["--sequences-per-domain", "2"]
    undisturbed = torchrun(2, "proxy", *words_of(whole), *own)
    _, said = undisturbed.communicate(timeout=200)
    assert undisturbed.returncode == 0, said
    words = ["proxy", *words_of(config), *own]
    running = torchrun(2, *words)
    metrics = config.out / records.METRICS
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=200)
    assert running.returncode != 0
    assert said.count("Ended by SIGTERM. A checkpoint holds step") == 2, said
    assert not (config.out / "model").exists()
    (left,) = (config.out / "checkpoints").glob("checkpoint-*")
    first = records.step_of(left)
    assert 0 < first < 60
    again = torchrun(2, *words)
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert f"resuming at step {first} of 60" in said
    assert_same_run(config.out, whole.out)


@pytest.mark.parametrize("words", [["demo"], ["profile"], ["export"], ["report"]], ids=str)
def test_a_verb_of_one_process_says_so(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(words) == cli.failures.USAGE
    said = f"{words[0]} takes one process, and a launcher has started 3. Start it without torchrun"
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_batch_that_ranks_cannot_share_is_refused(base, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = base(batch_size=8)
    with pytest.raises(ValueError, match="batch_size"):
        train_base(config)
    assert not config.out.exists()
