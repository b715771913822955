"""The command line: parses, calls one stage, says in one sentence what is wrong.

Flags are the fields of the stage's dataclass in `pipeline/config.py`; their help is its
docstrings. Stages are imported once one is chosen, so `--help` is quick and an installation
without the pipeline's dependencies can say what it lacks.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from doge_fast.pipeline.config import (
    BaseConfig,
    DemoConfig,
    DoReMiConfig,
    EvaluateConfig,
    ExperimentConfig,
    ExportConfig,
    InfoConfig,
    ProfileConfig,
    ProxyConfig,
    ReportConfig,
    SelectConfig,
    WeightsAverageConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsShowConfig,
)

TRACEBACK = "DOGE_FAST_TRACEBACK"
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = "Learn how much of each domain a language model should be pretrained on."


class SubVerb(NamedTuple):
    """What a member of a verb that has verbs of its own is called."""

    name: str


_WEIGHTS_VERBS: dict[str, type] = {
    "show": WeightsShowConfig,
    "diff": WeightsDiffConfig,
    "average": WeightsAverageConfig,
    "constrain": WeightsConstrainConfig,
}
_VERBS: dict[str, Any] = {
    "demo": DemoConfig,
    "proxy": ProxyConfig,
    "base": BaseConfig,
    "doremi": DoReMiConfig,
    "select": SelectConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "experiment": ExperimentConfig,
    "weights": reduce(
        or_, (Annotated[config, SubVerb(name)] for name, config in _WEIGHTS_VERBS.items())
    ),
    "export": ExportConfig,
    "info": InfoConfig,
    "profile": ProfileConfig,
}
_POSITIONAL = (EvaluateConfig, ExperimentConfig, *_WEIGHTS_VERBS.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program's name; None: that of the process.

    Returns:
        0; 2 when the stage refused, with one sentence on stderr; 130 when interrupted. With
        DOGE_FAST_TRACEBACK=1 in the environment a refusal shows where it came from.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("doge_fast").setLevel(logging.INFO)
    try:
        _run(_parse(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _refuse(
            "Interrupted. A training resumes from its last checkpoint with the same command.", 130
        )
    except ModuleNotFoundError as error:
        if _is_ours(error) or os.environ.get(TRACEBACK):
            raise
        extra = "fewshot" if error.name == "lm_eval" else "pipeline"
        return _refuse(
            f"This verb needs {error.name}, which is not installed: pip install "
            f"'doge-fast[{extra}]'."
        )
    except BrokenPipeError:
        # The reader, `head` for example, has closed the pipe; closing ours at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get(TRACEBACK):
            raise
        return _refuse(str(error))
    return 0


def _parse(arguments: Sequence[str] | None) -> Any:
    """The dataclass of the verb that was asked for."""
    import tyro

    # What must be named is named without a flag where it is what the verb is about.
    verbs = {
        name: Annotated[verb, tyro.conf.PositionalRequiredArgs] if verb in _POSITIONAL else verb
        for name, verb in _VERBS.items()
    }
    verbs["weights"] = _weights_verb()
    verbs["export"] = _export_verb()
    config = tyro.extras.subcommand_cli_from_dict(
        verbs,  # type: ignore[arg-type]
        prog="doge-fast",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return ExportConfig(**vars(config)) if isinstance(config, ExportConfig) else config


def _weights_verb() -> Callable[..., Any]:
    """A verb with verbs of its own: what it parses is what the chosen one does."""
    import tyro

    kinds = [
        Annotated[
            config,
            tyro.conf.subcommand(name, prefix_name=False),
            tyro.conf.PositionalRequiredArgs,
        ]
        for name, config in _WEIGHTS_VERBS.items()
    ]

    def weights(verb: Any) -> Any:
        """Look at weights.json files, compare them, average them, keep them within bounds."""
        return verb

    weights.__annotations__["verb"] = reduce(or_, kinds)
    return weights


def _export_verb() -> type[ExportConfig]:
    """A file that may be left out stands without a flag, and `from` is no name for a field."""
    import tyro

    fields: list[tuple[str, Any, Any]] = [
        ("file", Annotated[Path | None, tyro.conf.Positional], None),
        ("from_", Annotated[str | None, tyro.conf.arg(name="from")], None),
    ]
    verb = dataclasses.make_dataclass("export", fields, bases=(ExportConfig,), frozen=True)
    verb.__doc__ = ExportConfig.__doc__
    return verb


def _run(config: Any) -> None:
    """Import the stage, call it, say where its result is."""
    if not isinstance(config, (InfoConfig, ExportConfig, *_WEIGHTS_VERBS.values())):
        _silence_transformers()
    for line in _STAGES[type(config)](config):
        print(line)


def _silence_transformers() -> None:
    """No bars for reading and writing a file, of which the runs have bars of their own."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _demo(config: DemoConfig) -> list[str]:
    from doge_fast.pipeline.demo import tell

    return tell(config)


