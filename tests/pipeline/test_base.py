"""Stage two trains at the weights it was given, whoever gave them, and survives being killed."""

import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend
from transformers import AutoModelForCausalLM
from transformers import trainer as trainer_module

from doge_fast import cli
from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import base as stage_two
from doge_fast.pipeline import failures, records
from doge_fast.pipeline.base import resolve_phases, train_base
from doge_fast.pipeline.config import TemperatureConfig, TrainingConfig
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.doremi import learn_by_excess_loss
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.temperature import temperature
from doge_fast.pipeline.trainer import device_of, training_arguments
from tests.pipeline.stages import (
    NAMES,
    assert_same_run,
    interrupted_at,
    killed_at,
    words_of,
    write_weights,
)


def test_a_run_leaves_records_the_weights_used_and_a_model(trained_base):
    held = sorted(entry.name for entry in trained_base.iterdir())
    assert held == ["config.json", "metrics.jsonl", "model", "weights.json"]
    assert Run(trained_base).weights == dict.fromkeys(NAMES, 0.25)
    lines = records.read_metrics(trained_base, kind="train")
    assert [line["step"] for line in lines] == list(range(1, 9))
    # A step of warm-up, then a cosine to the minimum.
    falling = [(1 + math.cos(math.pi * place / 7)) / 2 for place in range(7)]
    expected = [0.0, *(1e-4 + (3e-3 - 1e-4) * share for share in falling)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    # 8 blocks of 16 tokens a step, a quarter each.
    assert lines[-1]["tokens"] == dict.fromkeys(NAMES, 8 * 2 * 16)
    # A mean over predicted tokens: a model that knows nothing loses about log V on each.
    assert lines[0]["loss"] == pytest.approx(math.log(320), abs=0.1)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert set(records.read_metrics(trained_base, kind="eval")[-1]["loss"]) == set(NAMES)
    AutoModelForCausalLM.from_pretrained(trained_base / "model")


def test_natural_weights_are_by_tokens(base):
    run = train_base(base(weights="natural"))
    domains = records.read_json(run.path / records.CONFIG)["corpus"]["domains"]
    total = sum(domain["train_tokens"] for domain in domains.values())
    expected = {name: domain["train_tokens"] / total for name, domain in domains.items()}
    assert run.weights == pytest.approx(expected, rel=1e-12)
    tokens = run.metrics("train")[-1]["tokens"]
    assert max(tokens, key=tokens.__getitem__) == "prose"


def test_tokens_follow_the_weights(base):
    wanted = {"code": 0.5, "prose": 0.3, "table": 0.2, "verse": 0.0}
    run = train_base(base(weights="code=0.5,prose=0.3,table=0.2,verse=0", steps=20))
    tokens = run.metrics("train")[-1]["tokens"]
    assert sum(tokens.values()) == 20 * 8 * 16
    for name, weight in wanted.items():
        # Each step's count is within one block of its share; so is their running sum or nearly.
        assert abs(tokens[name] / 16 - 20 * 8 * weight) <= 20


def test_weights_of_other_tokens_are_used_with_a_word(base, trained_base, caplog):
    train_base(base("same", steps=2, weights=str(trained_base)))
    assert "another tokenizer" not in caplog.text
    train_base(base("other", steps=2, weights=str(trained_base), vocab_size=300))
    assert f"{trained_base}: learned with another tokenizer" in caplog.text


def test_a_target_follows_its_weights(proxy, base, stage, tmp_path, caplog):
    source = learn_weights(proxy("source", target=("verse",), steps=2, mu=1e-3)).path
    search = tmp_path / "search"
    temperature(TemperatureConfig(source, search, steps=2, seeds=(0,), most_runs=3, device="cpu"))
    bounded = tmp_path / "bounded.json"
    words = ["weights", "constrain", str(source), "--cap", "0.9", "--out", str(bounded)]
    assert cli.main(words) == 0
    for number, weights in enumerate((source, search, bounded, search / "runs" / "base-1-seed0")):
        with caplog.at_level("INFO", "doge_fast"):
            run = train_base(base(f"base{number}", steps=2, weights=str(weights)))
        assert "learned for verse, which is measured and not trained on" in caplog.text
        caplog.clear()
        assert set(run.weights) == set(NAMES) - {"verse"}
        assert set(records.read_metrics(run.path, kind="eval")[-1]["loss"]) == set(NAMES)
        assert run.record["target"] == {"verse": 1.0}
    # The weights of a run that follows a run; and a domain list that leaves the target out.
    others = tuple(name for name in NAMES if name != "verse")
    named = train_base(base("named", steps=2, weights=str(source), domains=others))
    assert set(records.read_metrics(named.path, kind="eval")[-1]["loss"]) == set(NAMES)
    _, doremi = stage("doremi")
    excess = learn_by_excess_loss(doremi(reference=run.path, steps=2)).path
    assert set(records.read_metrics(excess, kind="eval")[-1]["loss"]) == set(NAMES)
    # Where the corpus has no such text it is said, and the rest is trained on.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    data = Path(base().corpus.data)
    for name in others:
        shutil.copy(data / f"{name}.jsonl", elsewhere)
    with caplog.at_level("INFO", "doge_fast"):
        train_base(base("without", steps=2, weights=str(source), data=str(elsewhere)))
    assert "learned for verse, which is not in the corpus" in caplog.text


def test_a_killed_run_goes_on_with_no_other_weights(base, monkeypatch, tmp_path):
    warned: list[str] = []
    monkeypatch.setattr(trainer_module.logger, "warning", lambda text, *_: warned.append(text))
    source = write_weights(tmp_path / "w.json", dict.fromkeys(NAMES, 0.25))
    cut = base("cut", save_every=3, weights=str(source))
    with killed_at(monkeypatch, "training_step", 6):
        train_base(cut)
    began_with = source.read_bytes()
    write_weights(source, dict(zip(NAMES, (0.7, 0.1, 0.1, 0.1), strict=True)))
    left = {file: file.read_bytes() for file in cut.out.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match="weights"):
        train_base(cut)
    assert {file: file.read_bytes() for file in left} == left
    source.write_bytes(began_with)
    train_base(cut)
    # A complete one is not what is asked for either.
    write_weights(source, dict(zip(NAMES, (0.7, 0.1, 0.1, 0.1), strict=True)))
    with pytest.raises(ValueError, match="weights"):
        train_base(cut)
    # The head, which is the embedding, is not called missing.
    assert not [text for text in warned if "missing keys" in text]


def test_a_second_launch_is_refused_while_the_first_is_at_work(base, trained_base, monkeypatch):
    config = base("shared", save_every=3)

    def launch_again() -> None:
        with pytest.raises(ValueError, match="shared"):
            train_base(config)

    with interrupted_at(monkeypatch, "training_step", 5, launch_again):
        train_base(config)
    assert_same_run(config.out, trained_base)
    assert not (config.out / records.CHECKPOINTS).exists()


def test_a_run_whose_directory_is_removed_ends_there(base, monkeypatch):
    config = base(save_every=2)
    with (
        interrupted_at(monkeypatch, "training_step", 4, lambda: shutil.rmtree(config.out)),
        pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"),
    ):
        train_base(config)
    assert not config.out.exists()


def test_of_two_launches_in_an_empty_directory_one_is_refused(base, trained_base, monkeypatch):
    """The second one passes the first between its look at the directory and its lock."""
    prepare = stage_two.base_trainer

    def overtaken(*args: Any) -> Any:
        trainer = prepare(*args)
        monkeypatch.setattr(stage_two, "base_trainer", prepare)
        train_base(base("contested"))
        return trainer

    monkeypatch.setattr(stage_two, "base_trainer", overtaken)
    with pytest.raises(ValueError, match="contested"):
        train_base(base("contested"))
    assert_same_run(base("contested").out, trained_base)


def test_what_a_launch_leaves_that_is_killed_before_it_begins_is_an_empty_directory(
    base, monkeypatch
):
    config = base()
    with monkeypatch.context() as patch:
        patch.setattr(records, "open_run", lambda *_, **__: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            train_base(config)
    assert [each.name for each in config.out.iterdir()] == ["checkpoints"]
    train_base(config)
    (config.out / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        train_base(config)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, failures.Terminated),
        (signal.SIGHUP, failures.Terminated),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_loses_nothing(
    base, trained_base, monkeypatch, number, kind
):
    config = base("cut", save_every=0)
    ending = (signal.SIGTERM, signal.SIGHUP)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, *ending)}
    for each in ending:
        signal.signal(each, failures.raise_terminated)
    try:
        with (
            interrupted_at(monkeypatch, "training_step", 4, lambda: signal.raise_signal(number)),
            pytest.raises(kind, match="step 4"),
        ):
            train_base(config)
        assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
        # In the last step it ends no run, but what would begin the next one.
        with interrupted_at(monkeypatch, "training_step", 8, lambda: signal.raise_signal(number)):
            late = train_base(replace(config, out=config.out.with_name("late")))
        assert type(failures.late.pop()) is kind
        assert_same_run(late.path, trained_base)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    train_base(config)
    assert_same_run(config.out, trained_base)


