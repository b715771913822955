"""The page, section by section: what each comes to in a line, its tables, its figures.

A section is data, so the page and the terminal show the same. Their order is `sections_of`'s.
"""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from doge_fast.pipeline import baselines
from doge_fast.pipeline.records.shapes import (
    ArmRecord,
    CostGroup,
    PerplexityGroup,
    TargetsGroup,
    TemperatureGroup,
    WeightsGroup,
)
from doge_fast.pipeline.reporting import figures
from doge_fast.pipeline.reporting.figures import Drawing
from doge_fast.pipeline.reporting.runs import RecordedRun
from doge_fast.pipeline.reporting.statistics import (
    Line,
    PairedDifference,
    Stat,
    change_of,
    change_text,
    perplexity_text,
    weight_text,
)
from doge_fast.pipeline.reporting.study import Study, mean_weights, open_study
from doge_fast.pipeline.reporting.wording import count_text, listed, plural
from doge_fast.pipeline.tables import Cell, Table, table_of
from doge_fast.weights.projection import effective_domains

MARKS = "Bold: lower, and the 95 % interval over paired seeds leaves out zero; with a !: higher."
ONE_SEED = " One seed has no interval: undecided."
ERRORS = " ±: standard error over seeds."
# Mixtures whose bars can stand beside each other.
_MOST_BARS = 3


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    headlines: Sequence[str] = ()
    """What it comes to, for the top of the page."""
    commands: Sequence[str] = ()
    """To copy."""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    remarks: Sequence[str] = ()


def sections_of(study: Study) -> list[Section]:
    """The page from top to bottom, of the runs that there are so far."""
    measured: list[PerplexityGroup | TargetsGroup] = [*study.of(PerplexityGroup)]
    found = [
        *(temperature_section(study, group) for group in study.of(TemperatureGroup)),
        *(mixture_section(study, group) for group in study.of(WeightsGroup)),
        warnings_section(study),
        course_section(study),
        *(perplexity_section(study, group) for group in (*measured, *study.of(TargetsGroup))),
        *(cost_section(study, group) for group in study.of(CostGroup)),
        provenance_section(study),
    ]
    return [section for section in found if section is not None]


def drawings_of(path: Path) -> list[Drawing]:
    """The figures of a run's or an experiment's page."""
    return [each for section in sections_of(open_study([path])) for each in section.drawings]


def mixture_section(study: Study, group: WeightsGroup) -> Section | None:
    """The weights of the arms beside uniform and natural ones, and how to take them away."""
    learned = {
        arm: weights for arm in group.arms if (weights := mean_weights(study.runs_of(arm.runs)))
    }
    if not learned:
        return None
    runs = {arm.label: study.runs_of(arm.runs) for arm in learned}
    names = list(dict.fromkeys(name for weights in learned.values() for name in weights))
    is_shared = all(len(weights) == len(names) for weights in learned.values())
    columns = {(arm.label, arm.about): weights for arm, weights in learned.items()}
    natural, totals = None, []
    if is_shared:
        domains = next(iter(runs.values()))[0].record.corpus.domains
        natural = baselines.natural({name: domains[name].train_tokens for name in names})
        columns["uniform", "baseline"] = dict.fromkeys(names, Stat(1 / len(names)))
        columns["natural", "by tokens"] = {name: Stat(share) for name, share in natural.items()}
    else:
        shares = (f"{1 / len(weights):.3f}" for weights in columns.values())
        totals.append(("uniform would be", *shares))

    def told(name: str, head: tuple[str, str]) -> str:
        if name in columns[head]:
            return weight_text(columns[head][name])
        return "target" if name in runs[head[0]][0].targets else "–"

    rows = [(name, *(told(name, head) for head in columns)) for name in names]
    counts = (
        f"{effective_domains(stat.mean for stat in weights.values()):.1f} of {len(weights)}"
        for weights in columns.values()
    )
    totals.append(("effective domains", *counts))
    for reference in (weights for arm, weights in learned.items() if arm.label == group.reference):
        gaps = (_gap_text(weights, reference) for weights in columns.values())
        totals.append((f"mean absolute difference from {group.reference}", *gaps))
    note = "Averages over the steps. Effective domains: exp of the entropy of the weights."
    if any(stat.error is not None for each in learned.values() for stat in each.values()):
        note += f" Means over seeds.{ERRORS}"
    drawings = []
    if len(learned) <= _MOST_BARS:
        marks = " Diamonds: natural weights, which follow the tokens there are."
        caption = f"Dotted: uniform weights.{marks if natural else ''}"
        bars = {arm.label: weights for arm, weights in learned.items()}
        make = partial(figures.mixture_figure, bars, natural)
        drawings = [Drawing(f"{group.title} as bars", caption, make)]
    chosen = list(runs.values())[: 1 if is_shared else None]
    commands = [line for each in chosen for line in _export(each)]
    return Section(
        group.title,
        commands=commands,
        tables=[table_of(["domain", *columns], rows, title=group.title, note=note, totals=totals)],
        drawings=drawings,
        remarks=["doge-fast export --list names the frameworks that --to takes."] * bool(commands),
    )


