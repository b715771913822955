"""An experiment's records -> the answer in words, its tables beside the paper's, its figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from doge_fast.pipeline.reporting.experiment import Experiment
from doge_fast.pipeline.reporting.figures import Section
from doge_fast.pipeline.reporting.kinds.cost import cost_part
from doge_fast.pipeline.reporting.kinds.perplexity import perplexity_part
from doge_fast.pipeline.reporting.kinds.targets import targets_part
from doge_fast.pipeline.reporting.kinds.tasks import task_warnings, tasks_part
from doge_fast.pipeline.reporting.kinds.weights import weights_part
from doge_fast.pipeline.reporting.plotting import style
from doge_fast.pipeline.reporting.verdicts import Verdict
from doge_fast.pipeline.reporting.wording import count_text, listed, plural
from doge_fast.pipeline.tables import Table


@dataclass(frozen=True)
class Findings:
    """What an experiment came to."""

    title: str
    question: str
    told: list[str]
    """What was run, in sentences."""
    verdicts: list[Verdict]
    tables: list[Table]
    sections: list[Section]
    warnings: list[str]
    missing: list[str]
    """Runs that are not complete yet; the tables leave them out."""


def findings_of(experiment: Experiment) -> Findings:
    """Tables, figures and the answer, of the runs that there are so far."""
    verdicts, tables, drawings = [], [], []
    with style():
        for number, group in enumerate(experiment.record["groups"], start=1):
            part = _PARTS[group["kind"]](experiment, group, f"experiment-{number}")
            verdicts += part.verdicts
            tables += part.tables
            drawings += part.drawings
    about = "Marks: means over seeds; bars: 95 % intervals of the difference, seed by seed."
    return Findings(
        title=experiment.record["title"],
        question=experiment.record["question"],
        told=_told(experiment),
        verdicts=verdicts,
        tables=tables,
        sections=[Section("The experiment", about, drawings)] if drawings else [],
        warnings=list(_warnings(experiment)),
        missing=experiment.missing,
    )


def _told(experiment: Experiment) -> list[str]:
    settings = experiment.record["settings"]
    seeds = listed(map(str, settings["seeds"]))
    tokens = settings["batch_size"] * settings["block_size"]
    plural_s = "s" if len(settings["seeds"]) > 1 else ""
    return [
        f"Text: {experiment.record['data']}. Every arm with seed{plural_s} {seeds}; runs of one "
        "seed begin with the same numbers and see each domain's blocks in the same order, so arms "
        "are compared seed by seed.",
        f"Proxies: {settings['proxy_steps']} steps of {settings['sequences_per_domain']} blocks of "
        f"every domain, mu {settings['mu']:g}, score {settings['score']}. Base models: "
        f"{settings['base_steps']} steps of {settings['batch_size']} blocks, "
        f"{count_text(settings['base_steps'] * tokens)} tokens. A block is "
        f"{settings['block_size']} tokens.",
    ]


def _warnings(experiment: Experiment) -> Iterator[str]:
    unscored = [name for name in experiment.missing if name not in experiment.unmeasured]
    for missing, told in (
        (experiment.unmeasured, "not complete yet"),
        (unscored, "not scored on the tasks yet"),
    ):
        if missing:
            shown = listed(missing[:5]) + (" and others" if len(missing) > 5 else "")
            yield (
                f"{plural(len(missing), 'run')} of {len(experiment.record['runs'])} {told}, so "
                f"left out: {shown}. The same command goes on with them."
            )
    seeds = experiment.record["settings"]["seeds"]
    if len(seeds) == 1:
        yield "1 seed: differences cannot be told from chance. Take three or more."
    elif len(seeds) == 2:
        yield "2 seeds: every interval rests on how two numbers differ. Take three or more."
    for group in experiment.record["groups"]:
        if group["kind"] == "tasks":
            yield from task_warnings(experiment, group)
    if experiment.record["preset"] == "smoke":
        yield "preset smoke: runs of a few steps, which show that everything works and no more."


_PARTS = {
    "perplexity": perplexity_part,
    "targets": targets_part,
    "weights": weights_part,
    "cost": cost_part,
    "tasks": tasks_part,
}
