"""The benchmarks of whole steps, on models of a few thousand parameters."""

import json
import math
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import memory, models, optimizer_step, peers, protocol, stacked, steps
from benchmarks.models import PAPER, Shape
from benchmarks.stacked import FusedStep, Head
from benchmarks.steps import DogeStep, Problem
from doge_fast.distributed import exchange
from doge_fast.pipeline.sizes import SIZES

TINY = Shape(1, 2, 32, 64, 16)
PROBLEM = Problem(TINY, 3, 6)


def test_the_papers_sizes_are_the_familys():
    for name, shape in PAPER.items():
        assert (shape.num_layers, shape.num_heads, shape.width) == tuple(SIZES[name])
        nominal = float(name.removesuffix("M")) * 1e6
        assert models.num_parameters(shape) == pytest.approx(nominal, rel=0.02)


def test_fresh_weights_know_nothing():
    model = models.build(TINY, "cpu")
    assert sum(p.numel() for p in model.parameters()) == models.num_parameters(TINY)
    tokens = models.domain_batches(TINY, 1, 2, "cpu")["domain0"]
    loss = models.loss_of(model, tokens)
    assert float(loss.detach()) == pytest.approx(torch.tensor(64.0).log().item(), rel=0.05)
    torch.testing.assert_close(models.token_losses(model, tokens).mean(), loss)


def test_sequences_are_dealt_out_evenly():
    found = models.domain_batches(TINY, 7, 128, "cpu")
    assert sorted(len(tokens) for tokens in found.values()) == [18] * 5 + [19] * 2
    assert len(models.domain_batches(TINY, 50, 128, "cpu")) == 50
    with pytest.raises(ValueError, match="got 2 sequences for 3 domains"):
        models.domain_batches(TINY, 3, 2, "cpu")


def test_the_sum_of_losses_is_that_of_the_domains():
    model = models.build(TINY, "cpu")
    batches = models.domain_batches(TINY, 3, 7, "cpu")
    sizes = [len(tokens) for tokens in batches.values()]
    whole = models.sum_of_losses(model, torch.cat(list(batches.values())), sizes)
    apart = torch.stack([models.loss_of(model, tokens) for tokens in batches.values()])
    torch.testing.assert_close(whole, apart.sum())


def test_flops_are_six_per_weight_and_token():
    shape = PAPER["124M"]
    weights = models.num_parameters(shape) - shape.sequence * shape.width
    attention = 6 * shape.num_layers * shape.width * shape.sequence
    # Norms and biases are in no product.
    assert shape.flops_per_token == pytest.approx(6 * weights + attention, rel=2e-3)
    assert models.utilisation(shape, 65_536, 100.0, "cpu") is None


@pytest.mark.parametrize(
    "options",
    [{}, {"autocast": "bfloat16"}, {"buffer_dtype": "bfloat16"}, {"mode": "stacked"}],
    ids=str,
)
def test_a_row_of_the_step_benchmark(options):
    problem = Problem(TINY, 3, 6, bar=100.0, **options)
    row = optimizer_step.measure(problem, "cpu", pairs=2, with_memory=False)
    assert row["verdict"] == "met"
    assert 0 < row["low"] <= row["ratio"] <= row["high"]
    assert str(problem) in optimizer_step.line(row)
    assert optimizer_step.verdict(row | {"bar": 0.0}) == "missed"


def test_memory_is_given_back_between_the_sides(monkeypatch):
    spied = mock.Mock()
    for module, name in ((steps, "check"), (optimizer_step, "paired"), (protocol, "release")):
        spied.attach_mock(mock.Mock(wraps=getattr(module, name)), name)
        monkeypatch.setattr(module, name, getattr(spied, name))
    optimizer_step.measure(PROBLEM, "cpu", pairs=2, with_memory=False)
    # After the check, and before what waits for the host is looked for.
    called = [name for name, *_ in spied.mock_calls]
    assert called == ["check", "release", "paired", "release"]


@pytest.mark.parametrize(
    ("place", "factor", "off"), [(0, 1.5, r"\d"), (0, math.nan, "inf"), (-1, math.nan, "inf")]
)
def test_a_wrong_gradient_is_not_timed(place, factor, off, monkeypatch):
    right = exchange.weighted_gradients

    def wrong(*args: Any, **options: Any) -> list[torch.Tensor]:
        sums = list(right(*args, **options))
        sums[place] = sums[place] * factor
        return sums

    monkeypatch.setattr(exchange, "weighted_gradients", wrong)
    with pytest.raises(RuntimeError, match=f"off by {off}.*; nothing is timed"):
        optimizer_step.measure(PROBLEM, "cpu", pairs=2)


@pytest.mark.exhaustive
def test_the_command_measures_what_it_is_asked(tmp_path, capsys, monkeypatch):
    out = tmp_path / "steps.json"
    problem = Problem(Shape(1, 1, 64, 64, 128), 2, 2)
    monkeypatch.setattr(optimizer_step, "CPU_PROBLEMS", (problem,))
    optimizer_step.main(f"--device cpu --pairs 2 --json {out}".split())
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert row["buffer_bytes"] == 2 * row["parameters"] * 4
    # The buffer is there; what else a process of this size holds is noise beside the model.
    assert row["extra_bytes"] > 0.5 * row["buffer_bytes"]
    assert "peak memory over plain" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_what_breaks_in_the_other_process_is_said():
    arguments = steps.arguments_of("plain", PROBLEM)
    with pytest.raises(RuntimeError, match=r"memory of benchmarks\.peers:make failed: KeyError"):
        memory.peak_bytes("benchmarks.peers:make", arguments, "cpu")


