"""The sections of a report: headline, tables, figures and remarks of each, as data.

The page and the terminal show the same sections, in the order of `page_of`.
"""

import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.reporting import figures
from doge_fast.pipeline.reporting.figures import Drawing
from doge_fast.pipeline.reporting.proxies import mean_weights
from doge_fast.pipeline.reporting.runs import RecordedRun
from doge_fast.pipeline.reporting.statistics import (
    Line,
    PairedDifference,
    Stat,
    change_of,
    change_text,
    perplexity_text,
    share_text,
)
from doge_fast.pipeline.reporting.study import Study, open_study
from doge_fast.pipeline.tables import Cell, Table, table_of
from doge_fast.pipeline.wording import count_text, first_few, held_out_text, listed, plural
from doge_fast.weights.projection import effective_domains

MARKS = (
    "Bold, or with a * on a terminal: lower, and the 95 % interval over paired seeds leaves out "
    "zero; with a !: higher."
)
ONE_SEED = " One seed has no interval: undecided."
ERRORS = " ±: standard error over seeds."
# Largest number of mixtures in a bar chart.
_MOST_BARS = 3


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    headline: str = ""
    """The result of its comparison, in one line."""
    commands: Sequence[str] = ()
    """Shell commands to copy."""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The content of a report, before it becomes HTML or text."""

    title: str
    question: str
    sections: Sequence[Section]

    @property
    def headline(self) -> str:
        """The headline of the first comparison."""
        headlines = (section.headline for section in self.sections if section.headline)
        return next(
            headlines, "Nothing is compared yet, so whether these weights help is not known."
        )


def page_of(runs: Sequence[Path]) -> Page:
    """The page of an experiment's directory or of run directories; runs may be missing.

    Raises:
        UserError: as `open_study`.
    """
    study = open_study(runs)
    sections = (
        *(_search(study, group) for group in study.of(records.TemperatureGroup)),
        *(_mixture(study, group) for group in study.of(records.WeightsGroup)),
        Section("Before you use them", remarks=list(_cautions(study))),
        _course(study),
        *(_perplexities(study, group) for group in study.of(records.PerplexityGroup)),
        *(_cost(study, group) for group in study.of(records.CostGroup)),
        _provenance(study),
    )
    filled = [each for each in sections if each.remarks or each.tables]
    return Page(study.title, study.question, filled)


def _mixture(study: Study, group: records.WeightsGroup) -> Section:
    """The weights of the arms beside uniform and natural ones, and the commands to export them."""
    title, runs = group.title, {arm: study.runs_of(arm.runs) for arm in group.arms}
    learned = {arm: means for arm in group.arms if (means := mean_weights(runs[arm]))}
    if not learned:
        return Section(title)
    names = list(dict.fromkeys(name for weights in learned.values() for name in weights))
    columns = {(arm.label, arm.about): weights for arm, weights in learned.items()}
    natural, totals = None, []
    # The arm that the headline names.
    focus = next((each.focus for each in study.of(records.PerplexityGroup)), None)
    chosen = [arm for arm in learned if arm.label == focus] or list(learned)[:1]
    if all(len(weights) == len(names) for weights in learned.values()):
        sizes = runs[chosen[0]][0].record.corpus.domains
        shares = baselines.natural({name: sizes[name].train_tokens for name in names})
        natural = {name: Stat(share) for name, share in shares.items()}
        columns["uniform", "baseline"] = dict.fromkeys(names, Stat(1 / len(names)))
        columns["natural", "by tokens"] = natural
    else:
        chosen = list(learned)
        uniform = (f"{1 / len(weights):.3f}" for weights in columns.values())
        totals.append(("uniform would be", *uniform))
    targets = {arm.label: runs[arm][0].targets for arm in learned}

    def weight_of(name: str, label: str, weights: Mapping[str, Stat]) -> str:
        if name in weights:
            return share_text(weights[name])
        return "target" if name in targets[label] else "–"

    rows = [
        (name, *(weight_of(name, label, weights) for (label, _), weights in columns.items()))
        for name in names
    ]
    averages = ([stat.mean for stat in weights.values()] for weights in columns.values())
    totals.append(("effective domains", *map(_effective, averages)))
    note = "Effective domains: exp of the entropy of the weights."
    if any(stat.error is not None for each in learned.values() for stat in each.values()):
        note += f" Means over seeds.{ERRORS}"
    drawings = []
    if len(learned) <= _MOST_BARS:
        marks = " Diamonds: natural weights, which follow the tokens there are."
        bars = {arm.label: weights for arm, weights in learned.items()}
        make = partial(figures.mixture_figure, bars, natural)
        caption = f"Dotted: uniform weights.{marks if natural else ''}"
        drawings = [Drawing(f"{title} as bars", caption, make)]
    commands = [line for arm in chosen for line in _export(runs[arm])]
    return Section(
        title,
        commands=commands,
        tables=[table_of(["domain", *columns], rows, title=title, note=note, totals=totals)],
        drawings=drawings,
        remarks=["doge-fast export --list names the frameworks that --to takes."] * bool(commands),
    )


def _effective(weights: Collection[float]) -> str:
    return f"{effective_domains(weights):.1f} of {len(weights)}"


def _export(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Commands that export the mean weights over seeds; none while a run lacks weights."""
    if any(run.weights is None for run in runs):
        return
    source, *others = [_short(run.path) for run in runs]
    if others:
        mean = f"{runs[0].stem}.json"
        yield shlex.join(["doge-fast", "weights", "average", source, *others, "--out", mean])
        source = mean
    yield shlex.join(["doge-fast", "export", source, "--to", "json"])


