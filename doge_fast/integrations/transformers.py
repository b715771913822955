"""Hugging Face's Trainer with a gradient per domain.

Trainer owns the loop: it accumulates micro-batches, clips `p.grad`, steps, schedules, logs and
saves. This file changes four things. The loader gives batches by domain, of which every rank takes
a part. Every domain has a gradient of its own, from one backward pass per domain or one for all.
`p.grad` holds the weighted gradient before Trainer reads it. A gradient that `DoGEOptimizer` has
clipped is not clipped again. Beside gradients, ranks exchange the numbers of targets in a step, and
the losses for the log.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import is_compiled_module
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from doge_fast.distributed.process_group import default_group
from doge_fast.flat_buffer import on_device
from doge_fast.integrations import causal_lm, domain_data
from doge_fast.integrations.domain_data import Batch, RankBatch, examples_of_rank
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.step.parameters import have_other_hooks
from doge_fast.step.step import loss_scale
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import Score

Mode = Literal["auto", "sequential", "stacked"]


class DoGETrainer(Trainer):
    """A `transformers.Trainer` that learns domain weights while it trains.

        trainer = DoGETrainer(
            model=model,
            args=TrainingArguments(output_dir="out", per_device_train_batch_size=4, max_steps=1000),
            train_dataset=mixed,            # its column "domain" holds "arxiv", "book", ...
            domains=["arxiv", "book"],
        )
        trainer.train()
        trainer.weights                                     # {"arxiv": 0.61, "book": 0.39}

    Everything else is Trainer's. The optimizer that `args.optim` names is wrapped, or the one that
    you pass, or several as one, `optimizers=([muon, adamw], None)`; `args.max_grad_norm` clips the
    combined gradient, once. If you pass a `DoGEOptimizer`, its options hold; if its `max_grad_norm`
    is None, `args.max_grad_norm` clips. A domain's loss, l_j of the paper, is the mean over its
    tokens in the whole optimizer step. For a model that takes no number of targets it is the mean
    over micro-batches of means over examples. Logs have `loss/DOMAIN`, `alpha/DOMAIN` and
    `alpha_mean/DOMAIN`.

    A step has `per_device_train_batch_size` examples of every training domain and of every held-out
    target. `train_dataset` may be:

    - a dataset with a column `domain_column`, or one whose examples have this key; then all
      examples are read once before training. It is split by domain, and no example is dropped;
    - a mapping from domains to datasets. Here and above an epoch is one pass over the longest
      domain; shorter ones restart;
    - a dataset whose examples are `{domain: example}`: collated domain by domain;
    - an iterable dataset of examples with the key `domain_column`. Examples wait until every domain
      has enough for a step; most of the surplus of a frequent domain is skipped;
    - an iterable dataset that yields finished batches `{domain: {"input_ids": ..., ...}}`; they
      reach the model unchanged.

    A run over a stream resumes bitwise if it stopped within the first pass: Trainer cannot count
    the passes over a dataset without a length.

    Gradients come from one backward pass per domain (`mode="sequential"`) or from one pass over
    the batches of all domains (`"stacked"`; `DoGEOptimizer.stacked`); the weights are the same to
    rounding, without dropout. `"auto"` stacks small micro-batches of known architectures:
    `doge_fast.integrations.causal_lm` has the limits. `score="aligned"` compares two halves of each
    domain: those of its batch, which `"auto"` takes in one pass where it could stack, or of the
    step's `gradient_accumulation_steps` micro-batches.

    On a GPU nothing here makes the host wait for the device. Pass
    `TrainingArguments(logging_nan_inf_filter=False)` too, or Trainer reads the loss on the host at
    every step.

    With n ranks a step has n `per_device_train_batch_size` examples of every domain; a finished
    batch is divided among all ranks. All ranks read the same data. The result equals that of one
    process on the same batches to rounding, without dropout.

    Args:
        domains: names of the training domains, in the order of the weights. Optional if
            `optimizers` holds a `DoGEOptimizer`.
        domain_column: the column, or an example's key, that names the domain.
        target, mu, score, domain_max_grad_norm, smoothing, selection, buffer_dtype, absent,
        domains_per_step, initial: as for `DoGEOptimizer`. `selection` holds names of
            `model.named_parameters()`. With `domains_per_step`, `args.seed` decides the domains of
            a step, and the batch's other domains are skipped.
        mode: "auto", "sequential" or "stacked", as above. "stacked" raises if the batch or the
            loss does not allow it.
        *args, **kwargs: as for `Trainer`.

    Raises:
        ValueError: no domains, an unknown mode, a `DoGEOptimizer` that contradicts the arguments,
            or as `DoGEOptimizer`.
        FileNotFoundError: a checkpoint to resume from lacks the optimizer's state.
        RuntimeError: several GPUs in one process, several processes that Trainer would train
            separately, a model sharded by anything but FSDP2 (FSDP1, DeepSpeed,
            parallelism_config), or a base class whose method would never run.

    Source: DoGE, Algorithms 1 and 2.
    """

    shares: Mapping[str, float] = {}
    """{domain: this rank's share of its examples in this step}, for the domains it has."""

    def __init__(
        self,
        *args: Any,
        domains: Sequence[str] = (),
        domain_column: str = "domain",
        target: str | Sequence[str] | Mapping[str, float] = "universal",
        mu: float | None = None,
        score: Literal["paper", "published", "aligned"] | Score = "paper",
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
        self._doge_options: dict[str, Any] = {
            "domains": list(Objective.of(domains, target).domains),
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
            self._refuse_options(ready)
        self.mode: Mode = mode
        self.domain_column = domain_column
        self._doge: DoGEOptimizer | None = None
        # Whether the next micro-batch is the first one of an optimizer step.
        self._is_new_step = True
        self.domain_losses: dict[str, Tensor] = {}
        # {domain: number of the step's micro-batches that have it}
        self._num_micro_batches: Counter[str] = Counter()
        # Whether compute_loss() divides by the number of targets; None: not measured yet.
        self._divides_by_targets: bool | None = None
        # A compiled model, and its compiled body.
        self._compiled_body: tuple[nn.Module, Any] | None = None
        super().__init__(*args, **kwargs)
        # Trainer does not recognise GPT-2, whose evaluation losses would be too small.
        # transformers 5.0 does not have the attribute.
        is_known = getattr(self, "_loss_shifts_labels", False)
        is_shifted, name = self.shifts_labels(), type(self.model).__name__
        self._loss_shifts_labels = is_known or is_shifted
        if is_shifted or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # Trainer smooths labels by the model's class name, which fully_shard changes.
            smoother = self.label_smoother
            self.label_smoother = cast(Any, smoother and partial(smoother, shift_labels=True))
        self.check_host()

    def _refuse_options(self, optimizer: DoGEOptimizer) -> None:
        """Refuse options of this trainer that the user's `DoGEOptimizer` would not see."""
        parameters = signature(DoGETrainer.__init__).parameters
        without_effect = {name: parameters[name].default for name in self._doge_options}
        without_effect["domains"] = list(optimizer.domains)
        ignored = [n for n, value in self._doge_options.items() if value != without_effect[n]]
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)} would have no effect: the optimizer is a DoGEOptimizer over "
                f"{list(optimizer.domains)} already. Pass these options to it."
            )

    @property
    def doge(self) -> DoGEOptimizer:
        """The optimizer with the domain weights; RuntimeError before it is created."""
        if self._doge is None:
            raise RuntimeError("train() or create_optimizer() creates the domain weights.")
        return self._doge

    @property
    def weights(self) -> dict[str, float]:
        """The average domain weights so far, {domain: weight}."""
        return self.doge.weights

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `args`, as Trainer does, and wrap it in a `DoGEOptimizer`."""
        # Every train() calls this again; by then accelerate may have wrapped the optimizer too.
        self._is_new_step = True
        if self._doge is not None and self.optimizer is not None:
            return self.optimizer
        inner = super().create_optimizer(model)
        if isinstance(inner, DoGEOptimizer):
            self._refuse_options(inner)
        else:
            optimizers: Any = inner if isinstance(inner, list | tuple) else [inner]
            for optimizer in optimizers:
                _name_parameters(optimizer, cast(nn.Module, model or self.model))
            max_grad_norm = self.args.max_grad_norm
            inner = DoGEOptimizer(
                inner,
                max_grad_norm=max_grad_norm if max_grad_norm and max_grad_norm > 0 else None,
                seed=self.args.seed,
                # `training_step` combines: an epoch's last step may have fewer micro-batches.
                micro_batches=None,
                **self._doge_options,
            )
        self.optimizer = self._doge = inner
        return inner

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            # Under FSDP2 the optimizer is saved as a folder, optimizer_0.
            saved = {name.split(".")[0].split("_")[0] for name in os.listdir(checkpoint)}
            # Trainer would go on in silence, with new domain weights or a new schedule.
            if missing := {"optimizer", "scheduler"} - saved:
                raise FileNotFoundError(
                    f"{checkpoint} lacks the state of the {' and the '.join(sorted(missing))}; "
                    "save_only_model=True leaves it out. Resume from a whole checkpoint, or load "
                    "its model and begin a new run."
                )
        super()._load_optimizer_and_scheduler(checkpoint)

    def check_host(self) -> None:
        """Raise RuntimeError for what would train something else than the class says.

        Where it returns, `is_fsdp_enabled` means FSDP2: every rank runs every domain of a step.
        """
        replaced = "training_step", "get_train_dataloader", "get_batch_samples", "_clip_grad_norm"
        for name in replaced:
            first, *later = [kind for kind in type(self).__mro__ if name in vars(kind)]
            if first is DoGETrainer and later[0] is not Trainer:
                raise RuntimeError(
                    f"{later[0].__name__}.{name}() would never run, for DoGETrainer has its own. "
                    f"Define {name}() in {type(self).__name__}; it may be DoGETrainer.{name}."
                )
        args, accelerator, world = self.args, self.accelerator, default_group()
        unsupported = {
            f"deepspeed={args.deepspeed!r}": self.is_deepspeed_enabled,
            "FSDP1": self.is_fsdp_enabled and not accelerator.is_fsdp2,
            "a parallelism_config": getattr(accelerator, "parallelism_config", None),
            "a distributed_config": getattr(self, "is_distributed_loading_by_transformers", False),
            f"{args.n_gpu} GPUs in one process, without torchrun": args.n_gpu > 1,
            # Trainer's default on CPUs.
            "a model of its own in each process, without TrainingArguments(use_cpu=True)": (
                args.world_size == 1 and world is not None and world.size() > 1
            ),
        }
        if refused := [name for name, is_on in unsupported.items() if is_on]:
            raise RuntimeError(
                f"DoGETrainer does not train with {refused[0]}. It needs each parameter's gradient "
                "of each domain: the whole model on one device of every rank, or fsdp=True with "
                'fsdp_config={"version": 2}.'
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The training domains and the held-out targets."""
        optimizer = self._doge or self.optimizer
        if isinstance(optimizer, DoGEOptimizer):
            return optimizer.names
        return Objective.of(self._doge_options["domains"], self._doge_options["target"]).names

    @property
    def _are_steps_partial(self) -> bool:
        """Whether a step has only some of the training domains."""
        optimizer = self._doge or self.optimizer
        if isinstance(optimizer, DoGEOptimizer):
            return len(optimizer.domains_of_step) < len(optimizer.domains)
        return self._doge_options["domains_per_step"] is not None

    def shifts_labels(self) -> bool:
        """Whether the model's own loss predicts the next token."""
        return causal_lm.shifts_labels(self._without_wrappers(self.model))

    def _without_wrappers(self, model: Any) -> Any:
        """The model inside data parallelism and torch.compile."""
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    # Batches by domain, and this rank's part of them.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of batches `{domain: batch}`."""
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        # The oldest supported transformers do not have it.
        context = getattr(self.args, "dataloader_multiprocessing_context", None)
        options["multiprocessing_context"] = context
        num_ranks, column = self.args.world_size, self.domain_column
        batch_size = self._train_batch_size * num_ranks
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        dataset = domain_data.by_domain(self.train_dataset, column, self.names)
        if isinstance(dataset, IterableDataset):
            batches = domain_data.DomainStream(
                dataset, column, self.names, batch_size=batch_size, collate=collate
            )
            stream: Any = DataLoader(batches, batch_size=None, **options)
            # Trainer calls it when an epoch begins.
            stream.set_epoch = batches.set_epoch
            return cast("DataLoader[Any]", stream)
        if isinstance(dataset, Mapping):
            dataset = domain_data.DomainZip(
                {name: self._without_unused_columns(part) for name, part in dataset.items()}
            )
        rest = 0 if self.args.dataloader_drop_last else len(dataset) % batch_size
        if rest and self.is_fsdp_enabled:
            # Refuses now what would be refused at the end of an epoch.
            examples_of_rank({"the last batch of an epoch": rest}, *self._place, all_domains=True)
        # Workers read ahead and do not know yet which domains a step will have.
        place = None if num_ranks == 1 or self._are_steps_partial else self._place
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._get_train_sampler(dataset),
            collate_fn=partial(
                domain_data.collate_by_domain,
                collate=collate,
                column=column,
                place=place,
                all_domains=self.is_fsdp_enabled,
            ),
            drop_last=self.args.dataloader_drop_last,
            **options,
        )
        if num_ranks == 1:
            # Not onto the device: accelerate would wait for every copy.
            prepared = self.accelerator.prepare_data_loader(loader, device_placement=False)
            return cast("DataLoader[Any]", prepared)
        # Every rank reads all batches in the same order; `prepare` would distribute them.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        prepared = prepare_data_loader(
            loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed
        )
        return cast("DataLoader[Any]", prepared)

    def _without_unused_columns(self, dataset: Any) -> Any:
        if hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset, description="training")
        return dataset

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """This rank's parts of a step's micro-batches, and {domain: number of targets}.

        Targets are counted over all ranks and micro-batches, for the domains that this rank has.
        """
        parts = [self.part_of(batch) for batch in islice(epoch_iterator, num_batches)]
        if len(parts) < num_batches and isinstance(self.train_dataset, IterableDataset):
            # Trainer would add what is left to the next step, each part with a divisor of its own.
            return [], None
        self.shares = domain_data.shares(parts)
        self._num_micro_batches = Counter(
            name for part in parts for name, size in part.sizes.items() if size
        )
        if self.is_fsdp_enabled:
            # FSDP2 averages over ranks, but the parts of a loss must be summed.
            self.shares = dict.fromkeys(self.shares, 1 / self.args.world_size)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return parts, None
        names, is_shifted = self.names, self._loss_shifts_labels
        counts_R = causal_lm.num_targets(parts, names, device, is_shifted=is_shifted)
        # A domain whose tokens are all masked has loss zero, not 0/0.
        summed_R = cast(Tensor, self.accelerator.reduce(counts_R))
        counts = zip(names, summed_R.clamp(min=1).unbind(), strict=True)
        labelled = {name for part in parts for name in part if "labels" in part[name]}
        return parts, {name: count for name, count in counts if name in labelled}

    @property
    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks)"""
        return self.args.process_index, self.args.world_size

    def part_of(self, batch: Any) -> RankBatch:
        """This rank's part of a batch that all ranks have; a step's other domains are left out."""
        if isinstance(batch, RankBatch):
            return batch
        left_out = set(self.doge.domains) - set(self.doge.domains_of_step)
        whole = domain_data.checked_batch(batch)
        taken = {name: domain for name, domain in whole.items() if name not in left_out}
        return domain_data.part_of(taken, *self._place, all_domains=self.is_fsdp_enabled)

    # Gradients by domain.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute every domain's gradient; on the last micro-batch combine them in `p.grad`.

        `inputs` is {domain: batch}, for every training domain and every held-out target;
        `num_items_in_batch` is {domain: number of targets in the optimizer step}, or None if all
        micro-batches have the same weight. Returns the mean of the training domains' losses,
        detached; `domain_losses` has all of them.

        Raises:
            ValueError: `inputs` is not by domain, or names an unknown domain.
        """
        model.train()
        if callable(begin_training := getattr(self.optimizer, "train", None)):
            # Schedule-free optimizers evaluate other parameters than they train.
            begin_training()
        part = self.part_of(inputs)
        if self._is_new_step:
            self.doge.zero_grad()
            self.domain_losses = {}
        interval = self.args.torch_empty_cache_steps
        if interval is not None and self.state.global_step % interval == 0:
            clear_device_cache()
        losses = self._backward_of(model, part, num_items_in_batch or {})
        # The loss of a domain whose examples are on other ranks.
        zero: Tensor = torch.zeros((), device=self.args.device)
        for name in filter(part.sizes.get, part.sizes):
            loss, earlier = losses.get(name, zero), self.domain_losses.get(name)
            self.domain_losses[name] = loss if earlier is None else earlier + loss
        # True if the optimizer steps after this micro-batch.
        self._is_new_step = bool(self.accelerator.sync_gradients)
        if self._is_new_step:
            scaler = self.accelerator.scaler
            # Not scaler.get_scale(), which makes the host wait for the device.
            scale = None if scaler is None else loss_scale(None, scaler, self.accelerator.device)
            self.doge.combine(grad_scale=scale)
            if self.args.world_size > 1:
                # double(): a rank without a domain has float32 zeros, and all need one dtype.
                parts = torch.stack([loss.double() for loss in self.domain_losses.values()])
                summed = cast(Tensor, self.accelerator.reduce(parts))
                self.domain_losses = dict(zip(self.domain_losses, summed.unbind(), strict=True))
        # The domains of the step; a micro-batch need not have all of them.
        in_step = self._num_micro_batches or part.sizes
        trained = [name for name in self.doge.domains if in_step.get(name)] or list(part.sizes)
        here = torch.stack([losses[name] for name in trained if name in losses] or [zero])
        # Trainer logs the mean over the ranks.
        return cast(Tensor, here.sum() * (self.args.world_size / len(trained)))

    def _backward_of(
        self, model: nn.Module, part: RankBatch, num_targets: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Run backward on this rank's part; {domain: its part of the loss}, detached."""
        if not part:
            return {}
        inputs = cast("dict[str, Batch]", self._prepare_inputs(dict(part)))
        losses: dict[str, Tensor] = {}
        if batches := self._batches_to_stack(inputs):
            for number, batch in enumerate(batches, 1):
                is_last = number == len(batches) and self.accelerator.sync_gradients
                losses |= self._backward_stacked(model, part, batch, num_targets, is_last)
            return losses
        passes = [
            (name, *each)
            for name, batch in inputs.items()
            for each in self._passes(batch, self._num_micro_batches.get(name, 1), part.sizes[name])
        ]
        for number, (name, batch, share) in enumerate(passes, 1):
            self._prepare_shards(model, is_last=number == len(passes))
            loss = self._backward(model, name, part, batch, num_targets.get(name), share)
            losses[name] = losses[name] + loss if name in losses else loss
        return losses

    def _passes(
        self, batch: Batch, num_micro_batches: int, num_of_ranks: int
    ) -> list[tuple[Batch, float]]:
        """What is run in one backward pass each, and its share of the examples of the batch.

        A rule that compares two halves of a domain takes those of the batch, unless the step has
        several micro-batches of it. With shards all ranks must run equally many passes, which the
        smallest of their parts decides; `num_of_ranks` are the examples of all ranks.
        """
        sizes = {len(x) for x in batch.values() if isinstance(x, Tensor) and x.dim()}
        size = max(sizes, default=0)
        least = num_of_ranks // self.args.world_size if self.is_fsdp_enabled else size
        is_whole = not self.doge.rule.has_halves or num_micro_batches > 1 or len(sizes) != 1
        if is_whole or least < 2:
            return [(batch, 1.0)]
        half = size // 2
        return [
            (_examples(batch, slice(0, half)), half / size),
            (_examples(batch, slice(half, size)), 1 - half / size),
        ]

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's, but the host does not wait for the copy of a tensor to a GPU."""
        is_copied = isinstance(data, Tensor) and data.device.type == "cpu"
        if is_copied and self.args.device.type == "cuda":
            return on_device(data, self.args.device, data.dtype)
        return super()._prepare_input(data)

    def _prepare_shards(self, model: Any, *, is_last: bool) -> None:
        """Have FSDP2 reduce the gradient of the next pass."""
        if not self.is_fsdp_enabled:
            return
        # accelerate would have it reduce in the last micro-batch alone.
        model.set_requires_gradient_sync(True)
        # Parameters stay whole for the next domain's pass, and are sharded after the step's last.
        if not self.accelerator.state.fsdp_plugin.reshard_after_forward:
            model.set_reshard_after_backward(is_last and self.accelerator.sync_gradients)

    def _divisor_of_mean(self, part: RankBatch, name: str) -> float:
        """What divides a mean over this rank's examples, if targets are not counted."""
        num = self._num_micro_batches.get(name, self.current_gradient_accumulation_steps)
        return num * part.sizes[name] / part.counts[name]

    def _backward(
        self,
        model: nn.Module,
        name: str,
        part: RankBatch,
        batch: Batch,
        num_targets: Tensor | None,
        share_of_batch: float,
    ) -> Tensor:
        num_items = num_targets
        if num_items is not None and self.args.average_tokens_across_devices:
            # Trainer multiplies the loss by world_size, as DistributedDataParallel takes means.
            num_items = num_items * self.args.world_size
        is_scaled = self._is_scaled_by_targets(model, batch, num_items, share_of_batch)
        # Of this pass in the domain's gradient.
        weight: float | Tensor | None = None
        if not is_scaled:
            num_items, weight = None, share_of_batch / self._divisor_of_mean(part, name)
        elif num_targets is not None and self.doge.rule.has_halves:
            is_shifted, device = self._loss_shifts_labels, num_targets.device
            here = causal_lm.num_targets([{name: batch}], [name], device, is_shifted=is_shifted)
            weight = here[0].double() / num_targets
        # FSDP2 averages over ranks itself.
        count = (1 if self.is_fsdp_enabled else part.counts[name]) * share_of_batch
        with self.doge._step.domain(name, count, weight):
            with self.compute_loss_context_manager():
                loss = cast(Tensor, self.compute_loss(model, batch, num_items_in_batch=num_items))
            if not is_scaled:
                loss = loss / (self._divisor_of_mean(part, name) / share_of_batch)
            # The optimizer averages over ranks, weighted by shares; losses must be summed.
            share = self.shares.get(name, 1.0)
            self.accelerator.backward(loss if share == 1.0 else loss / share)
        return loss.detach()

    def _backward_stacked(
        self,
        model: nn.Module,
        part: RankBatch,
        inputs: Mapping[str, Batch],
        num_targets: Mapping[str, Any],
        is_last: bool,
    ) -> dict[str, Tensor]:
        unwrapped, body = self._without_wrappers(model), self._body_of(model)
        sizes = {name: part.counts[name] for name in inputs}
        with self.doge.stacked(unwrapped, sizes, keep_rows=not is_last):
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                losses_D = causal_lm.stacked_losses(
                    model, unwrapped, body, inputs, num_targets or None
                )
            if not num_targets:
                losses_D = _divided(
                    losses_D, [self._divisor_of_mean(part, name) for name in inputs]
                )
            shares = [self.shares.get(name, 1.0) for name in inputs]
            self.accelerator.backward(_divided(losses_D, shares).sum())
        return dict(zip(inputs, losses_D.detach(), strict=True))

    def _body_of(self, model: nn.Module) -> Any:
        """The model without its head, compiled if and as the model is."""
        model = self.accelerator.unwrap_model(model)
        if not is_compiled_module(model):
            return model.base_model
        if self._compiled_body is None or self._compiled_body[0] is not model:
            compiler: Any = model.dynamo_ctx
            self._compiled_body = model, compiler(model.base_model)
        return self._compiled_body[1]

    def _batches_to_stack(self, inputs: Mapping[str, Batch]) -> list[Mapping[str, Batch]]:
        """The stacked passes of this micro-batch; none: one domain after another.

        ValueError if mode="stacked" and it cannot be stacked.
        """
        if self.mode == "sequential":
            return []
        reason = self._unstackable_reason(inputs)
        if self.mode == "stacked" and reason is not None:
            raise ValueError(f'mode="stacked" {reason} Pass mode="sequential" or "auto".')
        if self.mode == "stacked":
            return [inputs]
        if reason is not None or not causal_lm.is_tested(self.model):
            return []
        if causal_lm.gains_by_stacking(inputs, self.args.device):
            return [inputs]
        is_whole = all(self._num_micro_batches.get(name, 1) == 1 for name in inputs)
        if self.doge.rule.has_halves and is_whole:
            # One pass for both halves of a domain, where two would be small.
            return [{name: batch} for name, batch in inputs.items()]
        return []

    def _unstackable_reason(self, inputs: Mapping[str, Batch]) -> str | None:
        if self.is_fsdp_enabled:
            return "takes a whole model, and fsdp shards it."
        is_own_loss = type(self).compute_loss is Trainer.compute_loss
        if not (is_own_loss and self.compute_loss_func is None and self.label_smoother is None):
            return "takes the model's own loss, and another is set."
        model = self._without_wrappers(self.model)
        # With it the loss of a mixture of experts has a term for its router.
        if not self.shifts_labels() or getattr(model.config, "output_router_logits", False):
            return "takes causal language models of transformers with their usual loss."
        if have_other_hooks(model.parameters()):
            return "runs no post-accumulate hook of a parameter."
        if causal_lm.has_own_forward(model):
            return f"takes the forward of transformers; {type(model).__name__} has another."
        return causal_lm.unstackable_reason(inputs)

    def _is_scaled_by_targets(
        self, model: nn.Module, batch: Batch, num_items: Tensor | None, share_of_batch: float
    ) -> bool:
        """Whether `compute_loss` divides by the number of targets of the step."""
        # A subclass with its own compute_loss may set the attribute.
        answer = getattr(self, "loss_is_scaled_for_ga", None)
        if answer is not None:
            return bool(answer)
        if num_items is None:
            return False
        if self.current_gradient_accumulation_steps == self.args.world_size == share_of_batch == 1:
            # A mean over the batch is a mean over the step.
            return True
        if self._divides_by_targets is None:
            self._divides_by_targets = self._depends_on_num_targets(model, batch, num_items)
        return self._divides_by_targets is not False

    def _depends_on_num_targets(
        self, model: nn.Module, batch: Batch, num_items: Tensor
    ) -> bool | None:
        """Whether the loss depends on the number of targets; None: this batch has none.

        Many heads, and many overridden `compute_loss`, take the number and ignore it. Others divide
        a part of the loss by it.
        """
        losses = []
        # No communication without FSDP2: another rank may have no example now.
        probed = model if self.is_fsdp_enabled else self._without_wrappers(model)
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        buffers = [(buffer, buffer.clone()) for buffer in probed.buffers()]
        for factor in (1, 1, 2):
            states = random.getstate(), np.random.get_state()
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices),
                self.compute_loss_context_manager(),
            ):
                loss = self.compute_loss(probed, dict(batch), num_items_in_batch=factor * num_items)
                for buffer, before in buffers:
                    # An expanded buffer cannot be written to; the pass has not changed it either.
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
            random.setstate(states[0])
            np.random.set_state(states[1])
            losses.append(float(cast(Tensor, loss)))
        first, again, other = losses
        if not first or not all(map(math.isfinite, losses)):
            return None
        # fork_rng() restores the generators of CPUs and CUDA devices alone.
        is_replayed = self.args.device.type in ("cpu", "cuda")
        if is_replayed and not math.isclose(first, again, rel_tol=1e-3):
            raise RuntimeError(
                "compute_loss gives one batch two losses. Set the trainer's loss_is_scaled_for_ga: "
                "True if the loss is divided by num_items_in_batch, else False."
            )
        return not math.isclose(first, other, rel_tol=1e-3)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.doge.rule.max_grad_norm is None:
            # The user's DoGEOptimizer leaves clipping to the loop.
            return cast(Tensor, super()._clip_grad_norm(model))  # type: ignore[no-untyped-call]
        # combine() has clipped the gradient already; Trainer logs the norm.
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        # From the Gram matrix; Trainer would read every gradient again.
        last = self.doge.last
        # None: an overridden training_step has run no domain, and step() will refuse the step.
        if last is None:
            return cast(Tensor, super()._get_grad_norm(model))  # type: ignore[no-untyped-call]
        return last.combined_norm

    # Counts and logs.

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Trainer's estimate, for the tokens of all domains."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = sum(batch[name].numel() for batch in inputs.values() if name in batch)
        # One call for all domains: every call counts the parameters.
        return super().floating_point_ops({name: torch.empty(tokens, device="meta")})

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        # One call: it communicates, and ranks may have different numbers of domains.
        name = getattr(self.model, "main_input_name", "input_ids")
        joined: dict[str, Tensor] = {}
        for key in (name, "attention_mask"):
            if all(key in batch for batch in inputs.values()):
                parts = [batch[key].flatten() for batch in inputs.values()]
                joined[key] = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        super()._track_num_input_tokens(joined)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, plus the losses and weights of the domains."""
        if "loss" in logs and self._doge is not None:
            logs |= {f"loss/{name}": float(loss) for name, loss in self.domain_losses.items()}
            for kind, alpha_K in (("alpha", self.doge.alpha), ("alpha_mean", self.doge.alpha_mean)):
                pairs = zip(self.doge.domains, alpha_K.tolist(), strict=True)
                logs |= {f"{kind}/{name}": weight for name, weight in pairs}
        super().log(logs, *args, **kwargs)


def _examples(batch: Batch, part: slice) -> Batch:
    """Some of the examples of a batch."""
    return {key: x[part] if isinstance(x, Tensor) and x.dim() else x for key, x in batch.items()}


def _divided(losses_D: Tensor, numbers: Sequence[float]) -> Tensor:
    if len(set(numbers)) == 1:
        return losses_D if numbers[0] == 1.0 else losses_D / numbers[0]
    return losses_D / on_device(numbers, losses_D.device, losses_D.dtype)


def _name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Write `param_names` into the groups, as torch does for named parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        if "param_names" not in group and None not in names:
            group["param_names"] = names
