"""One frozen dataclass per stage: what a stage is told, and what its run directory repeats.

The command line is made from these classes: a field is a flag, its docstring the help text.
They import nothing, so a configuration can be read where the pipeline is not installed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from doge_fast.generalization import DOMAIN_MAX_GRAD_NORM


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
    vocab_size: int = 4096
    """Entries of a trained tokenizer."""
    block_size: int = 128
    """Tokens in a block; every training example is one block."""
    validation_fraction: float = 0.05
    """Share of documents held out where the data brings no validation split."""
    max_tokens_per_domain: int | None = None
    """Stop packing a domain there; None: all of it."""
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
    num_layers: int | None = None
    """Overrides the size's number of layers."""
    embed_dim: int | None = None
    """Overrides the size's embedding width."""
    num_heads: int | None = None
    """Overrides the size's number of attention heads."""


@dataclass(frozen=True)
class TrainingConfig:
    """What both stages tell the Trainer."""

    steps: int = 300
    """Optimizer steps."""
    learning_rate: float = 5e-4
    """Peak; the paper's for all sizes below 684M (appendix, model-archs)."""
    min_learning_rate: float = 1e-4
    """End of the cosine."""
    warmup_steps: int | None = None
    """Linear warm-up; None: a twentieth of the steps."""
    weight_decay: float = 0.01
    """AdamW's, on matrices; the paper's."""
    max_grad_norm: float = 1.0
    """Norm to which the gradient that moves the model is cut."""
    seed: int = 0
    """Model initialisation and the order of the data."""
    eval_every: int | None = None
    """Steps between evaluations on held-out blocks; None: at the end only."""
    eval_blocks: int = 256
    """Held-out blocks per domain in those evaluations."""
    save_every: int | None = None
    """Steps between checkpoints that a killed run resumes from; None: ten in a run; 0: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast, with float32 master weights."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    compile: bool = False
    """torch.compile the model."""
    report_to: tuple[str, ...] = ()
    """Trackers that are told what metrics.jsonl is told, by Trainer's names for them: tensorboard,
    wandb, trackio, mlflow, ... Empty: none; nothing leaves the machine."""


@dataclass(frozen=True)
class ProxyConfig:
    """Stage one: learn the domain weights with a proxy model."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    target: tuple[str, ...] = ("universal",)
    """universal; mix; or held-out domains, each NAME or NAME=WEIGHT."""
    sequences_per_domain: int = 4
    """Blocks of every domain in every step."""
    mu: float | None = None
    """Bregman coefficient; larger: slower weights, whose logarithms move by lr W / mu. None: 20
    times the peak learning rate (0.01 at 5e-4); and (T + 1) / 2 times that where the weights of the
    targets sum to T, which is K for universal."""
    score: Literal["paper", "published"] = "paper"
    """W as in the paper, or the published code's: over the mean row norm, cut to [0, 5]."""
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    """Cut each domain's gradient to this norm before scoring (published configs: 5.0, 1.0); 0 or
    None: do not, as in the paper's text. Uncut, W grows with the square of the gradients, and a few
    steps with large ones may decide everything."""
    smoothing: float = 0.0
    """Mixture of the weights with uniform at every step."""
    init_weights: Path | None = None
    """A weights.json, or a run directory that holds one: domains of the same name begin with its
    weights, relative to each other. None: uniform."""
    split: tuple[str, ...] = ()
    """OLD=NEW,NEW: with init_weights, domains that were divided since; parts share the weight by
    their tokens."""
    added_share: str = "uniform"
    """With init_weights, of each domain that the file does not have: uniform (1/K), natural (its
    share of the tokens), or a number."""
    average_from: float = 0.0
    """Share of the steps whose weights the average leaves out: an early phase that a long training
    soon forgets. What is left lies farther from uniform, where weights begin. 0: the paper's mean
    over all steps."""
    selection: Path | None = None
    """A JSON list of parameter names whose columns enter W; None: all."""
    mode: Literal["auto", "sequential", "stacked"] = "auto"
    """A backward pass per domain, one for all, or whichever suits the batch (see DoGETrainer)."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""


@dataclass(frozen=True)
class BaseConfig:
    """Stage two: train a model at given domain weights."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    weights: str = "uniform"
    """uniform; natural (by tokens); a weights.json; or the run directory of a proxy or DoReMi."""
    stages: int = 1
    """Of a curriculum: with a proxy's run directory, its mean weights in so many equal parts of
    its run, each in the like part of this one. 1: its average throughout."""
    targets: tuple[str, ...] = ()
    """Domains that are measured and never trained on, as in the proxy whose weights are used."""
    batch_size: int = 28
    """Blocks in every step, over all domains."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""


@dataclass(frozen=True)
class DoReMiConfig:
    """The DoReMi baseline: learn the domain weights by loss in excess of a reference model's."""

    out: Path
    """The run directory."""
    reference: Path
    """Run directory of a finished base run: its model is the reference, its weights are those that
    batches are drawn at and that the learned ones start from."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    targets: tuple[str, ...] = ()
    """Domains that are measured and never trained on, as in the reference run."""
    variant: Literal["doremi", "doge"] = "doremi"
    """Excess clipped at zero token by token, as DoReMi's authors do, or domain mean by domain mean,
    as the baseline in DoGE's published code does."""
    step_size: float | None = None
    """Of the weights' exponentiated gradient; None: the variant's, 1 (doremi) or 0.1 (doge)."""
    smoothing: float | None = None
    """Mixture of the weights with uniform at every step; None: the variant's, 1e-4 for doremi (the
    authors' code; their paper says 1e-3) and 0 for doge."""
    batch_size: int = 28
    """Blocks in every step, over all domains."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""


@dataclass(frozen=True)
class SelectConfig:
    """Score parameters by cancellation effect and select some, for `proxy --selection`."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=1000))
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """lowN or highN: the N parameters with the lowest or highest scores. A finished run may be
    asked for others."""
    reading: Literal[
        "norms-over-change", "sum-over-change", "change-over-sum", "change-over-norms"
    ] = "norms-over-change"
    """The score: sum of the examples' gradient norms, or norm of their sum, over the norm of the
    weight change (the paper's words), or the inverse (its formula: change-over-sum). Every run
    measures all four; this one is ranked."""
    mode: Literal["auto", "together", "single"] = "auto"
    """Examples of a batch through the model together, one after another (slower, for any model), or
    together where the model's modules allow it."""
    targets: tuple[str, ...] = ()
    """Domains that are measured and never trained on, as in the proxy."""
    batch_size: int = 28
    """Blocks in every step, as many of each domain."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Per-domain perplexity of a run's model on held-out documents; with `tasks`, k-shot accuracies
    through lm-evaluation-harness too."""

    run: Path
    """The run directory whose model is measured."""
    blocks: int | None = None
    """Held-out blocks per domain; None: all of them."""
    domains: tuple[str, ...] = ()
    """Domains to measure; empty: all that the corpus holds."""
    batch_size: int = 16
    """Blocks, or prompts of a task, in a forward pass."""
    perplexity: bool = True
    """Measure perplexity. Without it only the tasks are run."""
    tasks: tuple[str, ...] = ()
    """Multiple-choice tasks of lm-eval, between commas or spaces; the paper's are
    copa,sciq,logiqa,piqa,wic,winogrande."""
    shots: int = 5
    """Answered examples before every question."""
    task_data: Path | None = None
    """A directory with TASK/train.jsonl, which the shots are drawn from, and TASK/validation.jsonl,
    which is scored; None: the data sets that lm-eval names on the Hub."""
    task_limit: int | None = None
    """Score only so many documents of every task, the first ones; None: all."""
    fewshot_seed: int = 1234
    """Of the draw of the shots; lm-eval's own default."""
    device: str = "auto"
    """auto, cpu, or cuda."""


