"""An experiment, and the demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


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
    domain_max_grad_norm: float | None = 1.0
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
