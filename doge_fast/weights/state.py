"""How the domain weights move, and the tensors that hold them: the K x K part of a step.

The arithmetic is one operator. Its settings are kept on the device, so that a step copies nothing
there; so is the state that it moves.
"""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from doge_fast.kernels import reweight
from doge_fast.kernels.reweight.packing import LastStep, Settings, State, new_state, state_views
from doge_fast.weights import simplex
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM, default_mu
from doge_fast.weights.objective import UNIVERSAL, Objective, Target
from doge_fast.weights.scores import Score, score_of

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
        domain_max_grad_norm: > 0, norm to which every row is cut first; None: not cut.
        max_grad_norm: > 0, norm to which the combined gradient is cut; None: not cut.
        smoothing: in [0, 1), mixture with uniform.

    Raises:
        ValueError: an argument outside its range.
    """

    mu: float
    score: Score
    domain_max_grad_norm: float | None
    max_grad_norm: float | None
    smoothing: float

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
        device: where they start; they follow the Gram matrix.
        initial: {domain: weight} that they start from; None: uniform, as Algorithm 1 does.

    Raises:
        ValueError: `initial` is not weights of exactly these domains.
    """

    def __init__(
        self,
        objective: Objective,
        rule: UpdateRule,
        device: torch.device,
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
        self._present_R = _Written(len(objective.rows), torch.bool)
        self._settings_C = _Written(len(Settings._fields), torch.float64)

    @classmethod
    def of(
        cls,
        domains: Sequence[str],
        *,
        lr: float | None = None,
        target: Target = UNIVERSAL,
        mu: float | None = None,
        score: str | Score = "paper",
        max_grad_norm: float | None = None,
        domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM,
        smoothing: float = 0.0,
        initial: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> "DomainWeights":
        """The weights that `DoGEOptimizer` starts with for these arguments, all of them checked.

        Args:
            lr: the peak learning rate, which the default of `mu` follows; not needed beside `mu`.
            domains, target, mu, score, max_grad_norm, domain_max_grad_norm, smoothing, initial:
                as `DoGEOptimizer` takes them.
            device: where they start.

        Raises:
            ValueError: an argument outside its range; the message says which and why.
        """
        objective = Objective.of(domains, target)
        if mu is None:
            assert lr is not None, "the default of mu follows the learning rate"
            mu = default_mu(lr, sum(objective.tau))
        rule = UpdateRule(
            mu=mu,
            score=score_of(score),
            domain_max_grad_norm=domain_max_grad_norm,
            max_grad_norm=max_grad_norm,
            smoothing=smoothing,
        )
        return cls(objective, rule, torch.device(device), initial)

    def read(self, name: str) -> Tensor:
        """A copy of a part of the state: "alpha", "alpha_mean", "gain" or a count."""
        view: Tensor = getattr(state_views(self._state_S), name)
        return view.clone()

    def state(self) -> dict[str, Tensor]:
        """Copies of all parts; counts as int64."""
        parts = {name: self.read(name) for name in State._fields}
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
        gram_RR: Tensor,
        *,
        full_RR: Tensor,
        seen: Collection[str],
        lr: float | Tensor,
        grad_scale: float | Tensor,
        share: float = 1.0,
    ) -> LastStep:
        """One K x K step: lines 7 and 8 of Algorithm 1.

        Args:
            gram_RR: [R, R] inner products over the columns that enter W, of scaled gradients.
            full_RR: the same over all columns.
            seen: names of the rows that have a gradient; the others have zeros.
            lr: eta of this step.
            grad_scale: what the losses were multiplied by.
            share: of the training domains that this step has; the combined gradient will be
                divided by it, so that its norm is cut to as much less here.

        Raises:
            ValueError: `lr` < 0 or NaN.
        """
        rule = self.rule
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"the learning rate of a mirror step must be >= 0; got {lr}.")
        # The weights follow the gradients: the model may have moved since they were made.
        device = gram_RR.device
        self._state_S, self._tau_R = self._state_S.to(device), self._tau_R.to(device)
        self._are_loaded = False
        low, high = rule.score.bounds or (-math.inf, math.inf)
        settings = Settings(
            lr=lr,
            mu=rule.mu,
            grad_scale=grad_scale,
            scale_by_mean_norm=rule.score.scale_by_mean_norm,
            low=low,
            high=high,
            domain_max_grad_norm=rule.domain_max_grad_norm or math.inf,
            max_grad_norm=share * (rule.max_grad_norm or math.inf),
            smoothing=rule.smoothing,
        )
        present_R = self._present_R.of([n in seen for n in self.objective.rows], device)
        step: LastStep = reweight(
            gram_RR,
            self._state_S,
            full_RR=full_RR,
            tau_R=self._tau_R,
            present_R=present_R,
            settings_C=self._settings_C.of(settings, device),
        )
        return step

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

    def _unmoved(self, state: State) -> str | None:
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

    def _collapsed(self, state: State) -> str | None:
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


class _Written:
    """Numbers on a device, at one address for as long as they are on it.

    A kernel writes each entry that changes: a copy from the host would wait for the device, and
    new memory would leave a CUDA graph that was captured with the old.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._vector = torch.empty(length, dtype=dtype)
        # What was last written into each entry; None: not known on the host.
        self._known: list[float | None] = [None] * length

    def of(self, values: Sequence[float | Tensor], device: torch.device) -> Tensor:
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
