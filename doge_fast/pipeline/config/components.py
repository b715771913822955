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
    """Domains to train on, in this order. Empty: all that `data` holds, less the targets."""
    text_column: str = "text"
    """The column of parquet and jsonl files that holds a document."""
    domain_column: str | None = None
    """For a single file or Hub data set: the column (dots reach into structs) naming the domain."""
    tokenizer: str = "train"
    """A folder or Hub id that AutoTokenizer opens, or "train": a byte-level BPE on this corpus."""
    vocab_size: Count = 4096
    """Entries of a trained tokenizer."""
    block_size: Annotated[int, Range(2)] = 128
    """Tokens in a block; every training example is one block."""
    validation_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.05
    """Share of documents held out where the data brings no validation split."""
    max_tokens_per_domain: Count | None = None
    """Stop packing a domain there; None: all of it."""
    streaming: bool = False
    """Of a large Hub data set, read only until every domain holds `max_tokens_per_domain`. With
    `domain_column`, name the `domains`."""
    stream_seed: Seed = 0
    """With `streaming`: the order in which the data set's files are read."""
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
    """What both stages tell the Trainer."""

    steps: Count = 300
    """Optimizer steps."""
    learning_rate: Positive = 5e-4
    """Peak; the paper's for all sizes below 684M (appendix, model-archs)."""
    min_learning_rate: PositiveOrZero = 1e-4
    """End of the cosine."""
    warmup_steps: CountOrZero | None = None
    """Linear warm-up; None: a twentieth of the steps."""
    weight_decay: PositiveOrZero = 0.01
    """AdamW's, on matrices; the paper's."""
    max_grad_norm: Positive = 1.0
    """Norm to which the gradient that moves the model is cut."""
    max_skipped_steps: Count = 20
    """So many steps in a row that move nothing, for a gradient or a loss is not finite, end the run
    as diverged; so does a tenth of all steps."""
    seed: Seed = 0
    """Model initialisation and the order of the data."""
    eval_every: Count | None = None
    """Steps between evaluations on held-out blocks; None: at the end only."""
    eval_blocks: Count = 256
    """Held-out blocks per domain in those evaluations."""
    save_every: CountOrZero | None = None
    """Steps between checkpoints that a killed run resumes from; None: ten in a run; 0: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast, with float32 master weights."""
    device: str = "auto"
    """auto (the first of cuda, xpu, mps and cpu that is there), cpu, cuda, xpu or mps; mps has no
    float64, which proxy, doremi and select need."""
    compile: bool = False
    """torch.compile the model."""
    report_to: tuple[str, ...] = ()
    """Trackers that are told what metrics.jsonl is told, by Trainer's names for them: tensorboard,
    wandb, trackio, mlflow, ... Empty: none; nothing leaves the machine."""


@dataclass(frozen=True)
class TasksConfig:
    """Tasks of lm-eval that models are scored on."""

    tasks: tuple[str, ...] = ()
    """Multiple-choice tasks of lm-eval, between commas or spaces; the paper's are
    copa,sciq,logiqa,piqa,wic,winogrande."""
    shots: CountOrZero = 5
    """Answered examples before every question."""
    task_data: Path | None = None
    """A directory with TASK/train.jsonl, which the shots are drawn from, and TASK/validation.jsonl,
    which is scored; None: the data sets that lm-eval names on the Hub."""
    task_limit: Count | None = None
    """Score only so many documents of every task, the first ones; None: all."""
    fewshot_seed: Seed = 1234
    """Of the draw of the shots; lm-eval's own default."""
