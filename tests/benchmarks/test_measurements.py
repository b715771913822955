"""What is timed computes the right thing, and cold; models have the size that they are named by."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import anchor, cases, models, operators, optimizer_step, peers, problems, protocol
from benchmarks.models import PAPER, Shape
from benchmarks.predicted import rows_traffic
from benchmarks.problems import MATRIX, Arena
from benchmarks.steps import Problem
from doge_fast.distributed import exchange
from doge_fast.profiling.roofline import Bandwidth, Traffic
from doge_fast.weights.aligned import Aligned
from doge_fast.weights.reweight import MirrorStep

RESULTS = Path(optimizer_step.__file__).parent / "results"
TINY = Shape(1, 2, 32, 64, 16)
PROBLEM = Problem(TINY, 3, 6)


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(torch.float32, 4_000_000, "cpu")


@pytest.mark.parametrize(
    "make", [make for operator in operators.BY_SHAPE.values() for make in operator]
)
@pytest.mark.parametrize("shape", problems.SHAPES)
def test_plain_formulations_compute_the_same(make, shape, arena):
    case = make(arena, arena.problem(7, shape), ["torch"])
    for name, call in case.plain.items():
        # A float32 sum of all columns is what some of them are.
        assert case.error(call) < 1e-3, name


def test_wrong_operator_is_not_timed(arena):
    case = cases.gram_case(arena, arena.problem(2, MATRIX), ["torch"])
    right = case.ours["torch"]
    case.ours = {
        "wrong": lambda: right() * (1 + 1e-5),
        "nan": lambda: right() * math.nan,
        "broken": lambda: 1 / 0,
    }
    for row in operators.measure(case, rounds=1, seconds=0.0):
        assert not row["correct"]
        assert "ms" not in row


@pytest.mark.parametrize(("place", "factor"), [(0, 1.5), (-1, math.nan)])
def test_step_with_a_wrong_gradient_is_not_timed(place, factor, monkeypatch):
    right = exchange.weighted_sum

    def wrong(*args, out):
        right(*args, out=out)
        out[place].mul_(factor)

    monkeypatch.setattr(exchange, "weighted_sum", wrong)
    with pytest.raises(RuntimeError, match="timed"):
        optimizer_step.measure(PROBLEM, "cpu", pairs=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_anchor_is_the_fastest_of_what_was_tried(monkeypatch):
    # Compiling by inductor takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(anchor, "TRIALS", 2)
    row = anchor.measure(Problem(TINY, 3, 6, mode="stacked", bar=1e9), "cpu", pairs=3)
    assert row["candidates_ms"][row["plain"]] == min(row["candidates_ms"].values())
    assert row["gradient_error"] < 1e-5
    assert row["verdict"] == "met"
    assert "over the fastest plain step: stacked" in anchor.line(row)


def test_samples_that_fit_the_cache_are_made_cold():
    cache = protocol.last_cache_bytes("cpu")
    assert protocol.cold(protocol.CACHES_FOR_COLD * cache) is None
    assert protocol.cold(1) is not None


def test_models_have_the_size_that_the_paper_names():
    for name, shape in PAPER.items():
        nominal = float(name.removesuffix("M")) * 1e6
        assert models.num_parameters(shape) == pytest.approx(nominal, rel=0.02)


def test_the_table_of_the_aligned_rule_on_a_gpu_follows_from_bytes():
    """From the record of an H100, the model of bytes, and the sizes of the paper's 124M."""
    record = json.loads(next(RESULTS.glob("gpu-nvidia-h100-*-steps.json")).read_text("utf-8"))
    limits = Bandwidth(1e9 * record["read_gb_per_s"], 1e9 * record["copy_gb_per_s"], 0.0)
    shape, gradient_bytes = PAPER["124M"], 4 * models.num_parameters(PAPER["124M"])
    embeddings = (shape.vocab_size + shape.sequence) * shape.width
    row_bytes = gradient_bytes // 2 + 2 * embeddings
    page = (RESULTS.parent / "README.md").read_text("utf-8")
    for row in record["sections"]["steps"]["rows"]:
        if (row["model"], row["mode"]) != ("124M", "stacked"):
            continue
        num_domains = row["domains"]
        paper, aligned = (
            rows_traffic(
                rule, num_domains, row_bytes=row_bytes, gradient_bytes=gradient_bytes
            ).values()
            for rule in (MirrorStep, Aligned)
        )
        moved = [sum(map(sum, phases)) / 1e9 for phases in (paper, aligned)]
        times = [1e3 * sum(each.seconds(limits) for each in part) for part in (paper, aligned)]
        more = times[1] - times[0]
        rows = num_domains * row_bytes / 1e9
        line = f"| {num_domains} | {rows:.1f} | {2 * rows:.1f} | {moved[0]:.1f} | {moved[1]:.1f} | "
        assert f"{line}{more:.1f} | {1 + more / row['variant_ms']:.3f} |" in page


def test_what_is_written_alone_takes_time():
    limits = Bandwidth(read=4.0, copy=2.0, spread=0.0)
    assert Traffic(0, 8).seconds(limits) == 4.0
    assert Traffic(8, 0).seconds(limits) == 2.0
    assert Traffic(12, 4).seconds(limits) == 4.0 + 2.0
    assert Traffic(4, 12).seconds(limits) == 8.0


def test_a_difference_below_that_of_two_plain_steps_is_noise():
    def row(peer: str, ratio: float, low: float, high: float) -> peers.Row:
        return {"peer": peer, "ratio": ratio, "low": low, "high": high}

    rows = [row(peers.PLAIN, 1.01, 0.97, 1.04), row("a", 0.97, 0.9, 1.0), row("b", 1.05, 1.0, 1.1)]
    assert peers.noise(rows) == pytest.approx(0.04)
    lines = peers.table(rows, PROBLEM).splitlines()[-3:]
    assert ["noise" in line for line in lines] == [True, True, False]
    assert peers.noise(rows[1:]) == 0


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_every_peer_finds_the_truth():
    for row in peers.measure(PROBLEM, "cpu", pairs=2, seconds=0.0, with_memory=False)[1:]:
        if peers.unavailable_reason(row["peer"]) is None:
            assert row["gradient_error"] < 1e-5, row
            # It drops the products between the two uses of a tied matrix; that is its row's point.
            least, most = (1e-4, 0.5) if row["peer"] == "TorchJD autogram" else (-1.0, 1e-5)
            assert least < row["gram_error"] < most, row
