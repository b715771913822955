"""The operators against the machine's limits and against the best plain torch has.

    python -m benchmarks.operators
    python -m benchmarks.operators --device cuda --megabytes 8000 --json results.json

Every row is checked against float64 before it is timed. In each round run, in changing order:
ours, the fastest of plain torch's formulations, and a plain read (copy) of the same memory.
See README.md beside this file for the columns.
"""

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, protocol
from benchmarks.cases import Case
from benchmarks.problems import DTYPES, NUM_ROWS, SHAPES, Arena
from doge_fast.alternation import Call, Ratio, alternated, cycles_to_hide, ratio_of, timed_ms

Row = dict[str, Any]

MEMORY, COMPUTE, BOTH, CALL = "memory", "compute", "both", "call"
# Floors closer than this bind together: one must hide the other to the last.
RIDGE = 1.25
# Of the bandwidth of a plain read or copy, where memory is the limit.
FRACTION_BAR = 0.85
# Plain torch of ours beside a faster implementation is measured, not judged.
FALLBACK = "fallback"
# What misses a bar is measured on, as long again each time; all samples count.
MOST_ATTEMPTS = 3
# Plain torch that takes longer is run once: a product of very long rows may use few processors.
SLOW_MS = 1000.0
# Calls in one sample of what takes microseconds.
CALLS_PER_SAMPLE = 50
# One product of this many rows and columns; larger where the arithmetic is faster.
YARDSTICK_SIZE = {"cpu": 1024, "cuda": 8192}
# Below this arithmetic is no limit anywhere, and its yardstick need not run.
MIN_FLOPS_PER_BYTE = 1.0
# {operator: its cases}, for each shape and number of rows, or for each number of domains.
BY_SHAPE = {
    "gram": (cases.gram_case, cases.metric_case, cases.halves_case),
    "weighted_sum": (cases.weighted_sum_case,),
    "gram_and_sum": (cases.gram_and_sum_case,),
}
BY_NUMBER = {"segment_sum": cases.segment_sum_case}
# The K x K steps, float64 alone.
RULES = {"reweight": cases.reweight_case, "align": cases.align_case}
OPERATORS = (*BY_SHAPE, "accumulate", "cross_entropy", *BY_NUMBER, *RULES)


def all_cases(
    device: torch.device | str,
    *,
    num_bytes: int,
    operators: Sequence[str] = OPERATORS,
    num_rows: Sequence[int] = NUM_ROWS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    shapes: Sequence[str] = SHAPES,
    with_fallback: bool = False,
) -> Iterator[Case]:
    """Every case, made when its turn comes, since each dtype fills the memory anew.

    Args:
        num_bytes: of the rows.
        with_fallback: with our plain torch among ours.
    """
    names = cases.timed_implementations(device, with_torch=with_fallback)
    for dtype in dtypes if set(operators) - set(RULES) else ():
        arena = Arena(dtype, num_bytes, device)
        yield from _cases_of(arena, names, operators, num_rows, shapes)
        del arena
    for make, each in itertools.product(
        (RULES[name] for name in RULES if name in operators), num_rows
    ):
        case = make(each, device, names)
        # On a CPU plain torch is all there is.
        if case.ours:
            yield case


def _cases_of(
    arena: Arena,
    names: Sequence[str],
    operators: Sequence[str],
    num_rows: Sequence[int],
    shapes: Sequence[str],
) -> Iterator[Case]:
    for operator in filter(operators.__contains__, BY_SHAPE):
        for make, shape, each in itertools.product(BY_SHAPE[operator], shapes, num_rows):
            yield make(arena, arena.problem(each, shape), names)
    if arena.dtype == torch.float32:
        small = cases.bias_cases(arena, names)
        yield from (case for case in small if case.operator in operators)
    if "accumulate" in operators:
        for add in (False, True):
            yield cases.accumulate_case(arena, names, add=add)
        if arena.dtype == torch.bfloat16:
            yield cases.accumulate_case(arena, names, add=False, row_dtype=torch.float32)
            yield cases.accumulate_case(arena, names, add=True, row_dtype=torch.float32)
    if "cross_entropy" in operators:
        case = cases.cross_entropy_case(arena, names)
        # On a CPU plain torch is all there is.
        if case.ours:
            yield case
    for operator in filter(operators.__contains__, BY_NUMBER):
        for each in num_rows:
            case = BY_NUMBER[operator](arena, each, names)
            # On a CPU plain torch is all there is.
            if case.ours:
                yield case


