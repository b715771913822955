"""The records of a run: their file names, their fields and types, and the one reader of JSON.

What is read stands here, and pydantic checks it. Other fields are kept and not looked at.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from annotated_types import Le, MinLen
from pydantic import TypeAdapter, ValidationError

from doge_fast.pipeline.config import StageConfig
from doge_fast.pipeline.config.ranges import (
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
)
from doge_fast.pipeline.failures import FileFailure, UserError
from doge_fast.weights.weights_file import SCHEMA_VERSION

Stage = Literal["proxy", "base", "doremi", "select"]
STAGES: Mapping[str, type] = {config.stage: config for config in get_args(StageConfig)}
"""{stage: the class of what its config.json repeats}."""

Json = dict[str, Any]

METRICS, WEIGHTS = "metrics.jsonl", "weights.json"
CHECKPOINTS = "checkpoints"
# Where one is written, among them.
WRITING = ".writing"
CONFIG, EVALUATION = "config.json", "evaluation.json"
EXPERIMENT, FEWSHOT = "experiment.json", "fewshot.json"
# Of an experiment, the directory of its runs.
RUNS, MIXTURES = "runs", "mixtures"
MANIFEST, CANCELLATION = "manifest.json", "cancellation.json"


class _NullIsNan:
    """Pydantic's hook: JSON has no word for what is not finite, and records hold null for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            lambda value: math.nan if value is None else value,
            core_schema.nullable_schema(handler(source)),
        )


Number = Annotated[float, _NullIsNan()]
NumberByName = dict[str, Number]
Record = TypeVar("Record")
Loaded = TypeVar("Loaded", bound="WholeFile")
RESTORE = (
    "Something other than doge-fast wrote it, or wrote over it: restore the file, or make it anew."
)
# Ten times what a float32 sum over a hundred domains, or six printed decimals, can be off.
SUM_TOLERANCE = 1e-5


class WholeFile:
    """A record that is a file of a directory; `load` reads it."""

    file: ClassVar[str]
    absent: ClassVar[str]
    """What is said of a directory without it."""


@dataclass(frozen=True)
class DomainSizes:
    """What config.json says of a domain."""

    train_tokens: CountOrZero
    train_blocks: CountOrZero
    validation_blocks: CountOrZero
    documents: CountOrZero
    digest: str | None = None
    """Of all blocks; the kept records of benchmarks have none."""


@dataclass(frozen=True)
class CorpusRecord:
    """The corpus in config.json."""

    domains: dict[str, DomainSizes]
    targets: dict[str, DomainSizes]
    tokenizer_sha256: str
    block_size: Count
    vocab_size: Count


@dataclass(frozen=True)
class ConfigRecord(WholeFile):
    """config.json, with the configuration as it stands there."""

    file = CONFIG
    absent = f"{{}} is not a run directory: it holds no {CONFIG}."

    stage: Stage
    config: dict[str, Any]
    corpus: CorpusRecord
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    warnings: tuple[str, ...] = ()
    resolved: dict[str, float] = field(default_factory=dict)
    parameters: CountOrZero = 0
    """Of the model; a tied weight counts once."""
    architecture_sha256: str = ""
    """Of the config.json of a model that was given as a folder."""


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl, as far as it is read."""

    step: CountOrZero
    kind: Literal["train", "eval"]
    loss: Number | NumberByName = math.nan
    alpha: NumberByName = field(default_factory=dict)
    alpha_mean: NumberByName = field(default_factory=dict)
    lr: float | None = None
    seconds: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class ManifestRecord:
    """manifest.json, which also holds the step of a checkpoint and what metrics.jsonl held."""

    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class EvaluationRecord(WholeFile):
    """evaluation.json, as far as it is read."""

    file = EVALUATION
    absent = f"{{}} holds no {EVALUATION}: run doge-fast evaluate on it."

    blocks: dict[str, int]
    loss: NumberByName
    perplexity: NumberByName


@dataclass(frozen=True)
class ArmRecord:
    """Runs in experiment.json that differ in nothing but their seed."""

    label: str
    about: str
    runs: tuple[str, ...]
    is_baseline: bool = False


@dataclass(frozen=True)
class PerplexityGroup:
    """Base models set against a baseline, domain by domain."""

    title: str
    arms: tuple[ArmRecord, ...]
    aim: tuple[str, ...]
    """Domains whose loss the weights are to lower."""
    about: str = ""
    focus: str | None = None
    """How the label begins of the arm that the question is about; None: DoGE's."""
    kind: Literal["perplexity"] = "perplexity"


@dataclass(frozen=True)
class WeightsGroup:
    """What proxies learned."""

    title: str
    arms: tuple[ArmRecord, ...]
    kind: Literal["weights"] = "weights"


@dataclass(frozen=True)
class Method:
    """A way to learn weights: of each seed all runs that it takes."""

    label: str
    runs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CostGroup:
    """What learning the weights costs."""

    title: str
    methods: tuple[Method, ...]
    kind: Literal["cost"] = "cost"


@dataclass(frozen=True)
class TemperaturePoint:
    """Base models at weights of one temperature."""

    inverse: PositiveOrZero
    """1/T."""
    arm: ArmRecord
    weights: dict[str, PositiveOrZero]


@dataclass(frozen=True)
class TemperatureGroup:
    """Base models at weights between uniform ones and far beyond a proxy's."""

    title: str
    points: Annotated[tuple[TemperaturePoint, ...], MinLen(1)]
    aim: dict[str, PositiveOrZero]
    """{domain: its weight in the loss that counts}; they sum to 1."""
    chosen: PositiveOrZero
    """1/T of the weights that were written."""
    epochs: dict[str, PositiveOrZero]
    """{domain: passes over its text} at the chosen weights."""
    epochs_tokens: Positive
    """Of the training that `epochs` are of."""
    has_budget: bool
    """Whether that is the training that the weights are for, and not that of a base model."""
    kind: Literal["temperature"] = "temperature"


