"""A study -> the answer in words, its tables, and its figures with their captions."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import yaml
from matplotlib.figure import Figure

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.movement import MOST_DRIFT
from doge_fast.pipeline.reporting import figures, regret, tables, verdicts
from doge_fast.pipeline.reporting.arms import Arm, Comparison, Curve, curves_of
from doge_fast.pipeline.reporting.plotting import NOISY_POINTS, chunk_size
from doge_fast.pipeline.reporting.proxies import UNIVERSAL, WORST, Proxy
from doge_fast.pipeline.reporting.run_tables import cost_table
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.tables import Table

_NOTHING = "Nothing to compare yet"


class Sketch(NamedTuple):
    """A figure that is drawn when the page is made."""

    name: str
    title: str
    caption: str
    make: Callable[[], Figure]


_TEXTS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))


def _sketch(kind: str, name: str, make: Callable[[], Figure], **words: object) -> Sketch:
    """With its words in figures.yaml, filled in."""
    text = _TEXTS[kind]
    return Sketch(name, text["title"].format(**words), text["caption"].format(**words), make)


@dataclass(frozen=True)
class Part:
    """What a group, or a proxy, came to."""

    title: str
    verdicts: Sequence[Verdict] = ()
    tables: Sequence[Table] = ()
    sketches: Sequence[Sketch] = ()
    proxy: Proxy | None = None


def parts_of(study: Study) -> list[Part]:
    """What each group came to, of the runs that there are so far."""
    return [
        _PARTS[group["kind"]](study, group, f"group-{number}")
        for number, group in enumerate(study.groups, start=1)
    ]


def _perplexity_part(study: Study, group: Json, prefix: str) -> Part:
    """Arms against a baseline, domain by domain, and their losses during training."""
    comparison = study.comparison(group)
    answer = [verdicts.comparison_verdict(study, comparison)]
    if not comparison.arms or not (comparison.aim or comparison.others):
        return Part(group["title"], answer)
    shown = [tables.perplexity_table(comparison)]
    if comparison.baseline is None or not comparison.rivals or not comparison.aim:
        return Part(group["title"], answer, shown)
    shown.append(tables.difference_table(comparison))
    sketches = _comparison_sketches(comparison, comparison.baseline, prefix)
    return Part(group["title"], answer, shown, list(sketches))


def _comparison_sketches(comparison: Comparison, own: Arm, prefix: str) -> Iterator[Sketch]:
    title, aim, others = comparison.title, comparison.aim, comparison.others
    # The one that is asked about first, in ink.
    rivals = sorted(comparison.rivals, key=lambda arm: arm is not comparison.focus)
    is_crowded = len(rivals) > verdicts.MOST_TOLD
    places: list[tuple[str, Sequence[str]]] = [
        ("average", aim if is_crowded else others or aim),
        *((name, [name]) for name in reversed(others)),
        *((f"{name} (target)" if others else name, [name]) for name in reversed(aim)),
    ]
    rows = {arm.label: [arm.against(own, names) for _, names in places] for arm in rivals}
    make = partial(figures.change_figure, rows, [label for label, _ in places], own.label)
    if is_crowded:
        make = partial(figures.arms_figure, rows, own.label)
    filled = " Filled: the average over the domains; hollow: one domain." if is_crowded else ""
    words = {"baseline": own.label, "title": title, "filled": filled}
    yield _sketch("change", f"{prefix}-change", make, **words)
    curves = curves_of(comparison.arms, aim, comparison.until)
    if curves:
        shown = figures.extremes(curves, own.label)
        cut = f"; of {len(curves)} arms {own.label} and those that end lowest and highest"
        words = {
            "title": title,
            "domains": listed(aim) if others else "the domains",
            "cut": cut if len(shown) < len(curves) else "",
        }
        yield _sketch("curves", f"{prefix}-curves", partial(figures.curves_figure, shown), **words)
    for place, name in enumerate(aim if comparison.until < 1 else ()):
        curves = curves_of(comparison.arms, [name], comparison.until)
        yield from _curves(curves, f"{prefix}-domain-{place}", f"on {name}")


def _curves(curves: dict[str, Curve], name: str, where: str) -> Iterator[Sketch]:
    if curves:
        yield _sketch("domain-curves", name, partial(figures.curves_figure, curves), where=where)


def _targets_part(study: Study, group: Json, prefix: str) -> Part:
    """DoGE against uniform on each target, before and after further steps on it."""
    rows = {row["target"]: [study.arm(arm) for arm in row["arms"]] for row in group["rows"]}
    changes = verdicts.target_changes(rows)
    if not any(found.pairs for each in changes.values() for found in each.values()):
        return Part(group["title"], [verdicts.unanswered(study, group["title"], _NOTHING)])
    targets = list(reversed(rows))
    marks = {label: [each[target] for target in targets] for label, each in changes.items()}
    after = "; then both after further steps on it" if len(changes) > 1 else ""
    make = partial(figures.change_figure, marks, targets, "uniform")
    sketches = [_sketch("target-change", f"{prefix}-change", make, after=after)]
    for place, (target, arms) in enumerate(rows.items()):
        shown = [arm for arm in arms if arm.losses and "fine-tuned" not in arm.label]
        name = f"{prefix}-target-{place}"
        sketches += _curves(curves_of(shown, [target]), name, f"on {target} during training")
    answer = verdicts.targets_verdict(rows, changes)
    return Part(group["title"], [answer], [tables.targets_table(rows, changes, group)], sketches)


def _weights_part(study: Study, group: Json, prefix: str) -> Part:
    """The weights of the arms, beside each other and the paper's."""
    found = {arm["label"]: study.weights(arm) for arm in group["arms"]}
    stats = {label: weights for label, weights in found.items() if weights}
    if not stats:
        return Part(group["title"])
    table = tables.weights_table(study, group, stats)
    answer = []
    reference = group.get("reference", "")
    if reference in stats and len(stats) > 1:
        answer.append(
            verdicts.scale_verdict(group, tables.gaps_of(tables.means_of(stats), reference))
        )
    sketches = []
    if len(stats) > 1:
        names = [row.label for row in table.rows if not row.is_total]
        make = partial(figures.arms_weights_figure, stats, names)
        has_gaps = len({*map(len, stats.values())}) > 1
        words = {
            "title": group["title"],
            "dash": " A dash: not among the domains." if has_gaps else "",
        }
        sketches.append(_sketch("arms-weights", f"{prefix}-weights", make, **words))
    return Part(group["title"], answer, [table], sketches)


