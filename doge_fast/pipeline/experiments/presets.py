"""How large an experiment is: for a test, for two cores, or as in the paper."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from doge_fast import simplex
from doge_fast.pipeline.config import ExperimentConfig

PAPER_SOURCES = ("arxiv", "book", "c4", "commoncrawl", "github", "stackexchange", "wikipedia")
PAPER_LANGUAGES = ("en", "de", "fr", "es", "ru")
PAPER_LANGUAGE_TARGETS = ("ca", "nl")
# As the Hub's copy names them.
_REDPAJAMA = (
    "RedPajamaArXiv",
    "RedPajamaBook",
    "RedPajamaC4",
    "RedPajamaCommonCrawl",
    "RedPajamaGithub",
    "RedPajamaStackExchange",
    "RedPajamaWikipedia",
)


@dataclass(frozen=True)
class Settings:
    """Everything about the size of an experiment. A field of `ExperimentConfig` overrides it."""

    data: str
    """Corpus of the experiments on SlimPajama."""
    language_data: str | None
    """Corpus of wiki40b; None: there is no default."""
    domain_column: str | None
    domains: tuple[str, ...]
    """Training domains; empty: all there are."""
    tokenizer: str
    vocab_size: int
    block_size: int
    max_tokens_per_domain: int | None
    proxy_model: str
    proxy_models: tuple[str, ...]
    """Of `scales`, the middle one being the yardstick."""
    base_models: tuple[str, ...]
    """Of `universal`; the other experiments take the first."""
    proxy_steps: int
    doremi_steps: tuple[int, ...]
    """Of reference and proxy of DoReMi, for each of its arms."""
    base_steps: int
    finetune_steps: int
    selection_steps: int
    """In which the cancellation effect is summed up (T_c)."""
    sequences_per_domain: int
    batch_size: int
    learning_rate: float
    min_learning_rate: float
    finetune_learning_rate: float
    mu: float | None
    """None: as a proxy's, of the domains that there are."""
    score: Literal["paper", "published"]
    domain_max_grad_norm: float | None
    seeds: tuple[int, ...]
    eval_blocks: int | None
    eval_points: int
    """Evaluations along a base run, for the curves."""
    strategies: tuple[str, ...]
    """Of `selection`."""
    dtype: Literal["float32", "bfloat16"]


_STRATEGIES = ("low10", "low30", "low50", "high30", "high10")

PRESETS: Mapping[str, Settings] = {
    "smoke": Settings(
        data="installed",
        language_data=None,
        domain_column=None,
        domains=(),
        tokenizer="train",
        vocab_size=320,
        block_size=32,
        max_tokens_per_domain=None,
        proxy_model="tiny",
        proxy_models=("tiny", "mini", "small"),
        base_models=("tiny",),
        proxy_steps=10,
        doremi_steps=(5, 10),
        base_steps=10,
        finetune_steps=3,
        selection_steps=3,
        sequences_per_domain=2,
        batch_size=8,
        learning_rate=1e-3,
        min_learning_rate=2e-4,
        finetune_learning_rate=2e-4,
        mu=None,
        score="paper",
        domain_max_grad_norm=1.0,
        seeds=(0, 1),
        eval_blocks=4,
        eval_points=4,
        # Of a model of 28 tensors.
        strategies=("low5", "low10", "low20", "high10", "high5"),
        dtype="float32",
    ),
    "small": Settings(
        data="installed",
        language_data=None,
        domain_column=None,
        domains=(),
        tokenizer="train",
        vocab_size=4096,
        block_size=128,
        max_tokens_per_domain=None,
        proxy_model="mini",
        proxy_models=("tiny", "mini", "small"),
        base_models=("mini",),
        proxy_steps=1500,
        doremi_steps=(1500, 3000),
        base_steps=1500,
        finetune_steps=150,
        selection_steps=150,
        sequences_per_domain=4,
        batch_size=28,
        learning_rate=1e-3,
        min_learning_rate=2e-4,
        finetune_learning_rate=2e-4,
        mu=None,
        score="paper",
        domain_max_grad_norm=1.0,
        seeds=(0, 1, 2),
        eval_blocks=256,
        eval_points=20,
        strategies=_STRATEGIES,
        dtype="float32",
    ),
    # Source: DoGE, experimental setup and appendix model-archs.
    "paper": Settings(
        data="DKYoon/SlimPajama-6B",
        language_data="google/wiki40b",
        domain_column="meta.redpajama_set_name",
        domains=_REDPAJAMA,
        tokenizer="gpt2",
        vocab_size=52_000,
        block_size=512,
        max_tokens_per_domain=None,
        proxy_model="82M",
        proxy_models=("60M", "82M", "124M"),
        base_models=("124M", "210M", "684M"),
        proxy_steps=10_000,
        doremi_steps=(10_000, 50_000),
        base_steps=10_000,
        finetune_steps=1000,
        selection_steps=1000,
        # 126 sequences of seven domains; base models see 128.
        sequences_per_domain=18,
        batch_size=128,
        learning_rate=5e-4,
        min_learning_rate=1e-4,
        finetune_learning_rate=1e-4,
        mu=0.01,
        score="paper",
        domain_max_grad_norm=None,
        seeds=(0, 1, 2),
        eval_blocks=None,
        eval_points=20,
        strategies=_STRATEGIES,
        dtype="bfloat16",
    ),
}
# The paper's rates of its largest model; all others share theirs.
_RATES = {"684M": (1.5e-4, 5e-5)}


