"""The compiled CPU operators of several commits against each other, alternated in one process.

    python -m benchmarks.builds gram HEAD~1 .
    DOGE_FAST_MARCH=x86-64-v3 python -m benchmarks.builds weighted_sum HEAD~1 HEAD --rows 22

`.` is the working tree. Only `csrc/` is taken from a commit, one that has no `csrc/cpu/levels`.
Every build is compared with float64 before it is timed. `of a read` (`of a copy` for the sum):
bandwidth over that of a read of the same memory in the same round; `over`: time over that of the
first build.
"""

import argparse
import functools
import io
import shutil
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import cases, protocol
from benchmarks.cases import Case
from benchmarks.operators import checked, fastest_yardstick
from benchmarks.problems import DTYPES, NUM_ROWS, SHAPES, Arena, coefficients
from doge_fast._layout import CSRC_DIR
from doge_fast.alternation import Call, Ratio, alternated, ratio_of
from doge_fast.kernels import build

ROOT = Path(__file__).resolve().parents[1]
WORKING_TREE = "."
OPERATORS = ("gram", "weighted_sum")
# The operators' namespace in the sources; a process holds one library of each name.
NAMESPACE = "doge_fast_cpp"
# Among the calls that are timed; no commit is named so.
YARDSTICK = ""


def load(revision: str, name: str) -> None:
    """Compile a commit's CPU operators and register them as `torch.ops.<name>`.

    Raises:
        ValueError: git knows no such commit, or it has no `csrc/cpu`.
        BuildError: it does not compile.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sources = _sources(revision, Path(scratch)) / "cpu"
        for file in sources.rglob("*.cpp"):
            file.write_text(file.read_text().replace(NAMESPACE, name))
        build.load_library(name, build.cpp_recipe(sources))


def _sources(revision: str, scratch: Path) -> Path:
    if revision == WORKING_TREE:
        return Path(shutil.copytree(CSRC_DIR, scratch / "csrc"))
    command = ["git", "archive", "--format=tar", revision, "csrc"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()
        raise ValueError(f"git has no csrc/ at {revision!r} ({reason}); name a commit, or '.'.")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(scratch, filter="data")
    return scratch / "csrc"


@dataclass(frozen=True)
class Timed:
    """One build on one problem."""

    ms: float
    """Median."""
    of_memory: Ratio
    """Bandwidth over that of the yardstick."""
    over_first: Ratio | None
    """Time over that of the first build; None where that one is wrong."""


def measure(
    case: Case, calls: Mapping[str, Call], *, rounds: int, seconds: float
) -> dict[str, Timed]:
    """{build: its times}, without those that are wrong."""
    right = {name: call for name, call in calls.items() if checked(case, call)["correct"]}
    yardstick, num_bytes = fastest_yardstick(case)
    assert yardstick is not None
    before = protocol.cold(case.num_bytes, case.device)
    times = alternated(
        {**right, YARDSTICK: case.yardsticks[yardstick][0]},
        rounds=rounds,
        before=before,
        seconds=seconds,
    )
    first = times.get(next(iter(calls)))
    return {
        name: Timed(
            ms=statistics.median(times[name]),
            of_memory=ratio_of(times[YARDSTICK], times[name], case.num_bytes / num_bytes),
            over_first=None if first is None else ratio_of(times[name], first),
        )
        for name in right
    }


def case_of(
    operator: str, arena: Arena, num_rows: int, shape: str, names: dict[str, str]
) -> tuple[Case, dict[str, Call]]:
    """The problem, and each build's call on it. `names`: {revision: name of its operators}."""
    problem = arena.problem(num_rows, shape)
    blocks = arena.blocks(problem)
    if operator == "gram":
        calls = {
            revision: functools.partial(getattr(torch.ops, name).gram, blocks)
            for revision, name in names.items()
        }
        return cases.gram_case(arena, problem, []), calls
    outs, weights_K = arena.outputs(problem.sizes), coefficients(num_rows, "cpu")
    calls = {
        revision: functools.partial(getattr(torch.ops, name).weighted_sum, blocks, weights_K, outs)
        for revision, name in names.items()
    }
    return cases.weighted_sum_case(arena, problem, []), calls


def format_rows(case: Case, revisions: Sequence[str], found: Mapping[str, Timed]) -> str:
    """A line per build."""
    problem = case.problem
    start = f"{problem.dtype_name:<9}{problem.shape:<7}{problem.num_rows:>4}"
    start += f" {problem.num_columns / 1e6:>6.1f}M  "
    lines = []
    for name in revisions:
        line = f"{start}{name:<14}"
        if name not in found:
            lines.append(f"{line}   WRONG")
            continue
        timed = found[name]
        line += f"{timed.ms:>8.3f}  {_spread(timed.of_memory)}"
        if timed.over_first is not None:
            line += f"  {_spread(timed.over_first)}"
        lines.append(line)
    return "\n".join(lines)


def _spread(ratio: Ratio) -> str:
    return f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, measure, print; 1 if a build was wrong, 2 if one cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("revisions", nargs="+", help="commits, or '.' for the working tree")
    parser.add_argument("--megabytes", type=float, default=256, help="of the rows")
    parser.add_argument("--rows", nargs="+", type=int, default=NUM_ROWS, help="K")
    parser.add_argument("--dtypes", nargs="+", help="names, as float32")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--rounds", type=int, default=15, help="at most, per problem")
    parser.add_argument("--seconds", type=float, default=3.0, help="at most, per problem")
    args = parser.parse_args(arguments)
    names = {revision: f"doge_fast_build{i}" for i, revision in enumerate(args.revisions)}
    try:
        for revision, name in names.items():
            load(revision, name)
    except (ValueError, build.BuildError) as error:
        print(error)
        return 2
    memory = "read" if args.operator == "gram" else "copy"
    print(f"{args.operator} on {protocol.device_name('cpu')}, {torch.get_num_threads()} threads")
    print(f"{'dtype':<9}{'shape':<7}{'K':>4} {'N':>7}  {'build':<14}{'ms':>8}  ", end="")
    print(f"{f'of a {memory}':<19} over {args.revisions[0]}")
    is_right = True
    for dtype in [getattr(torch, name) for name in args.dtypes] if args.dtypes else DTYPES:
        arena = Arena(dtype, int(args.megabytes * 1e6), "cpu")
        for shape in args.shapes:
            for num_rows in args.rows:
                case, calls = case_of(args.operator, arena, num_rows, shape, names)
                found = measure(case, calls, rounds=args.rounds, seconds=args.seconds)
                print(format_rows(case, list(calls), found), flush=True)
                is_right &= found.keys() == calls.keys()
        del arena
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
