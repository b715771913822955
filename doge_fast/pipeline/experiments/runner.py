"""Runs an experiment's plan: what is done is left alone, what was killed goes on, then the page."""

import difflib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from doge_fast.pipeline import records, training
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DoReMiConfig,
    EvaluateConfig,
    ExperimentConfig,
    ProxyConfig,
    ReportConfig,
    SelectConfig,
)
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.doremi import learn_by_excess_loss
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.experiments.planner import Job, Plan
from doge_fast.pipeline.experiments.plans import plan_of
from doge_fast.pipeline.experiments.presets import check, known_domains
from doge_fast.pipeline.failures import one_line
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.report import terminal_table, write_report
from doge_fast.pipeline.selection import is_selected, measure_cancellation
from doge_fast.pipeline.sources import find_parts
from doge_fast.weights import weights_file

_STAGES: dict[type, Callable[[Any], object]] = {
    ProxyConfig: learn_weights,
    BaseConfig: train_base,
    DoReMiConfig: learn_by_excess_loss,
    SelectConfig: measure_cancellation,
}

_log = logging.getLogger("doge_fast")


def run_experiment(config: ExperimentConfig) -> list[str]:
    """Run all arms of an experiment, or finish one that was interrupted.

    An arm that is done is not run again; one that was killed goes on from its last checkpoint. The
    directory holds experiment.json, runs/ with a directory for every run, and report.html. When a
    run fails, the others are made all the same, but for those that read it.

    Args:
        config: which experiment, how large, on what; `presets.preset_of` makes one of a size.

    Returns:
        Lines to print: the tables with the verdicts, and where the page is; with `config.only` the
        directories of the runs that were made; with `config.plan` those of `plan_lines`.

    Raises:
        ValueError: a setting is out of its range, the corpus lacks a domain, `config.only` names no
            run of the plan or one that reads a run that is not complete, or the directory holds
            another experiment, or runs of another corpus; nothing has been trained.
        RuntimeError: runs failed; it names them, with what was wrong.
    """
    if config.plan:
        return plan_lines(config, f"doge-fast experiment {config.name}")
    check(config)
    out = _directory(config)
    plan = plan_of(config, _domains_of(config), out)
    jobs = _chosen(plan)
    record = _record(plan)
    records.check_experiment(out, record)
    _check_jobs(plan, jobs)
    records.write_experiment(out, record)
    _make_all(plan, jobs)
    if config.only:
        return [f"run: {job.config.out}" for job in jobs]
    page = write_report(ReportConfig(runs=(out,)))
    return [terminal_table([out]), f"report: {page}"]


def plan_lines(config: ExperimentConfig, command: str) -> list[str]:
    """What an experiment would run, as commands; nothing is written.

    Args:
        config: the experiment.
        command: what was typed, without `--plan`.

    Returns:
        A line a run, in an order in which each finds what it reads; then the report. The comment at
        the end of a line begins with its group: runs of a group can be made at the same time, once
        the groups before it are complete.

    Raises:
        ValueError: as `run_experiment`.
    """
    check(config)
    if config.only:
        raise ValueError("--plan prints the commands of all runs; leave out --only.")
    plan = plan_of(config, _domains_of(config), _directory(config))
    lines = []
    for number, wave in enumerate(plan.waves(), start=1):
        for job in wave:
            about = f"{job.stage}, {job.config.model.model}, {job.config.training.steps} steps"
            lines.append(f"{command} --only {job.name}  # group {number}: {about}")
    return [*lines, f"{command}  # report"]


def _directory(config: ExperimentConfig) -> Path:
    return config.out or Path("experiments") / config.name


def _chosen(plan: Plan) -> list[Job]:
    """The runs that are asked for, or all."""
    only = plan.config.only
    by_name = {job.name: job for job in plan.jobs}
    for name in (name for name in only if name not in by_name):
        near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5) or list(by_name)[:3]
        raise ValueError(
            f"only must name runs of the plan; {name} is none. Near it: {', '.join(near)}; --plan "
            "lists all."
        )
    for name in only:
        needed = [each for each in plan.needed_by(by_name[name]) if each not in only]
        if missing := [each for each in needed if not _is_made(by_name[each], plan)]:
            raise ValueError(f"{name} reads {', '.join(missing)}, not complete yet: run it first.")
    return [job for job in plan.jobs if not only or job.name in only]


