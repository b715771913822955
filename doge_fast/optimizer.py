"""DoGEOptimizer: collect every domain's gradient, weigh the domains, step the wrapped optimizer.

One step of Algorithm 1 (or 2) as three verbs: `domain(name)` routes what a backward pass produces
into that domain's row of the flat buffer; `combine()` moves the domain weights by the Gram matrix
of the rows and writes the weighted gradient into `p.grad`; `step()` lets the wrapped optimizer use
it. All of it happens in `doge_fast.step.step`.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from doge_fast.distributed import Ranks
from doge_fast.flat_buffer import FlatBuffer
from doge_fast.joined import refuse_other_optimizers, step_with
from doge_fast.step.parameters import TrackedParameters
from doge_fast.step.step import Step
from doge_fast.weights import checkpoint, defaults, weights_file
from doge_fast.weights.objective import UNIVERSAL, Objective, Target
from doge_fast.weights.reweight import LastStep
from doge_fast.weights.scores import Score, score_of
from doge_fast.weights.state import DomainWeights, UpdateRule
from doge_fast.weights.subset import Subset
from doge_fast.wrapper import OptimizerWrapper, checked_scaler


class DomainState:
    """The domain weights of an optimizer as a checkpoint of their own: torch's `Stateful`.

    For `torch.distributed.checkpoint`, beside or in place of what the parameter groups carry::

        dcp.save({"doge": optimizer.doge}, checkpoint_id=path)

    Args:
        weights: that are saved and restored.
        step: under way, which loading begins anew.
        is_mu_named: whether mu was asked for by name, and so is not taken from a checkpoint.
    """

    def __init__(self, weights: DomainWeights, step: Step, *, is_mu_named: bool) -> None:
        self._weights = weights
        self._step = step
        self._is_mu_named = is_mu_named

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and names: what `DoGEOptimizer.state_dict()` has under "doge"."""
        weights = self._weights
        return checkpoint.named(
            weights.state(), weights.objective, draws=self._step.subset.draws, mu=weights.rule.mu
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from there; the wrapped optimizer stays as it is.

        Raises:
            TypeError: it is no dict.
            ValueError: it belongs to other domains, or to a later version.
            RuntimeError: inside a domain.
        """
        self._step.refuse_inside_a_domain("load_state_dict()")
        checkpoint.check(state_dict, self._weights.objective)
        self._weights.load(state_dict)
        if not self._is_mu_named and "mu" in state_dict:
            self._weights.set_mu(float(state_dict["mu"]))
        self._step.clear()
        self._step.subset.draw(state_dict.get("draws", 0))


class DoGEOptimizer(OptimizerWrapper):
    """Learn domain weights while the wrapped optimizer trains the proxy model.

    W_j      = < g_j , sum_r tau_r g_r >
    alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu)
    theta'   = optimizer step with sum_j alpha'_j g_j

    Every backward pass runs inside `domain(name)`. When each domain has been entered
    `micro_batches` times and the last one is left, the weighted gradient is in `p.grad`, where
    clipping, scalers and loggers look for it. `lr` is that of the first parameter group at this
    step. Parameters that no domain touches keep `p.grad` None; where only some domains touch one,
    the others count as zero. Sums over columns and domains are taken in float32 or better (float64
    for a float64 model) and the K x K algebra in float64. Micro-batches of a domain add up in the
    type of the rows: for many of them in 16 bits, set `buffer_dtype`.

    Args:
        optimizer: of the proxy model; or several of disjoint parameters, as `[muon, adamw]`, which
            then share one W over all parameters and one mixture. Schedulers may be given any of
            them; groups are shared, and those of several stand one after another.
        domains: names of the training domains; their order is the order of `alpha`.
        target: whose loss is to become small. "universal": all training domains, each with
            weight one (Alg. 1). A name, several names (weight one each), or {name: weight >= 0}: a
            name that is not in `domains` is a row that is measured and never trained on (Alg. 2,
            held-out mixtures) and needs its own `with optimizer.domain(name)`.
        mu: > 0, Bregman coefficient; larger values move the weights more slowly. None:
            `defaults.default_mu`, 20 lr (T + 1) / 2 for targets whose weights sum to T, of the
            largest rate that the first group has noted. Checkpoints keep it.
        score: "paper" (W), "published" (over the mean norm of the training rows, within [0, 5]) or
            a `Score` of yours.
        max_grad_norm: norm to which the combined gradient is cut; None leaves that to the loop.
        domain_max_grad_norm: norm to which each domain's gradient is cut before it is scored and
            combined. The default follows the published code (5.0 universal, else 1.0); None, with
            a `mu` that is named, is the paper's text. Uncut, a few large gradients may decide all.
        smoothing: in [0, 1); the weights become (1 - smoothing) alpha + smoothing / K each step.
        selection: the parameters whose columns enter W, as tensors or, when `optimizer` was
            built from `model.named_parameters()`, as names. Clipping sees all parameters.
        buffer_dtype: of the stored domain gradients; None: that of each gradient.
        absent: what a step does about a domain that was not entered. "error": refuse. "keep":
            its gradient is zero and its last score is used again; without a measured-only
            target row that the objective needs, all scores are. A step with domains missing is
            combined, not renormalised, by `combine()` or `step()`.
        domains_per_step: S, the training domains of a step, drawn anew for each
            (`domains_of_step`); None: all. Rows are (S + M) N elements. `doge_fast.weights.subset`
            says what is estimated.
        seed: of the draws.
        initial: {domain: weight} that the weights start from, of all `domains`, summing to one;
            None: uniform. A weight of zero stays zero, unless `smoothing` lifts it.
        micro_batches: times that each domain is entered in a step; its gradients add up. None:
            any number, and `combine()` or, at the latest, `step()` ends the step.
        scaler: the GradScaler of the losses, read when a step is combined; without it, and without
            `combine(grad_scale=...)`, scores are its factor squared too large. Copy or pickle both.
        process_group: the ranks that learn together; None: the default group once there is one, or
            the mesh of DTensors.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, its step needs a closure (LBFGS), its
            first group has no number for `lr`, or `scaler` is no GradScaler.
        ValueError: an argument outside its range; the message says which and why.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        domains: Sequence[str],
        target: Target = UNIVERSAL,
        mu: float | None = None,
        score: Literal["paper", "published"] | Score = "paper",
        max_grad_norm: float | None = None,
        domain_max_grad_norm: float | None = defaults.DOMAIN_MAX_GRAD_NORM,
        smoothing: float = 0.0,
        selection: Collection[str] | Collection[Tensor] | None = None,
        buffer_dtype: torch.dtype | None = None,
        absent: Literal["error", "keep"] = "error",
        domains_per_step: int | None = None,
        seed: int = 0,
        initial: Mapping[str, float] | None = None,
        micro_batches: int | None = 1,
        scaler: GradScaler | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer)
        scaler = checked_scaler(scaler)
        parameters = TrackedParameters(self.inner, selection)
        self._is_mu_named = mu is not None
        objective = Objective.of(domains, target)
        if mu is None:
            mu = defaults.default_mu(parameters.peak_lr, sum(objective.tau))
        rule = UpdateRule(
            mu=mu,
            score=score_of(score),
            domain_max_grad_norm=domain_max_grad_norm,
            max_grad_norm=max_grad_norm,
            smoothing=smoothing,
        )
        device = parameters.params[0].device
        self._weights = DomainWeights(objective, rule, device=device, initial=initial)
        self._step = Step(
            self.inner,
            parameters,
            self._weights,
            Subset(objective, domains_per_step, seed),
            buffer_dtype=buffer_dtype,
            absent=absent,
            micro_batches=micro_batches,
            scaler=scaler,
            ranks=Ranks(process_group),
        )
        checkpoint.mark(self.param_groups)

    # What is known of the run.

    @property
    def objective(self) -> Objective:
        """Which domains are trained on, and which are targets."""
        return self._weights.objective

    @property
    def rule(self) -> UpdateRule:
        """How the domain weights move: mu, score, clipping, smoothing."""
        return self._weights.rule

    @property
    def mu(self) -> float:
        """The Bregman coefficient in use."""
        return self.rule.mu

    @property
    def micro_batches(self) -> int | None:
        """Times that each domain is entered in a step; None: any number."""
        return self._step.micro_batches

    @property
    def buffer(self) -> FlatBuffer:
        """The rows of domain gradients, and what they cost."""
        return self._step.buffer

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
        """Names of the training domains of this step; a function of the seed and its number."""
        return self._step.subset.domains

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
        """The average domain weights by name. Waits for the device.

        Warns:
            UserWarning: once, where the weights have collapsed or have not moved at all.
        """
        self._weights.warn_of_failure()
        return dict(zip(self.domains, self.alpha_mean.tolist(), strict=True))

    @property
    def last(self) -> LastStep | None:
        """What `combine()` saw and did last; None before the first."""
        return self._weights.last

    @property
    def num_steps(self) -> int:
        """Steps that moved the weights. Waits for the device."""
        return int(self._weights.read("num_steps"))

    @property
    def num_skipped(self) -> int:
        """Steps skipped because a gradient was not finite. Waits for the device."""
        return int(self._weights.read("num_skipped"))

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the average and last weights as a JSON file keyed by name (docs/weights.md)."""
        weights_file.write(path, self._weights.record())

    # The step.

    @contextmanager
    def domain(self, name: str, count: float = 1.0) -> Iterator[None]:
        """Gradients that backward passes inside produce belong to domain `name`.

        A domain is entered `micro_batches` times in a step, and its gradients add up. When the
        last one is left, `combine()` runs by itself. An exception inside drops all domains of
        this step. Elsewhere than on a CPU `p.grad` is read when the domain is left: until then
        leave it to autograd, in whose dtype several backward passes inside one `with` add up. Of
        several ranks none knows when the last domain is left: `step()` or `combine()` combines.

        Args:
            name: of a training domain or a target.
            count: > 0; over ranks, a domain's gradient is the mean of the ranks that entered it,
                weighted by their counts: of examples or tokens, say. Counts add up too.

        Raises:
            ValueError: `name` is no domain or target, or none of this step's; or no such count.
            RuntimeError: another domain is active; it has been entered often enough; `p.grad` still
                holds a gradient; nothing received one inside; or the model reduces them over ranks.
        """
        with self._step.domain(name, count):
            yield

    @contextmanager
    def stacked(self, model: nn.Module, sizes: Mapping[str, int]) -> Iterator[None]:
        """One forward and one backward for all domains, on a batch that is sorted by domain.

        The loss is the sum over domains of their mean losses, and both passes run inside::

            sizes = {"arxiv": 4, "book": 2}                           # 6 examples, arxiv first
            with optimizer.stacked(model, sizes):
                logits = model(input_ids).logits
                losses.domain_losses(logits, labels, sizes).sum().backward()

        The rows equal those of one `domain(name)` after another to rounding, and each domain
        counts as entered once. Modules without a rule (`doge_fast.stacked.layers`) run once per
        domain inside. Dropout draws other masks than one domain after another would.

        Args:
            model: holds the parameters; examples are the first dimension of what its modules see.
                What is as long there as the batch is taken for one entry per example: give what
                all examples share (positions, a bias) with a first dimension of 1.
            sizes: number of examples of each domain, in the order of this rank's batch; what
                counts over ranks. A domain with none counts as absent.

        Raises:
            ValueError: as `domain`; or a module couples examples (batch statistics).
            RuntimeError: as `domain`; a module is handed something without the batch in front; or
                a parameter got a gradient of the whole batch, past its module's forward.
        """
        with self._step.stacked(model, sizes):
            yield

    def combine(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Weigh the domains and write sum_j alpha'_j g_j into `p.grad`.

        Runs by itself when the last domain of a step is left; another call then does nothing. With
        `micro_batches=None`, or where domains are missing, `step()` calls it if the loop has not:
        call it where something must see `p.grad` before. The domain weights move here, also where
        the loop then leaves `step()` out.

        Args:
            grad_scale: the factor that losses were multiplied by, as `GradScaler.get_scale()`;
                None: that of `scaler`, or one. Weights and norms are those of the unscaled
                gradients; `p.grad` keeps the factor, so that `scaler.step` works as usual.

        Raises:
            ValueError: `grad_scale` is not positive and finite.
            RuntimeError: a domain is missing and `absent` is "error"; inside a domain; called twice
                in one step; something else has set a `p.grad`; or `grad_scale` comes too late.
        """
        self._step.combine(grad_scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer, after `combine()` where that has not run.

        A gradient that is not finite skips the step: weights, parameters and the wrapped
        optimizer's state stay, and `num_skipped` counts it. With no domain's gradient but a
        `p.grad` that something else has set, this is the wrapped optimizer's own step.

        Args:
            closure: runs the domains and returns the loss; called once. A wrapped optimizer that
                asks for the loss is handed it.

        Raises:
            RuntimeError: as `combine`; a backward pass has run outside any domain; a domain was
                entered fewer than `micro_batches` times; or `lr` has changed since combining.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step.is_of_others():
            step_with(self.inner, loss)
            return loss
        self._step.finish(loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and drop what the domains have collected; `model.zero_grad()` keeps that.

        Neither takes back what `combine()` did to the weights. Over ranks `p.grad` becomes None.
        """
        self._step.refuse_inside_a_domain("zero_grad()")
        set_to_none = set_to_none or self._step.has_own_rows
        self.inner.zero_grad(set_to_none)
        self._step.clear(are_zeros_left=not set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer; they count from the next step on.

        Raises:
            ValueError: several are wrapped. Add them to one of these itself.
        """
        self.inner.add_param_group(param_group)
        checkpoint.mark(self.param_groups)

    def release(self) -> None:
        """Take the hooks off the parameters and free the rows: the model trains on without domains.

        The results stay readable. Entering a domain puts the hooks back.
        """
        self._step.release()

    # State: the wrapped optimizer's, with ours under one more key.

    @property
    def doge(self) -> DomainState:
        """The domain weights as something to save by itself; see `DomainState`."""
        return DomainState(self._weights, self._step, is_mu_named=self._is_mu_named)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict with one more key, "doge".

        Holds tensors, numbers and names only, so `torch.load(weights_only=True)` reads it; every
        parameter group has the same numbers as a tuple (see `doge_fast.weights.checkpoint`). Save
        between steps: rows are no part of it. Waits for the device.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = checkpoint.put_into(
            self.inner.state_dict(), self.doge.state_dict(), self.objective
        )
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` stood, bit for bit.

        The key "doge" is read; where a carrier has dropped it, the parameter groups are. A
        state_dict of the bare wrapped optimizer is accepted with a warning: the domain weights
        then stay as they are. A `mu` that was named stays; one that was not is the checkpoint's.

        Raises:
            TypeError: it is no dict.
            ValueError: it belongs to other domains, other optimizers, or to a later version.
        """
        self._step.refuse_inside_a_domain("load_state_dict()")
        checkpoint.check_is_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        ours, theirs = checkpoint.taken_from(state_dict, self.objective)
        refuse_other_optimizers(theirs.get("param_groups", ()), self.inner)
        self.inner.load_state_dict(theirs)
        checkpoint.mark(self.param_groups)
        self._step.clear()
        if ours is None:
            checkpoint.warn_of_none()
        else:
            self.doge.load_state_dict(ours)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __repr__(self) -> str:
        """Domains, target and the wrapped optimizer."""
        return (
            f"{type(self).__name__}(domains={list(self.domains)}, target={self.objective.target}, "
            f"mu={self.mu}, optimizer={self.inner!r})"
        )
