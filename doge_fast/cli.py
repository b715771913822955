"""The command line: parse, call one stage, report an error in one sentence.

Flags are the fields of the verb's dataclass in `pipeline/config`; their help is its docstrings.
A stage is imported when its verb is called, so `--help` is quick and an installation without the
pipeline's dependencies can say which are missing.
"""

import json
import logging
import os
import shlex
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import doge_fast
from doge_fast.pipeline import config as configs
from doge_fast.pipeline import failures, named, ranks
from doge_fast.pipeline.config import command_line
from doge_fast.pipeline.config.ranges import check_paths

TRACEBACK = "DOGE_FAST_TRACEBACK"
_log = logging.getLogger("doge_fast")

_DESCRIPTION = "Learn how much of each domain a language model should be pretrained on."


class Verb(NamedTuple):
    """A subcommand of one or two words."""

    config: type
    run: Callable[[Any], list[str]]
    """Returns lines to print."""
    loads: tuple[str, ...] = ("torch", "datasets", "transformers")
    """Packages that the verb needs and that take seconds to import."""
    takes_ranks: bool = False
    """Whether it may run in several processes of a launcher."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program's name; None: that of the process.

    Returns:
        0; 2 if the arguments or the user's files are wrong; 1 for any other failure (a full disk,
        a damaged file, another process, a bug); 130 after Ctrl-C, 143 after SIGTERM, 129 after
        SIGHUP. With DOGE_FAST_TRACEBACK=1 in the environment errors are raised.
    """
    _log_visibly()
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    words = list(sys.argv[1:] if arguments is None else arguments)
    config = None
    try:
        with _terminable():
            if words in ([], ["-h"], ["--help"]):
                return _print([overview()])
            if words == ["--version"]:
                return _print([f"doge-fast {doge_fast.__version__}"])
            name, _ = _verb_of(words)
            if name not in VERBS:
                return _print([overview(f"{name} ")])
            config = _configured(name, words)
            _load(VERBS[name].loads, config)
            if getattr(config, "dry_run", False):
                lines = _rehearsed(config)
            elif getattr(config, "plan", False):
                lines = _plan(config, words)
            else:
                lines = VERBS[name].run(config)
    except KeyboardInterrupt as end:
        return _refuse(
            failures.INTERRUPTED, f"Interrupted. {str(end) or _left_by(config)}".rstrip()
        )
    except failures.Terminated as end:
        return _refuse(end.code, f"Ended by {end.name}. {str(end) or _left_by(config)}".rstrip())
    except SystemExit as end:
        # Help was asked for, or an option is wrong: tyro has said so.
        return cast(int, end.code)
    except BaseException as error:
        # Not Exception: panics of Rust libraries do not derive from it.
        if os.environ.get(TRACEBACK):
            raise
        return _refuse(*_ending(error, _directory_of(config)))
    return _print(lines)


def _ending(error: BaseException, directory: Path | None) -> failures.Ending:
    # A missing module of this package is a bug, not a missing extra.
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and missing.split(".")[0] != "doge_fast":
        extra = "fewshot" if missing == "lm_eval" else "pipeline"
        return failures.Ending(
            failures.USAGE,
            f"This verb needs {missing}, which is not installed: pip install 'doge-fast[{extra}]'.",
        )
    return failures.ending_of(error, directory)


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise on SIGTERM and SIGHUP, as on Ctrl-C, unless another handler is installed."""
    is_main = threading.current_thread() is threading.main_thread()
    # Under nohup SIGHUP is ignored, and stays so.
    free = [each for each in failures.ENDING_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for each in free if is_main else ():
        signal.signal(each, failures.raise_terminated)
    try:
        yield
    finally:
        for each in free if is_main else ():
            signal.signal(each, signal.SIG_DFL)


def _log_visibly() -> None:
    """Log to stderr, without control characters."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # Else they are written into a bar.
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_make_visible)
    # Only the first rank logs what all ranks would.
    level = logging.INFO if ranks.is_first() else logging.ERROR
    logging.getLogger("doge_fast").setLevel(level)


def _bars() -> list[Any]:
    """Progress bars on the terminal, into which a line of text would be written."""
    tqdm = sys.modules.get("tqdm")
    return [] if tqdm is None else list(tqdm.tqdm._instances)


def _make_visible(record: logging.LogRecord) -> bool:
    for bar in _bars():
        # It is drawn again below the line.
        bar.clear()
    record.msg, record.args = named.visible(record.getMessage()), None
    return True