def _make_all(plan: Plan, jobs: Sequence[Job]) -> None:
    """Make the runs that are not complete, one after the other.

    Raises:
        RuntimeError: runs failed; it names them, with the reason of each.
    """
    left = [job for job in jobs if not _is_made(job, plan)]
    if len(left) < len(jobs):
        _log.info("%d of %d runs are complete already", len(jobs) - len(left), len(jobs))
    reasons: dict[str, list[str]] = {}
    failed: set[str] = set()
    first: Exception | None = None
    for number, job in enumerate(left, start=1):
        if lost := failed.intersection(plan.needed_by(job)):
            reason = f"read {', '.join(sorted(lost))}"
        else:
            told = f"run {number} of {len(left)}: {job.name}"
            _log.info("%s begins", told)
            start = time.monotonic()
            try:
                for do in _left_of(job, plan):
                    do()
                _log.info("%s done in %.0f s", told, time.monotonic() - start)
                continue
            except Exception as error:
                first, reason = first or error, one_line(error)
                _log.warning("%s failed: %s", told, reason)
        failed.add(job.name)
        reasons.setdefault(reason, []).append(job.name)
    if failed:
        lines = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise RuntimeError(
            f"{len(failed)} of {len(jobs)} runs are not complete; the same command tries them "
            f"again.\n{lines}"
        ) from first


def _left_of(job: Job, plan: Plan) -> Iterator[Callable[[], object]]:
    """What is still to do for a run, one after the other: train, measure."""
    out, config = job.config.out, plan.config
    device = config.rates.device
    if not _is_there(job) or (out / records.CHECKPOINTS).exists():
        yield functools.partial(_train, job)
    if job.is_measured and not records.is_measured(out, config.rates.eval_blocks):
        asked = EvaluateConfig(run=out, blocks=config.rates.eval_blocks, device=device)
        yield functools.partial(evaluate, asked)


def _is_made(job: Job, plan: Plan) -> bool:
    return next(_left_of(job, plan), None) is None


def _train(job: Job) -> None:
    _STAGES[type(job.config)](job.config)


def _is_there(job: Job) -> bool:
    """Whether a run has been trained."""
    if isinstance(job.config, SelectConfig):
        return is_selected(job.config)
    return records.is_finished(job.config.out)


def _check_jobs(plan: Plan, jobs: Sequence[Job]) -> None:
    """What would be refused by a run is refused before there is one."""
    for job in jobs:
        check_ranges(job.config)
        needs_float64 = not isinstance(job.config, BaseConfig)
        training.check(job.config.training, needs_float64=needs_float64)
    for job in jobs:
        config = job.config
        if _is_there(job):
            # As the plan has it, and of the corpus as it is now: else no arm compares.
            record = records.read_config(config.out)["corpus"]
            if _described(config.corpus, config.targets) != record:
                raise ValueError(
                    f"{config.out} was trained on another corpus than {config.corpus.data} holds "
                    "now, so its arm can be compared with none that comes after. Restore the "
                    "files, or begin in another directory."
                )
            records.check_run(config.out, stage=cast(records.Stage, job.stage), config=config)
        elif not plan.needed_by(job):
            # What reads runs may take their tokenizer.
            _described(config.corpus, config.targets)


@functools.cache
def _described(corpus: CorpusConfig, targets: tuple[str, ...]) -> dict[str, Any]:
    description: dict[str, Any] = weights_file.plain(
        load_corpus(corpus, targets=targets).describe()
    )
    return description


def _domains_of(config: ExperimentConfig) -> tuple[str, ...]:
    """All domains that the corpus holds, targets among them."""
    # Asking the Hub would read it all.
    return known_domains(config) or tuple(sorted(find_parts(config.corpus, [])))


def _record(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "name": config.name,
        "preset": config.preset,
        "title": plan.title,
        "question": plan.question,
        "settings": {"seeds": config.seeds, "eval_blocks": config.rates.eval_blocks},
        "data": config.corpus.data,
        "config": config,
        "runs": [job.name for job in plan.jobs],
        "groups": plan.groups,
        "versions": records.versions(),
    }
