"""A run directory, read from its records, and the settings that runs of one arm share."""

import json
import math
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.config import MIX, ModelConfig, TrainingConfig
from doge_fast.pipeline.config.ranges import Count
from doge_fast.pipeline.config.stages import target_of
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.wording import listed

# Stages that learn weights.
LEARNING = ("proxy", "doremi")
# Settings in which two runs of one arm may differ; `study` compares the weights of arms.
_MAY_DIFFER_IN_TRAINING = ("seed", "eval_every", "eval_blocks", "save_every", "device", "compile")
# The corpus as it was read is compared, with its targets, typed or followed from the weights.
_MAY_DIFFER = ("out", "corpus", "targets", "weights", "log_every", "training")


@dataclass(frozen=True)
class ReportedConfig:
    """The settings that a report reads, for runs of any stage.

    The stages' own classes would refuse old records with options that no longer exist.
    """

    model: ModelConfig
    training: TrainingConfig
    target: tuple[str, ...] = ("universal",)
    mu: float | None = None
    score: str = "paper"
    domain_max_grad_norm: float | None = None
    sequences_per_domain: Count | None = None
    batch_size: Count | None = None
    weights: str = ""
    reference: str = ""


@dataclass(frozen=True)
class RecordedRun:
    """One run directory, read from its records."""

    path: Path
    record: records.ConfigRecord
    config: ReportedConfig
    lines: Sequence[records.MetricsLine]
    weights: Json | None
    evaluation: records.EvaluationRecord | None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def stem(self) -> str:
        """The name without the seed: ca-seed0 -> ca."""
        return self.name.removesuffix(f"-seed{self.config.training.seed}")

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return tuple(self.record.corpus.domains)

    @property
    def targets(self) -> tuple[str, ...]:
        """Domains that are measured and never trained on."""
        return tuple(self.record.corpus.targets)

    @property
    def target_names(self) -> set[str]:
        """Names of its targets, including `universal` and `mix`."""
        return {target_of(item)[0] for item in self.config.target}

    @property
    def train(self) -> list[records.MetricsLine]:
        """The logged training steps."""
        return [line for line in self.lines if line.kind == "train"]

    @property
    def last_step(self) -> int:
        """The last step in the records."""
        return max((line.step for line in self.lines), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether training has ended and, in a stage that learns weights, they are written."""
        is_lacking = self.record.stage in LEARNING and self.weights is None
        has_model = (self.path / records.MODEL).is_dir()
        return (self.has_all_lines or has_model) and not is_lacking

    @property
    def has_all_lines(self) -> bool:
        """Whether metrics.jsonl has the last step; another program may have cut it."""
        return self.last_step >= self.config.training.steps

    @property
    def num_rows(self) -> int:
        """Gradients that a step of a proxy has: of each domain, each target and the mixture."""
        return len(self.domains) + len(self.targets) + (MIX in self.target_names)

    @property
    def tokens(self) -> int:
        """Tokens that the whole run sees; a proxy's are of its targets too."""
        per_step = self.config.batch_size
        if per_step is None:
            per_step = (self.config.sequences_per_domain or 0) * self.num_rows
        return self.config.training.steps * per_step * self.record.corpus.block_size

    @property
    def seconds_per_step(self) -> float:
        """Median over the logged steps; nan where none was logged."""
        seconds = [line.seconds for line in self.train if line.seconds is not None]
        return float(np.median(seconds)) if seconds else math.nan

    @property
    def blocks(self) -> dict[str, int]:
        """{domain: number of held-out blocks} for `losses`; empty if the run was not measured."""
        if self.evaluation is not None:
            return self.evaluation.blocks
        most, corpus = self.config.training.eval_blocks, self.record.corpus
        sizes = {**corpus.domains, **corpus.targets}
        return {name: min(most, sizes[name].validation_blocks) for name in self.losses() or {}}

    def settings(self) -> str:
        """Everything that two runs of one arm share, as a key."""
        config = self.record.config | self.record.resolved
        free = {key: value for key, value in config.items() if key not in _MAY_DIFFER}
        if free.get("selection"):
            # Each seed may have a selection from a run of its own.
            free["selection"] = Path(free["selection"]).name
        if self.weights is not None and (reference := self.weights.get("reference")):
            # Each seed may have a reference of its own, if all were trained alike.
            keys = ("model", "parameters", "steps", "tokens")
            free["reference"] = [reference.get(key) for key in keys]
        settings = config["training"].items()
        training = {key: value for key, value in settings if key not in _MAY_DIFFER_IN_TRAINING}
        corpus = records.plain(self.record.corpus)
        return json.dumps((self.record.stage, free, training, corpus), sort_keys=True)

    def losses(self) -> dict[str, float] | None:
        """Held-out loss per domain at the end; None where it was not measured."""
        if self.evaluation is not None:
            return self.evaluation.loss
        steps = self.config.training.steps
        for line in reversed(self.lines):
            if line.kind == "eval" and line.step == steps and isinstance(line.loss, dict):
                return line.loss
        return None


def open_runs(runs: Sequence[Path]) -> list[RecordedRun]:
    """The runs in `runs`, run directories or directories of runs; each run once, in order."""
    if not runs:
        raise UserError("A report needs at least one run directory; none was named.")
    paths = (path.resolve() for named in runs for path in _run_directories(Path(named)))
    return [_read_run(path) for path in dict.fromkeys(paths)]


def _run_directories(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"A run is a directory; {path} {what}. Name directories that hold runs.")
    if (path / records.CONFIG).exists():
        return [path]
    runs = []
    for folder in sorted(filter(Path.is_dir, path.iterdir())):
        # Raises for an unreadable folder: a report must not leave it out silently.
        names = os.listdir(folder)
        # A model has a config.json too, without a stage.
        is_run = records.CONFIG in names and "stage" in records.read_json(folder / records.CONFIG)
        if is_run or records.METRICS in names:
            runs.append(folder)
    if not runs:
        raise UserError(
            f"{path} is not a run directory and holds none: neither it nor a folder in it has a "
            f"{records.CONFIG} that a proxy or base run wrote."
        )
    return runs


def _read_run(path: Path) -> RecordedRun:
    record = records.load(path, records.ConfigRecord)
    # `resolved` has the values of defaults.
    config = record.config | record.resolved
    # Broken links are listed too; reading one raises an error that names it.
    files = os.listdir(path)
    run = RecordedRun(
        path=path,
        record=record,
        config=records.check_shape(config, ReportedConfig, f"{path / records.CONFIG}, config"),
        lines=records.read_lines(path) if records.METRICS in files else [],
        weights=records.read_weights(path) if records.WEIGHTS in files else None,
        evaluation=records.load_evaluation(path) if records.EVALUATION in files else None,
    )
    for file, names in _odd_names(run):
        if names:
            raise FileFailure(
                f"{path / file} is not of the run that {records.CONFIG} is of: "
                f"{listed(sorted(names))}. {records.RESTORE}"
            )
    return run


def _odd_names(run: RecordedRun) -> Iterator[tuple[str, Set[str]]]:
    """(record, domains in which it differs from config.json)."""
    domains = set(run.domains)
    if run.weights is not None:
        yield records.WEIGHTS, records.weights_by_name(run.weights).keys() ^ domains
    if run.evaluation is not None:
        yield records.EVALUATION, run.evaluation.loss.keys() - domains - set(run.targets)
    for n, line in enumerate(run.lines, start=1):
        where = f"{records.METRICS}, line {n}"
        if line.alpha or line.alpha_mean:
            yield where, (line.alpha.keys() ^ domains) | (line.alpha_mean.keys() ^ domains)
        elif line.kind == "eval" and not isinstance(line.loss, dict):
            yield where, {"no loss by domain"}
