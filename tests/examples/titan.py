"""What the how-to uses of torchtitan 0.3.0, small and on a CPU, for tests that run without it.

Names, arguments and sizes are those of its `config/configurable.py`, `components/dataloader.py`,
`hf_datasets/text_datasets.py` and `trainer.py`. Where it is installed, `test_examples.py` lets both
make the same batches.
"""

import dataclasses
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

Batch = tuple[dict[str, Any], torch.Tensor]


class Configurable:
    """A class that its own `Config` builds."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            if "__slots__" not in cls.Config.__dict__:
                raise TypeError(f"{cls.__name__}.Config must use @dataclass(slots=True)")
            cls.Config._owner = cls


@dataclasses.dataclass
class DatasetConfig:
    path: str
    loader: Callable[[str], Any]
    sample_processor: Callable[[Any], str]


class BaseDataLoader(Stateful, Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset: str = ""
        dataset_path: str | None = None


class HuggingFaceTextDataLoader(BaseDataLoader):
    """Batches of documents that fill a sequence each: tokens, their positions, nothing else."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = "c4_test"

    datasets: ClassVar[dict[str, DatasetConfig]] = {}

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        source = self.datasets[config.dataset.lower()]
        rows = source.loader(config.dataset_path or source.path)
        self.rows = split_dataset_by_node(rows, dp_rank, dp_world_size)
        self.text_of, self.tokenizer = source.sample_processor, tokenizer
        self.seq_len, self.local_batch_size, self.num_given = seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[Batch]:
        samples = itertools.islice(self._samples(), self.num_given * self.local_batch_size, None)
        while True:
            self.num_given += 1
            tokens = torch.stack([*itertools.islice(samples, self.local_batch_size)])
            positions = torch.arange(self.seq_len).expand(len(tokens), -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def _samples(self) -> Iterator[torch.Tensor]:
        # torchtitan shuffles from the second epoch on.
        for row in itertools.chain.from_iterable(itertools.repeat(self.rows)):
            tokens = self.tokenizer.encode(self.text_of(row), add_bos=True, add_eos=True)
            assert len(tokens) == self.seq_len + 1
            yield torch.tensor(tokens)

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_given = state_dict["num_given"]


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainingConfig:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    max_norm: float = 1.0
    steps: int = 10000
    disable_cuda_graphs: bool = False


class OptimizersContainer:
    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


class Trainer(Configurable):
    """Every rank holds a shard, and takes batches of its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Any = None
        tokenizer: Any = None
        dataloader: BaseDataLoader.Config = dataclasses.field(
            default_factory=HuggingFaceTextDataLoader.Config
        )
        training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, torch.device("cpu")
        is_group = dist.is_initialized()
        degree, rank = (dist.get_world_size(), dist.get_rank()) if is_group else (1, 0)
        self.parallel_dims = types.SimpleNamespace(
            dp_enabled=is_group, get_mesh=lambda name: {"batch": dist.group.WORLD}[name]
        )
        training = config.training
        self.gradient_accumulation_steps, rest = divmod(
            training.global_batch_size, training.local_batch_size * degree
        )
        assert self.gradient_accumulation_steps > 0
        assert rest == 0

        model = config.model_spec()
        if is_group:
            fully_shard(model)
            model.set_gradient_divide_factor(1.0)
            # gloo has no other way not to divide.
            model.set_force_sum_reduction_for_comms(True)
        self.model_parts = [model]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
        self.optimizers = OptimizersContainer([inner])
        self.lr_schedulers = types.SimpleNamespace(
            step=schedule.step, get_metrics=lambda: {"lr/SGD": schedule.get_last_lr()[0]}
        )
        self.logged: list[Any] = []
        self.metrics_processor = types.SimpleNamespace(
            should_log=lambda step: True,
            log=lambda *args, extra_metrics: self.logged.append((args, extra_metrics)),
        )
        self.step = 0
        self.dataloader = config.dataloader.build(
            dp_world_size=degree,
            dp_rank=rank,
            tokenizer=config.tokenizer,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            snapshot_every_n_steps=None,
        )
        self.checkpointer = types.SimpleNamespace(maybe_wait_for_staging=lambda: None)

    def forward_backward_step(
        self, *, input_dict: Any, labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        # What is not the input is an argument of the model.
        others = {key: value for key, value in input_dict.items() if key != "input"}
        logits = self.model_parts[0](input_dict["input"], **others).flatten(0, 1)
        loss = cross_entropy(logits, labels.flatten(), reduction="sum") / global_valid_tokens
        loss.backward()
        return loss

    def train(self) -> None:
        data_iterator = iter(self.dataloader)
        while self.step < self.config.training.steps:
            self.step += 1
            # The text has its own.
            self.train_step(data_iterator)


def _sum_over(value: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(value, group=group)
    return value


def stand_in(patch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let programs import modules that have these names, and the packages in which they are."""
    for name, names in modules.items():
        for package in itertools.accumulate(name.split("."), "{}.{}".format):
            if package not in modules:
                patch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        vars(module).update(names)
        patch.setitem(sys.modules, name, module)


def put_in_place(patch: pytest.MonkeyPatch, debugmodel: Callable[[], Trainer.Config]) -> None:
    """Let `import torchtitan...` find these, and `torchrun` be what has started this process."""
    datasets: dict[str, DatasetConfig] = {}
    patch.setattr(HuggingFaceTextDataLoader, "datasets", datasets)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    patch.setitem(os.environ, "WORLD_SIZE", str(num_ranks))
    modules: dict[str, dict[str, Any]] = {
        "components.dataloader": {"BaseDataLoader": BaseDataLoader},
        "components.loss": {"IGNORE_INDEX": -100},
        "distributed.utils": {"dist_sum_tensor": _sum_over},
        "hf_datasets": {"DatasetConfig": DatasetConfig},
        "hf_datasets.text_datasets": {
            "DATASETS": datasets,
            "HuggingFaceTextDataLoader": HuggingFaceTextDataLoader,
        },
        "models.llama3.config_registry": {"llama3_debugmodel": debugmodel},
        "trainer": {"Trainer": Trainer},
    }
    stand_in(patch, {f"torchtitan.{name}": names for name, names in modules.items()})
