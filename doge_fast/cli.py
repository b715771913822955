"""The command line: parses, calls one stage, says in one sentence what is wrong.

Flags are the fields of the verb's dataclass in `pipeline/config`; their help is its docstrings.
Stages are imported once one is chosen, so `--help` is quick and an installation without the
pipeline's dependencies can say what it lacks.
"""

import difflib
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import doge_fast
from doge_fast.pipeline import ranks
from doge_fast.pipeline.config import (
    BaseConfig,
    DemoConfig,
    DoReMiConfig,
    EvaluateConfig,
    ExperimentConfig,
    ExportConfig,
    InfoConfig,
    PlanConfig,
    ProfileConfig,
    ProxyConfig,
    ReportConfig,
    SelectConfig,
    WeightsAverageConfig,
    WeightsCardConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsPlotConfig,
    WeightsShowConfig,
)
from doge_fast.pipeline.config.ranges import check as check_ranges

TRACEBACK = "DOGE_FAST_TRACEBACK"
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

# Of packages that a verb imports when it is asked for more than usual.
_EXTRAS = {"lm_eval": "fewshot", "submitit": "slurm", "sklearn": "regret"}
_DESCRIPTION = "Learn how much of each domain a language model should be pretrained on."


class Verb(NamedTuple):
    """A word, or two, that the program is called with."""

    config: type
    run: Callable[[Any], list[str]]
    """Returns lines to print."""
    is_positional: bool = False
    """Whether fields that must be given stand without a flag: they are what the verb is about."""
    loads: tuple[str, ...] = ("torch", "datasets", "transformers", "transformers.trainer")
    """Packages that it needs and that take seconds to import."""
    takes_ranks: bool = False
    """Whether several processes of a launcher can share it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program's name; None: that of the process.

    Returns:
        0; 2 when the stage refused, with one sentence on stderr; 130 when interrupted. With
        DOGE_FAST_TRACEBACK=1 in the environment a refusal shows where it came from.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # What all ranks of a run say, the first one says.
    level = logging.INFO if ranks.is_first() else logging.ERROR
    logging.getLogger("doge_fast").setLevel(level)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for line in _answer(words):
            if ranks.is_first():
                print(line)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _refuse(
            "Interrupted. A training resumes from its last checkpoint with the same command.",
            EXIT_INTERRUPTED,
        )
    except ModuleNotFoundError as error:
        if _is_ours(error) or os.environ.get(TRACEBACK):
            raise
        extra = _EXTRAS.get(str(error.name), "pipeline")
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


def _answer(words: list[str]) -> list[str]:
    """What the words ask for: help, the version, or a verb's lines."""
    if words in ([], ["-h"], ["--help"]):
        return [overview()]
    if words == ["--version"]:
        return [f"doge-fast {doge_fast.__version__}"]
    name, _ = _verb_of(words)
    if name not in VERBS:
        return [overview(f"{name} ")]
    if not VERBS[name].takes_ranks:
        ranks.refuse_several(name)
    config = parse(words)
    check_ranges(config)
    _load(VERBS[name].loads)
    if isinstance(config, ExperimentConfig) and config.plan:
        return _plan(config, words)
    return VERBS[name].run(config)


