"""What was asked of a GPU, what came out, and what that says of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import anchor, cases, optimizer_step
from benchmarks.gpu.session import Row

# Operator, K and dtype of what must reach the bandwidth of a copy.
FRACTIONS = [
    (operator, num_rows, dtype)
    for operator in ("gram", "weighted_sum")
    for num_rows, dtype in ((7, "float32"), (7, "bfloat16"), (22, "bfloat16"))
]
FRACTION_BAR, FRACTION_COLUMNS = 0.85, 82e6
NO_WAIT = "none"
MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"
# No size fits the memory.
SKIPPED = "skipped"
# On a CPU.
NOT_JUDGED = "not judged"
# Of a run, worst last: a miss on a GPU is none of what argparse and Python themselves end with.
ALL_WELL, WRONG, BARS_MISSED = 0, 1, 3
# Sections whose rows say whether something is right: each must have run to its end.
CHECKING = ("correctness", "determinism", "offsets", "graphs", "memcheck", "racecheck", "ranks")

Sections = Mapping[str, Row]


def is_correct(sections: Sections) -> bool:
    """Whether nothing was wrong, nothing failed, and no check is missing."""
    return all(
        "failure" not in section
        and section["rows"]
        and not any(row.get("correct") is False for row in section["rows"])
        and not (name in CHECKING and section["cut"])
        for name, section in sections.items()
    )


def exit_code(record: Row) -> int:
    """0: all well. 1: something is wrong or missing. 3: a bar is missed or was not measured."""
    if not record["correct"]:
        return WRONG
    verdicts = {each["verdict"] for each in record["bars"]}
    return BARS_MISSED if verdicts & {MISSED, NOT_MEASURED} else ALL_WELL


def bars(sections: Sections, *, on_gpu: bool) -> list[Row]:
    """Those of the sections that ran; "not measured" where a row is missing or was skipped."""
    found = _bars(sections)
    return found if on_gpu else [each | {"verdict": NOT_JUDGED} for each in found]


def _bars(sections: Sections) -> list[Row]:
    found: list[Row] = []
    if "graphs" in sections:
        found.append(_graph_bar(sections["graphs"]["rows"]))
    if "anchor" in sections:
        anchored = sections["anchor"]["rows"]
        found += [_anchor_bar(*asked, anchored) for asked in anchor.GPU_BARS.items()]
    rows = [*sections.get("sizes", {}).get("rows", []), *sections.get("steps", {}).get("rows", [])]
    if "steps" in sections or "sizes" in sections:
        found += [_step_bar(*asked, bar, rows) for asked, bar in optimizer_step.GPU_BARS.items()]
        found.append(_waiting_bar(rows))
    if "operators" in sections:
        found += [_fraction_bar(*asked, sections["operators"]["rows"]) for asked in FRACTIONS]
    return found


def _graph_bar(rows: Sequence[Row]) -> Row:
    differences = [row["largest_difference"] for row in rows if "skipped" not in row]
    found = cases.largest(differences) if differences else None
    return _bar("a captured step is the step, to the bit", found, lambda value: value == 0)


def _step_bar(mode: str, num_domains: int, bar: float, rows: Sequence[Row]) -> Row:
    """The worst size of those that fit; not measured where a row is missing."""
    asked = [row for row in rows if (row["mode"], row["domains"]) == (mode, num_domains)]
    ratios = [row["ratio"] for row in asked if "ratio" in row]
    is_complete = {row["model"] for row in asked} == {row["model"] for row in rows}
    found = _bar(
        f"{mode} step, K = {num_domains}: at most {bar} of plain, the worst size that fits",
        max(ratios, default=None) if is_complete else None,
        lambda value: value <= bar,
    )
    return found if ratios or not (asked and is_complete) else found | {"verdict": SKIPPED}


def _anchor_bar(num_domains: int, bar: float, rows: Sequence[Row]) -> Row:
    ratios = [row["ratio"] for row in rows if row["domains"] == num_domains and "ratio" in row]
    return _bar(
        f"compiled step, K = {num_domains}: at most {bar} of the fastest plain one, the worst size",
        max(ratios, default=None),
        lambda value: value <= bar,
    )


def _waiting_bar(rows: Sequence[Row]) -> Row:
    waits = [row["host_synchronisations"] for row in rows if "host_synchronisations" in row]
    found = next((wait for wait in waits if wait != NO_WAIT), NO_WAIT if waits else None)
    return _bar("no host synchronisation in a step", found, lambda value: value == NO_WAIT)


def _fraction_bar(operator: str, num_rows: int, dtype: str, rows: Sequence[Row]) -> Row:
    """The better implementation in each shape, the worse of the shapes."""
    best: dict[str, float] = {}
    for row in rows:
        is_asked = (row["operator"], row["rows"], row["dtype"]) == (operator, num_rows, dtype)
        if not is_asked or row["label"]:
            continue
        # Of the memory's roof, also where arithmetic is the longer one.
        fraction = row.get("of_bandwidth", row.get("fraction", [None])[0])
        if fraction is not None and row["columns"] >= FRACTION_COLUMNS:
            best[row["shape"]] = max(best.get(row["shape"], 0.0), fraction)
    return _bar(
        f"{operator}, {dtype}, K = {num_rows}, N >= 82M: "
        f"at least {FRACTION_BAR} of a copy's bandwidth",
        min(best.values(), default=None),
        lambda value: value >= FRACTION_BAR,
    )


def _bar(text: str, value: Any, holds: Callable[[Any], bool]) -> Row:
    if value is None:
        return {"bar": text, "value": None, "verdict": NOT_MEASURED}
    return {"bar": text, "value": value, "verdict": MET if holds(value) else MISSED}
