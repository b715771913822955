"""Cancellation effect: how much of a parameter's gradient cancels, and selection by this score.

The paper scores "modules", parameter tensors of a model (76 in its 82M proxy), over the first
steps of a training, and computes W from the columns of a few of them. Per step t and tensor w,

    dw    =  w^(t+1) - w^(t)             the optimizer's change, weight decay included
    norms =  sum_i ||dl(x_i) / dw||      over the examples of the mini-batch
    sum   =  ||sum_i dl(x_i) / dw||      B times the norm of the batch's mean gradient

The paper and its code take different ratios of these (`Reading`). One training run gives the scores
of all readings.

Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), eq. (cancellation), appendix cancellation.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

Reading = Literal["norms-over-change", "sum-over-change", "change-over-sum", "change-over-norms"]
"""What C(w) sums over the steps.

- norms-over-change: sum_i ||dl(x_i)/dw|| / ||dw||. The paper's words: "the ratio of gradient norm
  and the norm of the actual update", high where gradients "among a minibatch could cancel each
  other". The default, and what this library calls the cancellation effect.
- sum-over-change: ||sum_i dl(x_i)/dw|| / ||dw||. The published code's ratio. That code takes the
  mean over the batch and the change of the step before. Its copies of the weights share memory
  with the weights, so all its scores are infinite.
- change-over-sum: ||dw|| / ||sum_i dl(x_i)/dw||. Eq. (cancellation) as printed, with a norm added
  around its denominator, which is a tensor there. High means the opposite of the above.
- change-over-norms: ||dw|| / sum_i ||dl(x_i)/dw||. The same with the norm inside the sum.
"""

READINGS: tuple[Reading, ...] = get_args(Reading)
DEFAULT_READING: Reading = "norms-over-change"


class _Norms(NamedTuple):
    """Norms of the U parameters' gradients, over the examples of the step so far."""

    norms_U: Tensor
    """[U] sums over the examples of their gradients' norms."""
    sum_U: Tensor
    """[U] norms of the sum of the examples' gradients."""
    weight: float
    """The factor of an example in the loss."""


