"""Per-domain perplexity of a run's model on held-out documents."""

from pathlib import Path
from typing import Any

import torch

from doge_fast.pipeline import domains, progress, records, tables, training
from doge_fast.pipeline.config import CorpusConfig, EvaluateConfig
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.trainer import held_out_loss


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Measure a finished run's model on held-out blocks of every domain; write evaluation.json.

    The corpus is the run's own, so are its tokenizer and its split: no document that the model
    was trained on is measured. The average perplexity is the exponential of the mean of the
    domains' losses.

    Args:
        config: which run, how much of the held-out text.

    Returns:
        What evaluation.json holds; see `records.evaluation`.

    Raises:
        ValueError: the run is not complete, a domain is unknown, or the corpus is no longer the
            one that the model was trained on.

    Source: DoGE, caption of tab:universal_ppl.
    """
    record = records.read_config(config.run)
    _check(config, record)
    corpus = domains.load_corpus(
        _corpus_config(record["config"]["corpus"]), targets=tuple(record["corpus"]["targets"])
    )
    _check_tokenizer(config.run, record, corpus.tokenizer_sha256)
    model = open_model(config.run / training.MODEL)
    torch.nn.Module.to(model, training.device_of(config.device))
    names = config.domains or tuple(corpus.validation)
    loss: dict[str, float] = {}
    blocks: dict[str, int] = {}
    for name in progress.over(names, f"{config.run.name}: held-out loss", "domain"):
        loss[name], blocks[name] = held_out_loss(
            model,
            corpus.validation[name],
            num_blocks=config.blocks,
            batch_size=config.batch_size,
        )
    result = records.evaluation(
        step=record["config"]["training"]["steps"],
        blocks=blocks,
        loss=loss,
        block_size=corpus.block_size,
    )
    records.write_evaluation(config.run, result)
    return result


def table(result: dict[str, Any]) -> str:
    """The perplexities as aligned plain text."""
    found = {**result["perplexity"], "average": result["average_perplexity"]}
    rows = [(name, f"{value:.2f}") for name, value in found.items()]
    return tables.text(tables.table_of(("domain", "perplexity"), rows))


def _check(config: EvaluateConfig, record: dict[str, Any]) -> None:
    training.check_finished(config.run)
    known = [*record["corpus"]["domains"], *record["corpus"]["targets"]]
    unknown = [name for name in config.domains if name not in known]
    if unknown:
        raise ValueError(
            f"{config.run} knows the domains {', '.join(known)}; got {', '.join(unknown)}."
        )
    if config.batch_size < 1 or (config.blocks is not None and config.blocks < 1):
        raise ValueError(
            "blocks and batch_size must be at least 1; got "
            f"{config.blocks} and {config.batch_size}."
        )


def _corpus_config(recorded: dict[str, Any]) -> CorpusConfig:
    """The dataclass that config.json repeats."""
    cache_dir = recorded["cache_dir"]
    return CorpusConfig(
        **recorded
        | {
            "domains": tuple(recorded["domains"]),
            "cache_dir": None if cache_dir is None else Path(cache_dir),
        }
    )


def _check_tokenizer(run: Path, record: dict[str, Any], found: str) -> None:
    expected = record["corpus"]["tokenizer_sha256"]
    if expected != found:
        raise ValueError(
            f"{run} was trained with the tokenizer {expected[:12]}; its corpus gives {found[:12]} "
            "now, so its files have changed. Restore them, or train again."
        )
