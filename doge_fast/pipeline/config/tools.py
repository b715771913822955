"""The verbs that read what stages have left, and those that need none."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from doge_fast.pipeline.config.components import TasksConfig
from doge_fast.pipeline.config.ranges import (
    Count,
    CountOrZero,
    Positive,
    PositiveShare,
    Range,
    Seed,
)


@dataclass(frozen=True)
class EvaluateConfig:
    """Per-domain perplexity of a run's model on held-out documents; with `tasks`, k-shot accuracies
    through lm-evaluation-harness too."""

    run: Path
    """The run directory whose model is measured."""
    blocks: Count | None = None
    """Held-out blocks per domain; None: all of them."""
    domains: tuple[str, ...] = ()
    """Domains to measure; empty: all that the corpus holds."""
    data: str | None = None
    """Other text to measure instead of the run's held-out blocks, named as a training's: its
    validation split where it has one, else all of it. None: the run's own."""
    text_column: str = "text"
    """Of `data`, as in a training."""
    domain_column: str | None = None
    """Of `data`, as in a training."""
    target: tuple[str, ...] = ()
    """Domains that the weights are meant for: measured too, and their average told apart."""
    out: Path | None = None
    """The file to write; None: the run's evaluation.json, of other data evaluation-NAME.json beside
    it."""
    batch_size: Count = 16
    """Blocks, or prompts of a task, in a forward pass."""
    perplexity: bool = True
    """Measure perplexity. Without it only the tasks are run."""
    cache_dir: Path | None = None
    """With data: where its packed blocks are kept; None: as for the other stages."""
    device: str = "auto"
    """auto, cpu, cuda, xpu or mps."""
    tasks: TasksConfig = field(default_factory=TasksConfig)


@dataclass(frozen=True)
class ReportConfig:
    """Runs -> one page with figures and tables."""

    runs: tuple[Path, ...]
    """Run directories, proxies and bases; or one directory that holds them or is an
    experiment's."""
    out: Path | None = None
    """The page; None: report.html beside or inside the runs."""
    token_budget: Count | None = None
    """Tokens of the training the weights are meant for, for the implied epochs; None: those of
    the longest base run."""
    weights: tuple[str, ...] = ()
    """Of an experiment regret: NAME=FILE, a weights.json or the run directory of a proxy: other
    weights, judged by the regression over its swarm without training."""


@dataclass(frozen=True)
class WeightsShowConfig:
    """The weights with what they mean: beside the last, the natural ones, and implied epochs."""

    files: tuple[Path, ...]
    """weights.json files, or run directories; several are shown side by side."""
    budget_tokens: Positive | None = None
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
    budget_tokens: Positive | None = None
    """Tokens of that training (1e11)."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: tokens there are of a domain, where that is not what the file says."""


@dataclass(frozen=True)
class WeightsPlotConfig:
    """A figure of the weights beside natural and uniform ones; of one run, over its steps too."""

    files: tuple[Path, ...]
    """weights.json files, or run directories; several stand side by side."""
    out: Path = Path("weights.png")
    """The figure, .png or .svg; the weights over the steps go beside it, to NAME-steps."""


@dataclass(frozen=True)
class WeightsCardConfig:
    """A page with provenance, table and figure, to put beside the weights on the Hub; nothing is
    pushed."""

    file: Path
    """A weights.json, or a run directory."""
    out: Path = Path("weights-card")
    """The directory for README.md, weights.json and the figures; or its README.md."""
    budget_tokens: Positive | None = None
    """Tokens of the training the weights are for (1e11): shows the epochs of each domain in it."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: tokens there are of a domain, where that is not what the file says."""


@dataclass(frozen=True)
class ExportConfig:
    """Domain weights as a training framework takes them, and back; --list: which ones."""

    file: Path | None = None
    """A weights.json, or a run directory that holds one; with --from, a framework's file."""
    to: str | None = None
    """The target; --list names them."""
    from_: str | None = None
    """The target whose file is read; without --to it becomes a weights.json."""
    list: bool = False
    """Say which targets there are, what a path is to each, what its weights count, and against
    which version of its framework it was checked."""
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
    seq_length: Count | None = None
    """Tokens of a training sequence, where the target asks."""
    batch_size: Count | None = None
    """Sequences in an optimizer step, over all devices, where the target asks."""
    budget_tokens: Positive | None = None
    """Tokens of the whole training (1e11), for passes over a domain and lengths of phases."""
    steps: Count | None = None
    """Optimizer steps of the whole training, to which phases are stretched; None: those that
    budget_tokens, seq_length and batch_size make."""
    phases: Path | None = None
    """Weights that change: a JSON or YAML list of {first_step, weights}, or a file or run directory
    that holds one; None: those of the file, if it has some."""
    constant: bool = False
    """Leave phases out: the weights that the file has beside them."""
    seed: Seed = 0
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
    vocab_size: Count | None = None
    """Entries of the vocabulary; None: the config's own, 50304 for the paper's sizes, 4096 for
    the small ones."""
    domains: Count = 7
    """K, the training domains."""
    targets: CountOrZero = 0
    """Further rows that are measured and not trained on."""
    sequences: Count = 4
    """Of each domain, in a step."""
    sequence_length: Annotated[int, Range(2)] = 128
    """Tokens of a sequence."""
    micro_batches: Count = 1
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
    threads: Count | None = None
    """Of a CPU; None: as many as torch takes."""
    steps: Count = 9
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


@dataclass(frozen=True)
class PlanConfig:
    """What a step would need on so many GPUs, and which way to choose. A prediction: nothing runs.

    Parameters, gradients and AdamW in float32, products in bfloat16.
    """

    model: str = "684M"
    """A size of the family, or LAYERSxWIDTH of another GPT-2: 32x4096 has 6.7e9 parameters."""
    domains: Count = 7
    """K, the training domains."""
    gpus: tuple[Count, ...] = (8,)
    """Ranks; for several numbers a line each way."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """80 GB, 80 GB, 141 GB, 180 GB."""
    domains_per_step: Count | None = None
    """Domains that a step draws; None: all."""
    mode: Literal["sequential", "stacked"] = "sequential"
    """A pass for each domain that a rank has, or one for all of them; FSDP2 takes the first."""
    rows: Literal["float32", "bfloat16"] = "float32"
    """Of the stored domain gradients."""
    selection: PositiveShare = 1.0
    """Share of the columns that enter W. Where a norm is clipped, all columns are read."""
    tokens: Count = 1 << 20
    """Of a step, over all ranks and domains."""
    sequence_length: Count = 1024
    """Tokens of a sequence."""
    micro_batch: Count = 1
    """Sequences of a domain in a forward pass, of which activations are kept."""
    vocab_size: Count = 50304
    """Entries of the vocabulary."""
    utilisation: PositiveShare = 0.4
    """Share of the GPU's peak that plain training reaches (model FLOPs utilisation)."""
    bandwidth: PositiveShare = 0.7
    """Share of their peaks that memory and links reach."""
