"""The section of a search for the temperature: loss along the line, and the mixtures on it."""

from functools import partial

from matplotlib.figure import Figure

from doge_fast.pipeline.records.shapes import TemperatureGroup
from doge_fast.pipeline.reporting import figures
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.statistics import (
    PairedDifference,
    change_text,
    paired_difference,
    stat_of,
)
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.tables import Cell, Row, Table


def losses_of(study: Study, group: TemperatureGroup) -> dict[float, dict[int, float]]:
    """{1/T: {seed: the loss that counts}}; a model that diverged is left out."""
    found: dict[float, dict[int, float]] = {}
    for point in group.points:
        losses = study.arm(point.arm).losses
        found[point.inverse] = {
            seed: sum(weight * loss[name] for name, weight in group.aim.items())
            for seed, loss in losses.items()
        }
    return found


def changes_of(losses: dict[float, dict[int, float]]) -> dict[float, PairedDifference]:
    """{1/T: difference to uniform weights over the seeds of both}."""
    uniform = losses.get(0.0, {})
    changes = {}
    for inverse, own in losses.items():
        seeds = [seed for seed in own if seed in uniform]
        changes[inverse] = paired_difference(
            [own[seed] for seed in seeds], [uniform[seed] for seed in seeds]
        )
    return changes


def tables_of(study: Study, group: TemperatureGroup) -> list[Table]:
    """What was measured at each temperature, and the mixtures."""
    losses = losses_of(study, group)
    changes = changes_of(losses)
    points = [point for point in group.points if losses[point.inverse]]
    rows = []
    for point in points:
        loss, change = stat_of(losses[point.inverse].values()), changes[point.inverse]
        cells = [
            Cell(f"{loss.mean:.4f}"),
            Cell(
                "/" if not point.inverse else change_text(change), change.is_lower, change.is_higher
            ),
            Cell(f"{effective_domains(point.weights.values()):.1f} of {len(point.weights)}"),
            Cell("written" if point.inverse == group.chosen else ""),
        ]
        rows.append(Row(f"{point.inverse:g}", cells))
    seeds = max(len(each) for each in losses.values())
    unknown = "" if seeds > 1 else " One seed has no interval: undecided."
    note = (
        f"Loss: mean over {_aim_text(group)}, nats per token. 1/T = 0: uniform weights; 1: the "
        f"proxy's own. Change of perplexity with its 95 % interval over paired seeds.{unknown}"
    )
    heads = [("loss", ""), ("against uniform", ""), ("effective domains", ""), ("", "")]
    measured = Table("Loss at each temperature", note, "1/T", heads, rows)
    shown = [point for point in points if point.inverse in (0.0, 1.0, group.chosen)]
    mixtures = [
        Row(
            name,
            [Cell(f"{point.weights[name]:.3f}") for point in shown]
            + ([Cell(f"{group.epochs[name]:.2f}")] if name in group.epochs else []),
        )
        for name in shown[0].weights
    ]
    labels = [(point.arm.label, f"1/T = {point.inverse:g}") for point in shown]
    if group.epochs:
        labels.append(("epochs", "of the written weights"))
    note = "Epochs: passes over the text of a domain in the training that the weights are for."
    return [measured, Table("Mixtures", note if group.epochs else "", "domain", labels, mixtures)]


def curve(study: Study, group: TemperatureGroup) -> partial[Figure]:
    """Loss over 1/T, ready to be drawn."""
    losses = losses_of(study, group)
    means = {inverse: stat_of(each.values()).mean for inverse, each in losses.items() if each}
    return partial(figures.temperature_figure, means, changes_of(losses), group.chosen)


def _aim_text(group: TemperatureGroup) -> str:
    names = list(group.aim)
    is_equal = max(group.aim.values()) - min(group.aim.values()) < 1e-9
    if len(names) > 4 and is_equal:
        return f"the {len(names)} domains"
    if is_equal:
        return listed(names)
    return listed(f"{name} ({weight:.2f})" for name, weight in group.aim.items())
