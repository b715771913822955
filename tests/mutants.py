"""Which changes of the code do the fast tests notice? `make mutants` makes them and counts.

A mutant is the source of a module with one change of mutmut's: an operator swapped, an argument
left out. It is killed when a fast test of the files that `mutants.toml` names for the module fails,
or does not end. mutmut's own runner leaves out every function with a decorator, which here are the
properties, the context managers and all that runs under `no_grad`, so here each mutant runs in a
process forked from one that has imported torch. Texts are not changed.

    python -m tests.mutants [MODULE ...] [--sample N] [--jobs N] [--only TEXT]
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import libcst as cst
import pytest
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parents[1]
MODULES = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))["modules"]
# Of a module's mutants that are killed.
WANTED = 0.9
SEED = 23
# What a mutant may take, over what the unchanged module takes.
PATIENCE, PATIENCE_S = 8.0, 60.0
FORK = multiprocessing.get_context("fork")


class Mutant(NamedTuple):
    """A module with one change, and the lines of its source that go (-) and come (+)."""

    module: str
    source: str
    change: str


def place_of(module: str) -> Path:
    """Where a module of `mutants.toml` lies in the tree: "losses", or "kernels/gram"."""
    folder = "" if module.startswith("kernels/") else "doge_fast"
    return Path(folder, f"{module}.py")


def source_of(module: str) -> str:
    """The module as it stands."""
    return (ROOT / place_of(module)).read_text("utf-8")


# A text that differs is no fault of the method.
_CHANGES = [each for each in mutators.mutation_operators if each[1] != mutators.operator_string]
# Types, names that are imported, and texts, as those of errors.
_NOT_CHANGED = (
    cst.Annotation,
    cst.Import,
    cst.ImportFrom,
    cst.Decorator,
    cst.BaseString,
    cst.Raise,
)


def _is_no_logic(node: cst.CSTNode, module: str) -> bool:
    """A type's name; in kernels a constant, with another of which one is slower, not wrong."""
    statement = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    if isinstance(statement, cst.Assign):
        target = statement.targets[0].target
    elif isinstance(statement, cst.AnnAssign):
        target = statement.target
    else:
        return False
    name = target.value.lstrip("_") if isinstance(target, cst.Name) else ""
    return name[:1].isupper() and (module.startswith("kernels/") or not name.isupper())


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, _NOT_CHANGED):
        return
    yield node
    for child in node.children:
        yield from _nodes(child)


def mutants_of(module: str, sample: int = 0) -> tuple[int, list[Mutant]]:
    """How many changes there are, and the mutants of all or of `sample` of them.

    What is no Python, no change or twice the same is left out.
    """
    source = source_of(module)
    tree = cst.parse_module(source)
    body = [each for each in tree.body if not _is_no_logic(each, module)]
    # A node and what may stand in its place, in the order of the source.
    changes = [
        (node, changed)
        for statement in body
        for node in _nodes(statement)
        for kind, change in _CHANGES
        if isinstance(node, kind)
        for changed in change(node)
    ]
    chosen = range(len(changes))
    if 0 < sample < len(changes):
        chosen = sorted(random.Random(f"{SEED} {module}").sample(chosen, sample))
    known = {_meaning(source)}
    found = []
    for index in chosen:
        mutated = tree.deep_replace(*changes[index]).code
        with contextlib.suppress(SyntaxError):
            meaning = _meaning(mutated)
            if meaning not in known:
                known.add(meaning)
                lines = [each.splitlines() for each in (source, mutated)]
                change = "\n".join([*difflib.unified_diff(*lines, n=0, lineterm="")][2:])
                found.append(Mutant(module, mutated, change))
    return len(changes), found


def _meaning(source: str) -> str:
    """Its syntax, with None for False: what is asked for its truth is the same."""
    return ast.dump(ast.parse(source)).replace("value=None", "value=False")


def _run(module: str) -> None:
    """In a process of its own: the module's tests; exits 0 where they all pass."""
    os.setsid()
    workspace = Path.cwd()
    out = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:] = [str(workspace), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    # For processes that the tests start.
    os.environ["PYTHONPATH"] = str(workspace)
    for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[name]
    files = [f"tests/{name}" for name in MODULES[module]["tests"]]
    skip = ["-p", "no:xdist", "-p", "no:benchmark", "-m", "not exhaustive and not soak"]
    code = pytest.main(["-x", "-q", "--no-header", "--tb=line", *skip, *files])
    sys.stdout.flush()
    os._exit(int(code))


def _begin(folder: str) -> None:
    """In each worker: a copy of the package beside what belongs to it, for one mutant at a time."""
    workspace = Path(folder, str(os.getpid()))
    for name in ("doge_fast", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, workspace / name, ignore=ignored)
    for name in ("csrc", "tests", "benchmarks", "docs", "pyproject.toml"):
        (workspace / name).symlink_to(ROOT / name)
    os.chdir(workspace)


def _verdict(mutant: Mutant, allowed_s: float = 1800.0) -> tuple[bool, str, float]:
    """Whether the mutant is killed, the last that its tests said, and their seconds."""
    began = time.monotonic()
    place = place_of(mutant.module)
    place.write_text(mutant.source, "utf-8")
    process = FORK.Process(target=_run, args=(mutant.module,))
    process.start()
    process.join(allowed_s)
    is_late = process.is_alive()
    # With all that its tests have started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    place.write_text(source_of(mutant.module), "utf-8")
    said = Path("log").read_text("utf-8", "replace")
    return is_late or process.exitcode != 0, said[-400:], time.monotonic() - began


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
    parser.add_argument("modules", nargs="*", default=list(MODULES))
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module; 0: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="those whose change holds this")
    given = parser.parse_args()
    _prepare()
    killed, run = Counter[str](), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, FORK, _begin, (folder,)) as pool,
    ):
        whole = [Mutant(name, source_of(name), "") for name in given.modules]
        mutants, limits = [], []
        for (module, *_), (is_killed, said, seconds) in zip(
            whole, pool.map(_verdict, whole), strict=True
        ):
            if is_killed:
                raise SystemExit(f"the tests of {module} fail as it stands: {said}")
            chosen = [
                each for each in mutants_of(module, given.sample)[1] if given.only in each.change
            ]
            mutants += chosen
            limits += [PATIENCE_S + PATIENCE * seconds] * len(chosen)
        for mutant, (is_killed, *_) in zip(
            mutants, pool.map(_verdict, mutants, limits), strict=True
        ):
            run[mutant.module] += 1
            killed[mutant.module] += is_killed
            if not is_killed:
                print(f"survived: {mutant.module}\n{mutant.change}", flush=True)
    for module in given.modules:
        print(f"{module:20} {killed[module]} of {run[module]} killed")
    return int(any(killed[module] < WANTED * run[module] for module in given.modules))


if __name__ == "__main__":
    sys.exit(main())
