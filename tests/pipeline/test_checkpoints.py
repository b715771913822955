"""What is damaged is named, the generation before it is used, and the bits are the same."""

import errno
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.records import folders
from tests.grids import grid
from tests.pipeline.stages import assert_same_run, killed_at
from tests.pipeline.workshop import Damage

EXHAUSTIVE = pytest.mark.exhaustive
NEWEST, BEFORE = "checkpoint-6", "checkpoint-4"
FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "optimizer.pt"),
    *("rng_state.pth", "scheduler.pt", "trainer_state.json"),
)


@pytest.fixture(scope="module")
def config(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ProxyConfig:
    """Of a run with a checkpoint every second of its 8 steps."""
    training = replace(settings["training"], save_every=2, eval_every=3)
    out = tmp_path_factory.mktemp("runs") / "run"
    return ProxyConfig(out=out, sequences_per_domain=2, **(settings | {"training": training}))


@pytest.fixture(scope="module")
def whole(config: ProxyConfig) -> Path:
    """The run without an interruption."""
    return learn_weights(replace(config, out=config.out.with_name("whole"))).path


@pytest.fixture(scope="module")
def killed(config: ProxyConfig) -> Path:
    """The run, killed in its last step; its two last checkpoints are there."""
    with pytest.MonkeyPatch.context() as patch, killed_at(patch, "training_step", 8):
        learn_weights(config)
    return config.out


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(killed, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "method", "count", "changes"),
    [
        ("proxy", "training_step", 6, {"eval_every": 4, "target": ("verse", "mix")}),
        pytest.param("proxy", "evaluate_domains", 2, {"eval_every": 4}, marks=EXHAUSTIVE),
        ("base", "training_step", 6, {}),
        # Some domains are missing in some steps.
        ("doremi", "training_step", 6, {"eval_every": 4, "batch_size": 3}),
        pytest.param("doremi", "evaluate_domains", 2, {"eval_every": 4}, marks=EXHAUSTIVE),
        ("select", "training_step", 6, {}),
    ],
)
def test_a_killed_run_resumes_to_the_bits_of_the_uninterrupted_one(
    stage, tmp_path, monkeypatch, name, method, count, changes
):
    call, make = stage(name)
    if name == "base":
        # Which goes on where it stood, too.
        dropout = GPT2Config(n_layer=1, n_embd=16, n_head=2, resid_pdrop=0.3)
        dropout.save_pretrained(tmp_path / "architecture")
        changes = {"model": str(tmp_path / "architecture")}
    whole, cut = (make(out, save_every=3, **changes) for out in ("whole", "cut"))
    call(whole)
    with killed_at(monkeypatch, method, count):
        call(cut)
    assert not records.has_model(cut.out)
    # Killed while it wrote a line.
    with (cut.out / records.METRICS).open("a") as torn:
        torn.write('{"step": 7, "kind": "tr')
    call(cut)
    assert_same_run(cut.out, whole.out)
    assert not (cut.out / records.CHECKPOINTS).exists()


# {what workshop.Damage does: how the sentence begins that says so}.
DAMAGES = {
    "delete": "{} is missing",
    "empty": "{} has 0 bytes, and ",
    "half": "{} has ",
    "add x": "{} has ",
    "flip 0.5": "{} is not what was written: its sha256 differs",
    "folder": "{} is missing",
    "dangling": "{} is missing",
}


def test_two_generations_are_kept_with_all_that_they_need(killed):
    found = sorted(each.name for each in (killed / "checkpoints").glob("checkpoint*"))
    assert found == [BEFORE, NEWEST]
    record = json.loads((killed / "checkpoints" / NEWEST / "manifest.json").read_text())
    assert sorted(record["files"]) == list(FILES)
    lines = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    told = record["metrics.jsonl"]
    assert told["bytes"] == len(b"".join(lines[: told["lines"]]))
    assert [json.loads(line)["step"] for line in lines[: told["lines"]]][-1] == 6


@pytest.mark.parametrize(
    ("file", "damage"),
    grid(FILES, DAMAGES, some=lambda file, damage: damage == "delete" or file == "optimizer.pt"),
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(run, file, damage, caplog):
    Damage(damage)(run / "checkpoints" / NEWEST / file)
    with caplog.at_level("WARNING", logger="doge_fast"):
        assert records.resume_checkpoint(run) == run / "checkpoints" / BEFORE
    (said,) = caplog.messages
    assert said.startswith(f"{run}: {NEWEST} is damaged: {DAMAGES[damage].format(file)}")
    assert said.endswith(f". {BEFORE} is used.")
    steps = [line["step"] for line in records.read_metrics(run, kind="train")]
    assert steps == list(range(5))


def test_any_bit_of_a_manifest_may_flip(run, monkeypatch):
    """The checkpoint is refused or is sound; nothing else is raised, and nothing else is loaded."""
    file = run / "checkpoints" / NEWEST / "manifest.json"
    content = file.read_bytes()
    monkeypatch.setattr(folders, "_digest", functools.cache(folders._digest))
    metrics = (run / "metrics.jsonl").read_bytes()
    harmless = 0
    for position in range(0, len(content), 11):
        changed = bytearray(content)
        changed[position] ^= 1
        file.write_bytes(changed)
        (run / "metrics.jsonl").write_bytes(metrics)
        found = records.resume_checkpoint(run)
        harmless += found.name == NEWEST
    # Spaces, and what no reader asks for.
    assert harmless < len(content) / 11 / 3


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (f"{NEWEST}/model.safetensors", "flip 0.5"),
        pytest.param(f"{NEWEST}/scheduler.pt", "delete", marks=EXHAUSTIVE),
        ("", "delete"),
    ],
)
def test_what_is_left_leads_to_the_bits_of_the_uninterrupted_run(
    config, whole, run, file, damage, caplog
):
    Damage(damage)(run / "checkpoints" / file)
    assert learn_weights(replace(config, out=run)).path == run
    assert_same_run(run, whole)
    assert not (run / "checkpoints").exists()
    told = f"{run}: there is no checkpoint; it begins again at the first step."
    assert (told in caplog.messages) == (not file)


