"""Every example runs as a user would run it, and what it says of itself is so.

In this process, since importing the frameworks costs more than the examples do; one of them in a
process of its own shows that they need nothing else.
"""

import itertools
import json
import os
import re
import runpy
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from doge_fast import DoGEOptimizer
from tests.examples import titan
from tests.packages import installed
from tests.pages import ROOT, blocks_of
from tests.pipeline.corpora import write_jsonl
from tests.processes import printed_by
from tests.ranks import as_launched

EXAMPLES = ROOT / "examples"

Run = Callable[..., str]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with a command line, in an empty folder; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str) -> str:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [name, *arguments])
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def weights_in(folder: Path) -> dict[str, float]:
    record = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry["weight"] for entry in record["domains"]}


def assert_known_answer(weights: dict[str, float]) -> None:
    """Each example names its domains in the order of what they are worth."""
    worst, middle, best = weights.values()
    assert worst < middle < best
    assert best > 0.5
    assert worst < 0.2


def printed_weights(output: str) -> dict[str, float]:
    return {
        name: float(weight) for name, weight in re.findall(r"^(\w+) +(\d\.\d{3})$", output, re.M)
    }


def parameters_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of the checkpoint that an example left."""
    if (folder / "checkpoint.pt").exists():
        return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    if (folder / "last.ckpt").exists():
        return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    return load_file(next(folder.rglob("model.safetensors")))


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert (one / "weights.json").read_bytes() == (other / "weights.json").read_bytes()
    ours, theirs = parameters_in(one), parameters_in(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Lightning's own: the torch of today says that it asks a question in yesterday's way.
LIGHTNING = pytest.mark.filterwarnings(
    "ignore:`isinstance:FutureWarning", "ignore::DeprecationWarning"
)


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("plain_loop", ()),
        ("accelerate_loop", ()),
        pytest.param("lightning_module", ("--resume",), marks=LIGHTNING),
    ],
)
def test_loop_finds_the_known_answer_and_resumes_to_the_same_bits(name, again, run, tmp_path):
    if name == "lightning_module":
        pytest.importorskip("lightning", reason="lightning is not installed")
    output = run(name, "--out", "whole")
    weights = weights_in(tmp_path / "whole")
    assert_known_answer(weights)
    assert printed_weights(output) == {key: round(value, 3) for key, value in weights.items()}
    run(name, "--out", "cut", "--stop-at", "23")
    assert weights_in(tmp_path / "cut") != weights
    run(name, "--out", "cut", *again)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_stacked_loop_finds_the_known_answer(run):
    output = run("stacked_loop", "--compare")
    assert_known_answer(printed_weights(output))
    (difference,) = re.findall(r"difference (\S+)", output)
    # Float32's rounding, through a hundred steps.
    assert float(difference) < 1e-4


def test_trainer_finds_the_known_answer_and_resumes_to_the_same_bits(run, tmp_path):
    found = last_object(run("hf_trainer", "--out", "whole"))
    assert_known_answer(found["weights"])
    assert found["weights"] == weights_in(tmp_path / "whole")
    # What a run that was killed after its first checkpoint leaves.
    (tmp_path / "whole").rename(tmp_path / "cut")
    cut = tmp_path / "cut"
    kept = {path: (cut / path).read_bytes() for path in ("weights.json", "model/model.safetensors")}
    shutil.rmtree(cut / "checkpoint-160")
    for path in kept:
        (cut / path).unlink()
    assert last_object(run("hf_trainer", "--out", "cut", "--resume")) == found
    assert {path: (cut / path).read_bytes() for path in kept} == kept


def test_domain_mixture_is_drawn_at_the_weights_and_resumes_to_the_same_bits(run, tmp_path):
    def shares(*arguments: str) -> dict[str, float]:
        """Of the domains in what was drawn."""
        output = run("domain_mixture", "--steps", "200", *arguments)
        drawn = re.findall(r"^(\w+) +(\d\.\d{3}) of the rows drawn$", output, re.M)
        return {name: float(share) for name, share in drawn}

    found = shares("--out", "whole")
    assert found["stranger"] < found["half"] < found["kin"]
    assert found["kin"] > 0.5

    # Stopped on the way, and gone on with from worker processes: the same bits.
    shares("--out", "parts", "--stop-at", "30")
    assert shares("--out", "parts", "--workers", "2") == found
    whole, parts = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "parts")
    )
    assert whole["reading"] == parts["reading"]
    assert whole["step"] == parts["step"] == 200
    assert_same_run(tmp_path / "whole", tmp_path / "parts")

    # What was drawn in all is the mean of the weights that held, within the rows of two batches.
    history = whole["reading"]["history"]
    ends = [*(first for first, _ in history[1:]), 200]
    held = [max(0, min(end, 200) - first) for (first, _), end in zip(history, ends, strict=True)]
    kin = sum(weights[2] * steps for (_, weights), steps in zip(history, held, strict=True)) / 200
    assert found["kin"] == pytest.approx(kin, abs=2 / 200)
    learned = weights_in(tmp_path / "whole")
    assert max(learned, key=learned.__getitem__) == "kin"


def test_trainer_measures_no_target_under_universal(run):
    output = run("hf_trainer", "--steps", "2", "--target", "universal")
    assert "'loss/kin'" in output
    assert "'loss/target'" not in output
    assert sum(last_object(output)["weights"].values()) == pytest.approx(1)


def last_object(output: str) -> Any:
    return json.loads(output[output.rindex('{\n "weights"') :])


DOMAINS = ["arxiv", "book", "code"]


def names_of_page(name: str, old: str = "", new: str = "") -> dict[str, Any]:
    """What the block of the page on other trainers defines that has this class.

    Their loops are not there: it runs on stand-ins that have what theirs have.
    """
    page = ROOT / "docs/how-to/other-trainers.md"
    (found,) = [block.text for block in blocks_of(page) if f"\nclass {name}(" in block.text]
    namespace: dict[str, Any] = {"__name__": "my_train"}
    exec(found.replace(old, new), namespace)
    return namespace


class Head(torch.nn.Module):
    """A language model in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 8)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.table(tokens)
        return logits


