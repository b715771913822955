"""DoGEOptimizer: collect every domain's gradient, weigh the domains, step the wrapped optimizer.

One step of Algorithm 1 (or 2) as three verbs: `domain(name)` routes what a backward pass
produces into that domain's row of the flat buffer; `combine()` takes the Gram matrix of the
rows, moves the domain weights and writes the weighted gradient into `p.grad`; `step()` lets the
wrapped optimizer use it. Between Gram matrix and weighted sum everything is K x K and stays on
the device.
"""

import functools
import inspect
import json
import os
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from doge_fast import checkpoint, generalization, simplex
from doge_fast.flat_buffer import Block, FlatBuffer, weighted_gradients
from doge_fast.generalization import PAPER, PUBLISHED, Score
from doge_fast.kernels import gram
from doge_fast.kernels.reweight.packing import Step
from doge_fast.layers.batch import Segment
from doge_fast.objective import UNIVERSAL, Objective, Target
from doge_fast.reweighting import DomainWeights, Rule
from doge_fast.stacked import StackedModel, segments_of
from doge_fast.subset import Subset
from doge_fast.tracing import phase

# Who listens to a parameter, by its id: of two wrappers the one that was used last.
_LISTENERS: "weakref.WeakValueDictionary[int, DoGEOptimizer]" = weakref.WeakValueDictionary()

# Elements of the gradient in which a GradScaler is shown overflow and leaves its factor; small, so
# that clipping between the two never cuts it.
PROBE = 2.0**-60

# Steps that may pass before somebody is told that none of them said anything of the domains.
PATIENCE = 10

P = ParamSpec("P")
R = TypeVar("R")


class LastStep(NamedTuple):
    """What the last `combine()` saw and did; every tensor float64 on the gradients' device.

    `gram` has the rows of `optimizer.rows`: training domains, then measured-only ones. Gradients
    are in unscaled units and, except for `grad_norms`, after per-domain clipping.
    """

    gram: Tensor
    """[R, R] inner products over the selected columns."""
    gain: Tensor
    """[K] the scores that moved the weights: W, or its published variant."""
    influence: Tensor
    """[K] W less the difficulty: what domain j does for the others, eq. (ge-decompose)."""
    difficulty: Tensor
    """[K] tau_j ||g_j||^2, eq. (ge-decompose)."""
    grad_norms: Tensor
    """[R] before any clipping; over all parameters, or the selected where only those are read."""
    combined_norm: Tensor
    """Scalar: norm of sum_j alpha_j g_j before the global clip."""
    alpha: Tensor
    """[K] domain weights after the step."""
    lr: float | Tensor
    """eta of this step."""
    skipped: Tensor
    """Bool scalar: a gradient was not finite, nothing moved."""


def _outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of a function: what it does is the host's, or opaque operators'.

    As `torch.compiler.disable`, which takes a second to import what it needs; here it does so when
    the function is first called, and by then building any optimizer has.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return called


