"""evaluation.json, fewshot.json and experiment.json: what was measured, and of which runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.runs import (
    Json,
    check_empty,
    check_same,
    load,
    load_config,
    read_json,
)
from doge_fast.pipeline.records.shapes import (
    EVALUATION,
    EXPERIMENT,
    WAY_OUT,
    EvaluationRecord,
    ExperimentRecord,
)
from doge_fast.weights.weights_file import SCHEMA_VERSION, plain, write_json


def evaluation(
    *, step: int, blocks: Mapping[str, int], loss: Mapping[str, float], block_size: int
) -> Json:
    """What evaluation.json holds, from the held-out loss of every domain.

    perplexity_d        =  exp(loss_d)
    average_perplexity  =  exp(mean_d loss_d)      not the mean of the perplexities
    worst               =  max_d perplexity_d

    Args:
        step: optimizer steps the model has made.
        blocks: held-out blocks measured, per domain.
        loss: mean loss per predicted token in nats, per domain.
        block_size: tokens in a block; the first of each is not predicted.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), caption of tab:universal_ppl.
    """
    assert loss.keys() == blocks.keys()
    perplexity = {name: exp_or_inf(value) for name, value in loss.items()}
    return {
        "step": step,
        "blocks": dict(blocks),
        "loss": dict(loss),
        "perplexity": perplexity,
        "average_perplexity": exp_or_inf(math.fsum(loss.values()) / len(loss)),
        "worst": max(perplexity.values()),
        "tokens": {name: count * (block_size - 1) for name, count in blocks.items()},
    }


def exp_or_inf(value: float) -> float:
    """exp without OverflowError: a diverged model's perplexity is infinite."""
    return math.exp(value) if value < 709 else math.inf


def load_evaluation(run: Path) -> EvaluationRecord:
    """evaluation.json of a run directory; ValueError where it is absent or damaged."""
    found = load(run, EvaluationRecord)
    if not found.loss.keys() == found.blocks.keys() == found.perplexity.keys():
        raise FileFailure(
            f"{run / EVALUATION} is damaged: loss, blocks and perplexity are not of the same "
            f"domains. {WAY_OUT}"
        )
    return found


def read_evaluation(run: Path) -> Json:
    """As `load_evaluation`, with all that the file holds."""
    load_evaluation(run)
    return read_json(run / EVALUATION)


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / EVALUATION).exists():
        return False
    corpus = load_config(run)[0].corpus
    most = math.inf if blocks is None else blocks
    sizes = {**corpus.domains, **corpus.targets}
    wanted = {name: min(most, each.validation_blocks) for name, each in sizes.items()}
    return load_evaluation(run).blocks == wanted


def few_shot(
    *, step: int, tasks: Mapping[str, Mapping[str, Any]], setting: Mapping[str, Any]
) -> Json:
    """What fewshot.json holds: the scores of every task, what decides them, and their average.

    average acc         =  mean_t acc_t
    average acc_stderr  =  sqrt(sum_t acc_stderr_t^2) / T      tasks share no document
    """
    number = len(tasks)
    stderrs = [task["acc_stderr"] for task in tasks.values()]
    # Of a single document there is none.
    is_known = all(stderr is not None for stderr in stderrs)
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        **setting,
        "tasks": {name: dict(scores) for name, scores in tasks.items()},
        "average": {
            "acc": math.fsum(task["acc"] for task in tasks.values()) / number,
            "acc_stderr": math.hypot(*stderrs) / number if is_known else None,
            "chance": math.fsum(task["chance"] for task in tasks.values()) / number,
        },
    }


def write_experiment(out: Path, record: Mapping[str, Any]) -> None:
    """Write experiment.json, the fields of `ExperimentRecord` and `config`; all settings.

    Raises:
        ValueError: as `check_experiment`.
    """
    check_experiment(out, record)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / EXPERIMENT, {"schema_version": SCHEMA_VERSION, **record})


# How an experiment is run; seeds and targets may be added, which its runs show.
_FREE = (
    *("out", "plan", "only", "seeds", "targets", "corpus.cache_dir", "rates.device"),
    # A search for the temperature may go on for longer.
    *("most_runs", "budget_tokens", "device"),
)


def check_experiment(out: Path, record: Mapping[str, Any]) -> None:
    """Raise ValueError where a directory holds another experiment, or something else.

    Runs may be added to an experiment, by more seeds. Nothing else may change.
    """
    if not (out / EXPERIMENT).exists():
        check_empty(out)
        return
    if all(entry.name == EXPERIMENT for entry in out.iterdir()):
        return
    known, asked = read_experiment(out), plain(record)
    check_same("configuration", out, known.get("config", {}), asked["config"], _FREE)
    if missing := [name for name in known["runs"] if name not in asked["runs"]]:
        raise ValueError(
            f"{out} holds an experiment with further runs, as {missing[0]}. Name another "
            "directory, or ask for its seeds and targets too."
        )


def read_experiment(path: Path) -> Json:
    """All of experiment.json of a directory; ValueError where it is absent or damaged."""
    load(path, ExperimentRecord)
    return read_json(path / EXPERIMENT)
