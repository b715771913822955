"""A study -> its parts: a group of arms each, of whatever kind, and a proxy each."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.records.movement import MOST_DRIFT
from doge_fast.pipeline.reporting import figures, paper, parts
from doge_fast.pipeline.reporting.background import cost_table
from doge_fast.pipeline.reporting.compared import perplexity_part, targets_part
from doge_fast.pipeline.reporting.mixtures import effective_domains
from doge_fast.pipeline.reporting.plotting import NOISY_POINTS, chunk_size, domain_styles
from doge_fast.pipeline.reporting.proxies import UNIVERSAL, Proxy
from doge_fast.pipeline.reporting.statistics import (
    CONFIDENCE,
    Difference,
    focus_of,
    paired_difference,
    stat_of,
)
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import Stat, listed, plural, weight_text
from doge_fast.pipeline.tables import Cell, Row, Table

Stats = Mapping[str, Mapping[str, Stat]]
Columns = Mapping[Any, Mapping[str, float]]
# {label of an arm: fewshot.json of each seed}.
Scores = Mapping[str, Sequence[Json]]


def parts_of(study: Study) -> list[parts.Part]:
    """What each group came to, of the runs that there are so far."""
    return [
        _PARTS[group["kind"]](study, group, f"group-{number}")._replace(title=group["title"])
        for number, group in enumerate(study.groups, start=1)
        if group["kind"] in _PARTS
    ]


def _weights_part(study: Study, group: Json, prefix: str) -> parts.Part:
    """The weights of the arms, beside each other and the paper's."""
    stats = {arm["label"]: found for arm in group["arms"] if (found := study.weights(arm))}
    if not stats:
        return parts.Part()
    means = {
        label: {name: stat.mean for name, stat in weights.items()}
        for label, weights in stats.items()
    }
    table = _weights_table(study, group, stats, means)
    if len(stats) == 1:
        return parts.Part(tables=[table])
    answer = []
    if group.get("reference") in stats:
        gaps = _gaps_of(means, group["reference"]).items()
        told = listed(f"{label} {100 * gap:.2f} %" for label, gap in gaps)
        headline = f"Mean absolute difference from the {group['reference']} proxy's weights: {told}"
        answer.append(parts.Verdict(group["title"], headline, [paper.NOTES["tab:robust"]]))
    make = partial(figures.arms_weights_figure, means)
    has_gaps = len({*map(len, stats.values())}) > 1
    dash = " A dash: not among the domains." if has_gaps else ""
    words = {"title": group["title"], "dash": dash}
    drawn = [parts.sketch("arms-weights", f"{prefix}-weights", make, **words)]
    return parts.Part(answer, [table], drawn)


def _weights_table(study: Study, group: Json, stats: Stats, means: Columns) -> Table:
    """Weights by label of an arm, as tab:dw, tab:ood-dw, tab:robust and tab:cc-dw."""
    arms = [arm for arm in group["arms"] if arm["label"] in stats]
    targets = {arm["label"]: next((r.targets for r in study.runs_of(arm)), ()) for arm in arms}
    columns = _paper_weights(group, means, targets)
    beside = {
        column: {own: f"{value:.3f}" for own, value in values.items()}
        for column, values in columns.items()
    }
    rows = [
        Row(name, [_weight_cell(name, stats[label], targets[label]) for label in stats])
        for name in dict.fromkeys(name for weights in stats.values() for name in weights)
    ]

    def total(label: str, ours: Iterable[str], theirs: Iterable[str] = ()) -> None:
        rows.append(Row(label, [Cell(text) for text in ours], True))
        for column, text in zip(beside, theirs, strict=False):
            beside[column][label] = text

    if group.get("has_uniform"):
        total("uniform would be", [f"{1 / len(each):.3f}" for each in means.values()])
    effective = [
        f"{effective_domains(each.values()):.1f} of {len(each)}" for each in means.values()
    ]
    total("effective domains", effective)
    reference = group.get("reference", "")
    if reference in stats:
        theirs = _gap_texts(columns, ("82M", "tab:robust"))
        total(f"mean absolute difference from {reference}", _gap_texts(means, reference), theirs)
    if group.get("has_columns"):
        shares = [study.share_saved(arm) for arm in arms]
        saved = [paper.SAVED.get(column) for column, _ in columns]
        theirs = ["/" if share is None else f"{share} %" for share in saved]
        ours = ["/" if share is None else f"{100 * share:.1f} %" for share in shares]
        total("columns left out", ours, theirs)
    is_several = any(stat.error is not None for found in stats.values() for stat in found.values())
    note = (
        f"Averages over the steps{', mean over seeds' if is_several else ''}. Bold: above "
        "uniform. Effective domains: exp of the entropy of the weights."
        f"{parts.ERRORS if is_several else ''}"
    )
    heads = [(arm["label"], arm["about"]) for arm in arms]
    table = Table(group["title"], note, "domain", heads, rows)
    return parts.beside_paper(table, beside, paper.NOTES["weights"])


