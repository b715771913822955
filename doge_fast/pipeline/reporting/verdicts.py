"""What came out, in words: the answer whichever arm wins, and what to know before believing it."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from doge_fast.pipeline.reporting.mixtures import (
    MAX_EPOCHS,
    PAPER_VERDICT,
    Mixture,
    budget_of,
    effective_domains,
    is_slimpajama,
    mixtures_of,
)
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import (
    MAX_DRIFT,
    Arm,
    Comparison,
    Proxy,
    Study,
    read_study,
)
from doge_fast.pipeline.reporting.wording import (
    as_ascii,
    count_text,
    listed,
    nan_as_inf,
    percent_text,
    perplexity_text,
    plural,
    relative_change,
    weight_text,
    wrapped,
)

# Nearly everything on one domain; the paper's most extreme weight is 0.72.
COLLAPSED = 0.8
# Hardly moved: no domain is further than this from uniform, as a share of uniform.
UNMOVED = 0.02
# Of uniform. A rule of thumb: in docs/evidence.md a domain at a half of uniform lost a quarter
# already, and one at a twentieth nothing, for others stood in for it.
STARVED = 1 / 3
# Single-seed differences below this are called small; the paper's seeds differ by about as much.
SMALL_CHANGE = 0.01


class Verdict(NamedTuple):
    """The answer of a comparison."""

    title: str
    headline: str
    sentences: list[str]


def verdict_on(comparison: Comparison, study: Study) -> Verdict:
    """Whether weights other than uniform helped, whichever way it went."""
    title = comparison.title
    if not comparison.arms or not comparison.domains:
        return Verdict(title, "No base model here has been measured", [_EVALUATE])
    if comparison.first.targets and not comparison.targets:
        return Verdict(title, "The target has not been measured by every arm", [_EVALUATE])
    if comparison.uniform is None:
        return Verdict(title, "Nothing to compare with: no base model at uniform weights", [_TRAIN])
    if not comparison.rivals:
        return Verdict(title, "Only uniform weights have been tried", [])
    judge = _against_on_target if comparison.targets else _against
    sentences = [judge(arm, comparison.uniform, comparison) for arm in comparison.rivals]
    sentences += _for_scale(comparison, study)
    if not comparison.targets and is_slimpajama(comparison.domains):
        sentences.append(PAPER_VERDICT)
    return Verdict(title, _headline(comparison, comparison.uniform), sentences)


_EVALUATE = "Run doge-fast evaluate on each finished base run."
_TRAIN = (
    "Train one with doge-fast base --weights uniform and the settings of the others; without it "
    "nobody can tell whether learned weights help."
)


def _headline(comparison: Comparison, uniform: Arm) -> str:
    learned = [arm for arm in comparison.rivals if arm.kind != "natural"] or comparison.rivals
    arm = min(learned, key=lambda arm: nan_as_inf(arm.loss(comparison.aim).mean))
    what = "Natural" if arm.kind == "natural" else "Learned" if arm.kind == "learned" else "Given"
    where = f" on {listed(comparison.targets)}" if comparison.targets else ""
    own, base = (nan_as_inf(each.loss(comparison.aim).mean) for each in (arm, uniform))
    if own == base:
        return f"{what} weights and uniform ones come out the same{where}"
    if own > base:
        return f"{what} weights do not beat uniform ones{where}"
    best = min(comparison.arms, key=lambda other: nan_as_inf(other.loss(comparison.aim).mean))
    if best is not arm:
        return f"{what} weights beat uniform ones{where}; {best.label} weights are better still"
    if not comparison.targets and 2 * num_better(arm, uniform, comparison) < len(
        comparison.domains
    ):
        return f"{what} weights beat uniform ones on average, but on fewer than half the domains"
    return f"{what} weights beat uniform ones{where}"


def num_better(arm: Arm, uniform: Arm, comparison: Comparison) -> int:
    """How many training domains `arm` predicts better than `uniform`."""
    return sum(beats(arm, uniform, [name]) for name in comparison.domains)


def beats(arm: Arm, uniform: Arm, names: Sequence[str]) -> bool:
    """Whether the mean loss over `names` is below uniform's."""
    return arm.loss(names).mean < nan_as_inf(uniform.loss(names).mean)


def _against(arm: Arm, uniform: Arm, comparison: Comparison) -> str:
    names = comparison.domains
    worst, worst_stat = arm.worst(names)
    other_worst, other_stat = uniform.worst(names)
    return (
        f"{arm.label}: better on {num_better(arm, uniform, comparison)} of {len(names)} domains "
        f"than uniform; average perplexity {_versus(arm, uniform, names)}; worst domain {worst} "
        f"at {perplexity_text(worst_stat.mean)}, with uniform {other_worst} at "
        f"{perplexity_text(other_stat.mean)}.{_confidence(arm, uniform, names)}"
    )


