"""evaluation.json, fewshot.json and experiment.json: what was measured, and of which runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doge_fast.pipeline.failures import FileFailure
from doge_fast.pipeline.records.runs import (
    EVALUATION,
    EXPERIMENT,
    FEWSHOT,
    Json,
    check_empty,
    check_same,
    load_config,
    read_record,
)
from doge_fast.pipeline.records.shapes import (
    WAY_OUT,
    EvaluationRecord,
    ExperimentRecord,
    FewShotRecord,
)
from doge_fast.weights.weights_file import SCHEMA_VERSION, plain, write_json


def evaluation(
    *,
    step: int,
    blocks: Mapping[str, int],
    loss: Mapping[str, float],
    block_size: int,
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


def read_evaluation(run: Path) -> Json:
    """evaluation.json of a run directory; ValueError where it is absent or damaged."""
    return load_evaluation(run)[0]


def load_evaluation(run: Path) -> tuple[Json, EvaluationRecord]:
    """As `read_evaluation`, and the same of its class."""
    absent = f"{run} holds no {EVALUATION}: run doge-fast evaluate on it."
    file = run / EVALUATION
    record, found = read_record(file, EvaluationRecord, absent=absent, has_schema=False)
    if not found.loss.keys() == found.blocks.keys() == found.perplexity.keys():
        raise FileFailure(
            f"{file} is damaged: loss, blocks and perplexity are not of the same domains. {WAY_OUT}"
        )
    return record, found


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / EVALUATION).exists():
        return False
    corpus = load_config(run)[0].corpus
    most = math.inf if blocks is None else blocks
    sizes = {**corpus.domains, **corpus.targets}
    wanted = {name: min(most, each.validation_blocks) for name, each in sizes.items()}
    return bool(read_evaluation(run)["blocks"] == wanted)


def few_shot(
    *, step: int, tasks: Mapping[str, Mapping[str, Any]], setting: Mapping[str, Any]
) -> Json:
    """What fewshot.json holds, from the scores of every task.

    average acc         =  mean_t acc_t
    average acc_stderr  =  sqrt(sum_t acc_stderr_t^2) / T      tasks share no document

    Args:
        step: optimizer steps the model has made.
        tasks: per task its lm-eval `version`, `split`, number of `documents`, `acc` and, where it
            has it, `acc_norm`, each with `_stderr` (None for one document), `chance`, how many
            `requests` (one per choice) and `prompt_tokens` there were, how many of both the model
            could not see (`truncated_requests`, `truncated_tokens`), and how many answers alone
            were longer than the model (`truncated_answers`). At least one task.
        setting: `shots`, `fewshot_seed`, the model's `positions`, and what else decides the scores.
    """
    number = len(tasks)
    stderrs = [task["acc_stderr"] for task in tasks.values()]
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


def read_few_shot(run: Path) -> Json:
    """fewshot.json of a run directory; ValueError where it is absent or damaged."""
    return load_few_shot(run)[0]


def load_few_shot(run: Path) -> tuple[Json, FewShotRecord]:
    """As `read_few_shot`, and the same of its class."""
    absent = f"{run} holds no {FEWSHOT}: run doge-fast evaluate --tasks on it."
    return read_record(run / FEWSHOT, FewShotRecord, absent=absent)


def write_experiment(out: Path, record: Mapping[str, Any]) -> None:
    """Write experiment.json into the directory of an experiment, made where absent.

    Args:
        out: the directory.
        record: the fields of `ExperimentRecord`, and `config`, all settings.

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
    """experiment.json of its directory; ValueError where it is absent or damaged."""
    return load_experiment(path)[0]


def load_experiment(path: Path) -> tuple[Json, ExperimentRecord]:
    """As `read_experiment`, and the same of its class."""
    absent = f"{path} holds no {EXPERIMENT}: doge-fast experiment has not run there."
    return read_record(path / EXPERIMENT, ExperimentRecord, absent=absent)
