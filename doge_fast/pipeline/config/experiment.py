"""An experiment: what its proxies, its base models and what they are compared with are told."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from doge_fast.defaults import DOMAIN_MAX_GRAD_NORM
from doge_fast.pipeline.config.components import CorpusConfig, TasksConfig
from doge_fast.pipeline.config.ranges import (
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Range,
    Seed,
)

Experiment = Literal[
    "demo",
    "universal",
    "doremi",
    "ood",
    "wiki40b",
    "scales",
    "selection",
    "curriculum",
    "early",
    "proxy_vs_base",
    "sensitivity",
    "regret",
    "known",
]
Preset = Literal["smoke", "demo", "tiny", "small", "paper"]


@dataclass(frozen=True)
class RatesConfig:
    """What all models of an experiment share in training."""

    learning_rate: Positive = 1e-3
    """Peak, of all models but the paper's largest."""
    min_learning_rate: PositiveOrZero = 2e-4
    """End of the cosine."""
    eval_blocks: Count | None = 256
    """Held-out blocks per domain behind the tables; None: all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """As for the other stages."""
    device: str = "auto"
    """As for the other stages."""


@dataclass(frozen=True)
class ProxyArmsConfig:
    """The proxies of an experiment."""

    model: str = "mini"
    """Their size."""
    models: tuple[str, ...] = ("tiny", "mini", "small")
    """scales: three sizes; the middle one is what the others are compared with."""
    steps: Count = 1500
    """Optimizer steps."""
    sequences_per_domain: Count = 4
    """Blocks of every domain in a step."""
    mu: Positive | None = None
    """Bregman coefficient; None: as a proxy's, of the domains that there are."""
    score: Literal["paper", "published"] = "paper"
    """As for the proxy."""
    domain_max_grad_norm: PositiveOrZero | None = DOMAIN_MAX_GRAD_NORM
    """As for the proxy; 0 or None: do not cut."""
    target_batch: Literal["same", "mix"] = "same"
    """universal: W from the batches that train the proxy, or from held-out ones of all domains."""


@dataclass(frozen=True)
class BaseArmsConfig:
    """The base models of an experiment."""

    models: tuple[str, ...] = ("mini",)
    """universal: their sizes; elsewhere the first counts."""
    steps: Count = 1500
    """Optimizer steps."""
    batch_size: Count = 28
    """Blocks in a step."""
    eval_points: Count = 20
    """Evaluations along a run, for the curves."""
    finetune_steps: CountOrZero = 150
    """ood, wiki40b: steps on the target afterwards."""
    finetune_learning_rate: Positive = 2e-4
    """Peak of these steps."""


@dataclass(frozen=True)
class DoReMiArmsConfig:
    """DoReMi's arms."""

    steps: tuple[Count, ...] = ()
    """Steps of DoReMi's reference and proxy, for each of its arms; empty: as many as DoGE's proxy
    has, and `longer` times as many."""
    longer: Positive = 2.0
    """See `steps`."""


@dataclass(frozen=True)
class SelectionArmsConfig:
    """The arms of the experiment selection."""

    steps: Count = 150
    """Steps in which the cancellation effect is summed up (T_c)."""
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """As for select."""


@dataclass(frozen=True)
class SwarmArmsConfig:
    """The swarm of the experiment regret: base models at mixtures that are drawn."""

    # Below this there is nothing to cross-validate.
    mixtures: Annotated[int, Range(8)] = 24
    """How many; two thirds around uniform and natural weights, a third around learned ones."""
    concentration: Positive = 3.0
    """Of the Dirichlet draws, times the number of domains; around learned weights four times that.
    Larger: nearer to what they are drawn around."""


@dataclass(frozen=True)
class ExperimentConfig:
    """All arms of an experiment, a table and a report. The same command resumes.

    What is not given here is the preset's.
    """

    name: Experiment
    """universal: learned weights against uniform, natural and DoReMi's. doremi: DoReMi in both
    readings beside DoGE, with what each costs. ood: every domain as the target of the others.
    wiki40b: languages as targets of others. scales: weights from proxies of three sizes.
    selection: gradients of some parameters alone. curriculum: weights that follow the proxy's.
    early: the first quarter of training. proxy_vs_base: the proxy as a model. sensitivity: one
    setting of the proxy changed at a time. regret: how far each method's weights are from the best
    ones, by a regression over a swarm of base models. known: corpora whose best mixture is known,
    made of the data or, where none is named, of generated text. demo: the story of the first two in
    minutes."""
    out: Path | None = None
    """Where runs and report go; None: experiments/NAME."""
    preset: Preset = "small"
    """smoke: seconds a run, to see that it works. demo: minutes in all. tiny: minutes a run, for
    experiments of many. small: for a small corpus on two cores. paper: the paper's models, steps,
    batches and Hub data."""
    targets: tuple[str, ...] = ()
    """ood, wiki40b, demo: domains to be the target, each in its turn; empty: all, ca and nl, or
    reference. known: the one that another hides; empty: the last."""
    weights: tuple[str, ...] = ()
    """regret: NAME=FILE, a weights.json or the run directory of a proxy: further arms. Those of an
    experiment that is done are judged by its swarm, and base models trained at them alone."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Each arm is run with each; arms of one seed start alike and see their data in one order."""
    plan: bool = False
    """Only say which runs there would be, and by which commands they can be made side by side."""
    only: tuple[str, ...] = ()
    """Make these runs of the plan alone, by their names, and no report."""
    workers: Count = 1
    """Processes that share the runs, and the cores and GPUs of this machine; with `submitit` jobs,
    each with what it asks for. Every run is made by one of them."""
    submitit: tuple[str, ...] | None = None
    """Workers are jobs of SLURM. NAME=VALUE: what submitit's AutoExecutor takes, such as
    timeout_min=600 gpus_per_node=1 slurm_partition=gpu."""
    lease: Positive | None = None
    """Seconds without a sign of life after which another worker takes a run over. None: when its
    process is gone, which flock tells. For file systems without a flock that all machines see."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    rates: RatesConfig = field(default_factory=RatesConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    proxy: ProxyArmsConfig = field(default_factory=ProxyArmsConfig)
    base: BaseArmsConfig = field(default_factory=BaseArmsConfig)
    doremi: DoReMiArmsConfig = field(default_factory=DoReMiArmsConfig)
    selection: SelectionArmsConfig = field(default_factory=SelectionArmsConfig)
    swarm: SwarmArmsConfig = field(default_factory=SwarmArmsConfig)


@dataclass(frozen=True)
class DemoConfig:
    """The whole story on text found on this machine, in minutes: the experiment `demo`.

    Weights learned for all domains, and for one that nobody trains on; base models at learned,
    uniform and natural weights; a table and a report.
    """

    out: Path = Path("demo")
    """Where the runs and the report go."""
    data: str = "installed"
    """The corpus, as for the other stages."""
    target: str = "reference"
    """The domain of the out-of-domain half: measured, not trained on."""
    steps: Count = 200
    """Optimizer steps of each of the two proxies and the five base models."""
    seed: Seed = 0
    """Model initialisation and the order of the data."""
    device: str = "auto"
    """As for the other stages."""
    cache_dir: Path | None = None
    """As for the other stages."""
