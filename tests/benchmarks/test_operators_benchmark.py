"""The benchmarks of the operators, on problems of a megabyte."""

import functools
import json
import math
import time
from typing import Any

import pytest
import torch

from benchmarks import cases, operators, problems
from benchmarks.problems import BLOCKS, MATRIX, Arena
from benchmarks.protocol import Call

SMALL_BYTES = 4_000_000


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(torch.float32, SMALL_BYTES, "cpu")


@pytest.mark.parametrize("num_rows", problems.NUM_ROWS)
@pytest.mark.parametrize("shape", problems.SHAPES)
@pytest.mark.parametrize("dtype", problems.DTYPES, ids=str)
def test_problems_fill_the_memory_they_are_given(dtype, shape, num_rows, monkeypatch):
    # What the memory holds is not looked at.
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, generator: self)
    arena = Arena(dtype, 8_000_000, "cpu")
    problem = arena.problem(num_rows, shape)
    blocks = arena.blocks(problem)
    assert [block.shape for block in blocks] == [(num_rows, size) for size in problem.sizes]
    assert problem.num_bytes <= 8_000_000
    if shape == MATRIX:
        assert problem.num_bytes > 0.5 * 8_000_000
    sizes = [out.numel() for out in arena.outputs(problem.sizes)]
    assert sizes == list(problem.sizes)


def test_too_little_memory_is_said():
    with pytest.raises(ValueError, match="hold no model of 128 rows; the smallest takes"):
        Arena(torch.float32, 100_000, "cpu").problem(128, BLOCKS)


@pytest.mark.parametrize("make", [cases.gram_case, cases.weighted_sum_case])
@pytest.mark.parametrize("shape", problems.SHAPES)
def test_every_plain_formulation_computes_the_same(make, shape, arena):
    case = make(arena, arena.problem(7, shape), ["torch"])
    assert len(case.plain) >= 2
    for name, call in case.plain.items():
        # A float32 sum of all columns is what some of them are.
        assert case.error(call) < 1e-3, name


def test_every_plain_accumulation_computes_the_same(arena):
    for add in (False, True):
        case = cases.accumulate_case(arena, ["torch"], add=add)
        for call in [*case.plain.values(), *case.ours.values()]:
            assert case.error(call) <= case.tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_segments_are_compared_and_their_traffic_counted(dtype):
    arena = Arena(dtype, SMALL_BYTES, "cpu")
    case = cases.segment_sum_case(arena, 7, ["cpp", "torch"])
    # A CPU calls none of ours elsewhere.
    assert list(case.ours) == ["torch"]
    for call in [*case.ours.values(), *case.plain.values()]:
        assert case.error(call) <= case.tolerance
    ours = case.ours["torch"]
    assert case.error(lambda: ours(add=True)) == math.inf
    num_tokens = 7 * case.problem.num_columns // 768
    assert 2 * 768 * num_tokens <= len(arena.values)
    out_bytes = 7 * 768 * max(4, dtype.itemsize)
    assert case.num_bytes == num_tokens * (2 * 768 * dtype.itemsize + 8) + out_bytes


