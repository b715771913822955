"""What it costs to come by weights: tab:robust's last row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arms import Part
from doge_fast.pipeline.reporting.experiment import Experiment
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.wording import count_text, plural
from doge_fast.pipeline.tables import Cell, Row, Table


def cost_part(experiment: Experiment, group: Json, prefix: str) -> Part:
    """Tokens, FLOPs and hours of each method, and against the first's."""
    methods = {}
    for method in group["methods"]:
        seeds = [
            [experiment.runs[name] for name in names]
            for names in method["runs"]
            if all(experiment.is_complete(name) for name in names)
        ]
        if seeds:
            methods[method["label"]] = [_cost_of(runs) for runs in seeds]
    if not methods:
        return Part([], [], [])
    first = next(iter(methods.values()))
    keys = (("tokens", "tokens", 1), ("FLOPs", "flops", 1), ("hours", "seconds", 3600))
    rows = []
    for label, key, unit in keys:
        means = {
            name: float(np.mean([getattr(each, key) for each in costs])) / unit
            for name, costs in methods.items()
        }
        rows.append(
            Row(
                label,
                [
                    Cell(f"{value:.3g}" if unit > 1 else count_text(value))
                    for value in means.values()
                ],
            )
        )
        base = float(np.mean([getattr(each, key) for each in first])) / unit
        rows.append(
            Row(
                f"{label}, against {next(iter(methods))}",
                [Cell(f"{value / base:.2f} ×" if base else "–") for value in means.values()],
                True,
            )
        )
    table = Table(
        title=group["title"],
        note=(
            "All models that have to be trained, mean over seeds. FLOPs: 6 for each parameter and "
            "token of a step, 2 for each that the reference only reads, and 2 for each entry of "
            "the Gram matrix and parameter. Hours: steps at their median time on this machine. "
            "The paper (tab:robust, four A100): 6.0 hours for DoGE and 39.0 for DoReMi at 82M."
        ),
        corner="",
        columns=[(name, plural(len(costs), "seed")) for name, costs in methods.items()],
        rows=rows,
    )
    return Part([], [table], [])


class _Cost(NamedTuple):
    tokens: float
    flops: float
    seconds: float


def _cost_of(runs: Sequence[Run]) -> _Cost:
    """Of one seed's runs together."""
    tokens = sum(run.tokens_seen for run in runs)
    seconds = sum(run.steps * run.seconds_per_step for run in runs)
    flops = 0.0
    for run in runs:
        flops += 6 * run.num_parameters * run.tokens_seen
        if run.stage == "proxy":
            rows = len(run.domains) * run.tokens_seen // run.tokens
            flops += rows * (rows + 1) * run.num_parameters * run.steps
        if run.stage == "doremi":
            references = [other for other in runs if other.stage == "base"]
            flops += sum(2 * other.num_parameters for other in references) * run.tokens
    return _Cost(tokens, flops, seconds)
