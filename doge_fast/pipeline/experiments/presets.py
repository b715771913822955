"""How large an experiment is: for a test, for minutes, for two cores, or as in the paper."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from doge_fast.defaults import default_mu
from doge_fast.pipeline.config import (
    BaseArmsConfig,
    CorpusConfig,
    DemoConfig,
    DoReMiArmsConfig,
    Experiment,
    ExperimentConfig,
    Preset,
    ProxyArmsConfig,
    RatesConfig,
    SelectionArmsConfig,
)
from doge_fast.weights_file import plain

PAPER_LANGUAGES = ("en", "de", "fr", "es", "ru")
PAPER_LANGUAGE_TARGETS = ("ca", "nl")
SLIMPAJAMA, WIKI40B = "DKYoon/SlimPajama-6B", "google/wiki40b"
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
# Whose weights are for one target at a time.
_TARGETED = ("ood", "wiki40b")

_SMALL = ExperimentConfig("universal")
_PRESETS: Mapping[Preset, ExperimentConfig] = {
    "small": _SMALL,
    "demo": replace(
        _SMALL,
        seeds=(0,),
        corpus=CorpusConfig(vocab_size=2048),
        rates=RatesConfig(eval_blocks=128),
        # At a rate of 2e-3 runs of this length leave their first plateau at a step that chance
        # decides, which moves perplexities by more than the weights do.
        proxy=ProxyArmsConfig(model="tiny", steps=200),
        base=BaseArmsConfig(models=("tiny",), steps=200, eval_points=1),
    ),
    "smoke": replace(
        _SMALL,
        seeds=(0, 1),
        corpus=CorpusConfig(vocab_size=320, block_size=32),
        rates=RatesConfig(eval_blocks=4),
        proxy=ProxyArmsConfig(model="tiny", steps=10, sequences_per_domain=2),
        base=BaseArmsConfig(
            models=("tiny",), steps=10, batch_size=8, eval_points=4, finetune_steps=3
        ),
        doremi=DoReMiArmsConfig(longer=0.5),
        # Of a model of 28 tensors.
        selection=SelectionArmsConfig(
            steps=3, strategies=("low5", "low10", "low20", "high10", "high5")
        ),
    ),
    # Source: DoGE, experimental setup and appendix model-archs.
    "paper": replace(
        _SMALL,
        corpus=CorpusConfig(
            data=SLIMPAJAMA,
            domain_column="meta.redpajama_set_name",
            domains=_REDPAJAMA,
            tokenizer="gpt2",
            vocab_size=52_000,
            block_size=512,
        ),
        rates=RatesConfig(
            learning_rate=5e-4, min_learning_rate=1e-4, eval_blocks=None, dtype="bfloat16"
        ),
        proxy=ProxyArmsConfig(
            model="82M",
            models=("60M", "82M", "124M"),
            steps=10_000,
            # 126 sequences of seven domains; base models see 128.
            sequences_per_domain=18,
            mu=0.01,
            domain_max_grad_norm=None,
        ),
        base=BaseArmsConfig(
            models=("124M", "210M", "684M"),
            steps=10_000,
            batch_size=128,
            finetune_steps=1000,
            finetune_learning_rate=1e-4,
        ),
        doremi=DoReMiArmsConfig(longer=5.0),
        selection=SelectionArmsConfig(steps=1000),
    ),
}
# The paper's rates of its largest model; all others share theirs.
_RATES = {"684M": (1.5e-4, 5e-5)}


def preset_of(
    name: Experiment, preset: Preset = "small", *, data: str | None = None
) -> ExperimentConfig:
    """An experiment of a preset's size; `dataclasses.replace` changes what is wanted otherwise.

    Args:
        name: the experiment.
        preset: its size.
        data: another corpus than the preset's, so that its choice of domains does not hold.
    """
    config = replace(_PRESETS[preset], name=name, preset=preset)
    corpus, is_paper = config.corpus, preset == "paper"
    if name == "wiki40b" and is_paper:
        corpus = replace(corpus, data=WIKI40B, tokenizer="train", domains=(), domain_column=None)
    if data is not None:
        corpus = replace(corpus, data=data, domains=(), domain_column=None)
    # As the captions of its tables of targets say.
    seeds = config.seeds[:2] if is_paper and name in _TARGETED else config.seeds
    return replace(config, corpus=corpus, seeds=seeds)


def check(config: ExperimentConfig) -> None:
    """Raise ValueError where a setting is out of its range."""
    mu, rates = config.proxy.mu, config.rates
    if mu is not None and not 0 < mu < math.inf:
        raise ValueError(f"mu must be positive and finite; got {mu}.")
    if rates.min_learning_rate > rates.learning_rate:
        raise ValueError(
            f"min_learning_rate must be at most learning_rate; got {rates.min_learning_rate:g} "
            f"and {rates.learning_rate:g}."
        )
    if len(set(config.seeds)) < len(config.seeds) or not config.seeds:
        raise ValueError(
            f"seeds must be distinct, and at least one; got {', '.join(map(str, config.seeds))}."
        )
    if config.name == "wiki40b" and config.corpus.data == "installed":
        raise ValueError(
            "wiki40b needs text in several languages: name a directory with a folder for each, "
            "data=DIR, or take preset=paper with the Hub's Wiki40b."
        )


def known_domains(config: ExperimentConfig) -> tuple[str, ...] | None:
    """The domains of the paper's corpora; None of others, which must be looked into."""
    if config.corpus.data == WIKI40B:
        return (*PAPER_LANGUAGES, *(config.targets or PAPER_LANGUAGE_TARGETS))
    return config.corpus.domains if config.corpus.data == SLIMPAJAMA else None


