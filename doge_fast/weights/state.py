"""The domain weights of a run: the rule by which they move, and the tensors that hold them.

The arithmetic of a step is `reweight`. Its settings are kept on the device, so that a step copies
nothing there; so is the state that it moves.
"""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from doge_fast.weights import simplex
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.objective import Objective
from doge_fast.weights.reweight import (
    LastStep,
    StepSettings,
    WeightsState,
    new_state,
    reweight,
    state_views,
)
from doge_fast.weights.scores import PAPER, Score

# Share of the domains beyond the first that are in use, under which a run has collapsed.
COLLAPSED = 0.1

COUNTS = ("num_steps", "num_skipped")

# Weights that were printed or read from a file are rounded.
_SUM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class UpdateRule:
    """How domain weights move: the parts of Algorithms 1 and 2 that do not change over a run.

    Args:
        mu: > 0, Bregman coefficient.
        score: the paper's W or another.
        domain_max_grad_norm: > 0, norm to which every row is clipped first; None: not clipped.
        max_grad_norm: > 0, norm to which the combined gradient is clipped; None: not clipped.
        smoothing: in [0, 1), mixture with uniform.

    Raises:
        ValueError: an argument outside its range.
    """

    mu: float
    score: Score = PAPER
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    max_grad_norm: float | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        simplex.check_mu(self.mu)
        simplex.check_smoothing(self.smoothing)
        for name in ("max_grad_norm", "domain_max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not (simplex.is_number(value) and value > 0):
                raise ValueError(
                    f"{name} must be positive, or None for no clipping; got {value!r}."
                )


class DomainWeights:
    """The domain weights of a run: where they are, their mean, and the step that moves them.

    Their memory stays where it is from step to step, so that a step can be captured in a CUDA
    graph; what is read from here is a copy. Nothing waits for the device.

    Args:
        objective: the domains and what counts.
        rule: how they move.
        device: where they start; they follow the gradients.
        initial: {domain: weight} that they start from; None: uniform, as Algorithm 1 does.

    Raises:
        ValueError: `initial` is not weights of exactly these domains.
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
        """What the last step saw and did."""
        self._start_K = _start(objective.domains, initial)
        self._warned: set[str] = set()
        self._state_S: Tensor = new_state(self._start_K.to(device))
        self._tau_R = torch.tensor(objective.tau, dtype=torch.float64, device=device)
        # From a checkpoint, and no step has moved the state since.
        self._are_loaded = False
        self._slot_R = KeptVector(len(objective.rows), torch.int32)
        self._settings_C = KeptVector(len(StepSettings._fields), torch.float64)

    def read(self, name: str) -> Tensor:
        """A copy of a part of the state: "alpha", "alpha_mean", "gain" or a count."""
        view: Tensor = getattr(state_views(self._state_S), name)
        return view.clone()

    def state(self) -> dict[str, Tensor]:
        """Copies of all parts; counts as int64."""
        parts = {name: self.read(name) for name in WeightsState._fields}
        return parts | {name: parts[name].long() for name in COUNTS}

    def record(self) -> dict[str, Any]:
        """What weights.json says of them (docs/weights.md). Waits for the device."""
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

    def settings(self, *, with_values: bool) -> dict[str, object]:
        """What must be the same on all ranks, by the name that a message gives it.

        Args:
            with_values: whether the ranks have not had the weights from each other yet. Reading
                them waits for the device.
        """
        return {
            "the domains or the target": [self.objective.domains, self.objective.target],
            "the settings of DoGEOptimizer": repr(self.rule),
            "the domain weights": (
                self._state_S.tolist() if with_values or self._are_loaded else None
            ),
        }

    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        self._are_loaded = True
        for name, view in state_views(self._state_S)._asdict().items():
            view.copy_(parts[name])

    def move(
        self,
        gram_BB: Tensor,
        full_BB: Tensor,
        *,
        rows_B: Sequence[str],
        present: Collection[str],
        lr: float | Tensor,
        grad_scale: float | Tensor,
    ) -> LastStep:
        """One K x K step: lines 7 and 8 of Algorithm 1.

        Args:
            gram_BB: [B, B] inner products over the columns that enter W, of scaled gradients.
            full_BB: the same over all columns; may be the same tensor.
            rows_B: names of the rows of the buffer, which these are of.
            present: names of the rows that have a gradient.
            lr: eta of this step.
            grad_scale: what the losses were multiplied by.

        Raises:
            ValueError: `lr` < 0 or NaN.
        """
        rule, device = self.rule, gram_BB.device
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"the learning rate of a mirror step must be >= 0; got {lr}.")
        # The weights follow the gradients: the model may have moved since they were made.
        self._state_S, self._tau_R = self._state_S.to(device), self._tau_R.to(device)
        self._are_loaded = False
        slots = {name: slot for slot, name in enumerate(rows_B) if name in present}
        slot_R = [slots.get(name, -1) for name in self.objective.rows]
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
            self._state_S,
            tau_R=self._tau_R,
            slot_R=self._slot_R.write(slot_R, device),
            settings_C=self._settings_C.write(settings, device),
            score=rule.score,
        )
        return step._replace(lr=lr)

    def set_mu(self, mu: float) -> None:
        """Use another Bregman coefficient from the next step on."""
        self.rule = replace(self.rule, mu=mu)

    def warn_of_failure(self) -> None:
        """Warn, once each, of weights that never had a score or have collapsed; waits for them."""
        state = state_views(self._state_S.cpu())
        for kind, message in (("unmoved", self._unmoved(state)), ("few", self._collapsed(state))):
            if message and kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(message, stacklevel=3)

    def _unmoved(self, state: WeightsState) -> str | None:
        count = int(state.num_steps)
        has_moved = state.gain.any() or not torch.allclose(state.alpha_mean, self._start_K)
        if not count or has_moved:
            return None
        return (
            f"the domain weights have learned nothing in {count} steps: every score is zero. A "
            f"score needs the gradient of the target {list(self.objective.needed)} in the same "
            "step. Run the target's backward pass inside optimizer.domain(name), or name in "
            "target= a domain that comes."
        )

    def _collapsed(self, state: WeightsState) -> str | None:
        names = self.objective.domains
        least = 1 + COLLAPSED * (len(names) - 1)
        num_effective = float(simplex.effective_domains(state.alpha))
        is_expected = float(simplex.effective_domains(self._start_K)) < least
        is_for_all = not self.objective.measured and len(set(self.objective.tau)) == 1
        if num_effective >= least or is_expected or not is_for_all:
            return None
        largest = names[int(state.alpha.argmax())]
        return (
            f"the domain weights have collapsed: {num_effective:.2f} of {len(names)} domains are "
            f"in use after {int(state.num_steps)} steps, most of it {largest!r}. Pass a larger mu "
            f"(it is {self.rule.mu:g}), domain_max_grad_norm={DOMAIN_MAX_GRAD_NORM:g} where it is "
            "off, or smoothing=0.1."
        )

    @property
    def shared_state(self) -> Tensor:
        """The state itself, no copy: for ranks that take over that of another."""
        return self._state_S


class KeptVector:
    """A vector on a device, at one address for as long as it is there.

    A kernel writes each entry that changes: a copy from the host would wait for the device, and
    new memory would leave a CUDA graph that was captured with the old.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._vector = torch.empty(length, dtype=dtype)
        # What was last written into each entry; None: not known on the host.
        self._known: list[float | None] = [None] * length

    def write(self, values: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """The vector, with these values."""
        if self._vector.device != device:
            self._vector = torch.empty_like(self._vector, device=device)
            self._known = [None] * len(values)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self._vector[index].copy_(value.detach().view(()))
                self._known[index] = None
            elif value != self._known[index]:
                self._vector[index].fill_(value)
                self._known[index] = value
        return self._vector


def _start(domains: Sequence[str], initial: Mapping[str, float] | None) -> Tensor:
    """[K] float64 on the simplex: where the weights start."""
    if initial is None:
        return simplex.uniform(len(domains))
    if not isinstance(initial, Mapping):
        raise ValueError(
            f"initial must be a dict {{domain: weight}} of {list(domains)}; got {initial!r}."
        )
    missing = [name for name in domains if name not in initial]
    extra = [name for name in initial if name not in domains]
    if missing or extra:
        raise ValueError(
            f"initial must have a weight for each of {list(domains)} and no other; it lacks "
            f"{missing} and has {extra} besides."
        )
    for name in domains:
        if not simplex.is_number(initial[name]) or initial[name] < 0:
            raise ValueError(f"initial must be weights >= 0; {name!r} has {initial[name]!r}.")
    alpha_K = torch.tensor([initial[name] for name in domains], dtype=torch.float64)
    # A NaN fails the comparison as well.
    if not abs(float(alpha_K.sum()) - 1) <= _SUM_TOLERANCE:
        raise ValueError(
            f"initial must be weights >= 0 that sum to 1 (within {_SUM_TOLERANCE:g}); got "
            f"{dict(initial)}. Divide each by the sum."
        )
    return alpha_K / alpha_K.sum()