@dataclass(frozen=True)
class ReportConfig:
    """Runs -> one page with figures and tables."""

    runs: tuple[Path, ...]
    """Run directories, proxies and bases; or one directory that holds them or is an
    experiment's."""
    out: Path | None = None
    """The page; None: report.html beside or inside the runs."""
    token_budget: int | None = None
    """Tokens of the training the weights are meant for, for the implied epochs; None: those of
    the longest base run."""


@dataclass(frozen=True)
class DemoConfig:
    """The whole story on text found on this machine: proxies, bases, table, report."""

    out: Path = Path("demo")
    """Where the runs and the report go."""
    data: str = "installed"
    """The corpus, as for the other stages."""
    target: str = "reference"
    """The domain of the out-of-domain half: measured, not trained on."""
    vocab_size: int = 2048
    """Entries of the tokenizer trained on it; small, since it decides what a step costs."""
    proxy_model: str = "tiny"
    """Size of the proxies."""
    base_model: str = "tiny"
    """Size of the base models."""
    proxy_steps: int = 200
    """Optimizer steps of each of the two proxies."""
    base_steps: int = 200
    """Optimizer steps of each of the five base models."""
    sequences_per_domain: int = 4
    """Blocks of every domain in a step of a proxy."""
    batch_size: int = 28
    """Blocks in a step of a base model."""
    learning_rate: float = 1e-3
    """Peak. At 2e-3 runs of this length leave their first plateau at a step that chance decides,
    which moves perplexities by more than the weights do."""
    mu: float | None = None
    """Bregman coefficient of the proxies; None: as a proxy's."""
    domain_max_grad_norm: float | None = DOMAIN_MAX_GRAD_NORM
    """Cut each domain's gradient to this norm before scoring. Early in a run this short one
    domain's gradient may grow twentyfold for a step; W grows with its square and would decide
    everything at once."""
    eval_blocks: int = 128
    """Held-out blocks per domain that the table is measured on."""
    seed: int = 0
    """Model initialisation and the order of the data."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory, ~/.cache on Linux."""


