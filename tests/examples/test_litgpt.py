"""What the page on other trainers changes in litgpt applies, and litgpt trains with it."""

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.pages import ROOT, blocks_of

litgpt = pytest.importorskip("litgpt", reason="litgpt is not installed")
PAGE = ROOT / "docs" / "how-to" / "other-trainers.md"


class OneDomainAtATime(IterableDataset[tuple[str, Tensor]]):
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        for stride, name in itertools.cycle(enumerate(("web", "code"), start=1)):
            first = torch.randint(64, (4, 1), generator=draw)
            yield name, (first + stride * torch.arange(17)) % 64


def test_litgpt_page_learns_weights(tmp_path, monkeypatch):
    if shutil.which("patch") is None:
        pytest.skip("the program patch is not installed")
    from litgpt.args import EvalArgs, LogArgs, TrainArgs
    from litgpt.data import DataModule

    # What its training compiles would take longer than the training.
    monkeypatch.setattr(torch, "compile", lambda model: model)

    class Data(DataModule):
        def connect(self, **_: Any) -> None:
            pass

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(OneDomainAtATime(), batch_size=None)

        def val_dataloader(self) -> DataLoader[Any]:
            plain = [tokens for _, tokens in itertools.islice(OneDomainAtATime(), 2)]
            return DataLoader(plain, batch_size=None)

    (tmp_path / "litgpt").mkdir()
    shutil.copy(Path(litgpt.__file__).with_name("pretrain.py"), tmp_path / "litgpt")
    (change,) = (block.text for block in blocks_of(PAGE) if block.language == "diff")
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=tmp_path, input=change, text=True, check=True)
    namespace: dict[str, Any] = {"__name__": "pretrain", "__file__": "pretrain.py"}
    exec((tmp_path / "litgpt" / "pretrain.py").read_text(encoding="utf-8"), namespace)

    saved: list[Path] = []
    # Copies the arguments of its command line, and there is none.
    namespace["save_checkpoint"] = lambda fabric, state, tokenizer_dir, path: saved.append(path)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "padded_vocab_size": 64}
    namespace["setup"](
        model_name="tiny",
        model_config=litgpt.Config(name="tiny", block_size=16, **shape),
        out_dir=tmp_path / "out",
        precision="32-true",
        data=Data(),
        train=TrainArgs(
            global_batch_size=16, micro_batch_size=4, max_tokens=16 * 16 * 6, max_norm=1.0
        ),
        eval=EvalArgs(max_iters=1),
        log=LogArgs(),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-3}},
        devices=1,
        logger_name="csv",
    )
    record = json.loads((tmp_path / "out" / "weights.json").read_text(encoding="utf-8"))
    assert [entry["name"] for entry in record["domains"]] == ["web", "code"]
    assert record["steps"] == 6
    assert saved
