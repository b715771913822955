"""Hugging Face's Trainer with a gradient per domain.

Trainer owns the loop: it accumulates micro-batches, clips `p.grad`, steps, schedules, logs and
saves. This file changes three things: a gradient of every domain instead of one of the batch
(domain after domain, or all in one backward pass), the weighted gradient in `p.grad` before Trainer
looks at it, and no second clipping of a gradient that `DoGEOptimizer` has cut already.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal, cast, get_args

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import Trainer

from doge_fast.integrations import causal_lm
from doge_fast.integrations.dealing import Batch, Part
from doge_fast.integrations.domain_trainer import DomainTrainer, Steps
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.stacked.layers.batch import on_device
from doge_fast.step.combine import factor_of
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import Score

Mode = Literal["auto", "sequential", "stacked"]


class DoGETrainer(DomainTrainer):
    """A `transformers.Trainer` that learns domain weights while it trains.

    Change the class and say which domains there are; a column of the data set names each
    example's:

        trainer = DoGETrainer(
            model=model,
            args=TrainingArguments(output_dir="out", per_device_train_batch_size=4, max_steps=1000),
            train_dataset=mixed,            # its column "domain" holds "arxiv", "book", ...
            domains=["arxiv", "book"],
        )
        trainer.train()
        trainer.weights                                     # {"arxiv": 0.61, "book": 0.39}

    Everything else is Trainer's: the optimizer that `args.optim` names is created as always and
    wrapped, `args.max_grad_norm` cuts the combined gradient (once), schedulers, gradient
    accumulation, bfloat16, compilation, gradient checkpointing, evaluation, callbacks, logging and
    resuming work as they did. A domain's loss is the mean over the tokens it has in the whole
    optimizer step, so that the number of micro-batches changes nothing; this is l_j of the paper.

    `train_dataset` may be, with `per_device_train_batch_size` examples of every row in a step:

    - a dataset with a column `domain_column`, or whose examples have such a key; the latter are
      read once before training. It is split by domain, with all examples kept;
    - a mapping from row names to datasets, or to streams. Here and above an epoch is one pass over
      the longest row, the shorter ones start again;
    - a dataset whose examples are `{domain: example}`: collated domain by domain;
    - an iterable dataset of examples with the key `domain_column`, such as a stream of a Hub data
      set. The examples of a domain wait for those of the others; where one domain is much more
      frequent than another, most of its surplus is skipped;
    - an iterable dataset that yields finished batches `{domain: {"input_ids": ..., ...}}`; they
      reach the model unchanged.

    A stream with `set_epoch` is told the number of every pass. A run over a stream resumes to the
    bit within its first pass. Trainer cannot count the passes of a stream: resumed in a later one
    it begins another pass instead of going on in the middle. There, use a dataset with a length.

    An optimizer of your own (`optimizers`, `optimizer_cls_and_kwargs`) is wrapped like Trainer's
    unless it is a `DoGEOptimizer` already: then that one decides how weights move, and its
    `max_grad_norm` cuts the gradient; where that is None, `args.max_grad_norm` does.

    Gradients come from one backward pass per domain (`mode="sequential"`) or from one pass over
    the batches of all domains end to end (`"stacked"`; `DoGEOptimizer.stacked`); the weights are
    the same to rounding, dropout aside. `"auto"` stacks a micro-batch where the architecture is
    one of `STACKABLE`, the loss is the model's own, nothing is compiled, all domains' sequences
    are equally long, a domain has at most `MOST_TOKENS`, and the step fits: by
    `causal_lm.stacked_bytes` on a GPU, elsewhere up to `MOST_TOKENS_TOGETHER` in all. Small batches
    use the machine better together, large ones need the memory. The choice depends on shapes and
    on what the first step finds free, so a resumed run repeats it on a device that is as free.

    Over n ranks (torchrun, accelerate launch) a step has n `per_device_train_batch_size` examples
    of every row, as users of Trainer expect; a finished batch is that of all ranks. All go through
    the same data, and each trains on its part of every batch. It equals one process on the same
    batches to rounding, dropout aside. A model that takes no number of targets counts examples.

    Logs carry `loss/DOMAIN`, `alpha/DOMAIN` and `alpha_mean/DOMAIN` beside Trainer's own.

    Args:
        domains: names of the training domains; the simplex, in this order. May be left out where
            `optimizers` holds a `DoGEOptimizer`, which knows them.
        domain_column: the column, or the key of an example, that names its domain.
        target, mu, score, domain_max_grad_norm, smoothing, selection, buffer_dtype, absent,
        domains_per_step, initial: as `DoGEOptimizer` takes them. `selection` holds names of
            `model.named_parameters()`. Domains are drawn with `args.seed`; what a batch holds
            of the others is left out.
        mode: "auto", "sequential" or "stacked", as above. "stacked" refuses a batch or a loss
            that it cannot take.
        *args, **kwargs: as `Trainer` takes them.

    Raises:
        ValueError: no domain is named, an unknown mode, a `DoGEOptimizer` that contradicts the
            arguments, or what `DoGEOptimizer` refuses.
        RuntimeError: several GPUs in one process, several processes that each train by themselves,
            or a model that is cut otherwise than by fsdp's version 2: FSDP1, parallelism_config,
            DeepSpeed.

    Source: DoGE, Algorithms 1 and 2.
    """

    def __init__(
        self,
        *args: Any,
        domains: Sequence[str] = (),
        domain_column: str = "domain",
        target: str | Sequence[str] | Mapping[str, float] = "universal",
        mu: float | None = None,
        score: Literal["paper", "published"] | Score = "paper",
        domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM,
        smoothing: float = 0.0,
        selection: Sequence[str] | None = None,
        buffer_dtype: torch.dtype | None = None,
        absent: Literal["error", "keep"] = "error",
        domains_per_step: int | None = None,
        initial: Mapping[str, float] | None = None,
        mode: Mode = "auto",
        **kwargs: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}.")
        ready = (kwargs.get("optimizers") or (None,))[0]
        if isinstance(ready, DoGEOptimizer):
            domains = domains or ready.domains
        if not domains:
            raise ValueError(
                f"DoGETrainer needs the names of the training domains; got domains={domains!r}. "
                'Pass domains=["arxiv", "book", ...].'
            )
        self._doge_options: dict[str, Any] = {
            "domains": list(domains),
            "target": target,
            "mu": mu,
            "score": score,
            "domain_max_grad_norm": domain_max_grad_norm,
            "smoothing": smoothing,
            "selection": selection,
            "buffer_dtype": buffer_dtype,
            "absent": absent,
            "domains_per_step": domains_per_step,
            "initial": initial,
        }
        if isinstance(ready, DoGEOptimizer):
            self._check_ready(ready)
        self.mode: Mode = mode
        self.domain_column = domain_column
        self._doge: DoGEOptimizer | None = None
        self._is_new_step = True
        self.domain_losses: dict[str, Tensor] = {}
        super().__init__(*args, **kwargs)
        # Trainer's own value misses GPT-2, whose evaluation losses would be too small.
        self._loss_shifts_labels = self.shifts_labels()
        self.check_host()

    def _check_ready(self, optimizer: DoGEOptimizer) -> None:
        """Refuse arguments that have no effect because the optimizer exists already."""
        if list(optimizer.domains) != self._doge_options["domains"]:
            raise ValueError(
                f"domains={self._doge_options['domains']} and the DoGEOptimizer's "
                f"{list(optimizer.domains)} differ. Leave domains= out, or name the same in the "
                "same order."
            )
        parameters = signature(DoGETrainer.__init__).parameters
        ignored = [
            name
            for name, value in self._doge_options.items()
            if name != "domains" and value != parameters[name].default
        ]
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)} would have no effect: the optimizer is a DoGEOptimizer "
                "already. Give them to it, or give the optimizer inside it to DoGETrainer."
            )

    @property
    def doge(self) -> DoGEOptimizer:
        """The optimizer that holds the domain weights; exists once training has begun."""
        if self._doge is None:
            raise RuntimeError(
                "The domain weights exist once train() has created the optimizer; call train() "
                "or create_optimizer() first."
            )
        return self._doge

    @property
    def weights(self) -> dict[str, float]:
        """The average domain weights so far, {domain: weight}; the result."""
        return self.doge.weights

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that `args` ask for, as Trainer does, inside a `DoGEOptimizer`."""
        # Every train() calls this again; by then accelerate may have wrapped the optimizer too.
        self._is_new_step = True
        if self._doge is not None and self.optimizer is not None:
            return self.optimizer
        inner = super().create_optimizer(model)
        if isinstance(inner, DoGEOptimizer):
            self._check_ready(inner)
        else:
            _name_parameters(inner, cast(nn.Module, model or self.model))
            max_grad_norm = self.args.max_grad_norm
            inner = DoGEOptimizer(
                inner,
                max_grad_norm=max_grad_norm if max_grad_norm and max_grad_norm > 0 else None,
                seed=self.args.seed,
                # The last step of an epoch may have fewer micro-batches: `training_step` combines.
                micro_batches=None,
                **self._doge_options,
            )
        self.optimizer = self._doge = inner
        return inner

    def _steps(self) -> Steps:
        optimizer = self._doge or self.optimizer
        if isinstance(optimizer, DoGEOptimizer):
            objective = optimizer.objective
            are_partial = len(optimizer.domains_of_step) < len(optimizer.domains)
        else:
            options = self._doge_options
            objective = Objective.of(options["domains"], options["target"])
            are_partial = options["domains_per_step"] is not None
        return Steps(objective.rows, are_partial)

    def _left_out(self) -> set[str]:
        return set(self.doge.domains) - set(self.doge.domains_of_step)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Every domain's gradient; on the last micro-batch, the weighted one.

        Args:
            model: what Trainer trains.
            inputs: {domain: batch}, for every training domain and every measured target.
            num_items_in_batch: {domain: number of targets in the optimizer step}, from
                `get_batch_samples`; None: each micro-batch's mean counts alike.

        Returns:
            The mean of the training domains' losses, detached; `domain_losses` has each row's.

        Raises:
            ValueError: `inputs` is not by domain, or names a domain that is not a row.
        """
        model.train()
        if callable(begin_training := getattr(self.optimizer, "train", None)):
            # Of an optimizer that evaluates other parameters than it trains.
            begin_training()
        part = self.part_of(inputs)
        if self._is_new_step:
            self.doge.zero_grad()
            self.domain_losses = {}
        self._empty_cache()
        losses = self._backward_of(model, part, num_items_in_batch or {})
        nothing: Tensor = torch.zeros((), device=self.args.device)
        for name in filter(part.sizes.get, part.sizes):
            loss, earlier = losses.get(name, nothing), self.domain_losses.get(name)
            self.domain_losses[name] = loss if earlier is None else earlier + loss
        # Trainer says here whether the optimizer will step after this micro-batch.
        self._is_new_step = bool(self.accelerator.sync_gradients)
        if self._is_new_step:
            scaler = self.accelerator.scaler
            # Not scaler.get_scale(), for which the host would wait for the device.
            scale = None if scaler is None else factor_of(scaler, self.accelerator.device)
            self.doge.combine(grad_scale=scale)
            self._sum_domain_losses()
        trained = [name for name in self.doge.domains if part.sizes.get(name)] or list(part.sizes)
        mine = torch.stack([losses[name] for name in trained if name in losses] or [nothing])
        # Trainer logs the mean over the ranks.
        return cast(Tensor, mine.sum() * (self.args.world_size / len(trained)))

    def _sum_domain_losses(self) -> None:
        """Of all ranks, which have parts of them."""
        if self.args.world_size > 1:
            # One dtype on all ranks, also where a rank has no domain.
            losses = torch.stack([loss.double() for loss in self.domain_losses.values()])
            summed = self.summed(losses).unbind()
            self.domain_losses = dict(zip(self.domain_losses, summed, strict=True))

    def _empty_cache(self) -> None:
        interval = self.args.torch_empty_cache_steps
        if interval is not None and self.state.global_step % interval == 0:
            clear_device_cache()

    def _backward_of(
        self, model: nn.Module, part: Part, num_targets: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """{domain: what this micro-batch of this rank adds to its loss}, in the rows too; detached.

        The optimizer takes the mean of the ranks by their shares of a domain's examples, where
        losses add up: hence what is run backward is divided by the share.
        """
        if not part:
            return {}
        inputs = cast("dict[str, Batch]", self._prepare_inputs(dict(part)))
        if self._is_to_be_stacked(inputs):
            return self._backward_stacked(model, part, inputs, num_targets)
        losses: dict[str, Tensor] = {}
        for place, (name, batch) in enumerate(inputs.items(), 1):
            self.prepare_shards(model, is_last=place == len(inputs))
            losses[name] = self._backward(model, name, part, batch, num_targets.get(name))
        return losses

    def _steps_of_mean(self, part: Part, name: str) -> float:
        """What a mean over the examples here is divided by, where micro-batches count alike."""
        return self.current_gradient_accumulation_steps * part.sizes[name] / part.counts[name]

    def _backward(
        self, model: nn.Module, name: str, part: Part, batch: Batch, num_targets: Tensor | None
    ) -> Tensor:
        """One domain's part of the loss, added to its row; detached."""
        told = num_targets
        if told is not None and self.args.average_tokens_across_devices:
            # Trainer multiplies the loss by it, for DistributedDataParallel takes means.
            told = told * self.args.world_size
        # FSDP2 takes the mean of the ranks by itself.
        with self.doge.domain(name, count=1 if self.cuts_model else part.counts[name]):
            with self.compute_loss_context_manager():
                loss = cast(Tensor, self.compute_loss(model, batch, num_items_in_batch=told))
            if not self._is_scaled_by_targets(num_targets):
                loss = loss / self._steps_of_mean(part, name)
            share = self.shares.get(name, 1.0)
            self.accelerator.backward(loss if share == 1.0 else loss / share)
        return loss.detach()

    def _backward_stacked(
        self,
        model: nn.Module,
        part: Part,
        inputs: Mapping[str, Batch],
        num_targets: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """All domains' parts of the loss, added to their rows in one pass; detached."""
        unwrapped = self.accelerator.unwrap_model(model)
        with self.doge.stacked(unwrapped, part.counts):
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                losses_D = causal_lm.stacked_losses(model, unwrapped, inputs, num_targets or None)
            if not num_targets:
                losses_D = _divided(losses_D, [self._steps_of_mean(part, name) for name in inputs])
            shares = [self.shares.get(name, 1.0) for name in inputs]
            self.accelerator.backward(_divided(losses_D, shares).sum())
        return dict(zip(inputs, losses_D.detach(), strict=True))

    def _is_to_be_stacked(self, inputs: Mapping[str, Batch]) -> bool:
        """Whether `mode` means the stacked pass for this micro-batch.

        Raises:
            ValueError: it does, and the batch or the loss does not allow it.
        """
        if self.mode == "sequential":
            return False
        obstacle = self._obstacle_to_stacking(inputs)
        if self.mode == "auto":
            if obstacle is not None or self.args.torch_compile:
                return False
            is_mixed = self.accelerator.mixed_precision != "no"
            return causal_lm.gains_by_stacking(
                self.model, inputs, self.args.device, is_mixed=is_mixed
            )
        if obstacle is not None:
            raise ValueError(f'mode="stacked" {obstacle} Pass mode="sequential" or "auto".')
        return True

    def _obstacle_to_stacking(self, inputs: Mapping[str, Batch]) -> str | None:
        if self.cuts_model:
            return "takes a whole model, and fsdp cuts it."
        is_own_loss = type(self).compute_loss is Trainer.compute_loss
        if not (is_own_loss and self.compute_loss_func is None and self.label_smoother is None):
            return "takes the model's own loss, and another is set."
        if not self.shifts_labels():
            return "takes causal language models of transformers with their usual loss."
        return causal_lm.obstacle_to_stacking(inputs)

    def _is_scaled_by_targets(self, num_targets: Tensor | None) -> bool:
        # Trainer's own rule; a subclass with its own compute_loss answers for itself.
        answer = getattr(self, "loss_is_scaled_for_ga", None)
        if answer is not None:
            return bool(answer)
        by_model = self.model_accepts_loss_kwargs and num_targets is not None
        return bool(by_model or self.compute_loss_func is not None)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.doge.rule.max_grad_norm is None:
            # A DoGEOptimizer of the user's that leaves clipping to the loop.
            return cast(Tensor, super()._clip_grad_norm(model))  # type: ignore[no-untyped-call]
        # combine() has cut the gradient already; Trainer logs the norm.
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        # Known from the Gram matrix; Trainer would read every gradient again.
        last = self.doge.last
        assert last is not None
        return last.combined_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, with the losses and weights of the domains beside the training loss."""
        if "loss" in logs and self._doge is not None:
            logs |= {f"loss/{name}": float(loss) for name, loss in self.domain_losses.items()}
            for kind, alpha_K in (("alpha", self.doge.alpha), ("alpha_mean", self.doge.alpha_mean)):
                pairs = zip(self.doge.domains, alpha_K.tolist(), strict=True)
                logs |= {f"{kind}/{name}": weight for name, weight in pairs}
        super().log(logs, *args, **kwargs)


def _divided(losses_D: Tensor, numbers: Sequence[float]) -> Tensor:
    if len(set(numbers)) == 1:
        return losses_D if numbers[0] == 1.0 else losses_D / numbers[0]
    return losses_D / on_device(numbers, losses_D.device, losses_D.dtype)


def _name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Write `param_names` into the groups, as torch does when given named parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        if "param_names" not in group and None not in names:
            group["param_names"] = names
