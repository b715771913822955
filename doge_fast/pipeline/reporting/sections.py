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
    CostGroup,
    PerplexityGroup,
    TargetsGroup,
    TemperatureGroup,
    WeightsGroup,
)
from doge_fast.pipeline.reporting import figures
from doge_fast.pipeline.reporting.figures import Sketch
from doge_fast.pipeline.reporting.runs import RecordedRun
from doge_fast.pipeline.reporting.statistics import (
    Arm,
    Line,
    PairedDifference,
    change_of,
    change_text,
)
from doge_fast.pipeline.reporting.study import Study, open_study
from doge_fast.pipeline.reporting.wording import (
    count_text,
    listed,
    perplexity_stat,
    perplexity_text,
    plural,
    weight_text,
)
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
    sketches: Sequence[Sketch] = ()
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


def sketches_of(path: Path) -> list[Sketch]:
    """The figures of a run's or an experiment's page."""
    return [each for section in sections_of(open_study([path])) for each in section.sketches]


def mixture_section(study: Study, group: WeightsGroup) -> Section | None:
    """The weights of the arms beside uniform and natural ones, and how to take them away."""
    stats = {arm: found for arm in group.arms if (found := study.weights(arm))}
    if not stats:
        return None
    runs = {arm: study.runs_of(arm.runs) for arm in stats}
    names = list(dict.fromkeys(name for weights in stats.values() for name in weights))
    means = {arm.label: {n: s.mean for n, s in each.items()} for arm, each in stats.items()}
    is_shared = all(len(weights) == len(names) for weights in stats.values())
    others: dict[str, dict[str, float]] = {}
    if is_shared:
        tokens = next(iter(runs.values()))[0].train_tokens
        others = {"uniform": baselines.uniform(tokens), "natural": baselines.natural(tokens)}
    rows = []
    for name in names:
        absent = {arm: "target" if name in runs[arm][0].targets else "–" for arm in stats}
        own = (weight_text(each[name]) if name in each else absent[a] for a, each in stats.items())
        rows.append((name, *own, *(f"{each[name]:.3f}" for each in others.values())))
    totals = []
    if not is_shared:
        totals.append(("uniform would be", *(f"{1 / len(each):.3f}" for each in means.values())))
    counts = [(effective_domains(each.values()), len(each)) for each in (means | others).values()]
    totals.append(("effective domains", *(f"{count:.1f} of {n}" for count, n in counts)))
    if group.reference in means:
        gaps = [_gap_text(own, means[group.reference]) for own in means.values()]
        label = f"mean absolute difference from {group.reference}"
        totals.append((label, *gaps, *([""] * len(others))))
    note = "Averages over the steps. Effective domains: exp of the entropy of the weights."
    if any(stat.error is not None for each in stats.values() for stat in each.values()):
        note += f" Means over seeds.{ERRORS}"
    heads = [(arm.label, arm.about) for arm in stats]
    heads += [("uniform", "baseline"), ("natural", "by tokens")] if others else []
    sketches = []
    if len(stats) <= _MOST_BARS:
        caption = "Dotted: uniform weights." + (
            " Diamonds: natural weights, which follow the tokens there are." if others else ""
        )
        bars = {arm.label: each for arm, each in stats.items()}
        make = partial(figures.mixture_figure, bars, others.get("natural"))
        sketches = [Sketch(f"{group.title} as bars", caption, make)]
    chosen = list(stats)[:1] if is_shared else list(stats)
    commands = [line for arm in chosen for line in _export(runs[arm])]
    return Section(
        group.title,
        commands=commands,
        tables=[
            table_of(["domain", *heads], rows, title=group.title, note=note, totals=totals),
        ],
        sketches=sketches,
        remarks=["doge-fast export --list names the frameworks that --to takes."] * bool(commands),
    )