def test_traffic_and_arithmetic_are_counted(arena):
    problem = arena.problem(7, MATRIX)
    columns = problem.num_columns
    gram = cases.gram_case(arena, problem, ["torch"])
    assert gram.num_bytes == 7 * columns * 4
    # 28 pairs, a product and a sum each.
    assert gram.flops == 28 * 2 * columns
    total = cases.weighted_sum_case(arena, problem, ["torch"])
    assert (total.num_bytes, total.flops) == (8 * columns * 4, 14 * columns)
    add = cases.accumulate_case(arena, ["torch"], add=True)
    assert add.num_bytes == 3 * add.problem.num_columns * 4
    halves = Arena(torch.bfloat16, SMALL_BYTES, "cpu")
    widened_gram = cases.gram_case(halves, halves.problem(7, MATRIX), ["torch"])
    assert widened_gram.flops == 28 * 2 * widened_gram.problem.num_columns
    # Each element once, at the price of a product and a sum.
    assert widened_gram.widening_flops == 7 * 2 * widened_gram.problem.num_columns
    widened = cases.accumulate_case(
        Arena(torch.bfloat16, SMALL_BYTES, "cpu"), ["torch"], add=True, row_dtype=torch.float32
    )
    assert widened.num_bytes == 10 * widened.problem.num_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_is_measured_by_the_fastest_product(monkeypatch, dtype):
    """One of the type that rows are multiplied in, and none that torch has is faster."""
    seen: list[tuple[float, Call]] = []

    def recorded(call: Call, device: torch.device) -> float:
        seen.append((-float(len(seen)), call))
        return seen[-1][0]

    monkeypatch.setattr(operators, "_warm_ms", recorded)
    monkeypatch.setattr(operators, "YARDSTICK_SIZE", {"cpu": 16})
    product = operators.square_product.__wrapped__(torch.device("cpu"), dtype)
    assert product.flops == 2 * 16**3
    assert product.call is min(seen, key=lambda each: each[0])[1]
    widened = torch.promote_types(dtype, torch.float32)
    assert product.dtype in {widened, dtype} - (
        {torch.float16} if dtype == torch.float16 else set()
    )
    result = product.call()
    assert isinstance(result, torch.Tensor)
    assert result.shape == (16, 16)


def test_wrong_is_not_timed(arena):
    case = cases.gram_case(arena, arena.problem(2, MATRIX), ["torch"])
    right = case.ours["torch"]
    case.ours = {"wrong": lambda: right() * (1 + 1e-5), "broken": lambda: 1 / 0}
    rows = operators.measure(case, rounds=1, seconds=0.0)
    assert [row["correct"] for row in rows] == [False, False]
    assert all("ms" not in row and row["bar"] == "missed: wrong, not timed" for row in rows)
    assert "off by 1.0e-05" in rows[0]["problem"]
    assert "ZeroDivisionError" in rows[1]["problem"]
    assert "WRONG" in operators.format_row(rows[0])


def test_slow_plain_torch_is_run_once(arena, monkeypatch):
    case = cases.gram_case(arena, arena.problem(2, MATRIX), ["torch"])
    calls: list[float] = []

    def after(seconds: float) -> object:
        calls.append(seconds)
        return case.ours["torch"]()

    case.plain = {str(seconds): functools.partial(after, seconds) for seconds in (1.5, 0.5)}
    # A clock that only these move.
    monkeypatch.setattr(time, "perf_counter", lambda: sum(calls))
    plain, found = operators._fastest_plain(case)
    assert plain == "0.5"
    assert (found["1.5"]["ms"], found["0.5"]["ms"]) == (1500, 500)
    assert calls == [1.5, 0.5, 0.5]


def test_what_misses_a_bar_is_measured_on(arena, monkeypatch):
    case = cases.gram_case(arena, arena.problem(2, MATRIX), ["torch"])
    monkeypatch.setattr(operators, "_verdict", lambda row: verdicts[len(seen) - 1])
    seen: list[int] = []
    judged = operators._judged

    def counted(case: Any, results: Any, times: dict[str, list[float]], *rest: Any) -> Any:
        seen.append(len(times["ours torch"]))
        return judged(case, results, times, *rest)

    monkeypatch.setattr(operators, "_judged", counted)
    verdicts = ["missed: by luck", "met"]
    operators.measure(case, rounds=4, seconds=60.0)
    assert seen == [4, 8]
    seen.clear()
    verdicts = ["missed: always"] * operators.MOST_ATTEMPTS
    (row,) = operators.measure(case, rounds=4, seconds=60.0)
    assert seen == [4, 8, 12]
    assert row["bar"] == "missed: always"


