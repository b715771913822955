"""SIGKILL at every change of a file: what comes after has the same bits.

The verb runs in a process of its own, which counts what it does to files below the test's folder
(Python's audit events) and kills itself at the number it was told. Then the verb is run again.
"""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import EvaluateConfig
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.proxy import learn_weights
from tests.pipeline.stages import assert_same_run
from tests.ranks import FORKSERVER

_NAMES = ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")
_CHANGES = tuple(f"os.{name}" for name in _NAMES)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Call = Callable[[Any], object]
# In a directory whose run is complete.
_LEFT = {"config.json", "metrics.jsonl", "weights.json", "model", "evaluation.json"}


def run_verb(told: Any, call: Call, config: Any, root: str, at: int | None) -> None:
    """Run it, and die at the change `at`; else tell their number."""
    torch.set_num_threads(1)
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & _WRITING:
                return
        elif event in _CHANGES:
            path = arguments[0]
        else:
            return
        if not os.fsdecode(path if isinstance(path, (str, bytes)) else b"").startswith(root):
            return
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    sys.addaudithook(watch)
    call(config)
    told.send(count)
    os._exit(0)


def in_a_process(call: Call, config: Any, root: Path, at: int | None = None) -> int | None:
    """The number of changes; None: it was killed."""
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=run_verb, args=(there, call, config, str(root), at))
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return here.recv() if process.exitcode == 0 else None


@pytest.mark.parametrize("call", [learn_weights, train_base, evaluate])
@pytest.mark.parametrize(
    "most",
    [
        pytest.param(4, marks=pytest.mark.exhaustive),
        pytest.param(None, marks=[pytest.mark.soak, pytest.mark.timeout(3600)], id="all"),
    ],
)
def test_a_kill_at_a_change_of_a_file_costs_no_bit(call, most, proxy, base, trained_base, tmp_path):
    def config_in(root: Path) -> Any:
        """Of a verb with a folder of its own for what it writes, its cache included."""
        if call is evaluate:
            shutil.copytree(trained_base, root / "run")
            return EvaluateConfig(run=root / "run", blocks=4, device="cpu")
        root.mkdir()
        make = proxy if call is learn_weights else base
        return make(root / "run", steps=4, save_every=2, cache_dir=root / "cache")

    whole, root = tmp_path / "whole", tmp_path / "killed"
    num_changes = in_a_process(call, config_in(whole), whole)
    drawn = random.Random(0).sample(range(num_changes), min(most or num_changes, num_changes))
    for at in drawn:
        shutil.rmtree(root, ignore_errors=True)
        config = config_in(root)
        assert in_a_process(call, config, root, at) is None, at
        # A file that is being written may be another process's, for an hour.
        for left in root.rglob("*.writing"):
            os.utime(left, (0, 0))
        # What was being packed is packed again, to the same bits.
        assert in_a_process(call, config, root) is not None, at
        assert_same_run(root / "run", whole / "run")
        strays = {each.name for each in (root / "run").iterdir()} - _LEFT
        assert not strays, at