def _on_itself(
    method: Callable[Concatenate["DoGEOptimizer", P], R],
) -> Callable[Concatenate["DoGEOptimizer", P], R]:
    """Run a method on the optimizer where a stand-in was asked.

    Some hosts (Lightning) hand out an object of a class derived from ours that looks attributes up
    in the optimizer and keeps to itself those that are set: a step begun there would stay there.
    """

    @functools.wraps(method)
    def called(self: "DoGEOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._reference() or self, *args, **kwargs)

    return called


class DomainState:
    """The domain weights of an optimizer as a checkpoint of their own: torch's `Stateful`.

    For `torch.distributed.checkpoint`, beside or in place of what the parameter groups carry::

        dcp.save({"doge": optimizer.doge}, checkpoint_id=path)

    Args:
        optimizer: whose weights they are.
    """

    def __init__(self, optimizer: "DoGEOptimizer") -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and names: what `DoGEOptimizer.state_dict()` has under "doge"."""
        return self._optimizer._named_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from there; the wrapped optimizer stays as it is.

        Raises:
            TypeError: it is no dict.
            ValueError: it belongs to other domains, or to a later version.
            RuntimeError: inside a domain.
        """
        optimizer = self._optimizer
        optimizer._refuse_inside_a_domain("load_state_dict()")
        checkpoint.check(state_dict, optimizer.objective)
        optimizer._resume(state_dict)


class _Probe(NamedTuple):
    """What a GradScaler reads in the place of gradients that are not combined yet."""

    param: Tensor
    """Whose `p.grad` it is."""
    overflow: Tensor
    """Bool scalar: a domain gradient is not finite."""
    grams: tuple[Tensor, Tensor | None]
    """Gram matrices of the step, as `_grams` gave them."""


class DoGEOptimizer(Optimizer):
    """Learn domain weights while the wrapped optimizer trains the proxy model.

    W_j      = < g_j , sum_r tau_r g_r >
    alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu)
    theta'   = optimizer step with sum_j alpha'_j g_j

    Every backward pass runs inside `domain(name)`; a domain may be entered again before
    `step()`, and its gradients add up (gradient accumulation). `lr` is that of the first
    parameter group at this step, whatever the other groups use. Parameters that no domain
    touches keep `p.grad` None; those that some domains do not touch count as zero there. Where
    the model is float64 everything is; sums over columns and domains are taken in
    float32 or better and the K x K algebra is float64 always. Micro-batches of one domain add up
    in the type of the rows, as in `p.grad`: for many of them in 16 bits, set `buffer_dtype`.

    Args:
        optimizer: the optimizer of the proxy model. Its parameter groups are shared, so
            schedulers may be given either object.
        domains: names of the training domains; their order is the order of `alpha`.
        target: whose loss is to become small. "universal": all training domains, each with
            weight one (Alg. 1). A name, several names (weight one each), or {name: weight >= 0}:
            a name that is not in `domains` is a row that is measured and never trained on
            (Alg. 2, held-out mixtures) and needs its own `with optimizer.domain(name)`.
        mu: > 0, Bregman coefficient; larger values move the weights more slowly.
        score: "paper" (W), "published" (the published code's: W over the mean norm of the
            training rows, cut to [0, 5]), or a `Score` with those parts chosen one by one. The
            published configurations add `domain_max_grad_norm` 5.0 (universal) or 1.0.
        max_grad_norm: norm to which the combined gradient is cut, over all parameters; None
            leaves that to the loop.
        domain_max_grad_norm: norm to which each domain's gradient is cut before it is scored
            and before it is combined. Follows the published code; None, the default, the paper.
        smoothing: in [0, 1); the weights become (1 - smoothing) alpha + smoothing / K each step.
        selection: the parameters whose columns enter W, as tensors or, when `optimizer` was
            built from `model.named_parameters()`, as names. Clipping sees all parameters.
        buffer_dtype: of the stored domain gradients; None: that of each gradient.
        absent: what `step()` does about a domain that was not entered. "error": refuse. "keep":
            its gradient is zero and its last score is used again; without a measured-only
            target row that the objective needs, all scores are; where that is so in each of the
            first ten steps, a warning says it. The combined gradient is not renormalised.
        domains_per_step: S, the training domains of a step, drawn anew for each
            (`domains_of_step`); None: all. For many domains: memory is that of S domains and of
            the M measured targets, (S + M) N elements. `doge_fast.subset` says what is estimated.
        seed: of the draws.
        initial: {domain: weight} that the weights start from, of all `domains`, summing to one;
            None: uniform. A weight of zero stays zero, unless `smoothing` lifts it.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, its step needs a closure (LBFGS), or its
            first parameter group has no number for `lr`.
        ValueError: an argument outside its range; the message says which and why.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        domains: Sequence[str],
        target: Target = UNIVERSAL,
        mu: float = 0.01,
        score: Literal["paper", "published"] | Score = "paper",
        max_grad_norm: float | None = None,
        domain_max_grad_norm: float | None = None,
        smoothing: float = 0.0,
        selection: Collection[str] | Collection[Tensor] | None = None,
        buffer_dtype: torch.dtype | None = None,
        absent: Literal["error", "keep"] = "error",
        domains_per_step: int | None = None,
        seed: int = 0,
        initial: Mapping[str, float] | None = None,
    ) -> None:
        # super().__init__ would copy the parameter groups; what else it sets up follows below.
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "DoGEOptimizer wraps a torch.optim.Optimizer, for example "
                f"torch.optim.AdamW(model.parameters()); got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, DoGEOptimizer):
            raise TypeError("the optimizer is a DoGEOptimizer already; wrap the one inside it.")
        _check_steps_once(optimizer)
        _check_has_lr(optimizer)
        self._inner = optimizer
        self.objective = Objective.of(domains, target)
        self.rule = Rule(
            mu=mu,
            score=_checked_score(score),
            domain_max_grad_norm=domain_max_grad_norm,
            max_grad_norm=max_grad_norm,
            smoothing=smoothing,
        )
        if absent not in ("error", "keep"):
            raise ValueError(f"absent must be 'error' or 'keep'; got {absent!r}.")
        self.absent = absent
        params = self._tracked()
        if not params:
            raise ValueError(
                "the wrapped optimizer has no parameter that requires a gradient; give it "
                "model.parameters() before wrapping it."
            )
        if any(param.is_complex() for param in params):
            raise ValueError(
                "domain gradients must be real; the wrapped optimizer has complex parameters. "
                "Train them with an optimizer of their own."
            )
        self._selection = None if selection is None else self._resolve(selection)
        self._subset = Subset.of(self.objective, domains_per_step, seed)
        self._buffer = FlatBuffer(self._subset.num_rows, _checked_dtype(buffer_dtype))
        self._active: str | None = None
        self._is_stacked = False
        self._stack: StackedModel | None = None
        self._has_received = False
        self._seen: set[str] = set()
        self._is_combined = False
        # combine() was told what the losses were multiplied by.
        self._knows_scale = False
        # Names that came while no step said anything of the domains; None once one has.
        self._came: set[str] | None = set()
        self._num_unlearned = 0
        # An exception inside a domain has dropped what this step had.
        self._is_dropped = False
        # p.grad holds zeros that zero_grad(set_to_none=False) left.
        self._is_zeroed = False
        self._found_inf: Tensor | None = None
        self._probe: _Probe | None = None
        self.last: LastStep | None = None
        self._weights = DomainWeights(self.objective, self.rule, params[0].device, initial)
        # By id, with the parameter: while it is held here, no new one gets its id.
        self._hooks: dict[int, tuple[Tensor, Any]] = {}
        self._know_itself()
        self._set_up_optimizer_hooks()
        self._take_over_modes()
        self._listen()

    # The parts of a torch optimizer, shared with the wrapped one. Properties, since its
    # load_state_dict puts a new list in the place of param_groups.

    @property
    def inner(self) -> Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups, the very list."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._inner.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, the very dict. Ours is apart: see `state_dict`."""
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._inner.defaults = value

    @property
    def doge(self) -> DomainState:
        """The domain weights as something to save by itself; see `DomainState`."""
        return DomainState(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: a GradScaler unscales `p.grad` and calls `step()` unless it overflowed.

        It asks at the start of `scaler.step`, before it looks at gradients. Where the loop has
        not called `combine()` there are none yet, and how to combine depends on a factor that
        only the scaler knows: it gets one to look at, which says whether rows are finite.
        """
        # Others ask as well, loops without a factor among them: who does is known by its frame.
        if self._is_combined and not self._knows_scale and _is_scaler_in(sys._getframe(1)):
            raise RuntimeError(
                "combine() was not told the factor of the GradScaler in use, so every score was "
                "too large by its square and the domain weights have moved too far: call "
                "combine(grad_scale=scaler.get_scale()), or leave combine() to scaler.step()."
            )
        self._lay_probe()
        return False

    @_on_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer; they count from the next domain on."""
        self._inner.add_param_group(param_group)
        self._listen()

    # Results.

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the K training domains, in the order of `alpha`."""
        return self.objective.domains

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the R rows: training domains, then those that are only measured."""
        return self.objective.rows

    @property
    def domains_of_step(self) -> tuple[str, ...]:
        """Names of the training domains of this step; all, unless `domains_per_step` is given.

        The same until `step()`; a function of the seed and of the steps before.
        """
        return self._subset.domains

    @property
    def alpha(self) -> Tensor:
        """[K] float64: a copy of the domain weights, in the order of `domains`, on the device."""
        return self._weights.read("alpha")

    @property
    def alpha_mean(self) -> Tensor:
        """[K] float64: their mean over the steps that were taken: stage one's result."""
        return self._weights.read("alpha_mean")

    @property
    def weights(self) -> dict[str, float]:
        """The average domain weights by name. Waits for the device."""
        return dict(zip(self.domains, self.alpha_mean.tolist(), strict=True))

    @property
    def num_steps(self) -> int:
        """Steps that moved the weights. Waits for the device."""
        return int(self._weights.read("num_steps"))

    @property
    def num_skipped(self) -> int:
        """Steps skipped because a gradient was not finite. Waits for the device."""
        return int(self._weights.read("num_skipped"))

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the average and last weights as a name-keyed JSON file (docs/weights.md).

        Written beside and renamed, so that a reader never sees half of it.
        """
        last = self.alpha.tolist()
        record = {
            "schema_version": 1,
            "method": "doge",
            "score": _score_name(self.rule.score),
            "target": self.objective.target,
            "domains": [
                {"name": name, "weight": weight, "weight_last": last[i]}
                for i, (name, weight) in enumerate(self.weights.items())
            ],
            "steps": self.num_steps,
            "versions": {"torch": torch.__version__},
        }
        path = Path(path)
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)

    # The step.

    @_on_itself
    @contextmanager
    def domain(self, name: str) -> Iterator[None]:
        """Gradients that backward passes inside produce belong to domain `name`.

        Entering a domain again before `step()` adds to what is there. An exception inside
        drops all domains of this step, since half a backward pass may have been added.

        Raises:
            ValueError: `name` is neither a training domain nor a target.
            RuntimeError: another domain is active; gradients of the last step are still in
                `p.grad`; or no parameter of the wrapped optimizer received a gradient inside.
        """
        self._open(name)
        self._active, self._has_received = name, False
        try:
            yield
            self._buffer.flush()
        except BaseException:
            self._forget()
            self._is_dropped = True
            raise
        finally:
            self._active = None
        if not self._has_received:
            raise RuntimeError(
                f"no parameter of the optimizer received a gradient inside domain({name!r}). "
                "Run loss.backward() inside it; if you did, the model's parameters were "
                "replaced after the optimizer was built: build it from the model's present ones."
            )
        self._seen.add(name)

    @_on_itself
    @contextmanager
    def stacked(self, model: nn.Module, sizes: Mapping[str, int]) -> Iterator[None]:
        """One forward and one backward for all domains, on a batch that is sorted by domain.

        The loss is the sum over domains of their mean losses (`losses.domain_losses`), and both
        passes run inside::

            sizes = {"arxiv": 4, "book": 2}                  # 6 examples, arxiv first
            with optimizer.stacked(model, sizes):
                logits = model(input_ids).logits
                domain_losses(logits, labels, sizes).sum().backward()

        Each layer computes the gradient of its input once, over all tokens, and writes the
        weight gradient of every domain into its row: the rows equal those of one
        `domain(name)` after another to rounding. Entering again before `step()` adds up, with
        the same domains or others. Modules without a rule (all but linear and embedding layers,
        LayerNorm, RMSNorm) run once per domain inside. Dropout draws other masks than
        one domain after another would.

        Args:
            model: holds the parameters; examples are the first dimension of what its modules see.
                What is as long there as the batch is taken for one entry per example: give what
                all examples share (positions, a bias) with a first dimension of 1.
            sizes: number of examples of each domain, in the order of the batch. A domain with
                none counts as absent.

        Raises:
            ValueError: an unknown domain, no example at all, or a module that couples examples
                (batch statistics).
            RuntimeError: as `domain`; a module is handed something without the batch in front; or
                a parameter got a gradient of the whole batch, past its module's forward.
        """
        segments = self._segments(sizes)
        for name, size in sizes.items():
            if size:
                self._open(name)
        stack = self._stack_of(model)
        self._active = ", ".join(sizes)
        self._is_stacked = True
        try:
            with stack.recording(segments):
                yield
            self._buffer.flush()
        except BaseException:
            self._forget()
            self._is_dropped = True
            raise
        finally:
            self._active = None
            self._is_stacked = False
        if not stack.has_written:
            raise RuntimeError(
                "no parameter of the optimizer received a gradient inside stacked(). Run the "
                "forward and loss.backward() inside it, on the model that it was given."
            )
        self._seen.update(name for name, size in sizes.items() if size)

    @_on_itself
    def combine(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Weigh the domains and write sum_j alpha'_j g_j into `p.grad`.

        `step()` calls this if the loop has not. Call it yourself where something must see
        `p.grad` before the step: clipping in the loop, `scaler.unscale_`. It is here that the
        domain weights move and `num_steps` counts: a loop that then leaves `step()` out, as on a
        spike of the loss, keeps what the rejected gradients did to them. Look at the losses
        before, and call `zero_grad()` in its place.

        Args:
            grad_scale: the factor that losses were multiplied by, as `GradScaler.get_scale()`;
                None: they were not. Weights and norms are those of the unscaled gradients;
                `p.grad` keeps the factor, so that `scaler.step` works as usual, which refuses a
                step that was combined without one.

        Raises:
            ValueError: `grad_scale` is not positive and finite.
            RuntimeError: a domain has not been entered since the last step and `absent` is
                "error"; inside a domain; called twice in one step; or somebody else has set a
                `p.grad` that the weighted sum would replace.
        """
        self._refuse_inside_a_domain("combine() and step()")
        scale = 1.0 if grad_scale is None else grad_scale
        if not isinstance(scale, Tensor) and not (
            simplex.is_number(scale) and 0 < scale < float("inf")
        ):
            raise ValueError(
                f"grad_scale must be positive and finite; got {scale!r}. Pass what the losses "
                "were multiplied by, scaler.get_scale()."
            )
        if self._is_combined:
            raise RuntimeError("combine() has been called in this step; call step() next.")
        self._withdraw_probe()
        self._combine_all(scale)
        self._knows_scale = grad_scale is not None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Weigh the domains (unless `combine()` has) and step the wrapped optimizer.

        A gradient that is not finite skips the step: domain weights, parameters and the wrapped
        optimizer's state stay as they are, and `num_skipped` counts it. Without any domain
        gradient but with `p.grad` set by someone else, this is the wrapped optimizer's own step.
        Called by `scaler.step` without `combine()`, it takes the scaler's factor from there.

        Args:
            closure: runs the domains and returns the loss; called once.

        Raises:
            RuntimeError: as `combine`, or there are no gradients at all.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_combined:
            if not self._is_ours():
                self._inner.step()
                return loss
            if self._probe is None:
                self.combine()
            else:
                self._combine_probed(self._probe)
        with phase("inner_step"):
            self._step_inner()
        self._forget()
        return loss

    @_on_itself
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and forget the domain gradients collected since the last step.

        `model.zero_grad()` does the first only: rows are no `p.grad`, so a batch that is done
        again after it counts twice. Neither takes back what `combine()` did to the weights.
        """
        self._refuse_inside_a_domain("zero_grad()")
        if self._probe is not None:
            # What the scaler has seen there made it leave out the step.
            self._weights.count_skipped(self._probe.overflow)
        self._inner.zero_grad(set_to_none)
        self._forget()
        self._is_zeroed = not set_to_none

    # State: the wrapped optimizer's, with ours under one more key.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict with one more key, "doge".

        Holds tensors, numbers and names only, so `torch.load(weights_only=True)` reads it. The
        gradients of a step under way are not part of it: save between steps. Every parameter
        group has the same numbers as a tuple under "doge", for carriers that keep nothing but
        parameters' state and groups. Waits for the device.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._inner.state_dict()
        ours = self._named_state()
        values = checkpoint.packed(ours, self.objective)
        state_dict["param_groups"] = checkpoint.marked(state_dict["param_groups"], values)
        state_dict[checkpoint.KEY] = ours
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @_on_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` stood, bit for bit.

        The key "doge" is read; where a carrier has dropped it, the parameter groups are. A
        state_dict of the bare wrapped optimizer is accepted with a warning: the domain weights
        then stay as they are.

        Raises:
            TypeError: it is no dict.
            ValueError: it belongs to other domains, or to a later version.
        """
        self._refuse_inside_a_domain("load_state_dict()")
        checkpoint.check_is_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        ours, theirs = checkpoint.taken_from(state_dict, self.objective)
        self._inner.load_state_dict(theirs)
        self._mark_groups()
        self._forget()
        if ours is None:
            warnings.warn(
                "the checkpoint is the wrapped optimizer's alone and holds no domain weights; "
                "they stay as they are. Load it before wrapping the optimizer if that is meant.",
                stacklevel=2,
            )
        else:
            self._resume(ours)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the hooks: as with any torch optimizer, they do not travel."""
        state = self.__dict__.copy()
        state |= {"_hooks": {}, "_stack": None, "_is_stacked": False, "_probe": None}
        # Rows and p.grad do not travel, so a copy begins its step anew.
        state |= {"_seen": set(), "_is_combined": False, "_active": None, "_has_received": False}
        # Schedulers put a patched step on the instance; the class has the real one.
        for name in ("step", "train", "eval", "_reference", *_OPTIMIZER_HOOKS):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take `state`, all or part of it, and listen to the parameters again."""
        # By attribute: some hand an optimizer a new `state` and `param_groups` this way, which
        # are the wrapped one's.
        for name, value in state.items():
            setattr(self, name, value)
        self._know_itself()
        self._set_up_optimizer_hooks()
        self._take_over_modes()
        self._listen()

    def __repr__(self) -> str:
        """Domains, target and the wrapped optimizer."""
        return (
            f"{type(self).__name__}(domains={list(self.domains)}, target={self.objective.target}, "
            f"mu={self.rule.mu}, optimizer={self._inner!r})"
        )

    @_on_itself
    def release(self) -> None:
        """Stop listening to the parameters and give the buffer's memory back.

        For a model that goes on to train without domains while this object is still alive. The
        results stay readable; entering a domain listens again.
        """
        self._refuse_inside_a_domain("release()")
        self._forget()
        self._buffer.release()
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks = {}

    # What is below is nobody's business outside.

    def _set_up_optimizer_hooks(self) -> None:
        """What torch's constructor sets up beside groups and state; what is there stays."""
        for name in _OPTIMIZER_HOOKS:
            if name not in self.__dict__:
                setattr(self, name, OrderedDict())
        self._patch_step_function()

    def _know_itself(self) -> None:
        self._reference = weakref.ref(self)

    def _take_over_modes(self) -> None:
        """train() and eval() of a wrapped optimizer that has them: its parameters differ.

        On the instance: hosts ask an optimizer whether it has them, and most have not.
        """
        for name in ("train", "eval"):
            if callable(method := getattr(self._inner, name, None)):
                setattr(self, name, method)

    def _named_state(self) -> dict[str, Any]:
        return checkpoint.named(self._weights.state(), self.objective, self._subset.draws)

    def _resume(self, ours: Mapping[str, Any]) -> None:
        """Go on with the domain weights of a checkpoint, which have been checked."""
        self._weights.load(ours)
        self._forget()
        self._subset.draw(ours.get("draws", 0))

    def _mark_groups(self) -> None:
        """Keep the weights' place in every group; see `doge_fast.checkpoint`."""
        for group in self.param_groups:
            group[checkpoint.KEY] = ()

    def _tracked(self) -> list[Tensor]:
        """Parameters of the wrapped optimizer that require a gradient, looked up afresh."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @_outside_graphs
    def _listen(self) -> None:
        """Have each tracked parameter hand us its gradient; stop listening to the others."""
        self._mark_groups()
        tracked = {id(p): p for p in self._tracked()}
        for key in self._hooks.keys() - tracked.keys():
            self._hooks.pop(key)[1].remove()
        if new := tracked.keys() - self._hooks.keys():
            on_gradient = _listener(weakref.ref(self))
            for key in new:
                param = tracked[key]
                self._succeed(_LISTENERS.get(key), key)
                handle = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    on_gradient
                )
                self._hooks[key] = (param, handle)

    def _succeed(self, other: "DoGEOptimizer | None", key: int) -> None:
        """Listen to a parameter in the place of another wrapper; a gradient has one owner."""
        if other is not None and other is not self:
            if other._active is not None:
                raise RuntimeError(
                    f"another DoGEOptimizer on the same parameters is inside domain "
                    f"{other._active!r}; a gradient belongs to one of them. Leave it first."
                )
            if heard := other._hooks.pop(key, None):
                heard[1].remove()
        _LISTENERS[key] = self

    @_outside_graphs
    def _receive(self, param: Tensor) -> None:
        """Take the gradient that autograd has just finished; it never stays in `p.grad`."""
        grad, param.grad = param.grad, None
        if grad is None:
            # Its module has written the rows by itself.
            return
        if self._active is None:
            if name := next((o._active for o in self._others() if o._active), None):
                raise RuntimeError(
                    f"{self._name_of(param)} got its gradient inside domain {name!r} of another "
                    "DoGEOptimizer. Two that share a model's parameters are entered together, "
                    "`with first.domain(name), second.domain(name):`; call release() on one "
                    "that is no longer used."
                )
            raise RuntimeError(
                "a backward pass ran outside any domain, so its gradient belongs to none of "
                f"{list(self.rows)}. Run it inside `with optimizer.domain(name):`, or call "
                "optimizer.release() when the model is to train without domains."
            )
        if self._is_stacked:
            raise RuntimeError(
                f"{self._name_of(param)} got a gradient of the whole batch: it is used past the "
                "forward of the module that owns it, where domains cannot be told apart. Run "
                "one domain after another, with optimizer.domain(name)."
            )
        self._buffer.receive(self._subset.slot_of(self._active), param, grad)
        self._has_received = True

    def _others(self) -> list["DoGEOptimizer"]:
        """The living wrappers that listen to some parameter, this one left out."""
        return [other for other in set(_LISTENERS.values()) if other is not self]

    def _said_of_others(self) -> str:
        """Where this step's gradients may have gone instead."""
        found = next((sorted(other._seen) for other in self._others() if other._seen), None)
        if found is None:
            return ""
        return f" Another DoGEOptimizer has gradients of {found}: step the one whose domains ran."

    def _name_of(self, param: Tensor) -> str:
        """The name a message gives a parameter."""
        for group in self.param_groups:
            for name, known in zip(group.get("param_names", ()), group["params"], strict=False):
                if known is param:
                    return f"the parameter {name}"
        return f"a parameter of shape {list(param.shape)}"

    def _check_known(self, name: str) -> None:
        if name not in self.rows:
            raise ValueError(
                f"unknown domain {name!r}; the optimizer knows {list(self.rows)}. "
                "Name it in domains= (trained on) or in target= (measured only)."
            )

    @_outside_graphs
    def _open(self, name: str) -> None:
        """Check that a domain may be entered now."""
        self._check_known(name)
        if not self._subset.holds(name):
            raise ValueError(
                f"domain {name!r} is not one of this step's, {list(self.domains_of_step)}: "
                "domains_per_step draws them anew for each. Run those of "
                "optimizer.domains_of_step."
            )
        self._withdraw_probe()
        if self._active is not None:
            raise RuntimeError(
                f"domain({name!r}) was entered inside domain({self._active!r}); a gradient "
                "belongs to one domain. Leave the first before entering the next."
            )
        self._listen()
        # The combined gradient of the last step, or somebody else's, would be added to this one.
        # Zeros left by zero_grad(set_to_none=False) add nothing and go here.
        for param in self._tracked():
            if param.grad is not None:
                if not self._is_zeroed:
                    raise RuntimeError(
                        "a parameter still holds a gradient from before this domain; call "
                        "optimizer.zero_grad() after step() and before the next domain."
                    )
                param.grad = None
        if self._is_combined:
            # Combined and then cleared without a step, as a scaler does on overflow. The domains
            # of the step, which the loop has read, stay.
            self._is_combined = False
            self._forget()

    def _segments(self, sizes: Mapping[str, int]) -> list[Segment]:
        """Where each domain lies in the batch."""
        for name, size in sizes.items() if isinstance(sizes, Mapping) else ():
            self._check_known(name)
            if size and not self._subset.holds(name):
                raise ValueError(
                    f"domain {name!r} is not one of this step's, {list(self.domains_of_step)}."
                )
        return segments_of(sizes, self._subset.slot_of)

    def _stack_of(self, model: nn.Module) -> StackedModel:
        tracked = {id(param): param for param in self._tracked()}
        if self._stack is None or not self._stack.covers(model, tracked):
            self._stack = StackedModel(model, self._buffer, tracked)
        return self._stack

    def _refuse_inside_a_domain(self, what: str) -> None:
        if self._active is not None:
            raise RuntimeError(
                f"{what} belong outside domain(...); {self._active!r} is active. Leave it first."
            )

    @_outside_graphs
    def _forget(self) -> None:
        if self._is_combined:
            self._subset.draw(self._subset.draws + 1)
        self._is_dropped = False
        self._withdraw_probe()
        self._buffer.clear()
        self._seen.clear()
        self._is_combined = False

    def _foreign(self) -> list[Tensor]:
        """Parameters whose `p.grad` somebody else has set; one that we left is not foreign."""
        return [
            param
            for param in self._tracked()
            if param.grad is not None and not self._buffer.is_combined(param)
        ]

    def _contested(self) -> Tensor | None:
        """A parameter that has both a foreign gradient and one of a domain, if there is any."""
        return next((p for p in self._foreign() if self._buffer.is_written(p)), None)

    def _is_ours(self) -> bool:
        """Whether a step is one on the domains' gradients, or on those of somebody else."""
        if not self._seen:
            return not self._foreign()
        # Code that saves checkpoints has an optimizer make its state by a step on zeros at rate
        # zero; what the domains have collected is none of that step's business.
        return self._contested() is None or any(group.get("lr", 1) for group in self.param_groups)

    @_outside_graphs
    def _lay_probe(self) -> None:
        """Put a small gradient where a GradScaler will look; NaN where a row is not finite."""
        if self._probe is not None or self._is_combined or self._active or not self._seen:
            return
        with torch.no_grad():
            blocks = self._buffer.touched(self._tracked())
            grams = self._grams(blocks)
            overflow = ~self._full_of(blocks, grams).diagonal().isfinite().all()
            # Of those that a scaler takes, the smallest, since it is written in full.
            fit = [block for block in blocks if block.param.dtype != torch.float16]
            if not fit:
                return
            block = min(fit, key=lambda block: block.param.numel())
            gradient = block.gradient().fill_(PROBE)
            gradient.masked_fill_(overflow.to(gradient.device), float("nan"))
        block.param.grad = gradient
        self._probe = _Probe(block.param, overflow, grams)

    def _withdraw_probe(self) -> None:
        if self._probe is not None:
            self._probe.param.grad = None
            self._probe = None

    @_outside_graphs
    def _combine_probed(self, probe: _Probe) -> None:
        """Combine gradients whose factor a scaler has left in the probe, and take it out."""
        assert probe.param.grad is not None
        left = probe.param.grad.flatten()[0].double()
        self._withdraw_probe()
        self._combine_all(PROBE / left, grams=probe.grams, unscale=True)

    @_outside_graphs
    def _combine_all(self, grad_scale: float | Tensor, **how: Any) -> None:
        """Combine, once it is certain that nothing is missing and nobody's gradient is lost."""
        self._check_complete()
        self._watch_targets()
        if (param := self._contested()) is not None:
            raise RuntimeError(
                f"{self._name_of(param)} has a p.grad that no domain gave it, which the weighted "
                "sum would replace. Run that backward pass inside a domain as well, or step on "
                "it before the domains of this step."
            )
        with torch.no_grad():
            self._combine(grad_scale, **how)
        self._is_combined = True
        self._is_zeroed = False

    def _check_complete(self) -> None:
        missing = [name for name in self._subset.rows if name not in self._seen]
        if missing and self._is_dropped:
            raise RuntimeError(
                f"an exception inside a domain dropped this step's gradients; missing {missing}. "
                "Call optimizer.zero_grad() and run the domains of this step again."
            )
        if missing and (self.absent == "error" or len(missing) == self._subset.num_rows):
            raise RuntimeError(
                f"step() needs a gradient from every domain; missing {missing} of "
                f"{list(self._subset.rows)}. Run backward for them inside "
                "optimizer.domain(name), or pass absent='keep' if an absent domain is intended."
                + self._said_of_others()
            )

    def _watch_targets(self) -> None:
        """Warn, once, where the first steps have said nothing of the domains."""
        if self._came is None:
            return
        self._came |= self._seen
        if self.objective.is_learned_from(self._seen):
            self._came = None
            return
        # A draw without any target says nothing either, and nobody is to blame.
        self._num_unlearned += self.objective.is_learned_from(self._subset.rows)
        if self._num_unlearned == PATIENCE:
            came = [name for name in self.rows if name in self._came]
            self._came = None
            warnings.warn(
                f"the domain weights have learned nothing in {PATIENCE} steps, none of which had "
                f"the gradients of the target {list(self.objective.needed)}: those that came are "
                f"of {came}. Run the target's backward pass inside optimizer.domain(name), or "
                "name in target= a domain that comes.",
                stacklevel=2,
            )

    def _combine(
        self,
        grad_scale: float | Tensor,
        *,
        grams: tuple[Tensor, Tensor | None] | None = None,
        unscale: bool = False,
    ) -> None:
        """Gram matrix, K x K step, weighted sum: the three passes of one step.

        Args:
            grad_scale: factor of the rows.
            grams: what `_grams` gave, where it has been asked already.
            unscale: whether to leave that factor out of `p.grad`.
        """
        blocks = self._buffer.touched(self._tracked())
        with phase("gram"):
            gram_RR, full_RR = self._subset.spread(*(grams or self._grams(blocks)))
        before = None if full_RR is not None else self._weights.snapshot()
        lr = self.param_groups[0]["lr"]
        with phase("reweight"):
            new = self._subset.gathered(
                self._weights.move(
                    gram_RR,
                    full_RR=full_RR,
                    seen=self._seen,
                    lr=lr,
                    grad_scale=grad_scale,
                    share=self._subset.share,
                )
            )
        coefficients_R = new.coefficients / grad_scale if unscale else new.coefficients
        with phase("weighted_sum"):
            gradients = weighted_gradients(blocks, coefficients_R)
        if before is not None:
            new = self._cut_afterwards(gradients, new, 1.0 if unscale else grad_scale, before)
        for block, gradient in zip(blocks, gradients, strict=True):
            block.param.grad = gradient
        self._found_inf = new.found_inf
        self.last = LastStep(
            gram=new.gram,
            gain=new.gain,
            influence=new.influence,
            difficulty=new.difficulty,
            grad_norms=new.norms,
            combined_norm=new.combined_norm,
            alpha=new.alpha,
            lr=lr,
            skipped=new.skipped,
        )

    def _grams(self, blocks: list[Block]) -> tuple[Tensor, Tensor | None]:
        """Gram matrices of the selected columns and of all; the latter None where not needed.

        The Gram matrix is additive over columns. Columns outside the selection are read only
        for per-domain clipping; the combined gradient's own norm is cheaper to take from it.
        """
        inside, outside = self._by_selection(blocks)
        if not inside:
            raise RuntimeError(
                "no selected parameter received a gradient in this step; `selection` must name "
                "parameters that the domains touch."
            )
        gram_RR = gram(inside)
        if not outside:
            return gram_RR, gram_RR
        if self.rule.domain_max_grad_norm is None:
            return gram_RR, None
        return gram_RR, gram_RR + gram(outside)

    def _full_of(self, blocks: list[Block], grams: tuple[Tensor, Tensor | None]) -> Tensor:
        """The Gram matrix of all columns, from what `_grams` has read of them."""
        gram_RR, full_RR = grams
        if full_RR is None:
            full_RR = gram_RR + gram(self._by_selection(blocks)[1])
        return full_RR

    def _by_selection(self, blocks: list[Block]) -> tuple[list[Tensor], list[Tensor]]:
        """Rows of the selected parameters, and of the others."""
        selected = None if self._selection is None else {id(param) for param in self._selection}
        inside = [b.rows_RN for b in blocks if selected is None or id(b.param) in selected]
        outside = [b.rows_RN for b in blocks if selected and id(b.param) not in selected]
        return inside, outside

    def _cut_afterwards(
        self, gradients: list[Tensor], new: Step, grad_scale: float | Tensor, before: Tensor
    ) -> Step:
        """The global clip and the overflow that only the combined gradient shows.

        Its norm takes one pass over N: its Gram matrix is one number.
        """
        squared_norm: Tensor = gram([gradient.view(1, -1) for gradient in gradients])
        combined_norm = squared_norm[0, 0].sqrt() / grad_scale
        overflow = ~combined_norm.isfinite()
        self._weights.retract(before, overflow)
        if self.rule.max_grad_norm is not None:
            factor = generalization.clip_factors(combined_norm, self.rule.max_grad_norm)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        skipped = new.skipped | overflow
        return new._replace(
            alpha=self.alpha,
            combined_norm=combined_norm,
            skipped=skipped,
            found_inf=skipped.to(torch.float32),
        )

    def _step_inner(self) -> None:
        """Step the wrapped optimizer unless the step is skipped."""
        assert self.last is not None
        skipped = self.last.skipped
        if self._inner_takes_found_inf() and skipped.device.type != "cpu":
            # On the device, so that the host need not wait for the flag.
            self._inner.grad_scale = None  # type: ignore[attr-defined]
            self._inner.found_inf = self._found_inf  # type: ignore[attr-defined]
            try:
                self._inner.step()
            finally:
                del self._inner.grad_scale, self._inner.found_inf  # type: ignore[attr-defined]
        elif skipped.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step that is captured in a CUDA graph cannot be skipped by the host; "
                f"{type(self._inner).__name__} needs fused=True (and capturable=True where it has "
                "that argument), which lets the device skip it."
            )
        elif not self._is_skipped():
            self._inner.step()

    @_outside_graphs
    def _is_skipped(self) -> bool:
        """Whether the step is skipped. Waits for the device."""
        assert self.last is not None
        return bool(self.last.skipped)

    def _inner_takes_found_inf(self) -> bool:
        return bool(getattr(self._inner, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") for group in self.param_groups
        )

    def _resolve(self, selection: Collection[str] | Collection[Tensor]) -> list[Tensor]:
        """The selected parameters."""
        items: list[Any] = [] if isinstance(selection, str) else list(selection)
        if not items:
            raise ValueError(
                f"selection must be a non-empty collection of parameters or names; "
                f"got {selection!r}. Pass None for all parameters."
            )
        tracked = {id(p) for p in self._tracked()}
        by_name = {
            name: param
            for group in self.param_groups
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        }
        selected: list[Tensor] = []
        for item in items:
            param = by_name.get(item) if isinstance(item, str) else item
            if param is None or id(param) not in tracked:
                raise ValueError(
                    f"selection names {item if isinstance(item, str) else 'a tensor'!r}, which "
                    "is not a parameter the wrapped optimizer trains. "
                    + (
                        f"It knows {sorted(by_name)[:8]} ..."
                        if by_name
                        else "It knows no names: build the wrapped optimizer from "
                        "model.named_parameters(), or pass the tensors."
                    )
                )
            selected.append(param)
        return selected


_OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def _listener(ref: "weakref.ref[DoGEOptimizer]") -> Callable[[Tensor], None]:
    """A hook that does not keep its optimizer alive."""

    def on_gradient(param: Tensor) -> None:
        optimizer = ref()
        if optimizer is not None:
            optimizer._receive(param)

    return on_gradient


def _check_steps_once(optimizer: Optimizer) -> None:
    """Refuse one that evaluates the loss by itself, again and again within a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step (its step() "
            "needs a closure), while the domain weights move once, with one gradient of each "
            "domain. Wrap an optimizer that takes one gradient a step, such as torch.optim.AdamW."
        )


def _check_has_lr(optimizer: Optimizer) -> None:
    """Refuse one that keeps its learning rate to itself."""
    lr = optimizer.param_groups[0].get("lr")
    if not simplex.is_number(lr):
        raise TypeError(
            "the lr of the wrapped optimizer's first parameter group is the eta by which domain "
            f"weights move, so it must be a number or a tensor; {type(optimizer).__name__} has "
            f"{lr!r} there. Give it a learning rate, and switch off one that it chooses by itself."
        )


def _is_scaler_in(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), GradScaler)


def _checked_score(score: str | Score) -> Score:
    if isinstance(score, Score):
        return score
    named = {"paper": PAPER, "published": PUBLISHED}
    if score not in named:
        raise ValueError(f"score must be 'paper', 'published' or a Score; got {score!r}.")
    return named[score]


def _score_name(score: Score) -> str:
    return {PAPER: "paper", PUBLISHED: "published"}.get(score, repr(score))


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    known = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype not in known:
        raise ValueError(
            f"buffer_dtype must be a floating type or None; got {dtype}. "
            "Pass torch.float32, torch.bfloat16, torch.float16 or torch.float64."
        )
    return dtype
