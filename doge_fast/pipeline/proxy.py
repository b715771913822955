"""Stage one: a proxy model learns the domain weights.

The weights that count are the average over the run, alpha_bar = mean_t alpha^(t); the last ones
are kept beside them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from doge_fast import generalization
from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.pipeline import baselines, domains, records, training
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.domains import UNIVERSAL, Corpus, ProxyBatches
from doge_fast.pipeline.training import ByName, RecordedTrainer, Task

Target = str | dict[str, float]

_log = logging.getLogger("doge_fast")


class ProxyTrainer(RecordedTrainer, DoGETrainer):
    """DoGETrainer over ready-made batches, with records and whole checkpoints."""


def learn_weights(config: ProxyConfig) -> Path:
    """Learn domain weights with a proxy model; leave them in a run directory.

    The directory holds config.json, metrics.jsonl (weights raw and averaged from step 0),
    weights.json and model/. A run that was killed is resumed by the same call, to the same bits;
    a run that is complete is left as it is.

    Args:
        config: what to learn from, with what, for how long.

    Returns:
        The run directory.

    Raises:
        ValueError: a setting is out of its range, the corpus is not what it should be, or the
            directory holds another run; nothing has been written.

    Source: DoGE, Algorithms 1 and 2, stage one.
    """
    target = parse_target(config.target)
    _check(config)
    if records.check_run(config.out, stage="proxy", config=config) and training.closed(config.out):
        return config.out
    corpus = domains.load_corpus(config.corpus, targets=_held_out(target))
    options = _doge_options(config, corpus, target)
    model = training.fresh_model(config.model, config.training, corpus)
    _check_options(model, options)
    records.open_run(config.out, stage="proxy", config=config, corpus=corpus.describe())
    task = Task(
        out=config.out,
        model=model,
        trainer=partial(ProxyTrainer, mode=config.mode, **options),
        batches=partial(_batches, config, corpus),
        measure=partial(_measure, config, corpus),
        first_line=_first_line(corpus),
        held_out=corpus.validation,
        log_every=config.log_every,
    )
    trainer = training.train(task, config.training)
    assert isinstance(trainer, ProxyTrainer)
    records.write_weights(config.out, _weights_record(config, corpus, target, trainer))
    training.finish(config.out, trainer, corpus.tokenizer)
    return config.out


def _check(config: ProxyConfig) -> None:
    for name in ("sequences_per_domain", "log_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(config, name)}.")
    if not 0 <= config.average_from < 1:
        raise ValueError(
            f"average_from must be a share of the steps, in [0, 1); got {config.average_from}."
        )


def parse_target(names: Sequence[str]) -> Target:
    """What `target` on the command line means: "universal" or {name: tau}.

    Args:
        names: ("universal",); or "mix" and held-out domains, each NAME or NAME=WEIGHT.

    Raises:
        ValueError: no name, one twice, "universal" with others, or a weight that is no number
            greater than zero.
    """
    if tuple(names) == (UNIVERSAL,):
        return UNIVERSAL
    tau: dict[str, float] = {}
    for item in names:
        name, _, weight = item.partition("=")
        if name in tau or name in ("", UNIVERSAL):
            raise ValueError(
                "target must be universal alone, or distinct names, each NAME or NAME=WEIGHT; "
                f"got {' '.join(names)}."
            )
        tau[name] = _parse_weight(weight, item)
    if not tau:
        raise ValueError("target must name something: universal, mix, or held-out domains.")
    return tau


def _parse_weight(weight: str, item: str) -> float:
    try:
        value = float(weight) if weight else 1.0
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ValueError(f"A target's weight must be a number greater than zero; got {item!r}.")
    return value


def _held_out(target: Target) -> tuple[str, ...]:
    return () if isinstance(target, str) else tuple(target)


def _doge_options(config: ProxyConfig, corpus: Corpus, target: Target) -> dict[str, Any]:
    return {
        "domains": corpus.names,
        "target": target,
        "mu": config.mu,
        "score": config.score,
        "domain_max_grad_norm": config.domain_max_grad_norm,
        "smoothing": config.smoothing,
        "selection": None if config.selection is None else _read_selection(config.selection),
    }


def _read_selection(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"selection must be a JSON file; {path} is not ({error}).") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"selection must be a JSON list of parameter names; {path} is not.")
    return names


def _check_options(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """What the optimizer would refuse after the run directory was made, it refuses now."""
    stateless = torch.optim.SGD(model.named_parameters(), lr=0.0)
    DoGEOptimizer(stateless, **options).release()


def _batches(config: ProxyConfig, corpus: Corpus, start_step: int) -> ProxyBatches:
    return ProxyBatches(
        corpus,
        sequences_per_domain=config.sequences_per_domain,
        seed=config.training.seed,
        start_step=start_step,
    )


def _first_line(corpus: Corpus) -> dict[str, Any]:
    """Before the first step the weights are uniform, and so is their average."""
    weights = baselines.uniform(dict.fromkeys(corpus.names, 1))
    return {"alpha": weights, "alpha_mean": weights}


def _measure(
    config: ProxyConfig, corpus: Corpus, trainer: ProxyTrainer, step: int
) -> dict[str, Any]:
    """What a step leaves in the records; everything K x K, read when the line is written."""
    doge, last = trainer.doge, trainer.doge.last
    assert last is not None
    tokens = step * config.sequences_per_domain * corpus.block_size
    losses_R = torch.stack([trainer.domain_losses[name] for name in doge.rows])
    return {
        "loss": ByName(doge.rows, losses_R),
        "alpha": ByName(doge.domains, last.alpha),
        "alpha_mean": ByName(doge.domains, doge.alpha_mean),
        "gain": ByName(doge.domains, last.gain),
        "influence": ByName(doge.domains, last.influence),
        "difficulty": ByName(doge.domains, last.difficulty),
        "grad_norm": ByName(doge.rows, last.grad_norms),
        "rows": list(doge.rows),
        "cosine": generalization.cosine(last.gram),
        "combined_norm": last.combined_norm,
        "skipped": last.skipped,
        "tokens": dict.fromkeys(doge.rows, tokens),
    }


def _weights_record(
    config: ProxyConfig, corpus: Corpus, target: Target, trainer: ProxyTrainer
) -> dict[str, Any]:
    average, last = _average(config, trainer), trainer.doge.alpha.tolist()
    prior = baselines.natural(corpus.train_tokens)
    entries = [
        {
            "name": name,
            "weight": average[name],
            "weight_last": last[j],
            "prior": prior[name],
            "tokens": corpus.train_tokens[name],
        }
        for j, name in enumerate(corpus.names)
    ]
    return {
        "method": "doge",
        "score": config.score,
        "target": target,
        "average_from": config.average_from,
        "domains": entries,
        "model": config.model.model,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "block_size": corpus.block_size,
        "steps": config.training.steps,
        "seed": config.training.seed,
        "drift": records.drift(config.out, average, config.training.steps),
        "versions": records.versions(),
    }


def _average(config: ProxyConfig, trainer: ProxyTrainer) -> dict[str, float]:
    """Mean of the weights over the steps after `average_from` of them.

    mean over (a, T]  =  (T mean_T - a mean_a) / (T - a),     a the last logged step left out
    """
    average = trainer.weights
    steps = config.training.steps
    until = config.average_from * steps
    lines = records.read_metrics(config.out, kind="train")
    before = [line for line in lines if line["step"] <= until][-1]
    first = before["step"]
    if not first:
        return average
    sums = {
        name: max(0.0, steps * weight - first * before["alpha_mean"][name])
        for name, weight in average.items()
    }
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()}
