"""What a run leaves on disk, and what is believed when it is read back.

A run directory is complete enough to be reported without the code that made it:

    config.json      what was asked, of which corpus, with which versions
    metrics.jsonl    one object a line, {"step", "kind": "train" | "eval", ...}; only appended to
    weights.json     the domain weights, keyed by name (learned, or what a base run used)
    evaluation.json  loss and perplexity per domain on held-out blocks
    fewshot.json     k-shot accuracies of lm-eval's tasks, with standard errors and chance

Whole files are written beside and renamed; a line is one write. So a run killed at any
moment leaves complete files and at most one torn line, which the next run drops. JSON has
no word for NaN and infinity: in metrics they become null, in weights they are an error.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, Literal, get_args

from doge_fast import weights_file
from doge_fast.pipeline.weights_fields import SUM_TOLERANCE, check_fields, is_weight
from doge_fast.weights_file import SCHEMA_VERSION, plain, write_json

CONFIG = "config.json"
METRICS = "metrics.jsonl"
WEIGHTS = "weights.json"
EVALUATION = "evaluation.json"
EXPERIMENT = "experiment.json"
FEWSHOT = "fewshot.json"
_WAY_TO_WEIGHTS = (
    ' A file needs {"schema_version": 1, "domains": [{"name": "web", "weight": 1.0}]} at least; '
    'of {"web": 1.0} doge-fast export FILE --from json --out weights.json makes one.'
)
# What a run directory keeps of its run.
_OWN = (CONFIG, METRICS, WEIGHTS, EVALUATION, FEWSHOT)

Stage = Literal["proxy", "base", "doremi", "select"]
Json = dict[str, Any]

# The running average has converged where its last fifth changed it little.
DRIFT_FROM = 0.8

# What is asked of a select run's scores, once they are there.
_READ_OFF = ("strategies", "reading")
# Where a run lies, where its blocks are cached and who is told do not change what it computes.
_NOT_COMPARED = ("out", "corpus.cache_dir", "training.report_to", *_READ_OFF)

_REPORTED_PACKAGES = (
    "doge-fast",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """Version of Python and of every installed package that decides a run's numbers."""
    found = {"python": python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_json(path: Path) -> Json:
    """The object that the file holds.

    Raises:
        ValueError: there is no such file, it is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must hold JSON and does not: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(value).__name__}.")
    return value


def _check_schema(record: Json, path: Path, *, way_out: str = "") -> None:
    """A record of another schema is refused before any of it is believed."""
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"{path} must say which schema it follows, as an integer schema_version; "
            f"it says {version!r}.{way_out}"
        )
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} follows schema {version}; this version of doge_fast reads up to "
            f"{SCHEMA_VERSION}. Upgrade doge_fast to read it."
        )


def check_run(out: Path, *, stage: Stage, config: Any) -> bool:
    """Whether `out` already holds this very run, so that it can be resumed.

    Writes nothing, so it can be asked before the corpus is packed. Where `out` lies and
    where blocks are cached is not compared; a setting that did not exist when the run was made
    counts as its default.

    Args:
        out: the run directory; need not exist.
        stage: which stage wants it.
        config: the stage's dataclass, or what `plain` makes of it.

    Raises:
        ValueError: `out` is a file, holds files but no config.json, or holds another run.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"A run needs a directory; {out} is a file. Name another one.")
    if not (out / CONFIG).exists():
        _check_empty(out)
        return False
    recorded = read_config(out)
    if recorded["stage"] != stage:
        raise ValueError(
            f"{out} holds a {recorded['stage']} run; this is the {stage} stage. "
            "Name another directory."
        )
    before = _with_defaults(recorded["config"], config)
    _check_same("configuration", out, before, plain(config), _NOT_COMPARED)
    return True


def _with_defaults(recorded: Json, config: Any) -> Json:
    """What was recorded; a setting that it lacks came later, and counts as its default.

    Otherwise no run could be resumed or found complete once the stage has a new setting.
    """
    if not dataclasses.is_dataclass(config):
        return recorded
    filled = dict(recorded)
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value) and isinstance(filled.get(name), dict):
            filled[name] = _with_defaults(filled[name], value)
        elif name not in filled and field.default is not dataclasses.MISSING:
            filled[name] = plain(field.default)
    return filled


