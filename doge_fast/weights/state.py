"""The domain weights of a run: the tensors that hold them, and the step that moves them.

`rule` has the rules and their settings, `reweight` and `aligned` their arithmetic, `diagnosis` what
can be wrong with the result. Settings and state stay on the device, so that a step copies nothing
there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doge_fast.tracing import warn
from doge_fast.weights import diagnosis
from doge_fast.weights.objective import Objective
from doge_fast.weights.reweight import new_state, state_views
from doge_fast.weights.rule import (
    COUNTS,
    VECTORS,
    LastStep,
    Matrices,
    Names,
    UpdateRule,
    WeightsState,
)

# Weights that were printed or read from a file are rounded.
_SUM_TOLERANCE = 1e-5


class DomainWeights:
    """The domain weights of a run, their mean, and the step that moves them.

    They keep their memory from step to step, so a step can be captured in a CUDA graph. Methods
    return copies. Nothing waits for the device, unless a docstring says so.

    Args:
        device: of the first weights; they follow the gradients to another.
        initial: as for `DoGEOptimizer`.
        is_mu_default: whether `rule.mu` was computed; a checkpoint's then replaces it.

    Raises:
        ValueError: `initial` is not on the simplex.
    """

    def __init__(
        self,
        objective: Objective,
        rule: UpdateRule,
        *,
        device: torch.device | str = "cpu",
        initial: Mapping[str, float] | None = None,
        is_mu_default: bool = False,
    ) -> None:
        self.objective = objective
        self.rule = rule
        self.last: LastStep | None = None
        """The record of the last step."""
        self._is_mu_default = is_mu_default
        self._initial_K = _initial_weights(objective.domains, initial)
        self._warned: set[str] = set()
        num_names = len(objective.names)
        memory = rule.new_memory(self._initial_K, num_names)
        self.num_memory = len(memory)
        """Numbers that the rule keeps beside `WeightsState`."""
        self.state_S: Tensor = torch.cat([new_state(self._initial_K), memory]).to(device)
        """`WeightsState`, then the rule's memory; not a copy: the exchange writes rank 0's."""
        self._tau_R = torch.tensor(objective.tau, dtype=torch.float64, device=device)
        self._row_R = DeviceVector(num_names, torch.int32)
        self._first_R = DeviceVector(num_names, torch.float64)
        self._settings_F = DeviceVector(len(rule.settings(0.0, 1.0)), torch.float64)

    @property
    def mixture_R(self) -> Tensor | None:
        """As `UpdateRule.mixture`; None for a rule without. Every name has a row, in this order."""
        if not self.rule.has_mixture:
            return None
        return self.rule.mixture(self._common_and_memory()[1], len(self.objective.names))

    def read(self, name: str) -> Tensor:
        """A copy of a part of the state: "alpha", "alpha_mean", "gain" or a count."""
        view: Tensor = getattr(state_views(self._common_and_memory()[0]), name)
        return view.clone()

    def _common_and_memory(self) -> tuple[Tensor, Tensor]:
        """Views of the state that all rules have, and of the rule's own memory."""
        size = len(VECTORS) * len(self.objective.domains) + len(COUNTS)
        return self.state_S[:size], self.state_S[size:]

    def state(self) -> dict[str, Any]:
        """mu, and copies of all parts of the state; counts as int64. "memory": a rule's own."""
        parts = {name: self.read(name) for name in WeightsState._fields}
        parts |= {name: parts[name].long() for name in COUNTS}
        if self.num_memory:
            parts["memory"] = self._common_and_memory()[1].clone()
        return {"mu": self.rule.mu or 0.0, **parts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; mu only if it was computed."""
        names = (*WeightsState._fields, *(("memory",) if self.num_memory else ()))
        parts = [state[name].to(self.state_S).view(-1) for name in names]
        rule = replace(self.rule, mu=state["mu"]) if self._is_mu_default else self.rule
        self.state_S.copy_(torch.cat(parts))
        self.rule = rule

    def record(self) -> dict[str, Any]:
        """The record for weights.json (docs/weights.md). Waits for the device."""
        values = (self.read(name).tolist() for name in ("alpha_mean", "alpha"))
        columns = zip(self.objective.domains, *values, strict=True)
        return {
            "method": "doge",
            "score": self.rule.name,
            "target": self.objective.target,
            "mu": self.rule.mu,
            "domains": [{"name": n, "weight": w, "weight_last": last} for n, w, last in columns],
            "steps": int(self.read("num_steps")),
            "versions": {"torch": torch.__version__},
        }

    def warn_of_failure(self) -> None:
        """Warn, once each, of what is wrong with the weights. Waits for the device."""
        state = state_views(self._common_and_memory()[0].cpu())
        sentences = diagnosis.diagnose(state, self._initial_K, self.objective, self.rule)
        for name, sentence in sentences.items():
            if name not in self._warned:
                self._warned.add(name)
                warn(sentence)

    def move(
        self,
        matrices: Matrices,
        *,
        names_B: Sequence[str],
        first_shares: Mapping[str, float | Tensor],
        lr: float | Tensor,
        grad_scale: float | Tensor,
    ) -> LastStep:
        """One K x K step of the rule; of `MirrorStep` lines 7 and 8 of Algorithm 1.

        `names_B` are the names of the step's rows; `first_shares` has those with a gradient, and
        the share of the first half in each.

        Raises:
            ValueError: as `UpdateRule.settings`.
        """
        rule, device = self.rule, matrices.gram.device
        # The model may have moved to another device since they were made.
        self.state_S, self._tau_R = self.state_S.to(device), self._tau_R.to(device)
        row_of = {name: row for row, name in enumerate(names_B) if name in first_shares}
        row_R = [row_of.get(name, -1) for name in self.objective.names]
        first_R = [first_shares.get(name, 1.0) for name in self.objective.names]
        names = Names(
            tau_R=self._tau_R,
            row_R=self._row_R.write(row_R, device),
            first_R=self._first_R.write(first_R, device),
        )
        settings_F = self._settings_F.write(rule.settings(lr, grad_scale), device)
        step = rule.step(matrices, *self._common_and_memory(), names, settings_F)
        # A scheduler writes into a rate that is a tensor.
        return step._replace(lr=lr.detach().clone() if isinstance(lr, Tensor) else lr)


class DeviceVector:
    """A vector at a fixed address on its device; `write` changes only the elements that differ.

    One kernel writes each of them, or all if these are tensors on the device: a copy from the host
    would wait for it. New memory would not be seen by a captured CUDA graph.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._vector = torch.empty(length, dtype=dtype)
        # The last value written to each element; None: none, or one that the host does not know.
        self._written: list[float | None] = [None] * length

    def write(self, values: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """The vector, holding these values."""
        if self._vector.device != device:
            self._vector = torch.empty_like(self._vector, device=device)
            self._written = [None] * len(values)
        tensors = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
        if tensors and len(tensors) == len(values):
            torch.stack(tensors, out=self._vector)
            self._written = [None] * len(values)
            return self._vector
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for index, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self._vector[index].copy_(value.detach().view(()))
                self._written[index] = None
            elif (number := float(value)) != self._written[index]:
                if is_captured:
                    # Every replay would write it again, and the host would not know.
                    raise RuntimeError(
                        "the learning rate, grad_scale, mu and the domains of a captured step must "
                        "be those of the step before. Take one more step before the capture."
                    )
                self._vector[index].fill_(number)
                self._written[index] = number
        return self._vector


def _initial_weights(domains: Sequence[str], initial: Mapping[str, float] | None) -> Tensor:
    """[K] float64 on the simplex: the first weights."""
    if initial is None:
        return torch.full((len(domains),), 1 / len(domains), dtype=torch.float64, device="cpu")
    weights = [initial.get(name, math.nan) for name in domains]
    alpha_K = torch.tensor(weights, dtype=torch.float64, device="cpu")
    total = float(alpha_K.sum())
    # NaN fails both comparisons.
    if len(initial) != len(domains) or not (
        (alpha_K >= 0).all() and abs(total - 1) <= _SUM_TOLERANCE
    ):
        raise ValueError(
            f"initial must be weights >= 0 of {list(domains)} that sum to 1 (within "
            f"{_SUM_TOLERANCE:g}); got {dict(initial)}. Divide each by the sum."
        )
    return alpha_K / total
