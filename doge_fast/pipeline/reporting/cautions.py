"""What to know before believing a number, and what to do about it."""

import math
from collections.abc import Iterator

from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import mixtures
from doge_fast.pipeline.reporting.run_tables import budget_of, mixtures_of
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import count_text, listed, plural


def warnings_about(study: Study, token_budget: int | None) -> list[str]:
    """Everything that a reader should know before believing a number."""
    found = list(_plan_warnings(study) if study.is_experiment else ())
    # Runs of one corpus say the same.
    found += dict.fromkeys(warning for run in study.shown for warning in run.warnings)
    for proxy in study.proxies:
        found += proxy.warnings()
    found += [
        f"{proxy.label}: one seed, so the spread of its weights is unknown."
        for proxy in study.proxies
        if proxy.has_steps and len(proxy.runs) == 1
    ]
    for run in study.shown:
        found += _run_warnings(run)
    if not study.is_experiment:
        for group in study.groups:
            if group["kind"] == "perplexity":
                found += _comparison_warnings(study, group)
        found += _epoch_warnings(study, budget_of(study, token_budget))
    return found


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
            yield from _task_warnings(study, group)
    if study.record["preset"] == "smoke":
        yield "preset smoke: runs of a few steps, which show that everything works and no more."


def _task_warnings(study: Study, group: Json) -> Iterator[str]:
    if group["task_limit"] is not None:
        yield (
            f"{group['title']}: of every task the first {plural(group['task_limit'], 'document')} "
            "alone; the paper's are whole."
        )
    told = [record for each in study.scores(group).values() for record in each.values()]
    scores = [task for record in told for task in record["tasks"].values()]
    cut = sum(task["truncated_requests"] for task in scores)
    if cut:
        requests = sum(task["requests"] for task in scores)
        yield (
            f"{group['title']}: {100 * cut / requests:.0f} % of the prompts were cut to fit "
            f"{plural(told[0]['positions'], 'position')}; their first shots are lost."
        )


def _run_warnings(run: Run) -> Iterator[str]:
    if run.is_lost:
        yield (
            f"{run.name}: diverged, its records end at step {run.last_step} of {run.steps} and it "
            "left no result. Repeat it in another directory with a lower learning_rate."
        )
    elif not run.is_complete:
        yield (
            f"{run.name}: not complete, its records end at step {run.last_step} of {run.steps}. "
            "The command that began it resumes it."
        )
    if run.skipped:
        yield (
            f"{run.name}: {plural(run.skipped, 'logged step')} skipped for a gradient that was "
            "not finite."
        )
    losses = run.losses() or {}
    diverged = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if diverged:
        yield f"{run.name}: diverged; the held-out loss of {listed(diverged)} is not finite."


def _comparison_warnings(study: Study, group: Json) -> Iterator[str]:
    comparison, title = study.comparison(group), group["title"]
    missing = [arm for arm in group["arms"] if not study.arm(arm).losses]
    if missing:
        yield f"{title}: {plural(len(missing), 'arm')} not measured yet, so left out."
    if not comparison.arms:
        return
    if comparison.baseline is None:
        yield f"{title}: no uniform baseline at these settings."
    if not group["others"] and all(arm.label != "natural" for arm in comparison.arms):
        yield f"{title}: no natural baseline at these settings."
    single = [arm.label for arm in comparison.arms if len(arm.losses) == 1]
    if single:
        yield f"{title}: one seed of {listed(single)}, so differences may be chance."
    measured = [run.measured_blocks() for arm in comparison.arms for run in arm.runs.values()]
    if any(blocks != measured[0] for blocks in measured):
        yield f"{title}: the arms were measured on different numbers of held-out blocks."


def _epoch_warnings(study: Study, budget: int) -> Iterator[str]:
    for mixture in mixtures_of(study):
        epochs = mixture.epochs(budget)
        often = [name for name, count in epochs.items() if count > mixtures.MAX_EPOCHS]
        if often:
            told = listed(f"{name} {epochs[name]:.1f} times" for name in often)
            yield (
                f"{mixture.label}: {count_text(budget)} tokens at these weights repeat {told}; "
                f"beyond {mixtures.MAX_EPOCHS:.0f} epochs text is worth less. Use smoothing, or "
                "get more of it."
            )
