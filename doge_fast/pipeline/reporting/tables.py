"""The report's tables, before they are a page's or a terminal's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.mixtures import (
    MAX_EPOCHS,
    PAPER_NOTE,
    Mixture,
    baselines_of,
    budget_of,
    effective_domains,
    mixtures_of,
    paper_mixture,
)
from doge_fast.pipeline.reporting.paper import columns_beside
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import Arm, Comparison, Proxy, Study
from doge_fast.pipeline.reporting.verdicts import beats, num_better
from doge_fast.pipeline.reporting.wording import (
    count_text,
    listed,
    or_dash,
    perplexity_stat,
    stat_of,
    weight_text,
)
from doge_fast.pipeline.tables import Cell, Row, Table


def perplexity_table(comparison: Comparison) -> Table:
    """Perplexity per domain for every arm, as tab:universal_ppl."""
    arms, names = comparison.arms, comparison.domains
    rows = [_perplexity_row(f"{name} (target)", [name], comparison) for name in comparison.targets]
    if len(comparison.targets) > 1:
        rows.append(_perplexity_row("average of targets", comparison.targets, comparison))
    rows = [row._replace(is_total=True) for row in rows]
    rows += [_perplexity_row(name, [name], comparison) for name in names]
    average = "average, training domains" if comparison.targets else "average"
    rows.append(_perplexity_row(average, names, comparison)._replace(is_total=True))
    rows.append(Row("worst case", [_worst_cell(arm, comparison) for arm in arms], True))
    better = [Cell(_better_count(arm, comparison)) for arm in arms]
    rows.append(Row("better than uniform", better, True))
    return Table(
        title=f"Perplexity per domain: {comparison.title.lower()}",
        note=(
            f"Held-out text; {comparison.settings}. Bold: better than uniform. The average is the "
            f"exponential of the mean loss.{_error_note(arm.losses for arm in arms)}"
        ),
        corner="domain",
        columns=[(arm.label, _column_about(arm.about, len(arm.losses))) for arm in arms],
        rows=rows,
    )


def _perplexity_row(label: str, names: Sequence[str], comparison: Comparison) -> Row:
    uniform = comparison.uniform
    cells = [
        Cell(
            perplexity_stat(arm.perplexity(names)),
            uniform is not None and beats(arm, uniform, names),
        )
        for arm in comparison.arms
    ]
    return Row(label, cells)


def _worst_cell(arm: Arm, comparison: Comparison) -> Cell:
    _, own = arm.worst(comparison.domains)
    uniform = comparison.uniform
    is_better = uniform is not None and own.mean < uniform.worst(comparison.domains)[1].mean
    return Cell(perplexity_stat(own), is_better)


def _better_count(arm: Arm, comparison: Comparison) -> str:
    uniform = comparison.uniform
    if uniform is None or arm is uniform:
        return "–"
    return f"{num_better(arm, uniform, comparison)} of {len(comparison.domains)}"


def _column_about(about: str, num_seeds: int) -> str:
    return about if num_seeds == 1 else f"{about}, {num_seeds} seeds"


def _error_note(groups: Iterable[Sequence[object]]) -> str:
    return " ±: standard error over seeds." if any(len(group) > 1 for group in groups) else ""


def weights_table(study: Study) -> Table:
    """Weights of all proxies side by side, as tab:ood-dw; the paper's where the domains match."""
    mixtures = mixtures_of(study)
    if study.proxies and _is_for_all(study.proxies):
        mixtures = [baselines_of(study.proxies[0].first)[1], *mixtures]
    paper = [column for mixture in mixtures if (column := paper_mixture(mixture, study))]
    mixtures += paper
    names = [name for name in study.colors if any(name in each.weights for each in mixtures)]
    names += [name for name in study.colors if any(name in each.targets for each in mixtures)]
    rows = [
        Row(name, [_weight_cell(name, mixture) for mixture in mixtures])
        for name in dict.fromkeys(names)
    ]
    uniform = [Cell(f"{1 / len(mixture.weights):.3f}") for mixture in mixtures]
    effective = [
        Cell(f"{effective_domains(mixture.weights):.1f} of {len(mixture.weights)}")
        for mixture in mixtures
    ]
    rows += [Row("uniform would be", uniform, True), Row("effective domains", effective, True)]
    return Table(
        title="Domain weights",
        note=(
            "Averages over the proxies' steps. Bold: above uniform. Effective domains: exp of the "
            f"entropy of the weights.{_error_note(proxy.runs for proxy in study.proxies)}"
            f"{PAPER_NOTE if paper else ''}"
        ),
        corner="domain",
        columns=[(mixture.label, mixture.about) for mixture in mixtures],
        rows=rows,
    )


def _is_for_all(proxies: Sequence[Proxy]) -> bool:
    """Whether the natural weights of the first proxy's domains are worth a column for all."""
    tokens = proxies[0].first.train_tokens
    return all(proxy.first.train_tokens.items() <= tokens.items() for proxy in proxies)


def _weight_cell(name: str, mixture: Mixture) -> Cell:
    if name in mixture.targets:
        return Cell("target")
    if name not in mixture.weights:
        return Cell("–")
    stat = mixture.weights[name]
    return Cell(weight_text(stat), stat.mean > 1 / len(mixture.weights))


def _epoch_tables(study: Study, token_budget: int | None) -> list[Table]:
    """One for every set of domains that weights were made for."""
    budget = budget_of(study, token_budget)
    runs: dict[tuple[tuple[str, int], ...], Run] = {}
    for run in sorted(study.runs, key=lambda run: bool(run.targets)):
        runs.setdefault(tuple(run.train_tokens.items()), run)
    tables = []
    for run in runs.values():
        mixtures = [
            mixture for mixture in mixtures_of(study) if mixture.train_tokens == run.train_tokens
        ]
        tables.append(_epoch_table(run, [*baselines_of(run), *mixtures], budget))
    return tables


