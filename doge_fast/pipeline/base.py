"""Stage two: a model trained at given domain weights.

Domains are sampled with the weights; the loss is the ordinary one. The weights come from a proxy
run, a file, or a baseline, and are written beside the model before the first step.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from doge_fast.pipeline import domains, records, training
from doge_fast.pipeline.baselines import BASELINES
from doge_fast.pipeline.config import BaseConfig
from doge_fast.pipeline.domains import BaseBatches, Corpus
from doge_fast.pipeline.training import RecordedTrainer, Task


def train_base(config: BaseConfig) -> Path:
    """Train a model on domains sampled with given weights; leave it in a run directory.

    The directory holds config.json, weights.json (what was used), metrics.jsonl and model/. A run
    that was killed is resumed by the same call, to the same bits; a run that is complete is left
    as it is.

    Args:
        config: which weights, which corpus, which model, for how long.

    Returns:
        The run directory.

    Raises:
        ValueError: a setting is out of its range, the weights belong to other domains, the
            corpus is not what it should be, or the directory holds another run; nothing has
            been written.

    Source: DoGE, stage two of the method.
    """
    _check(config)
    if records.check_run(config.out, stage="base", config=config) and training.closed(config.out):
        return config.out
    corpus = domains.load_corpus(config.corpus, targets=config.targets)
    weights = resolve_weights(config, corpus)
    model = training.fresh_model(config.model, config.training, corpus)
    records.open_run(config.out, stage="base", config=config, corpus=corpus.describe())
    records.write_weights(config.out, _weights_record(config, corpus, weights))
    task = Task(
        out=config.out,
        model=model,
        trainer=RecordedTrainer,
        batches=partial(_batches, config, corpus, weights),
        measure=partial(_measure, _batches(config, corpus, weights, 0)),
        first_line=None,
        held_out=corpus.validation,
        log_every=config.log_every,
    )
    trainer = training.train(task, config.training)
    training.finish(config.out, trainer, corpus.tokenizer)
    return config.out


def resolve_weights(config: BaseConfig, corpus: Corpus) -> dict[str, float]:
    """{domain: weight} in the corpus's order, from a baseline's name, a file or a run.

    Raises:
        ValueError: the file is not weights of exactly these domains.
    """
    # A resumed run keeps the weights it began with, whatever became of their source.
    used = config.out / records.WEIGHTS
    if config.weights in BASELINES and not used.exists():
        return BASELINES[config.weights]({name: corpus.train_tokens[name] for name in corpus.names})
    source = used if used.exists() else Path(config.weights)
    return records.weights_by_name(records.read_weights(source, domains=corpus.names))


def _check(config: BaseConfig) -> None:
    if config.weights not in BASELINES and not Path(config.weights).exists():
        raise ValueError(
            f"weights must be {' or '.join(BASELINES)}, a weights.json, or a proxy's run "
            f"directory; {config.weights!r} is none of them and no such path exists."
        )
    for name in ("batch_size", "log_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(config, name)}.")


def _batches(
    config: BaseConfig, corpus: Corpus, weights: Mapping[str, float], start_step: int
) -> BaseBatches:
    return BaseBatches(
        corpus,
        weights=weights,
        batch_size=config.batch_size,
        seed=config.training.seed,
        start_step=start_step,
    )


def _measure(batches: BaseBatches, trainer: RecordedTrainer, step: int) -> dict[str, Any]:
    """Loss of the step, and tokens of each domain in all steps so far."""
    drawn = zip(batches.corpus.names, batches.mixture.drawn(step).tolist(), strict=True)
    tokens = {name: blocks * batches.corpus.block_size for name, blocks in drawn}
    return {"loss": trainer.step_loss, "tokens": tokens}


def _weights_record(
    config: BaseConfig, corpus: Corpus, weights: Mapping[str, float]
) -> dict[str, Any]:
    entries = [
        {"name": name, "weight": weight, "tokens": corpus.train_tokens[name]}
        for name, weight in weights.items()
    ]
    return {
        "method": config.weights if config.weights in BASELINES else "given",
        "source": config.weights,
        "domains": entries,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "block_size": corpus.block_size,
        "versions": records.versions(),
    }
