"""An experiment: what its proxies, its base models and what they are compared with are told."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from doge_fast.pipeline.config.ranges import (
    Count,
    Device,
    Positive,
    PositiveOrZero,
    Range,
    Seed,
)
from doge_fast.pipeline.config.stages import (
    CorpusConfig,
    check_data,
    check_is_run,
    check_model_name,
    check_rates,
)
from doge_fast.weights.defaults import DOMAIN_MAX_GRAD_NORM

Experiment = Literal[
    "universal",
    "doremi",
    "ood",
    "wiki40b",
    "scales",
    "selection",
    "curriculum",
    "proxy_vs_base",
]
Preset = Literal["smoke", "tiny", "small", "paper"]


def _check_runs(config: "ExperimentConfig | TemperatureConfig") -> None:
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        told = ", ".join(map(str, config.seeds)) or "none"
        raise ValueError(f"seeds must be distinct, and at least one; got {told}.")
    if config.plan and config.only:
        raise ValueError("--plan prints the commands of all runs; leave out --only.")


@dataclass(frozen=True)
class RatesConfig:
    """Training options of all models of an experiment."""

    learning_rate: Positive = 1e-3
    """Peak learning rate of all models but the paper's largest."""
    min_learning_rate: PositiveOrZero = 2e-4
    """Learning rate at the end of the cosine schedule."""
    eval_blocks: Count | None = 256
    """Held-out blocks per domain for the tables; None: all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast, with float32 master weights."""
    device: Device = "auto"
    """auto: a GPU if there is one."""

    def _check(self) -> None:
        check_rates(self.learning_rate, self.min_learning_rate)


@dataclass(frozen=True)
class ProxyArmsConfig:
    """The proxies of an experiment."""

    model: str = "mini"
    """Size of the proxies."""
    models: tuple[str, ...] = ("tiny", "mini", "small")
    """scales: three sizes; the first and the last are compared with the middle one."""
    steps: Count = 1500
    """Optimizer steps."""
    sequences_per_domain: Count = 4
    """Blocks of every domain in every step."""
    mu: Positive | None = None
    """Bregman coefficient; None: as for `doge-fast proxy`."""
    score: Literal["paper", "published"] = "paper"
    """The score of the paper or of its published code, as for `doge-fast proxy`."""
    domain_max_grad_norm: PositiveOrZero | None = DOMAIN_MAX_GRAD_NORM
    """Clip each domain's gradient to this norm before scoring; 0 or None: do not clip."""


@dataclass(frozen=True)
class BaseArmsConfig:
    """The base models of an experiment."""

    models: tuple[str, ...] = ("mini",)
    """Sizes of the base models. universal trains all of them, other experiments only the first."""
    steps: Count = 1500
    """Optimizer steps."""
    batch_size: Count = 28
    """Blocks per step, over all domains."""
    finetune_steps: Count = 150
    """ood, wiki40b: steps of fine-tuning on the target at the end."""
    finetune_learning_rate: Positive = 2e-4
    """Peak learning rate of the fine-tuning."""


@dataclass(frozen=True)
class DoReMiArmsConfig:
    """The DoReMi runs of an experiment."""

    steps: tuple[Count, ...] = ()
    """Steps of DoReMi's reference and proxy; each number makes one DoReMi run. Empty: as many steps
    as DoGE's proxy, and twice as many."""


@dataclass(frozen=True)
class SelectionArmsConfig:
    """The selection runs of an experiment."""

    steps: Count = 150
    """Steps over which the cancellation effect is summed (T_c)."""
    strategies: tuple[str, ...] = ("low10", "low30", "low50", "high30", "high10")
    """lowN or highN: select the N parameters with the lowest or highest scores."""


