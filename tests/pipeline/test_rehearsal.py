"""A dry run says what a run would do, and leaves nothing."""

from dataclasses import replace
from typing import Any

import pytest

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.progress import TIMED_STEPS
from doge_fast.pipeline.proxy import ProxyTrainer, learn_weights
from doge_fast.pipeline.rehearsal import rehearse
from tests.pipeline.corpora import texts, write_jsonl
from tests.pipeline.stages import killed_at, words_of
from tests.pipeline.workshop import said_in


def test_a_dry_run_of_a_proxy(proxy):
    config = proxy(target=("verse", "mix"), score="paper", steps=1000, dry_run=True)
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
    assert "a step on cpu in float32" in told


def test_a_dry_run_of_the_aligned_rule(proxy):
    told = said_in(rehearse(proxy(target=("verse",), score="aligned", dry_run=True)))
    assert "target verse score aligned" in told


def test_a_dry_run_of_a_base_run_leaves_a_killed_one_as_it_is(base, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    config = base(steps=9, save_every=3, stages=1, weights="natural")
    with killed_at(monkeypatch, "training_step", 6):
        train_base(config)
    before = {file: file.stat().st_mtime_ns for file in config.out.rglob("*")}
    told = said_in(rehearse(replace(config, dry_run=True)))
    assert f"writes {config.out}, which is resumed" in told
    assert "weights natural" in told
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


def test_a_dry_run_of_a_search_writes_nothing(proxy, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    source = learn_weights(proxy(target=("verse",), mu=1e-3)).path
    before = sorted(source.parent.rglob("*"))
    words = ["temperature", str(source), "--steps", "9", "--seeds", "0", "1", "--most-runs", "3"]
    assert cli.main([*words, "--dry-run"]) == 0
    told = said_in(capsys.readouterr().out)
    assert "models at most 6 base models (3 temperatures, 2 seeds)" in told
    # Blocks of 16 tokens, two of each of the three domains.
    assert "steps 9 of 96 tokens, 864 each, 5,184 in all" in told
    assert "epochs of one model" in told
    assert f"writes {source}-temperature" in told
    assert f"weights {source} at up to 3 temperatures target held-out text of verse" in told
    # Of all models.
    seconds = float(told.split(" s a step")[0].split()[-1])
    days = told.split("time ")[1].split(" at ")[0].split(":")
    whole = sum(int(part) * 60**place for place, part in enumerate(reversed(days)))
    assert whole == pytest.approx(seconds * 9 * 6, abs=1)
    assert sorted(source.parent.rglob("*")) == before


@pytest.mark.parametrize("asked", [1000, 1])
def test_only_a_few_steps_are_timed(proxy, monkeypatch, capsys, asked):
    steps = []
    original = ProxyTrainer.training_step

    def counted(self: ProxyTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ProxyTrainer, "training_step", counted)
    config = proxy(steps=asked, warmup_steps=0)
    assert cli.main(["proxy", *words_of(config), "--dry-run"]) == 0
    assert steps == list(range(1 + TIMED_STEPS))
    assert capsys.readouterr().out.startswith("domain ")
    assert not config.out.exists()
