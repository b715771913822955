"""Per-domain perplexity of a run's model, on held-out documents of its corpus or on other text."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import datasets
import torch

from doge_fast.pipeline import failures, named, ranks, records, tables
from doge_fast.pipeline.config import MIX, CorpusConfig, EvaluateConfig
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.failures import Diverged, UserError
from doge_fast.pipeline.model import open_model
from doge_fast.pipeline.progress import tell_once
from doge_fast.pipeline.records import CorpusRecord, Json, exp_or_inf, weighted_mean
from doge_fast.pipeline.trainer import (
    device_of,
    held_out_losses,
    not_finite,
    wait_for_ranks,
)
from doge_fast.pipeline.wording import first_few, is_even, shares_text


def evaluate(config: EvaluateConfig) -> Json:
    """Measure a finished run's model on held-out blocks of every domain; write the perplexities.

    Without `config.data` they are the blocks of the run's own corpus, tokenizer and split, so no
    training document is measured. Other text is cut into blocks of the run's length by the run's
    tokenizer; then the run's corpus is not needed. The average perplexity is the exponential of the
    training domains' mean loss.

    Args:
        config: the run, the text and the number of blocks.

    Returns:
        The content of the file; see `records.evaluation`.

    Raises:
        UserError: the run is not complete, a domain is unknown, the file is one of the run's
            records, or the corpus is no longer the one that the model was trained on.
        Diverged: a perplexity is not finite; nothing has been written.

    Source: DoGE, caption of tab:universal_ppl.
    """
    record, trained = records.load_config(config.run)
    corpus = record.corpus
    own = trained.corpus.data
    _check(config, own, corpus)
    tell_once(f"reading {config.data or own}")
    if config.data is None:
        held_out = own_blocks(config.run)
    else:
        other = CorpusConfig(
            data=config.data,
            domains=config.domains,
            text_column=config.text_column,
            domain_column=config.domain_column,
            tokenizer=str(config.run / records.MODEL),
            block_size=corpus.block_size,
            cache_dir=config.cache_dir,
        )
        # The validation split, else all of the text: the model has seen none of it.
        held_out = load_corpus(other, is_measured=True).validation
    tell_once("opening the model")
    model = open_model(config.run / records.MODEL)
    torch.nn.Module.to(model, wait_for_ranks(device_of(config.device)))
    names = config.domains or tuple(held_out)
    # The run's weights.json repeats the target that its weights were learned for.
    told = records.read_weights(config.run)
    shares = records.target_shares(told, corpus.targets) or dict.fromkeys(corpus.targets, 1.0)
    loss, blocks = held_out_losses(
        model,
        {name: held_out[name] for name in names},
        f"{config.run.name}: held-out loss",
        num_blocks=config.blocks,
        batch_size=config.batch_size,
    )
    result = records.evaluation(
        step=trained.training.steps,
        blocks=blocks,
        loss=loss,
        block_size=corpus.block_size,
        targets=shares if config.data is None else {},
    )
    if lost := not_finite(result["perplexity"]):
        losses = ", ".join(f"{name} {loss[name]:g}" for name in lost)
        raise Diverged(
            f"The model of {config.run} has diverged: the perplexity of "
            f"{first_few(lost)} is not finite (losses: {losses}). Nothing has been "
            "written. Train another with a lower learning_rate (--learning-rate)."
        )
    if ranks.is_first():
        file = config.out or config.run / records.EVALUATION
        with failures.writing(file):
            records.write_json(file, result)
    return result


def perplexity_table(result: Json) -> str:
    """The perplexities as aligned plain text, below them those of `perplexity_on`."""
    summary = perplexity_on(result["loss"], result["targets"])
    rows = [(text, f"{x:.2f}") for text, x in (*result["perplexity"].items(), *summary.items())]
    return tables.text(tables.table_of(("held-out text", "perplexity"), rows))


def perplexity_on(loss: Mapping[str, float], targets: Mapping[str, float]) -> dict[str, float]:
    """{a text in words: the exponential of its mean loss}: the targets, then the other domains.

    The words are "the target ca", "the 2 targets" or, of unequal weights, "the targets ca (0.70)
    and nl (0.30)"; and "the 7 training domains". `targets` has the weights in their mean.
    """
    aims = {name: weight for name, weight in targets.items() if name in loss}
    others = dict.fromkeys((name for name in loss if name not in targets), 1.0)
    found = {}
    for kind, weights in (("target", aims), ("training domain" if aims else "domain", others)):
        if weights:
            first, *more = weights
            text = f"{len(weights)} {kind}s" if more else f"{kind} {first}"
            if not is_even(weights):
                text = f"{kind}s {shares_text(weights)}"
            found[f"the {text}"] = exp_or_inf(weighted_mean(loss, weights))
    return found


def _check(config: EvaluateConfig, own: str, corpus: CorpusRecord) -> None:
    check_paths(config)
    records.check_finished(config.run)
    device_of(config.device)
    if config.data is None:
        known = [*corpus.domains, *corpus.targets]
        named.check_known("domains", config.domains, known, str(config.run))
        # A result for more domains must not be overwritten.
        if config.out is None and config.domains and (config.run / records.EVALUATION).exists():
            measured = records.load_evaluation(config.run).loss
            if lost := [name for name in measured if name not in config.domains]:
                raise UserError(
                    f"{config.run / records.EVALUATION} holds {', '.join(lost)} too. Name another "
                    "file for these domains (--out), or leave out domains (--domains)."
                )
    elif os.path.realpath(config.data) == os.path.realpath(own):
        raise UserError(
            f"{config.run} was trained on {own}. Leave out data (--data) to measure what was held "
            "out of it."
        )
    if config.out is not None:
        if config.out.is_dir():
            raise UserError(f"out must be a file; {config.out} is a directory. Name one in it.")
        records.check_out(config.out, [])


def own_blocks(run: Path) -> Mapping[str, datasets.Dataset]:
    """Held-out blocks of a run's corpus.

    Raises:
        UserError: the text of a domain of the run has changed. Domains may have been added.
    """
    record, trained = records.load_config(run)
    trained_on = record.corpus
    asked = replace(trained.corpus, domains=tuple(trained_on.domains))
    # "mix" reserves blocks that are not trained on.
    mix = [MIX] if MIX in trained.targets else []
    corpus = load_corpus(asked, targets=(*trained_on.targets, *mix))
    records.check_corpus(run, trained_on, corpus.describe())
    return corpus.validation