def _against_on_target(arm: Arm, uniform: Arm, comparison: Comparison) -> str:
    names = comparison.targets
    return (
        f"{arm.label}: perplexity on {listed(names)}, which was never trained on, "
        f"{_versus(arm, uniform, names)}; average over the training domains "
        f"{_versus(arm, uniform, comparison.domains)}.{_confidence(arm, uniform, names)}"
    )


def _versus(arm: Arm, uniform: Arm, names: Sequence[str]) -> str:
    """15.81 against 16.53 (−4.4 %)."""
    own, other = arm.perplexity(names).mean, uniform.perplexity(names).mean
    change = percent_text(relative_change(own, other))
    return f"{perplexity_text(own)} against {perplexity_text(other)} ({change})"


def _confidence(arm: Arm, uniform: Arm, names: Sequence[str]) -> str:
    """What the seeds allow to say about a difference."""
    own, other = arm.loss(names), uniform.loss(names)
    if own.error is not None and other.error is not None:
        spread = math.hypot(own.error, other.error)
        ratio = abs(own.mean - other.mean) / spread if spread > 0 else math.inf
        seeds = f"{len(arm.losses)} and {len(uniform.losses)} seeds"
        return f" The difference is {ratio:.1f} standard errors ({seeds})."
    change = relative_change(arm.perplexity(names).mean, uniform.perplexity(names).mean)
    if abs(change) < SMALL_CHANGE:
        return " With one seed a difference this small may be chance."
    return ""


def _for_scale(comparison: Comparison, study: Study) -> list[str]:
    """What a uniform model reaches that was trained on the targets too, at equal tokens."""
    if not comparison.targets:
        return []
    for other in study.comparisons:
        uniform = other.uniform
        if uniform and _is_oracle(other, comparison):
            reached = perplexity_text(uniform.perplexity(comparison.targets).mean)
            target = listed(comparison.targets)
            return [f"For scale: uniform weights with {target} among the domains reach {reached}."]
    return []


def _is_oracle(other: Comparison, comparison: Comparison) -> bool:
    own, its = comparison.first, other.first
    return (
        set(comparison.targets) <= set(other.domains)
        and its.tokens == own.tokens
        and its.config["model"] == own.config["model"]
        and its.corpus["tokenizer_sha256"] == own.corpus["tokenizer_sha256"]
    )


def summary_of(proxy: Proxy) -> str:
    """What a proxy learned, and whether its average has settled."""
    if not proxy.has_steps:
        return f"{proxy.label}: has not logged a step yet."
    first, *others = sorted(proxy.weights.items(), key=lambda item: -item[1].mean)
    top = listed(
        f"{name} {weight_text(stat)} ({_times(stat.mean, proxy)})"
        for name, stat in [first, *others[:-1]][:2]
    )
    least = f", least to {others[-1][0]} {weight_text(others[-1][1])}" if others else ""
    return (
        f"{proxy.label}, for {proxy.target}: most goes to {top}{least}; effectively "
        f"{effective_domains(proxy.weights):.1f} of {plural(len(proxy.domains), 'domain')}. "
        f"{drift_sentence(proxy)}"
    )


def _times(weight: float, proxy: Proxy) -> str:
    return f"{weight * len(proxy.domains):.1f}\N{NO-BREAK SPACE}× uniform"


def remarks_on(run: Path) -> list[str]:
    """What a run of stage one found and what to know before using it, in lines for a terminal.

    Raises:
        ValueError: `run` is no such run.
    """
    (proxy,) = read_study([run]).proxies
    warnings = (*proxy.first.warnings, *proxy_warnings(proxy))
    remarks = [summary_of(proxy), *(f"Warning: {each}" for each in warnings)]
    return [as_ascii(wrapped(each)) for each in remarks]


def drift_sentence(proxy: Proxy) -> str:
    """Whether a proxy's running average has settled, in a sentence."""
    steps_T, drift_T = proxy.drift()
    share = f"{50 * drift_T[-1]:.1f}\N{NO-BREAK SPACE}%"
    moved = f"the last fifth of the {int(steps_T[-1])} steps reassigned {share} of the tokens"
    if not _has_moved(proxy):
        return f"The running average has hardly moved: {moved}."
    if drift_T[-1] <= MAX_DRIFT:
        return f"The running average has settled: {moved}."
    return f"The running average is still moving: {moved}."


def asked_of(study: Study) -> list[str]:
    """What was asked and what was run, in sentences."""
    sentences = [
        f"{proxy.label} asks which mixture of {listed(proxy.domains)} lowers the loss on "
        f"{proxy.target}{'' if not proxy.first.targets else ', which is not trained on'} "
        f"({plural(len(proxy.runs), 'seed')}; {proxy.first.config['model']['model']} model, "
        f"{proxy.first.steps} steps, {count_text(proxy.first.tokens)} tokens)."
        for proxy in study.proxies
    ]
    for comparison in study.comparisons:
        labels = [arm.label for arm in comparison.arms]
        names = f": {listed(labels)}" if labels else ""
        sentences.append(
            f"{comparison.title}: {plural(comparison.num_seen, 'arm')} of base models on "
            f"{plural(len(comparison.first.domains), 'domain')}, {comparison.settings}{names}."
        )
    return sentences


