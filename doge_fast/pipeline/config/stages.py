"""The stages that train: a proxy, a base model, DoReMi, a selection."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from doge_fast.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.pipeline.config.components import CorpusConfig, ModelConfig, TrainingConfig
from doge_fast.pipeline.config.ranges import Count, Positive, PositiveOrZero, Share


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
    sequences_per_domain: Count = 4
    """Blocks of every domain in every step."""
    mu: Positive | None = None
    """Bregman coefficient; larger: slower weights, whose logarithms move by lr W / mu. None: 20
    times the peak learning rate (0.01 at 5e-4); and (T + 1) / 2 times that where the weights of the
    targets sum to T, which is K for universal."""
    score: Literal["paper", "published"] = "paper"
    """W as in the paper, or the published code's: over the mean row norm, cut to [0, 5]."""
    domain_max_grad_norm: PositiveOrZero | None = DOMAIN_MAX_GRAD_NORM
    """Cut each domain's gradient to this norm before scoring (published configs: 5.0, 1.0); 0 or
    None: do not, as in the paper's text. Uncut, W grows with the square of the gradients, and a few
    steps with large ones may decide everything."""
    smoothing: Share = 0.0
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
    average_from: Share = 0.0
    """Share of the steps whose weights the average leaves out: an early phase that a long training
    soon forgets. What is left lies farther from uniform, where weights begin. 0: the paper's mean
    over all steps."""
    selection: Path | None = None
    """A JSON list of parameter names whose columns enter W; None: all."""
    mode: Literal["auto", "sequential", "stacked"] = "auto"
    """A backward pass per domain, one for all, or whichever suits the batch (see DoGETrainer)."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Write nothing: say what would be read, trained and written, and what it would take, after a
    few steps that are timed."""


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
    stages: Count = 1
    """Of a curriculum: with a proxy's run directory, its mean weights in so many equal parts of
    its run, each in the like part of this one. 1: its average throughout."""
    targets: tuple[str, ...] = ()
    """Domains that are measured and never trained on, as in the proxy whose weights are used."""
    batch_size: Count = 28
    """Blocks in every step, over all domains."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Write nothing: say what would be read, trained and written, and what it would take, after a
    few steps that are timed."""


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
    step_size: Positive | None = None
    """Of the weights' exponentiated gradient; None: the variant's, 1 (doremi) or 0.1 (doge)."""
    smoothing: Share | None = None
    """Mixture of the weights with uniform at every step; None: the variant's, 1e-4 for doremi (the
    authors' code; their paper says 1e-3) and 0 for doge."""
    batch_size: Count = 28
    """Blocks in every step, over all domains."""
    log_every: Count = 1
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
    batch_size: Count = 28
    """Blocks in every step, as many of each domain."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""


StageConfig = ProxyConfig | BaseConfig | DoReMiConfig | SelectConfig
"""What a stage that trains is told."""
