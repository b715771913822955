"""Stage one leaves what it promises, learns what the optimizer learns, survives being killed."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import EvaluateConfig
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.proxy import ProxyTrainer, learn_weights
from doge_fast.pipeline.reporting.runs import open_runs
from doge_fast.pipeline.run import Run
from doge_fast.weights.aligned import WAITING_STEPS
from tests.pipeline.corpora import texts, write_jsonl
from tests.pipeline.stages import NAMES, killed_at, lines_of, words_of
from tests.pipeline.workshop import Damage


def test_a_large_share_held_out_is_warned_of_and_remembered(proxy, tmp_path, caplog):
    folder = tmp_path / "data"
    for name in "ab":
        write_jsonl(folder / f"{name}.jsonl", texts(name))
    # Two documents of a length: one of them is half the domain.
    write_jsonl(folder / "few.jsonl", [" ".join(texts(f"few {half}")) for half in "12"])
    run = learn_weights(proxy(data=str(folder), validation_fraction=0.05)).path
    (warning,) = records.read_json(run / records.CONFIG)["warnings"]
    assert re.match(r"few: [45]\d% of its tokens are held out, where .* asks for 5%", warning)
    assert "whole documents are held out." in warning
    assert caplog.messages.count(warning) == 1
    assert open_runs([run])[0].record.warnings == (warning,)


def test_bars_of_transformers_are_off_on_the_command_line_and_back_in_python(proxy, capfd):
    logging.enable_progress_bar()
    open_model(learn_weights(proxy("python")).path / records.MODEL)
    assert "|" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()
    assert cli.main(["proxy", *words_of(proxy())]) == 0
    assert "|" not in capfd.readouterr().err
    assert not logging.is_progress_bar_enabled()


def difficulties_of(run: Path) -> list[float]:
    lines = records.read_metrics(run, kind="train")[1:]
    return [value for line in lines for value in line["difficulty"].values()]


def test_a_run_leaves_weights_records_and_a_model(trained_proxy):
    held = sorted(entry.name for entry in trained_proxy.iterdir())
    assert held == ["config.json", "metrics.jsonl", "model", "weights.json"]
    record = records.read_weights(trained_proxy, domains=NAMES)
    weights = [entry["weight"] for entry in record["domains"]]
    assert math.isclose(sum(weights), 1, rel_tol=1e-12)
    assert weights != pytest.approx([0.25] * 4, abs=1e-6)
    # Three times as many documents of prose.
    prior = {entry["name"]: entry["prior"] for entry in record["domains"]}
    assert max(prior, key=prior.__getitem__) == "prose"
    corpus = records.read_json(trained_proxy / records.CONFIG)["corpus"]["domains"]
    for entry in record["domains"]:
        there = corpus[entry["name"]]
        assert (entry["tokens"], entry["documents"]) == (there["train_tokens"], there["documents"])
        # Of the documents, not of the blocks, of which the last one is incomplete.
        rest = entry["mean_doc_tokens"] * there["documents"] - there["train_tokens"]
        assert -1e-6 < rest < 16
    # Domains are cut to norm one before they are scored, unless told otherwise.
    assert max(difficulties_of(trained_proxy)) <= 1 + 1e-9
    assert record["target"] == "universal"
    assert (record["steps"], record["seed"], record["block_size"]) == (8, 0, 16)
    model = AutoModelForCausalLM.from_pretrained(trained_proxy / "model")
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(trained_proxy / "model")
    assert tokenizer.decode(tokenizer("def return")["input_ids"]) == "def return"
    assert not [file for file in trained_proxy.rglob("*") if file.suffix in (".pt", ".bin", ".pth")]


def test_lines_hold_the_weights_raw_and_averaged_from_step_zero(proxy):
    run = learn_weights(proxy(domain_max_grad_norm=None))
    assert max(difficulties_of(run.path)) > 1
    lines = run.metrics("train")
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[0]["alpha"] == lines[0]["alpha_mean"] == dict.fromkeys(NAMES, 0.25)
    for name in NAMES:
        mean = sum(line["alpha"][name] for line in lines[1:]) / 8
        assert lines[-1]["alpha_mean"][name] == pytest.approx(mean, rel=1e-12)
    last = lines[-1]
    assert last["rows"] == NAMES
    for j, name in enumerate(NAMES):
        assert last["gain"][name] == pytest.approx(
            last["influence"][name] + last["difficulty"][name], rel=1e-9
        )
        assert last["cosine"][j][j] == pytest.approx(1)
        assert last["difficulty"][name] == pytest.approx(last["grad_norm"][name] ** 2, rel=1e-9)
    assert last["tokens"] == dict.fromkeys(NAMES, 8 * 2 * 16)
    assert last["skipped"] is False
    assert last["combined_norm"] > 0
    assert last["alpha_mean"] == run.weights
    (held_out,) = run.metrics("eval")
    assert held_out["step"] == 8
    assert set(held_out["loss"]) == set(NAMES)


def test_one_pass_for_all_domains_leaves_the_same_weights(proxy):
    """To float32's rounding over 8 steps of AdamW; auto is one of the two, to the bit."""
    modes = ("sequential", "stacked", "auto")
    weights = {mode: learn_weights(proxy(mode, mode=mode)).weights for mode in modes}
    assert weights["auto"] == weights["stacked"] != weights["sequential"]
    assert weights["stacked"] == pytest.approx(weights["sequential"], rel=1e-5)