def _short(path: Path) -> str:
    return min(str(path), os.path.relpath(path), key=len)


def _search(study: Study, group: records.TemperatureGroup) -> Section:
    """The loss from uniform weights to the proxy's and beyond, and the chosen weights."""
    arms = {point.inverse: point.arm.label for point in group.points}
    losses = {point.arm.label: study.losses(point.arm) for point in group.points}
    line, uniform = Line("loss", losses, group.aim), group.points[0].arm.label
    changes = {inverse: line.difference(label, uniform) for inverse, label in arms.items()}
    # Only points that have all their seeds.
    points = [each for each in group.points if len(losses[each.arm.label]) == len(each.arm.runs)]
    means = {point.inverse: fmean(line.mean_losses(point.arm.label).values()) for point in points}
    rows: list[Sequence[str | Cell]] = []
    for point in points:
        change = changes[point.inverse]
        text = change_text(change) if point.inverse else "/"
        cell = Cell(text, change.is_lower, change.is_higher)
        count = _effective(point.weights.values())
        is_chosen = "written" if point.inverse == group.chosen else ""
        rows.append((f"{point.inverse:g}", f"{means[point.inverse]:.4f}", cell, count, is_chosen))
    is_several = any(len(each) > 1 for each in losses.values())
    aim = held_out_text(group.aim, study.shown[0].domains)
    note = (
        f"Loss: on {aim}, nats per token. 1/T = 0: uniform weights; 1: the proxy's own. Change of "
        "perplexity with its 95 % interval over paired seeds."
        f"{'' if is_several else ONE_SEED}"
    )
    header = ("1/T", "loss", f"against {uniform}", "effective domains", "")
    measured = table_of(header, rows, title="Loss at each temperature", note=note)
    shown = [point for point in points if point.inverse in (0.0, 1.0, group.chosen)]
    heads = [(point.arm.label, f"1/T = {point.inverse:g}") for point in shown]
    heads.append(("epochs", "of the written weights"))
    note = f"Epochs: passes over a domain's text in {count_text(group.epochs_tokens)} tokens"
    note += ", the training that the weights are for."
    if not group.has_budget:
        note = f"{note.partition(',')[0]}, as one of these base models sees; --budget-tokens names "
        note += "the training that the weights are for."
    mixtures = []
    for name in group.points[0].weights:
        epochs = f"{group.epochs[name]:.2f}" if name in group.epochs else "–"
        mixtures.append((name, *(f"{point.weights[name]:.3f}" for point in shown), epochs))
    headline = f"uniform: no temperature tried has a lower loss on {aim}"
    if group.chosen:
        headline = _headline(arms[group.chosen], uniform, changes[group.chosen], aim)
    caption = (
        "Held-out loss of base models at alpha^(1/T). Dotted: uniform weights. Bars: 95 % "
        "intervals of the difference to uniform over paired seeds, where there are several. "
        "Diamond: the weights that were written."
    )
    make = partial(figures.temperature_figure, means, changes, group.chosen)
    assert study.directory is not None
    return Section(
        group.title,
        headline,
        commands=[shlex.join(["doge-fast", "export", _short(study.directory), "--to", "json"])],
        tables=[table_of(["domain", *heads], mixtures, title="Mixtures", note=note), measured],
        drawings=[Drawing("Loss over 1/T", caption, make)],
    )