def measure(case: Case, *, rounds: int, seconds: float, attempts: int = MOST_ATTEMPTS) -> list[Row]:
    """One row per implementation of ours; without times where it is wrong.

    Args:
        rounds: at most, of one attempt.
        seconds: of one attempt.
        attempts: how often what misses a bar is measured on; 1: the first samples count alone.
    """
    results = {name: checked(case, call) for name, call in case.ours.items()}
    right = {name: call for name, call in case.ours.items() if results[name]["correct"]}
    if not right:
        return [_row(case, name, result) for name, result in results.items()]
    plain, screened = _fastest_plain(case)
    yardstick, yardstick_bytes = fastest_yardstick(case)
    calls = {f"ours {name}": call for name, call in right.items()}
    if plain is not None:
        calls["plain"] = case.plain[plain]
    if yardstick is not None:
        calls["yardstick"] = case.yardsticks[yardstick][0]
    product = square_product(case.device, case.problem.dtype)
    flops = case.flops
    if product.dtype != case.problem.dtype:
        flops += case.widening_flops
    in_products = flops / product.flops
    if yardstick is not None and flops > MIN_FLOPS_PER_BYTE * case.num_bytes:
        calls["product"] = product.call
    if case.is_small:
        calls = {name: _repeated(call) for name, call in calls.items()}
    before = None if case.is_small else protocol.cold(case.num_bytes, case.device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    num_calls = CALLS_PER_SAMPLE if case.is_small else 1
    rows: list[Row] = []
    for _ in range(attempts):
        more = alternated(
            calls,
            rounds=rounds,
            device=case.device,
            before=before,
            seconds=seconds,
            # The price of a call is the host's, and nothing else is asked of what is small.
            hide_host=not case.is_small,
        )
        for name, each in more.items():
            times[name] += [ms / num_calls for ms in each]
        rows = _judged(
            case, results, times, yardstick, yardstick_bytes, plain, screened, in_products
        )
        if all(row["bar"] in ("met", FALLBACK) or "ms" not in row for row in rows):
            break
    return rows


def _judged(
    case: Case,
    results: dict[str, Row],
    times: dict[str, list[float]],
    yardstick: str | None,
    yardstick_bytes: int,
    plain: str | None,
    screened: Row,
    in_products: float,
) -> list[Row]:
    """A row per implementation from all samples so far."""
    rows = []
    num_right = sum(f"ours {name}" in times for name in results)
    for name, result in results.items():
        row = _row(case, name, result)
        if f"ours {name}" in times:
            ours_ms = times[f"ours {name}"]
            row |= _limits(case, ours_ms, yardstick, yardstick_bytes, times.get("yardstick"))
            if "fraction" in row and "product" in times:
                row |= _arithmetic(row, in_products, ours_ms, times["product"])
            row |= _comparison(ours_ms, plain, screened, times.get("plain"))
            is_fallback = name == "torch" and num_right > 1
            row["bar"] = FALLBACK if is_fallback else _verdict(row)
        rows.append(row)
    return rows


def print_rows(rows: Iterable[Row]) -> None:
    """The table, a heading per operator, dtype and shape; it fits in 100 columns."""
    heading = None
    for row in rows:
        current = _heading(row)
        if current != heading:
            heading = current
            print(f"\n{heading}\n{HEADER}")
        print(format_row(row), flush=True)


HEADER = (
    f"{'K':>4} {'N':>7} {'ours':<7}{'ms':>8} {'GB/s':>6}  {'of the roof':<19}"
    f"{'best plain torch':<25}{'ours / it':<12}bar"
)


def format_row(row: Row) -> str:
    """One line of the table."""
    start = f"{row['rows']:>4} {_short(row['columns']):>7} {row['implementation']:<7}"
    if "ms" not in row:
        return f"{start} WRONG: {row['problem']}"
    roof = row["roof"]
    of_roof = f"{_spread(row['fraction'])} {roof}" if "fraction" in row else roof
    plain, over = "none", ""
    if "over_plain" in row:
        plain = f"{row['plain']} ({_error(row['plain_error'])})"
        over = _spread(row["over_plain"])
    gigabytes = f"{row['gigabytes_per_s']:>6.1f}" if roof != CALL else " " * 6
    line = f"{start}{row['ms']:>8.3f} {gigabytes}  {of_roof:<19}{plain:<25}{over:<12}"
    return line + ("MISSED" if row["bar"].startswith("missed") else row["bar"])


def summary(rows: Sequence[Row]) -> str:
    """How many bars are met, and which are not."""
    judged = [row for row in rows if row["bar"] != FALLBACK]
    missed = [row for row in judged if row["bar"] != "met"]
    lines = [f"bars met: {len(judged) - len(missed)} of {len(judged)}"]
    lines += [f"  {_title(row)}: {row['bar']}" for row in missed]
    return "\n".join(lines)


@dataclass(frozen=True)
class Product:
    """A square product of torch."""

    call: Call
    flops: int
    dtype: torch.dtype


@functools.cache
def square_product(device: torch.device, dtype: torch.dtype) -> Product:
    """The fastest that torch has for numbers of this type: the yardstick of arithmetic.

    On a CPU oneDNN competes with what `torch.mm` calls. There rows of 16 bits are widened to
    float32, except bfloat16 where the CPU multiplies it as it is.
    """
    size = YARDSTICK_SIZE.get(device.type, 1024)
    if device.type != "cpu":
        size //= 1 if dtype.itemsize == 2 else 2
        return _product(torch.mm, size, device, dtype)
    found = []
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found.append(_product(torch.mm, size, device, dtype))
    dtype = torch.promote_types(dtype, torch.float32)
    found.append(_product(torch.mm, size, device, dtype))
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        found.append(_product(torch.nn.functional.linear, size, device, dtype, through_onednn=True))
    return min(found, key=lambda product: _warm_ms(product.call, device))


def _product(
    formulation: Callable[..., Tensor],
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    through_onednn: bool = False,
) -> Product:
    sides = [torch.randn(size, size, device=device).to(dtype) for _ in range(2)]
    if through_onednn:
        sides = [side.to_mkldnn() for side in sides]
    return Product(functools.partial(formulation, *sides), 2 * size**3, dtype)


def _warm_ms(call: Call, device: torch.device) -> float:
    call()
    cycles = cycles_to_hide(call, device)
    return min(timed_ms(call, device, sleep_cycles=cycles) for _ in range(3))


def checked(case: Case, call: Call) -> Row:
    """Whether a formulation is right, its error, and what is the matter if it is not."""
    try:
        error = case.error(call)
    except Exception as failure:
        return {"correct": False, "problem": f"{type(failure).__name__}: {failure}"}
    if error <= case.tolerance:
        return {"correct": True, "error": error}
    return {
        "correct": False,
        "error": _finite(error),
        "problem": f"off by {error:.1e}, more than {case.tolerance:.0e} of the largest entry",
    }


def _row(case: Case, implementation: str, result: Row) -> Row:
    return {
        "operator": case.operator,
        "label": case.label,
        "shape": case.problem.shape,
        "rows": case.problem.num_rows,
        "columns": case.problem.num_columns,
        "dtype": case.problem.dtype_name,
        "implementation": implementation,
        "bytes": case.num_bytes,
        "tolerance": case.tolerance,
        "bar": "missed: wrong, not timed",
        **result,
    }


def _fastest_plain(case: Case) -> tuple[str | None, Row]:
    """The formulation that one warm sample says is fastest, and what was found of all."""
    screened: Row = {}
    for name, call in case.plain.items():
        start = time.perf_counter()
        try:
            error = case.error(call)
        except Exception as failure:
            reason = str(failure).strip().splitlines() or [""]
            screened[name] = {"failed": f"{type(failure).__name__}: {reason[0]}"}
            continue
        ms = (time.perf_counter() - start) * 1e3
        if ms < SLOW_MS:
            cycles = 0 if case.is_small else cycles_to_hide(call, case.device)
            ms = timed_ms(call, case.device, sleep_cycles=cycles)
        screened[name] = {"ms": protocol.rounded(ms), "error": _finite(error)}
    running = [name for name, found in screened.items() if "ms" in found]
    return min(running, key=lambda name: screened[name]["ms"], default=None), screened


def fastest_yardstick(case: Case) -> tuple[str | None, int]:
    """The read or copy that warm samples say is fastest, and its bytes."""
    best, best_rate, best_bytes = None, 0.0, 0
    for name, (call, num_bytes) in case.yardsticks.items():
        ms = _warm_ms(call, case.device)
        if num_bytes / ms > best_rate:
            best, best_rate, best_bytes = name, num_bytes / ms, num_bytes
    return best, best_bytes


def _limits(
    case: Case,
    ours_ms: list[float],
    yardstick: str | None,
    yardstick_bytes: int,
    yardstick_ms: list[float] | None,
) -> Row:
    median = statistics.median(ours_ms)
    row: Row = {
        "ms": protocol.rounded(median),
        "gigabytes_per_s": protocol.rounded(case.num_bytes / median / 1e6),
        "roof": CALL,
    }
    # What the cache holds is no measure of the memory.
    if yardstick_ms is None or case.num_bytes < protocol.last_cache_bytes(case.device):
        return row
    of_memory = ratio_of(yardstick_ms, ours_ms, case.num_bytes / yardstick_bytes)
    row |= {
        "yardstick": yardstick,
        "yardstick_gigabytes_per_s": protocol.rounded(
            yardstick_bytes / statistics.median(yardstick_ms) / 1e6
        ),
    }
    row |= {"roof": MEMORY, "fraction": _values(of_memory), "pairs": of_memory.pairs}
    return row


def _arithmetic(row: Row, in_products: float, ours_ms: list[float], product_ms: list[float]) -> Row:
    """The other roof, where its floor counts. `in_products`: the arithmetic, in square products."""
    of_compute, of_bandwidth = ratio_of(product_ms, ours_ms, in_products), row["fraction"]
    floors = of_compute.ratio / of_bandwidth[0]
    if floors * RIDGE < 1:
        return {}
    fraction = _values(of_compute) if floors > 1 else of_bandwidth
    roof = BOTH if floors < RIDGE else COMPUTE
    return {"roof": roof, "fraction": fraction, "of_bandwidth": of_bandwidth[0]}


def _values(ratio: Ratio) -> list[float]:
    return [protocol.rounded(value) for value in (ratio.ratio, ratio.low, ratio.high)]


def _comparison(
    ours_ms: list[float], plain: str | None, screened: Row, plain_ms: list[float] | None
) -> Row:
    if plain is None or plain_ms is None:
        return {"plain_formulations": screened}
    over = ratio_of(ours_ms, plain_ms)
    return {
        "plain": plain,
        "plain_ms": protocol.rounded(over.baseline_ms),
        "plain_error": screened[plain]["error"],
        "over_plain": _values(over),
        "plain_formulations": screened,
    }


def _verdict(row: Row) -> str:
    """ "met", or what was missed. A quartile decides, so that equals are not told apart by luck."""
    missed = []
    # Where both bind the longer floor counts.
    is_read = row["roof"] == MEMORY or (
        row["roof"] == BOTH and row["fraction"][0] == row["of_bandwidth"]
    )
    if is_read and row["fraction"][0] < FRACTION_BAR:
        missed.append(f"{row['fraction'][0]:.2f} of the bandwidth of {row['yardstick']}")
    if "over_plain" in row and row["over_plain"][1] > 1:
        missed.append(f"{row['over_plain'][0]:.2f} times {row['plain']}")
    return f"missed: {', '.join(missed)}" if missed else "met"


def _repeated(call: Call) -> Call:
    def repeat() -> None:
        for _ in range(CALLS_PER_SAMPLE):
            call()

    return repeat


def _heading(row: Row) -> str:
    if row["operator"] in RULES:
        return f"{row['operator']}, float64, K x K"
    operator = f"{row['operator']} {row['label']}".strip()
    return f"{operator}, {row['dtype']}, {row['shape']}"


def _title(row: Row) -> str:
    parts = [row["operator"], row["label"], f"K={row['rows']}", row["dtype"], row["shape"]]
    return " ".join(part for part in parts if part) + f" {row['implementation']}"


def _spread(values: Sequence[float]) -> str:
    """Median and half the distance of the quartiles."""
    median, low, high = values
    return f"{median:.2f} ±{(high - low) / 2:.2f}"


def _short(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else str(count)


def _error(error: float | None) -> str:
    return "inf" if error is None else f"{error:.0e}"


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return protocol.rounded(value, 3) if math.isfinite(value) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print, and write the record when asked; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=float, help="of the rows (256; 4096 on a GPU)")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--rows", nargs="+", type=int, default=NUM_ROWS, help="K")
    parser.add_argument("--dtypes", nargs="+", help="names, as float32")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--rounds", type=int, default=11, help="at most, per row")
    parser.add_argument("--seconds", type=float, default=1.5, help="at most, per row")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    megabytes = args.megabytes or (4096 if device.type == "cuda" else 256)
    found = all_cases(
        device,
        num_bytes=int(megabytes * 1e6),
        operators=args.operators,
        num_rows=args.rows,
        dtypes=[getattr(torch, name) for name in args.dtypes] if args.dtypes else DTYPES,
        shapes=args.shapes,
    )
    start = time.monotonic()
    rows: list[Row] = []

    def measured() -> Iterator[Row]:
        for case in found:
            each = measure(case, rounds=args.rounds, seconds=args.seconds)
            rows.extend(each)
            yield from each

    print_rows(measured())
    print(f"\n{summary(rows)}\n{time.monotonic() - start:.0f} s on {protocol.device_name(device)}")
    if args.json:
        record = {"benchmark": "operators", **protocol.machine(device), "rows": rows}
        protocol.write(args.json, record)
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
