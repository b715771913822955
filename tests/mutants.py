"""Which changes of the core do the fast tests notice? `make mutants` makes them and counts.

A mutant is the source of a module with one change: an operator swapped, an argument left out, a
condition turned round, a statement removed. It is killed when a fast test of the files that
`mutants.toml` names for the module fails, or does not end. Most changes are those of mutmut; its
own runner leaves out every function with a decorator, which here are the properties, the context
managers and all that runs under `no_grad`, so here each mutant runs in a process
forked from one that has imported torch. Texts are not changed.

    python -m tests.mutants [MODULE ...] [--sample N] [--jobs N] [--show]
"""

import argparse
import ast
import contextlib
import difflib
import gc
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
import pytest
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
# Of a module's mutants that are killed.
WANTED = 0.9
SEED = 23
# What a mutant may take, over what the unchanged module takes.
PATIENCE, PATIENCE_S = 8.0, 60.0
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Mutant:
    """One change of a module's source."""

    module: str
    old: str
    """The lines that go, without indent, joined."""
    new: str
    """Those that come."""
    source: str
    line: int

    @property
    def reason(self) -> str | None:
        """Why no test can notice it; None: one should."""
        for each in TABLE["equivalent"]:
            if (each["module"], each["old"], each["new"]) == (self.module, self.old, self.new):
                return str(each["reason"])
        return None

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n  - {self.old}\n  + {self.new}"


def path_of(module: str) -> Path:
    """The source file of a module of `mutants.toml`, "stacked/losses" for example."""
    return ROOT / "doge_fast" / f"{module}.py"


# Changes of ours, beside those of mutmut.


def _without_an_operand(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """`a or b` -> `a`, `b`; the same of `and`, `&` and `|`."""
    if isinstance(node, cst.BooleanOperation) or (
        isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitAnd | cst.BitOr)
    ):
        yield node.left
        yield node.right


def _turned_round(node: cst.If | cst.IfExp) -> Iterator[cst.If | cst.IfExp]:
    """`if a` -> `if not (a)`."""
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    not_ = cst.Not(whitespace_after=cst.SimpleWhitespace(" "))
    yield node.with_changes(test=cst.UnaryOperation(operator=not_, expression=test))


