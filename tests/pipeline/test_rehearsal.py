"""A dry run says what a run would do, and leaves nothing; what cannot fit is refused before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from doge_fast import cli
from doge_fast.pipeline import domains, memory, records
from doge_fast.pipeline import model as models
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.proxy import ProxyTrainer, learn_weights
from doge_fast.pipeline.rehearsal import TIMED_STEPS, rehearse
from tests.pipeline.corpora import texts, write_jsonl
from tests.pipeline.stages import killed_at, words_of
from tests.pipeline.workshop import said_in


def test_a_dry_run_of_a_proxy(proxy):
    config = proxy(target=("verse", "mix"), steps=1000, dry_run=True)
    told = said_in(rehearse(config))
    assert not config.out.exists()
    run = learn_weights(
        replace(config, training=replace(config.training, steps=2), dry_run=False)
    ).path
    record, weights = records.read_json(run / records.CONFIG), records.read_weights(run)
    corpus = record["corpus"]
    for name, entry in (corpus["domains"] | corpus["targets"]).items():
        # 2 blocks of 16 tokens a step.
        epochs = 1000 * 2 * 16 / entry["train_tokens"]
        assert (
            f"{name} {entry['train_tokens']:,} {entry['documents']} {entry['validation_blocks']} "
            f"{epochs:.2f}"
        ) in told
    parameters = sum(p.numel() for p in open_model(run / records.MODEL).parameters())
    assert f"model micro, {parameters:,} parameters" in told
    assert record["parameters"] == parameters
    assert f"target verse, mix mu {weights['mu']:g}" in told
    # Three domains and two targets.
    assert f"steps 1,000 of {5 * 2 * 16} tokens, {1000 * 5 * 2 * 16:,} in all" in told
    assert "gradients of 5 rows" in told
    assert "a step on cpu" in told


def test_a_dry_run_of_a_base_run_leaves_a_killed_one_as_it_is(base, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    config = base(steps=9, save_every=3, stages=1, weights="natural")
    with killed_at(monkeypatch, "training_step", 6):
        train_base(config)
    before = {file: file.stat().st_mtime_ns for file in config.out.rglob("*")}
    told = said_in(rehearse(replace(config, dry_run=True)))
    assert f"writes {config.out}, which is resumed" in told
    assert "weights natural" in told
    assert "rows" not in told
    assert {file: file.stat().st_mtime_ns for file in config.out.rglob("*")} == before
    train_base(config)
    assert "complete already" in rehearse(config)


def test_a_dry_run_refuses_to_go_on_with_another_corpus(base, monkeypatch, tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", texts(name))
    config = base(data=str(tmp_path / "data"), save_every=3)
    with killed_at(monkeypatch, "training_step", 6):
        train_base(config)
    write_jsonl(tmp_path / "data" / "b.jsonl", texts("b", 90))
    for call in (train_base, rehearse):
        with pytest.raises(ValueError, match="another corpus"):
            call(config)


def test_only_a_few_steps_are_timed(proxy, monkeypatch, capsys):
    steps = []
    original = ProxyTrainer.training_step

    def counted(self: ProxyTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ProxyTrainer, "training_step", counted)
    config = proxy(steps=1000)
    assert cli.main(["proxy", *words_of(config), "--dry-run"]) == 0
    assert steps == list(range(TIMED_STEPS))
    assert capsys.readouterr().out.startswith("domain ")
    assert not config.out.exists()


CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have so many bytes free."""
    return lambda num_bytes: monkeypatch.setattr(memory, "free_bytes", lambda _: num_bytes)


@pytest.mark.parametrize("run", [learn_weights, rehearse])
def test_a_run_that_cannot_fit_is_refused_before_its_model_is_made(proxy, free, monkeypatch, run):
    free(1000)
    monkeypatch.setattr(models, "_with_loss", None)
    config = proxy()
    with pytest.raises(
        ValueError, match=r"needs at least .*parameters .*1\.00kB of cpu memory are"
    ):
        run(config)
    assert not config.out.exists()


def test_stored_gradients_count_too(proxy, free):
    """The model fits, and its rows do not."""
    config = proxy(target=("universal",))
    plan = rehearse(config).split()
    num_rows = 4
    size = int(plan[plan.index("parameters") - 1].replace(",", ""))
    assert sum(memory.needed(size).values()) == 16 * size
    assert sum(memory.needed(size, num_rows).values()) == (16 + 4 * num_rows) * size
    # Two blocks of each row, and 8 bytes a token.
    step = config.sequences_per_domain * num_rows * config.corpus.block_size * 8
    enough = (16 + 4 * num_rows) * size + step
    free(enough)
    learn_weights(config)
    free(enough - 1)
    with pytest.raises(ValueError, match="fewer domains"):
        learn_weights(replace(config, out=config.out / "other"))


@pytest.mark.parametrize(
    ("name", "size"), [("proxy", "sequences_per_domain"), ("base", "batch_size")]
)
def test_a_step_that_cannot_fit_is_refused_before_the_corpus_is_read(
    stage, name, size, monkeypatch
):
    call, make = stage(name)
    config = make(**{size: 10**12})
    monkeypatch.setattr(domains, "load_corpus", None)
    with pytest.raises(ValueError, match="tokens of a step"):
        call(config)
    assert not config.out.exists()


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda _: 100)
    parts = {"parameters": 60}
    memory.refuse_what_cannot_fit(parts, CPU, advice="")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes"):
        memory.refuse_what_cannot_fit(parts, CPU, advice="")
    monkeypatch.setattr(memory, "free_bytes", lambda _: 120)
    memory.refuse_what_cannot_fit(parts, CPU, advice="")


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("12345\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "none"), str(tmp_path / "absent")))
    assert memory.free_bytes(CPU) > 10**6
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "max"),))
    assert memory.free_bytes(CPU) == 12345