def with_mu(config: ExperimentConfig, names: Sequence[str]) -> ExperimentConfig:
    """The experiment with the proxies' mu as a number.

    Args:
        config: as it was asked for.
        names: domains that the corpus holds.
    """
    if config.proxy.mu is not None:
        return config
    is_universal = config.name not in _TARGETED and config.proxy.target_batch == "same"
    total = len(config.corpus.domains or names) if is_universal else 1
    rate, _ = rates_of(config, config.proxy.model)
    return replace(config, proxy=replace(config.proxy, mu=default_mu(rate, total)))


def rates_of(config: ExperimentConfig, model: str) -> tuple[float, float]:
    """Peak and end of the learning rate of a model of the family.

    Source: DoGE, Table archictectures.
    """
    return _RATES.get(model, (config.rates.learning_rate, config.rates.min_learning_rate))


def doremi_steps(config: ExperimentConfig) -> tuple[int, ...]:
    """Steps of reference and proxy, for each of DoReMi's arms."""
    steps = config.proxy.steps
    other = max(1, round(steps * config.doremi.longer))
    return config.doremi.steps or tuple(sorted((steps, other)))


def demo_of(config: DemoConfig) -> ExperimentConfig:
    """The experiment that the verb `demo` runs."""
    preset = preset_of("demo", "demo", data=config.data)
    return replace(
        preset,
        out=config.out,
        targets=(config.target,),
        seeds=(config.seed,),
        corpus=replace(preset.corpus, cache_dir=config.cache_dir),
        rates=replace(preset.rates, device=config.device),
        proxy=replace(preset.proxy, steps=config.steps),
        base=replace(preset.base, steps=config.steps),
    )


def settings_of(config: ExperimentConfig) -> dict[str, Any]:
    """What experiment.json lists, and what may not change while an experiment is under way.

    Args:
        config: mu a number.
    """
    corpus, rates, proxy, base = config.corpus, config.rates, config.proxy, config.base
    settings = {
        "data": corpus.data,
        "domain_column": corpus.domain_column,
        "domains": corpus.domains,
        "tokenizer": corpus.tokenizer,
        "vocab_size": corpus.vocab_size,
        "block_size": corpus.block_size,
        "max_tokens_per_domain": corpus.max_tokens_per_domain,
        "proxy_model": proxy.model,
        "proxy_models": proxy.models,
        "base_models": base.models,
        "proxy_steps": proxy.steps,
        "doremi_steps": doremi_steps(config),
        "base_steps": base.steps,
        "finetune_steps": base.finetune_steps,
        "selection_steps": config.selection.steps,
        "sequences_per_domain": proxy.sequences_per_domain,
        "batch_size": base.batch_size,
        "learning_rate": rates.learning_rate,
        "min_learning_rate": rates.min_learning_rate,
        "finetune_learning_rate": base.finetune_learning_rate,
        "mu": proxy.mu,
        "score": proxy.score,
        "domain_max_grad_norm": proxy.domain_max_grad_norm or None,
        "seeds": config.seeds,
        "eval_blocks": rates.eval_blocks,
        "eval_points": base.eval_points,
        "strategies": config.selection.strategies,
        "dtype": rates.dtype,
    }
    recorded: dict[str, Any] = plain(settings)
    return recorded