def _course(study: Study) -> Section:
    """The weights over the steps, the number of effective domains, and the drift."""
    drawings = []
    for proxy in study.proxies:
        caption = (
            "Thick: the result so far; thin: the weights of each step; "
            "dotted: uniform. Below them how many domains the result amounts to, and how far the "
            "last fifth of the steps moved it (dotted: the most that counts as settled)."
        )
        if len(proxy.runs) > 1:
            caption += f" Mean of {len(proxy.runs)} seeds; bands: ± one standard error."
        if proxy.has_steps:
            title, make = f"{proxy.label}, for {proxy.target}", partial(figures.course, proxy)
            drawings.append(Drawing(title, caption, make))
    summaries = [proxy.summary() for proxy in study.proxies]
    return Section("How the weights moved", drawings=drawings, remarks=summaries)


def _perplexities(study: Study, group: records.PerplexityGroup) -> Section:
    """Perplexities by domain, and against a baseline (tab:universal_ppl)."""
    title, lines = group.title, study.lines(group)
    if not any(losses for line in lines for losses in line.losses.values()):
        why = "not measured yet on what it is about; doge-fast evaluate measures a base run"
        return Section(title, remarks=[f"{title}: {why}."])
    # Every line has the same arms.
    arms = {arm.label: arm for arm in group.arms if arm.label in lines[0].losses}
    baseline = next((label for label, arm in arms.items() if arm.is_baseline), "")
    others = [label for label, arm in arms.items() if baseline and not arm.is_baseline]
    about = f"; {group.about}" if group.about else ""
    rows: list[Sequence[str | Cell]] = []
    changes: list[Sequence[str | Cell]] = []
    for line in lines:
        cells = []
        for label in arms:
            text = perplexity_text(line.perplexity(label)) if line.losses[label] else "–"
            is_better = label in others and line.difference(label, baseline).is_lower
            cells.append(Cell(text, is_better))
        rows.append((line.label, *cells))
        differences = [line.difference(label, baseline) for label in others]
        compared = (Cell(change_text(d), d.is_lower, d.is_higher) for d in differences)
        changes.append((line.label, *compared))
    domains = [line for line in lines if not line.is_total]
    totals, num_domains = rows[len(domains) :], len(domains)
    if totals:
        worst = (max(line.perplexity(label).mean for line in domains) for label in arms)
        totals.append(("worst case", *(perplexity_text(Stat(each)) for each in worst)))
    if totals and others:
        below = (_number_below(domains, label, baseline) for label in arms)
        totals.append((f"lower than {baseline}", *below))
    seeds = {label: max(len(line.losses[label]) for line in lines) for label in arms}
    is_several = max(seeds.values()) > 1
    doubt = ERRORS if is_several else ONE_SEED
    note = f"Held-out text{about}. {MARKS} The average is the exponential of the mean loss.{doubt}"
    heads = [(label, f"{arm.about}, {plural(seeds[label], 'seed')}") for label, arm in arms.items()]
    name = f"Perplexity per domain: {title}"
    table = table_of(["domain", *heads], rows[:num_domains], title=name, note=note, totals=totals)
    if not others:
        why = "nothing to compare; it takes base models at uniform weights and at others"
        return Section(title, tables=[table], remarks=[f"{title}: {why}."])
    wanted = group.focus or "DoGE"
    focus = next((label for label in others if label.startswith(wanted)), others[-1])
    (line, *_) = lines[num_domains:] or lines
    aim = held_out_text(line.aim, study.shown[0].domains)
    headline = _headline(focus, baseline, line.difference(focus, baseline), aim)
    doubt = " Of twenty such intervals one is wrong by chance." if is_several else ONE_SEED
    against = table_of(
        ["domain", *others],
        changes[:num_domains],
        title=f"Against {baseline}, seed by seed: {title}",
        note=f"Change of perplexity. {MARKS}{doubt}",
        totals=changes[num_domains:],
    )
    return Section(title, headline, tables=[table, against])


def _number_below(domains: Sequence[Line], arm: str, baseline: str) -> str:
    below = sum(line.difference(arm, baseline).mean < 0 for line in domains)
    return f"{below} of {len(domains)}" if arm != baseline else "–"


