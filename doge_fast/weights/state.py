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
from doge_fast.weights import scores as generalization
from doge_fast.weights import simplex
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM, default_mu
from doge_fast.weights.objective import UNIVERSAL, WORST, Objective, Target
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
        domain_max_grad_norm: > 0, norm to which every row is cut first; None: not cut. Of no effect
            where the score has a common scale, which cuts rows itself.
        max_grad_norm: > 0, norm to which the combined gradient is cut; None: not cut.
        smoothing: in [0, 1), mixture with uniform.
        target_mu: > 0, Bregman coefficient of the targets' weights; None: these stay.

    Raises:
        ValueError: an argument outside its range.
    """

    mu: float
    score: Score
    domain_max_grad_norm: float | None
    max_grad_norm: float | None
    smoothing: float
    target_mu: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        simplex.check_mu(self.mu)
        simplex.check_smoothing(self.smoothing)
        if self.target_mu is not None:
            simplex.check_mu(self.target_mu, "target_mu")
        for name in ("max_grad_norm", "domain_max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not (simplex.is_number(value) and value > 0):
                raise ValueError(
                    f"{name} must be positive, or None for no clipping; got {value!r}."
                )

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are cut to a norm over all columns."""
        return self.domain_max_grad_norm is not None or self.score.has_common_scale


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
        # Whether `target_mu` is what follows from mu.
        self._is_target_mu_default = False
        tau_R = torch.tensor(objective.tau, dtype=torch.float64, device=device)
        # What the operator moves, and behind it the targets' weights and the running norms.
        state_S = new_state(self._start_K.to(device))
        self._state_S: Tensor = torch.cat([state_S, tau_R, torch.zeros_like(tau_R)])
        # And no step has moved them since.
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
        target_mu: float | None = None,
        device: torch.device | str = "cpu",
    ) -> "DomainWeights":
        """The weights that `DoGEOptimizer` starts with for these arguments, all of them checked.

        Args:
            lr: the peak learning rate, which the default of `mu` follows; not needed beside `mu`.
            domains, target, mu, score, max_grad_norm, domain_max_grad_norm, smoothing, initial,
                target_mu: as `DoGEOptimizer` takes them.
            device: where they start.

        Raises:
            ValueError: an argument outside its range; the message says which and why.
        """
        objective = Objective.of(domains, target)
        if mu is None:
            assert lr is not None, "the default of mu follows the learning rate"
            mu = default_mu(lr, sum(objective.tau))
        is_default = target_mu is None and objective.named == WORST
        if is_default:
            target_mu = _default_target_mu(mu, objective)
        rule = UpdateRule(
            mu=mu,
            score=score_of(score),
            domain_max_grad_norm=domain_max_grad_norm,
            max_grad_norm=max_grad_norm,
            smoothing=smoothing,
            target_mu=target_mu,
        )
        weights = cls(objective, rule, torch.device(device), initial)
        weights._is_target_mu_default = is_default
        return weights

    def read(self, name: str) -> Tensor:
        """A copy of a part of the state: "alpha", "alpha_mean", "gain", "tau", "norms", a count."""
        return self._views()[name].clone()

    def state(self) -> dict[str, Tensor]:
        """Copies of all parts; counts as int64; "tau" and "norms" only where they move."""
        parts = {name: view.clone() for name, view in self._views().items()}
        if not self.rule.score.has_common_scale:
            del parts["norms"]
        if self.rule.target_mu is None:
            del parts["tau"]
        return parts | {name: parts[name].long() for name in COUNTS}

    def _views(self) -> dict[str, Tensor]:
        steps_S, tau_R, norms_R = self._split(self._state_S)
        return {**state_views(steps_S)._asdict(), "tau": tau_R, "norms": norms_R}

    def _split(self, state_S: Tensor) -> Sequence[Tensor]:
        """What the operator moves, the targets' weights, the running norms."""
        num_rows = len(self.objective.rows)
        return torch.split(state_S, [len(state_S) - 2 * num_rows, num_rows, num_rows])

    def record(self) -> dict[str, Any]:
        """What weights.json says of them (docs/weights.md). Waits for the device."""
        values = (self.read(name).tolist() for name in ("alpha_mean", "alpha"))
        adapted = {} if self.rule.target_mu is None else {"target_mu": self.rule.target_mu}
        columns = zip(self.objective.domains, *values, strict=True)
        return {
            "method": "doge",
            "score": self.rule.score.name,
            "target": self.objective.target,
            "mu": self.rule.mu,
            **adapted,
            "domains": [{"name": n, "weight": w, "weight_last": last} for n, w, last in columns],
            "steps": int(self.read("num_steps")),
            "versions": {"torch": torch.__version__},
        }

    def settings(self) -> dict[str, object]:
        """What must be the same on all ranks, by the name that a message gives it."""
        return {
            "the domains or the target": [self.objective.domains, self.objective.target],
            "the settings of DoGEOptimizer": repr(self.rule),
            "the domain weights": self._values_to_compare,
        }

    def _values_to_compare(self, is_first: bool) -> list[float] | None:
        """All parts, which wait for the device; None where ranks have them from each other."""
        return self._state_S.tolist() if is_first or self._are_loaded else None

    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        self._are_loaded = True
        for name, view in self._views().items():
            # Targets that stay, here or there, keep the weights that they have here.
            if name in parts and (name != "tau" or self.rule.target_mu is not None):
                view.copy_(parts[name])
            elif name == "norms":
                # Of a run that did not keep them: those from before are not its own.
                view.zero_()

    def move(
        self,
        gram_RR: Tensor,
        *,
        full_RR: Tensor | None,
        own_R: Tensor | None = None,
        seen: Collection[str],
        lr: float | Tensor,
        grad_scale: float | Tensor,
        share: float = 1.0,
    ) -> LastStep:
        """One K x K step: lines 7 and 8 of Algorithm 1.

        Args:
            gram_RR: [R, R] inner products over the columns that enter W, of scaled gradients.
            full_RR: the same over all columns; None: not known (the rule then cuts no row), and
                the combined gradient is left for the caller to cut.
            own_R: [R] what stands for the diagonal of `gram_RR` in W; None: the diagonal itself.
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
        assert full_RR is not None or not rule.cuts_rows
        # The weights follow the gradients: the model may have moved since they were made.
        self._state_S = self._state_S.to(gram_RR.device)
        self._are_loaded = False
        device = gram_RR.device
        low, high = rule.score.bounds or (-math.inf, math.inf)
        max_norm = None if rule.score.has_common_scale else rule.domain_max_grad_norm
        settings = Settings(
            lr=lr,
            mu=rule.mu,
            grad_scale=grad_scale,
            scale_by_mean_norm=rule.score.scale_by_mean_norm,
            low=low,
            high=high,
            domain_max_grad_norm=max_norm or math.inf,
            max_grad_norm=math.inf if full_RR is None else share * (rule.max_grad_norm or math.inf),
            smoothing=rule.smoothing,
        )
        steps_S, tau_R, norms_R = self._split(self._state_S)
        present_R = self._present_R.of([n in seen for n in self.objective.rows], device)
        scaled = None
        if rule.score.has_common_scale:
            assert full_RR is not None
            scaled = generalization.common_scale(
                full_RR.diagonal().clamp(min=0).sqrt() / grad_scale,
                norms_R,
                present_R,
                len(self.objective.domains),
                state_views(steps_S).num_steps,
            )
            full_RR = scaled.cut(full_RR)
            gram_RR = scaled.cut(gram_RR) / scaled.scale**2
            own_R = None if own_R is None else own_R * (scaled.factors_R / scaled.scale) ** 2
        step: LastStep = reweight(
            gram_RR if own_R is None else gram_RR.diagonal_scatter(own_R),
            steps_S,
            # What stands for a square in W may be negative, and is no square of a norm.
            full_RR=gram_RR if full_RR is None else full_RR,
            tau_R=tau_R,
            present_R=present_R,
            settings_C=self._settings_C.of(settings, device),
        )
        if rule.target_mu is not None:
            improvement_R = generalization.improvement(step.gram, step.alpha)
            # Between training domains the Gram matrix makes up for those that the step lacks.
            improvement_R[len(step.alpha) :] /= share
            moved_R = generalization.target_step(
                tau_R, improvement_R, present_R, lr=lr, mu=rule.target_mu
            )
            # A pace that is next to none overflows.
            stays = step.skipped | ~moved_R.isfinite().all()
            tau_R.copy_(torch.where(stays, tau_R, moved_R))
        if own_R is not None:
            cut_R = generalization.clip_factors(step.grad_norms, max_norm) / grad_scale
            step = step._replace(gram=step.gram.diagonal_scatter(gram_RR.diagonal() * cut_R**2))
        if scaled is not None:
            norms_R.copy_(torch.where(step.skipped, norms_R, scaled.running_R))
            step = step._replace(
                coefficients=step.coefficients * scaled.factors_R, grad_norms=scaled.norms_R
            )
        return step

    def set_mu(self, mu: float) -> None:
        """Use another Bregman coefficient from the next step on; a default `target_mu` follows."""
        self.rule = replace(self.rule, mu=mu)
        if self._is_target_mu_default:
            self.rule = replace(self.rule, target_mu=_default_target_mu(mu, self.objective))

    def warn_of_failure(self) -> None:
        """Warn, once each, of weights that never had a score or have collapsed; waits for them."""
        state = state_views(self._split(self._state_S.cpu())[0])
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
        clip = f"domain_max_grad_norm={DOMAIN_MAX_GRAD_NORM:g} where it is off, or "
        if self.rule.score.has_common_scale:
            clip = "or "
        return (
            f"the domain weights have collapsed: {num_effective:.2f} of {len(names)} domains are "
            f"in use after {int(state.num_steps)} steps, most of it {largest!r}. Pass a larger mu "
            f"(it is {self.rule.mu:g}), {clip}smoothing=0.1."
        )

    @property
    def shared_state(self) -> Tensor:
        """The state itself, no copy: for ranks that take over that of another."""
        return self._state_S

    def snapshot(self) -> Tensor:
        """What `retract` needs to take a step back."""
        return self._state_S.clone()

    def retract(self, before: Tensor, overflow: Tensor) -> None:
        """Undo the move since `before` where `overflow`, and count it as skipped. No host read."""
        undone = before.to(self._state_S)
        now, then = (state_views(self._split(each)[0]) for each in (self._state_S, undone))
        moved = now.num_skipped == then.num_skipped
        then.num_skipped.add_(1)
        self._state_S.copy_(torch.where(overflow & moved, undone, self._state_S))


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


def _default_target_mu(mu: float, objective: Objective) -> float:
    """20 lr where mu has its default: a target improves by what one target adds to a score."""
    return 2 * mu / (sum(objective.tau) + 1)


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
