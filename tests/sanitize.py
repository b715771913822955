"""`make sanitize`: the C++ operators under AddressSanitizer, UndefinedBehaviorSanitizer and
ThreadSanitizer of GCC.

csrc/cpu is built as always, by a compiler that is told to check, into a cache of its own; then the
fast tests of its operators run with the sanitizer's runtime loaded before Python. Before that each
must find a fault that is planted for it.

    python -m tests.sanitize [memory] [threads]
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import printed_by, shell_script

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "sanitizers"
CACHE = ROOT / "build" / "sanitize"
TESTS = [
    f"tests/operators/test_{name}.py"
    for name in ("gram", "weighted_sum", "gram_and_sum", "accumulate")
]


@dataclass(frozen=True)
class Sanitizer:
    """How the library is compiled, and what is loaded before Python."""

    flags: str
    runtimes: tuple[str, ...]
    options: dict[str, str]
    planted: tuple[str, ...]
    """Functions of planted.cpp that must end the process."""
    has_threads: bool = False
    """Whether threads.cpp takes the place of torch's threads."""


SANITIZERS = {
    "memory": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1",
        ("libasan.so", "libubsan.so"),
        {
            # Python, and torch, leave what they hold for life to the end of the process.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        ("address", "undefined"),
    ),
    "threads": Sanitizer(
        "-fsanitize=thread -g1",
        ("libtsan.so",),
        # Its own threads torch does not start: OpenMP's are not known to this sanitizer.
        {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "OMP_NUM_THREADS": "1"},
        ("race",),
        has_threads=True,
    ),
}


def _run(words: Sequence[str], environment: dict[str, str], **options: object) -> int:
    return subprocess.run(words, cwd=ROOT, env=environment, check=False, **options).returncode


def _library(source: str, name: str, compiler: Sequence[str]) -> Path:
    path = CACHE / f"{source}-{name}.so"
    words = [*compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(HERE / f"{source}.cpp")]
    subprocess.run([*words, "-o", str(path)], check=True)
    return path


def sanitize(name: str) -> int:
    """0 where the planted faults are found, and none in the operators."""
    sanitizer = SANITIZERS[name]
    compiler = ["g++", *shlex.split(sanitizer.flags)]
    CACHE.mkdir(parents=True, exist_ok=True)
    # One program, as torch's builder wants it; the compiler itself need not be checked.
    unloaded = f'unset LD_PRELOAD\nexec {shlex.join(compiler)} "$@"'
    program = shell_script(CACHE / f"{name}-g++", unloaded)
    plain = os.environ | {
        "CXX": str(program),
        "DOGE_FAST_CACHE": str(CACHE),
        "DOGE_FAST_NO_JIT": "0",
        # The CUDA sources in their emulator are not what is looked at.
        "DOGE_FAST_CUDA_EMULATE": "0",
        "PYTHONPATH": str(ROOT),
    }
    loaded = [
        printed_by("g++", f"-print-file-name={runtime}").strip() for runtime in sanitizer.runtimes
    ]
    if sanitizer.has_threads:
        loaded.append(str(_library("threads", name, compiler)))
    checked = plain | sanitizer.options | {"LD_PRELOAD": " ".join(loaded)}
    planted = _library("planted", name, compiler)
    for fault in sanitizer.planted:
        program = f"import ctypes; ctypes.CDLL({str(planted)!r}).{fault}(1)"
        if not _run([sys.executable, "-c", program], checked, stderr=subprocess.DEVNULL):
            print(f"{name}: the planted fault {fault!r} was not found.", file=sys.stderr)
            return 1
    print(f"{name}: found what was planted: {', '.join(sanitizer.planted)}.", flush=True)
    # Else the tests would be skipped. Torch's builder loads what it has made.
    load = "from doge_fast.kernels import gram; import torch; "
    load += "gram(torch.ones(1, 1), implementation='cpp')"
    if _run([sys.executable, "-c", load], checked):
        return 1
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-k", "cpp"]
    return _run([*words, "-m", "not exhaustive and not soak", *TESTS], checked)


def main() -> int:
    """Both, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument("sanitizers", nargs="*", default=list(SANITIZERS))
    return max(sanitize(name) for name in parser.parse_args().sanitizers)


if __name__ == "__main__":
    sys.exit(main())
