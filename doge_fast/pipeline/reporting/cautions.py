"""What to know before believing a number, and what to do about it."""

import math
from collections.abc import Iterator

from doge_fast.pipeline import health
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting import mixtures
from doge_fast.pipeline.reporting.proxies import Proxy
from doge_fast.pipeline.reporting.run_tables import budget_of, mixtures_of
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import Study
from doge_fast.pipeline.reporting.wording import count_text, listed, plural

# Nearly everything on one domain; the paper's most extreme weight is 0.72.
_COLLAPSED = 0.8
# Hardly moved: no domain is further than this from uniform, as a share of uniform.
_UNMOVED = 0.02
# Of uniform. A rule of thumb: in docs/evidence.md a domain at a half of uniform lost a quarter
# already, and one at a twentieth nothing, for others stood in for it.
_STARVED = 1 / 3

# Share of the logged steps from which on what they were warned of is told.
_OFTEN = 0.05


def warnings_about(study: Study, token_budget: int | None) -> list[str]:
    """Everything that a reader should know before believing a number."""
    found = list(_plan_warnings(study) if study.is_experiment else ())
    # Runs of one corpus say the same.
    found += dict.fromkeys(warning for run in study.shown for warning in run.warnings)
    for proxy in study.proxies:
        found += proxy_warnings(proxy)
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


def proxy_warnings(proxy: Proxy) -> Iterator[str]:
    """What a reader should know of learned weights, and what to do about it."""
    if not proxy.has_steps:
        return
    lost = sum(run.skipped for run in proxy.runs)
    logged = sum("lr" in line for run in proxy.runs for line in run.train)
    if lost > health.MOST_LOST * logged:
        yield (
            f"{proxy.label}: {lost} of {plural(logged, 'logged step')} were skipped for a gradient "
            "that was not finite, so these weights mean nothing. Lower learning_rate."
        )
        return
    uniform = 1 / len(proxy.domains)
    largest = max(proxy.weights, key=lambda name: proxy.weights[name].mean)
    weight = proxy.weights[largest].mean
    if weight > _COLLAPSED and len(proxy.domains) > 1:
        remedy = (
            "A smaller step_size or more smoothing"
            if proxy.is_doremi
            else "A larger mu, smoothing or domain_max_grad_norm"
        )
        yield (
            f"{proxy.label}: the weights collapsed onto {largest} ({weight:.2f}). {remedy} keeps "
            "them apart."
        )
    elif not has_moved(proxy):
        remedy = "larger step_size" if proxy.is_doremi else "smaller mu"
        yield (
            f"{proxy.label}: the weights hardly left uniform. A {remedy} or more steps would move "
            "them."
        )
    elif proxy.is_for_all_domains:
        starved = [n for n, stat in proxy.weights.items() if stat.mean < _STARVED * uniform]
        milder = "a smaller step_size" if proxy.is_doremi else "a larger mu or --target mix"
        if starved:
            yield (
                f"{proxy.label}: {listed(starved)} would be read less than a third as often as at "
                f"uniform weights, and a small model tends to pay for it there. Try {milder}, or "
                "set a floor: doge-fast weights constrain --floor."
            )
    if has_moved(proxy) and not proxy.movement.is_settled:
        yield (
            f"{proxy.label}: the running average of the weights is still drifting; more steps "
            "would change the result."
        )
    yield from _seen_on_the_way(proxy, is_told=weight > _COLLAPSED)


def _seen_on_the_way(proxy: Proxy, *, is_told: bool) -> Iterator[str]:
    """What steps were warned of, where that is many of them or the last one.

    Args:
        proxy: some steps of which are logged.
        is_told: whether it is known already that one domain has nearly all of the weight.
    """
    for what, told in health.TOLD.items():
        lines = [line for run in proxy.runs for line in run.train if "lr" in line]
        found = [line for line in lines if what in line.get("warnings", {})]
        is_last = any(line is run.train[-1] for run in proxy.runs for line in found)
        if (is_told and what != "saturated") or not (is_last or len(found) > _OFTEN * len(lines)):
            continue
        names = sorted({name for line in found for name in line["warnings"][what]})
        remedy = "smaller step_size" if proxy.is_doremi else "larger mu"
        yield (
            f"{proxy.label}: in {len(found)} of {plural(len(lines), 'logged step')} "
            f"{health.domains_told(names)} {told}. A {remedy} or more smoothing keeps weights "
            "apart from their limits."
        )


def has_moved(proxy: Proxy) -> bool:
    """Whether a domain is further from uniform than chance would take it; one domain cannot be."""
    uniform = 1 / len(proxy.domains)
    furthest = max(abs(stat.mean - uniform) for stat in proxy.weights.values())
    return furthest >= _UNMOVED * uniform or len(proxy.domains) == 1


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
