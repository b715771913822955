"""The files of a run and of a search, apart from weights.json: written, checked and compared.

config.json has the settings, metrics.jsonl has a line a step and is only appended to,
evaluation.json and fewshot.json what was measured; experiment.json is about several runs.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from statistics import fmean
from typing import Any, Literal, get_args

from doge_fast import atomic_file
from doge_fast.pipeline.baselines import BASELINES
from doge_fast.pipeline.config import Reading, StageConfig
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records.schema import (
    CANCELLATION,
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    EXPERIMENT,
    METRICS,
    RESTORE,
    STAGES,
    CancellationRecord,
    ConfigRecord,
    CorpusRecord,
    EvaluationRecord,
    ExperimentRecord,
    Json,
    MetricsLine,
    check_shape,
    load,
    parse_json,
)
from doge_fast.pipeline.sizes import SIZES
from doge_fast.pipeline.wording import first_few
from doge_fast.weights.weights_file import SCHEMA_VERSION, plain, write_json

# What does not change the numbers that a run computes.
_NOT_COMPARED = ("out", "corpus.cache_dir", "training.max_skipped_steps")
# Settings that name an input: a path, or one of these words, which are no paths.
_INPUTS: dict[str, Sequence[str]] = {
    "corpus.data": ("installed",),
    "corpus.tokenizer": ("train",),
    "model.model": tuple(SIZES),
    "model": tuple(SIZES),
    "weights": tuple(BASELINES),
    "proxy": (),
    "reference": (),
}
# Decides whether the verb runs, and nothing about the run.
_NOT_KEPT = ("dry_run",)

# Settings of a search that may change when it is continued. Of seeds, `check_experiment` sees to it
# that none is taken away.
_SEARCH_MAY_CHANGE = ("out", "plan", "only", "seeds", "device", "most_runs", "budget_tokens")

_REPORTED_PACKAGES = (
    *("doge-fast", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"),
)


def check_run(config: StageConfig) -> ConfigRecord | None:
    """config.json of `config.out`, if that is this very run, which is then resumed.

    It writes nothing, so it can be called before the corpus is packed. A setting that the record
    lacks counts as its default. None: the run is a new one.

    Raises:
        UserError: it is a file, holds files but no config.json, or holds another run.
    """
    out = config.out
    if out.exists() and not out.is_dir():
        raise UserError(f"A run needs a directory; {out} is a file. Name another one.")
    if not (out / CONFIG).exists():
        check_empty(out)
        return None
    recorded, before = load_config(out)
    if recorded.stage != config.stage:
        raise UserError(
            f"{out} holds a {recorded.stage} run; this is the {config.stage} stage. Name another "
            "directory."
        )
    check_same(out, kept(before), kept(config), _NOT_COMPARED)
    if recorded.architecture_sha256 != _architecture_sha256(config):
        raise UserError(
            f"{out} was begun with another model: the config.json of {config.model.model} has "
            "changed since. Restore it, or name another directory."
        )
    return recorded


def check_corpus(run: Path, recorded: CorpusRecord, corpus: CorpusRecord) -> None:
    """Raise UserError where a run, by the corpus in its config.json, was made of another one."""
    before, now = _flat(plain(recorded)), _flat(plain(corpus))
    for name in before | now:
        if before.get(name) != now.get(name):
            was, is_now = (str(each.get(name, "absent"))[:12] for each in (before, now))
            raise UserError(
                f"{run} was made of another corpus: {name} is {was} there and {is_now} now (a "
                "digest is of the text and its order). Restore the files of the corpus, or begin "
                "in another directory."
            )


def kept(config: Any) -> Json:
    """A verb's settings as a record keeps them; inputs that exist become real paths.

    So a run can be continued and measured from any folder.
    """
    fields = {name: value for name, value in plain(config).items() if name not in _NOT_KEPT}
    for name, words in _INPUTS.items():
        group, _, last = name.rpartition(".")
        # A search names its model itself, and no corpus.
        inside: Any = fields.get(group) if group else fields
        value = inside.get(last) if isinstance(inside, dict) else None
        if isinstance(value, str) and value not in words:
            inside[last] = os.path.realpath(value) if os.path.exists(value) else value
    return fields


def _architecture_sha256(config: StageConfig) -> str:
    """SHA-256 of a model folder's config.json; empty for a size and for a Hub id."""
    path = Path(config.model.model)
    file = path / CONFIG if path.is_dir() else path
    is_file = config.model.model not in SIZES and file.is_file()
    return _sha256(file.read_bytes()) if is_file else ""


