"""The kept records of `benchmarks.peers` as one figure: a step of each over a plain step.

python -m benchmarks.figure docs/_static/benchmarks/steps.svg
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from doge_fast.pipeline.reporting.figures import MUTED, PALETTE, Drawing, canvas

RESULTS = Path(__file__).parent / "results"
LABELS = {
    "doge_fast, stacked": "DoGEOptimizer, stacked",
    "doge_fast": "DoGEOptimizer",
    "torch.func.vmap": "torch.func.vmap",
    "flatten, torch.mm": "flatten, torch.mm",
    "TorchJD autogram": "TorchJD autogram",
    "TorchJD autojac": "TorchJD autojac",
}


def drawn(records: Sequence[dict[str, Any]]) -> Figure:
    """Medians as points, quartiles as lines, a colour for each machine.

    Args:
        records: what `benchmarks.peers --json` wrote.
    """
    figure, axes = canvas(2.9)
    for place, record in enumerate(records):
        rows = {row["peer"]: row for row in record["rows"] if "ratio" in row}
        offset = 0.36 * (place - (len(records) - 1) / 2)
        heights = [height + offset for height in range(len(LABELS))]
        ratios = [rows[peer]["ratio"] for peer in LABELS]
        axes.hlines(
            heights,
            [rows[peer]["low"] for peer in LABELS],
            [rows[peer]["high"] for peer in LABELS],
            color=PALETTE[place],
        )
        axes.plot(ratios, heights, "o", ms=5, color=PALETTE[place], label=record["device"])
        for ratio, height in zip(ratios, heights, strict=True):
            axes.text(6, height, f"{ratio:.2f}", color=PALETTE[place], va="center", ha="right")
    axes.axvline(1, color=MUTED, lw=0.8, ls=":")
    axes.set_xlim(0, 6)
    axes.set_yticks(range(len(LABELS)), LABELS.values())
    axes.invert_yaxis()
    axes.set_xlabel("step over a plain step on the same tokens")
    axes.legend(loc="upper center", fontsize=8, bbox_to_anchor=(0.62, 1))
    return figure


def main(words: Sequence[str] | None = None) -> int:
    """Draw the records in `results/`; the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.figure", description=__doc__)
    parser.add_argument("out", type=Path, help="the SVG to write")
    out: Path = parser.parse_args(words).out
    files = sorted(RESULTS.glob("peers-*.json"))
    out.parent.mkdir(parents=True, exist_ok=True)
    found = [json.loads(file.read_text("utf-8")) for file in files]
    out.write_text(Drawing("steps", "", partial(drawn, found)).svg, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