Experiment = Literal[
    "universal",
    "doremi",
    "ood",
    "wiki40b",
    "scales",
    "selection",
    "curriculum",
    "early",
    "proxy_vs_base",
    "settings",
]


@dataclass(frozen=True)
class ExperimentConfig:
    """All arms of one of the paper's experiments, a table and a report. The same command resumes.

    What is not given here is the preset's.
    """

    name: Experiment
    """universal: learned weights against uniform, natural and DoReMi's. doremi: DoReMi in both
    readings beside DoGE, with what each costs. ood: every domain as the target of the others.
    wiki40b: languages as targets of others. scales: weights from proxies of three sizes.
    selection: gradients of some parameters alone. curriculum: weights that follow the proxy's.
    early: the first quarter of training. proxy_vs_base: the proxy as a model. settings: one
    setting of the proxy changed at a time."""
    out: Path | None = None
    """Where runs and report go; None: experiments/NAME."""
    preset: Literal["smoke", "small", "paper"] = "small"
    """smoke: seconds a run, to see that it works. small: for a small corpus on two cores. paper:
    the paper's models, steps, batches and Hub data."""
    data: str | None = None
    """The corpus, as for the other stages."""
    domain_column: str | None = None
    """As for the other stages."""
    domains: tuple[str, ...] = ()
    """Training domains; empty: all that the corpus holds. wiki40b: the paper's five."""
    targets: tuple[str, ...] = ()
    """ood, wiki40b: domains to be the target, each in its turn; empty: all, or ca and nl."""
    seeds: tuple[int, ...] = ()
    """Each arm is run with each; arms of one seed start alike and see their data in one order."""
    tokenizer: str | None = None
    """As for the other stages."""
    vocab_size: int | None = None
    """Entries of a trained tokenizer."""
    block_size: int | None = None
    """Tokens in a block."""
    max_tokens_per_domain: int | None = None
    """Stop packing a domain there."""
    proxy_model: str | None = None
    """Size of the proxies."""
    proxy_models: tuple[str, ...] = ()
    """scales: three sizes, the middle one being the yardstick."""
    base_models: tuple[str, ...] = ()
    """universal: sizes of the base models; elsewhere the first counts."""
    proxy_steps: int | None = None
    """Optimizer steps of a proxy."""
    doremi_steps: tuple[int, ...] = ()
    """Steps of DoReMi's reference and proxy, for each of its arms."""
    base_steps: int | None = None
    """Optimizer steps of a base model."""
    finetune_steps: int | None = None
    """Steps on the target afterwards."""
    selection_steps: int | None = None
    """selection: steps in which the cancellation effect is summed up."""
    sequences_per_domain: int | None = None
    """Blocks of every domain in a proxy's step."""
    batch_size: int | None = None
    """Blocks in a base model's step."""
    learning_rate: float | None = None
    """Peak, of all models but the paper's largest."""
    min_learning_rate: float | None = None
    """End of the cosine."""
    finetune_learning_rate: float | None = None
    """Peak of the steps on the target."""
    mu: float | None = None
    """Bregman coefficient. None: the paper's with its preset, else as a proxy's."""
    score: Literal["paper", "published"] | None = None
    """As for the proxy."""
    domain_max_grad_norm: float | None = None
    """As for the proxy; 0: do not cut."""
    target_batch: Literal["same", "mix"] = "same"
    """universal: W from the batches that train the proxy, or from held-out ones of all domains."""
    eval_blocks: int | None = None
    """Held-out blocks per domain."""
    eval_points: int | None = None
    """Evaluations along a base run, for the curves."""
    tasks: tuple[str, ...] = ()
    """Where base models are compared: score them on these tasks of lm-eval too, as `evaluate`."""
    shots: int = 5
    """Answered examples before every question of a task."""
    task_data: Path | None = None
    """A directory of local documents of the tasks, as for `evaluate`; None: the Hub's."""
    task_limit: int | None = None
    """Score only so many documents of every task; None: all."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """As for the other stages."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory, ~/.cache on Linux."""
    plan: bool = False
    """Only say which runs there would be."""