Group = TemperatureGroup | PerplexityGroup | WeightsGroup | CostGroup
"""A table that an experiment ends in."""


@dataclass(frozen=True)
class ExperimentSettings:
    """The settings in experiment.json that a report is made of."""

    seeds: tuple[int, ...]
    eval_blocks: Count | None = None
    proxy: str | None = None
    """The run outside of the directory whose weights are tried."""


@dataclass(frozen=True)
class ExperimentRecord(WholeFile):
    """experiment.json."""

    file = EXPERIMENT
    absent = f"{{}} holds no {EXPERIMENT}: no search has run there."

    name: str
    title: str
    question: str
    settings: ExperimentSettings
    data: str
    runs: tuple[str, ...]
    groups: tuple[Group, ...]
    config: dict[str, Any] = field(default_factory=dict)
    """All settings, as JSON holds them."""


@dataclass(frozen=True)
class SelectionEntry:
    """A file of chosen parameters, in cancellation.json."""

    file: str
    parameters: CountOrZero
    share: float


@dataclass(frozen=True)
class CancellationRecord(WholeFile):
    """cancellation.json."""

    file = CANCELLATION
    absent = f"{{}} holds no {CANCELLATION}: doge-fast select has not come to its end there."

    columns: dict[str, CountOrZero]
    scores: dict[str, NumberByName]
    selections: tuple[SelectionEntry, ...]


PrintedShare = Annotated[PositiveOrZero, Le(1 + SUM_TOLERANCE)]
Text = Annotated[str, MinLen(1)]
Taus = Annotated[dict[str, PositiveOrZero], MinLen(1)]


@dataclass(frozen=True)
class DomainEntry:
    """A domain in weights.json. A field that is null is not known."""

    name: Text
    weight: PositiveOrZero
    weight_last: PrintedShare | None = None
    weight_std: PositiveOrZero | None = None
    prior: PrintedShare | None = None
    tokens: CountOrZero | None = None
    documents: CountOrZero | None = None
    mean_doc_tokens: Positive | None = None


@dataclass(frozen=True)
class AverageRecord:
    """Of how many files weights are the mean."""

    count: CountOrZero


@dataclass(frozen=True)
class WeightsRecord:
    """weights.json, as far as it is read. A field that is null is not known."""

    domains: Annotated[tuple[DomainEntry, ...], MinLen(1)]
    method: Text | None = None
    score: Text | None = None
    target: Literal["universal"] | Taus | None = None
    tokenizer_sha256: Text | None = None
    corpus: Text | None = None
    date: Text | None = None
    tokens: CountOrZero | None = None
    model: Text | None = None
    parameters: CountOrZero | None = None
    learning_rate: Positive | None = None
    steps: CountOrZero | None = None
    seed: int | None = None
    seeds: tuple[int, ...] | None = None
    inverse_temperature: PositiveOrZero | None = None
    is_decided: bool | None = None
    warnings: tuple[str, ...] | None = None
    reference: dict[str, Any] | None = None
    average: AverageRecord | None = None
    constraints: dict[str, Any] | None = None
    stages: tuple[dict[str, Any], ...] | None = None


def parse_json(text: bytes, where: str | Path, way_out: str = RESTORE) -> Any:
    """The value that text in JSON stands for; FileFailure for other text, NaN and infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileFailure(f"{where} must hold JSON and does not: {error}. {way_out}") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def read_json(path: Path, way_out: str = RESTORE) -> Json:
    """The object that the file holds; UserError where it is absent or holds another thing."""
    try:
        value = parse_json(path.read_bytes(), path, way_out)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    if not isinstance(value, dict):
        held = _JSON_NAMES.get(type(value), "a number")
        raise FileFailure(f"{path} must hold a JSON object; it holds {held}. {way_out}")
    return value


_JSON_NAMES = {type(None): "null", bool: "true or false", list: "a list", str: "a string"}


def load(folder: Path, kind: type[Loaded]) -> Loaded:
    """A record of a directory, with all that a reader asks for.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / kind.file
    if not path.exists():
        raise UserError(kind.absent.format(folder))
    return check_shape(read_json(path), kind, path)


def check_shape(
    value: Any,
    kind: type[Record],
    where: str | Path,
    *,
    problem: str = " is damaged",
    way_out: str = RESTORE,
) -> Record:
    """The dataclass that a value of JSON is, with defaults for what it lacks.

    Raises:
        FileFailure: it follows another schema; a field is missing, or not of its type or range.
            The sentence begins with `where` and `problem`, names the field and what it holds, and
            ends with `way_out`.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version not in (None, SCHEMA_VERSION):
        raise FileFailure(
            f"{where} follows schema {version!r}; this release reads schema {SCHEMA_VERSION}."
        )
    adapter: Any = _adapter(cast(type, kind))
    try:
        # The settings that there are no more are passed over.
        record: Record = adapter.validate_json(json.dumps(value), strict=True, extra="ignore")
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # A union's part is named by its type in brackets.
        parts = [str(part) for part in first["loc"] if "[" not in str(part)]
        place, why = ".".join(parts) or "the whole", first["msg"].rstrip(".")
        got = "" if first["type"] == "missing" else f"; got {str(first['input'])[:80]}"
        raise FileFailure(f"{where}{problem}: {place}: {why}{got}. {way_out}") from None


@functools.cache
def _adapter(kind: type) -> Any:
    return TypeAdapter(kind)
