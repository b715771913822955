"""Accuracies of base models on tasks: tab:fewshot."""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.arms import FOCUS, Part, headline_of, nothing_yet
from doge_fast.pipeline.reporting.experiment import Experiment
from doge_fast.pipeline.reporting.statistics import CONFIDENCE, Difference, paired_difference
from doge_fast.pipeline.reporting.tables import accuracy_text, task_table
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import plural


def tasks_part(experiment: Experiment, group: Json, prefix: str) -> Part:
    """Accuracies of the arms, and their gain over the baseline's."""
    scores = {label: each for label, each in experiment.scores(group).items() if each}
    seeds = set.intersection(*map(set, scores.values())) if scores else set()
    about = {arm["label"]: arm["about"] for arm in group["arms"]}
    baseline = next((arm["label"] for arm in group["arms"] if arm.get("is_baseline")), None)
    if baseline not in scores or len(scores) < 2 or not seeds:
        return Part([nothing_yet(group["title"])], [], [])
    kept = {label: [each[seed] for seed in sorted(seeds)] for label, each in scores.items()}
    table = task_table(
        group["title"], {label: (about[label], found) for label, found in kept.items()}
    )
    assert table is not None
    rivals = [label for label in kept if label != baseline]
    wanted = group["focus"] or FOCUS
    focus = next((label for label in rivals if label.startswith(wanted)), rivals[-1])
    differences = {label: _accuracy_gain(kept[label], kept[baseline]) for label in rivals}
    sentences = [
        f"{label}: {_points_text(found)} against {baseline} in the average of "
        f"{plural(len(group['tasks']), 'task')}, over {plural(found.pairs, 'paired seed')}."
        for label, found in differences.items()
    ]
    average = [score["average"] for score in kept[baseline]]
    sentences.append(
        f"{baseline} answers {accuracy_text(average)} % rightly, guessing "
        f"{100 * average[0]['chance']:.1f} %."
    )
    headline = headline_of(focus, baseline, differences[focus], is_more_better=True)
    return Part([Verdict(group["title"], headline, sentences)], [table], [])


def _accuracy_gain(own: Sequence[Json], other: Sequence[Json]) -> Difference:
    """Of the average accuracy over tasks, in percentage points.

    Seeds answer the same documents, so the error of these is in the interval too, beside that of
    the seeds; as if each arm had drawn its own, which is too much rather than too little.
    """
    ours, theirs = ([each["average"] for each in arm] for arm in (own, other))
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


def task_warnings(experiment: Experiment, group: Json) -> Iterator[str]:
    """What to know of the scores before believing them."""
    told = [record for each in experiment.scores(group).values() for record in each.values()]
    scores = [task for record in told for task in record["tasks"].values()]
    if group["task_limit"] is not None:
        yield (
            f"{group['title']}: of every task the first {plural(group['task_limit'], 'document')} "
            "alone; the paper's are whole."
        )
    cut = sum(task["truncated_requests"] for task in scores)
    if cut:
        requests = sum(task["requests"] for task in scores)
        yield (
            f"{group['title']}: {100 * cut / requests:.0f} % of the prompts were cut to fit "
            f"{plural(told[0]['positions'], 'position')}; their first shots are lost."
        )