def test_another_seed_gives_another_run(proxy, trained_proxy):
    assert lines_of(learn_weights(proxy(seed=1)).path) != lines_of(trained_proxy)


def test_a_held_out_domain_is_measured_and_not_trained_on(proxy):
    run = learn_weights(proxy(target=("verse",)))
    record = records.read_weights(run.path, domains=["code", "prose", "table"])
    assert record["target"] == {"verse": 1.0}
    # A target has tokens, and no share of the training.
    assert sum(entry["prior"] for entry in record["domains"]) == pytest.approx(1, rel=1e-12)
    line = run.metrics("train")[-1]
    assert line["rows"] == ["code", "prose", "table", "verse"]
    assert set(line["alpha"]) == {"code", "prose", "table"}
    # No training domain is its own target.
    assert line["difficulty"] == dict.fromkeys(["code", "prose", "table"], 0.0)
    assert "verse" in run.metrics("eval")[-1]["loss"]
    assert list(records.read_json(run.path / records.CONFIG)["corpus"]["targets"]) == ["verse"]


def test_the_rule_follows_from_the_target_and_what_else_is_said(proxy, caplog):
    """Held-out text has the aligned rule; what belongs to the paper's score brings that one."""
    assert proxy(target=("verse",)).score == "aligned"
    assert proxy(target=("mix=2", "verse")).score == "aligned"
    for others in (
        {},
        {"target": ("mix",)},
        *({"target": ("verse",)} | each for each in ({"mu": 0.1}, {"domain_max_grad_norm": 0})),
        {"target": ("verse",), "sequences_per_domain": 1},
    ):
        assert proxy(**others).score == "paper"
    assert proxy(target=("verse",), score="published").score == "published"
    with pytest.raises(ValueError, match="no mu"):
        proxy(target=("verse",), score="aligned", mu=0.1)
    with caplog.at_level("INFO", logger="doge_fast"):
        run = learn_weights(proxy(target=("verse",), steps=WAITING_STEPS + 1))
        learn_weights(proxy("short", target=("verse",), steps=2))
    assert "aligned rule; --score paper" in caplog.text
    assert f"uniform weights in its first {WAITING_STEPS} steps" in caplog.text
    assert len({*run.weights.values()}) > 1
    assert records.read_weights(run.path)["score"] == "aligned"
    assert records.read_json(run.path / records.CONFIG)["config"]["score"] == "aligned"


