"""The stages that train (a proxy, a base model, DoReMi, a selection), and the parts they share."""

import math
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from doge_fast.pipeline import named
from doge_fast.pipeline.baselines import BASELINES
from doge_fast.pipeline.config.ranges import (
    EXACT,
    OF_SIZE,
    Count,
    CountOrZero,
    Device,
    OfSize,
    Place,
    Positive,
    PositiveOrZero,
    Seed,
    Share,
)
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.sizes import SIZES, Settings, settings_of
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM

Target = str | dict[str, float]
Reading = Literal["norms-over-change", "sum-over-change", "change-over-sum", "change-over-norms"]

# Keywords of a target.
UNIVERSAL, MIX = "universal", "mix"
# A Hub id is owner/name; a model or tokenizer may have a name alone. A data file has a suffix.
_HUB_MODEL = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
_HUB_DATA = r"(?!.*\.(jsonl|json|parquet|arrow|txt|gz|zst)$)[\w-][\w.-]*/[\w-][\w.-]*"


def parse_target(names: Sequence[str]) -> Target:
    """The value of `target` on the command line: "universal" or {name: tau}.

    `names` is "universal" alone; or "mix" and held-out domains, each NAME or NAME=WEIGHT.

    Raises:
        UserError: no name, a repeated name, "universal" with others, or a weight that is no number
            greater than zero.
    """
    if tuple(names) == (UNIVERSAL,):
        return UNIVERSAL
    tau: dict[str, float] = {}
    for item in names:
        name, weight = target_of(item)
        tau[name] = named.float_of(weight or "1")
        if not 0 < tau[name] < math.inf:
            raise UserError(f"A target's weight must be a number greater than zero; got {item!r}.")
    if not tau or len(tau) < len(names) or not tau.keys().isdisjoint(("", UNIVERSAL)):
        raise UserError(
            "target must be universal alone, or distinct names, each NAME or NAME=WEIGHT; got "
            f"{' '.join(names)!r}."
        )
    return tau


def target_of(item: str) -> tuple[str, str]:
    """(NAME, WEIGHT) of NAME=WEIGHT, else (item, ""): a name may hold equal signs."""
    name, equals, weight = item.rpartition("=")
    try:
        named.float_of(weight)
    except ValueError:
        return item, ""
    return (name, weight) if equals else (item, "")


def check_place(what: str, value: str, words: Collection[str]) -> None:
    """Raise UserError unless `value` is in `words`, an existing path, or a possible Hub id."""
    hub = _HUB_DATA if what == "data" else _HUB_MODEL
    # pathlib reads an empty name as the current folder.
    is_there = value != "" and Path(value).exists()
    if not (is_there or value in words or re.fullmatch(hub, value)):
        raise UserError(
            f"{what} must be {', '.join(words)}, a Hub id or a path; {value!r} does not exist."
        )


def check_is_run(what: str, run: Path) -> None:
    """Raise UserError unless `run` is a run directory."""
    if not run.exists():
        raise UserError(f"{what}: {run} does not exist.")
    if not (run / "config.json").exists():
        raise UserError(f"{what}: {run} is not a run directory: it holds no config.json.")


@dataclass(frozen=True, config=EXACT)
class CorpusConfig:
    """Where the text comes from and how it becomes blocks of tokens."""

    data: Place = "installed"
    """A directory (one folder or file per domain), a file or Hub id with a domain column, or
    "installed": seven domains of text found in this Python environment."""
    domains: tuple[str, ...] = ()
    """Domains to train on, in this order. Empty: all domains in `data` except the targets."""
    text_column: str = "text"
    """The column of files or of a Hub data set that holds a document's text."""
    domain_column: str | None = None
    """For data whose rows are of several domains: the column with the domain's name (dots reach
    into structs). A single file needs it."""
    tokenizer: Place = "train"
    """A folder or Hub id that AutoTokenizer opens, or "train": a byte-level BPE on this corpus."""
    vocab_size: Annotated[Count, Le(2**24)] = 4096
    """Vocabulary size of a trained tokenizer."""
    block_size: OfSize[Annotated[Count, Ge(2), Le(2**24)]] = OF_SIZE
    """Tokens in a block; every training example is one block. None: 512 for models of 60M and
    larger, as in the paper; 128 for others."""
    validation_fraction: Annotated[Positive, Le(1)] = 0.05
    """Share of the documents to hold out if the data has no validation split."""
    max_tokens_per_domain: Count | None = None
    """Stop packing a domain after this many tokens, and stop reading when all domains have them.
    None: pack all. For a Hub data set with a domain column, name the domains too; otherwise all
    rows are read to find them."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the
    user's cache directory, ~/.cache on Linux."""

    def __post_init__(self) -> None:
        limit = self.max_tokens_per_domain
        if limit is not None and self.block_size is not None and limit < self.block_size:
            raise UserError(
                "max_tokens_per_domain (--max-tokens-per-domain) must hold a block of "
                f"{self.block_size}; it is {limit}."
            )
        if self.tokenizer == "train" and self.vocab_size < 257:
            raise UserError(
                "A trained tokenizer needs a vocab_size (--vocab-size) of 257 or more, every byte "
                f"and the end of text; it is {self.vocab_size}."
            )

    def _check(self) -> None:
        check_place("data", self.data, ("installed",))
        check_place("tokenizer", self.tokenizer, ("train",))


