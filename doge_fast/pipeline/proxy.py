"""Stage one: a proxy model learns the domain weights.

The weights that count are the average over the run, alpha_bar = mean_t alpha^(t); the last ones
are kept beside them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from doge_fast import defaults, generalization
from doge_fast.integrations.transformers import DoGETrainer
from doge_fast.optimizer import DoGEOptimizer
from doge_fast.pipeline import baselines, domains, records, training
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.domains import UNIVERSAL, Corpus, ProxyBatches
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.wording import listed
from doge_fast.pipeline.training import ByName, RecordedTrainer, Task
from doge_fast.pipeline.warm_start import warm_start

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
    is_begun = records.check_run(config.out, stage="proxy", config=config)
    if is_begun and training.closed(config.out):
        return config.out
    corpus = domains.load_corpus(config.corpus, targets=_held_out(target))
    # A resumed run keeps the weights it began with, whatever became of the file.
    recorded = records.read_config(config.out) if is_begun else {}
    initial = recorded.get("initial") or _initial(config, corpus)
    resolved = recorded.get("resolved") or _resolved(config, corpus, target)
    asked, config = config, replace(config, mu=resolved.get("mu", config.mu))
    options = _doge_options(config, corpus, target, initial)
    model = training.fresh_model(config.model, config.training, corpus)
    _check_options(model, options)
    records.open_run(
        config.out,
        stage="proxy",
        config=asked,
        initial=initial,
        resolved=resolved,
        **corpus.recorded(),
    )
    task = Task(
        out=config.out,
        model=model,
        trainer=partial(ProxyTrainer, mode=config.mode, **options),
        batches=partial(_batches, config, corpus),
        measure=partial(_measure, config, corpus),
        first_line=_first_line(corpus, initial),
        held_out=corpus.validation,
        log_every=config.log_every,
    )
    trainer = training.train(task, config.training)
    assert isinstance(trainer, ProxyTrainer)
    record = _weights_record(config, corpus, target, initial, trainer)
    records.write_weights(config.out, record)
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
    # Here, since the default mu follows the learning rate.
    training.check(config.training)
    parse_split(config.split)
    if config.init_weights is None and (config.split or config.added_share != "uniform"):
        name = "split" if config.split else "added_share"
        raise ValueError(
            f"{name} says what becomes of the weights of a file; name it with init_weights "
            "(--init-weights)."
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


def parse_split(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """{old: (new, ...)} of the OLD=NEW,NEW that `split` holds.

    Raises:
        ValueError: an item is not such, or splits a domain twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in items:
        name, _, parts = item.partition("=")
        into = tuple(part for part in parts.split(",") if part)
        if not name or not into or name in found:
            raise ValueError(
                f"split must be OLD=NEW,NEW, each old domain once; got {' '.join(items)}."
            )
        found[name] = into
    return found


def _initial(config: ProxyConfig, corpus: Corpus) -> Json | None:
    """The weights that the run begins with and where they come from, as the records hold it."""
    if config.init_weights is None:
        return None
    start = warm_start(
        records.read_weights(config.init_weights),
        {name: corpus.train_tokens[name] for name in corpus.names},
        split=parse_split(config.split),
        added_share=config.added_share,
    )
    if start.zeros:
        remains = "" if config.smoothing else ", and a step, which multiplies weights, leaves it"
        _log.warning(
            "%s: the weight at the start is zero for %s%s. A floor (doge-fast weights constrain "
            "--floor) or smoothing lifts it.",
            config.init_weights,
            listed(start.zeros),
            remains,
        )
    return {
        "source": str(config.init_weights),
        "weights": dict(start.weights),
        "kept": list(start.kept),
        "added": dict(start.added),
        "dropped": dict(start.dropped),
        "split": {name: dict(parts) for name, parts in start.split.items()},
    }


def _held_out(target: Target) -> tuple[str, ...]:
    return () if isinstance(target, str) else tuple(target)


def _doge_options(
    config: ProxyConfig, corpus: Corpus, target: Target, initial: Json | None
) -> dict[str, Any]:
    return {
        "domains": corpus.names,
        "target": target,
        "mu": config.mu,
        "score": config.score,
        # On the command line 0 is easier to say than None.
        "domain_max_grad_norm": config.domain_max_grad_norm or None,
        "smoothing": config.smoothing,
        "selection": None if config.selection is None else _read_selection(config.selection),
        "initial": None if initial is None else initial["weights"],
    }


def _resolved(config: ProxyConfig, corpus: Corpus, target: Target) -> dict[str, float]:
    """Settings whose default depends on others."""
    if config.mu is not None:
        return {}
    total = len(corpus.names) if isinstance(target, str) else sum(target.values())
    return {"mu": defaults.default_mu(config.training.learning_rate, total)}


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


def _first_line(corpus: Corpus, initial: Json | None) -> dict[str, Any]:
    """Before the first step the weights are those of the start, and so is their average."""
    uniform = baselines.uniform(dict.fromkeys(corpus.names, 1))
    start = uniform if initial is None else initial["weights"]
    return {"alpha": start, "alpha_mean": start}


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
    config: ProxyConfig,
    corpus: Corpus,
    target: Target,
    initial: Json | None,
    trainer: ProxyTrainer,
) -> dict[str, Any]:
    average, last = _average(config, trainer), trainer.doge.alpha.tolist()
    # Of what is trained on: targets have tokens too, and no share.
    prior = baselines.natural({name: corpus.train_tokens[name] for name in corpus.names})
    entries = [
        {
            "name": name,
            "weight": average[name],
            "weight_last": last[j],
            "prior": prior[name],
            **corpus.sizes(name),
        }
        for j, name in enumerate(corpus.names)
    ]
    record = {
        "method": "doge",
        "score": config.score,
        "target": target,
        "mu": config.mu,
        "average_from": config.average_from,
        "domains": entries,
        "model": config.model.model,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "block_size": corpus.block_size,
        "steps": config.training.steps,
        "seed": config.training.seed,
        "drift": records.drift(config.out, average, average_from=config.average_from),
        "versions": records.versions(),
    }
    return record if initial is None else record | {"initial": initial}


def _average(config: ProxyConfig, trainer: ProxyTrainer) -> dict[str, float]:
    """Mean of the weights over the steps after `average_from` of them."""
    average = trainer.weights
    lines = records.read_metrics(config.out, kind="train")
    first, _ = records.lines_of_average(lines, config.average_from)
    last = {"step": config.training.steps, "alpha_mean": average}
    return records.average_between(first, last)