def test_weighted_targets_and_chosen_domains(proxy):
    targets, domains = ("verse=0.5", "table=2", "mix"), ("prose", "code")
    config = proxy(steps=2, target=targets, domains=domains, score="paper")
    record = records.read_weights(learn_weights(config).path)
    assert [entry["name"] for entry in record["domains"]] == ["prose", "code"]
    assert record["target"] == {"verse": 0.5, "table": 2.0, "mix": 1.0}
    # 20 (T + 1) / 2 of the rate, for weights that sum to 3.5.
    assert record["mu"] == pytest.approx(45 * config.training.learning_rate, rel=1e-12)


def test_mix_is_measured_and_no_domains_own_target(proxy, trained_proxy):
    run = learn_weights(proxy(target=("mix",)))
    line = run.metrics("train")[-1]
    assert line["rows"] == [*NAMES, "mix"]
    # What is reserved for it is reserved again.
    assert set(evaluate(EvaluateConfig(run.path, blocks=2, device="cpu"))["loss"]) == set(NAMES)
    assert line["difficulty"] == dict.fromkeys(NAMES, 0.0)
    # What is held out came from the same documents.
    lengths = [
        [entry["mean_doc_tokens"] for entry in records.read_weights(each)["domains"]]
        for each in (run.path, trained_proxy)
    ]
    assert lengths[0] == lengths[1]


def test_selected_parameters_alone_enter_the_gain(proxy, tmp_path):
    selection = tmp_path / "selection.json"
    selection.write_text('["transformer.h.0.mlp.c_fc.weight"]')
    runs = [learn_weights(proxy("some", selection=selection)), learn_weights(proxy("all"))]
    some, whole = (run.metrics("train")[1]["gain"] for run in runs)
    assert all(0 < some[name] < whole[name] for name in NAMES)


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("damage", ["delete", "empty", "half", "line 1 ["])
def test_a_training_is_not_lost_with_the_lines_about_it(
    proxy, trained_proxy, monkeypatch, damage, step
):
    config = proxy()
    line = ProxyTrainer.line

    def damaged(self: ProxyTrainer, number: int) -> Any:
        if number == step:
            Damage(damage)(config.out / "metrics.jsonl")
        return line(self, number)

    monkeypatch.setattr(ProxyTrainer, "line", damaged)
    assert cli.main(["proxy", *words_of(config)]) == 0
    assert Run(config.out).weights == Run(trained_proxy).weights
    assert records.has_model(config.out)


def test_a_complete_run_is_left_as_it_is(proxy, trained_proxy, caplog):
    config = proxy()
    shutil.copytree(trained_proxy, config.out)
    before = {file: file.stat().st_mtime_ns for file in config.out.rglob("*")}
    with caplog.at_level("INFO", logger="doge_fast"):
        learn_weights(config)
    assert "complete already, nothing to do" in caplog.text
    assert {file: file.stat().st_mtime_ns for file in config.out.rglob("*")} == before


def test_a_run_resumes_at_the_default_that_it_began_with(proxy, monkeypatch):
    config = proxy()
    with killed_at(monkeypatch, "go_on", 1):
        learn_weights(config)
    began = records.read_json(config.out / records.CONFIG)["resolved"]["mu"]
    monkeypatch.setattr("doge_fast.weights.defaults.default_mu", lambda *_: 99.0)
    assert records.read_weights(learn_weights(config).path)["mu"] == began


@pytest.mark.parametrize(("norm", "is_said"), [(1.0, True), (0, False)])
def test_two_domains_of_equal_scores_are_told_before_the_first_step(
    proxy, caplog, monkeypatch, norm, is_said
):
    def first_step(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProxyTrainer, "go_on", first_step)
    with pytest.raises(KeyboardInterrupt):
        learn_weights(proxy(domains=NAMES[:2], domain_max_grad_norm=norm))
    assert ("have equal scores" in caplog.text) is is_said


def test_one_domain_leaves_nothing_to_learn(proxy, caplog):
    run = learn_weights(proxy(domains=("code",), steps=2))
    assert run.weights == {"code": 1.0}
    assert "has one domain to train on, code" in caplog.text
