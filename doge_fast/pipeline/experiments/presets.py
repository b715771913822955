"""How large an experiment is: for a test, for minutes, for two cores, or as in the paper."""

import functools
from dataclasses import replace
from pathlib import Path

import yaml

from doge_fast.pipeline.config import Experiment, ExperimentConfig, Preset
from doge_fast.pipeline.config.fields import filled

PAPER_LANGUAGES = ("en", "de", "fr", "es", "ru")
PAPER_LANGUAGE_TARGETS = ("ca", "nl")
SLIMPAJAMA, WIKI40B = "DKYoon/SlimPajama-6B", "google/wiki40b"
# Whose weights are for one target at a time.
_TARGETED = ("ood", "wiki40b")
# The paper's rates of its largest model; all others share theirs.
_RATES = {"684M": (1.5e-4, 5e-5)}


@functools.cache
def _presets() -> dict[str, ExperimentConfig]:
    file = Path(__file__).with_name("presets.yaml")
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    small = ExperimentConfig("universal")
    return {preset: filled(small, fields, preset) for preset, fields in given.items()}


def preset_of(
    name: Experiment, preset: Preset = "small", *, data: str | None = None
) -> ExperimentConfig:
    """An experiment of a preset's size; `dataclasses.replace` changes what is wanted otherwise.

    `data` is another corpus than the preset's, whose choice of domains then does not hold.
    """
    config = replace(_presets()[preset], name=name, preset=preset)
    corpus, is_paper = config.corpus, preset == "paper"
    if name == "wiki40b" and is_paper:
        corpus = replace(corpus, data=WIKI40B, tokenizer="train", domains=(), domain_column=None)
    if data is not None:
        corpus = replace(corpus, data=data, domains=(), domain_column=None)
    # As the captions of its tables of targets say.
    seeds = config.seeds[:2] if is_paper and name in _TARGETED else config.seeds
    return replace(config, corpus=corpus, seeds=seeds)


def known_domains(config: ExperimentConfig) -> tuple[str, ...] | None:
    """The domains of the paper's corpora; None of others, which must be looked into."""
    if config.corpus.data == WIKI40B:
        return (*PAPER_LANGUAGES, *(config.targets or PAPER_LANGUAGE_TARGETS))
    return config.corpus.domains if config.corpus.data == SLIMPAJAMA else None


def rates_of(config: ExperimentConfig, model: str) -> tuple[float, float]:
    """Peak and end of the learning rate of a model of the family.

    Source: DoGE, Table archictectures.
    """
    return _RATES.get(model, (config.rates.learning_rate, config.rates.min_learning_rate))


def doremi_steps(config: ExperimentConfig) -> tuple[int, ...]:
    """Steps of reference and proxy, for each of DoReMi's arms."""
    return config.doremi.steps or (config.proxy.steps, 2 * config.proxy.steps)