def _paper_weights(
    group: Json, means: Columns, targets: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], dict[str, float]]:
    """{(column, table) of the paper: weights} for the domains and the target of an arm of ours."""
    asked = group.get("paper") or []
    columns = {}
    for table in [asked] if isinstance(asked, str) else asked:
        for column, values in paper.TABLES[table].items():
            for label, weights in means.items():
                wanted = [paper.canonical(name) for name in targets[label]]
                is_asked = [column] == [f"for {name}" for name in wanted] or (
                    not wanted and not column.startswith("for ")
                )
                known = {name: paper.canonical(name) for name in weights}
                if is_asked and set(known.values()) == set(values):
                    columns[column, table] = {own: values[name] for own, name in known.items()}
    return columns


def _weight_cell(name: str, weights: Mapping[str, Stat], targets: Sequence[str]) -> Cell:
    if name not in weights:
        return Cell("target" if name in targets else "–")
    return Cell(weight_text(weights[name]), weights[name].mean > 1 / len(weights))


def _gaps_of(columns: Columns, reference: Any) -> dict[Any, float]:
    """{label: mean absolute difference from the weights of `reference`}, over domains of both."""
    other, gaps = columns[reference], {}
    for label, own in columns.items():
        if label != reference:
            names = own.keys() & other.keys()
            gaps[label] = math.fsum(abs(own[name] - other[name]) for name in names) / len(names)
    return gaps


def _gap_texts(columns: Columns, reference: Any) -> list[str]:
    gaps = _gaps_of(columns, reference) if reference in columns else {}
    return [f"{100 * gaps[name]:.2f} %" if name in gaps else "/" for name in columns]


def _cost_part(study: Study, group: Json, prefix: str) -> parts.Part:
    table = cost_table(study, group)
    return parts.Part(tables=[table] if table else [])


def _tasks_part(study: Study, group: Json, prefix: str) -> parts.Part:
    """Accuracies of the arms over their common seeds, and the gain over the baseline's."""
    scores = {label: each for label, each in study.scores(group).items() if each}
    seeds = sorted(set.intersection(*map(set, scores.values()))) if scores else []
    kept = {label: [each[seed] for seed in seeds] for label, each in scores.items()}
    found = [record["tasks"] for each in kept.values() for record in each]
    names = [name for name in (found or [{}])[0] if all(name in tasks for tasks in found)]
    if not names:
        return parts.Part([parts.unanswered(study, group["title"])])
    answer = [
        _tasks_verdict(group, kept, arm["label"])
        for arm in group["arms"]
        if arm.get("is_baseline") and arm["label"] in kept and len(kept) > 1
    ]
    return parts.Part(answer, [_task_table(group, kept, names)])


def _task_table(group: Json, scores: Scores, names: Sequence[str]) -> Table:
    """k-shot accuracies of each seed by label of an arm, as tab:fewshot."""
    rows = []
    for name in (*names, "average"):
        values = [
            [{**record["tasks"], "average": record["average"]}[name] for record in each]
            for each in scores.values()
        ]
        texts = [*map(_accuracy_text, values), f"{100 * values[0][0]['chance']:.1f}"]
        rows.append(Row(name, [Cell(text) for text in texts], name == "average"))
    records = [record for each in scores.values() for record in each]
    note = (
        "Accuracy in per cent; answered examples before a question: "
        f"{listed(map(str, sorted({record['shots'] for record in records})))}; ±: standard error, "
        "of documents and, where there are several, of seeds."
    )
    if any(task["truncated_requests"] for each in records for task in each["tasks"].values()):
        note += " Prompts were cut to fit the models' positions: these are not full k-shot scores."
    abouts = {arm["label"]: arm["about"] for arm in group["arms"]}
    heads = [
        (label, f"{abouts[label]}, {plural(len(each), 'seed')}") for label, each in scores.items()
    ]
    table = Table(group["title"], note, "task", [*heads, ("chance", "one of the choices")], rows)
    # The paper's average is of all its six tasks.
    known = names if len(names) < 6 else [*names, "average"]
    beside = paper.columns_beside("tab:fewshot", {name: name for name in known}, 1)
    return parts.beside_paper(table, beside)


def _accuracy_text(scores: Sequence[Json]) -> str:
    """The mean over seeds, with the error of seeds and documents together."""
    seeds = stat_of(each["acc"] for each in scores)
    of_documents = [each["acc_stderr"] for each in scores]
    mean = f"{100 * seeds.mean:.1f}"
    if None in of_documents:
        return mean
    # Seeds answer the same documents, so that more of them do not make these fewer.
    error = math.hypot(seeds.error or 0.0, math.fsum(of_documents) / len(scores))
    return f"{mean} ± {100 * error:.1f}"