def _removed(node: cst.Expr) -> Iterator[cst.Pass]:
    """A statement that is one call -> `pass`."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


_LEFT_OUT = (mutators.operator_string,)
_CHANGES: list[tuple[type[cst.CSTNode], Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *(each for each in mutators.mutation_operators if each[1] not in _LEFT_OUT),
    (cst.BooleanOperation, _without_an_operand),
    (cst.BinaryOperation, _without_an_operand),
    (cst.If, _turned_round),
    (cst.IfExp, _turned_round),
    (cst.Expr, _removed),
]
# Types, names that are imported, and texts.
_NOT_CHANGED = (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator, cst.BaseString)


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, _NOT_CHANGED):
        return
    yield node
    for child in node.children:
        yield from _nodes(child)


Change = tuple[cst.CSTNode, cst.CSTNode]


def changes_of(tree: cst.Module) -> list[Change]:
    """A node and what may stand in its place, in the order of the source."""
    return [
        (node, changed)
        for node in _nodes(tree)
        for kind, change in _CHANGES
        if isinstance(node, kind)
        for changed in change(node)
    ]


def mutants_of(module: str, sample: int = 0) -> tuple[int, list[Mutant]]:
    """How many changes there are, and the mutants of all or of `sample` of them.

    What is no Python, no change or twice the same is left out.
    """
    source = path_of(module).read_text("utf-8")
    tree = cst.parse_module(source)
    changes = changes_of(tree)
    chosen = range(len(changes))
    if 0 < sample < len(changes):
        chosen = sorted(random.Random(f"{SEED} {module}").sample(chosen, sample))
    known = {_meaning(source)}
    found = []
    for index in chosen:
        mutated = tree.deep_replace(*changes[index]).code  # type: ignore[arg-type]
        with contextlib.suppress(SyntaxError):
            meaning = _meaning(mutated)
            if meaning not in known:
                known.add(meaning)
                found.append(_mutant(module, source, mutated))
    return len(changes), found


def _meaning(source: str) -> str:
    """Its syntax, with None for False: what is asked for its truth is the same."""
    return ast.dump(ast.parse(source)).replace("value=None", "value=False")


def _mutant(module: str, source: str, mutated: str) -> Mutant:
    before, after = source.splitlines(), mutated.splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    old, new, line = [], [], 0
    for tag, first, end, new_first, new_end in codes:
        if tag != "equal":
            line = line or first + 1
            old += [text.strip() for text in before[first:end]]
            new += [text.strip() for text in after[new_first:new_end]]
    return Mutant(module, " ".join(old), " ".join(new), mutated, line)


# Running them.


def _workspace(folder: Path) -> Path:
    """A copy of the package beside what belongs to it, for one mutant after another."""
    shutil.copytree(ROOT / "doge_fast", folder / "doge_fast")
    for name in ("kernels", "csrc", "tests", "benchmarks", "docs", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def _run(module: str, workspace: Path) -> None:
    """In a process of its own: the module's tests; exits 0 where they all pass."""
    os.setsid()
    out = os.open(workspace / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(workspace)
    sys.path[:] = [str(workspace), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    # For processes that the tests start.
    os.environ["PYTHONPATH"] = str(workspace)
    for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[name]
    files = [f"tests/{name}" for name in TABLE["modules"][module]["tests"]]
    skip = ["-p", "no:xdist", "-p", "no:benchmark", "-m", "not exhaustive and not soak"]
    code = pytest.main(["-x", "-q", "--no-header", "--tb=line", *skip, *files])
    sys.stdout.flush()
    os._exit(int(code))


class Outcome(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    is_killed: bool
    by: str
    seconds: float


@dataclass
class _Running:
    mutant: Mutant
    workspace: Path
    process: Any
    began: float
    deadline: float

    @classmethod
    def start(cls, mutant: Mutant, workspace: Path, allowed_s: float) -> "_Running":
        place = workspace / "doge_fast" / f"{mutant.module}.py"
        place.write_text(mutant.source, "utf-8")
        for stale in place.parent.glob(f"__pycache__/{place.stem}.*"):
            stale.unlink()
        process = FORK.Process(target=_run, args=(mutant.module, workspace))
        process.start()
        now = time.monotonic()
        return cls(mutant, workspace, process, now, now + allowed_s)

    def end(self) -> None:
        """With all that its tests have started; its workspace is as it was."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        module = self.mutant.module
        shutil.copy2(path_of(module), self.workspace / "doge_fast" / f"{module}.py")


def outcomes(
    mutants: Sequence[Mutant], jobs: int, allowed_s: dict[str, float]
) -> Iterator[Outcome]:
    """What became of each, as they end."""
    waiting, running = list(reversed(mutants)), list[_Running]()
    with tempfile.TemporaryDirectory() as folder:
        free = [_workspace(Path(folder, str(job))) for job in range(jobs)]
        while waiting or running:
            while waiting and free:
                mutant = waiting.pop()
                running.append(_Running.start(mutant, free.pop(), allowed_s[mutant.module]))
            wait([each.process.sentinel for each in running], timeout=1.0)
            for each in list(running):
                is_late = time.monotonic() > each.deadline
                if each.process.is_alive() and not is_late:
                    continue
                each.end()
                running.remove(each)
                free.append(each.workspace)
                by = "it did not end" if is_late else _killer(each.workspace / "log")
                is_killed = is_late or each.process.exitcode != 0
                yield Outcome(each.mutant, is_killed, by, time.monotonic() - each.began)


def _killer(log: Path) -> str:
    text = log.read_text("utf-8", "replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return lines[-1] if lines else text[-200:].strip()


def allowed(modules: Sequence[str], jobs: int) -> dict[str, float]:
    """Seconds that the tests of each module may take; as it stands they pass."""
    whole = [Mutant(name, "", "", path_of(name).read_text("utf-8"), 0) for name in modules]
    found = {}
    for outcome in outcomes(whole, jobs, dict.fromkeys(modules, 1800.0)):
        name = outcome.mutant.module
        if outcome.is_killed:
            raise SystemExit(f"the tests of {name} fail as it stands: {outcome.by}")
        found[name] = PATIENCE_S + PATIENCE * outcome.seconds
    return found


def _prepare() -> None:
    """Import once what no mutant changes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    import einops  # noqa: F401
    import hypothesis  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.utils._pytree  # noqa: F401

    gc.freeze()


def main() -> int:
    """Make the mutants, run them, print a table; 1 where too few are killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TABLE["modules"]))
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module; 0: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="those whose old line holds this")
    parser.add_argument("--show", action="store_true", help="what killed each")
    given = parser.parse_args()
    _prepare()
    start = time.monotonic()
    allowed_s = allowed(given.modules, given.jobs)
    made, chosen, counts = {}, [], Counter[tuple[str, str]]()
    for module in given.modules:
        made[module], mutants = mutants_of(module, given.sample)
        for mutant in mutants:
            if mutant.reason is not None:
                counts[module, "equivalent"] += 1
            elif given.only in mutant.old:
                chosen.append(mutant)
    print(f"{len(chosen)} of {sum(made.values())} mutants run.", flush=True)
    for mutant, is_killed, by, _ in outcomes(chosen, given.jobs, allowed_s):
        counts[mutant.module, "killed" if is_killed else "survived"] += 1
        if not is_killed:
            print(f"survived: {mutant}", flush=True)
        elif given.show:
            print(f"killed: {mutant}\n  by {by}", flush=True)
    print(
        f"\n{'module':16} {'made':>6} {'run':>6} {'killed':>6} {'survived':>8} {'equivalent':>10}"
    )
    worst = 1.0
    for module in given.modules:
        killed, survived = counts[module, "killed"], counts[module, "survived"]
        share = killed / max(killed + survived, 1)
        worst = min(worst, share)
        print(
            f"{module:16} {made[module]:6} {killed + survived:6} {killed:6} {survived:8} "
            f"{counts[module, 'equivalent']:10}  {share:.1%}"
        )
    print(f"{(time.monotonic() - start) / 60:.0f} minutes.")
    return int(worst < WANTED)


if __name__ == "__main__":
    sys.exit(main())
