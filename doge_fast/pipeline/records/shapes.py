"""What the files of a run must look like to be believed: names and types of all that is read.

A reader may take for granted what stands here. Fields that are not named are kept and not looked
at, so that later releases may write more.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from doge_fast.pipeline.config import BaseConfig, DoReMiConfig, ProxyConfig, SelectConfig
from doge_fast.pipeline.config.ranges import Count, CountOrZero
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.failures import FileFailure

Stage = Literal["proxy", "base", "doremi", "select"]
STAGES: Mapping[str, type] = {
    "proxy": ProxyConfig,
    "base": BaseConfig,
    "doremi": DoReMiConfig,
    "select": SelectConfig,
}
"""{stage: the class of what its config.json repeats}."""

# Null: not finite.
Number = float | None
ByName = dict[str, Number]
WAY_OUT = (
    "Something other than doge-fast wrote it, or wrote over it: restore the file, or make it anew."
)


@dataclass(frozen=True)
class DomainSizes:
    """What config.json says of a domain."""

    train_tokens: CountOrZero
    train_blocks: CountOrZero
    validation_blocks: CountOrZero
    documents: CountOrZero


@dataclass(frozen=True)
class CorpusRecord:
    """The corpus in config.json."""

    domains: dict[str, DomainSizes]
    targets: dict[str, DomainSizes]
    tokenizer_sha256: str
    block_size: Count
    vocab_size: Count


@dataclass(frozen=True)
class GivenWeights:
    """What a base run began with, in config.json."""

    source: str
    sha256: str


@dataclass(frozen=True)
class LearnedFrom:
    """What a proxy began with, in config.json."""

    source: str
    weights: dict[str, float]


@dataclass(frozen=True)
class ConfigRecord:
    """config.json. Which stages there are, and what each was told, is looked at beside it."""

    stage: Any
    config: Any
    corpus: CorpusRecord
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    warnings: tuple[str, ...] = ()
    resolved: dict[str, float] = field(default_factory=dict)
    initial: GivenWeights | LearnedFrom | None = None
    parameters: CountOrZero | None = None


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl."""

    step: CountOrZero
    kind: Literal["train", "eval"]
    loss: Number | ByName = None
    alpha: ByName = field(default_factory=dict)
    alpha_mean: ByName = field(default_factory=dict)
    gain: ByName = field(default_factory=dict)
    influence: ByName = field(default_factory=dict)
    difficulty: ByName = field(default_factory=dict)
    grad_norm: ByName = field(default_factory=dict)
    excess: ByName = field(default_factory=dict)
    reference_loss: ByName = field(default_factory=dict)
    tokens: ByName = field(default_factory=dict)
    tau: ByName = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    cosine: tuple[tuple[Number, ...], ...] = ()
    lr: Number = None
    seconds: Number = None
    combined_norm: Number = None
    skipped: bool = False


@dataclass(frozen=True)
class ManifestRecord:
    """manifest.json."""

    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class EvaluationRecord:
    """evaluation.json."""

    step: CountOrZero
    blocks: dict[str, int]
    loss: ByName
    perplexity: ByName
    average_perplexity: Number
    worst: Number
    tokens: dict[str, int]


@dataclass(frozen=True)
class Average:
    """The average over tasks in fewshot.json."""

    acc: float
    chance: float
    acc_stderr: Number = None


@dataclass(frozen=True, kw_only=True)
class TaskScores(Average):
    """What fewshot.json says of a task."""

    truncated_requests: CountOrZero


@dataclass(frozen=True)
class FewShotRecord:
    """fewshot.json."""

    step: CountOrZero
    shots: CountOrZero
    fewshot_seed: int
    positions: Count
    tasks: dict[str, TaskScores]
    average: Average


@dataclass(frozen=True)
class ArmRecord:
    """An arm of a table in experiment.json."""

    label: str
    about: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class GroupRecord:
    """A table in experiment.json."""

    kind: str
    title: str
    arms: tuple[ArmRecord, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    aim: tuple[str, ...] = ()
    swarm: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    focus: str | None = None


@dataclass(frozen=True)
class Settings:
    """The settings in experiment.json that a report is made of."""

    seeds: tuple[int, ...]
    eval_blocks: Count | None = None


@dataclass(frozen=True)
class ExperimentRecord:
    """experiment.json."""

    name: str
    preset: str
    title: str
    question: str
    settings: Settings
    data: str
    runs: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class SelectionEntry:
    """A file of chosen parameters, in cancellation.json."""

    file: str
    parameters: CountOrZero
    share: float


@dataclass(frozen=True)
class CancellationRecord:
    """cancellation.json."""

    columns: dict[str, CountOrZero]
    scores: dict[str, ByName]
    selections: tuple[SelectionEntry, ...]


def check_shape(value: Any, kind: type, where: str | Path) -> Any:
    """See that a value that JSON holds has every field of a dataclass, of its type and range.

    Args:
        value: as `json.loads` returns it.
        kind: one of the classes here, or a stage's.
        where: what a refusal begins with; the file.

    Returns:
        The dataclass, with defaults for what the value lacks.

    Raises:
        FileFailure: it has not; the sentence names the field.
    """
    from pydantic import ValidationError

    try:
        found = _adapter(kind).validate_json(json.dumps(value), strict=True)
        check_ranges(found)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        told = first["msg"][0].lower() + first["msg"][1:]
        raise FileFailure(f"{where} is damaged: {place}: {told}. {WAY_OUT}") from None
    except ValueError as error:
        raise FileFailure(f"{where} is damaged: {error} {WAY_OUT}") from None


@functools.cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