class CancellationEffect:
    """Follows a training loop and scores every parameter tensor of the optimizer.

        effect = CancellationEffect(model, optimizer)
        for batch in batches:
            optimizer.zero_grad()
            for example in batch:
                with effect.watching(weight=1 / len(batch)):
                    (loss_of(model, example) / len(batch)).backward()
            optimizer.step()
        select(effect.scores(), "high30", columns=effect.columns).names

    Hooks of the optimizer follow its steps. A step's closure may call `watching`, too. Clipping
    between backward and step affects dw alone. C(w) sums over all steps that had an example; the
    paper stops after T_c. A step whose denominator is zero, as in a warm-up from a learning rate of
    zero, adds no term. Needs memory for a copy of the parameters.

    Source: DoGE, eq. (cancellation).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._params = {
            name: param
            for name, param in model.named_parameters()
            if param.requires_grad and id(param) in stepped
        }
        device = next(iter(self._params.values())).device
        shape = len(READINGS), len(self._params)
        self._scores_FU = torch.zeros(shape, dtype=torch.float64, device=device)
        self._terms_FU = torch.zeros(shape, dtype=torch.int64, device=device)
        self.num_steps = 0
        self._copies: dict[str, Tensor] = {}
        # None before the first example of a step.
        self._norms: _Norms | None = None
        # The Python frame of the optimizer's step under way, which runs its hooks.
        self._step_frame: FrameType | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def columns(self) -> dict[str, int]:
        """{name: number of elements} of the scored parameters."""
        return {name: param.numel() for name, param in self._params.items()}

    @contextmanager
    def watching(self, *, weight: float = 1.0) -> Iterator[None]:
        """Forward and backward of one example; a step has several.

        Its gradient is the change of `p.grad`, for any model. A step begins anew where `p.grad` was
        cleared, as after a step that a GradScaler leaves out.

        Args:
            weight: > 0; the factor of l(x_i) in the loss, constant within a step: 1 / B for a mean
                over B examples.

        Raises:
            ValueError: the weight is out of range, or differs within a step.
            RuntimeError: no parameter has a gradient afterwards.
        """
        if not 0 < weight < math.inf:
            raise ValueError(f"weight must be a number greater than zero; got {weight}.")
        before = {
            name: None if param.grad is None else param.grad.clone()
            for name, param in self._params.items()
        }
        if not any(grad is not None and bool(grad.any()) for grad in before.values()):
            self._norms = None
        if self._norms is not None and self._norms.weight != weight:
            raise ValueError(
                "All examples of a step must have the same weight; this one has "
                f"{weight}, the one before {self._norms.weight}."
            )
        yield
        # The example's gradients, up to their sign.
        changes: dict[str, Tensor | None] = {}
        for name, param in self._params.items():
            grad, old = param.grad, before.pop(name)
            changes[name] = grad if grad is None or old is None else old.sub_(grad)
        if all(grad is None for grad in changes.values()):
            # Norms of zero would be scores.
            raise RuntimeError(
                "no parameter has a gradient at the end of watching(). Run the backward pass of an "
                "example inside it, and outside the domains of a DoGEOptimizer, which take p.grad."
            )
        earlier_U = 0 if self._norms is None else self._norms.norms_U
        # p.grad holds all examples so far, and nothing has clipped it yet.
        norms_U = self._norms_of(changes) / weight + earlier_U
        self._norms = _Norms(norms_U, self._norms_of_sums() / weight, weight)

    def sum_over_ranks(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Sum `p.grad` and the norms of this step over all ranks with `summed`, before the step.

        All ranks must have run backward on the same number of examples with the same weight, and
        without a reduction of gradients.
        """
        assert self._norms is not None
        for param in self._params.values():
            param.grad = summed(torch.zeros_like(param) if param.grad is None else param.grad)
        norms_U, _, weight = self._norms
        self._norms = _Norms(summed(norms_U), self._norms_of_sums() / weight, weight)

    def scores(self, reading: Reading = DEFAULT_READING) -> dict[str, float]:
        """C(w) of every parameter so far, {name: score}.

        RuntimeError if no step has counted yet.
        """
        return self._by_name(self._scores_FU, reading)

    def terms(self, reading: Reading = DEFAULT_READING) -> dict[str, int]:
        """The number of terms of each score, {name: count}; raises as `scores` does."""
        return self._by_name(self._terms_FU, reading)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all sums so far. Call it between steps, not within one."""
        return {
            "scores": self._scores_FU.clone(),
            "terms": self._terms_FU.clone(),
            "columns": torch.tensor([*self.columns.values()]),
            "num_steps": torch.tensor(self.num_steps),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict()` of the same model; ValueError if it is of another one."""
        saved, expected = state["columns"].tolist(), [*self.columns.values()]
        if saved != expected:
            raise ValueError(
                f"The state is of parameters with these numbers of elements: {saved}; those of "
                f"this model have {expected}. Load it into the model that it was saved from."
            )
        self._scores_FU.copy_(state["scores"])
        self._terms_FU.copy_(state["terms"])
        self.num_steps = int(state["num_steps"])
        self._norms = None

    def release(self) -> None:
        """Stop following the optimizer and drop the copy of the parameters."""
        for handle in self._handles:
            handle.remove()
        self._copies.clear()

    def _by_name(self, values_FU: Tensor, reading: Reading) -> dict[str, Any]:
        if self.num_steps == 0:
            raise RuntimeError(
                "No step has counted yet. Run backward inside effect.watching() and step the "
                "optimizer."
            )
        return dict(zip(self._params, values_FU[READINGS.index(reading)].tolist(), strict=True))

    def _before_step(self, *_: Any) -> None:
        # A step may call its base class's step, whose hooks run too: only the outer one counts. One
        # that has raised is not running any more.
        if not _is_running(self._step_frame):
            self._step_frame = sys._getframe(1)
            self._copies = {name: param.detach().clone() for name, param in self._params.items()}

    def _after_step(self, *_: Any) -> None:
        if sys._getframe(1) is not self._step_frame:
            return
        copies, self._copies, self._step_frame = self._copies, {}, None
        if self._norms is None:
            return
        norms_U, sum_U = self._norms[:2]
        change_U = self._norms_of(
            {name: copies.pop(name).sub_(p.detach()) for name, p in self._params.items()}
        )
        # In the order of READINGS.
        above_FU = torch.stack([norms_U, sum_U, change_U, change_U])
        below_FU = torch.stack([change_U, change_U, sum_U, norms_U])
        has_term_FU = below_FU != 0
        self._scores_FU += torch.where(has_term_FU, above_FU / below_FU, 0)
        self._terms_FU += has_term_FU
        self.num_steps += 1
        self._norms = None

    def _norms_of_sums(self) -> Tensor:
        return self._norms_of({name: param.grad for name, param in self._params.items()})

    def _norms_of(self, values: Mapping[str, Tensor | None]) -> Tensor:
        """[U] norms."""
        device = self._scores_FU.device
        return torch.stack([self._norm(name, value).to(device) for name, value in values.items()])

    def _norm(self, name: str, value: Tensor | None) -> Tensor:
        if value is None:
            return torch.zeros((), dtype=torch.float64, device=self._params[name].device)
        # Along the last dimension first: torch's float32 norm of millions of elements is off in the
        # third digit.
        wide = torch.promote_types(value.dtype, torch.float32)
        if value.dim() > 1:
            value = torch.linalg.vector_norm(value, dim=-1, dtype=wide)
        norm: Tensor = torch.linalg.vector_norm(value.double())
        return norm


