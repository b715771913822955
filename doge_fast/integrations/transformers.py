"""Hugging Face's Trainer with a gradient per domain.

Trainer owns the loop: it accumulates micro-batches, clips `p.grad`, steps, schedules, logs and
saves. What DoGE needs differently is small, and all of it is here: a gradient of every domain
instead of one of the batch (domain after domain, or all in one backward pass), the weighted
gradient in `p.grad` before Trainer looks at it, and no second clipping of a gradient that
`DoGEOptimizer` has cut already.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from doge_fast.losses import domain_losses, linear_domain_losses
from doge_fast.objective import Objective
from doge_fast.optimizer import DoGEOptimizer

Batch = dict[str, Any]
"""What a model takes: `input_ids`, `labels` and so on."""

Mode = Literal["auto", "sequential", "stacked"]

# Architectures whose rows in a stacked batch are tested against one domain after another.
STACKABLE = ("gpt2", "llama", "qwen2", "mistral", "gpt_neox", "gemma2")
# Those of them whose head is a product and nothing else.
PLAIN_HEADS = ("gpt2", "llama", "qwen2", "mistral", "gpt_neox")
# All that a stacked batch may hold; each a tensor with the examples in front.
STACKABLE_KEYS = {"input_ids", "labels", "attention_mask"}
# Tokens of a domain in a micro-batch up to which one backward pass for all is chosen. On a CPU as
# measured (`python -m benchmarks.stacked`, docs/decisions.md); elsewhere not measured yet: beyond
# so many a domain by itself occupies a GPU.
MOST_TOKENS = {"cpu": 256}
MOST_TOKENS_ELSEWHERE = 4096
# Of all domains together: what the activations of a stacked batch may grow to unasked.
MOST_TOKENS_TOGETHER = 32768
# Float32 logits of a stacked batch beyond which a plain head gives those of one domain at a time.
MOST_LOGITS_BYTES = {"cpu": 64 << 20}
MOST_LOGITS_BYTES_ELSEWHERE = 4 << 30
# Examples whose domains are read at once from a data set with a column that names them.
ROWS_AT_ONCE = 100_000
# Steps' worth of examples that wait for the other domains of a mixed stream; what a domain has
# beyond that is passed over.
WAITING_STEPS = 64
# Examples of a mixed stream within which every domain must turn up.
MOST_EXAMPLES_WITHOUT = 1_000_000


class DoGETrainer(Trainer):
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

    - a dataset with a column `domain_column`; or examples with such a key, which are then read
      once to see which domain each belongs to. It is split by domain, with all examples kept;
    - a mapping from row names to datasets, or to streams. Here and above an epoch is one pass over
      the longest row, the shorter ones start again;
    - a dataset whose examples are `{domain: example}`: collated domain by domain;
    - an iterable dataset of examples with the key `domain_column`, as a stream of a Hub data set
      is: every domain's examples wait for those of the others. A domain that the stream holds far
      more of than of the others has most of its surplus passed over;
    - an iterable dataset that yields finished batches `{domain: {"input_ids": ..., ...}}`; they
      reach the model as they are.

    Streams hear the number of the pass through `set_epoch`, where they have it. A run over a stream
    resumes to the bit within its first pass. Trainer cannot count the passes of a stream, so in a
    later one it begins another pass instead of going on in the middle, here as elsewhere; there,
    use a dataset with a length.

    An optimizer of one's own (`optimizers`, `optimizer_cls_and_kwargs`) is wrapped like Trainer's
    unless it is a `DoGEOptimizer` already: then that one decides how weights move, and its
    `max_grad_norm` cuts the gradient; where that is None, `args.max_grad_norm` does.

    Gradients come from one backward pass per domain (`mode="sequential"`) or from one for all, on
    the batches of all domains end to end (`"stacked"`; `DoGEOptimizer.stacked`); the weights are
    the same to rounding, dropout aside. `"auto"` stacks a micro-batch where the architecture is
    one of `STACKABLE`, the loss is the model's own, nothing is compiled, all domains' sequences
    are equally long, and there are at most `MOST_TOKENS` in a domain and `MOST_TOKENS_TOGETHER`
    in all: small batches use the machine better together, large ones need the memory. It looks
    at nothing but shapes, so that a resumed run repeats the choice.

    Logs carry `loss/DOMAIN`, `alpha/DOMAIN` and `alpha_mean/DOMAIN` beside Trainer's own.

    Args:
        domains: names of the training domains; the simplex, in this order. May be left out where
            `optimizers` holds a `DoGEOptimizer`, which knows them.
        domain_column: the column, or the key of an example, that names its domain.
        target, mu, score, domain_max_grad_norm, smoothing, selection, buffer_dtype, absent,
        domains_per_step, initial: as `DoGEOptimizer` takes them. `selection` holds names of
            `model.named_parameters()`. Domains are drawn with `args.seed`; what a batch holds of
            the others is left out.
        mode: "auto", "sequential" or "stacked", as above. "stacked" refuses a batch or a loss
            that it cannot take.
        *args, **kwargs: as `Trainer` takes them.

    Raises:
        ValueError: no domain is named, an unknown mode, a `DoGEOptimizer` that contradicts the
            arguments, or what `DoGEOptimizer` refuses.
        RuntimeError: more than one process or device would train, or DeepSpeed.

    Source: DoGE, Algorithms 1 and 2.
    """

    def __init__(
        self,
        *args: Any,
        domains: Sequence[str] = (),
        domain_column: str = "domain",
        target: str | Sequence[str] | Mapping[str, float] = "universal",
        mu: float = 0.01,
        score: Literal["paper", "published"] = "paper",
        domain_max_grad_norm: float | None = None,
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
        # Its own guess misses GPT-2, whose evaluation losses would come out too small.
        self._loss_shifts_labels = self._shifts_labels()
        self._check_host()

    def _check_host(self) -> None:
        if self.is_deepspeed_enabled:
            raise RuntimeError(
                "DoGETrainer needs the gradient of each domain, and DeepSpeed reduces and keeps "
                f"the gradients itself; got deepspeed={self.args.deepspeed!r}. Learn the weights "
                "without it, with a smaller proxy where memory asks for that, and train with them "
                "there."
            )
        if self.args.world_size * max(1, self.args.n_gpu) > 1:
            raise RuntimeError(
                f"DoGETrainer runs in one process on one device; got {self.args.world_size} "
                f"processes and {self.args.n_gpu} visible GPUs. Start it without a launcher, and "
                "set CUDA_VISIBLE_DEVICES to one GPU."
            )

    def _check_ready(self, optimizer: DoGEOptimizer) -> None:
        """Refuse arguments that a ready optimizer would leave unheard."""
        if list(optimizer.domains) != self._doge_options["domains"]:
            raise ValueError(
                f"domains={self._doge_options['domains']} and the DoGEOptimizer's "
                f"{list(optimizer.domains)} differ. Leave domains= out, or name the same in the "
                "same order."
            )
        usual = signature(DoGETrainer.__init__).parameters
        unheard = [
            name
            for name, value in self._doge_options.items()
            if name != "domains" and value != usual[name].default
        ]
        if unheard:
            raise ValueError(
                f"{', '.join(unheard)} would not be heard: the optimizer is a DoGEOptimizer "
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
        # Trainer calls again when train() is called again; by then the optimizer may be wrapped
        # by accelerate too.
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
                **self._doge_options,
            )
        self.optimizer = self._doge = inner
        return inner

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of batches `{domain: batch}`; the class says what `train_dataset` may be."""
        if self.train_dataset is None:
            raise ValueError("DoGETrainer needs a train_dataset to train; got None.")
        options: dict[str, Any] = {
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory,
            "persistent_workers": self.args.dataloader_persistent_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            # Younger than the oldest transformers that is good enough.
            "multiprocessing_context": getattr(
                self.args, "dataloader_multiprocessing_context", None
            ),
        }
        dataset: Any = self.train_dataset
        if isinstance(dataset, Mapping) and _has_streams(dataset):
            dataset = StreamsInTurn(dataset, self.domain_column)
        if isinstance(dataset, IterableDataset):
            return _StreamLoader(self._grouped(dataset), batch_size=None, **options)
        if not isinstance(dataset, Mapping) and self._has_domain_column(dataset):
            dataset = split_by_domain(dataset, self.domain_column, self._rows())
        if isinstance(dataset, Mapping):
            dataset = DomainZip(
                {name: self._without_unused_columns(rows) for name, rows in dataset.items()}
            )
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(dataset),
            collate_fn=_PerDomain(self._collator(), self.domain_column),
            drop_last=self.args.dataloader_drop_last,
            **options,
        )
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    def _rows(self) -> tuple[str, ...]:
        """Names of all rows: the training domains and the measured targets."""
        if self._doge is not None:
            return self._doge.rows
        ready = self.optimizer
        if isinstance(ready, DoGEOptimizer):
            return ready.rows
        options = self._doge_options
        return Objective.of(options["domains"], options["target"]).rows

    def _has_domain_column(self, dataset: Any) -> bool:
        if (columns := getattr(dataset, "column_names", None)) is not None:
            return self.domain_column in columns
        return len(dataset) > 0 and _names_a_domain(dataset[0], self.domain_column)

    def _grouped(self, stream: IterableDataset[Any]) -> "DomainStream":
        return DomainStream(
            stream,
            self.domain_column,
            self._rows(),
            batch_size=self._train_batch_size,
            collate=self._collator(),
        )

    def _collator(self) -> Callable[[list[Any]], Batch]:
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return cast("Callable[[list[Any]], Batch]", collate)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={strategy!r} orders single examples, and a step of "
                'DoGETrainer has some of every domain. Pass "random" or "sequential".'
            )
        return super()._get_train_sampler(train_dataset)

    def _without_unused_columns(self, rows: Any) -> Any:
        if hasattr(rows, "column_names"):
            return self._remove_unused_columns(rows, description="training")
        return rows

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, and how many targets each domain has in them."""
        batches = list(islice(epoch_iterator, num_batches))
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return batches, None
        num_targets: dict[str, Tensor | int] = {}
        for batch in batches:
            for name, domain_batch in _check_batch(batch).items():
                if "labels" in domain_batch:
                    count = self._num_targets(domain_batch, device)
                    num_targets[name] = num_targets.get(name, 0) + count
        return batches, num_targets

    def _num_targets(self, batch: Batch, device: torch.device) -> Tensor:
        labels = cast(Tensor, batch["labels"])
        # A causal model shifts the labels, so the first of a row is nobody's target; a collator
        # that packs several texts into a row has shifted them itself.
        shifted = labels[..., 1:] if self._shifts_labels() else labels
        shifted = cast(Tensor, batch.get("shift_labels", shifted))
        # A domain whose tokens are all masked has loss zero, not 0/0.
        return shifted.ne(-100).sum().clamp(min=1).to(device)

    def _shifts_labels(self) -> bool:
        # Trainer asks `model.loss_type`, which some causal models (GPT-2) leave None; what the
        # model then computes is this function.
        model = self.accelerator.unwrap_model(self.model)
        is_causal = getattr(model, "loss_function", None) is ForCausalLMLoss
        config = getattr(model, "config", None)
        return is_causal and not getattr(config, "is_encoder_decoder", False)

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
        if callable(take_up := getattr(self.optimizer, "train", None)):
            # One that steps from other parameters than it is evaluated at; evaluation left those.
            take_up()
        left_out = set(self.doge.domains) - set(self.doge.domains_of_step)
        inputs = {
            name: batch for name, batch in _check_batch(inputs).items() if name not in left_out
        }
        inputs = self._prepare_inputs(inputs)
        if self._is_new_step:
            self.doge.zero_grad()
            self.domain_losses = {}
        self._empty_cache()
        counts = num_items_in_batch or {}
        if self._is_to_be_stacked(model, inputs):
            losses = self._backward_of_all(model, inputs, counts)
        else:
            losses = {
                name: self._backward(model, name, batch, counts.get(name))
                for name, batch in inputs.items()
            }
        for name, loss in losses.items():
            seen = self.domain_losses.get(name)
            self.domain_losses[name] = loss if seen is None else seen + loss
        # Trainer says here whether the optimizer will step after this micro-batch.
        self._is_new_step = bool(self.accelerator.sync_gradients)
        if self._is_new_step:
            scaler = self.accelerator.scaler
            self.doge.combine(grad_scale=1.0 if scaler is None else scaler.get_scale())
        trained = [losses[name] for name in self.doge.domains if name in losses]
        return torch.stack(trained or list(losses.values())).mean()

    def _empty_cache(self) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()

    def _backward(
        self, model: nn.Module, name: str, batch: Batch, num_targets: Tensor | None
    ) -> Tensor:
        """One domain's share of the loss, added to its row; detached."""
        with self.doge.domain(name):
            with self.compute_loss_context_manager():
                loss = cast(Tensor, self.compute_loss(model, batch, num_items_in_batch=num_targets))
            if not self._is_scaled_by_targets(num_targets):
                loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
        return loss.detach()

    def _backward_of_all(
        self, model: nn.Module, inputs: Mapping[str, Batch], num_targets: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The same for all domains in one forward and backward pass."""
        sizes = {name: len(batch["input_ids"]) for name, batch in inputs.items()}
        keys = next(iter(inputs.values()))
        joined = {key: torch.cat([batch[key] for batch in inputs.values()]) for key in keys}
        labels = joined.pop("labels")
        with self.doge.stacked(self.accelerator.unwrap_model(model), sizes):
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                losses_D = self._losses_of_all(model, joined, labels, sizes, num_targets or None)
            if not num_targets:
                losses_D = losses_D / self.current_gradient_accumulation_steps
            self.accelerator.backward(losses_D.sum())
        return dict(zip(sizes, losses_D.detach(), strict=True))

    def _losses_of_all(
        self,
        model: nn.Module,
        inputs: Batch,
        labels: Tensor,
        sizes: Mapping[str, int],
        num_targets: Mapping[str, Any] | None,
    ) -> Tensor:
        """[D] mean losses of the model's own kind; many logits one domain at a time."""
        unwrapped: Any = self.accelerator.unwrap_model(model)
        config = unwrapped.config
        most = MOST_LOGITS_BYTES.get(labels.device.type, MOST_LOGITS_BYTES_ELSEWHERE)
        if config.model_type in PLAIN_HEADS and 4 * labels.numel() * config.vocab_size > most:
            head = unwrapped.get_output_embeddings()
            hidden = unwrapped.base_model(**inputs, use_cache=False).last_hidden_state
            return linear_domain_losses(
                hidden, head.weight, labels, sizes, bias_V=head.bias, num_targets=num_targets
            )
        logits = model(**inputs, use_cache=False).logits
        return domain_losses(logits, labels, sizes, num_targets=num_targets)

    def _is_to_be_stacked(self, model: nn.Module, inputs: Mapping[str, Batch]) -> bool:
        """Whether `mode` means the stacked pass for this micro-batch.

        Raises:
            ValueError: it does, and cannot be.
        """
        if self.mode == "sequential":
            return False
        obstacle = self._obstacle_to_stacking(inputs)
        if self.mode == "stacked":
            if obstacle is not None:
                raise ValueError(f'mode="stacked" {obstacle} Pass mode="sequential" or "auto".')
            return True
        is_known = getattr(getattr(self.model, "config", None), "model_type", None) in STACKABLE
        if obstacle is not None or not is_known or self.args.torch_compile:
            return False
        tokens = [batch["input_ids"].numel() for batch in inputs.values()]
        most = MOST_TOKENS.get(self.args.device.type, MOST_TOKENS_ELSEWHERE)
        return bool(max(tokens) <= most and sum(tokens) <= MOST_TOKENS_TOGETHER)

    def _obstacle_to_stacking(self, inputs: Mapping[str, Batch]) -> str | None:
        """Why the domains of this micro-batch cannot share a pass; None if they can."""
        is_own_loss = type(self).compute_loss is Trainer.compute_loss
        if not (is_own_loss and self.compute_loss_func is None and self.label_smoother is None):
            return "takes the model's own loss, and another is set."
        if not self._shifts_labels():
            return "takes causal language models of transformers with their usual loss."
        keys = {frozenset(batch) for batch in inputs.values()}
        if len(keys) != 1 or not {"input_ids", "labels"} <= (found := next(iter(keys))):
            return "takes input_ids and labels of every domain; some domain lacks them."
        if not found <= STACKABLE_KEYS:
            return f"takes {', '.join(sorted(STACKABLE_KEYS))}; got {', '.join(sorted(found))}."
        lengths = {tuple(batch["input_ids"].shape[1:]) for batch in inputs.values()}
        if len(lengths) != 1:
            return f"takes sequences of one length; got {sorted(lengths)}."
        return None

    def _is_scaled_by_targets(self, num_targets: Tensor | None) -> bool:
        # Trainer's own rule; a subclass with its own compute_loss answers for itself.
        answer = getattr(self, "loss_is_scaled_for_ga", None)
        if answer is not None:
            return bool(answer)
        by_model = self.model_accepts_loss_kwargs and num_targets is not None
        return bool(by_model or self.compute_loss_func is not None)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.doge.rule.max_grad_norm is None:
            # An optimizer that came ready and leaves it to the loop.
            return cast(Tensor, super()._clip_grad_norm(model))  # type: ignore[no-untyped-call]
        # combine() has cut the gradient already: Trainer only wants to know the norm.
        return self._combined_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        # Known from the Gram matrix; Trainer would read every gradient again.
        return self._combined_norm()

    def _combined_norm(self) -> Tensor:
        last = self.doge.last
        assert last is not None
        return last.combined_norm

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Trainer's estimate, for the tokens of all domains."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = sum(batch[name].numel() for batch in inputs.values() if name in batch)
        # One call: it counts the parameters each time, and only asks how many tokens there are.
        return super().floating_point_ops({name: torch.empty(tokens, device="meta")})

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        for batch in inputs.values():
            super()._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, with the losses and weights of the domains beside the training loss."""
        if "loss" in logs and self._doge is not None:
            logs |= {f"loss/{name}": float(loss) for name, loss in self.domain_losses.items()}
            for kind, alpha_K in (("alpha", self.doge.alpha), ("alpha_mean", self.doge.alpha_mean)):
                pairs = zip(self.doge.domains, alpha_K.tolist(), strict=True)
                logs |= {f"{kind}/{name}": weight for name, weight in pairs}
        super().log(logs, *args, **kwargs)


class DomainZip(Dataset[dict[str, Any]]):
    """Datasets by domain as one dataset whose examples are `{domain: example}`.

    Example i holds example i mod n_d of every domain d, so the length is the longest domain's
    and the shorter ones repeat.

    Raises:
        ValueError: there is no domain, or one is empty.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        empty = [name for name, rows in datasets.items() if len(rows) == 0]
        if empty or not datasets:
            raise ValueError(
                "A mapping of training datasets needs at least one example for every domain; got "
                f"{list(datasets)} of which {empty} hold none. Leave the empty ones out of both "
                "train_dataset and domains."
            )
        self.datasets = dict(datasets)

    def __len__(self) -> int:
        return max(len(rows) for rows in self.datasets.values())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: rows[index % len(rows)] for name, rows in self.datasets.items()}


def split_by_domain(dataset: Any, column: str, rows: Sequence[str]) -> dict[str, Any]:
    """The examples of a mixed dataset by domain, in their order; nothing is copied.

    Args:
        dataset: a `datasets.Dataset` with the column, or a torch dataset whose examples have the
            key; of the latter every example is looked at.
        column: names an example's domain; text, or a class label.
        rows: the domains that there must be, no more and no less.

    Returns:
        {domain: dataset}, in the order of `rows`.

    Raises:
        ValueError: some row has no example, or some examples belong to no row.
    """
    number_of: dict[str, int] = {}
    numbers_E = np.fromiter(
        (number_of.setdefault(name, len(number_of)) for name in _domains_of(dataset, column)),
        dtype=np.int32,
    )
    if number_of.keys() != set(rows):
        raise ValueError(
            f"column {column!r} must name {list(rows)}, the domains and targets, and nothing else; "
            f"it lacks {sorted(set(rows) - number_of.keys())} and names "
            f"{sorted(number_of.keys() - set(rows))} besides. Name the latter in domains= (trained "
            "on) or target= (measured only), or filter them out of the dataset."
        )
    indices = {name: np.flatnonzero(numbers_E == number_of[name]) for name in rows}
    if hasattr(dataset, "select"):
        return {name: dataset.select(chosen) for name, chosen in indices.items()}
    return {name: Subset(dataset, chosen.tolist()) for name, chosen in indices.items()}


def _domains_of(dataset: Any, column: str) -> Iterator[str]:
    """The domain of every example."""
    if not hasattr(dataset, "select_columns"):
        yield from (str(dataset[index][column]) for index in range(len(dataset)))
        return
    # Only this column is read: the tokens beside it may be large.
    narrow = dataset.select_columns([column]).with_format(None)
    to_text = getattr(dataset.features[column], "int2str", str)
    for first in range(0, len(narrow), ROWS_AT_ONCE):
        yield from map(to_text, narrow[first : first + ROWS_AT_ONCE][column])


class StreamsInTurn(IterableDataset[dict[str, Any]]):
    """Streams by domain as one of examples that name theirs: one of each, in turn.

    It ends with the longest; those that end sooner start again.

    Args:
        streams: {domain: iterable dataset of examples}.
        column: the key under which an example names its domain.

    Raises:
        ValueError: a stream holds nothing.
    """

    def __init__(self, streams: Mapping[str, IterableDataset[Any]], column: str) -> None:
        self.streams = dict(streams)
        self.column = column

    def set_epoch(self, epoch: int) -> None:
        """Tell the streams which pass is next: those that shuffle do it anew."""
        for stream in self.streams.values():
            _set_epoch(stream, epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass over the longest stream."""
        running = {name: iter(stream) for name, stream in self.streams.items()}
        unfinished = set(running)
        while True:
            for name, stream in self.streams.items():
                example = next(running[name], None)
                if example is None:
                    unfinished.discard(name)
                    if not unfinished:
                        return
                    running[name] = iter(stream)
                    example = next(running[name], None)
                if example is None:
                    raise ValueError(
                        f"the stream of {name!r} holds no example for this loader. Leave the "
                        "domain out, or use no more dataloader_num_workers than it has shards."
                    )
                yield {**example, self.column: name}


def _has_streams(datasets: Mapping[str, Any]) -> bool:
    streams = [name for name, rows in datasets.items() if isinstance(rows, IterableDataset)]
    if streams and len(streams) < len(datasets):
        raise ValueError(
            f"train_dataset must map to datasets or to streams, not to both; got streams for "
            f"{streams} of {list(datasets)}. Dataset.to_iterable_dataset() makes a stream of one."
        )
    return bool(streams)


class DomainStream(IterableDataset[dict[str, Batch]]):
    """A stream of examples that name their domain as one of batches `{domain: batch}`.

    The examples of a domain wait until every row has `batch_size` of them; what a domain has
    beyond `WAITING_STEPS` of these is passed over. At the end of the stream an incomplete batch is
    left out. Batches that are by domain already pass as they are.

    Args:
        stream: examples with the key `column`, or finished batches `{domain: batch}`.
        column: the key.
        rows: the domains that a batch has.
        batch_size: examples of every row in a batch.
        collate: makes a batch of examples.

    Raises:
        ValueError: an example names no row, or a row does not turn up.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        column: str,
        rows: Sequence[str],
        *,
        batch_size: int,
        collate: Callable[[list[Any]], Batch],
    ) -> None:
        self.stream = stream
        self.column = column
        self.rows = tuple(rows)
        self.batch_size = batch_size
        self.collate = collate

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which pass is next: one that shuffles does it anew."""
        _set_epoch(self.stream, epoch)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        """One pass over the stream."""
        waiting: dict[str, list[Any]] = {name: [] for name in self.rows}
        num_waited, num_batches = 0, 0
        for example in self.stream:
            if not _names_a_domain(example, self.column):
                yield example
                num_batches += 1
                continue
            self._put(example, waiting)
            num_waited += 1
            if all(len(examples) >= self.batch_size for examples in waiting.values()):
                yield {name: self._take(examples) for name, examples in waiting.items()}
                num_waited, num_batches = 0, num_batches + 1
            elif num_waited >= MOST_EXAMPLES_WITHOUT:
                self._refuse(waiting, num_waited)
        if num_waited and not num_batches:
            self._refuse(waiting, num_waited)

    def _put(self, example: Mapping[str, Any], waiting: dict[str, list[Any]]) -> None:
        name = example[self.column]
        if name not in waiting:
            raise ValueError(
                f"an example's {self.column!r} is {name!r}, which is none of {list(self.rows)}. "
                "Name it in domains= (trained on) or target= (measured only), or filter it out of "
                "the stream."
            )
        if len(waiting[name]) < WAITING_STEPS * self.batch_size:
            waiting[name].append({key: example[key] for key in example if key != self.column})

    def _take(self, examples: list[Any]) -> Batch:
        taken, examples[:] = examples[: self.batch_size], examples[self.batch_size :]
        return self.collate(taken)

    def _refuse(self, waiting: Mapping[str, list[Any]], count: int) -> None:
        lacking = [name for name, rows in waiting.items() if len(rows) < self.batch_size]
        raise ValueError(
            f"a step takes {self.batch_size} examples of every domain, and {count} examples of the "
            f"stream did not have them for {lacking}. Leave out the domains it lacks, shuffle the "
            "stream, or pass train_dataset as a mapping from domains to datasets."
        )


class _StreamLoader(DataLoader[Any]):
    """Hands on what Trainer says to a loader before every pass."""

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(self.dataset, epoch)


def _set_epoch(stream: Any, epoch: int) -> None:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)


class _PerDomain:
    """Collates examples `{domain: example}` into `{domain: batch}`."""

    def __init__(self, collate: Callable[[list[Any]], Batch], column: str) -> None:
        self.collate = collate
        self.column = column

    def __call__(self, examples: list[Mapping[str, Any]]) -> dict[str, Batch]:
        return {
            name: self.collate([self._without_name(example[name]) for example in examples])
            for name in _check_batch(examples[0])
        }

    def _without_name(self, example: Any) -> Any:
        if not _names_a_domain(example, self.column):
            return example
        return {key: example[key] for key in example if key != self.column}


def _names_a_domain(example: Any, column: str) -> bool:
    """Whether it is an example with its domain's name; what is by domain holds mappings there."""
    return isinstance(example, Mapping) and isinstance(example.get(column), str)


def _check_batch(batch: Any) -> dict[str, Any]:
    """The batch, if it is one by domain."""
    if isinstance(batch, Mapping) and all(isinstance(rows, Mapping) for rows in batch.values()):
        return cast("dict[str, Any]", batch)
    found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        'DoGETrainer takes batches by domain, {"arxiv": {"input_ids": ..., "labels": ...}, ...}; '
        f"got {found}. Pass a train_dataset with a column that names the domain "
        "(domain_column=), a mapping from domains to datasets, or an iterable dataset of such "
        "batches."
    )


def _name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Write `param_names` into the groups, as torch does when given named parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        if "param_names" not in group and None not in names:
            group["param_names"] = names