@dataclass(frozen=True)
class WeightsShowConfig:
    """The weights with what they mean: beside the last, the natural ones, and implied epochs."""

    files: tuple[Path, ...]
    """weights.json files, or run directories; several are shown side by side."""
    budget_tokens: float | None = None
    """Tokens of the training the weights are for (1e11): shows the epochs of each domain in it."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: tokens there are of a domain, where that is not what the file says."""
    sort: bool = False
    """Largest weight first, instead of the file's order."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class WeightsDiffConfig:
    """How two files of weights differ, domain by domain and in all."""

    before: Path
    """A weights.json, or a run directory."""
    after: Path
    """Another."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class WeightsAverageConfig:
    """The mean of several runs' weights, as of one proxy with several seeds, and their spread."""

    files: tuple[Path, ...]
    """weights.json files, or run directories, of the same domains."""
    out: Path | None = None
    """The file to write; None: only say what it would hold."""
    different: tuple[Literal["target", "tokenizer_sha256"], ...] = ()
    """What may differ between the files all the same."""


@dataclass(frozen=True)
class WeightsConstrainConfig:
    """The nearest weights (in KL) within floors, caps and a number of epochs."""

    file: Path
    """A weights.json, or a run directory."""
    out: Path | None = None
    """The file to write; None: only say what it would hold."""
    floor: tuple[str, ...] = ()
    """NUMBER for every domain, NAME=NUMBER for one: the least weight."""
    cap: tuple[str, ...] = ()
    """Likewise the greatest weight."""
    max_epochs: tuple[str, ...] = ()
    """Likewise the most passes over a domain's tokens in a training of budget_tokens."""
    budget_tokens: float | None = None
    """Tokens of that training (1e11)."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: tokens there are of a domain, where that is not what the file says."""