def open_run(
    out: Path,
    *,
    stage: Stage,
    config: Any,
    corpus: Mapping[str, Any],
    initial: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> bool:
    """Make `out` the directory of this run, or find that it already is.

    Args:
        out: the run directory; made where absent.
        stage: "proxy", "base", "doremi" or "select".
        config: the stage's dataclass.
        corpus: {"domains": {name: {"train_tokens", "train_blocks", "validation_blocks",
            "documents"}}, "targets": likewise, "tokenizer_sha256", "block_size",
            "vocab_size"}.
        initial: where the run begins with what was read elsewhere: recorded once, so that
            resuming it asks nothing of what became of that place.
        resolved: settings whose default was taken, as numbers: likewise, whatever becomes of the
            default.
        warnings: what to know of the corpus before believing a number: kept for the report.

    Returns:
        True where the directory held this very run already: resume it.

    Raises:
        ValueError: it holds another run: another stage, configuration or corpus.
    """
    if check_run(out, stage=stage, config=config):
        _check_same("corpus", out, read_config(out)["corpus"], plain(corpus), ())
        return True
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": SCHEMA_VERSION,
        "stage": stage,
        "config": config,
        "corpus": corpus,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if initial is not None:
        record["initial"] = initial
    if resolved:
        record["resolved"] = resolved
    if warnings:
        record["warnings"] = warnings
    write_json(out / CONFIG, record)
    return False


def read_config(run: Path) -> Json:
    """config.json of a run directory.

    Raises:
        ValueError: it is absent, not JSON, of a future schema, or lacks a part.
    """
    if not (run / CONFIG).exists():
        raise ValueError(f"{run} is not a run directory: it holds no {CONFIG}.")
    record = read_json(run / CONFIG)
    _check_schema(record, run / CONFIG)
    _check_keys(record, ("stage", "config", "corpus"), run / CONFIG)
    if record["stage"] not in get_args(Stage):
        raise ValueError(
            f"{run / CONFIG} must name a stage, one of {', '.join(get_args(Stage))}; it says "
            f"{record['stage']!r}."
        )
    return record


def _check_keys(record: Json, keys: Iterable[str], path: Path) -> None:
    """Every key that a reader will ask for is there."""
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"{path} must hold {', '.join(keys)}; it lacks {', '.join(missing)}.")


def _check_empty(out: Path) -> None:
    """A directory with somebody else's files is not made a run."""
    if not out.is_dir():
        return
    # What a run leaves that was killed while it wrote its very first file.
    torn = (f".{CONFIG}.", f".{EXPERIMENT}.")
    held = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(torn))
    if held:
        raise ValueError(
            f"A new run needs an empty directory; {out} holds {', '.join(held[:3])}"
            f"{', ...' if len(held) > 3 else ''} and no {CONFIG}. Name another directory."
        )


def _check_same(what: str, out: Path, recorded: Json, asked: Json, ignored: Sequence[str]) -> None:
    """The recorded object equals the one asked for, outside `ignored` dotted names."""
    before, now = _flat(recorded), _flat(asked)
    names = [
        name
        for name in dict.fromkeys((*before, *now))
        if name not in ignored and not _is_same(before.get(name, "absent"), now.get(name, "absent"))
    ]
    if not names:
        return
    first = names[0]
    others = f" (also {', '.join(names[1:4])}{', ...' if len(names) > 4 else ''})"
    raise ValueError(
        f"{out} holds another run: the {what}'s {first} is {before.get(first, 'absent')!r} there "
        f"and {now.get(first, 'absent')!r} here{others if len(names) > 1 else ''}. Name another "
        "directory, or repeat the recorded run to resume it."
    )


def _is_same(recorded: Any, asked: Any) -> bool:
    """Equal, or one path said in two ways; a word without a slash, as `uniform`, is no path."""
    if (
        isinstance(recorded, str)
        and isinstance(asked, str)
        and os.sep in recorded
        and os.sep in asked
    ):
        recorded, asked = os.path.abspath(recorded), os.path.abspath(asked)
    return bool(recorded == asked)