def test_a_complete_run_takes_no_more_steps_and_its_model_is_trained_further(
    base, trained_base, tmp_path, capsys
):
    config = base()
    shutil.copytree(trained_base, config.out)
    for changes in ({"steps": 11}, {"steps": 7}, {"steps": 11, "batch_size": 4}):
        with pytest.raises(ValueError, match="another run"):
            train_base(base(**changes))
    assert_same_run(config.out, trained_base)
    # As the page on resuming says.
    model, further = str(config.out / "model"), replace(config, out=tmp_path / "further")
    words = ["--model", model, "--pretrained", "--tokenizer", model, "--seed", "1"]
    typed = [*words_of(further), *words, "--weights", str(config.out)]
    assert cli.main(["base", *typed]) == 0, capsys.readouterr().err
    last, first = (
        records.read_metrics(run, kind="eval")[-1]["loss"] for run in (further.out, config.out)
    )
    assert sum(last.values()) < sum(first.values())


def test_the_trainer_is_told_what_was_asked(tmp_path):
    config = TrainingConfig(
        steps=50, weight_decay=0.02, max_grad_norm=0.7, seed=5, save_every=10, device="cpu"
    )
    args = training_arguments(config, tmp_path)
    assert (args.max_steps, args.weight_decay, args.max_grad_norm, args.seed) == (50, 0.02, 0.7, 5)
    assert args.save_strategy == "steps"
    assert args.save_steps == 10
    assert training_arguments(TrainingConfig(steps=95, device="cpu"), tmp_path).save_steps == 10
    # A twentieth of the steps.
    assert args.warmup_steps == 2
    never = TrainingConfig(save_every=0, device="cpu")
    assert training_arguments(never, tmp_path).save_strategy == "no"
    assert args.report_to == []
    assert not args.push_to_hub
    assert not args.bf16
    assert training_arguments(TrainingConfig(dtype="bfloat16", device="cpu"), tmp_path).bf16