def _export(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """The commands that write weights as another program reads them; of seeds their mean.

    None while a run has not written them.
    """
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


def _gap_text(own: Mapping[str, Stat], reference: Mapping[str, Stat]) -> str:
    """Mean absolute difference of weights, over the domains of both."""
    gaps = [abs(own[name].mean - reference[name].mean) for name in own.keys() & reference.keys()]
    return f"{100 * math.fsum(gaps) / len(gaps):.2f} %"


def temperature_section(study: Study, group: TemperatureGroup) -> Section:
    """The loss along the line from uniform weights through the proxy's, and what was chosen."""
    labels = {point.inverse: point.arm.label for point in group.points}
    losses = {point.arm.label: study.losses(point.arm) for point in group.points}
    line = Line("", {"uniform": {}, **losses}, group.aim)
    points = [point for point in group.points if losses[point.arm.label]]
    means = {point.inverse: line.loss(point.arm.label).mean for point in points}
    changes = {x: line.difference(label, labels.get(0.0, "uniform")) for x, label in labels.items()}
    rows: list[tuple[str | Cell, ...]] = []
    for point in points:
        place, change = point.inverse, changes[point.inverse]
        told = change_text(change) if place else "/"
        cell = Cell(told, change.is_lower, change.is_higher)
        count = f"{effective_domains(point.weights.values()):.1f} of {len(point.weights)}"
        is_chosen = "written" if place == group.chosen else ""
        rows.append((f"{place:g}", f"{means[place]:.4f}", cell, count, is_chosen))
    is_several = any(len(each) > 1 for each in losses.values())
    note = (
        f"Loss: mean over {_aim_text(group)}, nats per token. 1/T = 0: uniform weights; 1: the "
        "proxy's own. Change of perplexity with its 95 % interval over paired seeds."
        f"{'' if is_several else ONE_SEED}"
    )
    header = ("1/T", "loss", "against uniform", "effective domains", "")
    measured = table_of(header, rows, title="Loss at each temperature", note=note)
    shown = [point for point in points if point.inverse in (0.0, 1.0, group.chosen)]
    heads, note = [(point.arm.label, f"1/T = {point.inverse:g}") for point in shown], ""
    if group.epochs:
        heads.append(("epochs", "of the written weights"))
        note = "Epochs: passes over the text of a domain in the training that the weights are for."
    mixtures = []
    for name in shown[0].weights:
        epochs = [f"{group.epochs[name]:.2f}"] if name in group.epochs else []
        mixtures.append((name, *(f"{point.weights[name]:.3f}" for point in shown), *epochs))
    told = "uniform: no temperature tried has a lower loss"
    if group.chosen:
        told = headline(labels[group.chosen], "uniform", changes[group.chosen])
    caption = (
        "Held-out loss of base models at alpha^(1/T). Dotted: uniform weights. Bars: 95 % "
        "intervals of the difference to uniform over paired seeds, where there are several. "
        "Diamond: the weights that were written."
    )
    make = partial(figures.temperature_figure, means, changes, group.chosen)
    directory = _short(next(iter(study.runs.values())).path.parents[1])
    return Section(
        group.title,
        [told],
        commands=[shlex.join(["doge-fast", "export", directory, "--to", "json"])],
        tables=[measured, table_of(["domain", *heads], mixtures, title="Mixtures", note=note)],
        drawings=[Drawing("Loss over 1/T", caption, make)],
    )


def _aim_text(group: TemperatureGroup) -> str:
    is_equal = max(group.aim.values()) - min(group.aim.values()) < 1e-9
    if not is_equal:
        return listed(f"{name} ({weight:.2f})" for name, weight in group.aim.items())
    return f"the {len(group.aim)} domains" if len(group.aim) > 4 else listed(group.aim)


def course_section(study: Study) -> Section | None:
    """The weights over the steps, the number of effective domains, and the drift."""
    if not study.proxies:
        return None
    drawings = []
    for proxy in study.proxies:
        seeds = f" Mean of {len(proxy.runs)} seeds; bands: ± one standard error."
        caption = (
            "Thick: the average so far; thin: the weights of each step; "
            "dotted: uniform. Below them how many domains the average amounts to, and how far the "
            "last fifth of the steps moved it (dotted: the most that counts as settled)."
            f"{seeds if len(proxy.runs) > 1 else ''}"
        )
        if proxy.has_steps:
            title, make = f"{proxy.label}, for {proxy.target}", partial(figures.course, proxy)
            drawings.append(Drawing(title, caption, make))
    summaries = [proxy.summary() for proxy in study.proxies]
    return Section("How the weights moved", drawings=drawings, remarks=summaries)


def perplexity_section(study: Study, group: PerplexityGroup | TargetsGroup) -> Section:
    """Arms on each domain or target, and set against a baseline seed by seed."""
    title, lines = group.title, study.lines(group)
    if not any(losses for line in lines for losses in line.losses.values()):
        why = "not measured yet on what it is about; doge-fast evaluate measures a base run"
        return Section(title, [f"{title}: {why}"])
    planned = group.rows[0].arms if isinstance(group, TargetsGroup) else group.arms
    # Every line has the same arms.
    arms = [arm for arm in planned if arm.label in lines[0].losses]
    baseline = next((arm.label for arm in arms if arm.is_baseline), "")
    rivals = [arm for arm in arms if baseline and not arm.is_baseline]
    others = {arm.label: arm.baseline or baseline for arm in rivals}
    table = _perplexity_table(group, lines, arms, others)
    if not others:
        why = "nothing to compare; it takes base models at uniform weights and at others"
        return Section(title, [f"{title}: {why}"], tables=[table])
    pairs, told = list(others.items()), lines
    # Experiments are about DoGE.
    wanted = "DoGE"
    if isinstance(group, PerplexityGroup):
        wanted, told = group.focus or wanted, lines[-1:]
        pairs += [pair for pair in group.pairs if lines[0].losses.keys() >= set(pair)]
    else:
        # Beside them stand what further steps do, and the oracle, which nobody can choose.
        pairs = [pair for pair in pairs if pair[0].startswith(wanted)] or pairs
    focus = next((label for label in others if label.startswith(wanted)), rivals[-1].label)
    other, headlines = others[focus], []
    for line in told:
        against = other if line.is_total else f"{other} on {line.label}"
        headlines.append(headline(focus, against, line.difference(focus, other)))
    differences = _difference_table(group, lines, pairs, baseline)
    return Section(title, headlines, tables=[table, differences])


def headline(own: str, other: str, difference: PairedDifference) -> str:
    """DoGE: perplexity 0.6 % higher than uniform, undecided, one seed."""
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
    return f"{own}: perplexity {what} {other}, {verdict}, {seeds}"


def _perplexity_table(
    group: PerplexityGroup | TargetsGroup,
    lines: Sequence[Line],
    arms: Sequence[ArmRecord],
    others: Mapping[str, str],
) -> Table:
    """Perplexity for every arm, as tab:universal_ppl and tab:ppl-ood."""
    rows: list[tuple[str | Cell, ...]] = []
    for line in lines:
        cells = []
        for label, each in line.losses.items():
            told = perplexity_text(line.perplexity(label)) if each else "–"
            is_better = label in others and line.difference(label, others[label]).is_lower
            cells.append(Cell(told, is_better))
        rows.append((line.label, *cells))
    title, about, totals = group.title, "", []
    if isinstance(group, PerplexityGroup):
        domains = lines[:-1]
        totals = [rows.pop(), ("worst case", *(_worst(domains, arm.label) for arm in arms))]
        for baseline in set(others.values()):
            below = (_number_below(domains, arm, baseline) for arm in arms)
            totals.append((f"lower than {baseline}", *below))
        title = f"Perplexity per domain: {title}"
        about = f"; {group.about}" if group.about else ""
    losses = lines[0].losses
    seeds = ERRORS if _is_several(lines) else ONE_SEED
    note = f"Held-out text{about}. {MARKS} The average is the exponential of the mean loss.{seeds}"
    heads = [(a.label, f"{a.about}, {plural(len(losses[a.label]), 'seed')}") for a in arms]
    return table_of([_corner(group), *heads], rows, title=title, note=note, totals=totals)


def _corner(group: PerplexityGroup | TargetsGroup) -> str:
    return "domain" if isinstance(group, PerplexityGroup) else "target"


def _is_several(lines: Sequence[Line]) -> bool:
    return any(len(losses) > 1 for losses in lines[0].losses.values())


def _worst(domains: Sequence[Line], arm: str) -> str:
    """The highest perplexity of a domain; not finite where one has diverged."""
    return perplexity_text(Stat(float(np.max([line.perplexity(arm).mean for line in domains]))))


def _number_below(domains: Sequence[Line], arm: ArmRecord, baseline: str) -> str:
    if arm.is_baseline:
        return "–"
    below = sum(line.difference(arm.label, baseline).mean < 0 for line in domains)
    return f"{below} of {len(domains)}"


def _difference_table(
    group: PerplexityGroup | TargetsGroup,
    lines: Sequence[Line],
    pairs: Sequence[tuple[str, str]],
    baseline: str,
) -> Table:
    """Changes of perplexity between pairs of arms, with intervals over paired seeds."""
    rows: dict[bool, list[tuple[str | Cell, ...]]] = {False: [], True: []}
    for line in lines:
        found = [line.difference(own, other) for own, other in pairs]
        cells = (Cell(change_text(each), each.is_lower, each.is_higher) for each in found)
        rows[line.is_total].append((line.label, *cells))
    heads = [own if other == baseline else f"{own} against {other}" for own, other in pairs]
    chance = " Of twenty such intervals one is wrong by chance." if _is_several(lines) else ONE_SEED
    return table_of(
        [_corner(group), *heads],
        rows[False],
        title=f"Against {baseline}, seed by seed: {group.title}",
        note=f"Change of perplexity. {MARKS}{chance}",
        totals=rows[True],
    )


def cost_section(study: Study, group: CostGroup) -> Section | None:
    """Tokens, FLOPs and hours of each method, and against the first's: tab:robust's last row."""
    costs: dict[str, list[tuple[float, float, float]]] = {}
    for method in group.methods:
        for names in method.runs:
            runs = study.runs_of(names)
            if len(runs) == len(names) and all(run.is_complete for run in runs):
                costs.setdefault(method.label, []).append(_cost_of(runs))
    if not costs:
        return None
    means = [np.mean(each, axis=0) for each in costs.values()]
    rows = []
    for place, (label, unit) in enumerate((("tokens", 1), ("FLOPs", 1), ("hours", 3600))):
        values = [float(mean[place]) / unit for mean in means]
        told = [f"{value:.3g}" if unit > 1 else count_text(value) for value in values]
        ratios = [f"{value / values[0]:.2f} ×" if values[0] else "–" for value in values]
        if any(values):
            rows.append((label, *(f"{a}  ({b})" for a, b in zip(told, ratios, strict=True))))
    note = (
        "Of one seed, references and targets included; in brackets against the first column. "
        "FLOPs: 6 N a token (2 N where a reference is only run), and rows (rows + 1) N a step for "
        "the Gram matrix. Hours: steps at their median time on the machine of the runs."
    )
    heads = [(label, plural(len(each), "seed")) for label, each in costs.items()]
    return Section(group.title, tables=[table_of(["", *heads], rows, title=group.title, note=note)])


def _cost_of(runs: Sequence[RecordedRun]) -> tuple[float, float, float]:
    """(tokens, FLOPs, seconds) of one seed's runs together."""
    flops = 0.0
    for run in runs:
        flops += 6 * run.num_parameters * run.tokens_seen
        if run.record.stage == "proxy":
            rows = len(run.domains) * run.tokens_seen // run.tokens
            flops += rows * (rows + 1) * run.num_parameters * run.steps
        if run.record.stage == "doremi":
            references = [other for other in runs if other.record.stage == "base"]
            flops += sum(2 * other.num_parameters for other in references) * run.tokens
    seconds = sum(run.steps * run.seconds_per_step for run in runs)
    return sum(run.tokens_seen for run in runs), flops, seconds


def provenance_section(study: Study) -> Section:
    """Every run and its settings, the text there was, the versions."""
    told = [run.record.versions for run in study.shown]
    lines = (", ".join(f"{name} {version}" for name, version in each.items()) for each in told)
    remarks = [f"Made with {line}." for line in dict.fromkeys(lines) if line]
    if (plan := study.plan) is not None:
        preset = f"experiment {plan.name} --preset {plan.preset}" if plan.preset else plan.name
        remarks.append(f"doge-fast {preset}; {plan.data}.")
    runs = [
        (
            *(run.name, run.record.stage, _what(run), run.asked.model.model, str(run.steps)),
            *(count_text(run.tokens), f"{run.asked.training.learning_rate:g}", str(run.seed)),
            f"{run.seconds_per_step:.2g}" if math.isfinite(run.seconds_per_step) else "–",
            run.record.created[:10],
        )
        for run in study.shown
    ]
    header = ("run", "stage", "what", "model", "steps", "tokens", "peak lr", "seed")
    table = table_of((*header, "s per step", "date"), runs, title="Runs")
    return Section("Where this comes from", tables=[table, _corpus_table(study)], remarks=remarks)


def _what(run: RecordedRun) -> str:
    if run.record.stage == "base":
        weights = Path(run.asked.weights)
        return f"weights {weights.parent.name if weights.name == 'weights.json' else weights.name}"
    if run.record.stage == "doremi":
        return f"reference {Path(run.asked.reference).name}"
    mu = "" if run.asked.mu is None else f", mu {run.asked.mu:g}"
    score = "" if run.asked.score == "paper" else f", score {run.asked.score}"
    return f"target {' '.join(run.asked.target)}{mu}{score}"


def _corpus_table(study: Study) -> Table:
    """What there is of every domain; of a domain of several corpora, what the first run saw."""
    corpora = [run.record.corpus for run in study.shown]
    # The first run's come last, and so count.
    found = {k: v for each in corpora[::-1] for k, v in {**each.targets, **each.domains}.items()}
    names = dict.fromkeys(name for each in corpora for name in (*each.domains, *each.targets))
    keys = ("train_tokens", "documents", "train_blocks", "validation_blocks")
    rows = [
        (name, *(f"{getattr(found[name], key):,}".replace(",", " ") for key in keys))
        for name in names
    ]
    header = ("domain", "training tokens", "documents", "training blocks", "held-out blocks")
    note = f"Blocks of {corpora[0].block_size} tokens; a vocabulary of {corpora[0].vocab_size}."
    return table_of(header, rows, title="Corpus", note=note)


def warnings_section(study: Study) -> Section | None:
    """Everything that a reader should know before believing a number."""
    told = list(_warnings(study))
    return Section("Before you use them", remarks=told) if told else None


def _warnings(study: Study) -> Iterator[str]:
    if missing := study.unmeasured:
        shown = listed(missing[:5]) + (" and others" if len(missing) > 5 else "")
        yield (
            f"{plural(len(missing), 'run')} not complete yet, so left out: {shown}. The same "
            "command goes on with them."
        )
    # Runs of one corpus say the same.
    yield from dict.fromkeys(told for run in study.shown for told in run.record.warnings)
    for proxy in study.proxies:
        yield from (f"{proxy.label}: {told}" for told in proxy.warnings())
        if len(proxy.runs) == 1:
            yield f"{proxy.label}: one seed, so the spread of its weights is unknown."
    for run in study.shown:
        yield from (f"{run.name}: {told}" for told in _run_warnings(run))
    bases = [run for run in study.shown if run.record.stage == "base"]
    if not bases:
        yield (
            "No base model has been trained with these weights, so whether they help is not known. "
            "Train one at them and one at uniform weights with doge-fast base; evaluate both."
        )
    if study.plan is None:
        if unknown := [run.name for run in bases if run.losses() is None]:
            yield f"{listed(unknown)}: not measured, so left out; doge-fast evaluate measures it."
        blocks = [run.evaluation.blocks for run in bases if run.evaluation is not None]
        if any(each != blocks[0] for each in blocks):
            yield "Base models were measured on different numbers of held-out blocks."


def _run_warnings(run: RecordedRun) -> Iterator[str]:
    if not run.is_complete:
        yield (
            f"not complete, its records end at step {run.last_step} of {run.steps}. The command "
            "that began it goes on, or says why it cannot."
        )
    if skipped := sum(line.skipped for line in run.train):
        yield f"{plural(skipped, 'logged step')} skipped for a gradient that was not finite."
    diverged = [name for name, loss in (run.losses() or {}).items() if not math.isfinite(loss)]
    if diverged:
        yield f"diverged; the held-out loss of {listed(diverged)} is not finite."