@dataclass(frozen=True)
class ExperimentConfig:
    """All runs of an experiment, a table and a report. The same command resumes.

    Options that are not given take the preset's values.
    """

    main: ClassVar = ("name", "data", "out", "preset", "targets", "seeds", "plan", "only")
    examples: ClassVar = (
        "universal --data corpus",
        "ood --preset tiny --plan   # prints a command for every run",
    )

    name: Experiment
    """universal: learned weights against uniform, natural and DoReMi's. doremi: both variants of
    DoReMi beside DoGE, with their costs. ood: each domain in turn as the target of the others.
    wiki40b: languages as targets of other languages. scales: weights from proxies of three sizes.
    selection: scores from the gradients of some parameters only. curriculum: weights that change as
    the proxy's did. proxy_vs_base: the proxy evaluated as a model."""
    out: Path | None = None
    """Directory of the runs and the report; None: experiments/NAME."""
    preset: Preset = "small"
    """smoke: seconds per run, to test that it works. tiny: minutes per run, for experiments of many
    runs. small: for a small corpus on two cores. paper: the paper's models, steps, batches and Hub
    data."""
    targets: tuple[str, ...] = ()
    """ood, wiki40b: the domains that are targets, one after another. Empty: ood: all; wiki40b: ca
    and nl."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Every run of the plan is repeated with each seed. Runs of one seed have the same
    initialisation and the same order of the data."""
    plan: bool = False
    """Only print the runs of the plan, as commands in an order in which they can be run."""
    only: tuple[str, ...] = ()
    """Names of runs in the plan: make only these, where they are not complete, and no report."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    rates: RatesConfig = field(default_factory=RatesConfig)
    proxy: ProxyArmsConfig = field(default_factory=ProxyArmsConfig)
    base: BaseArmsConfig = field(default_factory=BaseArmsConfig)
    doremi: DoReMiArmsConfig = field(default_factory=DoReMiArmsConfig)
    selection: SelectionArmsConfig = field(default_factory=SelectionArmsConfig)

    def _check(self) -> None:
        _check_runs(self)
        self.corpus.check_outside(out=self.out, cache_dir=self.corpus.cache_dir)
        if self.name == "wiki40b" and self.corpus.data == "installed":
            raise ValueError(
                "wiki40b needs text in several languages: name a directory with a folder for each, "
                "data=DIR, or take preset=paper with the Hub's Wiki40b."
            )


@dataclass(frozen=True)
class DemoConfig:
    """The whole method on text found on this machine, in minutes.

    A proxy learns weights for a domain that it is not trained on; base models at several distances
    along its direction, uniform weights among them, choose how far to follow it; a page shows both.
    The same command goes on where it was killed.
    """

    examples: ClassVar = ("", "--data corpus --target wiki")

    out: Path = Path("demo")
    """Directory of the runs and the report."""
    data: str = "installed"
    """A directory (one folder or file per domain), a file or Hub id, or "installed": text found in
    this Python environment."""
    target: str = "reference"
    """The domain that the weights are learned for: measured, not trained on. universal: all."""
    steps: Count = 200
    """Optimizer steps of the proxy and of each of the base models, four at most."""
    seed: Seed = 0
    """Seed of the model initialisation and of the order of the data."""
    device: Device = "auto"
    """auto: a GPU if there is one."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the user's cache
    directory."""

    def _check(self) -> None:
        check_data(self.data)


@dataclass(frozen=True)
class TemperatureConfig:
    """How far to follow a proxy's weights, measured: base models at alpha^(1/T) for a few T."""

    main: ClassVar = ("proxy", "out", "model", "steps", "seeds", "most_runs", "plan", "only")
    examples: ClassVar = ("runs/proxy", "runs/proxy --out runs/far --seeds 0 1 2 --plan")

    proxy: Path
    """The run directory of a proxy: its weights, and the corpus, model and settings of the base
    models."""
    out: Path | None = None
    """The directory of the base models, the chosen weights.json and the report; None: beside the
    proxy, PROXY-temperature."""
    model: str | None = None
    """A size or configuration for the base models, as for `base`; None: the proxy's."""
    steps: Count | None = None
    """Optimizer steps of each base model; None: the proxy's, at least 200."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Each temperature is measured with every seed. Models of one seed have the same initialisation
    and the same order of the data."""
    most_runs: Annotated[int, Range(3)] = 6
    """Base models of each seed, at most."""
    budget_tokens: Positive | None = None
    """Tokens of the training that the weights are for: the epochs of each domain are counted for
    it. None: those of one of the base models here."""
    eval_blocks: Count | None = 256
    """Held-out blocks per domain; None: all."""
    plan: bool = False
    """Only print the runs to make next, as commands that can run side by side. When these are
    complete, ask again: the next temperatures follow from what was measured."""
    only: tuple[str, ...] = ()
    """Names of runs that --plan printed: make only these."""
    device: Device = "auto"
    """auto: a GPU if there is one."""

    def _check(self) -> None:
        _check_runs(self)
        check_is_run("proxy", self.proxy)
        if self.model is not None:
            check_model_name(self.model)
