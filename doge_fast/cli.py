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
from typing import Any

from doge_fast.pipeline.config import (
    BaseConfig,
    DemoConfig,
    EvaluateConfig,
    InfoConfig,
    ProfileConfig,
    ProxyConfig,
    ReportConfig,
)

TRACEBACK = "DOGE_FAST_TRACEBACK"
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = "Learn how much of each domain a language model should be pretrained on."

_VERBS: dict[str, Callable[..., Any]] = {
    "demo": DemoConfig,
    "proxy": ProxyConfig,
    "base": BaseConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "info": InfoConfig,
    "profile": ProfileConfig,
}


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
        return _refuse(
            f"This verb needs {error.name}, which is not installed: pip install "
            "'doge-fast[pipeline]'."
        )
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        if os.environ.get(TRACEBACK):
            raise
        return _refuse(str(error))
    return 0


def _parse(arguments: Sequence[str] | None) -> Any:
    """The dataclass of the verb that was asked for."""
    import tyro

    return tyro.extras.subcommand_cli_from_dict(
        _VERBS,
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


def _evaluate(config: EvaluateConfig) -> list[str]:
    from doge_fast.pipeline.evaluation import evaluate, table

    return [table(evaluate(config))]


def _report(config: ReportConfig) -> list[str]:
    from doge_fast.pipeline.report import write_report

    return [f"report: {write_report(config)}"]


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
    EvaluateConfig: _evaluate,
    ReportConfig: _report,
    InfoConfig: _info,
    ProfileConfig: _profile,
}


def _is_ours(error: ModuleNotFoundError) -> bool:
    """A module of this package that is missing is a bug, not a missing extra."""
    return error.name is None or error.name.split(".")[0] == "doge_fast"


def _refuse(sentence: str, code: int = EXIT_REFUSED) -> int:
    print(f"doge-fast: {sentence}", file=sys.stderr)
    return code