def _headline(own: str, other: str, difference: PairedDifference, text: str) -> str:
    """DoGE: perplexity 0.6 % higher than uniform on held-out text of ca, undecided, one seed."""
    if not difference.pairs:
        return f"{own} and {other} have no seed in common"
    if not math.isfinite(difference.mean):
        return f"{own} or {other} diverged"
    mean, low, high = (100 * each for each in change_of(difference))
    size = f"{abs(mean):.1f}" if abs(mean) >= 0.05 else "less than 0.1"
    side = "lower" if mean < 0 else "higher"
    what = f"{size}\N{NO-BREAK SPACE}% {side} than" if mean else "the same as"
    verdict = "undecided"
    if difference.is_decided:
        ends = f"{low:+.1f} to {high:+.1f}".replace("-", "−")
        verdict = f"95\N{NO-BREAK SPACE}% interval {ends}"
    seeds = "one seed" if difference.pairs == 1 else f"{difference.pairs} seeds"
    return f"{own}: perplexity {what} {other} on {text}, {verdict}, {seeds}"


def _cost(study: Study, group: records.CostGroup) -> Section:
    """Tokens, FLOPs and hours of each method, and their ratios to the first (tab:robust)."""
    costs: dict[str, list[tuple[float, float, float]]] = {}
    for method in group.methods:
        for names in method.runs:
            runs = study.runs_of(names)
            if len(runs) == len(names) and all(run.is_complete for run in runs):
                costs.setdefault(method.label, []).append(_cost_of(runs))
    if not costs:
        return Section(group.title)
    means = [np.mean(each, axis=0) for each in costs.values()]
    rows = []
    for place, (label, unit) in enumerate((("tokens", 1), ("FLOPs", 1), ("hours", 3600))):
        values = [float(mean[place]) / unit for mean in means]
        texts = [f"{value:.3g}" if unit > 1 else count_text(value) for value in values]
        ratios = [f"{value / values[0]:.2f} ×" if values[0] else "–" for value in values]
        # A run whose metrics.jsonl is lost has no time.
        if any(values) and not any(map(math.isnan, values)):
            rows.append((label, *(f"{a}  ({b})" for a, b in zip(texts, ratios, strict=True))))
    note = (
        "All runs of a column, references and targets included; in brackets against the first. "
        "FLOPs: 6 N a token (2 N where a reference is only run), and rows (rows + 1) N a step for "
        "the Gram matrix. Hours: steps at their median time on the machine of the runs."
    )
    heads = [
        (label, f"mean of {len(each)} seeds" if len(each) > 1 else "")
        for label, each in costs.items()
    ]
    return Section(group.title, tables=[table_of(["", *heads], rows, title=group.title, note=note)])


def _cost_of(runs: Sequence[RecordedRun]) -> tuple[float, float, float]:
    """(tokens, FLOPs, seconds) of one seed's runs together."""
    tokens = flops = seconds = 0.0
    for run in runs:
        size, seen, steps = run.record.parameters, run.tokens, run.config.training.steps
        if run.record.stage == "proxy":
            flops += run.num_rows * (run.num_rows + 1) * size * steps
        if run.record.stage == "doremi":
            references = [other for other in runs if other.record.stage == "base"]
            flops += sum(2 * other.record.parameters for other in references) * seen
        tokens += seen
        flops += 6 * size * seen
        seconds += steps * run.seconds_per_step
    return tokens, flops, seconds


def _provenance(study: Study) -> Section:
    """The runs and their settings, the corpus, and the versions."""
    versions = [run.record.versions for run in study.shown]
    lines = (", ".join(f"{name} {number}" for name, number in each.items()) for each in versions)
    remarks = [f"Made with {line}." for line in dict.fromkeys(lines) if line]
    if (plan := study.plan) is not None:
        remarks.append(f"{plan.name}; {plan.data}.")
    sizes: dict[str, records.DomainSizes] = {}
    for run in study.shown:
        # If corpora differ in a domain, its sizes are those of the first run.
        sizes |= {**run.record.corpus.domains, **run.record.corpus.targets, **sizes}
    runs = [
        {
            "run": run.name,
            "stage": run.record.stage,
            "what": _what(run),
            "model": _run_or(run.config.model.model, records.MODEL),
            "steps": str(run.config.training.steps),
            "tokens": count_text(run.tokens),
            "peak lr": f"{run.config.training.learning_rate:g}",
            "seed": str(run.config.training.seed),
            "s per step": f"{run.seconds_per_step:.2g}".replace("nan", "–"),
            "date": run.record.created[:10],
        }
        for run in study.shown
    ]
    table = table_of(list(runs[0]), [list(run.values()) for run in runs], title="Runs")
    keys = ("train_tokens", "documents", "train_blocks", "validation_blocks")
    corpus = [
        (name, *(f"{getattr(size, key):,}".replace(",", " ") for key in keys))
        for name, size in sizes.items()
    ]
    first = study.shown[0].record.corpus
    columns = ("domain", "training tokens", "documents", "training blocks", "held-out blocks")
    note = f"Blocks of {first.block_size} tokens; a vocabulary of {first.vocab_size}."
    tables = [table, table_of(columns, corpus, title="Corpus", note=note)]
    return Section("Where this comes from", tables=tables, remarks=remarks)


