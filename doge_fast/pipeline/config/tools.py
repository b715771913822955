"""The verbs that read runs or weights, and those that need neither."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MinLen
from pydantic.dataclasses import dataclass
from tyro.conf import Positional, arg

from doge_fast.pipeline.config.ranges import (
    EXACT,
    Count,
    CountOrZero,
    Device,
    Place,
    Positive,
    Seed,
)
from doge_fast.pipeline.config.stages import check_is_run, check_place
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.sizes import SIZES

Paths = Annotated[tuple[Path, ...], MinLen(1)]


@dataclass(frozen=True, config=EXACT)
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
    """Score only this many documents of every task, the first ones; None: all."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks without repeats; "a,b" "c" and "a" "b" "c" are the same."""
        names = (name.strip() for word in self.tasks for name in word.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    def _check(self) -> None:
        for name in self.names if self.task_data else ():
            for split in ("train", "validation"):
                file = Path(self.task_data or "", name, f"{split}.jsonl")
                if not file.is_file():
                    raise UserError(f"task_data (--task-data) needs {file}, which does not exist.")


@dataclass(frozen=True, config=EXACT)
class EvaluateConfig:
    """Per-domain perplexity of a run's model on held-out documents; with `tasks`, k-shot accuracy
    through lm-evaluation-harness instead."""

    examples: ClassVar = ("runs/learned", "runs/learned --tasks copa sciq")

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run directory whose model is evaluated."""
    blocks: Count | None = None
    """Held-out blocks per domain; None: all of them."""
    domains: tuple[str, ...] = ()
    """Domains to evaluate, such as the targets of the weights. Empty: all domains of the corpus."""
    data: Place | None = None
    """Evaluate on other text instead of the run's held-out blocks: a directory, file or Hub id, as
    for training. Its validation split is used or, without one, all of it. None: the run's held-out
    blocks."""
    text_column: str = "text"
    """The column of `data` that holds a document."""
    domain_column: str | None = None
    """The column of `data` that names each row's domain."""
    out: Path | None = None
    """The file to write; required with `data`. None: the run's evaluation.json. Accuracies of
    `tasks` are written to the run's fewshot.json."""
    batch_size: Count = 16
    """Blocks, or prompts of a task, per forward pass."""
    cache_dir: Path | None = None
    """With data: where its packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory."""
    device: Device = "auto"
    """auto: a GPU if there is one."""
    tasks: TasksConfig = field(default_factory=TasksConfig)

    def __post_init__(self) -> None:
        if self.data is not None and self.out is None:
            raise UserError("data (--data) needs a file for what is measured: name it with --out.")
        asked = {name: getattr(self, name) for name in ("data", "domains", "blocks", "out")}
        if self.tasks.tasks and (unused := [f"--{name}" for name, value in asked.items() if value]):
            raise UserError(
                "Tasks (--tasks) have documents of their own, and their accuracies go to the run's "
                f"fewshot.json. Leave out {', '.join(unused)}, or the tasks."
            )

    def _check(self) -> None:
        check_is_run("run", self.run)
        if self.data is not None:
            check_place("data", self.data, ("installed",))


@dataclass(frozen=True, config=EXACT)
class ReportConfig:
    """One page with figures and tables of runs."""

    examples: ClassVar = ("runs",)

    runs: Annotated[Positional[Paths], arg(metavar="RUN [RUN ...]")]
    """Run directories of proxies and base models, a directory that contains them, or the directory
    of a search."""
    out: Path | None = None
    """The HTML page to write; None: report.html beside or inside the runs."""


@dataclass(frozen=True, config=EXACT)
class WeightsShowConfig:
    """The weights beside those of the last step and the natural ones, and the epochs they imply."""

    examples: ClassVar = ("runs/proxy --budget-tokens 10B",)

    files: Annotated[Positional[Paths], arg(metavar="FILE [FILE ...]")]
    """weights.json files, run directories, or weights as NAME=NUMBER,..."""
    budget_tokens: Positive | None = None
    """Number of tokens in the training that the weights are for, such as 1e11; shows each domain's
    epochs in it."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: the number of tokens of a domain, where it differs from the file's."""


@dataclass(frozen=True, config=EXACT)
class WeightsAverageConfig:
    """The mean and spread of several runs' weights, such as one proxy with several seeds."""

    files: Annotated[Positional[Paths], arg(metavar="FILE [FILE ...]")]
    """weights.json files or run directories, with the same domains."""
    out: Path | None = None
    """The file to write; None: only print its content."""


@dataclass(frozen=True, config=EXACT)
class WeightsConstrainConfig:
    """The nearest weights (in KL divergence) within floors, caps and a number of epochs."""

    examples: ClassVar = ("runs/proxy --floor 0.02 --max-epochs 4 --budget-tokens 10B",)

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A weights.json, or a run directory."""
    out: Path | None = None
    """The file to write; None: only print its content."""
    floor: tuple[str, ...] = ()
    """Smallest weight: NUMBER for every domain, NAME=NUMBER for one."""
    cap: tuple[str, ...] = ()
    """Largest weight: NUMBER for every domain, NAME=NUMBER for one."""
    max_epochs: tuple[str, ...] = ()
    """Largest number of passes over a domain's tokens in the training that the weights are for:
    NUMBER for every domain, NAME=NUMBER for one."""
    budget_tokens: Positive | None = None
    """With a largest number of passes: tokens in the training, such as 1e11."""
    tokens: tuple[str, ...] = ()
    """NAME=NUMBER: the number of tokens of a domain, where it differs from the file's."""


@dataclass(frozen=True, config=EXACT)
class ExportConfig:
    """Write domain weights for a training framework; --list names the targets."""

    examples: ClassVar = (
        "--list",
        "runs/proxy --to megatron --paths code=/data/code wiki=/data/wiki --out blend.txt",
    )

    file: Annotated[Positional[Path | None], arg(metavar="FILE")] = None
    """A weights.json, or a run directory that holds one."""
    to: str | None = None
    """The target, a framework or format; --list names the targets."""
    list: bool = False
    """List the targets, and for each the kind of path, the unit of the shares, and the version of
    the framework that it was checked against."""
    paths: tuple[str, ...] = ()
    """NAME=PATH for every domain; repeat a name for further paths."""
    valid_paths: tuple[str, ...] = ()
    """NAME=PATH of validation data, if the target takes them."""
    test_paths: tuple[str, ...] = ()
    """NAME=PATH of test data, if the target takes them."""
    out: Path | None = None
    """The file to write; None: print."""
    decimals: Annotated[Count, Le(15)] = 6
    """Decimals of the shares; they sum to exactly 1."""
    rows: Literal["blocks", "documents"] | None = None
    """What a row of your data holds, if the framework draws rows. blocks: every row has the same
    number of tokens. documents: a row is a document, and weights are divided by the mean document
    length. None: the target's default."""
    mean_doc_tokens: tuple[str, ...] = ()
    """NAME=NUMBER: the mean number of tokens in a document of a domain, where it differs from the
    file's."""
    seq_length: Count | None = None
    """Tokens of a training sequence, if the target needs it."""
    batch_size: Count | None = None
    """Sequences per optimizer step, over all devices, if the target needs it."""
    seed: Seed = 0
    """Seed of the framework's data loader."""


@dataclass(frozen=True, config=EXACT)
class InfoConfig:
    """What runs on this machine: devices, and the implementation of each operator, with reasons."""

    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True, config=EXACT)
