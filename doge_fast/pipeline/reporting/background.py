"""What stands around the answer: runs, text, epochs, costs, and what to know before believing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import paper
from doge_fast.pipeline.reporting.mixtures import MAX_EPOCHS, epochs
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import count_text, listed, plural
from doge_fast.pipeline.tables import Cell, Row, Table, table_of


def settings_tables(study: Study, token_budget: int | None) -> list[Table]:
    """What was set and what text there was; of loose runs also how often it is read."""
    tables = [_runs_table(study), _corpus_table(study)]
    if not study.is_experiment:
        return [*_epoch_tables(study, _budget_of(study, token_budget)), *tables]
    rows = [(name, _setting_text(value)) for name, value in study.record["settings"].items()]
    title = f"Preset {study.record['preset']}"
    return [table_of(("setting", "value"), rows, title=title), *tables]


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "all"
    return "none" if value is None else str(value)


def _runs_table(study: Study) -> Table:
    """Every run and its settings, a line each."""
    header = ("run", "stage", "what", "model", "steps", "tokens", "peak lr", "seed")
    rows = [
        (
            *(run.name, run.stage, _what(run), run.model, str(run.steps), count_text(run.tokens)),
            *(f"{run.config['training']['learning_rate']:g}", str(run.seed)),
            f"{run.seconds_per_step:.2g}" if math.isfinite(run.seconds_per_step) else "–",
            run.record.get("created", "")[:10],
        )
        for run in study.shown
    ]
    return table_of((*header, "s per step", "date"), rows, title="Runs")


def _what(run: Run) -> str:
    if run.stage == "base":
        weights = Path(str(run.config["weights"]))
        return f"weights {weights.parent.name if weights.name == records.WEIGHTS else weights.name}"
    if run.stage == "doremi":
        return f"{run.config['variant']}, reference {Path(run.config['reference']).name}"
    return f"target {' '.join(run.config['target'])}, mu {run.config['mu']:g}"


def _corpus_table(study: Study) -> Table:
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


def _weighed(study: Study) -> Iterator[tuple[Json, dict[str, int]]]:
    """Every arm whose weights were learned or given, and the text that its run had."""
    for group in study.groups:
        if group["kind"] == "weights":
            for arm in group["arms"]:
                if arm["runs"]:
                    yield arm, study.runs_of(arm)[0].train_tokens


def _epochs(study: Study, arm: Json, tokens: Mapping[str, int], budget: int) -> dict[str, float]:
    """How often so many tokens go through each domain at an arm's weights."""
    weights = study.mean_weights(arm).items()
    return {name: epochs(weight, tokens[name], budget) for name, weight in weights}


def _budget_of(study: Study, token_budget: int | None) -> int:
    """Asked for; else that of the longest base run; else that of the longest proxy."""
    bases = [run for run in study.shown if run.stage == "base"]
    return token_budget or max(run.tokens for run in bases or study.shown)


def _epoch_tables(study: Study, budget: int) -> Iterator[Table]:
    """How often text is read: a table for each set of domains that weights were made for."""
    runs: dict[tuple[tuple[str, int], ...], Run] = {}
    for run in sorted(study.shown, key=lambda run: bool(run.targets)):
        runs.setdefault(tuple(run.train_tokens.items()), run)
    for run in runs.values():
        tokens = run.train_tokens
        shown = [
            {"label": "uniform", "about": "baseline", "weights": baselines.uniform(tokens)},
            {"label": "natural", "about": "by tokens", "weights": baselines.natural(tokens)},
            *(arm for arm, own in _weighed(study) if own == tokens),
        ]
        found = [_epochs(study, arm, tokens, budget) for arm in shown]
        rows = []
        for name, count in tokens.items():
            told = [Cell(f"{each[name]:.2f}", False, each[name] > MAX_EPOCHS) for each in found]
            rows.append(Row(name, [Cell(count_text(count)), *told]))
        note = (
            f"How often {count_text(budget)} tokens at these weights go through each domain. "
            f"Marked: above {MAX_EPOCHS:.0f}, where repeated text is worth less than fresh text."
        )
        title = f"Implied epochs{f', without {listed(run.targets)}' if run.targets else ''}"
        heads = [("tokens", "in all"), *((arm["label"], arm["about"]) for arm in shown)]
        yield Table(title, note, "domain", heads, rows)


def cost_table(study: Study, group: Json) -> Table | None:
    """Tokens, FLOPs and hours of each method, and against the first's: tab:robust's last row.

    None where no method has a seed whose runs are all complete.
    """
    costs: dict[str, list[tuple[float, float, float]]] = {}
    for method in group["methods"]:
        for names in method["runs"]:
            runs = study.runs_of({"runs": names})
            if len(runs) == len(names) and all(run.is_complete for run in runs):
                costs.setdefault(method["label"], []).append(_cost_of(runs))
    if not costs:
        return None
    means = [np.mean(each, axis=0) for each in costs.values()]
    rows = []
    for place, (label, unit) in enumerate((("tokens", 1), ("FLOPs", 1), ("hours", 3600))):
        values = [float(mean[place]) / unit for mean in means]
        told = [f"{value:.3g}" if unit > 1 else count_text(value) for value in values]
        ratios = [f"{value / values[0]:.2f} ×" if values[0] else "–" for value in values]
        rows.append(Row(label, [Cell(text) for text in told]))
        against = f"{label}, against {next(iter(costs))}"
        rows.append(Row(against, [Cell(text) for text in ratios], True))
    note = (
        "All models that have to be trained, mean over seeds. FLOPs: 6 for each parameter and "
        "token of a step, 2 for each that the reference only reads, and 2 for each entry of "
        "the Gram matrix and parameter. Hours: steps at their median time on this machine."
        f"{paper.NOTES['cost']}"
    )
    heads = [(label, plural(len(each), "seed")) for label, each in costs.items()]
    return Table(group["title"], note, "", heads, rows)


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