def _regret_part(study: Study, group: Json, prefix: str) -> Part:
    """How far each method is from the best mixture."""
    found = regret.regrets_of(study, group)
    shown = [regret.regret_table(found)] if found.arms else []
    if found.regression is not None:
        shown += [regret.best_table(found), regret.laws_table(found.regression)]
    arms, sketches = found.arms[::-1], []
    marks = {"measured": [found.measured(arm) for arm in arms]}
    if found.regression is not None:
        marks["predicted"] = [found.predicted(arm) for arm in arms]
    if any(each.is_known for differences in marks.values() for each in differences):
        labels = [arm["label"] for arm in arms]
        make = partial(figures.change_figure, marks, labels, "the best")
        sketches.append(_sketch("regret", f"{prefix}-regret", make, title=group["title"]))
    return Part(group["title"], [regret.regret_verdict(found)], shown, sketches)


def _cost_part(study: Study, group: Json, prefix: str) -> Part:
    table = cost_table(study, group)
    return Part(group["title"], tables=[table] if table else [])


def _tasks_part(study: Study, group: Json, prefix: str) -> Part:
    """Accuracies of the arms over their common seeds, and the gain over the baseline's."""
    scores = {label: each for label, each in study.scores(group).items() if each}
    seeds = sorted(set.intersection(*map(set, scores.values()))) if scores else []
    kept = {label: [each[seed] for seed in seeds] for label, each in scores.items()}
    table = tables.task_table(group, kept) if seeds else None
    if table is None:
        return Part(group["title"], [verdicts.unanswered(study, group["title"], _NOTHING)])
    baselines = [arm["label"] for arm in group["arms"] if arm.get("is_baseline")]
    answer = [
        verdicts.tasks_verdict(group, kept, label)
        for label in baselines
        if label in kept and len(kept) > 1
    ]
    return Part(group["title"], answer, [table])


_PARTS = {
    "perplexity": _perplexity_part,
    "targets": _targets_part,
    "weights": _weights_part,
    "cost": _cost_part,
    "regret": _regret_part,
    "tasks": _tasks_part,
}


def proxy_parts(study: Study) -> list[Part]:
    """What each proxy did over its steps."""
    drawn = [proxy for proxy in study.proxies if proxy.has_steps]
    return [
        Part(
            f"{proxy.label}: weights for {proxy.target}",
            sketches=list(_proxy_sketches(study, proxy, prefix)),
            proxy=proxy,
        )
        for proxy, prefix in zip(drawn, _prefixes(drawn), strict=True)
    ]


def _prefixes(proxies: Sequence[Proxy]) -> list[str]:
    """Names for files and ids, of letters, digits and hyphens, no two alike."""
    slugs = [re.sub(r"[^A-Za-z0-9]+", "-", proxy.label).strip("-") for proxy in proxies]
    return [
        f"proxy-{slug}" if slug and slugs.count(slug) == 1 else f"proxy-{number}-{slug or 'run'}"
        for number, slug in enumerate(slugs, start=1)
    ]


def _proxy_sketches(study: Study, proxy: Proxy, prefix: str) -> Iterator[Sketch]:
    number, colors = len(proxy.runs), study.colors
    seeds = f" Mean of {number} seeds; {{}}: ± one standard error." if number > 1 else ""
    chunk = chunk_size(len(proxy.series("loss", proxy.domains)[0]), NOISY_POINTS)
    only = [name for name in proxy.rows if name not in proxy.domains]
    words = {
        "bars": seeds.format("bars"),
        "bands": seeds.format("bands"),
        "drift": verdicts.drift_sentence(proxy),
        "most_drift": MOST_DRIFT,
        "spread": ", and at most what seeds differ by" if number > 1 else "",
        "binned": f" Each point is the mean of {chunk} logged steps." if chunk > 1 else "",
        "measured_only": f" {listed(only)}: measured only, not trained on." if only else "",
        "parts": "" if proxy.is_doremi else _parts_note(proxy),
    }
    makes = {
        "weights-final": partial(figures.final_figure, proxy, colors),
        "weights": partial(figures.weights_figure, proxy, colors),
        "drift": partial(figures.drift_figure, proxy),
        "excess": partial(figures.loss_figure, proxy, "excess", colors),
        "affinity": partial(figures.affinity_figure, proxy),
        "gain": partial(figures.parts_figure, proxy, colors),
        "loss": partial(figures.loss_figure, proxy, "loss", colors),
    }
    left_out = ("affinity", "gain") if proxy.is_doremi else ("excess",)
    for kind, make in makes.items():
        if kind not in left_out:
            yield _sketch(kind, f"{prefix}-{kind}", make, **words)


def _parts_note(proxy: Proxy) -> str:
    parts = _TEXTS["gain"]["parts"]
    is_for_all = {UNIVERSAL, WORST} & set(proxy.first.config["target"])
    note: str = parts["universal" if is_for_all else "target"]
    return note + (parts["published"] if proxy.first.config["score"] == "published" else "")