def _proxy(config: ProxyConfig) -> list[str]:
    from doge_fast.pipeline.proxy import ProxyStage, learn_weights

    if config.dry_run:
        return _rehearsed(ProxyStage(config))
    return _learned(learn_weights(config))


def _base(config: BaseConfig) -> list[str]:
    from doge_fast.pipeline.base import BaseStage, train_base

    if config.dry_run:
        return _rehearsed(BaseStage(config))
    return [f"model: {train_base(config) / 'model'}"]


def _rehearsed(stage: Any) -> list[str]:
    from doge_fast.pipeline.rehearsal import rehearse

    return [rehearse(stage)]


def _doremi(config: DoReMiConfig) -> list[str]:
    from doge_fast.pipeline.doremi import learn_by_excess_loss

    return _learned(learn_by_excess_loss(config))


def _learned(run: Path) -> list[str]:
    from doge_fast.pipeline.reporting.verdicts import remarks_on

    return [*remarks_on(run), f"weights: {run / 'weights.json'}"]


def _select(config: SelectConfig) -> list[str]:
    from doge_fast.pipeline.selection import measure_cancellation, table

    return [table(measure_cancellation(config))]


def _evaluate(config: EvaluateConfig) -> list[str]:
    if not config.perplexity and not config.tasks:
        raise ValueError("With --no-perplexity there is nothing to measure; name --tasks.")
    # Both speak before either computes: what is wrong with a task need not wait.
    if config.tasks:
        from doge_fast.pipeline.fewshot import open_tasks

        open_tasks(config)
    lines = []
    if config.perplexity:
        from doge_fast.pipeline.evaluation import evaluate, table

        lines.append(table(evaluate(config)))
    if config.tasks:
        from doge_fast.pipeline import fewshot

        lines.append(fewshot.table(fewshot.few_shot(config)))
    return lines


def _report(config: ReportConfig) -> list[str]:
    from doge_fast.pipeline.report import terminal_table, write_report

    page = write_report(config)
    return [terminal_table(config.runs), f"report: {page}"]


def _experiment(config: ExperimentConfig) -> list[str]:
    from doge_fast.pipeline.experiments.runner import run_experiment

    return run_experiment(config)


def _info(config: InfoConfig) -> list[str]:
    from doge_fast.info import info, text

    facts = info()
    return [json.dumps(facts, indent=1) if config.json else text(facts)]


def _profile(config: ProfileConfig) -> list[str]:
    from doge_fast.pipeline.profiling import profile, table

    files = {"json": config.json, "trace": config.trace, "operators": config.trace_operators}
    written = [f"{name}: {path}" for name, path in files.items() if path is not None]
    return [table(profile(config)), *written]


def _export(config: ExportConfig) -> list[str]:
    from doge_fast.pipeline.exports.command import run

    return run(config)


def _weights(verb: str) -> Callable[[Any], list[str]]:
    def run(config: Any) -> list[str]:
        from doge_fast.pipeline import weights_verbs

        lines: list[str] = getattr(weights_verbs, verb)(config)
        return lines

    return run


_STAGES: dict[type, Callable[[Any], list[str]]] = {
    DemoConfig: _demo,
    ProxyConfig: _proxy,
    BaseConfig: _base,
    DoReMiConfig: _doremi,
    SelectConfig: _select,
    EvaluateConfig: _evaluate,
    ReportConfig: _report,
    ExperimentConfig: _experiment,
    ExportConfig: _export,
    InfoConfig: _info,
    ProfileConfig: _profile,
    **{config: _weights(name) for name, config in _WEIGHTS_VERBS.items()},
}


def _is_ours(error: ModuleNotFoundError) -> bool:
    """A module of this package that is missing is a bug, not a missing extra."""
    return error.name is None or error.name.split(".")[0] == "doge_fast"


def _refuse(sentence: str, code: int = EXIT_REFUSED) -> int:
    print(f"doge-fast: {sentence}", file=sys.stderr)
    return code