def _flat(value: Any, prefix: str = "") -> Json:
    """{"a": {"b": 1}} -> {"a.b": 1}; a list is one value, an empty object too."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: Json = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def append_metrics(run: Path, line: Mapping[str, Any]) -> None:
    """Append one line to metrics.jsonl, in one write.

    Args:
        run: the run directory.
        line: {"step": int, "kind": "train" | "eval", ...}; see `plain`.

    Raises:
        ValueError: `step` or `kind` is missing or is something else.
    """
    record = plain(line)
    _check_line(record, "A line of metrics.jsonl")
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(run / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    with open(descriptor, "wb", buffering=0) as file:
        file.write(text.encode())


def resume_metrics(run: Path, *, step: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, so the record equals the uninterrupted run's.

    A torn last line is dropped, and so is every line past `step`. A negative `step`
    empties the file: the run starts from the beginning.

    Raises:
        ValueError: a line before the last is not a metrics line.
    """
    path = run / METRICS
    if not path.exists():
        return
    lines = [line for line in _parse_metrics(path) if line["step"] <= step]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    beside = path.with_name(f".{METRICS}.cut")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def read_metrics(run: Path, *, kind: Literal["train", "eval"] | None = None) -> list[Json]:
    """The lines of metrics.jsonl in order, of one kind or all; a torn last line is left out.

    Raises:
        ValueError: there is no such file, or a line before the last is not a metrics line.
    """
    path = run / METRICS
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run in {run} has not logged a step.")
    return [line for line in _parse_metrics(path) if kind in (None, line["kind"])]


def average_between(first: Json, last: Json) -> dict[str, float]:
    """Mean of the domain weights over the steps after one line of metrics.jsonl, up to another.

    mean over (a, t]  =  (t mean_t - a mean_a) / (t - a)

    Args:
        first: a line with `alpha_mean`, whose step a and all before are left out; of step 0: none.
        last: a later one, of step t; if it is the same, the mean up to it.

    Returns:
        {domain: weight}, summing to one; what is not finite is NaN.
    """
    until, start = last["step"], first["step"]
    # What is not finite is recorded as null.
    ends = {name: math.nan if v is None else v for name, v in last["alpha_mean"].items()}
    if start in (0, until):
        return ends
    begins = {name: math.nan if v is None else v for name, v in first["alpha_mean"].items()}
    sums = {name: max(0.0, until * mean - start * begins[name]) for name, mean in ends.items()}
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()}


def lines_of_average(lines: Sequence[Json], average_from: float) -> tuple[Json, Json]:
    """Between which lines the average is taken, and where its last fifth begins.

    Args:
        lines: those of metrics.jsonl with `alpha_mean`, from step 0 on.
        average_from: share of the steps so far that the average leaves out.

    Returns:
        (the last line that is left out, the last one before the last fifth of what is not).
    """
    until = lines[-1]["step"]
    first = [line for line in lines if line["step"] <= average_from * until][-1]
    fifth = first["step"] + DRIFT_FROM * (until - first["step"])
    return first, [line for line in lines if line["step"] <= fifth][-1]


def drift(run: Path, average: Mapping[str, float], *, average_from: float = 0.0) -> float:
    """How far the average domain weights moved in the last fifth of the steps that they average.

    drift  =  sum_j | alpha_bar_j(T) - alpha_bar_j(a + 0.8 (T - a)) |

    Args:
        run: the run directory, of a run at its last step T; of its lines of metrics.jsonl the last
            at or before a step counts.
        average: {domain: alpha_bar_j(T)}.
        average_from: share of the steps that the average leaves out, a / T.
    """
    first, before = lines_of_average(read_metrics(run, kind="train"), average_from)
    known = average_between(first, before)
    return sum(abs(weight - known[name]) for name, weight in average.items())


def _parse_metrics(path: Path) -> list[Json]:
    """Every complete line; what follows the last line break was torn by a kill."""
    complete = path.read_bytes().split(b"\n")[:-1]
    return [_parse_line(text, f"{path}, line {n}") for n, text in enumerate(complete, start=1)]


def _parse_line(text: bytes, where: str) -> Json:
    try:
        line = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}, must hold a JSON object and does not: {error}. The file was changed by "
            "something other than a run; restore it, or start the run anew elsewhere."
        ) from None
    _check_line(line, where)
    return dict(line)