def test_what_is_typed_holds_against_the_environment(base, trained_base, monkeypatch):
    """As `accelerate launch` leaves it: each of these would change what a step computes."""
    told = {"MIXED_PRECISION": "bf16", "GRADIENT_ACCUMULATION_STEPS": "4", "USE_FSDP": "true"}
    told |= {"DYNAMO_BACKEND": "EAGER", "USE_PARALLELISM_CONFIG": "true", "TORCH_DEVICE": "meta"}
    for name, value in told.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    config = base("told")
    trainer = stage_two.base_trainer(config, ExistingRun(None, False))
    assert trainer.accelerator.mixed_precision == "no"
    assert trainer.accelerator.gradient_accumulation_steps == 1
    assert trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    assert_same_run(train_base(config).path, trained_base)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_the_device_is_there_or_refused(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert device_of("auto").type == ("cuda" if has_gpu else "cpu")
        assert device_of("cpu").type == "cpu"
    assert device_of("cuda").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda"):
        device_of("cuda")


def test_a_curriculum_takes_the_proxys_means_stage_by_stage(proxy, base):
    source = proxy("source", steps=6, mu=0.001)
    learn_weights(source)
    lines = {line["step"]: line["alpha"] for line in records.read_metrics(source.out, kind="train")}
    config = base("curriculum", weights=str(source.out), steps=9, stages=3)
    train_base(config)
    used = records.read_weights(config.out)
    assert [each["first_step"] for each in used["stages"]] == [0, 3, 6]
    for place, stage in enumerate(used["stages"]):
        first, second = lines[2 * place + 1], lines[2 * place + 2]
        for name, weight in stage["weights"].items():
            assert weight == pytest.approx((first[name] + second[name]) / 2, rel=1e-6)
    average = records.weights_by_name(records.read_weights(source.out))
    for name, weight in records.weights_by_name(used).items():
        assert weight == pytest.approx(average[name], rel=1e-5)
    # Asked again, they are the same to the bit: a resumed run has the weights it began with.
    again = resolve_phases(config, load_corpus(config.corpus))
    assert again == tuple(Phase(each["first_step"], each["weights"]) for each in used["stages"])
