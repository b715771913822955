"""Everything to know about the library on a GPU, in minutes: right, repeatable, how fast.

    benchmarks/gpu.sh
    python -m benchmarks.gpu --device cpu --quick

Needs torch and einops. Sections run one after another, each within a time of its own: a slow
one is cut, a failing one is recorded, the rest runs. Writes a JSON record and a table in Markdown
to `results/`; the exit code says whether everything was right.
"""

import argparse
import functools
import gc
import itertools
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, models, operators, optimizer_step, protocol, steps
from benchmarks.models import PAPER, Shape
from benchmarks.problems import BLOCKS, MATRIX, OperatorProblem, coefficients
from benchmarks.steps import Problem
from doge_fast.alternation import Clock
from doge_fast.kernels import accumulate, gram, implementations, weighted_sum
from doge_fast.kernels.dispatch import chosen

Row = dict[str, Any]

MINUTES = 7.5
# The usual number first: a section that is cut has seen it.
NUM_ROWS = (7, 22, 50, 2, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP_ROWS = (7, 22, 50)
STEP_BAR, STEP_BAR_ROWS = 1.08, 7
FRACTION_BAR, FRACTION_COLUMNS = 0.85, 82e6
# A matrix whose last row begins beyond 2**31 elements.
HUGE_ROWS, HUGE_COLUMNS = 3, (1 << 30) + 1
# Of the memory: rows in float32 are kept where they take less than this.
ROWS_SHARE = 0.5


@dataclass(frozen=True)
class Session:
    """Where everything runs, and how large."""

    device: torch.device
    quick: bool

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams and graphs."""
        return self.device.type == "cuda"

    @functools.cached_property
    def names(self) -> list[str]:
        """Implementations that run here, plain torch among them."""
        return cases.timed_implementations(self.device, with_torch=True)

    def free_bytes(self) -> int:
        """Of the device's memory; a modest guess on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else 1 << 30


def correctness(session: Session) -> Iterator[Row]:
    """Every operator, implementation, dtype and K against float64; odd sizes, and one sign."""
    columns = 10_007 if session.quick else 1_000_003
    blocks = (1, 3, 65, 4_097, 64, columns // 8, 768)
    for num_rows in NUM_ROWS:
        case = cases.reweight_case(num_rows, session.device, session.names)
        for name in case.ours:
            yield _checked(case, name)
        for dtype in DTYPES:
            for sizes, shape in (((columns,), MATRIX), (blocks, BLOCKS)):
                problem = OperatorProblem(num_rows, dtype, shape, sizes)
                arena = _Rows(problem, session.device, one_sign=shape == MATRIX)
                for name in session.names:
                    yield _checked(cases.gram_case(arena, problem, [name]), name)
                    yield _checked(cases.weighted_sum_case(arena, problem, [name]), name)
    for dtype in DTYPES:
        problem = OperatorProblem(2, dtype, BLOCKS, blocks)
        arena = _Rows(problem, session.device)
        for name in session.names:
            for add in (False, True):
                yield _checked(cases.accumulate_case(arena, [name], add=add), name)


def determinism(session: Session) -> Iterator[Row]:
    """The same call three times: the same bits."""
    columns = 10_007 if session.quick else 4_000_037
    for dtype in DTYPES:
        for num_rows in (7, 50):
            problem = OperatorProblem(num_rows, dtype, MATRIX, (columns,))
            (rows_KN,) = _Rows(problem, session.device).blocks(problem)
            c_K = coefficients(num_rows, session.device)
            runs: dict[str, Callable[[str], Tensor]] = {
                "gram": lambda name, x=rows_KN: gram(x, implementation=name),
                "weighted_sum": lambda name, x=rows_KN, c=c_K: weighted_sum(  # type: ignore[misc]
                    x, c, implementation=name
                ),
            }
            for operator, run in runs.items():
                for name in session.names:
                    results = [run(name).clone() for _ in range(3)]
                    yield {
                        "operator": operator,
                        "implementation": name,
                        "dtype": problem.dtype_name,
                        "rows": num_rows,
                        "correct": all(torch.equal(results[0], each) for each in results[1:]),
                    }


def offsets(session: Session) -> Iterator[Row]:
    """More elements than 32 bits count: the last row must be read where it is."""
    columns = 100_003 if session.quick else HUGE_COLUMNS
    problem = OperatorProblem(HUGE_ROWS, torch.bfloat16, MATRIX, (columns,))
    if session.on_gpu and session.free_bytes() < 2.5 * problem.num_bytes:
        yield {"operator": "gram", "skipped": f"needs {2.5 * problem.num_bytes / 1e9:.0f} GB"}
        return
    arena = _Rows(problem, session.device)
    for name in session.names:
        yield _checked(cases.gram_case(arena, problem, [name]), name)
        yield _checked(cases.weighted_sum_case(arena, problem, [name]), name)
    (rows_KN,) = arena.blocks(problem)
    # All rows as one gradient, onto itself: what is there is what must be there.
    whole = rows_KN.reshape(-1)
    halves = whole.chunk(2)
    for name in session.names:
        arena.scratch.fill_(math.nan)
        out = arena.scratch[: len(halves[0])]
        accumulate([halves[0]], [out], add=False, implementation=name)
        yield {
            "operator": "accumulate",
            "implementation": name,
            "dtype": "bfloat16",
            "rows": 1,
            "columns": len(halves[0]),
            "correct": torch.equal(out, halves[0]),
        }


def graphs(session: Session) -> Iterator[Row]:
    """The whole of `step()` in a CUDA graph does what it does outside of one."""
    if not session.on_gpu:
        yield {"skipped": "CUDA graphs need a GPU"}
        return
    difference = steps.captured_step_error(session.device)
    yield {"largest_difference": difference, "correct": difference == 0.0}


def step_times(session: Session) -> Iterator[Row]:
    """The paper's sizes at 128 x 512 tokens, bfloat16 autocast, over plain training."""
    sizes: dict[str, Shape] = PAPER
    if session.quick:
        sizes = {"tiny": Shape(1, 2, 64, 256, 32)}
    num_rows = STEP_ROWS[: 1 if session.quick else None]
    for mode, num_domains in itertools.product(steps.MODES, num_rows):
        for model, shape in sizes.items():
            problem = _step_problem(session, shape, num_domains, mode)
            row: Row = {"model": model, "domains": num_domains, "mode": mode}
            row["problem"] = str(problem)
            try:
                row |= optimizer_step.measure(
                    problem,
                    session.device,
                    pairs=3 if session.quick else 9,
                    seconds=1.0 if session.quick else 6.0,
                    with_memory=False,
                )
            except torch.cuda.OutOfMemoryError as failure:
                row["skipped"] = f"out of memory: {str(failure).splitlines()[0]}"
            yield row
            _release(session)


def operator_times(session: Session) -> Iterator[Row]:
    """The ratio table of `benchmarks.operators`, Triton and CUDA side by side."""
    num_bytes = 4_000_000 if session.quick else min(8 << 30, session.free_bytes() // 6)
    # In the order of what is asked first.
    rounds = [((7,), DTYPES), ((22, 50, 2, 128), DTYPES), (NUM_ROWS, (torch.float64,))]
    if session.quick:
        rounds = [((7,), (torch.float32, torch.bfloat16))]
    for index, (num_rows, dtypes) in enumerate(rounds):
        found = operators.all_cases(
            session.device,
            num_bytes=num_bytes,
            operators=operators.OPERATORS if index == 0 else ("gram", "weighted_sum", "reweight"),
            num_rows=num_rows,
            dtypes=dtypes,
            with_fallback=True,
        )
        for case in found:
            yield from operators.measure(
                case, rounds=3 if session.quick else 11, seconds=0.1 if session.quick else 1.0
            )
        _release(session)


SECTIONS: dict[str, tuple[Callable[[Session], Iterator[Row]], float]] = {
    # With its share of the time; what one leaves goes to the next.
    "correctness": (correctness, 0.25),
    "determinism": (determinism, 0.05),
    "offsets": (offsets, 0.05),
    "graphs": (graphs, 0.05),
    "steps": (step_times, 0.3),
    "operators": (operator_times, 0.3),
}
# Those whose rows say whether something is right.
CHECKING = ("correctness", "determinism", "offsets", "graphs")


def run_section(
    section: Callable[[Session], Iterator[Row]], session: Session, seconds: float
) -> Row:
    """All rows that there was time for, and what stopped them."""
    clock = Clock(seconds)
    found: Row = {"rows": [], "cut": False}
    try:
        for row in section(session):
            found["rows"].append(row)
            if clock.expired():
                found["cut"] = True
                break
    except Exception as failure:
        found["failure"] = f"{type(failure).__name__}: {failure}"
        found["traceback"] = traceback.format_exc().splitlines()[-8:]
    found["seconds"] = round(clock.spent, 1)
    _release(session)
    return found


def is_correct(sections: dict[str, Row]) -> bool:
    """Whether every check that ran held, and every checking section ran to an end or its time."""
    return all(
        "failure" not in sections[name]
        and sections[name]["rows"]
        and all(row.get("correct", "skipped" in row) for row in sections[name]["rows"])
        for name in CHECKING
        if name in sections
    )


def bars(sections: dict[str, Row]) -> list[Row]:
    """What was asked of a GPU, and what came out; "not measured" where there is no row."""

    def rows(name: str) -> list[Row]:
        found: list[Row] = sections.get(name, {}).get("rows", [])
        return [row for row in found if "skipped" not in row]

    found = [
        _fraction_bar(operator, dtype, rows("operators"))
        for operator in ("gram", "weighted_sum")
        for dtype in ("float32", "bfloat16")
    ]
    asked = (steps.SEQUENTIAL, STEP_BAR_ROWS)
    ratios = [row["ratio"] for row in rows("steps") if (row["mode"], row["domains"]) == asked]
    found.append(
        _bar(
            f"sequential step, K = {STEP_BAR_ROWS}, at most {STEP_BAR} of plain, the worst size",
            max(ratios, default=None),
            lambda value: value <= STEP_BAR,
        )
    )
    key = "host_synchronisations"
    waits = [row[key] for row in rows("steps") if key in row]
    found.append(
        _bar(
            "no host synchronisation in step()",
            next((wait for wait in waits if wait != "none"), "none" if waits else None),
            lambda value: value == "none",
        )
    )
    differences = [row["largest_difference"] for row in rows("graphs")]
    found.append(
        _bar(
            "a captured step() is the step, to the bit",
            max(differences, default=None),
            lambda value: value == 0,
        )
    )
    return found


def _fraction_bar(operator: str, dtype: str, rows: Sequence[Row]) -> Row:
    """The better implementation in each shape, the worse of the shapes."""
    best: dict[str, float] = {}
    for row in rows:
        if (row["operator"], row["dtype"], row["rows"], row["label"]) != (operator, dtype, 7, ""):
            continue
        if "fraction" in row and row["columns"] >= FRACTION_COLUMNS:
            best[row["shape"]] = max(best.get(row["shape"], 0.0), row["fraction"][0])
    return _bar(
        f"{operator}, {dtype}, K = 7, N >= 82M: at least {FRACTION_BAR} of a copy's bandwidth",
        min(best.values(), default=None),
        lambda value: value >= FRACTION_BAR,
    )


def _bar(text: str, value: Any, holds: Callable[[Any], bool]) -> Row:
    if value is None:
        return {"bar": text, "value": None, "verdict": "not measured"}
    return {"bar": text, "value": value, "verdict": "met" if holds(value) else "MISSED"}


def markdown(record: Row) -> str:
    """The record for people."""
    sections = record["sections"]
    lines = [
        f"# {record['device']}",
        "",
        f"torch {record['torch']}, commit {record['commit']}, "
        f"implementations {', '.join(record['implementations'])}; chosen: "
        + ", ".join(f"{operator} {name}" for operator, name in record["chosen"].items())
        + ".",
        "",
        f"Everything checked was {'right' if record['correct'] else 'NOT RIGHT'}.",
        "",
        *_table(
            ("bar", "value", "verdict"),
            [(each["bar"], _text(each["value"]), each["verdict"]) for each in record["bars"]],
        ),
    ]
    for name, section in sections.items():
        lines += ["", f"## {name}", "", _how_it_went(section), ""]
        lines += _WRITERS.get(name, _check_table)(section["rows"])
    return "\n".join(lines) + "\n"


def _how_it_went(section: Row) -> str:
    text = f"{len(section['rows'])} rows in {section['seconds']:.0f} s"
    text += ", cut for time" if section["cut"] else ""
    return text + (f"; failed: {section['failure']}" if "failure" in section else "") + "."


def _check_table(rows: Sequence[Row]) -> list[str]:
    """What was not right, or that all was."""
    wrong = [row for row in rows if not row.get("correct", "skipped" in row)]
    skipped = sorted({row["skipped"] for row in rows if "skipped" in row})
    lines = [f"Skipped: {reason}." for reason in skipped]
    if not wrong:
        right = sum("correct" in row for row in rows)
        return [*lines, f"{right} checks held."] if right else lines
    keys = ("operator", "implementation", "dtype", "rows", "shape", "problem")
    return [*lines, *_table(keys, [[_text(row.get(key)) for key in keys] for row in wrong])]


def _step_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        if "skipped" in row:
            body.append([row["model"], row["mode"], row["domains"], row["skipped"], *[""] * 4])
            continue
        spread = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        mfu = f"{100 * row['plain_mfu']:.0f} %" if row["plain_mfu"] else ""
        waits = row.get("host_synchronisations", "")
        body.append(
            [
                row["model"],
                row["mode"],
                row["domains"],
                spread,
                f"{row['baseline_ms']:.1f}",
                mfu,
                waits,
                row["verdict"] or "",
            ]
        )
    header = ("model", "mode", "K", "step / plain", "plain ms", "plain MFU", "host waits", "bar")
    return _table(header, body)


def _operator_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        start = [
            f"{row['operator']} {row['label']}".strip(),
            row["dtype"],
            row["shape"],
            str(row["rows"]),
            f"{row['columns'] / 1e6:.3g}M",
            row["implementation"],
        ]
        if "ms" not in row:
            body.append([*start, f"WRONG: {row['problem']}", "", "", "", ""])
            continue
        fraction = f"{row['fraction'][0]:.2f} {row['roof']}" if "fraction" in row else row["roof"]
        over = f"{row['over_plain'][0]:.2f}" if "over_plain" in row else ""
        plain = row.get("plain", "none")
        rate = f"{row['gigabytes_per_s']:.0f}"
        body.append([*start, f"{row['ms']:.3f}", rate, fraction, f"{over} of {plain}", row["bar"]])
    header = (
        *("operator", "dtype", "shape", "K", "N", "runs", "ms", "GB/s"),
        *("of the roof", "over plain torch", "bar"),
    )
    return _table(header, body)


_WRITERS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "steps": _step_table,
    "operators": _operator_table,
}


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *body]
    return ["| " + " | ".join(str(cell) for cell in cells) + " |" for cells in lines]


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class _Rows(cases.Arena):
    """The memory of one problem: random, of both signs or of one."""

    def __init__(
        self, problem: OperatorProblem, device: torch.device, *, one_sign: bool = False
    ) -> None:
        self.dtype, self.device = problem.dtype, device
        self._count = sum(self._stride(size) for size in problem.sizes)
        if problem.shape == MATRIX:
            self._count = problem.num_columns
        generator = torch.Generator(device).manual_seed(0)
        self.values = torch.empty(
            problem.num_rows * self._count, dtype=problem.dtype, device=device
        )
        self.values.normal_(generator=generator)
        if one_sign:
            self.values.abs_()
        self.scratch = torch.zeros(len(self.values) // 2 + 1, dtype=problem.dtype, device=device)


def _checked(case: cases.Case, name: str) -> Row:
    """One check, as a row that says what went wrong."""
    row: Row = {
        "operator": case.operator,
        "implementation": name,
        "dtype": case.problem.dtype_name,
        "rows": case.problem.num_rows,
        "columns": case.problem.num_columns,
        "shape": case.problem.shape,
        "tolerance": case.tolerance,
    }
    return row | operators.checked(case, case.ours[name])


def _step_problem(session: Session, shape: Shape, num_domains: int, mode: str) -> Problem:
    """The rows in float32, if the memory has room for them; else in bfloat16."""
    rows_bytes = 4 * num_domains * models.num_parameters(shape)
    is_large = session.on_gpu and rows_bytes > ROWS_SHARE * session.free_bytes()
    return Problem(
        shape,
        num_domains,
        max(8, num_domains) if session.quick else optimizer_step.GPU_SEQUENCES,
        mode=mode,
        autocast="bfloat16",
        buffer_dtype="bfloat16" if is_large else None,
        bar=None if session.quick else optimizer_step.GPU_BARS.get((mode, num_domains)),
    )


def _release(session: Session) -> None:
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, print; 0 if everything was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny problems, for a test of this")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all sections")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", help="where the checkout has no git; or DOGE_FAST_COMMIT")
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no GPU. Run this where it does, or try it out with "
            "--device cpu --quick."
        )
    session = Session(torch.empty(0, device=args.device).device, args.quick)
    total = Clock(args.minutes * 60)
    # Asking compiles what is missing.
    obstacles = implementations(session.device)
    record: Row = {"benchmark": "gpu", **protocol.machine(session.device)}
    record["commit"] = args.commit or os.environ.get("DOGE_FAST_COMMIT") or record["commit"]
    record["implementations"] = session.names
    record["obstacles"] = {name: reason for name, reason in obstacles.items() if reason}
    record["chosen"] = {
        operator: chosen(session.device, operator) for operator in operators.OPERATORS
    }
    record["build_seconds"] = round(total.spent, 1)
    print(f"{record['device']}: {', '.join(session.names)}; {record['obstacles']}", flush=True)
    sections: dict[str, Row] = {}
    for name in args.sections:
        section, share = SECTIONS[name]
        left = [SECTIONS[each][1] for each in args.sections if each not in sections]
        seconds = max(5.0, (total.seconds - total.spent) * share / sum(left))
        sections[name] = run_section(section, session, seconds)
        print(f"{name}: {_how_it_went(sections[name])}", flush=True)
    record |= {"sections": sections, "correct": is_correct(sections), "bars": bars(sections)}
    record["seconds"] = round(total.spent, 1)
    slug = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    path = args.out / f"gpu-{slug}-{record['commit']}.json"
    protocol.write(path, record)
    path.with_suffix(".md").write_text(markdown(record), encoding="utf-8")
    for each in record["bars"]:
        print(f"{each['verdict']:<13}{each['bar']}: {_text(each['value'])}")
    print(f"{path}: everything checked was {'right' if record['correct'] else 'NOT RIGHT'}")
    return 0 if record["correct"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