def tokens_of(domain: str, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(DOMAINS.index(domain))
    return torch.randint(8, (rows, 5), generator=generator)


def with_masked_labels(domain: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a domain; the two rows have three and four targets."""
    tokens = tokens_of(domain)
    labels = tokens.clone()
    labels[0, 2] = -100
    return tokens, labels


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **how)


def weights_by_hand(
    domains: list[str], lrs: list[float], batch_of: Callable[[str], tuple[torch.Tensor, ...]]
) -> dict[str, float]:
    """What a plain loop learns of means over a domain's own targets, in a step at each rate."""
    torch.manual_seed(0)
    model = Head()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DoGEOptimizer(inner, domains=domains, max_grad_norm=1.0)
    for lr in lrs:
        inner.param_groups[0]["lr"] = lr
        for name in domains:
            tokens, labels = batch_of(name)
            with optimizer.domain(name):
                shifted_loss(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.weights


class Numbers:
    """A tokenizer of texts that are numbers."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [int(word) for word in text.split()]


def write_corpus(folder: Path, rows: int) -> None:
    """{"text": ...} a line, in the folder that the text for torchtitan reads."""
    for domain in DOMAINS:
        texts = [" ".join(map(str, row)) for row in tokens_of(domain, rows).tolist()]
        write_jsonl(folder / "corpus" / f"{domain}.jsonl", texts)


def titan_text(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """The names that the text for torchtitan defines, in a folder that has a corpus."""
    patch.chdir(folder)
    patch.setattr(installed("datasets").config, "HF_DATASETS_CACHE", folder / "cache")
    return names_of_page("DoGETitan")


def titan_debugmodel(local_batch_size: int = 2) -> titan.Trainer.Config:
    """Two steps of a model in one table."""

    def model() -> Head:
        torch.manual_seed(0)
        return Head()

    training = titan.TrainingConfig(local_batch_size=local_batch_size, seq_len=4, steps=2)
    return titan.Trainer.Config(model_spec=model, tokenizer=Numbers(), training=training)


def titan_weights(
    folder: Path, local_batch_size: int, rounds: int
) -> tuple[dict[str, float], list[Any], int]:
    """What two steps of the text learn and log, and the micro-batches of each."""
    with pytest.MonkeyPatch.context() as patch:
        titan.put_in_place(patch, lambda: titan_debugmodel(local_batch_size))
        config = titan_text(patch, folder)["doge_debugmodel"]()
        # A graph would replay the backward pass without the hooks.
        assert config.training.disable_cuda_graphs
        # As on the command line.
        config.training.global_batch_size *= rounds
        trainer = config.build()
        trainer.train()
    return trainer.doge.weights, trainer.logged, trainer.gradient_accumulation_steps


@pytest.mark.exhaustive
def test_torchtitan_page_learns_what_a_plain_loop_learns(ranks, tmp_path):
    expected = weights_by_hand(DOMAINS, [0.1, 0.1], lambda name: (tokens_of(name),) * 2)
    write_corpus(tmp_path, rows=2)
    weights, logged, num_micro_batches = titan_weights(tmp_path, 2, rounds=1)
    assert num_micro_batches == 3
    assert weights == pytest.approx(expected, rel=1e-6)
    assert weights_in(tmp_path) == weights
    assert logged[-1][1].keys() == {"lr/SGD", *(f"alpha_mean/{name}" for name in expected)}
    # A row of two in each micro-batch: twice each domain, or once on each of two ranks.
    parts = [titan_weights(tmp_path, 1, 2), *ranks.run(2, titan_weights, tmp_path, 1, 1)]
    assert [number for _, _, number in parts] == [6, 3, 3]
    for theirs, said, _ in parts:
        assert theirs == pytest.approx(expected, rel=1e-6)
        assert said[-1][0] == pytest.approx(logged[-1][0], rel=1e-6)


@pytest.mark.parametrize(
    "library",
    # What torchtitan itself warns of is not ours.
    ["stand-in", pytest.param("torchtitan", marks=pytest.mark.filterwarnings("ignore"))],
)
def test_torchtitan_loader_takes_turns_and_resumes_from_a_checkpoint(
    library, tmp_path, monkeypatch
):
    if library == "torchtitan":
        installed("torchtitan.trainer")
        monkeypatch.setenv("WORLD_SIZE", "1")
    else:
        titan.put_in_place(monkeypatch, titan_debugmodel)
    write_corpus(tmp_path, rows=4)
    config = titan_text(monkeypatch, tmp_path)["doge_debugmodel"]()
    assert config.training.global_batch_size == 3 * config.training.local_batch_size

    def loader() -> Any:
        return config.dataloader.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=Numbers(),
            seq_len=4,
            local_batch_size=2,
            snapshot_every_n_steps=3,
        )

    cut, other = loader(), loader()
    first = list(itertools.islice(cut, 3))
    other.load_state_dict(cut.state_dict())
    given = first + list(itertools.islice(other, 3))
    for number, (inputs, labels) in enumerate(given):
        domain = DOMAINS[number % 3]
        rows = tokens_of(domain, 4).split(2)[number // 3]
        assert inputs.keys() == {"input", "positions", "domain"}
        assert inputs["domain"] == domain
        assert torch.equal(inputs["input"], rows[:, :-1])
        assert torch.equal(inputs["positions"], torch.arange(4).expand(2, -1))
        assert torch.equal(labels, rows[:, 1:])


class Tune:
    """What torchtune's recipe has when its setup is done, as far as training needs it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model, self._device = Head(), torch.device("cpu")
        self._loss_fn = torch.nn.CrossEntropyLoss()
        self._optimizer = self._setup_optimizer({"lr": 0.1})
        names = {name: name for name in DOMAINS}
        self._dataloader = self._setup_data(cfg_dataset=names, shuffle=True)
        self._gradient_accumulation_steps = len(self._dataloader)
        self._lr_scheduler = None
        self.epochs_run, self.total_epochs, self.global_step = 0, 2, 0
        self.logged: list[Any] = []
        self._metric_logger = types.SimpleNamespace(
            log_dict=lambda values, step: self.logged.append((step, values))
        )

    def _setup_optimizer(self, cfg_optimizer: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self._model.parameters(), **cfg_optimizer)

    def _setup_data(self, cfg_dataset: str, shuffle: bool) -> Any:
        class Loader(list[dict[str, torch.Tensor]]):
            sampler = types.SimpleNamespace(set_epoch=lambda epoch: None)

        rows = zip(*with_masked_labels(cfg_dataset), strict=True)
        return Loader({"tokens": row[None], "labels": labels[None]} for row, labels in rows)

    def _loss_step(self, batch: Any) -> torch.Tensor:
        labels = batch.pop("labels")
        return shifted_loss(self._model(**batch), labels)

    def save_checkpoint(self, epoch: int) -> None:
        self.logged.append(epoch)


def test_torchtune_page_learns_what_a_plain_loop_learns(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    modules = {
        "torchtune": {"config": types.SimpleNamespace(parse=lambda main: main)},
        "full_finetune_single_device": {"FullFinetuneRecipeSingleDevice": Tune},
    }
    titan.stand_in(monkeypatch, modules)
    recipe = names_of_page("DoGERecipe")["DoGERecipe"]()
    recipe.train()
    expected = weights_by_hand(DOMAINS, [0.1, 0.1], with_masked_labels)
    assert weights_in(tmp_path) == pytest.approx(expected, rel=1e-6)
    assert [step for step, _ in recipe.logged[0::2]] == [1, 2]
    with pytest.raises(ValueError, match="set it False"):
        recipe._setup_optimizer({"lr": 0.1}, optimizer_in_bwd=True)


class OLMo:
    """What the train module of OLMo-core does with a batch and at the end of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Head()
        self.optim: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        tokens, labels = batch["input_ids"], batch["labels"]
        num_tokens = (labels[:, 1:] != -100).sum()
        for rows, targets in zip(tokens.split(1), labels.split(1), strict=True):
            (shifted_loss(self.model(rows), targets, reduction="sum") / num_tokens).backward()

    def optim_step(self, lr: float) -> None:
        for group in self.optim.param_groups:
            group["lr"] = lr
        self.optim.step()

    def zero_grads(self) -> None:
        self.optim.zero_grad(set_to_none=True)


def test_olmo_core_page_learns_what_a_plain_loop_learns(monkeypatch):
    own = {"TransformerTrainModule": OLMo}
    titan.stand_in(monkeypatch, {"olmo_core.train.train_module": own})
    module = names_of_page("DoGETrainModule", '"web"', '"arxiv"')["DoGETrainModule"]()
    domains = ["arxiv", "code"]
    tokens, labels = map(torch.cat, zip(*map(with_masked_labels, domains), strict=True))
    names = [{"label": name} for name in domains for _ in range(2)]
    order = [2, 0, 3, 1]
    batch = {"input_ids": tokens[order], "labels": labels[order]}
    module.train_batch(dict(batch), dry_run=True)
    module.zero_grads()
    for lr in (0.2, 0.1):
        module.train_batch(batch | {"metadata": [names[row] for row in order]})
        module.optim_step(lr)
        module.zero_grads()
    expected = weights_by_hand(domains, [0.2, 0.1], with_masked_labels)
    assert module.optim.weights == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("distributed_loop", [(2,)]),
        # Shards go on with another number of ranks.
        ("fsdp2_loop", [(2, "--stop-at", "15"), (4,)]),
    ],
)
def test_ranks_of_torchrun_learn_what_one_process_learns(tmp_path, run, name, parts):
    one = printed_weights(run("distributed_loop", "--steps", "40"))
    found = []
    for num_ranks, *words in parts:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks))
        example = (EXAMPLES / f"{name}.py", "--steps", "40", "--out", "ranks", *words)
        printed = printed_by(sys.executable, *torchrun, *example, cwd=tmp_path)
        found.append(printed_weights(printed))
    assert [weights == one for weights in found] == [False] * (len(parts) - 1) + [True]
    alone, together = weights_in(tmp_path / "distributed_loop"), weights_in(tmp_path / "ranks")
    assert together == pytest.approx(alone, rel=1e-4)


def on_a_rank(name: str, folder: str) -> None:
    """An example, as each process of torchrun runs it."""
    as_launched()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    os.chdir(folder)
    words = [name, "--steps", "40", "--out", "ranks"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Lightning's own.
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", words)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["hf_trainer", "accelerate_loop", pytest.param("lightning_module", marks=LIGHTNING)]
)
def test_ranks_of_a_host_learn_what_one_process_learns(ranks, tmp_path, run, name):
    if name == "lightning_module":
        pytest.importorskip("lightning", reason="lightning is not installed")
    run(name, "--steps", "40", "--out", "alone")
    ranks.run(2, on_a_rank, name, str(tmp_path))
    together, alone = weights_in(tmp_path / "ranks"), weights_in(tmp_path / "alone")
    # Each rank draws dropout of its own; the other two have none.
    assert together == pytest.approx(alone, rel=0.02 if name == "hf_trainer" else 1e-6)


def test_distributed_loop_finds_the_known_answer_in_one_process(run):
    assert_known_answer(printed_weights(run("distributed_loop")))
