"""DoGEOptimizer: collect every domain's gradient, weigh the domains, step the wrapped optimizer.

The work is done in `doge_fast.step.step`.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from doge_fast.distributed.process_group import GroupArgument
from doge_fast.flat_buffer import FlatBuffer
from doge_fast.joined import loading, refuse_other_optimizers, saved, step_with
from doge_fast.step.parameters import TrackedParameters
from doge_fast.step.step import Step
from doge_fast.tracing import between_graphs, warn
from doge_fast.weights import checkpoint, defaults, weights_file
from doge_fast.weights.aligned import Aligned, refuse_settings
from doge_fast.weights.objective import UNIVERSAL, Objective, Target
from doge_fast.weights.reweight import MirrorStep
from doge_fast.weights.rule import LastStep, UpdateRule
from doge_fast.weights.scores import Score, score_of
from doge_fast.weights.state import DomainWeights
from doge_fast.weights.subset import Subset
from doge_fast.wrapper import OptimizerWrapper


class DomainState:
    """The domain weights as a checkpoint of their own, with torch's `Stateful` protocol.

    For `torch.distributed.checkpoint`; the parameter groups carry the same numbers::

        dcp.save({"doge": optimizer.doge}, checkpoint_id=path)
    """

    def __init__(self, weights: DomainWeights, step: Step) -> None:
        self._weights = weights
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and names: the value of "doge" in `DoGEOptimizer.state_dict()`."""
        weights = self._weights
        return checkpoint.as_dict(weights.state(), weights.objective, draws=self._step.subset.draws)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the domain weights; the wrapped optimizer is left alone.

        Raises:
            ValueError: it was saved for other domains or by another version.
            RuntimeError: called inside a domain.
        """
        self._step.refuse_inside_a_domain("load_state_dict()")
        checkpoint.check(state_dict, self._weights.objective, self._weights.num_memory)
        self._weights.load(state_dict)
        self._step.begin_loaded()
        self._step.subset.draw(state_dict["draws"])


class DoGEOptimizer(OptimizerWrapper):
    """Learn domain weights while the wrapped optimizer trains the proxy model.

    W_j      = < g_j , sum_r tau_r g_r >
    alpha'_j = alpha_j exp(lr W_j / mu) / sum_i alpha_i exp(lr W_i / mu)
    theta'   = optimizer step with sum_j alpha'_j g_j

    Every backward pass runs inside `domain(name)`. When each domain has been entered
    `micro_batches` times and the last one is left, the weighted gradient is in `p.grad`, where
    clipping, scalers and loggers look for it. `lr` is that of the first parameter group at this
    step. A parameter that no domain touches keeps `p.grad` None; a domain that does not touch a
    parameter counts as zero there. Sums over columns and domains are taken in float32 or better
    (float64 for a float64 model), the K x K algebra in float64. Micro-batches of a domain add up in
    the dtype of the rows: set `buffer_dtype` to add many of them in 16 bits.

    Args:
        optimizer: of the proxy model; or several with disjoint parameters, as `[muon, adamw]`,
            which then share one W over all parameters and one mixture. Parameter groups are shared
            with them and concatenated, so a scheduler may take this optimizer or a wrapped one.
        domains: names of the training domains; their order is the order of `alpha`.
        target: the domains whose loss is minimised. "universal": all training domains, each
            with weight one (Alg. 1). A name, several names (weight one each), or {name: weight >=
            0}. A name outside `domains` is held out: measured and never trained on (Alg. 2). It
            needs its own `with optimizer.domain(name)`.
        mu: > 0, Bregman coefficient; larger values move the weights more slowly. None:
            20 lr (T + 1) / 2, where lr is the first group's peak rate and T the sum of the target
            weights (`defaults.default_mu`). Checkpoints keep it.
        score: "paper" (W), "published" (W over the mean norm of the training rows, clipped to
            [0, 5]) or a `Score` of yours. "aligned": another rule, which moves the weights to the
            mixture whose gradient has the smallest angle with the targets'
            (`doge_fast.weights.aligned`); the model moves by the mixture half-way between uniform
            weights and those of the step before. It needs two halves of each domain in a step: an
            even number of `micro_batches` is best, or `stacked`, or ranks. Rows are 2 R N elements.
        max_grad_norm: norm to which the combined gradient is clipped; None: the loop clips.
        domain_max_grad_norm: norm to which each domain's gradient is clipped before it is scored
            and combined, as the published code does (it has 5.0 for universal targets). None: no
            clipping, as in the paper; pass `mu` too. A few large gradients may then decide all.
        smoothing: in [0, 1); the weights become (1 - smoothing) alpha + smoothing / K each step.
        selection: the parameters whose columns enter W: tensors, or names if `optimizer` was
            built from `model.named_parameters()`. Clipping sees all parameters.
        buffer_dtype: of the stored domain gradients; None: the dtype of each gradient.
        absent: what a step does about a domain that was not entered. "error": refuse. "keep":
            its gradient is zero and its last score is used again; if a held-out target is absent,
            all last scores are. Call `combine()` or `step()` to end such a step; the weights of
            the domains that are present are not rescaled.
        domains_per_step: S, the number of training domains drawn for each step
            (`domains_of_step`); None: all. Rows are (S + M) N elements. `doge_fast.weights.subset`
            says what is estimated.
        seed: seed of the draws.
        initial: {domain: weight} to start from, for all `domains`, summing to one; None: uniform.
            A weight of zero stays zero, unless `smoothing` lifts it.
        micro_batches: times that each domain is entered in a step; its gradients add up. None:
            any number; `combine()` or `step()` then ends the step.
        scaler: the GradScaler of the losses, read when a step is combined. Without it, and without
            `combine(grad_scale=...)`, scores are too large by the square of its scale. Copy or
            pickle it together with the optimizer.
        process_group: the ranks that learn together; None: the mesh of DTensors, else the default
            group once there is one.

    Raises:
        ValueError: an argument is outside its range, or two optimizers share a parameter.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), Algorithms 1 and 2, eq. (update_dw).
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        domains: Sequence[str],
        target: Target = UNIVERSAL,
        mu: float | None = None,
        score: Literal["paper", "published", "aligned"] | Score = "paper",
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
        parameters = TrackedParameters(self.inner, selection)
        objective = Objective.of(domains, target)
        is_mu_default = mu is None and score != Aligned.name
        rule: UpdateRule
        if score == Aligned.name:
            refuse_settings(mu, domain_max_grad_norm, domains_per_step, absent)
            rule = Aligned(max_grad_norm=max_grad_norm, smoothing=smoothing)
        else:
            if mu is None:
                # Read only here: the host waits for a rate on a device.
                mu = defaults.default_mu(parameters.peak_lr, sum(objective.tau))
            rule = MirrorStep(
                mu=mu,
                score=score_of(score),
                domain_max_grad_norm=domain_max_grad_norm,
                max_grad_norm=max_grad_norm,
                smoothing=smoothing,
            )
        device = parameters.params[0].device
        self._weights = DomainWeights(
            objective, rule, device=device, initial=initial, is_mu_default=is_mu_default
        )
        self._step = Step(
            parameters,
            self._weights,
            Subset(objective, domains_per_step, seed),
            buffer_dtype=buffer_dtype,
            absent=absent,
            micro_batches=micro_batches,
            scaler=scaler,
            process_group=GroupArgument(process_group),
        )
        checkpoint.add_empty_key(self.param_groups)

    @property
    def objective(self) -> Objective:
        """Which domains are trained on, and which are targets."""
        return self._weights.objective

    @property
    def rule(self) -> UpdateRule:
        """How the domain weights move: which rule, and its settings."""
        return self._weights.rule

    @property
    def mu(self) -> float | None:
        """The Bregman coefficient in use; None with the score "aligned", which has none."""
        return self.rule.mu

    @property
    def micro_batches(self) -> int | None:
        """Times that each domain is entered in a step; None: any number."""
        return self._step.micro_batches

    @property
    def buffer(self) -> FlatBuffer:
        """The rows of domain gradients."""
        return self._step.buffer

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the K training domains, in the order of `alpha`."""
        return self.objective.domains

    @property
    def names(self) -> tuple[str, ...]:
        """Of all R domains that are entered: the training domains, then held-out targets."""
        return self.objective.names

    @property
    def domains_of_step(self) -> tuple[str, ...]:
        """Names of the training domains of this step; `seed` and the step's number decide them."""
        return self._step.subset.domains

    @property
    def alpha(self) -> Tensor:
        """[K] float64: a copy of the domain weights, in the order of `domains`, on the device."""
        return self._weights.read("alpha")

    @property
    def alpha_mean(self) -> Tensor:
        """[K] float64: stage one's result, the mean of `alpha` over the steps taken.

        With the score "aligned", whose weights come from a mean already, `alpha` itself.
        """
        return self._weights.read("alpha_mean")

    @property
    def weights(self) -> dict[str, float]:
        """The average domain weights (`alpha_mean`) by name. Waits for the device.

        Warns:
            UserWarning: once each, if the weights mean little: more than a tenth of the steps
                were skipped, no weight has moved, or they have collapsed onto few domains.
        """
        self._weights.warn_of_failure()
        return dict(zip(self.domains, self.alpha_mean.tolist(), strict=True))

    @property
    def last(self) -> LastStep | None:
        """The record of the last `combine()`; None before the first."""
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
        """Write the average and last weights as a JSON file (docs/weights.md); may warn too."""
        self._weights.warn_of_failure()
        weights_file.write(path, self._weights.record())

    # The step.

    def domain(self, name: str, count: float = 1.0) -> AbstractContextManager[None]:
        """Gradients that backward passes inside produce belong to domain `name`.

        Do not clip or change `p.grad` inside: on a CPU it is empty there, and clipping it clips
        nothing; on a GPU it is read when the domain is left. `domain_max_grad_norm` clips each
        domain. Forward and backward both run inside.

        When the last domain of a step is left, `combine()` runs by itself. Over several ranks it
        does not, since a rank cannot see when the others are done: call `step()` or `combine()`. An
        exception inside drops all domains of this step. Several backward passes inside one `with`
        add up in the dtype of `p.grad`.

        Args:
            name: of a training domain or a target.
            count: > 0, for example a number of examples or tokens. Over ranks, a domain's gradient
                is the mean over the ranks that entered it, weighted by their counts. The counts of
                micro-batches add up. With score="aligned" they are also the weights of these in the
                domain's gradient, as your loss has them: leave 1 with loss / micro_batches.

        Raises:
            ValueError: `name` is none of this step's, or `count` is not positive and
                finite.
            RuntimeError: another domain is active; this one has been entered `micro_batches` times;
                `p.grad` still holds a gradient; no parameter received a gradient inside; or the
                model reduces gradients over ranks.
        """
        return self._step.domain(name, count)

    def stacked(
        self, model: nn.Module, sizes: Mapping[str, int], *, keep_rows: bool = True
    ) -> AbstractContextManager[None]:
        """One forward and one backward for all domains, on a batch that is sorted by domain.

        The loss is the sum over domains of their mean losses, and both passes run inside::

            sizes = {"arxiv": 4, "book": 2}                           # 6 examples, arxiv first
            with optimizer.stacked(model, sizes):
                logits = model(input_ids).logits
                losses.domain_losses(logits, labels, sizes).sum().backward()

        The rows equal those of one `domain(name)` after another to rounding, and each domain
        counts as entered once. Modules without a rule (`doge_fast.stacked.layers`) run once per
        domain. Dropout draws other masks than one domain after another would.

        Args:
            model: holds the parameters. The first dimension of its modules' inputs is the batch, or
                tokens, one example after another; another order, as time first, is not noticed.
                Give an input that all examples share (positions, a bias) a first dimension of 1;
                the output of a module with a rule has B there.
            sizes: number of examples of each domain, in the order of this rank's batch. They are
                also the counts of `domain`. A domain of size 0 is absent.
            keep_rows: False says that this is the last backward pass of the step. With the score
                "aligned", in one process, the rows of layers are then read when others need their
                memory: in the place of 2 R N elements a step has those of one layer, or of 64 MiB
                (a GiB on a GPU), and of weights that are used twice. Else it changes nothing.

        Raises:
            ValueError: as `domain`; or a module couples examples (batch statistics).
            RuntimeError: as `domain`; a module's input does not begin with the batch dimension; a
                parameter was used outside its module's forward, where domains are not separate; or
                one has a post-accumulate hook of yours, which no stacked pass would run; or, with
                keep_rows=False, a parameter whose rows have been read has another gradient.
        """
        return self._step.stacked(model, sizes, keep_rows)

    def combine(self, *, grad_scale: float | Tensor | None = None) -> None:
        """Weigh the domains and write their weighted gradient, sum_j alpha'_j g_j, into `p.grad`.

        Runs by itself when the last domain of a step is left; a second call does nothing. With
        `micro_batches=None`, or if domains are missing, `step()` calls it; call it yourself if
        something must see `p.grad` before. The domain weights move even if `step()` is skipped.

        Args:
            grad_scale: the factor that losses were multiplied by, as `GradScaler.get_scale()`;
                None: that of `scaler`, else 1. Weights and norms are those of the unscaled
                gradients; `p.grad` keeps the factor, so that `scaler.step` works as usual.

        Raises:
            ValueError: `grad_scale` is not positive and finite.
            RuntimeError: a domain is missing and `absent` is "error"; called inside a domain;
                something else has set a `p.grad`; or the step is combined already, without this
                `grad_scale`.
        """
        self._step.combine(grad_scale)

    # A compiled step is that of the wrapped optimizer.
    @between_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer; run `combine()` first if it has not run.

        A gradient that is not finite skips the step: weights, parameters and the wrapped
        optimizer's state do not change, and `num_skipped` counts the step. If no domain was entered
        and something else has set `p.grad`, this is the wrapped optimizer's own step.

        Args:
            closure: runs the domains and returns the loss; called once. The loss is passed on to a
                wrapped optimizer whose step takes a closure.

        Raises:
            RuntimeError: as `combine`; a backward pass has run outside any domain; a domain was
                entered fewer than `micro_batches` times; or `lr` has changed since combining.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step.is_plain():
            step_with(self.inner, loss)
            return loss
        self._step.finish(loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and drop the collected gradients, which `model.zero_grad()` would keep.

        A step of the domain weights is not undone. `p.grad` becomes None in any case: a domain's
        gradient does not stay there.
        """
        self._step.refuse_inside_a_domain("zero_grad()")
        self.inner.zero_grad(True)
        self._step.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer; they count from the next step on.

        ValueError if several optimizers are wrapped: call it on one of them.
        """
        self.inner.add_param_group(param_group)

    def release(self) -> None:
        """Remove the hooks and free the rows, so that the model can train on without domains.

        The results stay readable. Entering a domain adds the hooks again.
        """
        self._step.release()

    # Checkpoints.

    @property
    def doge(self) -> DomainState:
        """The domain weights as a checkpoint of their own; see `DomainState`."""
        return DomainState(self._weights, self._step)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict with one more key, "doge".

        Holds tensors, numbers and names only, so `torch.load(weights_only=True)` reads it. Every
        parameter group holds the same numbers as a tuple (see `doge_fast.weights.checkpoint`). Save
        between steps: collected gradients are not in it. Waits for the device.
        """
        return saved(
            self,
            lambda: checkpoint.add(self.inner.state_dict(), self.doge.state_dict(), self.objective),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` saved; training continues bit for bit.

        Reads the key "doge", or the parameter groups if the checkpoint's format has dropped that
        key. A state_dict of the bare wrapped optimizer is accepted with a warning; the domain
        weights then do not change. `mu` is the checkpoint's, unless it was passed by name.

        Raises:
            ValueError: it was saved for other domains, other optimizers, or by another version.
        """
        self._step.refuse_inside_a_domain("load_state_dict()")
        with loading(self, state_dict) as state_dict:
            ours, theirs = checkpoint.separate(state_dict, self.objective, self._weights.num_memory)
            refuse_other_optimizers(theirs.get("param_groups", ()), self.inner)
            self.inner.load_state_dict(theirs)
            checkpoint.add_empty_key(self.param_groups)
            self._step.begin_loaded()
            if ours is None:
                warn(
                    "the checkpoint holds the wrapped optimizer's state and no domain weights; "
                    "they stay as they are. If this is intended, load it before wrapping the "
                    "optimizer."
                )
            else:
                self.doge.load_state_dict(ours)

    def __repr__(self) -> str:
        """Domains, target and the wrapped optimizer."""
        return (
            f"{type(self).__name__}(domains={list(self.domains)}, target={self.objective.target}, "
            f"mu={self.mu}, optimizer={self.inner!r})"
        )
