"""Runs an experiment's plan, one run after the other, and writes the page."""

import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from doge_fast.pipeline import records, training
from doge_fast.pipeline.config import CorpusConfig, ExperimentConfig, ReportConfig
from doge_fast.pipeline.config.ranges import check
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.experiments.jobs import Job, chosen
from doge_fast.pipeline.experiments.planner import Plan
from doge_fast.pipeline.experiments.plans import plan_of
from doge_fast.pipeline.experiments.presets import known_domains
from doge_fast.pipeline.failures import one_line
from doge_fast.pipeline.report import terminal_table, write_report
from doge_fast.pipeline.sources import find_parts

_log = logging.getLogger("doge_fast")


def run_experiment(config: ExperimentConfig) -> list[str]:
    """Run all arms of an experiment, or finish one that was interrupted.

    An arm that is done is not run again; one that was killed goes on from its last checkpoint. The
    directory holds experiment.json, runs/ with a directory for every run, and report.html. When a
    run fails, the others are made all the same, but for those that read it.

    Args:
        config: which experiment, how large, on what; `presets.preset_of` makes one of a size.

    Returns:
        Lines to print: the tables, and where the page is; with `config.only` the directories of the
        runs that were made; with `config.plan` those of `plan_lines`.

    Raises:
        ValueError: a setting is out of its range, the corpus lacks a domain, `config.only` names no
            run of the plan or one that reads a run that is not complete, or the directory holds
            another experiment, or runs of another corpus; nothing has been trained.
        RuntimeError: runs failed; it names them, with what was wrong.
    """
    if config.plan:
        return plan_lines(config, f"doge-fast experiment {config.name}")
    plan = _plan(config)
    jobs = chosen(plan.jobs, config.only)
    by_name = {job.name: job for job in plan.jobs}
    for name in config.only:
        needed = [each for each in plan.needed_by(by_name[name]) if each not in config.only]
        if missing := [each for each in needed if not by_name[each].is_made()]:
            raise ValueError(f"{name} reads {', '.join(missing)}, not complete yet: run it first.")
    out = _directory(config)
    records.check_experiment(out, plan.record)
    _check_jobs(plan, jobs)
    records.write_experiment(out, plan.record)
    _make_all(plan, jobs)
    if config.only:
        return [f"run: {job.config.out}" for job in jobs]
    page = write_report(ReportConfig(runs=(out,)))
    return [terminal_table([out]), f"report: {page}"]


def plan_lines(config: ExperimentConfig, command: str) -> list[str]:
    """What an experiment would run, as commands that begin with `command`; nothing is written.

    A line a run, in an order in which each finds what it reads; then the report. The comment at the
    end of a line begins with its group: runs of a group can be made at the same time, once the
    groups before it are complete.
    """
    lines = [
        job.command(command, f"group {number}: {job.config.stage}")
        for number, wave in enumerate(_plan(config).waves(), start=1)
        for job in wave
    ]
    return [*lines, f"{command}  # report"]


def _plan(config: ExperimentConfig) -> Plan:
    check(config)
    # All domains that the corpus holds, targets among them. Asking the Hub would read it all.
    names = known_domains(config) or tuple(sorted(find_parts(config.corpus, [])))
    return plan_of(config, names, _directory(config))


def _directory(config: ExperimentConfig) -> Path:
    return config.out or Path("experiments") / config.name


def _make_all(plan: Plan, jobs: Sequence[Job]) -> None:
    """Make the runs that are not complete; RuntimeError names those that failed, and why."""
    left = [job for job in jobs if not job.is_made()]
    if len(left) < len(jobs):
        _log.info("%d of %d runs are complete already", len(jobs) - len(left), len(jobs))
    # {run: why it is not there}
    failed: dict[str, str] = {}
    first: Exception | None = None
    for number, job in enumerate(left, start=1):
        if lost := failed.keys() & set(plan.needed_by(job)):
            failed[job.name] = f"read {', '.join(sorted(lost))}"
            continue
        told = f"run {number} of {len(left)}: {job.name}"
        _log.info("%s begins", told)
        start = time.monotonic()
        try:
            job.make()
            _log.info("%s done in %.0f s", told, time.monotonic() - start)
        except Exception as error:
            first, failed[job.name] = first or error, one_line(error)
            _log.warning("%s failed: %s", told, failed[job.name])
    if failed:
        lines = "\n".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(jobs)} runs are not complete; the same command tries them "
            f"again.\n{lines}"
        ) from first


def _check_jobs(plan: Plan, jobs: Sequence[Job]) -> None:
    """What would be refused by a run is refused before there is one."""
    # The text may have changed since an earlier call.
    _described.cache_clear()
    for job in jobs:
        check(job.config, has_inputs=not plan.needed_by(job))
        training.device_of(job.config.training.device)
    for job in jobs:
        config = job.config
        if job.is_trained():
            # As the plan has it, and of the corpus as it is now: else no arm compares.
            record = records.load(config.out, records.ConfigRecord)
            now = _described(config.corpus, config.targets)
            records.check_corpus(config.out, record.corpus, now)
            records.check_run(config)
        elif not plan.needed_by(job):
            # What reads runs may take their tokenizer.
            _described(config.corpus, config.targets)


@functools.cache
def _described(corpus: CorpusConfig, targets: tuple[str, ...]) -> records.CorpusRecord:
    return load_corpus(corpus, targets=targets).describe()
