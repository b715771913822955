"""The tables about runs: what they were, what text they had, what they cost."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import paper
from doge_fast.pipeline.reporting.mixtures import MAX_EPOCHS, epochs
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import count_text, listed, plural
from doge_fast.pipeline.tables import Cell, Row, Table, table_of


def runs_table(study: Study) -> Table:
    """Every run and its settings, a line each."""
    header = ["run", "stage", "what", "model", "steps", "tokens", "peak lr", "seed"]
    rows = [
        (
            *(run.name, run.stage, _what(run), run.model, str(run.steps), count_text(run.tokens)),
            *(f"{run.config['training']['learning_rate']:g}", str(run.seed)),
            *(_seconds_text(run.seconds_per_step), run.created[:10]),
        )
        for run in study.shown
    ]
    return table_of([*header, "s per step", "date"], rows, title="Runs")


def _seconds_text(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "–"


def _what(run: Run) -> str:
    if run.stage == "base":
        weights = Path(str(run.config["weights"]))
        return f"weights {weights.parent.name if weights.name == records.WEIGHTS else weights.name}"
    if run.stage == "doremi":
        return f"{run.config['variant']}, reference {Path(run.config['reference']).name}"
    return f"target {' '.join(run.config['target'])}, mu {run.config['mu']:g}"


def corpus_table(study: Study) -> Table:
    """What there is of every domain; of a domain of several corpora, what the first run saw."""
    entries: dict[str, Json] = {}
    for run in study.shown:
        for name, entry in {**run.corpus["domains"], **run.corpus["targets"]}.items():
            entries.setdefault(name, entry)
    keys = ("train_tokens", "documents", "train_blocks", "validation_blocks")
    rows = [
        (name, *(f"{entry[key]:,}".replace(",", " ") for key in keys))
        for name, entry in entries.items()
    ]
    header = ("domain", "training tokens", "documents", "training blocks", "held-out blocks")
    corpus = study.shown[0].corpus
    note = f"Blocks of {corpus['block_size']} tokens; a vocabulary of {corpus['vocab_size']}."
    return table_of(header, rows, title="Corpus")._replace(note=note)


def settings_table(record: Json) -> Table:
    """What an experiment was asked."""
    rows = [(name, _setting_text(value)) for name, value in record["settings"].items()]
    return table_of(("setting", "value"), rows, title=f"Preset {record['preset']}")


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "all"
    return "none" if value is None else str(value)


class Mixture(NamedTuple):
    """Domain weights of an arm, and the text that its run had."""

    label: str
    about: str
    weights: Mapping[str, float]
    run: Run

    def epochs(self, budget: int) -> dict[str, float]:
        """How often so many tokens go through each domain."""
        tokens = self.run.train_tokens
        return {name: epochs(weight, tokens[name], budget) for name, weight in self.weights.items()}


def mixtures_of(study: Study) -> list[Mixture]:
    """Every set of weights that was learned or given."""
    return [
        Mixture(
            arm["label"],
            arm["about"],
            study.mean_weights(arm),
            study.runs_of(arm)[0],
        )
        for group in study.groups
        if group["kind"] == "weights"
        for arm in group["arms"]
        if arm["runs"]
    ]


def budget_of(study: Study, token_budget: int | None) -> int:
    """Asked for; else that of the longest base run; else that of the longest proxy."""
    bases = [run for run in study.shown if run.stage == "base"]
    return token_budget or max(run.tokens for run in bases or study.shown)


def epoch_tables(study: Study, token_budget: int | None) -> list[Table]:
    """How often text is read: a table for each set of domains that weights were made for."""
    budget = budget_of(study, token_budget)
    runs: dict[tuple[tuple[str, int], ...], Run] = {}
    for run in sorted(study.shown, key=lambda run: bool(run.targets)):
        runs.setdefault(tuple(run.train_tokens.items()), run)
    return [_epoch_table(run, mixtures_of(study), budget) for run in runs.values()]


def _epoch_table(run: Run, learned: Sequence[Mixture], budget: int) -> Table:
    tokens = run.train_tokens
    shown = [
        Mixture("uniform", "baseline", baselines.uniform(tokens), run),
        Mixture("natural", "by tokens", baselines.natural(tokens), run),
        *(mixture for mixture in learned if mixture.run.train_tokens == tokens),
    ]
    found = [mixture.epochs(budget) for mixture in shown]
    rows = []
    for name, count in tokens.items():
        cells = [Cell(f"{each[name]:.2f}", is_warning=each[name] > MAX_EPOCHS) for each in found]
        rows.append(Row(name, [Cell(count_text(count)), *cells]))
    return Table(
        title=f"Implied epochs{f', without {listed(run.targets)}' if run.targets else ''}",
        note=(
            f"How often {count_text(budget)} tokens at these weights go through each domain. "
            f"Marked: above {MAX_EPOCHS:.0f}, where repeated text is worth less than fresh text."
        ),
        corner="domain",
        columns=[("tokens", "in all"), *((mixture.label, mixture.about) for mixture in shown)],
        rows=rows,
    )


def cost_table(study: Study, group: Json) -> Table | None:
    """Tokens, FLOPs and hours of each method, and against the first's: tab:robust's last row.

    None where no method has a seed whose runs are all complete.
    """
    costs: dict[str, list[tuple[float, float, float]]] = {}
    for method in group["methods"]:
        for names in method["runs"]:
            runs = [study.runs[name] for name in names if name in study.runs]
            if len(runs) == len(names) and all(run.is_complete for run in runs):
                costs.setdefault(method["label"], []).append(_cost_of(runs))
    if not costs:
        return None
    means = {label: np.mean(each, axis=0) for label, each in costs.items()}
    first = next(iter(means))
    rows = []
    for place, (label, unit) in enumerate((("tokens", 1), ("FLOPs", 1), ("hours", 3600))):
        values = [float(mean[place]) / unit for mean in means.values()]
        told = [f"{value:.3g}" if unit > 1 else count_text(value) for value in values]
        ratios = [f"{value / values[0]:.2f} ×" if values[0] else "–" for value in values]
        rows.append(Row(label, [Cell(text) for text in told]))
        rows.append(Row(f"{label}, against {first}", [Cell(text) for text in ratios], True))
    return Table(
        title=group["title"],
        note=(
            "All models that have to be trained, mean over seeds. FLOPs: 6 for each parameter and "
            "token of a step, 2 for each that the reference only reads, and 2 for each entry of "
            "the Gram matrix and parameter. Hours: steps at their median time on this machine."
            f"{paper.NOTES['cost']}"
        ),
        corner="",
        columns=[(label, plural(len(each), "seed")) for label, each in costs.items()],
        rows=rows,
    )


def _cost_of(runs: Sequence[Run]) -> tuple[float, float, float]:
    """(tokens, FLOPs, seconds) of one seed's runs together."""
    flops = 0.0
    for run in runs:
        flops += 6 * run.num_parameters * run.tokens_seen
        if run.stage == "proxy":
            rows = len(run.domains) * run.tokens_seen // run.tokens
            flops += rows * (rows + 1) * run.num_parameters * run.steps
        if run.stage == "doremi":
            references = [other for other in runs if other.stage == "base"]
            flops += sum(2 * other.num_parameters for other in references) * run.tokens
    seconds = sum(run.steps * run.seconds_per_step for run in runs)
    return sum(run.tokens_seen for run in runs), flops, seconds