def _epoch_table(run: Run, mixtures: Sequence[Mixture], budget: int) -> Table:
    epochs = [mixture.epochs(budget) for mixture in mixtures]
    rows = [
        Row(
            name,
            [
                Cell(count_text(tokens)),
                *(Cell(f"{each[name]:.2f}", is_warning=each[name] > MAX_EPOCHS) for each in epochs),
            ],
        )
        for name, tokens in run.train_tokens.items()
    ]
    without = f", without {listed(run.targets)}" if run.targets else ""
    return Table(
        title=f"Implied epochs{without}",
        note=(
            f"How often {count_text(budget)} tokens at these weights go through each domain. "
            f"Marked: above {MAX_EPOCHS:.0f}, where repeated text is worth less than fresh text."
        ),
        corner="domain",
        columns=[("tokens", "in all"), *((mixture.label, mixture.about) for mixture in mixtures)],
        rows=rows,
    )


def runs_table(study: Study) -> Table:
    """Every run and its settings, a line each."""
    columns = ("stage", "what", "model", "steps", "tokens", "peak lr", "seed", "s per step", "date")
    rows = [
        Row(
            run.name,
            [
                Cell(run.stage),
                Cell(_what(run)),
                Cell(str(run.config["model"]["model"])),
                Cell(str(run.steps)),
                Cell(count_text(run.tokens)),
                Cell(f"{run.config['training']['learning_rate']:g}"),
                Cell(str(run.seed)),
                Cell(or_dash(run.seconds_per_step, ".2g")),
                Cell(run.created[:10]),
            ],
        )
        for run in study.runs
    ]
    return Table("Runs", "", "run", [(column, "") for column in columns], rows)


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
    for run in study.runs:
        for name, entry in {**run.corpus["domains"], **run.corpus["targets"]}.items():
            entries.setdefault(name, entry)
    keys = ("train_tokens", "documents", "train_blocks", "validation_blocks")
    rows = [
        Row(name, [Cell(f"{entry[key]:,}".replace(",", " ")) for key in keys])
        for name, entry in entries.items()
    ]
    block_size = study.runs[0].corpus["block_size"]
    columns = ["training tokens", "documents", "training blocks", "held-out blocks"]
    note = f"Blocks of {block_size} tokens; a vocabulary of {study.runs[0].corpus['vocab_size']}."
    return Table("Corpus", note, "domain", [(column, "") for column in columns], rows)


def task_table(title: str, arms: Mapping[str, tuple[str, Sequence[Json]]]) -> Table | None:
    """k-shot accuracies, as tab:fewshot.

    Args:
        title: of the table.
        arms: {label: (about, fewshot.json of each seed)}.

    Returns:
        The table of the tasks that all have; None where there are none.
    """
    told = {label: found for label, (_, found) in arms.items() if found}
    if not told:
        return None
    scored = [record["tasks"] for found in told.values() for record in found]
    names = [name for name in scored[0] if all(name in tasks for tasks in scored)]
    if not names:
        return None
    paper = columns_beside("tab:fewshot", {**{name: name for name in names}, "average": "average"})
    rows = []
    for name in (*names, "average"):
        values = [
            [record["tasks"][name] if name in names else record["average"] for record in found]
            for found in told.values()
        ]
        # The average is of these tasks alone where the paper's is of all its six.
        printed = [
            f"{column[name]:.1f}" if name in column and (name in names or len(names) == 6) else ""
            for column in paper.values()
        ]
        cells = [Cell(accuracy_text(scores)) for scores in values]
        chance = Cell(f"{100 * values[0][0]['chance']:.1f}")
        rows.append(Row(name, [*cells, chance, *map(Cell, printed)], name == "average"))
    cut = any(task["truncated_requests"] for tasks in scored for task in tasks.values())
    shots = {record["shots"] for found in told.values() for record in found}
    note = (
        "Accuracy in per cent; answered examples before a question: "
        f"{listed(map(str, sorted(shots)))}; ±: standard error, of documents and, where there are "
        "several, of seeds."
    )
    if cut:
        note += " Prompts were cut to fit the models' positions: these are not full k-shot scores."
    columns = [(label, _column_about(arms[label][0], len(found))) for label, found in told.items()]
    columns += [("chance", "one of the choices")]
    columns += [(f"paper: {label}", "tab:fewshot") for label in paper]
    return Table(title, note, "task", columns, rows)


def _task_table(comparison: Comparison) -> Table | None:
    found = {
        arm.label: (arm.about, [run.few_shot for run in arm.runs if run.few_shot])
        for arm in comparison.arms
    }
    return task_table(f"Tasks: {comparison.title.lower()}", found)


def accuracy_text(scores: Sequence[Json]) -> str:
    """The mean over seeds, with the error of seeds and documents together."""
    seeds = stat_of(each["acc"] for each in scores)
    of_documents = [each["acc_stderr"] for each in scores]
    mean = f"{100 * seeds.mean:.1f}"
    if None in of_documents:
        return mean
    # Seeds answer the same documents, so that more of them do not make these fewer.
    error = math.hypot(seeds.error or 0.0, math.fsum(of_documents) / len(scores))
    return f"{mean} ± {100 * error:.1f}"


def tables_of(study: Study, token_budget: int | None) -> list[Table]:
    """All results as tables."""
    tables = [perplexity_table(each) for each in study.comparisons if each.domains and each.arms]
    tables += [table for each in study.comparisons if (table := _task_table(each)) is not None]
    if mixtures_of(study):
        tables.append(weights_table(study))
    return tables + _epoch_tables(study, token_budget)