def test_not_a_number_is_no_small_error():
    exact = [torch.ones(3, dtype=torch.float64)]
    assert cases.relative_error([torch.tensor([1.0, math.nan, 1.0])], exact) == math.inf
    assert cases.relative_error([torch.tensor([1.0, math.inf, 1.0])], exact) == math.inf
    assert cases.relative_error([torch.tensor([1.0, 1.5, 1.0])], exact) == 0.5


def limited(**changes: Any) -> dict[str, Any]:
    row = {"roof": "memory", "fraction": [0.9, 0.8, 0.95], "yardstick": "copy_", "plain": "mm"}
    return row | {"over_plain": [0.5, 0.4, 0.6]} | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "met"),
        ({"fraction": [0.84, 0.8, 0.9]}, "missed: 0.84 of the bandwidth of copy_"),
        ({"fraction": [0.3, 0.3, 0.3], "roof": "compute"}, "met"),
        ({"fraction": [0.7, 0.7, 0.7], "roof": "both", "of_bandwidth": 0.6}, "met"),
        (
            {"fraction": [0.7, 0.7, 0.7], "roof": "both", "of_bandwidth": 0.7},
            "missed: 0.70 of the bandwidth of copy_",
        ),
        ({"over_plain": [1.2, 1.1, 1.3]}, "missed: 1.20 times mm"),
        # Equals differ by luck.
        ({"over_plain": [1.02, 0.98, 1.1]}, "met"),
    ],
)
def test_bars(changes, expected):
    assert operators._verdict(limited(**changes)) == expected


def test_the_roof_is_the_slower_of_memory_and_arithmetic(arena, monkeypatch):
    case = cases.gram_case(arena, arena.problem(7, MATRIX), ["torch"])
    monkeypatch.setattr(operators.protocol, "last_cache_bytes", lambda device: 0)
    # The yardstick reads the same bytes in 1 ms; ours takes 4.
    row = operators._limits(case, [4.0] * 3, "torch.sum", case.num_bytes, [1.0] * 3)
    assert (row["roof"], row["fraction"][0]) == ("memory", 0.25)
    # A product of twice the flops takes 4 ms: the arithmetic of ours would take 2.
    slower = row | operators._arithmetic(row, 0.5, [4.0] * 3, [4.0] * 3)
    assert (slower["roof"], slower["fraction"][0], slower["of_bandwidth"]) == ("compute", 0.5, 0.25)
    faster = row | operators._arithmetic(row, 0.5, [4.0] * 3, [1.0] * 3)
    assert (faster["roof"], faster["fraction"][0]) == ("memory", 0.25)
    # 1.1 ms beside a read of 1 ms, and 0.9 ms.
    above = row | operators._arithmetic(row, 0.55, [4.0] * 3, [2.0] * 3)
    assert (above["roof"], above["fraction"][0], above["of_bandwidth"]) == ("both", 0.275, 0.25)
    below = row | operators._arithmetic(row, 0.45, [4.0] * 3, [2.0] * 3)
    assert (below["roof"], below["fraction"][0]) == ("both", 0.25)


@pytest.mark.exhaustive
def test_the_table_and_the_record(tmp_path, capsys):
    out = tmp_path / "operators.json"
    arguments = f"--device cpu --megabytes 1 --rows 7 --rounds 3 --seconds 0.02 --json {out}"
    assert operators.main([*arguments.split(), "--dtypes", "float32"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("bars met")[0].splitlines())) <= 100
    record = json.loads(out.read_text())
    # Of the others a CPU has plain torch alone.
    found = {row["operator"] for row in record["rows"]}
    assert found == {*operators.OPERATORS} - {"reweight", "segment_sum"}
    assert {"device", "threads", "torch", "commit"} <= record.keys()
    for row in record["rows"]:
        assert row["error"] <= row["tolerance"]
        assert row["ms"] > 0
        assert row["over_plain"][1] <= row["over_plain"][0] <= row["over_plain"][2]
        assert row["plain_formulations"][row["plain"]]["ms"] > 0
