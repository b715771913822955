"""What can be refused of a configuration before anything slow is imported: numbers, words, paths.

Whoever takes a configuration calls `check` first, the command line before it loads torch. Devices
and what the corpus holds are looked at later, by what knows them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline import config as configs
from doge_fast.pipeline import named
from doge_fast.pipeline.baselines import BASELINES
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.sizes import SIZES

Target = str | dict[str, float]

UNIVERSAL = "universal"
# A file has a suffix; an id is owner/name, and of models and tokenizers a name alone too.
_HUB_DATA = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_HUB_MODEL = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check(config: Any) -> None:
    """Look at every field of a dataclass, and of those inside.

    Raises:
        ValueError: a number is out of its range, a word is none of those that are known, two
            fields do not fit, or a path that must be there is not.
    """
    check_ranges(config)
    _check(config)


def _check(config: Any) -> None:
    for kind, look in _CHECKS.items():
        if isinstance(config, kind):
            look(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _check(value)


def parse_target(names: Sequence[str]) -> Target:
    """What `target` on the command line means: "universal" or {name: tau}.

    `names` is this word alone; or "mix" and held-out domains, each NAME or NAME=WEIGHT.

    Raises:
        ValueError: no name, one twice, that word with others, or a weight that is no number
            greater than zero.
    """
    if tuple(names) == (UNIVERSAL,):
        return UNIVERSAL
    tau: dict[str, float] = {}
    for item in names:
        name, _, weight = item.partition("=")
        if name in tau or name in ("", UNIVERSAL):
            raise ValueError(
                "target must be universal alone, or distinct names, each NAME or "
                f"NAME=WEIGHT; got {' '.join(names)}."
            )
        try:
            tau[name] = named.float_of(weight or "1")
        except ValueError:
            tau[name] = math.nan
        if not 0 < tau[name] < math.inf:
            raise ValueError(f"A target's weight must be a number greater than zero; got {item!r}.")
    if not tau:
        raise ValueError("target must name something: universal, mix, or held-out domains.")
    return tau


def check_data(data: str) -> None:
    """Raise ValueError unless it is a path that is there, or may be a Hub id."""
    if not data:
        raise ValueError("data (--data) must name a directory, a file or a Hub id; it is empty.")
    if data == "installed" or Path(data).expanduser().exists():
        return
    if not _HUB_DATA.fullmatch(data) or Path(data).suffix in _SUFFIXES:
        raise ValueError(
            f"{data} does not exist. Give a directory with one folder or file per domain, "
            'a file, a Hub id (owner/name), or "installed".'
        )


def _check_corpus(config: configs.CorpusConfig) -> None:
    check_data(config.data)
    name = config.tokenizer
    if not (Path(name).expanduser().exists() or _HUB_MODEL.fullmatch(name)):
        raise ValueError(
            f'tokenizer must be a folder that is there, a Hub id, or "train"; got {name!r}, which '
            "does not exist."
        )


def _check_places(config: configs.StageConfig | configs.ExperimentConfig) -> None:
    """What lies inside the corpus is read as a part of it."""
    corpus, data = config.corpus, Path(config.corpus.data).expanduser().resolve()
    # Where domains are named nothing else is.
    is_read = corpus.domain_column is not None or not corpus.domains
    # Else text of this environment, or a Hub id, of which a folder may have the name.
    is_folder = corpus.data not in ("", "installed") and data.is_dir()
    for name, place in (("out", config.out), ("cache_dir", corpus.cache_dir)):
        if place is None or not (is_folder and is_read):
            continue
        path = place.expanduser().resolve()
        if data in path.parents and not path.relative_to(data).parts[0].startswith("."):
            raise ValueError(
                f"{name} must lie outside the corpus, of which it would be a domain; {place} is in "
                f"{corpus.data}. Name another directory, or the domains to train on (--domains)."
            )


def _check_model(config: configs.ModelConfig | configs.ProfileConfig) -> None:
    name = config.model
    if not (name in SIZES or Path(name).expanduser().exists() or _HUB_MODEL.fullmatch(name)):
        raise ValueError(
            f"model must be a size of the family ({', '.join(SIZES)}), or a folder or Hub id whose "
            f"config.json AutoConfig opens; got {name!r}, which does not exist."
        )


def _check_rates(config: configs.TrainingConfig | configs.RatesConfig) -> None:
    if config.min_learning_rate > config.learning_rate:
        raise ValueError(
            "min_learning_rate must be at most learning_rate; got "
            f"{config.min_learning_rate} and {config.learning_rate}. Lower the first with the "
            "second."
        )


def _check_training(config: configs.TrainingConfig) -> None:
    _check_rates(config)
    if config.warmup_steps is not None and config.warmup_steps >= config.steps:
        raise ValueError(
            f"warmup_steps must be less than steps; got {config.warmup_steps} of {config.steps}."
        )


def _check_proxy(config: configs.ProxyConfig) -> None:
    parse_target(config.target)
    if config.selection is not None and not config.selection.is_file():
        raise ValueError(f"selection must be a JSON file; {config.selection} is not there.")


def _check_base(config: configs.BaseConfig) -> None:
    weights = Path(config.weights)
    is_given = "=" in config.weights or (config.weights and weights.exists())
    if config.weights not in BASELINES and not is_given:
        raise ValueError(
            f"weights must be {' or '.join(BASELINES)}, a weights.json, the run directory of a "
            f"proxy, or NAME=NUMBER,...; {config.weights!r} is none of them, and no such path "
            "exists."
        )
    has_steps = config.weights not in BASELINES and (weights / "metrics.jsonl").exists()
    if config.stages > 1 and not has_steps:
        raise ValueError(
            f"stages={config.stages} needs the run directory of a proxy, whose weights changed "
            f"from step to step; got weights={config.weights!r}."
        )
    if config.stages > config.training.steps:
        raise ValueError(
            f"stages must be at most the {config.training.steps} steps of the run; got "
            f"{config.stages}."
        )


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds must be distinct, and at least one; got {', '.join(map(str, seeds))}."
        )


def _check_experiment(config: configs.ExperimentConfig) -> None:
    _check_seeds(config.seeds)
    _check_places(config)
    if config.name == "wiki40b" and config.corpus.data == "installed":
        raise ValueError(
            "wiki40b needs text in several languages: name a directory with a folder for each, "
            "data=DIR, or take preset=paper with the Hub's Wiki40b."
        )


def _check_temperature(config: configs.TemperatureConfig) -> None:
    _check_seeds(config.seeds)
    _check_run("proxy", config.proxy)
    if config.model is not None:
        _check_model(configs.ModelConfig(config.model))


def _check_evaluate(config: configs.EvaluateConfig) -> None:
    _check_run("run", config.run)
    if config.data is not None:
        check_data(config.data)
        if config.out is None:
            raise ValueError("data (--data) needs a file for what is measured: name it with --out.")
    asked = {name: getattr(config, name) for name in ("data", "domains", "blocks", "out")}
    if config.tasks.tasks and (unused := [f"--{name}" for name, value in asked.items() if value]):
        raise ValueError(
            "Tasks (--tasks) have documents of their own, and their accuracies go to the run's "
            f"fewshot.json. Leave out {', '.join(unused)}, or the tasks."
        )


def _check_run(what: str, run: Path) -> None:
    if not (run / "config.json").exists():
        raise ValueError(f"{what}: {run} is not a run directory: it holds no config.json.")


_CHECKS: dict[Any, Callable[[Any], None]] = {
    configs.CorpusConfig: _check_corpus,
    configs.StageConfig: _check_places,
    configs.ModelConfig: _check_model,
    configs.ProfileConfig: _check_model,
    configs.RatesConfig: _check_rates,
    configs.TrainingConfig: _check_training,
    configs.ProxyConfig: _check_proxy,
    configs.BaseConfig: _check_base,
    configs.DoReMiConfig: lambda config: _check_run("reference", config.reference),
    configs.ExperimentConfig: _check_experiment,
    configs.TemperatureConfig: _check_temperature,
    configs.EvaluateConfig: _check_evaluate,
    configs.DemoConfig: lambda config: check_data(config.data),
}