def _tasks_verdict(
    group: Json, scores: Mapping[str, Sequence[Json]], baseline: str
) -> parts.Verdict:
    """Accuracies against the baseline's, in points, over the same seeds."""
    average = {label: [each["average"] for each in found] for label, found in scores.items()}
    rivals = [label for label in scores if label != baseline]
    gains = {label: _accuracy_gain(average[label], average[baseline]) for label in rivals}
    number = plural(len(scores[baseline][0]["tasks"]), "task")
    sentences = [
        f"{label}: {_points_text(found)} against {baseline} in the average of {number}, over "
        f"{plural(found.pairs, 'paired seed')}."
        for label, found in gains.items()
    ]
    sentences.append(
        f"{baseline} answers {_accuracy_text(average[baseline])} % rightly, guessing "
        f"{100 * average[baseline][0]['chance']:.1f} %."
    )
    focus = focus_of(group, rivals)
    headline = parts.headline_of(focus, baseline, gains[focus], is_accuracy=True)
    return parts.Verdict(group["title"], headline, sentences)


def _accuracy_gain(ours: Sequence[Json], theirs: Sequence[Json]) -> Difference:
    """Of accuracies over seeds, in percentage points.

    Seeds answer the same documents, so the error of these is in the interval too, beside that of
    the seeds; as if each arm had drawn its own, which is too much rather than too little.
    """
    found = paired_difference(
        [100 * each["acc"] for each in ours], [100 * each["acc"] for each in theirs]
    )
    errors = [each["acc_stderr"] for each in (*ours, *theirs)]
    if found.low is None or None in errors:
        return found._replace(low=None, high=None)
    of_documents = 100 * math.sqrt(2 * math.fsum(error**2 for error in errors) / len(errors))
    reach = math.hypot(
        found.mean - found.low, NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * of_documents
    )
    return found._replace(low=found.mean - reach, high=found.mean + reach)


def _points_text(difference: Difference) -> str:
    text = f"{difference.mean:+.1f} points"
    if difference.low is not None and difference.high is not None:
        text += f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    return text.replace("-", "−")


_PARTS = {
    "perplexity": perplexity_part,
    "targets": targets_part,
    "weights": _weights_part,
    "cost": _cost_part,
    "tasks": _tasks_part,
}


def proxy_parts(study: Study) -> list[parts.Part]:
    """What each proxy did over its steps."""
    drawn = [proxy for proxy in study.proxies if proxy.has_steps]
    # Names for files and ids, of letters, digits and hyphens, no two alike.
    slugs = [re.sub(r"[^A-Za-z0-9]+", "-", proxy.label).strip("-") for proxy in drawn]
    found = []
    for number, (proxy, slug) in enumerate(zip(drawn, slugs, strict=True), start=1):
        is_clear = slug and slugs.count(slug) == 1
        prefix = f"proxy-{slug}" if is_clear else f"proxy-{number}-{slug or 'run'}"
        sketches = list(_proxy_sketches(study, proxy, prefix))
        title = f"{proxy.label}: weights for {proxy.target}"
        found.append(parts.Part(sketches=sketches, title=title, proxy=proxy))
    return found


def _proxy_sketches(study: Study, proxy: Proxy, prefix: str) -> Iterator[parts.Sketch]:
    number, styles = len(proxy.runs), domain_styles(study.domains)
    seeds = f" Mean of {number} seeds; {{}}: ± one standard error." if number > 1 else ""
    chunk = chunk_size(len(proxy.series("loss", proxy.domains)[0]), NOISY_POINTS)
    only = [name for name in proxy.rows if name not in proxy.domains]
    words = {
        "bars": seeds.format("bars"),
        "bands": seeds.format("bands"),
        "drift": proxy.drift_sentence(),
        "most_drift": MOST_DRIFT,
        "spread": ", and at most what seeds differ by" if number > 1 else "",
        "binned": f" Each point is the mean of {chunk} logged steps." if chunk > 1 else "",
        "measured_only": f" {listed(only)}: measured only, not trained on." if only else "",
        "parts": "" if proxy.is_doremi else _parts_note(proxy),
    }
    makes = {
        "weights-final": partial(figures.final_figure, proxy, styles),
        "weights": partial(figures.weights_figure, proxy, styles),
        "drift": partial(figures.drift_figure, proxy),
        "excess": partial(figures.loss_figure, proxy, "excess", styles),
        "affinity": partial(figures.affinity_figure, proxy),
        "gain": partial(figures.parts_figure, proxy, styles),
        "loss": partial(figures.loss_figure, proxy, "loss", styles),
    }
    left_out = ("affinity", "gain") if proxy.is_doremi else ("excess",)
    for kind, make in makes.items():
        if kind not in left_out:
            yield parts.sketch(kind, f"{prefix}-{kind}", make, **words)


def _parts_note(proxy: Proxy) -> str:
    texts = parts.TEXTS["gain"]["parts"]
    is_for_all = UNIVERSAL in proxy.first.config["target"]
    note: str = texts["universal" if is_for_all else "target"]
    return note + (texts["published"] if proxy.first.config["score"] == "published" else "")
