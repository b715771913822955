"""Stage two: train a model at given domain weights.

Blocks are drawn from the domains at the weights; the loss is the ordinary mean. The weights come
from a proxy run, a file or a baseline, and are written before the first step.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from doge_fast.mixture.counts import Phase
from doge_fast.pipeline import records, stage
from doge_fast.pipeline.baselines import BASELINES
from doge_fast.pipeline.config import BaseConfig
from doge_fast.pipeline.domains import Corpus
from doge_fast.pipeline.evaluation import perplexity_on
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.stage import ExistingRun
from doge_fast.pipeline.tokenizer import tokenizer_sha256
from doge_fast.pipeline.trainer import MixtureTrainer, from_first

_log = logging.getLogger("doge_fast")


def train_base(config: BaseConfig) -> Run:
    """Train a model on domains sampled at given weights; write it to a run directory.

    The directory holds config.json, weights.json (the weights used), metrics.jsonl and model/. The
    same call resumes a killed run, with bitwise the same result, and leaves a complete run
    unchanged.

    Args:
        config: weights, corpus, model and training.

    Returns:
        The run: its directory, weights and figures.

    Raises:
        UserError: the weights belong to other domains, the corpus is unusable, or the directory
            holds another run or one with other weights; nothing has been written.

    Source: DoGE, stage two of the method.
    """
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    if existing.is_complete:
        is_there = os.path.isfile(records.weights_path(config.weights))
        if config.weights not in BASELINES and config.stages == 1 and is_there:
            names = [*records.weights_by_name(records.read_weights(config.out))]
            _check_weights(config, *_used(config, _given_phases(config, names)))
        return Run(config.out)
    trainer = base_trainer(config, existing)
    mean, changes = _used(config, trainer.phases)
    if (config.out / records.WEIGHTS).exists():
        _check_weights(config, mean, changes)
    with stage.directory(trainer, existing) as checkpoint:
        from_first(
            lambda: stage.leave_weights(
                trainer,
                {"weight": mean},
                method=config.weights if config.weights in BASELINES else "given",
                source=config.weights,
                **_target_of(config),
                stages=changes or None,
            )
        )
        trainer.go_on(checkpoint)
        from_first(lambda: stage.leave_model(trainer))
    return Run(config.out)


def _target_of(config: BaseConfig) -> Json:
    """{"target": the target that the weights were learned for}; empty if their file has none."""
    record = {} if config.weights in BASELINES else records.read_weights(config.weights)
    return {"target": record["target"]} if record.get("target") else {}


def _check_weights(config: BaseConfig, mean: dict[str, float], changes: list[Json]) -> None:
    """Raise UserError if the run's weights.json differs from the given weights."""
    kept = records.read_weights(config.out)
    if (records.weights_by_name(kept), kept.get("stages") or []) != (mean, changes):
        raise UserError(
            f"{config.out} began with other weights than {config.weights} has now; its "
            f"{records.WEIGHTS} holds them. Restore them, or start anew in another directory."
        )


def base_trainer(config: BaseConfig, existing: ExistingRun) -> MixtureTrainer:
    """Read the corpus and the weights, build the model; return the run's trainer."""
    is_given = config.weights not in BASELINES
    followed: list[str] = []
    # Read before the corpus is packed, which may take hours.
    if is_given:
        asked = config.corpus.domains or None
        followed = records.held_out_targets(records.read_weights(config.weights, domains=asked))

    def check(model: object, names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
        if is_given:
            _given_phases(config, names)
            _warn_of_other_tokens(Path(config.weights), tokenizer)

    corpus, model = stage.corpus_and_model(config, existing, check=check, followed=followed)
    for name in (name for name in followed if name not in config.targets):
        is_here = name in corpus.targets
        _log.info(
            "%s: the weights were learned for %s, which is %s",
            *(config.out, name, "measured and not trained on" if is_here else "not in the corpus"),
        )
    return MixtureTrainer(config, corpus, model, resolve_phases(config, corpus))


def held_out_perplexity(run: Path) -> list[str]:
    """A line with the perplexity of a run's last held-out losses; empty if there are none."""
    try:
        losses = records.read_metrics(run, kind="eval")[-1]["loss"]
        targets = records.load_config(run)[0].corpus.targets
        known = records.target_shares(records.read_weights(run), targets)
        shares = known or dict.fromkeys(targets, 1.0)
    except (ValueError, IndexError):
        return []
    told = (f"{value:.2f} on {text}" for text, value in perplexity_on(losses, shares).items())
    return [f"held-out perplexity: {', '.join(told)}"]


def _used(config: BaseConfig, phases: Sequence[Phase]) -> tuple[dict[str, float], list[Json]]:
    """(Mean weights over the run's steps, phases of a curriculum; empty without one)."""
    ends = [*(phase.first_step for phase in phases[1:]), config.training.steps]
    mean = dict.fromkeys(phases[0].weights, 0.0)
    for phase, end in zip(phases, ends, strict=True):
        share = (end - phase.first_step) / config.training.steps
        for name in mean:
            mean[name] += phase.weights[name] * share
    return mean, [asdict(phase) for phase in phases] if len(phases) > 1 else []


def resolve_phases(config: BaseConfig, corpus: Corpus) -> tuple[Phase, ...]:
    """The phases, each with its first step and weights, from a baseline, a file or a run.

    Raises:
        UserError: the file does not hold weights of exactly these domains, or the run has no
            weights logged for one phase of a curriculum.
    """
    if config.weights in BASELINES:
        return (Phase(0, BASELINES[config.weights](corpus.tokens)),)
    return _given_phases(config, corpus.names)


def _given_phases(config: BaseConfig, names: Sequence[str]) -> tuple[Phase, ...]:
    """The phases of a weights file or run."""
    record = records.read_weights(Path(config.weights), domains=names)
    if config.stages > 1:
        return _curriculum(config, names)
    return (Phase(0, records.weights_by_name(record)),)


def _warn_of_other_tokens(weights: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    there = records.read_weights(weights).get("tokenizer_sha256")
    if there not in (None, tokenizer_sha256(tokenizer)):
        _log.warning(
            "%s: learned with another tokenizer, so these are shares of other tokens. Pass the "
            "--tokenizer of that run.",
            weights,
        )


def _curriculum(config: BaseConfig, names: Sequence[str]) -> tuple[Phase, ...]:
    """Phases of equal length; phase p has the proxy's mean weights over part p of its run."""
    run = Path(config.weights)
    lines = [line for line in records.read_metrics(run, kind="train") if line["step"] > 0]
    last = max((line["step"] for line in lines), default=0)
    phases = []
    for part in range(config.stages):
        first, end = (last * each // config.stages for each in (part, part + 1))
        found = [line["alpha"] for line in lines if first < line["step"] <= end and "alpha" in line]
        if not found:
            raise UserError(
                f"A curriculum of {config.stages} stages needs weights logged in each; {run} has "
                f"none in steps {first + 1} to {end} of {last}. Ask for fewer stages."
            )
        sums = {name: sum(alpha[name] for alpha in found) for name in names}
        total = sum(sums.values())
        weights = {name: value / total for name, value in sums.items()}
        phases.append(Phase(config.training.steps * part // config.stages, weights))
    return tuple(phases)