@dataclass(frozen=True)
class ExportConfig:
    """Domain weights as a training framework takes them, and back; --list: which ones."""

    file: Path | None = None
    """A weights.json, or a run directory that holds one; with --from, a framework's file."""
    to: str | None = None
    """The target."""
    from_: str | None = None
    """The target whose file is read; without --to it becomes a weights.json."""
    list: bool = False
    """Say which targets there are, what a path is to each and what its weights count."""
    paths: tuple[str, ...] = ()
    """NAME=PATH for every domain, again for a further path; or one JSON or YAML file, {name: path},
    {name: [path, ...]} or {name: {path: tokens, ...}}."""
    valid_paths: tuple[str, ...] = ()
    """Likewise for validation, where the target takes it."""
    test_paths: tuple[str, ...] = ()
    """Likewise for test."""
    out: Path | None = None
    """The file to write; None: print."""
    decimals: int = 6
    """Places of the shares; they sum to exactly 1."""
    rows: Literal["blocks", "documents"] | None = None
    """What a row of the data is where the framework draws rows: a block of equally many tokens, or
    a document, for which weights are converted by the mean length. None: as the target says."""
    mean_doc_tokens: tuple[str, ...] = ()
    """NAME=NUMBER: tokens of a document, where that is not what the file says."""
    seq_length: int | None = None
    """Tokens of a training sequence, where the target asks."""
    batch_size: int | None = None
    """Sequences in an optimizer step, over all devices, where the target asks."""
    budget_tokens: float | None = None
    """Tokens of the whole training (1e11), for passes over a domain and lengths of phases."""
    steps: int | None = None
    """Optimizer steps of the whole training, to which phases are stretched; None: those that
    budget_tokens, seq_length and batch_size make."""
    phases: Path | None = None
    """Weights that change: a JSON or YAML list of {first_step, weights}, or a file or run directory
    that holds one; None: those of the file, if it has some."""
    constant: bool = False
    """Leave phases out: the weights that the file has beside them."""
    seed: int = 0
    """Of the framework's draws."""
    local_dir: str | None = None
    """Where streams from elsewhere are kept, a folder per domain."""


@dataclass(frozen=True)
class InfoConfig:
    """What doge_fast finds on this machine: devices, operators that run on them and why."""

    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class ProfileConfig:
    """What each phase of a step costs, beside a plain step on the same tokens."""

    model: str = "tiny"
    """A size of the family (tiny, mini, small, 60M, 82M, 124M, 210M, 684M), or the config.json
    that AutoConfig opens: a file, a folder or a Hub id."""
    vocab_size: int | None = None
    """Entries of the vocabulary; None: the config's own, 50304 for the paper's sizes, 4096 for
    the small ones."""
    domains: int = 7
    """K, the training domains."""
    targets: int = 0
    """Further rows that are measured and not trained on."""
    sequences: int = 4
    """Of each domain, in a step."""
    sequence_length: int = 128
    """Tokens of a sequence."""
    micro_batches: int = 1
    """Into which a domain's sequences are cut; their gradients add up."""
    mode: Literal["sequential", "stacked"] = "sequential"
    """One domain after another, or one forward and backward for all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: under autocast."""
    buffer_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the stored domain gradients; auto: that of each gradient."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The wrapped optimizer; fused where the device is a GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""
    threads: int | None = None
    """Of a CPU; None: as many as torch takes."""
    steps: int = 9
    """Timed pairs of steps, and as many steps with their phases apart."""
    memory: bool = True
    """Measure peak memory too, in a process of its own for each side."""
    json: Path | None = None
    """Where to write everything that was measured."""
    trace: Path | None = None
    """Where to write a timeline that Perfetto and chrome://tracing open: plain and DoGE steps with
    their phases."""
    trace_operators: Path | None = None
    """The same for one DoGE step with every operator of torch in it."""