def _run_or(path: str, file: str) -> str:
    """Name of the directory if `path` ends in `file`, else `path`."""
    return Path(path).parent.name if Path(path).name == file else path


def _what(run: RecordedRun) -> str:
    if run.record.stage == "base":
        return f"weights {Path(_run_or(run.config.weights, records.WEIGHTS)).name}"
    if run.record.stage == "doremi":
        return f"reference {Path(run.config.reference).name}"
    mu = "" if run.config.mu is None else f", mu {run.config.mu:g}"
    score = "" if run.config.score == "paper" else f", score {run.config.score}"
    return f"target {' '.join(run.config.target)}{mu}{score}"


def _cautions(study: Study) -> Iterator[str]:
    """Sentences on possible faults of the page's numbers."""
    if missing := study.unmeasured:
        yield (
            f"{plural(len(missing), 'run')} not complete yet, so left out: {first_few(missing)}. "
            "The same command goes on with them."
        )
    if study.search is not None:
        yield from study.search.get("warnings") or ()
    else:
        # Runs of one corpus have the same warnings.
        yield from dict.fromkeys(text for run in study.shown for text in run.record.warnings)
    for proxy in study.proxies:
        if study.search is None:
            yield from (f"{proxy.label}: {text}" for text in proxy.warnings())
        if len(proxy.runs) == 1:
            yield f"{proxy.label}: one seed, so the spread of its weights is unknown."
    for run in study.shown:
        if not run.is_complete:
            yield (
                f"{run.name}: not complete, its records end at step {run.last_step} of "
                f"{run.config.training.steps}. The command that began it goes on, or says why it "
                "cannot."
            )
        elif not run.has_all_lines:
            yield (
                f"{run.name}: complete, and its records end at step {run.last_step} of "
                f"{run.config.training.steps}: metrics.jsonl was removed or cut. What is shown of "
                "its steps is of the lines that are left."
            )
        if skipped := sum(line.skipped for line in run.train):
            steps = plural(skipped, "logged step")
            yield f"{run.name}: {steps} skipped for a gradient that was not finite."
        losses = run.losses() or {}
        if lost := [name for name, loss in losses.items() if not math.isfinite(loss)]:
            yield f"{run.name}: diverged; the held-out loss of {listed(lost)} is not finite."
    bases = [run for run in study.shown if run.record.stage == "base"]
    if not bases:
        (first, *_) = study.shown
        how = "Train one at them and one at uniform weights with doge-fast base; evaluate both."
        if first.record.stage == "proxy":
            how = f"Measure both: doge-fast temperature {shlex.quote(_short(first.path))}"
        yield (
            "No base model has been trained with these weights, so whether they help, and how far "
            f"to follow them, is not known. {how}"
        )
    if study.plan is None:
        if unknown := [run.name for run in bases if run.losses() is None]:
            yield f"{listed(unknown)}: not measured, so left out; doge-fast evaluate measures it."
        blocks = [run.blocks for run in bases if run.blocks]
        lacking = {name for each in blocks for other in blocks for name in each.keys() - other}
        common = [{name: each[name] for name in each.keys() - lacking} for each in blocks]
        if lacking:
            yield (
                f"Some base model was not measured on {listed(sorted(lacking))}, which the tables "
                "and the average leave out. doge-fast evaluate measures all domains."
            )
        if any(each != common[0] for each in common):
            yield (
                "Base models were measured on different numbers of held-out blocks, so their "
                "losses are not of the same text. doge-fast evaluate measures them alike."
            )