def _print(lines: Sequence[str]) -> int:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for line in lines if ranks.is_first() else ():
            # Characters outside the terminal's encoding become escapes, as on stderr.
            print(named.visible(line).encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        _mute()
        if isinstance(error, BrokenPipeError):
            # The reader, `head` for example, has closed the pipe.
            return 0
        error.filename = "The standard output"
        return _refuse(*_ending(error, None))
    return 0


def _mute() -> None:
    """Redirect standard output, so that closing it at exit does not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _configured(name: str, words: list[str]) -> Any:
    """The verb's configuration, with all that it names in its place."""
    if not VERBS[name].takes_ranks:
        ranks.refuse_several(name)
    try:
        config = parse(words)
    except BrokenPipeError:
        # parse() prints help, and its reader has closed the pipe.
        _mute()
        raise SystemExit(0) from None
    check_paths(config)
    return config


def _directory_of(config: Any) -> Path | None:
    """The directory that a verb writes in, if it exists."""
    out = getattr(config, "run", getattr(config, "out", None))
    # Not Path.is_dir, which raises if a name is too long.
    return out if out is not None and os.path.isdir(out) else None


def _left_by(config: Any) -> str:
    """What the same command does after an interruption."""
    if isinstance(config, configs.StageConfig):
        if next(config.out.glob("checkpoints/checkpoint-*"), None) is not None:
            return "The same command goes on from the last checkpoint."
        return failures.NO_CHECKPOINT
    is_several = isinstance(config, configs.DemoConfig | configs.TemperatureConfig)
    return "The same command keeps the runs that are complete." if is_several else ""


def _verb_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb, of one word or two, and the words after it; ValueError if there is no such verb."""
    first, *others = words
    members = [name for name in VERBS if name.startswith(f"{first} ")]
    if members and (not others or others[0] in ("-h", "--help")):
        return first, others
    name = f"{first} {others[0]}" if members else first
    if name not in VERBS:
        known = members or [each.split()[0] for each in VERBS]
        all_of_them = f"There are {', '.join(dict.fromkeys(known))}."
        raise failures.UserError(f"{name} is no verb. {named.nearest(name, known, all_of_them)}")
    return name, others[1:] if members else others


def parse(words: Sequence[str]) -> Any:
    """The dataclass of the verb that the words begin with, made from the words after it.

    ValueError if there is no such verb; SystemExit if an option is wrong or help was asked for.
    """
    name, others = _verb_of(words)
    return command_line.parse(others, VERBS[name].config, verb=name)


def overview(first: str = "") -> str:
    """The verbs that begin with `first`, with a sentence each; without the pipeline's packages."""
    shown = {name: verb for name, verb in VERBS.items() if name.startswith(first)}
    lines = {
        name: " ".join((verb.config.__doc__ or "").split()).split(". ")[0].rstrip(".")
        for name, verb in shown.items()
    }
    indent = 2 + max(map(len, VERBS))
    width = shutil.get_terminal_size((100, 24)).columns
    table = [
        textwrap.fill(f"{name:<{indent}}{line}", width, subsequent_indent=" " * indent)
        for name, line in {"verb": "what it does", **lines}.items()
    ]
    usage = "usage: doge-fast VERB [OPTIONS]; doge-fast VERB --help; doge-fast --version"
    return "\n".join([usage, "", _DESCRIPTION, "", *table])


def _load(packages: Sequence[str], config: Any) -> None:
    """Import slow packages, after a line that says what comes then."""
    missing = [package for package in packages if package not in sys.modules]
    told = ""
    if isinstance(config, configs.StageConfig):
        corpus, steps = config.corpus, config.training.steps
        if isinstance(config, configs.ProxyConfig):
            blocks, whose = config.sequences_per_domain, " of every domain"
        else:
            blocks, whose = config.batch_size, ""
        told = (
            f"{config.out}: {config.stage} of {steps} steps on {corpus.data}, each of {blocks} "
            f"blocks of {corpus.block_size} tokens{whose}; "
        )
    if missing:
        _log.info("%sloading %s ...", told, ", ".join(missing))
    # What takes a while has a bar of ours, and what is wrong a sentence.
    for package in packages:
        module = import_module(package)
        if package == "datasets":
            module.disable_progress_bars()
        elif package == "transformers":
            module.utils.logging.disable_progress_bar()
            module.utils.logging.set_verbosity(logging.CRITICAL)


def _in(module: str, function: str) -> Callable[[Any], list[str]]:
    """A function of this package, imported when it is called."""
    return lambda config: getattr(import_module(f"doge_fast.{module}"), function)(config)


def _proxy(config: configs.ProxyConfig) -> list[str]:
    from doge_fast.pipeline.proxy import learn_weights

    return _learned(learn_weights(config).path)


def _temperature(config: configs.TemperatureConfig) -> list[str]:
    from doge_fast.pipeline.temperature import lines_of, temperature

    run = temperature(config)
    if config.only:
        return [f"run: {run.path / 'runs' / name}" for name in config.only]
    return lines_of(run.path)


def _base(config: configs.BaseConfig) -> list[str]:
    from doge_fast.pipeline.base import held_out_perplexity, train_base

    out = train_base(config).path
    return [
        *held_out_perplexity(out),
        f"model: {out / 'model'}",
        f"for each domain: {shlex.join(['doge-fast', 'evaluate', str(out)])}",
    ]


def _rehearsed(config: Any) -> list[str]:
    from doge_fast.pipeline.rehearsal import rehearse

    ranks.refuse_several("A dry run")
    return [rehearse(config)]


def _doremi(config: configs.DoReMiConfig) -> list[str]:
    from doge_fast.pipeline.doremi import learn_by_excess_loss

    return _learned(learn_by_excess_loss(config).path)


def _learned(run: Path) -> list[str]:
    from doge_fast.pipeline.reporting.proxies import remarks_on

    try:
        remarks = remarks_on(run)
    except ValueError as error:
        # The result is there, whatever became of the lines about the way to it.
        remarks = [f"Warning: {error}"]
    return [*remarks, f"weights: {run / 'weights.json'}"]


def _select(config: configs.SelectConfig) -> list[str]:
    from doge_fast.pipeline.selection import measure_cancellation, selection_table

    return [selection_table(measure_cancellation(config))]


def _evaluate(config: configs.EvaluateConfig) -> list[str]:
    if config.tasks.tasks:
        from doge_fast.pipeline import fewshot

        ranks.refuse_several("evaluate --tasks")
        return [fewshot.accuracy_table(fewshot.few_shot(config))]
    from doge_fast.pipeline.evaluation import evaluate, perplexity_table

    return [perplexity_table(evaluate(config))]


def _report(config: configs.ReportConfig) -> list[str]:
    from doge_fast.pipeline.report import terminal_table, write_report

    page = write_report(config)
    return [terminal_table(config.runs), f"report: {page}"]


def _plan(config: configs.TemperatureConfig, words: Sequence[str]) -> list[str]:
    from doge_fast.pipeline.temperature import plan_lines

    typed = ["doge-fast", *(word for word in words if word != "--plan"), "--no-plan"]
    has_file = any(word.split("=")[0] == "--config" for word in words)
    return plan_lines(config, shlex.join(typed if has_file else typed[:-1]))


def _info(config: configs.InfoConfig) -> list[str]:
    from doge_fast.info import info, text

    facts = info()
    return [json.dumps(facts, indent=1) if config.json else text(facts)]


def _profile(config: configs.ProfileConfig) -> list[str]:
    from doge_fast.profiling.profile import profile, profile_table

    written = [] if config.json is None else [f"json: {config.json}"]
    return [profile_table(profile(config)), *written]


_WEIGHTS = "pipeline.weights.verbs"
VERBS: dict[str, Verb] = {
    "demo": Verb(configs.DemoConfig, _in("pipeline.demo", "demo")),
    "proxy": Verb(configs.ProxyConfig, _proxy, takes_ranks=True),
    "temperature": Verb(configs.TemperatureConfig, _temperature, takes_ranks=True),
    "base": Verb(configs.BaseConfig, _base, takes_ranks=True),
    "doremi": Verb(configs.DoReMiConfig, _doremi, takes_ranks=True),
    "select": Verb(configs.SelectConfig, _select, takes_ranks=True),
    "evaluate": Verb(configs.EvaluateConfig, _evaluate, takes_ranks=True),
    "report": Verb(configs.ReportConfig, _report, loads=("matplotlib.figure",)),
    "weights show": Verb(configs.WeightsShowConfig, _in(_WEIGHTS, "show_files"), ()),
    "weights average": Verb(configs.WeightsAverageConfig, _in(_WEIGHTS, "average_files"), ()),
    "weights constrain": Verb(configs.WeightsConstrainConfig, _in(_WEIGHTS, "constrain_file"), ()),
    "export": Verb(configs.ExportConfig, _in("pipeline.exports.command", "run"), loads=()),
    "info": Verb(configs.InfoConfig, _info, loads=("torch",)),
    "profile": Verb(configs.ProfileConfig, _profile, loads=("torch", "transformers")),
}


def _refuse(code: int, sentence: str) -> int:
    for bar in _bars():
        bar.close()
    where = "" if ranks.is_first() else f", rank {ranks.place()[0]}"
    # The terminal may be closed.
    with suppress(OSError):
        print(f"doge-fast{where}: {named.visible(sentence)}", file=sys.stderr)
    return code