def settings_of(config: ExperimentConfig) -> Settings:
    """The preset with what was asked for otherwise.

    Raises:
        ValueError: a number is out of its range.
    """
    preset = PRESETS[config.preset]
    own = {name: getattr(config, name, None) for name in (each.name for each in fields(preset))}
    asked = {name: value for name, value in own.items() if value not in (None, ())}
    if config.data is not None or config.name == "wiki40b":
        # Of another corpus than that whose domains the preset names.
        asked |= {"domains": config.domains, "domain_column": config.domain_column}
    if config.data is not None:
        asked["language_data"] = config.data
    if config.doremi_steps == () and config.proxy_steps is not None:
        # The longer arm in the preset's proportion.
        factor = config.proxy_steps / preset.proxy_steps
        asked["doremi_steps"] = tuple(max(1, round(each * factor)) for each in preset.doremi_steps)
    if config.preset == "paper" and config.name in ("ood", "wiki40b") and not config.seeds:
        # As its captions say.
        asked["seeds"] = preset.seeds[:2]
    if config.domain_max_grad_norm == 0:
        asked["domain_max_grad_norm"] = None
    settings = replace(preset, **asked)
    if settings.mu is not None and not 0 < settings.mu < math.inf:
        raise ValueError(f"mu must be positive and finite; got {settings.mu}.")
    if settings.min_learning_rate > settings.learning_rate:
        raise ValueError(
            f"min_learning_rate must be at most learning_rate; got {settings.min_learning_rate:g} "
            f"and {settings.learning_rate:g}."
        )
    if len(set(settings.seeds)) < len(settings.seeds):
        raise ValueError(f"Seeds must differ; got {', '.join(map(str, settings.seeds))}.")
    return settings


def with_mu(settings: Settings, config: ExperimentConfig, names: Sequence[str]) -> Settings:
    """The settings with the proxies' mu as a number.

    Args:
        settings: those of `settings_of`.
        config: which experiment; `ood` and `wiki40b` learn for one target, the others for all
            domains at once.
        names: domains that the corpus holds.
    """
    if settings.mu is not None:
        return settings
    is_universal = config.name not in ("ood", "wiki40b") and config.target_batch == "same"
    rate, _ = rates_of(settings, settings.proxy_model)
    total = len(settings.domains or names) if is_universal else 1
    return replace(settings, mu=simplex.default_mu(rate, total))


def rates_of(settings: Settings, model: str) -> tuple[float, float]:
    """Peak and end of the learning rate of a model of the family.

    Source: DoGE, Table archictectures.
    """
    return _RATES.get(model, (settings.learning_rate, settings.min_learning_rate))
