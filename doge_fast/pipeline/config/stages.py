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
    """universal (the loss on all training domains); worst (likewise, and then more and more on
    those that improve least); mix (held-out blocks of all training domains); or held-out domains,
    each NAME or NAME=WEIGHT."""
    sequences_per_domain: Count = 4
    """Blocks of every domain in every step."""
    mu: Positive | None = None
    """Bregman coefficient: in a step the logarithms of the weights move by lr W / mu, so a larger
    mu makes slower weights. None: 20 times the peak learning rate (0.01 at 5e-4), times (T + 1) / 2
    where the weights of the targets sum to T, which is K for universal."""
    target_mu: Positive | None = None
    """The weights of the targets move to those that improve least, more slowly for a larger number.
    None: they stay; for target worst 2 mu / (T + 1)."""
    score: Literal["paper", "published"] = "paper"
    """paper: the score W as in the paper. published: as in the published code, W over the mean norm
    of the domains' gradients, clipped to [0, 5]."""
    domain_max_grad_norm: PositiveOrZero | None = DOMAIN_MAX_GRAD_NORM
    """Clip each domain's gradient to this norm before scoring (published configs: 5.0, 1.0); 0 or
    None: do not clip, as in the paper's text. Without it a few steps with large gradients may
    decide everything, because W grows with the square of the gradients."""
    smoothing: Share = 0.0
    """Share of uniform weights that is mixed in at every step."""
    init_weights: Path | None = None
    """A weights.json, or a run directory that holds one: domains of the same name begin with these
    weights, relative to each other. None: begin with uniform weights."""
    split: tuple[str, ...] = ()
    """OLD=NEW,NEW: with init_weights, domains that were divided since; the parts share the old
    weight in proportion to their tokens."""
    added_share: str = "uniform"
    """With init_weights, the weight of each domain that the file does not have: uniform (1/K),
    natural (its share of the tokens), or a number."""
    average_from: Share = 0.0
    """Share of the steps, from the first on, that the average of the weights leaves out. The
    average then lies farther from uniform, where the weights begin. 0: the paper's mean over all
    steps."""
    selection: Path | None = None
    """A JSON list of parameter names; W is computed from the gradients of these only. None: all."""
    mode: Literal["auto", "sequential", "stacked"] = "auto"
    """sequential: a backward pass per domain. stacked: one for all domains. auto: whichever suits
    the batch (see DoGETrainer)."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    dry_run: bool = False
    """Write nothing, but time a few steps, and print what the run would read, train and write, and
    the memory and time that it would take."""


@dataclass(frozen=True)
class BaseConfig:
    """Stage two: train a model at given domain weights."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    weights: str = "uniform"
    """uniform; natural (each domain's share of the tokens); a weights.json; or the run directory of
    a proxy or DoReMi."""
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
    """Write nothing, but time a few steps, and print what the run would read, train and write, and
    the memory and time that it would take."""


@dataclass(frozen=True)
class DoReMiConfig:
    """The DoReMi baseline: learn the domain weights by loss in excess of a reference model's."""

    out: Path
    """The run directory."""
    reference: Path
    """Run directory of a complete base run. Its model is the reference model. Its weights are those
    that batches are drawn at and that the learned weights start from."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
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
class SelectConfig:
    """Score parameters by cancellation effect and select some, for `proxy --selection`."""

    out: Path
    """The run directory."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=1000))
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """lowN or highN: select the N parameters with the lowest or highest scores. The same command on
    a complete run may ask for other strategies."""
    reading: Literal[
        "norms-over-change", "sum-over-change", "change-over-sum", "change-over-norms"
    ] = "norms-over-change"
    """How the score is computed. norms-over-change (the paper's words): the sum of the examples'
    gradient norms over the norm of the weight change. sum-over-change: the norm of the gradients'
    sum over it. change-over-sum (the paper's formula) and change-over-norms: the inverses. Every
    run measures all four; this one is ranked."""
    mode: Literal["auto", "together", "single"] = "auto"
    """together: run the examples of a batch in one pass. single: one after another, slower, for any
    model. auto: together if the model's modules allow it."""
    targets: tuple[str, ...] = ()
    """Domains that are evaluated and never trained on, as in the proxy."""
    batch_size: Count = 28
    """Blocks per step, equally many of each domain."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""


StageConfig = ProxyConfig | BaseConfig | DoReMiConfig | SelectConfig
"""What a stage that trains is told."""
