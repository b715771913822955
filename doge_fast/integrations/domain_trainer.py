"""Hugging Face's Trainer over batches by domain, of which every rank takes its part.

All ranks go through the data in one order, so that they agree on every batch without a word; what
they tell each other is how many targets a domain has in a step.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from doge_fast.distributed import default_group
from doge_fast.integrations import causal_lm, dealing, domain_data
from doge_fast.integrations.dealing import Deal, Part


class Steps(NamedTuple):
    """What holds of every step, and is known before the first."""

    rows: tuple[str, ...]
    """The training domains and the measured targets."""
    in_halves: bool
    """Whether each training domain's batch is cut in two halves."""
    are_partial: bool
    """Whether a step has some of the training domains only."""


class DomainTrainer(Trainer):
    """A Trainer whose micro-batches are `{domain: batch}`, of which every rank has its `Part`.

    Subclasses say which domains there are.
    """

    domain_column: str
    shares: Mapping[str, float] = {}
    """{domain: the share of its examples in this step that this rank has}, of those it has."""

    def _steps(self) -> Steps:
        raise NotImplementedError

    def _left_out(self) -> set[str]:
        """The training domains that the step under way does not have."""
        raise NotImplementedError

    def check_host(self) -> None:
        """Refuse what Trainer may do with a model and this one cannot.

        Raises:
            RuntimeError: as the class says.
        """
        if self.is_deepspeed_enabled:
            raise RuntimeError(
                "DoGETrainer needs the gradient of each domain, and DeepSpeed reduces and keeps "
                f"the gradients itself; got deepspeed={self.args.deepspeed!r}. Learn the weights "
                "without it, with a smaller proxy if memory is short, and use DeepSpeed for the "
                "large model."
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise RuntimeError(
                "DoGETrainer needs the gradient of each parameter, and FSDP1 flattens parameters "
                'into one vector. Pass fsdp_config={"version": 2}, which is fully_shard.'
            )
        if getattr(self.accelerator, "parallelism_config", None) or getattr(
            self, "is_distributed_loading_by_transformers", False
        ):
            raise RuntimeError(
                "DoGETrainer takes a model that is whole on every rank, or that fsdp=True shards "
                "over all ranks; a parallelism_config or distributed_config shards it in another "
                "way. Leave it out, or use DoGEOptimizer in a loop of your own."
            )
        world = default_group()
        if self.args.world_size == 1 and world is not None and world.size() > 1:
            raise RuntimeError(
                f"Trainer would train a separate model in each of the {world.size()} processes "
                "that a launcher has started, as it does on CPUs by default. Pass "
                "TrainingArguments(use_cpu=True), or start one process."
            )
        if self.args.n_gpu > 1:
            raise RuntimeError(
                f"DoGETrainer takes one GPU in each process; got {self.args.n_gpu} in one. Start "
                f"it with torchrun --nproc-per-node {self.args.n_gpu}, or set CUDA_VISIBLE_DEVICES "
                "to one GPU."
            )

    @property
    def cuts_model(self) -> bool:
        """Whether ranks have shards of the model, and so run every domain of a step (FSDP2)."""
        return bool(self.is_fsdp_enabled)

    @property
    def _deal(self) -> Deal:
        return Deal(of_every_domain=self.cuts_model, in_pairs=self._steps().in_halves)

    def prepare_shards(self, model: Any, *, is_last: bool) -> None:
        """Have FSDP2 reduce the gradient of the next pass, also where micro-batches add up.

        Parameters that it keeps after a forward pass stay until the step's last pass.

        Args:
            model: in shards.
            is_last: whether it is the last pass of the micro-batch.
        """
        if not self.cuts_model:
            return
        model.set_requires_gradient_sync(True)
        if not self.accelerator.state.fsdp_plugin.reshard_after_forward:
            model.set_reshard_after_backward(is_last and self.accelerator.sync_gradients)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of batches `{domain: batch}`; the class says what `train_dataset` may be."""
        if self.train_dataset is None:
            raise ValueError("DoGETrainer needs a train_dataset to train; got None.")
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        # The oldest supported transformers do not have it.
        context = getattr(self.args, "dataloader_multiprocessing_context", None)
        options["multiprocessing_context"] = context
        num_ranks, column, steps = self.args.world_size, self.domain_column, self._steps()
        batch_size = self._train_batch_size * num_ranks
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        dataset = domain_data.by_domain(self.train_dataset, column, steps.rows)
        if isinstance(dataset, IterableDataset):
            batches = domain_data.DomainStream(
                dataset, column, steps.rows, batch_size=batch_size, collate=collate
            )
            return domain_data.StreamLoader(batches, batch_size=None, **options)
        if isinstance(dataset, Mapping):
            dataset = domain_data.DomainZip(
                {name: self._without_unused_columns(part) for name, part in dataset.items()}
            )
        left = 0 if self.args.dataloader_drop_last else len(dataset) % batch_size
        if left and (self.cuts_model or steps.in_halves):
            # Now, not after an epoch.
            self._deal({"the last batch of an epoch": left}, 0, num_ranks)
        # Which domains a step leaves out is not known yet when examples are read.
        is_cut_later = num_ranks == 1 or steps.are_partial
        place = None if is_cut_later else (self.args.process_index, num_ranks)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._get_train_sampler(dataset),
            collate_fn=domain_data.CollateByDomain(collate, column, place, self._deal),
            drop_last=self.args.dataloader_drop_last,
            **options,
        )
        if num_ranks == 1:
            return cast("DataLoader[Any]", self.accelerator.prepare(loader))
        # All batches on every rank, in one order; `prepare` would give each rank some of them.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        prepared = prepare_data_loader(
            loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed
        )
        return cast("DataLoader[Any]", prepared)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={strategy!r} orders single examples, but a step of "
                'DoGETrainer has examples of every domain. Pass "random" or "sequential".'
            )
        return super()._get_train_sampler(train_dataset)

    def _without_unused_columns(self, rows: Any) -> Any:
        if hasattr(rows, "column_names"):
            return self._remove_unused_columns(rows, description="training")
        return rows

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """This rank's parts of the micro-batches of one optimizer step, and {domain: targets}.

        The targets are those of all ranks in the step, for domains that this rank has.
        """
        parts = [self.part_of(batch) for batch in islice(epoch_iterator, num_batches)]
        self.shares = dealing.shares(parts)
        if self.cuts_model:
            # FSDP2 takes the mean of the ranks, and the parts of a loss add up.
            self.shares = dict.fromkeys(self.shares, 1 / self.args.world_size)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return parts, None
        rows, is_shifted = self._steps().rows, self.shifts_labels()
        counts_R = causal_lm.num_targets(parts, rows, device, is_shifted=is_shifted)
        # A domain whose tokens are all masked has loss zero, not 0/0.
        counts = zip(rows, self.summed(counts_R).clamp(min=1).unbind(), strict=True)
        labelled = {name for part in parts for name in part if "labels" in part[name]}
        return parts, {name: count for name, count in counts if name in labelled}

    def part_of(self, batch: Any) -> Part:
        """This rank's part of a batch that all ranks have, of the domains that the step has."""
        if isinstance(batch, Part):
            return batch
        left_out = self._left_out()
        whole = domain_data.checked_batch(batch)
        taken = {name: domain for name, domain in whole.items() if name not in left_out}
        place = self.args.process_index, self.args.world_size
        return dealing.part_of(taken, *place, self._deal)

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.args.world_size == 1:
            return values
        return cast(Tensor, self.accelerator.reduce(values))

    def shifts_labels(self) -> bool:
        """Whether the model's own loss predicts the next token."""
        return causal_lm.shifts_labels(self.accelerator.unwrap_model(self.model))

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Trainer's estimate, for the tokens of all domains."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = sum(batch[name].numel() for batch in inputs.values() if name in batch)
        # One call for all domains, because every call counts the parameters.
        return super().floating_point_ops({name: torch.empty(tokens, device="meta")})

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        # One call: it waits for the other ranks, which may have more domains or fewer.
        name = getattr(self.model, "main_input_name", "input_ids")
        found: dict[str, Tensor] = {}
        for key in (name, "attention_mask"):
            if all(key in batch for batch in inputs.values()):
                parts = [batch[key].flatten() for batch in inputs.values()]
                found[key] = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        super()._track_num_input_tokens(found)  # type: ignore[no-untyped-call]