class ProfileConfig:
    """What each phase of a step costs, compared with a plain step on the same tokens."""

    examples: ClassVar = ("--model 124M --domains 7 --mode stacked",)

    model: Place = "tiny"
    """A size of the family (micro, tiny, mini, small, 60M, 82M, 124M, 210M, 684M), or the
    config.json that AutoConfig opens: a file, a folder or a Hub id."""
    vocab_size: Count | None = None
    """Vocabulary size. None: the config's own, 50304 for the paper's sizes, 4096 for the small
    ones."""
    domains: Count = 7
    """K, the training domains."""
    targets: CountOrZero = 0
    """Number of targets that are measured and not trained on."""
    sequences: Count = 4
    """Sequences of each domain in a step."""
    sequence_length: Annotated[Count, Ge(2)] = 128
    """Tokens of a sequence."""
    mode: Literal["sequential", "stacked"] = "sequential"
    """sequential: a forward and backward pass per domain. stacked: one for all domains."""
    score: Literal["paper", "aligned"] = "paper"
    """aligned: the rule of proxy --target, which keeps the gradients of two halves of each domain's
    batch apart."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast."""
    buffer_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the stored domain gradients; auto: the dtype of each gradient."""
    device: Device = "auto"
    """auto: a GPU if there is one. cuda: the first that CUDA_VISIBLE_DEVICES leaves."""
    steps: Count = 9
    """Number of timed pairs of steps; as many further steps are timed phase by phase."""
    json: Path | None = None
    """The file to write all measurements to."""

    def _check(self) -> None:
        check_place("model", self.model, SIZES)
        if self.score == "aligned" and self.sequences < 2:
            raise UserError("score aligned halves each domain's batch: pass --sequences 2 or more.")