def _check_line(line: Any, where: str) -> None:
    is_object = isinstance(line, dict)
    step = line.get("step") if is_object else None
    kind = line.get("kind") if is_object else None
    if not isinstance(step, int) or isinstance(step, bool) or kind not in ("train", "eval"):
        raise ValueError(
            f'{where} needs an integer "step" and a "kind" of "train" or "eval"; '
            f"it has step {step!r} and kind {kind!r}."
        )


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write weights.json, after the checks that `read_weights` makes.

    Args:
        path: the file, or the run directory it goes to.
        weights: {"method", "domains": [{"name", "weight", ...}], ...}; `schema_version` is
            added where absent.

    Raises:
        ValueError: as `read_weights`; nothing is written.
    """
    file = path / WEIGHTS if path.is_dir() else path
    _check_weights({"schema_version": SCHEMA_VERSION, **weights}, file)
    weights_file.write(file, weights)


def check_out(out: Path, read: Iterable[Path]) -> None:
    """Refuse to write over what is read, or over what a run keeps of itself.

    Args:
        out: the file that is to be written.
        read: files, and run directories whose weights.json is read.

    Raises:
        ValueError: it is one of them.
    """
    sources = {(path / WEIGHTS if path.is_dir() else path).resolve() for path in read}
    is_source = out.resolve() in sources
    is_record = out.name in _OWN and (out.parent / CONFIG).exists()
    if is_source or is_record:
        raise ValueError(
            f"out must be a file of its own; {out} is "
            f"{'what is read here' if is_source else 'in a run directory, and a record of it'}. "
            "Name another."
        )


def read_weights(path: Path, *, domains: Sequence[str] | None = None) -> Json:
    """weights.json, checked.

    Args:
        path: the file, or a run directory that holds one.
        domains: where given, exactly these domains must have a weight, in any order.

    Returns:
        The record, with all its fields, known or not; its "domains" are put in the order of
        `domains` where that is given.

    Raises:
        ValueError: the file is absent or not JSON; its schema is unknown; a domain has no
            name, occurs twice or has a weight that is not a finite number >= 0; the weights
            do not sum to 1 (within 1e-5); another known field is not what it should be (see
            `weights_fields`; null is not known); the domains are not `domains`.
    """
    file = path / WEIGHTS if path.is_dir() else path
    record = read_json(file)
    _check_weights(record, file)
    if domains is None:
        return record
    by_name = {entry["name"]: entry for entry in record["domains"]}
    _check_domains(by_name, domains, file)
    return record | {"domains": [by_name[name] for name in domains]}


def weights_by_name(record: Mapping[str, Any]) -> dict[str, float]:
    """{name: weight} of a record that `read_weights` returned, in its order."""
    return {entry["name"]: float(entry["weight"]) for entry in record["domains"]}


def _check_weights(record: Json, path: Path) -> None:
    _check_schema(record, path, way_out=_WAY_TO_WEIGHTS)
    entries = record.get("domains")
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f'{path} must hold "domains", a list of {{"name", "weight"}}; it holds {entries!r}.'
        )
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{path}: every entry of domains needs a name; the names are {names}.")
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: a domain has one weight; {', '.join(twice)} occurs twice.")
    for entry in entries:
        _check_weight(entry, path)
    total = math.fsum(entry["weight"] for entry in entries)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"{path}: domain weights must sum to 1; these sum to {total:.6g}. "
            "Divide each by the sum."
        )
    check_fields(record, str(path))


def _check_weight(entry: Mapping[str, Any], path: Path) -> None:
    weight = entry.get("weight")
    if not is_weight(weight):
        raise ValueError(
            f"{path}: a domain weight must be a finite number >= 0; that of {entry['name']} is "
            f"{weight!r}. The run that wrote it has diverged, or the file was edited."
        )


def _check_domains(found: Iterable[str], domains: Sequence[str], path: Path) -> None:
    missing = [name for name in domains if name not in found]
    extra = [name for name in found if name not in domains]
    if missing or extra:
        parts = [f"no weight for {', '.join(missing)}"] if missing else []
        parts += [f"weights for {', '.join(extra)}, which are not trained on"] if extra else []
        raise ValueError(
            f"{path} must weigh exactly the domains of this corpus ({', '.join(domains)}); it has "
            f"{' and '.join(parts)}. Train on the domains of the file, or name another file."
        )


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

    Raises:
        ValueError: the domains of `blocks` and `loss` differ, or there are none.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), caption of tab:universal_ppl.
    """
    if not loss or set(loss) != set(blocks):
        raise ValueError(
            f"An evaluation needs blocks and loss of the same domains; it has blocks of "
            f"{sorted(blocks)} and loss of {sorted(loss)}."
        )
    perplexity = {name: _exp(value) for name, value in loss.items()}
    return {
        "step": step,
        "blocks": dict(blocks),
        "loss": dict(loss),
        "perplexity": perplexity,
        "average_perplexity": _exp(math.fsum(loss.values()) / len(loss)),
        "worst": max(perplexity.values()),
        "tokens": {name: count * (block_size - 1) for name, count in blocks.items()},
    }


def _exp(value: float) -> float:
    """exp without OverflowError: a diverged model's perplexity is infinite."""
    return math.exp(value) if value < 709 else math.inf


