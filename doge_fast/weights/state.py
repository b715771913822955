"""The domain weights of a run: the rule by which they move, and the tensors that hold them.

`reweight` does the arithmetic of a step. Its settings and its state stay on the device, so that a
step copies nothing there.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doge_fast.tracing import warn
from doge_fast.weights import simplex
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.objective import Objective
from doge_fast.weights.projection import effective_domains
from doge_fast.weights.reweight import (
    COUNTS,
    LastStep,
    StepSettings,
    WeightsState,
    new_state,
    reweight,
    state_views,
)
from doge_fast.weights.scores import PAPER, Score

# A run has collapsed if fewer than 1 + COLLAPSED (K - 1) domains are in effective use.
COLLAPSED = 0.1

# In fewer steps a learning rate may still be warming up.
_STEPS_OF_A_RATE = 50
# Weights that have not moved in so many steps never will: their scores are equal, or the rate is 0.
_STEPS_OF_A_STANDSTILL = 10

# Weights that were printed or read from a file are rounded.
_SUM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class UpdateRule:
    """How domain weights move: the settings of Algorithms 1 and 2, constant over a run.

    Raises:
        ValueError: one is outside its range.
    """

    mu: float
    """> 0, Bregman coefficient."""
    score: Score = PAPER
    """What moves the weights; `PAPER` is W."""
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    """> 0, norm to which every row is clipped first; None: not clipped."""
    max_grad_norm: float | None = None
    """> 0, norm to which the combined gradient is clipped; None: not clipped."""
    smoothing: float = 0.0
    """In [0, 1), mixture with uniform."""

    def __post_init__(self) -> None:
        """Check the ranges; mu becomes a float, as torch.load(weights_only=True) reads no numpy."""
        simplex.check_mu(self.mu)
        object.__setattr__(self, "mu", float(self.mu))
        simplex.check_smoothing(self.smoothing)
        for name in ("max_grad_norm", "domain_max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not (simplex.is_number(value) and value > 0):
                raise ValueError(
                    f"{name} must be positive, or None for no clipping; got {value!r}."
                )


class DomainWeights:
    """The domain weights of a run, their mean, and the step that moves them.

    They keep their memory from step to step, so a step can be captured in a CUDA graph. Methods
    return copies. Nothing waits for the device, unless a docstring says so. `device` is that of the
    first weights; they follow the gradients to another. `initial` is that of `DoGEOptimizer`, and
    refused with a ValueError as there.
    """

    def __init__(
        self,
        objective: Objective,
        rule: UpdateRule,
        *,
        device: torch.device | str = "cpu",
        initial: Mapping[str, float] | None = None,
    ) -> None:
        self.objective = objective
        self.rule = rule
        self.last: LastStep | None = None
        """The record of the last step."""
        self._start_K = _start(objective.domains, initial)
        self._warned: set[str] = set()
        self.assumed_lr: float | None = None
        """The largest learning rate that the default mu was computed from; None: mu was given."""
        # The largest learning rate so far, the sum and the number of all: of numbers, of tensors.
        self._rates = (0.0, 0.0, 0)
        self._rates_there: Tensor | None = None
        self.state_S: Tensor = new_state(self._start_K.to(device))
        """[3 K + 2], not a copy: the exchange overwrites it by rank 0's."""
        self._tau_R = torch.tensor(objective.tau, dtype=torch.float64, device=device)
        self._row_R = KeptVector(len(objective.names), torch.int32)
        self._settings_F = KeptVector(len(StepSettings._fields), torch.float64)

    def read(self, name: str) -> Tensor:
        """A copy of a part of the state: "alpha", "alpha_mean", "gain" or a count."""
        view: Tensor = getattr(state_views(self.state_S), name)
        return view.clone()

    def state(self) -> dict[str, Tensor]:
        """Copies of all parts of the state; counts as int64."""
        parts = {name: self.read(name) for name in WeightsState._fields}
        return parts | {name: parts[name].long() for name in COUNTS}

    def record(self) -> dict[str, Any]:
        """The record for weights.json (docs/weights.md). Waits for the device."""
        values = (self.read(name).tolist() for name in ("alpha_mean", "alpha"))
        columns = zip(self.objective.domains, *values, strict=True)
        return {
            "method": "doge",
            "score": self.rule.score.name,
            "target": self.objective.target,
            "mu": self.rule.mu,
            "domains": [{"name": n, "weight": w, "weight_last": last} for n, w, last in columns],
            "steps": int(self.read("num_steps")),
            "versions": {"torch": torch.__version__},
        }

    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        # The rates of the steps before the checkpoint are not known.
        self._rates = (math.inf, math.inf, 1)
        for name, view in state_views(self.state_S)._asdict().items():
            view.copy_(parts[name].view_as(view))

    def move(
        self,
        gram_BB: Tensor,
        full_BB: Tensor,
        *,
        names_B: Sequence[str],
        present: Collection[str],
        lr: float | Tensor,
        grad_scale: float | Tensor,
    ) -> LastStep:
        """One K x K step: lines 7 and 8 of Algorithm 1.

        `gram_BB` and `full_BB` are those of `reweight`, and `names_B` are the names of their rows,
        of which `present` have a gradient.

        Raises:
            ValueError: `lr` < 0 or NaN.
        """
        rule, device = self.rule, gram_BB.device
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"the learning rate of a mirror step must be >= 0; got {lr}.")
        self._note_rate(lr)
        # The model may have moved to another device since they were made.
        self.state_S, self._tau_R = self.state_S.to(device), self._tau_R.to(device)
        row_of = {name: row for row, name in enumerate(names_B) if name in present}
        row_R = [row_of.get(name, -1) for name in self.objective.names]
        settings = StepSettings(
            lr=lr,
            mu=rule.mu,
            grad_scale=grad_scale,
            domain_max_grad_norm=rule.domain_max_grad_norm or math.inf,
            max_grad_norm=rule.max_grad_norm or math.inf,
            smoothing=rule.smoothing,
        )
        step = reweight(
            gram_BB,
            full_BB,
            self.state_S,
            tau_R=self._tau_R,
            row_R=self._row_R.write(row_R, device),
            settings_F=self._settings_F.write(settings, device),
            score=rule.score,
        )
        # A scheduler writes into a rate that is a tensor.
        return step._replace(lr=lr.detach().clone() if isinstance(lr, Tensor) else lr)

    def _note_rate(self, lr: float | Tensor) -> None:
        """Keep the largest learning rate and the mean; of tensors without waiting for them."""
        if not isinstance(lr, Tensor):
            largest, total, count = self._rates
            self._rates = (max(largest, lr), total + lr, count + 1)
            return
        lr = lr.detach().double().view(())
        if self._rates_there is None or self._rates_there.device != lr.device:
            self._rates_there = lr.new_zeros(3)
        # In its place, for a step that is captured in a CUDA graph.
        largest_there, total_there, count_there = self._rates_there
        torch.maximum(largest_there, lr, out=largest_there)
        total_there.add_(lr)
        count_there.add_(1)

    def warn_of_failure(self) -> None:
        """Warn, once each, of weights that mean nothing. Waits for the device."""
        state = state_views(self.state_S.cpu())
        kinds = (self._all_skipped, self._unmoved, self._tied, self._collapsed, self._other_rate)
        for kind in kinds:
            message = kind(state)
            if message and kind.__name__ not in self._warned:
                self._warned.add(kind.__name__)
                warn(message)

    def _all_skipped(self, state: WeightsState) -> str | None:
        steps, skipped = int(state.num_steps), int(state.num_skipped)
        if skipped <= steps:
            return None
        return (
            f"{skipped} of {steps + skipped} steps were skipped because a gradient was not finite; "
            "the domain weights come from the others alone. Lower the learning rate, or look for "
            "the domain whose loss is not finite."
        )

    def _other_rate(self, state: WeightsState) -> str | None:
        steps, assumed = int(state.num_steps), self.assumed_lr
        largest, total, count = self._rates
        if self._rates_there is not None:
            largest_there, total_there, count_there = self._rates_there.tolist()
            largest = max(largest, largest_there)
            total, count = total + total_there, count + count_there
        # The mean over the rates that the host has seen; a CUDA graph's replays are not among them.
        mean = total / max(count, 1)
        latest = None if self.last is None else self.last.lr
        # While a rate warms up, the mean is far below the peak.
        usual = mean if latest is None or float(latest) < largest else largest
        # Of a linear warm-up the mean is a half of the latest, of a square root's two thirds.
        is_rising = latest is not None and float(latest) >= largest and mean < 0.75 * largest
        is_settled = steps >= _STEPS_OF_A_RATE and not is_rising
        if steps >= _STEPS_OF_A_STANDSTILL and largest == 0:
            return (
                "the learning rate of the first parameter group, by which the domain weights move, "
                f"was 0 in all {steps} steps. Put a group with a learning rate first."
            )
        if assumed is None or math.isinf(largest):
            return None
        if largest > 10 * assumed:
            found, side = f"largest of {steps} steps was {largest:g}", "move too fast"
        elif is_settled and usual < assumed / 100:
            found, side = f"mean of {steps} steps was {mean:g}", "hardly move"
        else:
            return None
        return (
            f"mu={self.rule.mu:g} was computed from a learning rate of {assumed:g}, and the "
            f"{found}, so the domain weights {side}. Pass mu=: "
            "the default is 20 times the largest learning rate of the run, times (T + 1) / 2 for T "
            "targets (all domains for the universal target)."
        )

    def _unmoved(self, state: WeightsState) -> str | None:
        count = int(state.num_steps)
        has_moved = state.gain.any() or not torch.allclose(state.alpha_mean, self._start_K)
        if not count or has_moved:
            return None
        return (
            f"the domain weights have learned nothing in {count} steps: every score is zero. A "
            f"score needs the gradient of the target {list(self.objective.needed)} in the same "
            "step. Run the target's backward pass inside optimizer.domain(name), or pass as "
            "target= a domain that the loop runs."
        )

    @property
    def _is_for_all(self) -> bool:
        return not self.objective.measured and len(set(self.objective.tau)) == 1

    def _tied(self, state: WeightsState) -> str | None:
        """W_j = 1 + g_1 . g_2 for both of two domains whose gradients are clipped to norm 1."""
        norm, count = self.rule.domain_max_grad_norm, int(state.num_steps)
        is_pair = len(self.objective.domains) == 2 and self._is_for_all and norm is not None
        # Without any score the weights are unmoved, which has a warning of its own.
        has_scores = bool(state.gain.any())
        is_still = torch.allclose(state.alpha_mean, self._start_K, rtol=1e-3)
        if not (is_pair and has_scores and is_still and count >= _STEPS_OF_A_STANDSTILL):
            return None
        return (
            f"the domain weights have stayed where they began in {count} steps: the gradients of "
            f"both domains are clipped to the norm {norm:g}, and two domains of one norm have "
            "equal scores, whatever mu is. Pass domain_max_grad_norm=None."
        )

    def _collapsed(self, state: WeightsState) -> str | None:
        names = self.objective.domains
        least = 1 + COLLAPSED * (len(names) - 1)
        num_effective = effective_domains(state.alpha.tolist())
        is_expected = effective_domains(self._start_K.tolist()) < least
        if num_effective >= least or is_expected or not self._is_for_all:
            return None
        largest = names[int(state.alpha.argmax())]
        return (
            f"the domain weights have collapsed: {num_effective:.2f} of {len(names)} domains are "
            f"in use after {int(state.num_steps)} steps, most of it {largest!r}. Pass a larger mu "
            f"(it is {self.rule.mu:g}), domain_max_grad_norm={DOMAIN_MAX_GRAD_NORM:g} if it is "
            "None, or smoothing=0.1."
        )