def test_what_is_no_checkpoint_of_its_step_is_passed_over(run, caplog):
    """Copied to another name, or left by a killed `cp`; and what a killed run was writing."""
    folder = run / "checkpoints"
    shutil.copytree(folder / BEFORE, folder / "checkpoint-7")
    shutil.copytree(folder / NEWEST, folder / "checkpoint-8")
    (folder / "checkpoint-8" / "manifest.json").unlink()
    (folder / "checkpoint-x").mkdir()
    (folder / ".writing" / "checkpoint-9").mkdir(parents=True)
    with caplog.at_level("WARNING", logger="doge_fast"):
        assert records.resume_checkpoint(run) == folder / NEWEST
    assert not (folder / ".writing").exists()
    half, other = caplog.messages
    assert "checkpoint-8 is damaged: " in half
    assert "manifest.json does not exist" in half
    # Batches and the length of the run would be those of the name, weights those of the files.
    assert "checkpoint-7 is damaged: its manifest is not of step 7" in other


def test_without_locks_in_the_file_system_a_warning_is_all(run, monkeypatch, caplog):
    """No marker takes their place: it would outlive a process of another machine."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with records.alone(run), records.alone(run):
        assert caplog.text.count("its file system has no locks; start one launch at a time") == 2


def lines_of(run: Path) -> list[bytes]:
    """Of metrics.jsonl; the newest checkpoint knows 9 of them, the one before it 6."""
    return (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("lost", "why"), [((8, 9, 10), "holds 8 of the 9 lines"), ((7,), "holds other lines")]
)
def test_lines_that_are_lost_lead_to_the_generation_before(run, lost, why, caplog):
    before = lines_of(run)
    kept = [line for number, line in enumerate(before) if number not in lost]
    (run / "metrics.jsonl").write_bytes(b"".join(kept))
    with caplog.at_level("WARNING", logger="doge_fast"):
        assert records.resume_checkpoint(run) == run / "checkpoints" / BEFORE
    (said,) = caplog.messages
    assert why in said
    assert lines_of(run) == before[:6]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("empty", "holds 0 of the 9 lines"),
        ('line 1 {"step": 0, "kind": "train"}', "holds other lines"),
        ("line 3 \x00", "line 3 of metrics.jsonl is damaged"),
    ],
)
def test_a_damaged_record_is_refused_and_left(run, damage, why):
    path = run / "metrics.jsonl"
    Damage(damage)(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no checkpoint is whole") as error:
        records.resume_checkpoint(run)
    assert why in str(error.value)
    assert path.read_bytes() == before


def test_files_and_folders_are_kept_before_the_checkpoint_has_its_name(
    config, tmp_path, monkeypatch
):
    events: list[str] = []

    def told(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            described = args[0]
            if isinstance(described, int):
                described = Path(f"/proc/self/fd/{described}").resolve()
            events.append(f"{name} {Path(described).name}")
            return original(*args)

        return call

    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not say which file is synced")
    monkeypatch.setattr(os, "fsync", told("keep", os.fsync))
    monkeypatch.setattr(os, "replace", told("name", os.replace))
    training_config = replace(config.training, steps=4, save_every=2)
    learn_weights(replace(config, out=tmp_path / "run", training=training_config))
    named = events.index("name checkpoint-2")
    before = events[:named]
    for file in (*FILES, "metrics.jsonl", "checkpoint-2"):
        assert f"keep {file}" in before, file
    # The manifest comes last, and the folder's names after it.
    assert max(map(before.index, (f"keep {file}" for file in FILES))) < len(before) - 1
    assert before[-1] == "keep checkpoint-2"
    assert events[named + 1] == "keep checkpoints"
    model = events.index("name .model")
    assert {"keep model.safetensors", "keep metrics.jsonl"} < set(events[named:model])
    assert events[model + 1] == "keep run"


def test_an_emptied_model_is_not_complete_and_is_made_again(base, trained_base):
    config = base()
    model = shutil.copytree(trained_base, config.out) / "model"
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for file in model.iterdir():
        file.unlink()
    assert not records.has_model(config.out)
    with pytest.raises(ValueError, match="complete"):
        records.check_finished(config.out)
    train_base(config)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