def test_given_gradients_make_a_step_that_repeats_itself():
    # What the comparison with a captured step rests on.
    first, second = steps._Directed(3, "cpu"), steps._Directed(3, "cpu")
    for each in (first, second):
        each()
    assert all(map(torch.equal, first.params, second.params))
    moved = first.optimizer.alpha
    assert not torch.equal(moved, torch.full_like(moved, 1 / 3))


@pytest.mark.exhaustive
def test_every_peer_finds_the_truth():
    rows = peers.measure(PROBLEM, "cpu", pairs=2, seconds=0.0, with_memory=False)
    assert [row["peer"] for row in rows] == list(peers.PEERS)
    assert max(map(len, peers.table(rows, PROBLEM).splitlines())) <= 100
    # The first has no Gram matrix; others need packages.
    for row in rows[1:]:
        if peers.unavailable_reason(row["peer"]) is None:
            assert "reason" not in row, row
            assert row["gradient_error"] < 1e-5, row
            assert row["ratio"] > 0
            # It drops the products between the two uses of a tied matrix; that is its row's point.
            least, most = (1e-4, 0.5) if row["peer"] == "TorchJD autogram" else (-1.0, 1e-5)
            assert least < row["gram_error"] < most, row


def test_a_peer_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.unavailable_reason("TorchJD autojac") == "the package torchjd is not installed"
    unequal = Problem(TINY, 3, 7)
    (row,) = peers.measure(unequal, "cpu", names=["torch.func.vmap"], pairs=2, with_memory=False)
    assert "7 sequences do not go into 3" in row["reason"]
    assert "7 sequences" in peers.table([row], unequal)


@pytest.mark.exhaustive
def test_peers_memory_and_record(tmp_path, monkeypatch):
    out = tmp_path / "peers.json"
    monkeypatch.setattr(peers, "CPU_PROBLEM", Problem(Shape(1, 1, 64, 256, 16), 2, 2))
    sizes = "--domains 2 --sequences 2"
    arguments = f"--device cpu --pairs 2 --seconds 0 --json {out} {sizes}".split()
    peers.main([*arguments, "--peers", "plain training", "doge_fast"])
    plain, ours = json.loads(out.read_text())["rows"]
    assert plain["extra_bytes"] == 0
    assert ours["extra_bytes"] > 0


def outcome(**changes: Any) -> peers.Outcome:
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    return peers.Outcome(**{"gram_KK": None, "alpha_K": weights} | changes)


def test_errors_are_against_float64():
    truth = peers.Truth(PROBLEM, "cpu")
    assert truth.rows_KN.dtype == torch.float64
    param = torch.zeros(truth.rows_KN.shape[1], requires_grad=True)
    param.grad = truth.rows_KN.mean(0).float()
    found = truth.errors(outcome(gram_KK=truth.gram_KK * 1.01), [param])
    assert found["gradient_error"] < 1e-7
    assert found["gram_error"] == pytest.approx(0.01)
    param.grad *= 1.1
    assert truth.errors(outcome(), [param])["gradient_error"] == pytest.approx(0.1)


def test_many_logits_are_taken_one_domain_at_a_time(monkeypatch):
    plain = steps.PlainStep(Problem(TINY, 3, 7, mode=steps.STACKED), "cpu")
    at_once = plain.sum_of_losses()
    monkeypatch.setattr(models, "MOST_LOGITS_BYTES", 0)
    torch.testing.assert_close(plain.sum_of_losses(), at_once)


def test_the_fused_step_is_the_stacked_step():
    problem = Problem(TINY, 3, 6, mode=steps.STACKED)
    alphas = []
    for side in (DogeStep, FusedStep):
        step = side(problem, "cpu")
        step()
        alphas.append(step.optimizer.alpha)
    torch.testing.assert_close(*alphas, rtol=1e-6, atol=0)


def test_both_heads_give_the_same_gradients():
    for ours, theirs in zip(
        Head(True, 3, 5, 8, 40, "cpu")(), Head(False, 3, 5, 8, 40, "cpu")(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.exhaustive
def test_the_command_of_stacked_steps_prints_and_records(tmp_path, monkeypatch, capsys):
    problem = Problem(TINY, 3, 6, mode=steps.STACKED, bar=0.001)
    monkeypatch.setattr(stacked, "CPU_PROBLEMS", (problem,))
    monkeypatch.setattr(stacked, "CPU_HEADS", ((3, 5, 8, 40),))
    out = tmp_path / "stacked.json"
    stacked.main(["--device", "cpu", "--pairs", "3", "--json", str(out)])
    printed = capsys.readouterr().out
    assert "(bar 0.001: missed), over one domain after another" in printed
    assert "fused / naive = " in printed
    record = json.loads(out.read_text())
    (row,), (head,) = record["rows"], record["heads"]
    assert row["over_plain"]["pairs"] == 3
    assert row["plain_peak_bytes"] >= row["plain_resting_bytes"] > 0
    assert row["rows_bytes"] == 3 * 4 * stacked.models.num_parameters(TINY)
    assert row["memory_verdict"] in ("met", "missed")
    assert head["fused_peak_bytes"] > 0


@pytest.mark.parametrize("factor", [2.0, math.nan])
def test_a_wrong_head_is_not_timed(factor, monkeypatch):
    right = Head.__call__

    def wrong(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden, of_weight = right(head)
        return of_hidden, of_weight * factor if head.is_fused else of_weight

    monkeypatch.setattr(Head, "__call__", wrong)
    with pytest.raises(RuntimeError, match="gradients of the head are off"):
        stacked.measure_head((3, 5, 8, 40), "cpu", pairs=1, with_memory=False)