def warnings_about(study: Study, token_budget: int | None) -> list[str]:
    """Everything that a reader should know before believing a number."""
    found = list(_plan_warnings(study) if study.is_experiment else ())
    # Runs of one corpus say the same.
    found += dict.fromkeys(told for run in study.shown for told in run.record.get("warnings", ()))
    for proxy in study.proxies:
        found += (f"{proxy.label}: {told}" for told in proxy.warnings())
    found += [
        f"{proxy.label}: one seed, so the spread of its weights is unknown."
        for proxy in study.proxies
        if proxy.has_steps and len(proxy.runs) == 1
    ]
    for run in study.shown:
        found += (f"{run.name}: {told}" for told in _run_warnings(run))
    for group in study.groups:
        if group["kind"] == "perplexity" and not study.is_experiment:
            found += (f"{group['title']}: {told}" for told in _comparison_warnings(study, group))
    return found if study.is_experiment else [*found, *_epoch_warnings(study, token_budget)]


def _plan_warnings(study: Study) -> Iterator[str]:
    """Of an experiment: what is missing, and how much its seeds can tell."""
    unscored = [name for name in study.unscored if name not in study.unmeasured]
    told = ((study.unmeasured, "not complete yet"), (unscored, "not scored on the tasks yet"))
    for missing, why in told:
        if missing:
            shown = listed(missing[:5]) + (" and others" if len(missing) > 5 else "")
            yield (
                f"{plural(len(missing), 'run')} of {len(study.record['runs'])} {why}, so left out: "
                f"{shown}. The same command goes on with them."
            )
    seeds = study.record["settings"]["seeds"]
    if len(seeds) == 1:
        yield "1 seed: differences cannot be told from chance. Take three or more."
    elif len(seeds) == 2:
        yield "2 seeds: every interval rests on how two numbers differ. Take three or more."
    for group in study.groups:
        if group["kind"] == "tasks":
            yield from (f"{group['title']}: {told}" for told in _task_warnings(study, group))
    if study.record["preset"] == "smoke":
        yield "preset smoke: runs of a few steps, which show that everything works and no more."


def _task_warnings(study: Study, group: Json) -> Iterator[str]:
    if group["task_limit"] is not None:
        first = plural(group["task_limit"], "document")
        yield f"of every task the first {first} alone; the paper's are whole."
    told = [record for each in study.scores(group).values() for record in each.values()]
    scores = [task for record in told for task in record["tasks"].values()]
    cut = sum(task["truncated_requests"] for task in scores)
    if cut:
        share = f"{100 * cut / sum(task['requests'] for task in scores):.0f} %"
        positions = plural(told[0]["positions"], "position")
        yield f"{share} of the prompts were cut to fit {positions}; their first shots are lost."


def _run_warnings(run: Run) -> Iterator[str]:
    if run.is_lost:
        yield (
            f"diverged, its records end at step {run.last_step} of {run.steps} and it left no "
            "result. Repeat it in another directory with a lower learning_rate."
        )
    elif not run.is_complete:
        yield (
            f"not complete, its records end at step {run.last_step} of {run.steps}. The command "
            "that began it resumes it."
        )
    if run.skipped:
        yield f"{plural(run.skipped, 'logged step')} skipped for a gradient that was not finite."
    losses = run.losses() or {}
    diverged = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if diverged:
        yield f"diverged; the held-out loss of {listed(diverged)} is not finite."


def _comparison_warnings(study: Study, group: Json) -> Iterator[str]:
    found = study.comparison(group)
    missing = len(group["arms"]) - len(found.arms)
    if missing:
        yield f"{plural(missing, 'arm')} not measured yet, so left out."
    if not found.arms:
        return
    if found.baseline is None:
        yield "no uniform baseline at these settings."
    if not group["others"] and all(arm.label != "natural" for arm in found.arms):
        yield "no natural baseline at these settings."
    single = [arm.label for arm in found.arms if len(arm.losses) == 1]
    if single:
        yield f"one seed of {listed(single)}, so differences may be chance."
    measured = [run.measured_blocks() for arm in found.arms for run in arm.runs.values()]
    if any(blocks != measured[0] for blocks in measured):
        yield "the arms were measured on different numbers of held-out blocks."


def _epoch_warnings(study: Study, token_budget: int | None) -> Iterator[str]:
    budget = _budget_of(study, token_budget)
    for arm, tokens in _weighed(study):
        passes = _epochs(study, arm, tokens, budget)
        often = {name: count for name, count in passes.items() if count > MAX_EPOCHS}
        if often:
            yield (
                f"{arm['label']}: {count_text(budget)} tokens at these weights repeat "
                f"{listed(f'{name} {count:.1f} times' for name, count in often.items())}; "
                f"beyond {MAX_EPOCHS:.0f} epochs text is worth less. Use smoothing, or "
                "get more of it."
            )
