"""The stages that train (a proxy, a base model, DoReMi, a selection), and the parts they share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from doge_fast.pipeline.config.ranges import (
    Count,
    CountOrZero,
    Device,
    Positive,
    PositiveOrZero,
    Range,
    Seed,
    Share,
)
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM


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
    vocab_size: Annotated[int, Range(1, 2**24)] = 4096
    """Vocabulary size of a trained tokenizer."""
    block_size: Annotated[int, Range(2, 2**24)] = 128
    """Tokens in a block; every training example is one block."""
    validation_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.05
    """Share of the documents to hold out if the data has no validation split."""
    max_tokens_per_domain: Count | None = None
    """Stop packing a domain after this many tokens, and reading when all domains have them; None:
    pack all. Of a Hub data set with `domain_column` name the `domains` too, else all is read to
    find them."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory, ~/.cache on Linux."""


@dataclass(frozen=True)
class ModelConfig:
    """Which causal language model is trained."""

    model: str = "tiny"
    """A size of the family (micro, tiny, mini, small, 60M, 82M, 124M, 210M, 684M), or the
    config.json that AutoConfig opens: a file, a folder or a Hub id."""
    pretrained: bool = False
    """Load the weights of `model` too (continued pretraining) instead of fresh ones."""


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
    device: Device = "auto"
    """auto: a GPU if there is one. cuda: the first that CUDA_VISIBLE_DEVICES leaves."""
    compile: bool = False
    """torch.compile the model."""


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


@dataclass(frozen=True)
class _Stage:
    """What every stage that trains is told."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass(frozen=True)
class ProxyConfig(_Stage):
    """Stage one: learn the domain weights with a proxy model. The same command resumes."""

    main: ClassVar = ("out", "data", "target", "model", "steps", "tokenizer", "dry_run")
    examples: ClassVar = (
        "--data corpus --out runs/proxy",
        "--data corpus --target wiki --out runs/wiki   # wiki is held out",
        "--data owner/name --domain-column meta.source --out runs/hub",
    )
    stage: ClassVar[Literal["proxy"]] = "proxy"

    target: tuple[str, ...] = ("universal",)
    """universal (the loss on all training domains); mix (held-out blocks of all training domains);
    or held-out domains, each NAME or NAME=WEIGHT."""
    sequences_per_domain: Count = 4
    """Blocks of every domain in every step."""
    mu: Positive | None = None
    """Bregman coefficient: in a step the logarithms of the weights move by lr W / mu, so a larger
    mu makes slower weights. None: 20 times the peak learning rate (0.01 at 5e-4), times (T + 1) / 2
    where the weights of the targets sum to T, which is K for universal."""
    score: Literal["paper", "published"] = "paper"
    """paper: the score W as in the paper. published: as in the published code, W over the mean norm
    of the domains' gradients, clipped to [0, 5]."""
    domain_max_grad_norm: PositiveOrZero | None = DOMAIN_MAX_GRAD_NORM
    """Clip each domain's gradient to this norm before scoring (published configs: 5.0, 1.0); 0 or
    None: do not clip, as in the paper's text. Without it a few steps with large gradients may
    decide everything, because W grows with the square of the gradients."""
    smoothing: Share = 0.0
    """Share of uniform weights that is mixed in at every step."""
    selection: Path | None = None
    """A JSON list of parameter names; W is computed from the gradients of these only. None: all."""
    mode: Literal["auto", "sequential", "stacked"] = "auto"
    """sequential: a backward pass per domain. stacked: one for all domains. auto: whichever suits
    the batch (see DoGETrainer)."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Time a few steps, and print what the run would read, train and write, and the memory and time
    that it would take. Writes nothing but the cache of tokenised text."""

    @property
    def targets(self) -> tuple[str, ...]:
        """What `target` names, without weights: as `load_corpus` takes it."""
        return tuple(item.partition("=")[0] for item in self.target)


@dataclass(frozen=True)
class BaseConfig(_Stage):
    """Stage two: train a model at given domain weights. The same command resumes."""

    main: ClassVar = ("out", "data", "weights", "model", "steps", "tokenizer", "dry_run")
    examples: ClassVar = (
        "--data corpus --weights runs/proxy --out runs/learned",
        "--data corpus --weights uniform --out runs/uniform",
    )
    stage: ClassVar[Literal["base"]] = "base"

    weights: str = "uniform"
    """uniform; natural (each domain's share of the tokens); a weights.json; the run directory of a
    proxy or DoReMi; or the weights themselves, books=0.6,code=0.4."""
    stages: Count = 1
    """Stages of a curriculum, with a proxy's run directory: the proxy's run and this one are
    divided into this many equal parts, and each part here uses the proxy's mean weights in its own.
    1: the proxy's average throughout."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on, as in the proxy whose weights are used."""
    batch_size: Count = 28
    """Blocks per step, over all domains."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Time a few steps, and print what the run would read, train and write, and the memory and time
    that it would take. Writes nothing but the cache of tokenised text."""


@dataclass(frozen=True)
class DoReMiConfig(_Stage):
    """The DoReMi baseline: learn the domain weights by loss in excess of a reference model's."""

    main: ClassVar = ("reference", "out", "data", "model", "steps", "tokenizer", "variant")
    examples: ClassVar = ("--data corpus --reference runs/uniform --out runs/doremi",)
    stage: ClassVar[Literal["doremi"]] = "doremi"

    reference: Path = field(kw_only=True)
    """Run directory of a complete base run. Its model is the reference model. Its weights are those
    that batches are drawn at and that the learned weights start from."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on, as in the reference run."""
    variant: Literal["doremi", "doge"] = "doremi"
    """doremi: clip the excess loss at zero for each token, as DoReMi's authors do. doge: clip each
    domain's mean, as the baseline in DoGE's published code does."""
    step_size: Positive | None = None
    """Step size of the weights' exponentiated gradient; None: the variant's, 1 (doremi) or 0.1
    (doge)."""
    smoothing: Share | None = None
    """Share of uniform weights that is mixed in at every step; None: the variant's, 1e-4 for doremi
    (the authors' code; their paper says 1e-3) and 0 for doge."""
    batch_size: Count = 28
    """Blocks per step, over all domains."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""


@dataclass(frozen=True)
class SelectConfig(_Stage):
    """Score parameters by cancellation effect and select some, for `proxy --selection`."""

    main: ClassVar = ("out", "data", "model", "steps", "tokenizer", "strategies")
    examples: ClassVar = ("--data corpus --strategies low30 high10 --out runs/select",)
    stage: ClassVar[Literal["select"]] = "select"

    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=1000))
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """lowN or highN: select the N parameters with the lowest or highest scores."""
    reading: Literal[
        "norms-over-change", "sum-over-change", "change-over-sum", "change-over-norms"
    ] = "norms-over-change"
    """How the score is computed. norms-over-change (the paper's words): the sum of the examples'
    gradient norms over the norm of the weight change. sum-over-change: the norm of the gradients'
    sum over it. change-over-sum (the paper's formula) and change-over-norms: the inverses. Every
    run measures all four; this one is ranked."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on, as in the proxy."""
    batch_size: Count = 28
    """Blocks per step, equally many of each domain."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""


StageConfig = ProxyConfig | BaseConfig | DoReMiConfig | SelectConfig
"""What a stage that trains is told."""
