"""The parts that stages share: where the text is, which model, how it is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from doge_fast.pipeline.config.ranges import (
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Range,
    Seed,
)


@dataclass(frozen=True)
class CorpusConfig:
    """Where the text comes from and how it becomes blocks of tokens."""

    data: str = "installed"
    """A directory (one folder or file per domain), a file or Hub id with `domain_column`, or
    "installed": seven domains of text found in this Python environment."""
    domains: tuple[str, ...] = ()
    """Domains to train on, in this order. Empty: all domains in `data` except the targets."""
    text_column: str = "text"
    """The column of parquet and jsonl files that holds a document."""
    domain_column: str | None = None
    """For a single file or Hub data set: the column that names each row's domain (dots reach into
    structs)."""
    tokenizer: str = "train"
    """A folder or Hub id that AutoTokenizer opens, or "train": a byte-level BPE on this corpus."""
    vocab_size: Count = 4096
    """Vocabulary size of a trained tokenizer."""
    block_size: Annotated[int, Range(2)] = 128
    """Tokens in a block; every training example is one block."""
    validation_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.05
    """Share of the documents to hold out if the data has no validation split."""
    max_tokens_per_domain: Count | None = None
    """Stop packing a domain after this many tokens; None: pack all of it."""
    streaming: bool = False
    """For a large Hub data set: stop reading when every domain has `max_tokens_per_domain`. With
    `domain_column`, `domains` is required too."""
    stream_seed: Seed = 0
    """With `streaming`: decides in which order the data set's files are read."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory, ~/.cache on Linux."""


@dataclass(frozen=True)
class ModelConfig:
    """Which causal language model is trained."""

    model: str = "tiny"
    """A size of the family (tiny, mini, small, 60M, 82M, 124M, 210M, 684M), or a folder or Hub id
    whose config.json AutoConfig opens."""
    pretrained: bool = False
    """Load the weights of `model` too (continued pretraining) instead of fresh ones."""
    num_layers: Count | None = None
    """Overrides the size's number of layers."""
    embed_dim: Count | None = None
    """Overrides the size's embedding width."""
    num_heads: Count | None = None
    """Overrides the size's number of attention heads."""


@dataclass(frozen=True)
class TrainingConfig:
    """How a stage trains its model."""

    steps: Count = 300
    """Optimizer steps."""
    learning_rate: Positive = 5e-4
    """Peak learning rate; the paper's for all sizes below 684M (appendix, model-archs)."""
    min_learning_rate: PositiveOrZero = 1e-4
    """Learning rate at the end of the cosine schedule."""
    warmup_steps: CountOrZero | None = None
    """Steps of linear warm-up; None: a twentieth of the steps."""
    weight_decay: PositiveOrZero = 0.01
    """AdamW's weight decay, on matrices only; the paper's."""
    max_grad_norm: Positive = 1.0
    """Clip the gradient that moves the model to this norm."""
    max_skipped_steps: Count = 20
    """End the run as diverged after this many steps in a row without a finite gradient and loss;
    a tenth of all steps ends it too."""
    seed: Seed = 0
    """Seed of the model initialisation and of the order of the data."""
    eval_every: Count | None = None
    """Steps between evaluations on held-out blocks; None: at the end only."""
    eval_blocks: Count = 256
    """Held-out blocks per domain in those evaluations."""
    save_every: CountOrZero | None = None
    """Steps between checkpoints, from which a killed run resumes; None: ten in a run; 0: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast, with float32 master weights."""
    device: str = "auto"
    """auto (the first available of cuda, xpu, mps and cpu), cpu, cuda, xpu or mps. proxy, doremi
    and select need float64, which mps does not have."""
    compile: bool = False
    """torch.compile the model."""
    report_to: tuple[str, ...] = ()
    """Trackers that also receive the lines of metrics.jsonl, by Trainer's names: tensorboard,
    wandb, trackio, mlflow, ... Empty: none; nothing leaves the machine."""


@dataclass(frozen=True)
class TasksConfig:
    """Tasks of lm-eval that models are scored on."""

    tasks: tuple[str, ...] = ()
    """Multiple-choice tasks of lm-eval, separated by commas or spaces; the paper's are
    copa,sciq,logiqa,piqa,wic,winogrande."""
    shots: CountOrZero = 5
    """Answered examples in the prompt before every question."""
    task_data: Path | None = None
    """A directory with TASK/train.jsonl, from which the shots are drawn, and TASK/validation.jsonl,
    which is scored; None: the data sets that lm-eval names on the Hub."""
    task_limit: Count | None = None
    """Score only the first documents of every task, this many; None: all."""
    fewshot_seed: Seed = 1234
    """Seed that draws the shots; lm-eval's own default."""