class KeptVector:
    """A vector at a fixed address on its device; `write` changes only the elements that differ.

    One kernel writes each of them: a copy from the host would wait for the device. New memory would
    not be seen by a captured CUDA graph.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._vector = torch.empty(length, dtype=dtype)
        # The last value written to each element; None: not known on the host.
        self._known: list[float | None] = [None] * length

    def write(self, values: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """The vector, holding these values."""
        if self._vector.device != device:
            self._vector = torch.empty_like(self._vector, device=device)
            self._known = [None] * len(values)
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for index, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self._vector[index].copy_(value.detach().view(()))
                self._known[index] = None
            elif (number := float(value)) != self._known[index]:
                if is_captured:
                    # Every replay would write it again, and the host would not know.
                    raise RuntimeError(
                        "the learning rate, grad_scale, mu and the domains of a captured step must "
                        "be those of the step before. Take one more step before the capture."
                    )
                self._vector[index].fill_(number)
                self._known[index] = number
        return self._vector


def _start(domains: Sequence[str], initial: Mapping[str, float] | None) -> Tensor:
    """[K] float64 on the simplex: the first weights."""
    if initial is None:
        return simplex.uniform(len(domains), device="cpu")
    if not isinstance(initial, Mapping) or set(initial) != set(domains):
        raise ValueError(
            f"initial must be a dict {{domain: weight}} of exactly {list(domains)}; "
            f"got {initial!r}."
        )
    weights = [initial[name] for name in domains]
    are_weights = all(simplex.is_number(weight) and weight >= 0 for weight in weights)
    # A NaN fails the comparison as well.
    if not are_weights or not abs(float(sum(weights)) - 1) <= _SUM_TOLERANCE:
        raise ValueError(
            f"initial must be weights >= 0 that sum to 1 (within {_SUM_TOLERANCE:g}); got "
            f"{dict(initial)}. Divide each by the sum."
        )
    alpha_K = torch.tensor(weights, dtype=torch.float64, device="cpu")
    return alpha_K / alpha_K.sum()
