"""Everything to know about the library on a GPU: right, repeatable, how fast.

    benchmarks/gpu.sh
    benchmarks/gpu.sh correctness anchor
    benchmarks/gpu.sh steps --commit 0123456789 --out FOLDER
    benchmarks/gpu.sh --device cpu --quick

Needs torch, numpy, Triton and einops; ninja, filelock and a compiler for the compiled operators;
for the job transformers and accelerate. Parts run one after another, each within a time of its own:
a slow one is cut between rows and says so, a failing one is recorded, the rest runs. Each part adds
to a JSON record, and a table in Markdown, when it ends. The exit code is 1 if something was wrong
or missing, and 3 if on a GPU a bar was missed.
"""

import argparse
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import operators, protocol
from benchmarks.gpu import bars, checks, job, profile, ranks, report, sanitizer, times
from benchmarks.gpu.session import Row, Session
from doge_fast.kernels import implementations
from doge_fast.kernels.dispatch import chosen
from doge_fast.profiling.roofline import bandwidth


class ScriptSection(NamedTuple):
    """What gives rows, and its share of the part's time; what one leaves goes to the next."""

    rows: Callable[[Session], Iterator[Row]]
    share: float = 1.0


class ScriptPart(NamedTuple):
    """Sections by name, and the seconds that all of them have; the last row is not cut."""

    seconds: float
    sections: dict[str, ScriptSection]


PARTS = {
    "correctness": ScriptPart(
        45,
        {
            "correctness": ScriptSection(checks.correctness, 0.2),
            "determinism": ScriptSection(checks.determinism, 0.05),
            "offsets": ScriptSection(checks.offsets, 0.1),
            "graphs": ScriptSection(checks.graphs, 0.05),
            "memcheck": ScriptSection(sanitizer.memcheck, 0.6),
        },
    ),
    "anchor": ScriptPart(200, {"anchor": ScriptSection(times.anchors)}),
    "operators": ScriptPart(120, {"operators": ScriptSection(times.operator_times)}),
    "profile": ScriptPart(100, {"profile": ScriptSection(profile.profiles)}),
    "job": ScriptPart(150, {"job": ScriptSection(job.job)}),
    "steps": ScriptPart(390, {"steps": ScriptSection(times.first_steps)}),
    "sizes": ScriptPart(390, {"sizes": ScriptSection(times.further_steps)}),
    "racecheck": ScriptPart(390, {"racecheck": ScriptSection(sanitizer.racecheck)}),
    "ranks": ScriptPart(390, {"ranks": ScriptSection(ranks.ranks)}),
}
# What runs without a name: twelve minutes, since GPUs come by the quarter of an hour.
STANDARD = ("correctness", "anchor", "operators", "profile", "job")


def run_part(part: str, session: Session, minutes: float | None = None) -> dict[str, Row]:
    """All its sections, by name; `minutes` in the place of the part's own time."""
    sections, found = PARTS[part].sections, {}
    end_s = time.monotonic() + (PARTS[part].seconds if minutes is None else 60 * minutes)
    for name, section in sections.items():
        left = sum(each.share for other, each in sections.items() if other not in found)
        seconds = (end_s - time.monotonic()) * section.share / left
        found[name] = run_section(section.rows, session, seconds)
        print(f"{name}: {report.how_it_went(found[name])}", flush=True)
    return found


def run_section(rows: Callable[[Session], Iterator[Row]], session: Session, seconds: float) -> Row:
    """All rows that there was time for, and what stopped them; the first row has time always.

    "cut" says that rows are missing; the one that came too late is left out, unless it says itself
    that it was skipped.
    """
    start = time.monotonic()
    session = replace(session, end_s=start + seconds)
    found: Row = {"rows": [], "cut": False}
    if session.on_gpu:
        torch.cuda.reset_peak_memory_stats(session.device)
        resting_bytes = torch.cuda.memory_allocated(session.device)
    try:
        for row in rows(session):
            is_late = time.monotonic() >= session.end_s
            if found["rows"] and is_late and "skipped" not in row:
                # Only a further row shows that the last one was not the last.
                found["cut"] = True
                break
            found["rows"].append(row)
            line = report.line_of(row)
            if line is not None:
                print(f"  {line}", flush=True)
    except Exception as failure:
        found["failure"] = f"{type(failure).__name__}: {failure}"
        found["traceback"] = traceback.format_exc().splitlines()[-8:]
    found["seconds"] = round(time.monotonic() - start, 1)
    if session.on_gpu:
        # Some rows measure a peak of their own and begin it anew, or are of another process, which
        # may be all that takes memory.
        peaks = [row["peak_bytes"] for row in found["rows"] if "peak_bytes" in row]
        own_bytes = torch.cuda.max_memory_allocated(session.device)
        peaks += [own_bytes] if own_bytes > resting_bytes else []
        found["peak_bytes"] = max(peaks, default=None)
    protocol.release(session.device)
    return found