def open_run(
    config: StageConfig,
    *,
    corpus: CorpusRecord,
    parameters: int = 0,
    resolved: Mapping[str, float] | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Make `config.out` the directory of a new run; `check_run` has found none there.

    Args:
        config: of the run.
        corpus: what it is made of.
        parameters: number of the model's parameters.
        resolved: {setting: the number that its default came to}; a resumed run takes it from here.
        warnings: what is odd about the corpus, for the report.
    """
    record = ConfigRecord(
        stage=config.stage,
        config=kept(config),
        corpus=corpus,
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        warnings=tuple(warnings),
        resolved=dict(resolved or {}),
        parameters=parameters,
        architecture_sha256=_architecture_sha256(config),
    )
    config.out.mkdir(parents=True, exist_ok=True)
    write_json(config.out / CONFIG, {"schema_version": SCHEMA_VERSION, **plain(record)})


def load_config(run: Path) -> tuple[ConfigRecord, Any]:
    """config.json of a run directory, and the configuration in it as its stage's class.

    Settings that the file lacks get their defaults; settings that no longer exist are dropped.

    Raises:
        UserError: it is absent or damaged.
    """
    record = load(run, ConfigRecord)
    return record, check_shape(record.config, STAGES[record.stage], f"{run / CONFIG}, config")


def check_same(out: Path, recorded: Json, given: Json, ignored: Sequence[str]) -> None:
    """Raise UserError where the configuration in `out` differs from the one given.

    `ignored` are dotted names of what may differ.
    """
    before, now = _flat(recorded), _flat(given)
    pairs = {name: (before.get(name, "absent"), now.get(name, "absent")) for name in before | now}
    differing = [name for name, pair in pairs.items() if name not in ignored and pair[0] != pair[1]]
    if differing:
        first, *others = differing
        was, is_now = pairs[first]
        also = f" (also {first_few(others, 3)})" if others else ""
        raise UserError(
            f"{out} holds another run: the configuration's {first} is {was!r} there and {is_now!r} "
            f"here{also}. Name another directory, or repeat the recorded run to resume it."
        )


def _flat(value: Any, prefix: str = "") -> Json:
    """{"a": {"b": 1}} -> {"a.b": 1}; a list is one value, an empty object too."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: Json = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def versions() -> dict[str, str]:
    """Version of Python and of every installed package that decides a run's numbers."""
    by_package = {"python": python_version()}
    for package in _REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


def check_empty(out: Path, missing: str = CONFIG) -> None:
    """Raise UserError where a new run's directory holds files of something else."""
    held = []
    for entry in sorted(out.iterdir()) if out.is_dir() else ():
        # Left by a run that was killed before its first file was complete.
        is_torn = entry.name.startswith((f".{CONFIG}.", f".{EXPERIMENT}."))
        hidden = (each.name.startswith(".") for each in entry.glob("*"))
        if not (is_torn or (entry.name == CHECKPOINTS and all(hidden))):
            held.append(entry.name)
    if held:
        raise UserError(
            f"A new run needs an empty directory; {out} holds {first_few(held, 3)}, and no "
            f"{missing}. Name another directory."
        )


def append_metrics(run: Path, line: Mapping[str, Any]) -> None:
    """Append a line {"step", "kind": "train" | "eval", ...} in one write.

    If the file ends within a line, which another program has cut, that line is removed first.

    Raises:
        OSError: the line is not written, or not all of it.
    """
    text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n"
    # Buffered: where the disk took a part of the line, writing the rest raises the system's error.
    with (run / METRICS).open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.truncate((run / METRICS).read_bytes().rfind(b"\n") + 1)
        file.write(text.encode())


def keep_metrics(run: Path) -> Json:
    """Have metrics.jsonl on the disk; its {"lines", "bytes", "sha256"}, as a checkpoint keeps them.

    `resume_metrics` takes them.
    """
    path = run / METRICS
    path.touch()
    atomic_file.sync(path)
    content = path.read_bytes()
    return {"lines": content.count(b"\n"), "bytes": len(content), "sha256": _sha256(content)}


def resume_metrics(run: Path, written: Any) -> None:
    """Cut metrics.jsonl back to a checkpoint, so the record equals the uninterrupted run's.

    Args:
        run: the run directory.
        written: what `keep_metrics` said at the checkpoint; None empties the file, for the run
            starts from the beginning.

    Raises:
        UserError: the file is not what it was; it is left as it is.
    """
    path = run / METRICS
    content = path.read_bytes() if path.exists() else b""
    kept = b""
    if written is not None:
        known = written if isinstance(written, dict) else {}
        size, lines = known.get("bytes"), known.get("lines")
        if not isinstance(size, int) or not isinstance(lines, int):
            raise UserError(f"its manifest does not say what {METRICS} held")
        kept = content[:size]
        if _sha256(kept) != known.get("sha256"):
            raise UserError(_difference(content, lines))
    # Lines after the checkpoint are removed, a torn last one too.
    if kept != content:
        atomic_file.write(path, kept)


def _difference(content: bytes, num_lines: int) -> str:
    """What is wrong with a file that held so many lines."""
    lines = content.splitlines(keepends=True)[:num_lines]
    for number, text in enumerate(lines, start=1):
        try:
            parse_json(text, METRICS)
        except FileFailure:
            return f"line {number} of {METRICS} is damaged"
    if len(lines) < num_lines:
        return f"{METRICS} holds {len(lines)} of the {num_lines} lines that it held then"
    return f"{METRICS} holds other lines than it held then"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_metrics(run: Path, *, kind: Literal["train", "eval"] | None = None) -> list[Json]:
    """The lines of metrics.jsonl in order, of one kind or all; a torn last line is left out.

    Raises:
        UserError: there is no such file, or a line before the last is not a metrics line.
    """
    return [line for line, _ in _lines_of(run) if kind in (None, line["kind"])]


def read_lines(run: Path) -> list[MetricsLine]:
    """As `read_metrics`, each line of its class."""
    return [shape for _, shape in _lines_of(run)]


def _lines_of(run: Path) -> list[tuple[Json, MetricsLine]]:
    path = run / METRICS
    if not path.exists():
        raise UserError(f"{path} does not exist: the run in {run} has not logged a step.")
    lines: list[tuple[Json, MetricsLine]] = []
    # A kill tore what follows the last line break.
    for n, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        where = f"{path}, line {n}"
        line = parse_json(text, f"{where},")
        lines.append((line, check_shape(line, MetricsLine, f"{where},")))
        first, _ = lines[0]
        for key in ("alpha", "alpha_mean"):
            if key in line and line[key].keys() != first.get(key, line[key]).keys():
                raise FileFailure(
                    f"{where}, is damaged: {key} is of {', '.join(line[key])}, and in line 1 of "
                    f"{', '.join(first[key])}. {RESTORE}"
                )
    return lines


def evaluation(
    *,
    step: int,
    blocks: Mapping[str, int],
    loss: Mapping[str, float],
    block_size: int,
    targets: Mapping[str, float] | None = None,
) -> Json:
    """What evaluation.json holds, from the held-out loss of every domain.

    perplexity_d        =  exp(loss_d)
    average_perplexity  =  exp(mean_d loss_d)      not the mean of the perplexities
    worst               =  max_d perplexity_d

    Both are over the training domains, or over the targets where nothing else was measured; these
    have their weights in the mean.

    Args:
        step: optimizer steps the model has made.
        blocks: held-out blocks measured, per domain.
        loss: mean loss per predicted token in nats, per domain.
        block_size: tokens in a block; the first of each is not predicted.
        targets: {domain that the run measures and does not train on: its weight in their mean}.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), caption of tab:universal_ppl.
    """
    assert loss.keys() == blocks.keys()
    perplexity = {name: exp_or_inf(value) for name, value in loss.items()}
    aims = {name: weight for name, weight in (targets or {}).items() if name in loss}
    averaged = dict.fromkeys((name for name in loss if name not in aims), 1.0) or aims
    return {
        "step": step,
        "blocks": dict(blocks),
        "loss": dict(loss),
        "perplexity": perplexity,
        "targets": aims,
        "average_perplexity": exp_or_inf(weighted_mean(loss, averaged)),
        "worst": max(perplexity[name] for name in averaged),
        "tokens": {name: count * (block_size - 1) for name, count in blocks.items()},
    }


def weighted_mean(loss: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """sum_d weight_d loss_d / sum_d weight_d."""
    return fmean([loss[name] for name in weights], [*weights.values()])


def exp_or_inf(value: float) -> float:
    """exp without OverflowError: a diverged model's perplexity is infinite."""
    return math.exp(value) if value < 709 else math.inf


def load_evaluation(run: Path) -> EvaluationRecord:
    """evaluation.json of a run directory; UserError where it is absent or damaged."""
    record = load(run, EvaluationRecord)
    if not record.loss.keys() == record.blocks.keys() == record.perplexity.keys():
        raise FileFailure(
            f"{run / EVALUATION} is damaged: loss, blocks and perplexity are not of the same "
            f"domains. {RESTORE}"
        )
    return record


def load_cancellation(run: Path) -> CancellationRecord:
    """cancellation.json of a run directory; UserError where it is absent or damaged."""
    record = load(run, CancellationRecord)
    if lost := [reading for reading in get_args(Reading) if reading not in record.scores]:
        raise FileFailure(
            f"{run / CANCELLATION} is damaged: it has no scores {', '.join(lost)}. {RESTORE}"
        )
    return record


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / EVALUATION).exists():
        return False
    corpus = load(run, ConfigRecord).corpus
    most = math.inf if blocks is None else blocks
    sizes = {**corpus.domains, **corpus.targets}
    wanted = {name: min(most, each.validation_blocks) for name, each in sizes.items()}
    return load_evaluation(run).blocks == wanted


def few_shot_record(
    *, step: int, tasks: Mapping[str, Mapping[str, Any]], setting: Mapping[str, Any]
) -> Json:
    """What fewshot.json holds: the scores of every task, what decides them, and their average.

    average acc         =  mean_t acc_t
    average acc_stderr  =  sqrt(sum_t acc_stderr_t^2) / T      tasks share no document
    """
    number = len(tasks)
    stderrs = [task["acc_stderr"] for task in tasks.values()]
    # Of a single document there is none.
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


def write_experiment(out: Path, record: ExperimentRecord) -> None:
    """Write experiment.json.

    Raises:
        UserError: as `check_experiment`.
    """
    check_experiment(out, record)
    out.mkdir(parents=True, exist_ok=True)
    made = {"schema_version": SCHEMA_VERSION, **plain(record), "versions": versions()}
    write_json(out / EXPERIMENT, made)


def check_experiment(out: Path, record: ExperimentRecord) -> None:
    """Raise UserError where a directory holds another search, or something else.

    Runs may be added to a search, by more seeds. Nothing else that decides them may change.
    """
    if not (out / EXPERIMENT).exists():
        check_empty(out, EXPERIMENT)
        return
    if all(entry.name == EXPERIMENT for entry in out.iterdir()):
        return
    known = load(out, ExperimentRecord)
    check_same(out, known.config, record.config, _SEARCH_MAY_CHANGE)
    if missing := [name for name in known.runs if name not in record.runs]:
        raise UserError(
            f"{out} holds a search with further runs, as {missing[0]}. Name another directory, or "
            "ask for its seeds too."
        )