@dataclass(frozen=True, config=EXACT)
class ModelConfig:
    """Which causal language model is trained."""

    model: Place = "tiny"
    """A size of the family (micro, tiny, mini, small, 60M, 82M, 124M, 210M, 684M), or the
    config.json that AutoConfig opens: a file, a folder or a Hub id."""
    pretrained: bool = False
    """Load the weights of `model` too (continued pretraining) instead of fresh ones."""

    def _check(self) -> None:
        check_place("model", self.model, SIZES)


@dataclass(frozen=True, config=EXACT)
class TrainingConfig:
    """How a stage trains its model."""

    steps: Count = 300
    """Optimizer steps."""
    learning_rate: OfSize[Positive] = OF_SIZE
    """Peak learning rate. None: the paper's (appendix, model-archs), 5e-4, and 1.5e-4 for 684M."""
    min_learning_rate: OfSize[PositiveOrZero] = OF_SIZE
    """Learning rate at the end of the cosine schedule. None: 1e-4, and 5e-5 for 684M, but at most
    the peak."""
    warmup_steps: CountOrZero | None = None
    """Steps of linear warm-up; None: a twentieth of the steps."""
    weight_decay: PositiveOrZero = 0.01
    """AdamW's weight decay, on matrices only; the paper's."""
    max_grad_norm: Positive = 1.0
    """Clip the gradient that updates the model to this norm."""
    max_skipped_steps: Count = 20
    """End the run as diverged after this many steps in a row without a finite gradient and loss,
    or after the last step if more than a tenth of all steps had none."""
    seed: Seed = 0
    """Seed of the model initialisation and of the order of the data."""
    eval_every: Count | None = None
    """Steps between evaluations on held-out blocks; None: at the end only."""
    eval_blocks: Count = 256
    """Held-out blocks per domain in those evaluations."""
    save_every: CountOrZero | None = None
    """Steps between checkpoints, from which a killed run resumes. None: ten checkpoints in a run;
    0: no checkpoints."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16: autocast, with float32 master weights. auto: bfloat16 on a GPU for models of 60M
    and larger, else float32."""
    device: Device = "auto"
    """auto: a GPU if there is one. cuda: the first that CUDA_VISIBLE_DEVICES leaves."""
    compile: bool = False
    """torch.compile the model."""

    def __post_init__(self) -> None:
        rates = (self.min_learning_rate, self.learning_rate)
        if None not in rates and self.min_learning_rate > self.learning_rate:
            raise UserError(
                "min_learning_rate (--min-learning-rate) must be at most learning_rate "
                f"(--learning-rate); got {self.min_learning_rate:g} and {self.learning_rate:g}."
            )
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise UserError(
                "warmup_steps (--warmup-steps) must be less than the steps; got "
                f"{self.warmup_steps} of {self.steps}."
            )


def _missing(part: Any, settings: Settings) -> dict[str, Any]:
    """The settings whose field in `part` is None."""
    return {k: value for k, value in settings._asdict().items() if getattr(part, k, value) is None}


