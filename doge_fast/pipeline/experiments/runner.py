"""Runs an experiment's plan: what is done is left alone, what was killed goes on, then the page."""

import functools
import logging
from pathlib import Path
from typing import Any

from doge_fast import weights_file
from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DoReMiConfig,
    EvaluateConfig,
    ExperimentConfig,
    ProxyConfig,
    ReportConfig,
)
from doge_fast.pipeline.domains import MIX, load_corpus
from doge_fast.pipeline.doremi import learn_by_excess_loss
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.experiments.plans import RUNS, Job, Plan, StageConfig, corpus_of, plan_of
from doge_fast.pipeline.experiments.presets import (
    PAPER_LANGUAGE_TARGETS,
    PAPER_LANGUAGES,
    Settings,
    settings_of,
    with_mu,
)
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.report import terminal_table, write_report
from doge_fast.pipeline.reporting.experiment import is_measured, is_scored
from doge_fast.pipeline.selection import measure_cancellation
from doge_fast.pipeline.sources import find_parts
from doge_fast.pipeline.training import is_finished

_log = logging.getLogger("doge_fast")


def run_experiment(config: ExperimentConfig) -> list[str]:
    """Run all arms of an experiment, or finish one that was interrupted.

    An arm that is done is not run again; one that was killed goes on from its last checkpoint. The
    directory holds experiment.json, runs/ with a directory for every run, and report.html.

    Args:
        config: which experiment, how large, on what.

    Returns:
        Lines to print: the tables with the verdicts, and where the page is; with `config.plan` the
        runs that there would be.

    Raises:
        ValueError: a setting is out of its range, the corpus lacks a domain, or the directory
            holds another experiment; nothing has been trained.
    """
    settings = settings_of(config)
    out = config.out or Path("experiments") / config.name
    names = _domains_of(config, settings)
    settings = with_mu(settings, config, names)
    plan = plan_of(config, settings, names, out, _tasks_of(config))
    if config.plan:
        return [_line_of(job) for job in plan.jobs]
    records.write_experiment(out, _record(config, settings, plan))
    for number, job in enumerate(plan.jobs, start=1):
        _log.info("run %d of %d: %s", number, len(plan.jobs), job.config.out.name)
        if is_finished(job.config.out):
            _check_unchanged(job.config)
        _run(job.config)
        if job.is_measured and not is_measured(job.config.out, settings.eval_blocks):
            blocks = settings.eval_blocks
            evaluate(EvaluateConfig(run=job.config.out, blocks=blocks, device=config.device))
        for group in plan.groups:
            _score(job.config.out, group, config)
    page = write_report(ReportConfig(runs=(out,)))
    return [terminal_table([out]), f"report: {page}"]


def _tasks_of(config: ExperimentConfig) -> dict[str, Any] | None:
    """The tasks that were asked for, their documents read and found to be what they should."""
    if not config.tasks:
        return None
    # A dependency of its own.
    from doge_fast.pipeline.fewshot import document_hashes, load_tasks, task_names

    scoring = _scoring(Path(), config)
    if config.plan:
        return {"tasks": list(task_names(config.tasks)), "task_data_sha256": None}
    return {"tasks": list(load_tasks(scoring)), "task_data_sha256": document_hashes(scoring)}


def _scoring(run: Path, config: ExperimentConfig) -> EvaluateConfig:
    return EvaluateConfig(
        run=run,
        tasks=config.tasks,
        shots=config.shots,
        task_data=config.task_data,
        task_limit=config.task_limit,
        device=config.device,
    )


def _score(run: Path, group: dict[str, Any], config: ExperimentConfig) -> None:
    """Score a run on a table's tasks, unless it has been or is not of that table."""
    if group["kind"] != "tasks" or is_scored(run, group):
        return
    if any(run.name in arm["runs"] for arm in group["arms"]):
        from doge_fast.pipeline.fewshot import few_shot

        few_shot(_scoring(run, config))


def _check_unchanged(config: StageConfig) -> None:
    """A finished run was trained on the corpus as it is now, or its arm compares with no other."""
    record = records.read_config(config.out)["corpus"]
    targets = tuple(record["targets"])
    if isinstance(config, ProxyConfig) and MIX in config.target:
        targets += (MIX,)
    if _described(config.corpus, targets) != record:
        raise ValueError(
            f"{config.out} was trained on another corpus than {config.corpus.data} holds now, so "
            "its arm can be compared with none that comes after. Restore the files, or begin in "
            "another directory."
        )


@functools.cache
def _described(corpus: CorpusConfig, targets: tuple[str, ...]) -> dict[str, Any]:
    description: dict[str, Any] = weights_file.plain(
        load_corpus(corpus, targets=targets).describe()
    )
    return description


def _domains_of(config: ExperimentConfig, settings: Settings) -> tuple[str, ...]:
    """All domains that the corpus holds, targets among them."""
    if config.preset == "paper" and config.data is None:
        # Known; asking the Hub would read it all.
        if config.name == "wiki40b":
            return (*PAPER_LANGUAGES, *(config.targets or PAPER_LANGUAGE_TARGETS))
        return settings.domains
    return tuple(sorted(find_parts(corpus_of(config, settings), [])))


def _run(config: StageConfig) -> Path:
    if isinstance(config, ProxyConfig):
        return learn_weights(config)
    if isinstance(config, BaseConfig):
        return train_base(config)
    if isinstance(config, DoReMiConfig):
        return learn_by_excess_loss(config)
    return measure_cancellation(config)


def _line_of(job: Job) -> str:
    config = job.config
    kind = type(config).__name__.removesuffix("Config").lower()
    return f"{kind:<7} {config.model.model:<8} {config.training.steps:>7} steps  {config.out.name}"


def _record(config: ExperimentConfig, settings: Settings, plan: Plan) -> dict[str, Any]:
    return {
        "name": config.name,
        "preset": config.preset,
        "title": plan.title,
        "question": plan.question,
        "settings": weights_file.plain(vars(settings)),
        "target_batch": config.target_batch,
        "data": corpus_of(config, settings).data,
        "runs": [job.config.out.name for job in plan.jobs],
        "groups": plan.groups,
        "versions": records.versions(),
    }


__all__ = ["RUNS", "run_experiment"]
