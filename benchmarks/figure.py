"""Kept records as figures: what a step costs, and what the weights of one proxy gain.

python -m benchmarks.figure steps docs/_static/benchmarks/steps.svg
python -m benchmarks.figure targets docs/_static/evidence/targets.svg
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from doge_fast.pipeline.reporting.figures import MUTED, PALETTE, Drawing, canvas
from doge_fast.pipeline.reporting.statistics import change_of, paired_difference

RESULTS = Path(__file__).parent / "results"
LABELS = {
    "doge_fast, stacked": "DoGEOptimizer, stacked",
    "vmap, compiled": "torch.func.vmap, compiled",
    "doge_fast": "DoGEOptimizer",
    "torch.func.vmap": "torch.func.vmap",
    "flatten, torch.mm": "flatten, torch.mm",
    "TorchJD autogram": "TorchJD autogram",
    "TorchJD autojac": "TorchJD autojac",
}
# {question: its target as the figure names it}, of those with one target that is not trained on.
TARGETS = {
    "groups": "C4, four of six in another alphabet",
    "hidden": "GitHub, a tenth of arXiv is GitHub",
    "github": "GitHub, from six others",
    "ca": "Catalan, from five languages",
    "wikipedia": "Wikipedia, from six others",
    "stackexchange": "Stack Exchange, from six others",
    "nl": "Dutch, from five languages",
}
WAYS = {"aligned": "aligned rule", "DoGE, mu / 4": "paper's score, mu / 4", "DoGE": "paper's score"}


def steps(records: Sequence[dict[str, Any]]) -> Figure:
    """Medians as points, quartiles as lines, a colour for each machine.

    Args:
        records: what `benchmarks.peers --json` wrote.
    """
    figure, axes = canvas(2.9)
    for place, record in enumerate(records):
        rows = {row["peer"]: row for row in record["rows"] if "ratio" in row}
        offset = 0.36 * (place - (len(records) - 1) / 2)
        # A record may be older than a way.
        measured = [peer for peer in LABELS if peer in rows]
        heights = [list(LABELS).index(peer) + offset for peer in measured]
        ratios = [rows[peer]["ratio"] for peer in measured]
        axes.hlines(
            heights,
            [rows[peer]["low"] for peer in measured],
            [rows[peer]["high"] for peer in measured],
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
    axes.legend(loc="upper center", fontsize=8, bbox_to_anchor=(0.57, 1))
    return figure


def targets(records: Sequence[dict[str, Any]]) -> Figure:
    """Changes of perplexity against uniform weights, 95 % of paired differences over seeds.

    Args:
        records: what `benchmarks.temperature --one-proxy` wrote, in the order of `TARGETS`.
    """
    figure, axes = canvas(3.6)
    figure.set_figwidth(7.2)
    for place, way in enumerate(WAYS):
        offset = 0.24 * (place - 1)
        for height, record in enumerate(records):
            own, uniform = (
                {each["seed"]: each["methods"][name]["loss"] for each in record["seeds"]}
                for name in (way, "uniform")
            )
            mean, low, high = (100 * each for each in change_of(paired_difference(own, uniform)))
            label = WAYS[way] if height == 0 else None
            axes.hlines(height + offset, low, high, color=PALETTE[place])
            axes.plot(mean, height + offset, "o", ms=5, color=PALETTE[place], label=label)
    axes.axvline(0, color=MUTED, lw=0.8, ls=":")
    axes.set_xlim(-50, 30)
    axes.set_yticks(range(len(TARGETS)), TARGETS.values())
    axes.invert_yaxis()
    axes.set_xlabel("perplexity on the target against equal weights, %")
    axes.legend(loc="lower center", fontsize=8, ncols=len(WAYS), bbox_to_anchor=(0.4, 1))
    return figure


# {name: (how it is drawn, its records)}
FIGURES = {
    "steps": (steps, sorted(RESULTS.glob("peers-*.json"))),
    "targets": (targets, [RESULTS / f"evidence-one-proxy-{each}.json" for each in TARGETS]),
}


def main(words: Sequence[str] | None = None) -> int:
    """Draw the records in `results/`; the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.figure", description=__doc__)
    parser.add_argument("name", choices=list(FIGURES))
    parser.add_argument("out", type=Path, help="the SVG to write")
    args = parser.parse_args(words)
    draw, files = FIGURES[args.name]
    found = [json.loads(file.read_text("utf-8")) for file in files]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(Drawing(args.name, "", partial(draw, found)).svg, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