def warnings_about(study: Study, token_budget: int | None) -> list[str]:
    """Everything that a reader should know before believing a number."""
    found = run_warnings(study)
    found += [warning for each in study.comparisons for warning in _comparison_warnings(each)]
    budget = budget_of(study, token_budget)
    for mixture in mixtures_of(study):
        found += _epoch_warnings(mixture, budget)
    return found


def run_warnings(study: Study) -> list[str]:
    """What a reader should know of the corpus, of the proxies and of single runs."""
    # Runs of one corpus say the same.
    found = list(dict.fromkeys(warning for run in study.runs for warning in run.warnings))
    found += [warning for proxy in study.proxies for warning in proxy_warnings(proxy)]
    found += [
        f"{proxy.label}: one seed, so the spread of its weights is unknown."
        for proxy in study.proxies
        if proxy.has_steps and len(proxy.runs) == 1
    ]
    return found + [warning for run in study.runs for warning in _run_warnings(run)]


def proxy_warnings(proxy: Proxy) -> Iterator[str]:
    """What a reader should know of learned weights, and what to do about it."""
    if not proxy.has_steps:
        return
    largest = max(proxy.weights, key=lambda name: proxy.weights[name].mean)
    weight, uniform = proxy.weights[largest].mean, 1 / len(proxy.domains)
    if weight > COLLAPSED and len(proxy.domains) > 1:
        remedy = (
            "A smaller step_size or more smoothing"
            if proxy.is_doremi
            else "A larger mu, smoothing or domain_max_grad_norm"
        )
        yield (
            f"{proxy.label}: the weights collapsed onto {largest} ({weight:.2f}). {remedy} keeps "
            "them apart."
        )
    elif not _has_moved(proxy):
        yield (
            f"{proxy.label}: the weights hardly left uniform. A "
            f"{'larger step_size' if proxy.is_doremi else 'smaller mu'} or more steps would move "
            "them."
        )
    elif proxy.is_for_all_domains:
        yield from _starved(proxy, uniform)
    if not proxy.is_settled:
        yield (
            f"{proxy.label}: the running average of the weights is still drifting; more steps "
            "would change the result."
        )


def _has_moved(proxy: Proxy) -> bool:
    """Whether a domain is further from uniform than chance would take it; one domain cannot be."""
    uniform = 1 / len(proxy.domains)
    furthest = max(abs(stat.mean - uniform) for stat in proxy.weights.values())
    return furthest >= UNMOVED * uniform or len(proxy.domains) == 1


def _starved(proxy: Proxy, uniform: float) -> Iterator[str]:
    """Domains that are to get better and are hardly trained on."""
    names = [name for name, stat in proxy.weights.items() if stat.mean < STARVED * uniform]
    if names:
        milder = "a smaller step_size" if proxy.is_doremi else "a larger mu or --target mix"
        yield (
            f"{proxy.label}: {listed(names)} would be read less than a third as often as at "
            f"uniform weights, and a small model tends to pay for it there. Try {milder}, or set a "
            "floor: doge-fast weights constrain --floor."
        )


def _comparison_warnings(comparison: Comparison) -> Iterator[str]:
    missing = comparison.num_seen - len(comparison.arms)
    if missing:
        yield f"{comparison.title}: {plural(missing, 'arm')} not measured yet, so left out."
    if not comparison.arms:
        return
    if comparison.uniform is None:
        yield f"{comparison.title}: no uniform baseline at these settings."
    if not comparison.first.targets and all(arm.kind != "natural" for arm in comparison.arms):
        yield f"{comparison.title}: no natural baseline at these settings."
    single = [arm.label for arm in comparison.arms if len(arm.losses) == 1]
    if single:
        yield (
            f"{comparison.title}: one seed of {listed(single)}, so small differences may be chance."
        )
    measured = [run.measured_blocks() for arm in comparison.arms for run in arm.runs]
    if any(blocks != measured[0] for blocks in measured):
        yield f"{comparison.title}: the arms were measured on different numbers of held-out blocks."


def _run_warnings(run: Run) -> Iterator[str]:
    if run.last_step < run.steps:
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


def _epoch_warnings(mixture: "Mixture", budget: int) -> Iterator[str]:
    epochs = mixture.epochs(budget)
    often = [name for name, count in epochs.items() if count > MAX_EPOCHS]
    if often and mixture.is_learned:
        told = listed(f"{name} {epochs[name]:.1f} times" for name in often)
        yield (
            f"{mixture.label}: {count_text(budget)} tokens at these weights repeat {told}; beyond "
            f"{MAX_EPOCHS:.0f} epochs text is worth less. Use smoothing, or get more of it."
        )
