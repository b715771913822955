"""The command line: parses, calls one stage, says in one sentence what is wrong.

Flags are the fields of the stage's dataclass in `pipeline/config.py`; their help is its
docstrings. Stages are imported once one is chosen, so `--help` is quick and an installation
without the pipeline's dependencies can say what it lacks.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from doge_fast.pipeline.config import (
    BaseConfig,
    DemoConfig,
    DoReMiConfig,
    EvaluateConfig,
    ExperimentConfig,
    InfoConfig,
    ProfileConfig,
    ProxyConfig,
    ReportConfig,
    SelectConfig,
)

TRACEBACK = "DOGE_FAST_TRACEBACK"
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = "Learn how much of each domain a language model should be pretrained on."

_VERBS: dict[str, Callable[..., Any]] = {
    "demo": DemoConfig,
    "proxy": ProxyConfig,
    "base": BaseConfig,
    "doremi": DoReMiConfig,
    "select": SelectConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "experiment": ExperimentConfig,
    "info": InfoConfig,
    "profile": ProfileConfig,
}
_POSITIONAL = (EvaluateConfig, ExperimentConfig)


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
    except (ValueError, RuntimeError, FileNotFoundError) as error:
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
    return tyro.extras.subcommand_cli_from_dict(
        verbs,  # type: ignore[arg-type]
        prog="doge-fast",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _run(config: Any) -> None:
    """Import the stage, call it, say where its result is."""
    if not isinstance(config, InfoConfig):
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
    from doge_fast.pipeline.proxy import learn_weights

    return [f"weights: {learn_weights(config) / 'weights.json'}"]


def _base(config: BaseConfig) -> list[str]:
    from doge_fast.pipeline.base import train_base

    return [f"model: {train_base(config) / 'model'}"]


def _doremi(config: DoReMiConfig) -> list[str]:
    from doge_fast.pipeline.doremi import learn_by_excess_loss

    return [f"weights: {learn_by_excess_loss(config) / 'weights.json'}"]


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

    found = info()
    return [json.dumps(found, indent=1) if config.json else text(found)]


def _profile(config: ProfileConfig) -> list[str]:
    from doge_fast.pipeline.profiling import profile, table

    files = {"json": config.json, "trace": config.trace, "operators": config.trace_operators}
    written = [f"{name}: {path}" for name, path in files.items() if path is not None]
    return [table(profile(config)), *written]


_STAGES: dict[type, Callable[[Any], list[str]]] = {
    DemoConfig: _demo,
    ProxyConfig: _proxy,
    BaseConfig: _base,
    DoReMiConfig: _doremi,
    SelectConfig: _select,
    EvaluateConfig: _evaluate,
    ReportConfig: _report,
    ExperimentConfig: _experiment,
    InfoConfig: _info,
    ProfileConfig: _profile,
}


def _is_ours(error: ModuleNotFoundError) -> bool:
    """A module of this package that is missing is a bug, not a missing extra."""
    return error.name is None or error.name.split(".")[0] == "doge_fast"


def _refuse(sentence: str, code: int = EXIT_REFUSED) -> int:
    print(f"doge-fast: {sentence}", file=sys.stderr)
    return code
