"""A run directory as its records tell it, and what two runs of one arm have in common."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from doge_fast.pipeline import records
from doge_fast.pipeline.failures import FileFailure, reading
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.wording import listed, to_float, to_floats

# Do not change what a run computes, or are what arms and seeds are allowed to differ in.
_FREE_TRAINING = ("seed", "eval_every", "eval_blocks", "save_every", "device", "compile")
_FREE = ("out", "corpus", "weights", "log_every", "training")
# What moved the weights in a step, and what a line says beside it.
_BESIDE = {
    "gain": ("alpha", "alpha_mean", "cosine", "difficulty", "influence", "rows"),
    "excess": ("alpha", "alpha_mean"),
}


@dataclass(frozen=True)
class Run:
    """One run directory, as its records tell it."""

    path: Path
    record: Json
    """config.json."""
    config: Json
    """What the stage was asked, and what its defaults came to."""
    corpus: Json
    train: Sequence[Json]
    evals: Sequence[Json]
    weights: Json | None
    evaluation: Json | None
    few_shot: Json | None

    @property
    def name(self) -> str:
        """The directory's."""
        return self.path.name

    @property
    def stage(self) -> str:
        """Which made it."""
        return str(self.record["stage"])

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return tuple(self.corpus["domains"])

    @property
    def targets(self) -> tuple[str, ...]:
        """Domains that are measured and never trained on."""
        return tuple(self.corpus["targets"])

    @property
    def seed(self) -> int:
        """Of initialisation and data order."""
        return int(self.config["training"]["seed"])

    @property
    def model(self) -> str:
        """Size, or name, of the model that it trains."""
        return str(self.config["model"]["model"])

    @property
    def steps(self) -> int:
        """Optimizer steps that were asked for."""
        return int(self.config["training"]["steps"])

    @property
    def last_step(self) -> int:
        """The last step that the records know of."""
        return max((line["step"] for line in (*self.train, *self.evals)), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether it came to its end, and left the weights that it learned."""
        learns = self.stage in ("proxy", "doremi")
        return self.last_step >= self.steps and not (learns and self.weights is None)

    @property
    def is_lost(self) -> bool:
        """Whether it ended before its end because it computed no numbers any more."""
        last: Json = self.train[-1] if self.train else {}
        return not self.is_complete and bool(last.get("skipped") or last.get("loss", 0) is None)

    @property
    def tokens(self) -> int:
        """Tokens of training domains that the whole run sees."""
        per_step = self.config.get("batch_size")
        if per_step is None:
            per_step = self.config["sequences_per_domain"] * len(self.domains)
        return self.steps * int(per_step) * int(self.corpus["block_size"])

    @property
    def train_tokens(self) -> dict[str, int]:
        """Tokens of each training domain that the corpus holds."""
        return {name: entry["train_tokens"] for name, entry in self.corpus["domains"].items()}

    @property
    def seconds_per_step(self) -> float:
        """Median over the logged steps; nan where none was logged."""
        seconds = [to_float(line["seconds"]) for line in self.train if "seconds" in line]
        return float(np.median(seconds)) if seconds else math.nan

    @property
    def tokens_seen(self) -> int:
        """Tokens that the run trains on or measures a gradient of, targets and mix included."""
        if self.stage != "proxy":
            return self.tokens
        rows = len(self.domains) + len(self.targets) + ("mix" in self.config["target"])
        return self.tokens * rows // len(self.domains)

    @property
    def num_parameters(self) -> int:
        """Of the model that the run left; a tied weight counts once. 0 where it left none."""
        # Of one that is kept without its model.
        if self.record.get("parameters") is not None:
            return int(self.record["parameters"])
        total = 0
        for file in sorted((self.path / "model").glob("*.safetensors")):
            with (
                reading(file, "Train the model again, or take model/ away."),
                safe_open(file, framework="np") as tensors,
            ):
                # Not a dictionary: it is no iterable itself.
                names = list(tensors.keys())
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
        return total

    @property
    def skipped(self) -> int:
        """Logged steps that a non-finite gradient skipped."""
        return sum(bool(line.get("skipped")) for line in self.train)

    def settings(self) -> str:
        """Everything that two runs of one arm share, as a key."""
        free = {key: value for key, value in self.config.items() if key not in _FREE}
        if self.weights is not None and "reference" in self.weights:
            # Each seed may have a reference of its own, if all were trained alike.
            told = self.weights["reference"]
            free["reference"] = [told[key] for key in ("model", "parameters", "steps", "tokens")]
        settings = self.config["training"].items()
        training = {key: value for key, value in settings if key not in _FREE_TRAINING}
        return json.dumps((self.stage, free, training, self.corpus), sort_keys=True)

    def losses(self, until: float = 1.0) -> dict[str, float] | None:
        """Held-out loss per domain at the end, or as measured last before a share of the steps.

        None where it was not measured.
        """
        if until == 1 and self.evaluation is not None:
            return to_floats(self.evaluation["loss"])
        lines = [line for line in self.evals if line["step"] <= until * self.steps]
        is_known = lines and (until < 1 or lines[-1]["step"] == self.steps)
        return to_floats(lines[-1]["loss"]) if is_known else None

    def measured_blocks(self) -> dict[str, int]:
        """Held-out blocks per domain behind `losses`."""
        if self.evaluation is not None:
            return dict(self.evaluation["blocks"])
        most = self.config["training"]["eval_blocks"]
        entries = {**self.corpus["domains"], **self.corpus["targets"]}
        return {name: min(most, entry["validation_blocks"]) for name, entry in entries.items()}


def open_runs(runs: Sequence[Path]) -> list[Run]:
    """Every run that `runs` names or holds, once, in order."""
    if not runs:
        raise ValueError("A report needs at least one run directory; none was named.")
    paths: dict[Path, Path] = {}
    for named in runs:
        for path in _run_directories(Path(named)):
            paths.setdefault(path.resolve(), path)
    return [_read_run(path) for path in paths.values()]


def _run_directories(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"A run is a directory; {path} {what}. Name directories that hold runs.")
    if (path / records.CONFIG).exists():
        return [path]
    found = sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_run(folder))
    if not found:
        raise ValueError(
            f"{path} is not a run directory and holds none: neither it nor a folder in it has a "
            f"{records.CONFIG} that a proxy or base run wrote."
        )
    return found


def _is_run(folder: Path) -> bool:
    """Whether a run wrote in it; of models, which have a config.json too, none names a stage."""
    # Raises where nobody may look: what is left out of a report must not go without a word.
    names = os.listdir(folder)
    if records.METRICS in names:
        return True
    return records.CONFIG in names and "stage" in records.read_json(folder / records.CONFIG)


def _read_run(path: Path) -> Run:
    record = records.read_config(path)

    def optional(file: str, read: Callable[[Path], Any]) -> Any:
        # A link to nothing is something that is lost.
        return read(path) if os.path.lexists(path / file) else None

    lines = optional(records.METRICS, records.read_metrics) or []

    weights = optional(records.WEIGHTS, records.read_weights)
    evaluation = optional(records.EVALUATION, records.read_evaluation)
    _check_one_run(path, record["corpus"], lines, weights, evaluation)
    return Run(
        # A run named `.` has its name all the same.
        path=path.resolve(),
        record=record,
        # What a default came to, in its place.
        config=record["config"] | record.get("resolved", {}),
        corpus=record["corpus"],
        train=[line for line in lines if line["kind"] == "train"],
        evals=[line for line in lines if line["kind"] == "eval"],
        weights=weights,
        evaluation=evaluation,
        few_shot=optional(records.FEWSHOT, records.read_few_shot),
    )


def _check_one_run(
    path: Path, corpus: Json, lines: Sequence[Json], weights: Json | None, evaluation: Json | None
) -> None:
    """The records of a directory are of one run: they name the domains that config.json does."""
    domains, known = corpus["domains"].keys(), corpus["domains"].keys() | corpus["targets"].keys()
    odd = {}
    if weights is not None:
        odd[records.WEIGHTS] = records.weights_by_name(weights).keys() ^ domains
    if evaluation is not None:
        odd[records.EVALUATION] = evaluation["loss"].keys() - known
    for n, line in enumerate(lines, start=1):
        where = f"{records.METRICS}, line {n}"
        if "alpha_mean" in line:
            odd[where] = line["alpha_mean"].keys() ^ domains
        elif line["kind"] == "eval" and not isinstance(line.get("loss"), dict):
            odd[where] = {"no loss by domain"}
        if line["kind"] == "train" and line["step"] and not {"loss", "lr"} <= line.keys():
            odd[where] = {"no loss or no lr"}
        for key, others in _BESIDE.items():
            missing = [f"no {name}" for name in others if key in line and name not in line]
            if missing:
                odd[where] = set(missing)
    for file, found in odd.items():
        if found:
            raise FileFailure(
                f"{path / file} is not of the run that {records.CONFIG} is of: "
                f"{listed(sorted(found))}. {records.WAY_OUT}"
            )
