"""Which implementation of each operator a GPU should run, from what was measured on one.

    python -m benchmarks.prefer benchmarks/results/gpu-nvidia-h200-0123456789.json

Writes kernels/measured.json, which the dispatcher reads: {"sm_90": {"gram": "cuda", ...,
"source": the file}}. Architectures that are in it already stay, unless this one is among them.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "kernels" / "measured.json"
OPERATORS = ("gram", "weighted_sum", "accumulate", "reweight")
# What tells one problem from another.
KEYS = ("operator", "label", "shape", "rows", "columns", "dtype")


def preferences(record: dict[str, Any]) -> dict[str, str]:
    """{operator: implementation}: the smallest geometric mean of times over the same problems.

    Only problems that every implementation of the operator ran are compared. Each counts the
    same, so that no single large one decides; the price of a call has problems of its own.

    Raises:
        ValueError: the record is not of a GPU, something in it was not right, or an operator was
            not measured in any implementation.
    """
    if not record.get("architecture"):
        raise ValueError(
            f"preferences are for GPUs; the record is of {record.get('device')!r}. Give a record "
            "that benchmarks/gpu.sh wrote on one."
        )
    if not record["correct"]:
        raise ValueError(
            "something was not right on that device, and a wrong operator has no speed. "
            "See `sections` of the record for what."
        )
    rows = record["sections"].get("operators", {}).get("rows", [])
    return {operator: _fastest(operator, rows) for operator in OPERATORS}


def _fastest(operator: str, rows: Sequence[dict[str, Any]]) -> str:
    times: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["operator"] == operator and "ms" in row:
            times[tuple(row[key] for key in KEYS)][row["implementation"]] = row["ms"]
    names = {name for each in times.values() for name in each}
    shared = [each for each in times.values() if each.keys() == names]
    if not shared:
        raise ValueError(
            f"{operator} was not measured with the same problems in {sorted(names) or 'any'} "
            "implementation(s). Run benchmarks/gpu.sh operators with more --minutes."
        )
    scores = {name: sum(math.log(each[name]) for each in shared) for name in names}
    return min(sorted(names), key=scores.__getitem__)


def write(record: dict[str, Any], source: str, path: Path = MEASURED) -> dict[str, Any]:
    """Put the preferences of the record's architecture into `path`; all that it then holds."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known[record["architecture"]] = {**preferences(record), "source": source}
    text = json.dumps(dict(sorted(known.items())), indent=1) + "\n"
    path.write_text(text, encoding="utf-8")
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, choose, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="that benchmarks/gpu.sh wrote")
    parser.add_argument("--out", type=Path, default=MEASURED)
    args = parser.parse_args(arguments)
    record = json.loads(args.record.read_text(encoding="utf-8"))
    path = args.record.resolve()
    source = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    try:
        known = write(record, source, args.out)
    except ValueError as refusal:
        parser.error(str(refusal))
    print(f"{args.out}: {json.dumps(known[record['architecture']])}")


if __name__ == "__main__":
    main()
