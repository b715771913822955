"""What can be wrong with learned domain weights, as sentences.

`DomainWeights` warns with them, and the pipeline's report prints those about the records of a run.
Each function returns None where nothing is wrong.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from doge_fast.weights.aligned import WAITING_STEPS
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.objective import Objective
from doge_fast.weights.projection import effective_domains
from doge_fast.weights.reweight import MirrorStep
from doge_fast.weights.rule import UpdateRule, WeightsState

MOST_SKIPPED = 0.1
"""The largest share of the steps that may be skipped without harm to the result."""

# Weights have collapsed if fewer than 1 + _LEAST_SHARE (K - 1) domains are in effective use.
_LEAST_SHARE = 0.1
# Weights that have not moved in so many steps never will.
_STEPS_OF_A_STANDSTILL = 10


def diagnose(
    state: WeightsState, initial_K: Tensor, objective: Objective, rule: UpdateRule
) -> dict[str, str]:
    """{what is wrong: a sentence about it}, for weights that began at `initial_K`.

    All tensors are on the CPU.
    """
    num_steps, num_skipped = int(state.num_steps), int(state.num_skipped)
    sentences = {"skipped": skipped(num_skipped, num_steps + num_skipped)}
    if isinstance(rule, MirrorStep):
        sentences["unmoved"] = _unmoved(state, initial_K, objective, rule)
        sentences["collapsed"] = _collapsed(state, initial_K, objective, rule)
    elif num_steps and torch.allclose(state.alpha, initial_K, rtol=1e-9, atol=0):
        sentences["unmoved"] = _unmoved_by_angles(state, objective, rule)
    return {name: sentence for name, sentence in sentences.items() if sentence}


def skipped(num_skipped: int, num_steps: int, steps: str = "steps") -> str | None:
    """More than `MOST_SKIPPED` of `num_steps` were skipped; `steps` is their name."""
    if num_skipped <= MOST_SKIPPED * num_steps:
        return None
    return (
        f"{num_skipped} of {num_steps} {steps} were skipped because a gradient was not finite; the "
        "domain weights come from the others alone. Lower the learning rate, or look for the "
        "domain whose loss is not finite."
    )


def collapsed(weights: Mapping[str, float]) -> str | None:
    """Few of the domains have nearly all the weight. The caller adds what to do about it."""
    num_effective = effective_domains(weights.values())
    if num_effective >= 1 + _LEAST_SHARE * (len(weights) - 1):
        return None
    return (
        f"the domain weights have collapsed onto {max(weights, key=weights.__getitem__)}: only "
        f"{num_effective:.2f} of {len(weights)} domains are in effective use."
    )


def have_equal_scores(num_domains: int, max_norm: float | None, *, is_universal: bool) -> bool:
    """Whether two domains get equal scores because both gradients are clipped to one norm.

    At norm c both scores are c^2 + g_1 . g_2. More domains differ by the angles between gradients.
    """
    return num_domains == 2 and bool(max_norm) and is_universal


def _unmoved(
    state: WeightsState, initial_K: Tensor, objective: Objective, rule: MirrorStep
) -> str | None:
    """The weights are where they began."""
    num_steps, num_domains = int(state.num_steps), len(objective.domains)
    norm, is_universal = rule.domain_max_grad_norm, objective.has_equal_targets

    def is_still(tolerance: float) -> bool:
        return torch.allclose(state.alpha_mean, initial_K, rtol=tolerance)

    if num_steps and not state.gain.any() and is_still(1e-5):
        return _without_scores(num_steps, objective)
    if num_steps < _STEPS_OF_A_STANDSTILL or num_domains == 1:
        return None
    if have_equal_scores(num_domains, norm, is_universal=is_universal) and is_still(1e-3):
        return (
            f"the domain weights have stayed where they began in {num_steps} steps: the gradients "
            f"of both domains are clipped to the norm {norm:g}, and two domains of one norm have "
            "equal scores, whatever mu is. Pass domain_max_grad_norm=None."
        )
    if is_still(1e-9):
        return (
            f"the domain weights have not moved in {num_steps} steps: all scores are equal, the "
            "learning rate of the first parameter group is 0, or "
            f"mu={rule.mu:g} is far too large for it. Put a group with a learning rate first, or "
            "pass a smaller mu."
        )
    return None


def _unmoved_by_angles(state: WeightsState, objective: Objective, rule: UpdateRule) -> str | None:
    """Why the weights are where they began, of a rule that compares directions."""
    num_steps, num_domains = int(state.num_steps), len(objective.domains)
    if num_steps <= WAITING_STEPS:
        return (
            f"the domain weights are where they began: the rule {rule.name!r} moves them after "
            f"{WAITING_STEPS} steps, and there were {num_steps}."
        )
    if num_domains == 1:
        return None
    if objective.has_equal_targets:
        return (
            "the domain weights are where they began: all domains are targets with one weight, and "
            f"equal weights are the answer of the rule {rule.name!r} to that, whatever the text. "
            "Pass a target, or score='paper'."
        )
    return None if state.gain.any() else _without_scores(num_steps, objective)


def _without_scores(num_steps: int, objective: Objective) -> str:
    return (
        f"the domain weights have learned nothing in {num_steps} steps: every score is zero. A "
        f"score needs the gradient of the target {list(objective.needed)} in the same step. "
        "Run the target's backward pass inside optimizer.domain(name), or pass as target= a "
        "domain that the loop runs."
    )


def _collapsed(
    state: WeightsState, initial_K: Tensor, objective: Objective, rule: MirrorStep
) -> str | None:
    """The last weights have collapsed, though the first had not and all domains are targets."""

    def by_name(alpha_K: Tensor) -> dict[str, float]:
        return dict(zip(objective.domains, alpha_K.tolist(), strict=True))

    sentence = collapsed(by_name(state.alpha))
    if sentence is None or not objective.has_equal_targets or collapsed(by_name(initial_K)):
        return None
    return (
        f"{sentence} Pass a larger mu (it is {rule.mu:g}), "
        f"domain_max_grad_norm={DOMAIN_MAX_GRAD_NORM:g} if it is None, or smoothing=0.1."
    )