def _is_running(frame: FrameType | None) -> bool:
    """Whether the caller was called within this frame."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


class Selection(NamedTuple):
    """Parameters whose columns enter W."""

    strategy: str
    names: tuple[str, ...]
    """In order of score, the most extreme first."""
    num_columns: int
    """Elements of these parameters."""
    share: float
    """`num_columns` over the elements of all scored parameters."""


def select(scores: Mapping[str, float], strategy: str, *, columns: Mapping[str, int]) -> Selection:
    """The parameters with the lowest or highest scores; equal scores are ordered by name.

    Args:
        scores: {name: C(w)}.
        strategy: "lowN" or "highN", N of them; the paper has low10, low30, low50, high30, high10.
        columns: {name: number of elements} of the same parameters.

    Raises:
        ValueError: an unknown strategy, N above the number of parameters, a score that is not
            finite, or names that differ.

    Source: DoGE, appendix cancellation, strategies (1) and (2).
    """
    side, count = parse_strategy(strategy)
    if bad := [name for name, score in scores.items() if not math.isfinite(score)]:
        raise ValueError(
            f"Only finite scores can be ranked; that of {bad[0]} is {scores[bad[0]]}. The "
            "training run has diverged; lower its learning rate."
        )
    if differing := scores.keys() ^ columns.keys():
        raise ValueError(f"scores and columns must be of the same names; not {min(differing)!r}.")
    if count > len(scores):
        raise ValueError(f"{strategy} selects {count} parameters; the model has {len(scores)}.")
    sign = 1 if side == "low" else -1
    ranked = sorted(scores, key=lambda name: (sign * scores[name], name))
    names = tuple(ranked[:count])
    num_columns = sum(columns[name] for name in names)
    return Selection(strategy, names, num_columns, num_columns / sum(columns.values()))


def parse_strategy(strategy: str) -> tuple[Literal["low", "high"], int]:
    """("low" or "high", N) of "lowN" or "highN"; ValueError for any other text, or N < 1."""
    match = re.fullmatch(r"(low|high)([1-9][0-9]*)", strategy)
    if match is None:
        raise ValueError(
            f"A strategy is lowN or highN with N >= 1, high30 for example; got {strategy!r}."
        )
    return ("low" if match[1] == "low" else "high"), int(match[2])