@dataclass(frozen=True, config=EXACT)
class _Stage:
    """The options of every stage that trains."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        name = self.model.model
        settings = settings_of(name)
        peak = self.training.learning_rate or settings.learning_rate
        least = min(settings.min_learning_rate, peak)
        self._fill_in(settings._replace(min_learning_rate=least))
        if self.model.pretrained and self.corpus.tokenizer == "train" and name not in SIZES:
            raise UserError(
                "A pretrained model knows its own tokens by their numbers, and a new tokenizer has "
                f"others. Pass tokenizer={name!r} (--tokenizer {shlex.quote(name)})."
            )
        if self.corpus.validation_fraction == 1:
            raise UserError(
                "validation_fraction (--validation-fraction) must be less than 1 where a model is "
                "trained."
            )

    def _fill_in(self, settings: Settings) -> None:
        """Fill in the defaults for the model's size where no value was given."""
        parts = {name: getattr(self, name) for name in ("corpus", "training")}
        filled = {name: replace(part, **_missing(part, settings)) for name, part in parts.items()}
        for name, value in {**filled, **_missing(self, settings)}.items():
            # Bypasses the frozen dataclass, which is not complete yet.
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        corpus, cache_dir = self.corpus, self.corpus.cache_dir or os.environ.get("DOGE_FAST_CACHE")
        data = Path(corpus.data).resolve()
        # Else `data` is this environment's text or a Hub id; runs may lie in a folder of that name.
        is_folder = corpus.data not in ("", "installed") and data.is_dir()
        # If domains are named, no other entry of the folder is read.
        is_read = is_folder and (corpus.domain_column is not None or not corpus.domains)
        places = {"out": self.out, "cache_dir (--cache-dir)": cache_dir or self.out}
        for name, place in places.items():
            path = Path(place).expanduser().resolve()
            is_seen = data in path.parents and path.relative_to(data).parts[0][0] != "."
            if is_read and (path == data or is_seen):
                raise UserError(
                    f"{name} must lie outside the corpus, of which it would be a domain; {place} "
                    f"is in {corpus.data}. Name another directory, or the domains to train on."
                )


@dataclass(frozen=True, config=EXACT)
class ProxyConfig(_Stage):
    """Stage one: learn the domain weights with a proxy model. The same command resumes."""

    examples: ClassVar = (
        "--data corpus --out runs/proxy",
        "--data corpus --target wiki --out runs/wiki   # wiki is held out",
        "--data owner/name --domain-column meta.source --out runs/hub",
    )
    stage: ClassVar[Literal["proxy"]] = "proxy"

    target: tuple[str, ...] = ("universal",)
    """universal (the loss on all training domains); mix (held-out blocks of all training domains);
    or held-out domains, each NAME or NAME=WEIGHT."""
    sequences_per_domain: OfSize[Count] = OF_SIZE
    """Blocks of every domain in every step. None: 18 for models of 60M and larger, which is the
    paper's batch for its seven domains; 4 for others."""
    mu: Positive | None = None
    """Bregman coefficient: in a step the logarithms of the weights move by lr W / mu, so a larger
    mu makes slower weights. None: 20 lr (T + 1) / 2, with the peak learning rate lr and the sum T
    of the targets' weights, which is K for universal; 0.01 at 5e-4 and one target."""
    score: Literal["auto", "aligned", "paper", "published"] = "auto"
    """aligned: the mixture whose gradient makes the smallest angle with the targets' gradient; it
    has no mu and clips no domain, and for the target universal it is uniform. paper: the score W
    of the paper. published: as in the published code, W over the mean norm of the domains'
    gradients, clipped to [0, 5]. auto: aligned for held-out domains. auto is paper for universal
    and mix, if mu is given, for another bound of a domain's gradient, and for a single block per
    domain."""
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
    """Time a few steps, and print what the run would read and train, and how long it would take.
    Writes nothing but the cache of tokenised text."""

    @property
    def targets(self) -> tuple[str, ...]:
        """What `target` names, without weights: as `load_corpus` takes it."""
        return tuple(target_of(item)[0] for item in self.target)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_target(self.target)
        has_default = self.mu is None and self.domain_max_grad_norm == DOMAIN_MAX_GRAD_NORM
        can_align = has_default and self.sequences_per_domain >= 2
        if self.score == "auto":
            is_aligned = can_align and not {*self.targets} <= {UNIVERSAL, MIX}
            # Records, reports and weights.json name the score that is used.
            object.__setattr__(self, "score", "aligned" if is_aligned else "paper")
        if self.score == "aligned" and not can_align:
            raise UserError(
                "score aligned has no mu and clips no domain: leave out --mu and "
                "--domain-max-grad-norm, or pass --score paper. It compares two halves of each "
                "domain's blocks: sequences_per_domain (--sequences-per-domain) must be 2 or more."
            )

    def _check(self) -> None:
        super()._check()
        if self.selection is not None and not self.selection.is_file():
            raise UserError(f"selection must be a JSON file; {self.selection} is not there.")