def write_evaluation(run: Path, record: Mapping[str, Any]) -> None:
    """Write evaluation.json (see `evaluation`) into the run directory."""
    _check_keys(dict(record), _EVALUATION_KEYS, run / EVALUATION)
    write_json(run / EVALUATION, record)


def read_evaluation(run: Path) -> Json:
    """evaluation.json of a run directory.

    Raises:
        ValueError: it is absent, not JSON, or lacks a part.
    """
    if not (run / EVALUATION).exists():
        raise ValueError(f"{run} holds no {EVALUATION}: run doge-fast evaluate on it.")
    record = read_json(run / EVALUATION)
    _check_keys(record, _EVALUATION_KEYS, run / EVALUATION)
    return record


_EVALUATION_KEYS = (
    "step",
    "blocks",
    "loss",
    "perplexity",
    "average_perplexity",
    "worst",
    "tokens",
)


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
            were longer than the model (`truncated_answers`).
        setting: `shots`, `fewshot_seed`, the model's `positions`, and what else decides the scores.

    Raises:
        ValueError: there is no task.
    """
    if not tasks:
        raise ValueError("A few-shot record needs at least one task; it has none.")
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


def write_few_shot(run: Path, record: Mapping[str, Any]) -> None:
    """Write fewshot.json (see `few_shot`) into the run directory."""
    _check_keys(dict(record), _FEWSHOT_KEYS, run / FEWSHOT)
    write_json(run / FEWSHOT, record)


def read_few_shot(run: Path) -> Json:
    """fewshot.json of a run directory.

    Raises:
        ValueError: it is absent, not JSON, of a future schema, or lacks a part.
    """
    if not (run / FEWSHOT).exists():
        raise ValueError(f"{run} holds no {FEWSHOT}: run doge-fast evaluate --tasks on it.")
    record = read_json(run / FEWSHOT)
    _check_schema(record, run / FEWSHOT)
    _check_keys(record, _FEWSHOT_KEYS, run / FEWSHOT)
    return record


_FEWSHOT_KEYS = ("step", "shots", "fewshot_seed", "positions", "tasks", "average")


def write_experiment(out: Path, record: Mapping[str, Any]) -> None:
    """Write experiment.json into the directory of an experiment, made where absent.

    Args:
        out: the directory.
        record: name, preset, title, question, settings, data, runs (names, in the order in which
            they are made), groups (the runs behind each table) and versions.

    Raises:
        ValueError: the directory holds another experiment, or something else.
    """
    record = dict(plain({"schema_version": SCHEMA_VERSION, **record}))
    _check_keys(record, _EXPERIMENT_KEYS, out / EXPERIMENT)
    if not (out / EXPERIMENT).exists():
        _check_empty(out)
        out.mkdir(parents=True, exist_ok=True)
    elif any(entry.name != EXPERIMENT for entry in out.iterdir()):
        _check_same_experiment(read_experiment(out), record, out)
    write_json(out / EXPERIMENT, record)


def _check_same_experiment(known: Json, asked: Json, out: Path) -> None:
    """Runs may be added to an experiment, by more seeds; nothing else may change."""
    for key in _EXPERIMENT_KEYS:
        was, now = known[key], asked[key]
        if key in ("versions", "groups"):
            # Groups follow from the rest.
            continue
        if key == "settings":
            was, now = ({**each, "seeds": None} for each in (was, now))
        is_same = set(was) <= set(now) if key == "runs" else was == now
        if not is_same:
            raise ValueError(
                f"{out} holds the experiment {known['name']} with "
                f"{'other' if key.endswith('s') else 'another'} {key}. Name another directory with "
                "out, or repeat the command that began it; seeds may be added."
            )


def read_experiment(path: Path) -> Json:
    """experiment.json of an experiment's directory.

    Raises:
        ValueError: it is absent, not JSON, of another schema, or lacks a part.
    """
    if not (path / EXPERIMENT).exists():
        raise ValueError(f"{path} holds no {EXPERIMENT}: doge-fast experiment has not run there.")
    record = read_json(path / EXPERIMENT)
    _check_schema(record, path / EXPERIMENT)
    _check_keys(record, _EXPERIMENT_KEYS, path / EXPERIMENT)
    return record


_EXPERIMENT_KEYS = (
    "name",
    "preset",
    "title",
    "question",
    "settings",
    "data",
    "runs",
    "groups",
    "versions",
)
