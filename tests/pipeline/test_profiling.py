"""What a step costs, taken apart, against the machine's limits; the files open elsewhere."""

import json
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

from doge_fast import cli
from doge_fast.pipeline.config import ProfileConfig
from doge_fast.profiling import profile as profiling
from doge_fast.profiling import roofline
from doge_fast.profiling.profile import PHASES, profile, profile_table
from doge_fast.profiling.roofline import bandwidth

QUICK = ProfileConfig(
    vocab_size=256, domains=2, sequences=2, sequence_length=8, steps=2, device="cpu"
)


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
def test_phases_make_up_the_step(mode):
    measured = profile(replace(QUICK, mode=mode, targets=1))
    phases = {phase.name: phase for phase in measured.phases}
    assert tuple(phases) == (*PHASES, "other")
    assert sum(phase.share for phase in measured.phases) == pytest.approx(1, abs=0.2)
    assert all(phase.milliseconds >= 0 for phase in measured.phases if phase.name != "other")
    assert phases["forward"].milliseconds > 0
    assert (phases["accumulate"].milliseconds > 0) == (mode == "sequential")
    assert measured.num_rows == 3
    assert measured.tokens == 3 * 2 * 8
    assert measured.overhead_low <= measured.overhead <= measured.overhead_high


def test_bytes_are_those_of_the_definition():
    measured = profile(replace(QUICK, domains=3))
    parameters = 4 * measured.num_parameters
    least = {phase.name: phase.num_bytes for phase in measured.phases}
    assert least["forward"] == 3 * parameters
    assert least["backward"] == 2 * least["forward"]
    assert least["gram"] == 3 * parameters + 8 * 9
    assert least["weighted_sum"] == 4 * parameters
    # A gradient is read and a row written.
    assert least["accumulate"] == 3 * 2 * parameters
    # AdamW: parameter, gradient and two moments in, all but the gradient out.
    assert least["inner_step"] == 7 * parameters


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
def test_the_aligned_rule_is_profiled(mode):
    measured = profile(replace(QUICK, mode=mode, targets=1, score="aligned"))
    parameters = 4 * measured.num_parameters
    phases = {phase.name: phase for phase in measured.phases}
    assert measured.num_rows == 6
    # Two halves of three names, which the backward passes write.
    assert phases["accumulate"].num_bytes == 0
    num_passes = {"sequential": 3, "stacked": 1}[mode]
    assert phases["backward"].num_bytes == (num_passes + 6) * parameters
    # Rows and second moments in, the combined gradient out; its norm is read.
    assert phases["gram"].num_bytes == 8 * parameters + 8 * 36
    assert phases["weighted_sum"].num_bytes == parameters
    assert all(phases[name].milliseconds > 0 for name in ("backward", "gram", "reweight"))
    # A sequential step keeps all rows. A stacked one keeps a combined gradient and fewer.
    if mode == "sequential":
        assert measured.extra_bytes == measured.row_bytes >= 6 * parameters
    else:
        assert measured.extra_bytes == measured.row_bytes + parameters


def test_other_precisions_and_models(tmp_path):
    measured = profile(replace(QUICK, dtype="bfloat16", buffer_dtype="bfloat16"))
    gram = next(phase for phase in measured.phases if phase.name == "gram")
    assert gram.num_bytes == 2 * 2 * measured.num_parameters + 8 * 4
    measured = profile(replace(QUICK, buffer_dtype="bfloat16", mode="stacked"))
    assert measured.extra_bytes == measured.row_bytes + 4 * measured.num_parameters
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaConfig(**shape, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        measured = profile(replace(QUICK, model=str(model), vocab_size=None))
        # Two embeddings of 64, four projections, three matrices of a gated MLP, three norms.
        assert measured.num_parameters == 16 * (2 * 64 + 4 * 16 + 3 * 32 + 3)


def test_small_models_have_the_vocabulary_of_the_small_tokenizers():
    small, given = (profile(replace(QUICK, model="micro", vocab_size=n)) for n in (None, 4096))
    assert small.num_parameters == given.num_parameters


def test_the_verb_prints_a_table_and_writes_its_files(tmp_path, capsys):
    record = tmp_path / "deep" / "p.json"
    words = "profile --model tiny --vocab-size 256 --domains 2 --sequences 1 --sequence-length 8"
    words += f" --steps 2 --device cpu --json {record}"
    assert cli.main(words.split()) == 0
    printed = capsys.readouterr().out
    for name in PHASES:
        assert f"\n{name} " in printed
    lines = printed.splitlines()
    assert lines[-1] == f"json: {record}"
    assert max(map(len, lines[:-1])) <= 100
    written = json.loads(record.read_text())
    assert written["schema_version"] == profiling.SCHEMA_VERSION
    assert {phase["name"] for phase in written["phases"]} == {*PHASES, "other"}
    assert written["settings"]["domains"] == 2
    assert set(written["versions"]) >= {"doge-fast", "torch", "python"}


def test_the_table_says_what_was_measured():
    measured = profile(QUICK)
    phases = tuple(replace(phase, fraction=0.5) for phase in measured.phases)
    told = profile_table(replace(measured, phases=phases))
    # Two rows of float32, one backward pass each.
    assert measured.extra_bytes == measured.row_bytes
    assert f"keeps {measured.row_bytes / 1e6:.1f} MB" in told
    assert f"{measured.overhead:.3f} [" in told
    assert "in the caches" not in told
    # A step that was faster than memory is explained: the rows of a small model never leave them.
    warm = (*phases[:-1], replace(phases[-1], fraction=1.5))
    assert "in the caches" in profile_table(replace(measured, phases=warm))


@pytest.fixture
def nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_measured", roofline._measured.__wrapped__)


@pytest.mark.usefixtures("nothing_measured_yet")
def test_the_fastest_way_counts(monkeypatch):
    """Seconds by hand: three reads, then two copies."""
    seconds = [[2.0] * 9, [1.0] * 9, [4.0] * 9, [8.0] * 4 + [4.0] + [2.0] * 4, [16.0] * 9]

    def alternated(calls: Mapping[str, object], **_: object) -> dict[str, list[float]]:
        return {name: [1e3 * s for s in each] for name, each in zip(calls, seconds, strict=True)}

    monkeypatch.setattr(roofline, "alternated", alternated)
    limits = bandwidth("cpu", 4096)
    assert limits.read == 4096 / 1.0
    # Read and written; quartiles 2 and 8 around 4.
    assert limits.copy == 2 * 4096 / 4.0
    assert limits.spread == 6 / 4


@pytest.mark.usefixtures("nothing_measured_yet")
def test_a_copy_arrives(monkeypatch):
    """What is timed as a copy is one."""
    spy = mock.Mock(wraps=roofline.weighted_sum)
    monkeypatch.setattr(roofline, "weighted_sum", spy)
    bandwidth("cpu", 4096)
    assert spy.call_count == roofline.REPEATS + 1
    assert torch.equal(spy.call_args.kwargs["out"], torch.ones(1024))