def begin(session: Session, commit: str | None) -> Row:
    """What a record says before anything ran: where it is from, what runs there, what is missing.

    Asking compiles what is not in the cache.
    """
    start = time.monotonic()
    reasons = implementations(session.device)
    record: Row = {"benchmark": "gpu", **protocol.machine(session.device)}
    record["commit"] = commit or os.environ.get("DOGE_FAST_COMMIT") or record["commit"]
    record["implementations"] = session.names
    record["missing"] = session.missing()
    record["unavailable"] = {name: reason for name, reason in reasons.items() if reason}
    record["chosen"] = {
        operator: chosen(session.device, operator) for operator in operators.OPERATORS
    }
    record["build_seconds"] = round(time.monotonic() - start, 1)
    limits = bandwidth(session.device, 1 << 20 if session.quick else None)
    record["read_gb_per_s"], record["copy_gb_per_s"] = (round(each / 1e9, 1) for each in limits[:2])
    protocol.release(session.device)
    return record


def end(record: Row, sections: dict[str, Row], session: Session) -> None:
    """Put sections and verdicts into a record."""
    record["sections"] = sections
    record["correct"] = bars.is_correct(sections) and not record["missing"]
    record["bars"] = bars.bars(sections, on_gpu=session.on_gpu)


def write(record: Row, parts: Sequence[str], folder: Path) -> Path:
    """Record and page, named after device, commit and, where others than `STANDARD` ran, parts."""
    names = [record["device"], record["commit"], *([] if tuple(parts) == STANDARD else parts)]
    path = folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', '-'.join(names).lower()).strip('-')}.json"
    protocol.write(path, record)
    path.with_suffix(".md").write_text(report.markdown(record), encoding="utf-8")
    return path


def print_verdicts(record: Row, path: Path) -> None:
    """Bars, what is missing, and whether all was right."""
    for each in record["bars"]:
        value = "no value" if each["value"] is None else report.text_of(each["value"])
        print(f"{each['verdict']:<13}{each['bar']}: {value}")
    for line in report.missing_lines(record):
        print(f"{'MISSING':<13}{line}")
    print(f"{path}: everything checked was {'right' if record['correct'] else 'NOT RIGHT'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, print; see `bars.exit_code`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Not by `choices`: of what may be left out they would have to hold the default too.
    words = f"of {', '.join(PARTS)}; {', '.join(STANDARD)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=words)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny problems, for a test of this")
    parser.add_argument("--minutes", type=float, help="of each part, in place of its own")
    parser.add_argument("--tokens", type=Path, help="a .pt of domains that the job trains on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--commit", help="where the checkout has no git; or DOGE_FAST_COMMIT")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no GPU. Run this where it does, or try it out with "
            "--device cpu --quick."
        )
    parts = args.parts or list(STANDARD)
    tokens = None if args.tokens is None else args.tokens.absolute()
    session = Session(torch.empty(0, device=args.device).device, args.quick, tokens)
    start = time.monotonic()
    record = begin(session, args.commit)
    print(f"{record['device']}, commit {record['commit']}: {', '.join(session.names)}", flush=True)
    for line in report.missing_lines(record):
        print(f"{'MISSING':<13}{line}", flush=True)
    sections: dict[str, Row] = {}
    for part in parts:
        sections |= run_part(part, session, args.minutes)
        # What has run is kept if a later part ends the process.
        end(record, sections, session)
        record["seconds"] = round(time.monotonic() - start, 1)
        path = write(record, parts, args.out)
    print_verdicts(record, path)
    return bars.exit_code(record)


if __name__ == "__main__":
    raise SystemExit(main())