def _gap_text(own: Mapping[str, float], reference: Mapping[str, float]) -> str:
    """Mean absolute difference of weights, over the domains of both."""
    gaps = [abs(own[name] - reference[name]) for name in own.keys() & reference.keys()]
    return "/" if own is reference else f"{100 * math.fsum(gaps) / len(gaps):.2f} %"


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


def temperature_section(study: Study, group: TemperatureGroup) -> Section:
    """The loss along the line from uniform weights through the proxy's, and what was chosen."""
    arms = {point.inverse: study.arm(point.arm) for point in group.points}
    uniform = arms.get(0.0, Arm("uniform", "", {}))
    changes = {inverse: arm.against(uniform, group.aim) for inverse, arm in arms.items()}
    points = [point for point in group.points if arms[point.inverse].losses]
    losses = {point.inverse: arms[point.inverse].loss(group.aim) for point in points}
    rows = []
    for point in points:
        change = changes[point.inverse]
        told = change_text(change) if point.inverse else "/"
        count = f"{effective_domains(point.weights.values()):.1f} of {len(point.weights)}"
        is_chosen = "written" if point.inverse == group.chosen else ""
        cell = Cell(told, change.is_lower, change.is_higher)
        loss = f"{losses[point.inverse].mean:.4f}"
        rows.append((f"{point.inverse:g}", loss, cell, count, is_chosen))
    is_several = any(len(arm.losses) > 1 for arm in arms.values())
    note = (
        f"Loss: mean over {_aim_text(group)}, nats per token. 1/T = 0: uniform weights; 1: the "
        "proxy's own. Change of perplexity with its 95 % interval over paired seeds."
        f"{'' if is_several else ONE_SEED}"
    )
    header = ("1/T", "loss", "against uniform", "effective domains", "")
    measured = table_of(header, rows, title="Loss at each temperature", note=note)
    shown = [point for point in points if point.inverse in (0.0, 1.0, group.chosen)]
    heads = [(point.arm.label, f"1/T = {point.inverse:g}") for point in shown]
    mixtures = []
    for name in shown[0].weights:
        epochs = [f"{group.epochs[name]:.2f}"] if name in group.epochs else []
        mixtures.append((name, *(f"{point.weights[name]:.3f}" for point in shown), *epochs))
    note = ""
    if group.epochs:
        heads.append(("epochs", "of the written weights"))
        note = "Epochs: passes over the text of a domain in the training that the weights are for."
    label = next(point.arm.label for point in group.points if point.inverse == group.chosen)
    told = "uniform: no temperature tried has a lower loss"
    if group.chosen:
        told = headline(label, "uniform", changes[group.chosen])
    caption = (
        "Held-out loss of base models at alpha^(1/T). Dotted: uniform weights. Bars: 95 % "
        "intervals of the difference to uniform over paired seeds, where there are several. "
        "Diamond: the weights that were written."
    )
    make = partial(figures.temperature_figure, losses, changes, group.chosen)
    directory = _short(next(iter(study.runs.values())).path.parents[1])
    return Section(
        group.title,
        [told],
        commands=[shlex.join(["doge-fast", "export", directory, "--to", "json"])],
        tables=[measured, table_of(["domain", *heads], mixtures, title="Mixtures", note=note)],
        sketches=[Sketch("Loss over 1/T", caption, make)],
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
    sketches = []
    for proxy in (proxy for proxy in study.proxies if proxy.has_steps):
        number = len(proxy.runs)
        caption = (
            "Thick: the average so far; thin: the weights of each step; "
            "dotted: uniform. Below them how many domains the average amounts to, and how far the "
            "last fifth of the steps moved it (dotted: the most that counts as settled)."
            f"{f' Mean of {number} seeds; bands: ± one standard error.' if number > 1 else ''}"
        )
        title = f"{proxy.label}, for {proxy.target}"
        sketches.append(Sketch(title, caption, partial(figures.course, proxy)))
    summaries = [proxy.summary() for proxy in study.proxies]
    return Section("How the weights moved", sketches=sketches, remarks=summaries)


def perplexity_section(study: Study, group: PerplexityGroup | TargetsGroup) -> Section:
    """Arms on each domain or target, and set against a baseline seed by seed."""
    lines, title = study.lines(group), group.title
    if not any(arm.losses for line in lines for arm in line.arms.values()):
        why = "not measured yet on what it is about; doge-fast evaluate measures a base run"
        return Section(title, [f"{title}: {why}"])
    # Every line has the same arms.
    arms = list(lines[0].arms.values())
    baseline = next((arm.label for arm in arms if arm.is_baseline), "")
    rivals = [arm for arm in arms if baseline and not arm.is_baseline]
    others = {arm.label: arm.baseline or baseline for arm in rivals}
    table = _perplexity_table(group, lines, others)
    if not others:
        why = "nothing to compare; it takes base models at uniform weights and at others"
        return Section(title, [f"{title}: {why}"], tables=[table])
    pairs, told = list(others.items()), lines
    # Experiments are about DoGE.
    wanted = "DoGE"
    if isinstance(group, PerplexityGroup):
        wanted, told = group.focus or wanted, lines[-1:]
        pairs += [pair for pair in group.pairs if lines[0].arms.keys() >= set(pair)]
    else:
        # Beside them stand what further steps do, and the oracle, which nobody can choose.
        pairs = [pair for pair in pairs if pair[0].startswith(wanted)] or pairs
    focus = next((label for label in others if label.startswith(wanted)), rivals[-1].label)
    headlines = [
        headline(
            focus,
            others[focus] + ("" if line.is_total else f" on {line.label}"),
            line.difference(focus, others[focus]),
        )
        for line in told
    ]
    return Section(
        title,
        headlines,
        tables=[table, _difference_table(group, lines, pairs, baseline)],
    )


def headline(own: str, other: str, difference: PairedDifference) -> str:
    """DoGE: perplexity 0.6 % higher than uniform, undecided, one seed."""
    if not difference.pairs:
        return f"{own} and {other} have no seed in common"
    if not difference.is_known:
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
    group: PerplexityGroup | TargetsGroup, lines: Sequence[Line], others: Mapping[str, str]
) -> Table:
    """Perplexity for every arm, as tab:universal_ppl and tab:ppl-ood."""
    arms = list(lines[0].arms.values())
    rows: list[tuple[str | Cell, ...]] = []
    for line in lines:
        cells = []
        for label, arm in line.arms.items():
            told = perplexity_stat(arm.perplexity(line.names)) if arm.losses else "–"
            is_better = label in others and line.difference(label, others[label]).is_lower
            cells.append(Cell(told, is_better))
        rows.append((line.label, *cells))
    title, about, totals = group.title, "", []
    if isinstance(group, PerplexityGroup):
        *domains, total = lines
        totals = [
            rows.pop(),
            ("worst case", *(perplexity_text(a.worst(total.names)) for a in arms)),
        ]
        if others:
            (baseline,) = set(others.values())
            below = (_number_below(domains, arm, baseline) for arm in arms)
            totals.append((f"lower than {baseline}", *below))
        title = f"Perplexity per domain: {title}"
        about = f"; {group.about}" if group.about else ""
    seeds = ERRORS if any(len(arm.losses) > 1 for arm in arms) else ONE_SEED
    note = f"Held-out text{about}. {MARKS} The average is the exponential of the mean loss.{seeds}"
    heads = [(arm.label, f"{arm.about}, {plural(len(arm.losses), 'seed')}") for arm in arms]
    return table_of([_corner(group), *heads], rows, title=title, note=note, totals=totals)


def _corner(group: PerplexityGroup | TargetsGroup) -> str:
    return "domain" if isinstance(group, PerplexityGroup) else "target"


def _number_below(domains: Sequence[Line], arm: Arm, baseline: str) -> str:
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
    is_several = any(len(arm.losses) > 1 for arm in lines[0].arms.values())
    chance = " Of twenty such intervals one is wrong by chance." if is_several else ONE_SEED
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