def _verb_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb, of one word or two, and the words after it.

    Raises:
        ValueError: there is no such verb.
    """
    first, *others = words
    members = [name for name in VERBS if name.startswith(f"{first} ")]
    if members and (not others or others[0] in ("-h", "--help")):
        return first, others
    name = f"{first} {others[0]}" if members else first
    if name not in VERBS:
        known = members or [each.split()[0] for each in VERBS]
        near = difflib.get_close_matches(name, known, n=1)
        told = (
            f"Did you mean {near[0]}?" if near else f"There are {', '.join(dict.fromkeys(known))}."
        )
        raise ValueError(f"{name} is no verb. {told}")
    return name, others[1:] if members else others


def parse(words: Sequence[str]) -> Any:
    """The dataclass of the verb that the words begin with, made from the words after it.

    Raises:
        ValueError: there is no such verb, or the file that `--config` names is not what it should
            be.
        SystemExit: help was asked for, or a flag is wrong.
    """
    from doge_fast import flags

    name, others = _verb_of(words)
    verb = VERBS[name]
    return flags.parse(others, verb.config, verb=name, is_positional=verb.is_positional)


def overview(first: str = "") -> str:
    """All verbs with a sentence each, or those that begin with a word."""
    from doge_fast.pipeline.tables import table_of, text

    shown = {name: verb for name, verb in VERBS.items() if name.startswith(first)}
    rows = [
        (name, " ".join((verb.config.__doc__ or "").split()).split(". ")[0].rstrip("."))
        for name, verb in shown.items()
    ]
    table = text(table_of(("verb", "what it does"), rows), left=(0,))
    usage = "usage: doge-fast VERB [OPTIONS]; doge-fast VERB --help; doge-fast --version"
    return f"{usage}\n\n{_DESCRIPTION}\n\n{table}"


def _load(packages: Sequence[str]) -> None:
    """Import what takes seconds; on a terminal something moves meanwhile."""
    missing = [package for package in packages if package not in sys.modules]
    if missing:
        from rich.console import Console

        with Console(stderr=True, quiet=not ranks.is_first()).status("") as status:
            for package in missing:
                status.update(f"loading {package} ...")
                import_module(package)
    if "transformers" in packages:
        from transformers.utils import logging as transformers_logging

        # What it reads and writes has bars of ours.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _demo(config: DemoConfig) -> list[str]:
    from doge_fast.pipeline.experiments.presets import demo_of
    from doge_fast.pipeline.experiments.runner import run_experiment

    return run_experiment(demo_of(config))


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

    ranks.refuse_several("A dry run")
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
    if not config.perplexity and not config.tasks.tasks:
        raise ValueError("With --no-perplexity there is nothing to measure; name --tasks.")
    # Both speak before either computes: what is wrong with a task need not wait.
    if config.tasks.tasks:
        from doge_fast.pipeline.fewshot import open_tasks

        ranks.refuse_several("evaluate --tasks")
        open_tasks(config)
    lines = []
    if config.perplexity:
        from doge_fast.pipeline.evaluation import evaluate, table

        lines.append(table(evaluate(config)))
    if config.tasks.tasks:
        from doge_fast.pipeline import fewshot

        lines.append(fewshot.table(fewshot.few_shot(config)))
    return lines


def _report(config: ReportConfig) -> list[str]:
    from doge_fast.pipeline.report import terminal_table, write_report

    page = write_report(config)
    return [terminal_table(config.runs, config.weights), f"report: {page}"]


def _experiment(config: ExperimentConfig) -> list[str]:
    from doge_fast.pipeline.experiments.runner import run_experiment

    return run_experiment(config)


def _plan(config: ExperimentConfig, words: Sequence[str]) -> list[str]:
    from doge_fast.pipeline.experiments.runner import plan_lines

    typed = ["doge-fast", *(word for word in words if word != "--plan"), "--no-plan"]
    has_file = any(word.split("=")[0] == "--config" for word in words)
    return plan_lines(config, shlex.join(typed if has_file else typed[:-1]))


def _info(config: InfoConfig) -> list[str]:
    from doge_fast.info import info, text

    facts = info()
    return [json.dumps(facts, indent=1) if config.json else text(facts)]


def _profile(config: ProfileConfig) -> list[str]:
    from doge_fast.pipeline.profiling import profile, table

    files = {"json": config.json, "trace": config.trace, "operators": config.trace_operators}
    written = [f"{name}: {path}" for name, path in files.items() if path is not None]
    return [table(profile(config)), *written]


def _scale(config: PlanConfig) -> list[str]:
    from doge_fast.planning import plan

    return plan(config)


def _export(config: ExportConfig) -> list[str]:
    from doge_fast.pipeline.exports.command import run

    return run(config)


def _weights(verb: str) -> Callable[[Any], list[str]]:
    def run(config: Any) -> list[str]:
        from doge_fast.pipeline.weights import verbs

        lines: list[str] = getattr(verbs, verb)(config)
        return lines

    return run


def _weights_plot(config: WeightsPlotConfig) -> list[str]:
    from doge_fast.pipeline.weights.pages import plot

    return plot(config)


def _weights_card(config: WeightsCardConfig) -> list[str]:
    from doge_fast.pipeline.weights.pages import card

    return card(config)


VERBS: dict[str, Verb] = {
    "demo": Verb(DemoConfig, _demo),
    "proxy": Verb(ProxyConfig, _proxy, takes_ranks=True),
    "base": Verb(BaseConfig, _base, takes_ranks=True),
    "doremi": Verb(DoReMiConfig, _doremi, takes_ranks=True),
    "select": Verb(SelectConfig, _select, takes_ranks=True),
    "evaluate": Verb(EvaluateConfig, _evaluate, is_positional=True, takes_ranks=True),
    "report": Verb(ReportConfig, _report, loads=("matplotlib.figure",)),
    "experiment": Verb(ExperimentConfig, _experiment, is_positional=True),
    "weights show": Verb(WeightsShowConfig, _weights("show"), True, ()),
    "weights diff": Verb(WeightsDiffConfig, _weights("diff"), True, ()),
    "weights average": Verb(WeightsAverageConfig, _weights("average"), True, ()),
    "weights constrain": Verb(WeightsConstrainConfig, _weights("constrain"), True, ()),
    "weights plot": Verb(WeightsPlotConfig, _weights_plot, True, ("matplotlib.figure",)),
    "weights card": Verb(WeightsCardConfig, _weights_card, True, ("matplotlib.figure",)),
    "export": Verb(ExportConfig, _export, loads=()),
    "info": Verb(InfoConfig, _info, loads=("torch",)),
    "plan": Verb(PlanConfig, _scale, loads=()),
    "profile": Verb(ProfileConfig, _profile, loads=("torch", "transformers")),
}


def _is_ours(error: ModuleNotFoundError) -> bool:
    """A module of this package that is missing is a bug, not a missing extra."""
    return error.name is None or error.name.split(".")[0] == "doge_fast"


def _refuse(sentence: str, code: int = EXIT_REFUSED) -> int:
    where = "" if ranks.is_first() else f", rank {ranks.place()[0]}"
    print(f"doge-fast{where}: {sentence}", file=sys.stderr)
    return code