@dataclass(frozen=True, config=EXACT)
class BaseConfig(_Stage):
    """Stage two: train a model at given domain weights. The same command resumes."""

    examples: ClassVar = (
        "--data corpus --weights runs/proxy --out runs/learned",
        "--data corpus --weights uniform --out runs/uniform",
    )
    stage: ClassVar[Literal["base"]] = "base"

    weights: Place = "uniform"
    """uniform; natural (each domain's share of the tokens); a weights.json; the run directory of a
    proxy or DoReMi; or the weights themselves, books=0.6,code=0.4."""
    stages: Count = 1
    """Number of stages of a curriculum; it needs a proxy's run directory. The proxy's run and this
    run are divided into this many equal parts. Each part of this run uses the proxy's mean weights
    over the same part of the proxy's run. 1: the proxy's average throughout."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on. The targets of the weights are added if the
    corpus has them."""
    batch_size: OfSize[Count] = OF_SIZE
    """Blocks per step, over all domains. None: 128 for models of 60M and larger, as in the paper;
    28 for others."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Time a few steps, and print what the run would read and train, and how long it would take.
    Writes nothing but the cache of tokenised text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages > self.training.steps:
            raise UserError(
                f"stages must be at most the {self.training.steps} steps of the run; got "
                f"{self.stages}."
            )

    def _check(self) -> None:
        super()._check()
        weights, is_baseline = Path(self.weights), self.weights in BASELINES
        is_given = "=" in self.weights or (self.weights and weights.exists())
        if not (is_baseline or is_given):
            raise UserError(
                f"weights must be {' or '.join(BASELINES)}, a weights.json, the run directory of a "
                f"proxy, or NAME=NUMBER,...; {self.weights!r} is none of them, and no such path "
                "exists."
            )
        if self.stages > 1 and (is_baseline or not (weights / "metrics.jsonl").exists()):
            raise UserError(
                f"stages={self.stages} needs the run directory of a proxy, whose weights changed "
                f"from step to step; got weights={self.weights!r}."
            )


@dataclass(frozen=True, config=EXACT)
class DoReMiConfig(_Stage):
    """The DoReMi baseline: learn the domain weights by loss in excess of a reference model's."""

    examples: ClassVar = ("--data corpus --reference runs/uniform --out runs/doremi",)
    stage: ClassVar[Literal["doremi"]] = "doremi"

    reference: Path = field(kw_only=True)
    """Run directory of a complete base run. Its model is the reference model. Batches are drawn at
    its weights, and the learned weights start from them."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on. Those of the reference run are added."""
    variant: Literal["doremi", "doge"] = "doremi"
    """doremi: clip the excess loss at zero for each token, as DoReMi's authors do. doge: clip each
    domain's mean, as the baseline in DoGE's published code does."""
    step_size: Positive | None = None
    """Step size of the weights' exponentiated gradient; None: the variant's, 1 (doremi) or 0.1
    (doge)."""
    smoothing: Share | None = None
    """Share of uniform weights that is mixed in at every step; None: the variant's, 1e-4 for doremi
    (the authors' code; their paper says 1e-3) and 0 for doge."""
    batch_size: OfSize[Count] = OF_SIZE
    """Blocks per step, over all domains. None: 128 for models of 60M and larger, as in the paper;
    28 for others."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""

    def _check(self) -> None:
        super()._check()
        check_is_run("reference", self.reference)


@dataclass(frozen=True, config=EXACT)
class SelectConfig(_Stage):
    """Score parameters by cancellation effect and select some, for `proxy --selection`."""

    examples: ClassVar = ("--data corpus --strategies low30 high10 --out runs/select",)
    stage: ClassVar[Literal["select"]] = "select"

    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=1000))
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """lowN or highN: select the N parameters with the lowest or highest scores."""
    reading: Reading = "norms-over-change"
    """How the score is computed. norms-over-change (the paper's words): the sum of the examples'
    gradient norms over the norm of the weight change. sum-over-change: the norm of the gradients'
    sum over that norm. change-over-sum (the paper's formula) and change-over-norms: the inverses.
    Every run measures all four; parameters are ranked by this one."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on, as in the proxy."""
    batch_size: OfSize[Count] = OF_SIZE
    """Blocks per step, the same number for every domain. None: 128 for models of 60M and larger, 28
    for others."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [s for s in self.strategies if not re.fullmatch("(low|high)[1-9][0-9]*", s)]
        if wrong:
            raise UserError(
                "strategies (--strategies) must be lowN or highN, N from 1; got "
                f"{', '.join(wrong)}."
            )


StageConfig = ProxyConfig | BaseConfig | DoReMiConfig | SelectConfig
"""The options of any stage that trains."""
