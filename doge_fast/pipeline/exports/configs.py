"""Frameworks that read their mixture from YAML."""

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from doge_fast.pipeline.exports.mixture import Mixture, Rows
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.exports.text import from_yaml, to_yaml

# Levanter fixes how many of each domain a block holds, and changes weights between blocks only.
_LEVANTER_BLOCK = 2048
# A block holds whole sequences of every domain, so its length is how fine the shares can be.
_SHORTEST_BLOCK = 256
# It refuses 2^16.
_LONGEST_BLOCK = 2**15
# Part of a block that rounding may give to the largest domain before a longer one is asked for.
_MOST_ROUNDED = 0.01


def _olmo(mixture: Mixture) -> str:
    sources = [
        {
            "source_name": name,
            "target_ratio": share,
            "paths": mixture.paths_of(name),
            "max_repetition_ratio": _repetition(mixture, name, share),
            "max_source_fraction": 1.0,
        }
        for name, share in mixture.numbers().items()
    ]
    return to_yaml({"sources": sources})


def _repetition(mixture: Mixture, name: str, share: float) -> float:
    """At least 1; rounded up, for the framework refuses when there is a token too few."""
    passes = mixture.passes(name, share)
    return max(1.0, math.ceil(passes * 1000) / 1000) if passes else 1.0


def _read_olmo(text: str) -> Phases:
    sources = from_yaml(text, "An OLMo-core source list").get("sources")
    if not isinstance(sources, list) or not all("target_ratio" in each for each in sources):
        raise ValueError(
            "An OLMo-core source list must hold sources, each with a target_ratio; it holds "
            f"{sources!r}."
        )
    return [
        (
            0,
            [Found(float(each["target_ratio"]), name=each.get("source_name")) for each in sources],
        )
    ]


def _nanotron(mixture: Mixture) -> str:
    stages = [
        {
            "name": f"phase {index + 1}" if len(mixture.phases) > 1 else "training",
            # The first step is 1 there, 0 here.
            "start_training_step": phase.first_step + 1,
            "data": {
                "seed": mixture.settings.seed,
                "num_loading_workers": 1,
                "dataset": _nanoset(mixture, index),
            },
        }
        for index, phase in enumerate(mixture.phases)
    ]
    return to_yaml({"data_stages": stages})


def _nanoset(mixture: Mixture, phase: int) -> dict[str, Any]:
    blend = mixture.weighted_paths(phase)
    return {
        "dataset_folder": [path for _, path in blend],
        "dataset_weights": [float(share) for share, _ in blend],
    }


def _read_nanotron(text: str) -> Phases:
    stages = from_yaml(text, "A nanotron config").get("data_stages")
    if not isinstance(stages, list) or not stages:
        raise ValueError(f"A nanotron config must hold data_stages; it has {stages!r}.")
    return [(int(each["start_training_step"]) - 1, _folders(each)) for each in stages]


def _folders(stage: Mapping[str, Any]) -> list[Found]:
    dataset = stage.get("data", {}).get("dataset", {})
    folders, weights = dataset.get("dataset_folder"), dataset.get("dataset_weights")
    if isinstance(folders, dict):
        # As releases up to 0.4 have it.
        weights = list(folders.values())
        folders = list(folders)
    if isinstance(folders, str):
        folders, weights = [folders], [1.0]
    if not folders or not weights or len(folders) != len(weights):
        raise ValueError(
            "A stage of nanotron's must hold dataset_folder and as many dataset_weights; "
            f"{stage.get('name')!r} holds {folders!r} and {weights!r}."
        )
    return [Found(float(w), path=path) for w, path in zip(weights, folders, strict=True)]


def _levanter(mixture: Mixture) -> str:
    names = mixture.names()
    components = {name: _component(mixture, name) for name in names if mixture.paths_of(name)}
    weights: Any = mixture.numbers()
    if len(mixture.phases) > 1:
        # A domain that a phase leaves out is said to be left out.
        weights = [
            [phase.first_step, dict.fromkeys(names, 0.0) | mixture.numbers(index)]
            for index, phase in enumerate(mixture.phases)
        ]
    value = {"components": components} if components else {}
    block = _levanter_block(mixture)
    own = {} if block == _LEVANTER_BLOCK else {"mixture_block_size": block}
    return to_yaml({"data": value | {"train_weights": weights} | own})


def _component(mixture: Mixture, name: str) -> dict[str, Any]:
    return {"source": {"type": "url", "train_urls": mixture.paths_of(name)}}


def _levanter_block(mixture: Mixture) -> int:
    """The default; a part of it at whose end every phase begins; or so many as hold every domain.

    Raises:
        ValueError: such a block would be too short to hold the shares, or a domain has none.
    """
    block = _block_of_phases(mixture)
    while _is_coarse(mixture, block) and _may_be_doubled(mixture, block):
        block *= 2
    lost = _without_sequence(mixture, block)
    if lost:
        raise ValueError(
            f"Levanter deals out whole sequences of a block, {block} here, and would draw none of "
            f"{', '.join(lost)}: each has less than 1/{block}. Lift them (doge-fast weights "
            "constrain --floor), or leave them out (fewer decimals)."
        )
    return block


def _is_coarse(mixture: Mixture, block: int) -> bool:
    """Whether rounding takes all from a domain, or from all together what makes a mixture."""
    kept = min(
        sum(int(share * block) for share in mixture.numbers(phase).values())
        for phase in range(len(mixture.phases))
    )
    return block - kept > _MOST_ROUNDED * block or bool(_without_sequence(mixture, block))


def _without_sequence(mixture: Mixture, block: int) -> list[str]:
    """Domains whose share of a block is less than a sequence: Levanter rounds down."""
    # A unit of float64 may be lost where it divides by the sum.
    least = (1 + 1e-12) / block
    phases = range(len(mixture.phases))
    found = {n for phase in phases for n, share in mixture.numbers(phase).items() if share < least}
    return sorted(found)


def _may_be_doubled(mixture: Mixture, block: int) -> bool:
    """Whether every phase still begins at the end of a block."""
    batch = mixture.settings.batch_size
    firsts = [phase.first_step for phase in mixture.phases if phase.first_step]
    are_ends = not firsts or (batch and not any(first * batch % (2 * block) for first in firsts))
    return bool(are_ends) and 2 * block <= _LONGEST_BLOCK


def _block_of_phases(mixture: Mixture) -> int:
    batch = mixture.settings.batch_size
    if batch is None:
        return _LEVANTER_BLOCK
    firsts = [phase.first_step * batch for phase in mixture.phases]
    block = math.gcd(_LEVANTER_BLOCK, *firsts)
    if block < _SHORTEST_BLOCK:
        multiple = _LEVANTER_BLOCK // math.gcd(batch, _LEVANTER_BLOCK)
        raise ValueError(
            f"Levanter changes weights between blocks of {_LEVANTER_BLOCK} sequences; at {batch} "
            f"in a step that is every {multiple} steps, and phases begin at "
            f"{[phase.first_step for phase in mixture.phases]}. Let them begin at multiples of "
            f"that, or nearly."
        )
    return block


def _read_levanter(text: str) -> Phases:
    value = from_yaml(text, "A Levanter config")
    weights = value.get("data", value).get("train_weights")
    if isinstance(weights, dict):
        weights = [[0, weights]]
    if not isinstance(weights, list) or not weights:
        raise ValueError(f"A Levanter config must hold data.train_weights; it has {weights!r}.")
    return [
        (int(first), [Found(float(weight), name=name) for name, weight in stage.items()])
        for first, stage in weights
    ]


def _fast_llm(mixture: Mixture) -> str:
    blend = mixture.weighted_paths()
    training: dict[str, Any] = {
        "type": "blended",
        "datasets": [{"type": "file", "path": path} for _, path in blend],
        "weights": [float(share) for share, _ in blend],
    }
    if len(blend) == 1:
        training = {"type": "file", "path": blend[0][1]}
    datasets = {"Training": training}
    if mixture.paths["valid"]:
        datasets["Validation"] = _fast_llm_validation(mixture)
    return to_yaml({"data": {"datasets": datasets}})


def _fast_llm_validation(mixture: Mixture) -> dict[str, Any]:
    given = mixture.paths["valid"]
    paths = [path for name in mixture.names() for path in mixture.paths_of(name, "valid")]
    if not paths:
        raise ValueError(f"The valid paths are of domains without a weight: {', '.join(given)}.")
    if len(paths) != 1:
        raise ValueError(
            f"Fast-LLM's Validation here is one file; {len(paths)} valid paths are given: "
            f"{', '.join(paths)}. Give one, and the other sets in a config of your own."
        )
    return {"type": "file", "path": paths[0]}


def _read_fast_llm(text: str) -> Phases:
    value = from_yaml(text, "A Fast-LLM config")
    datasets = value.get("data", {}).get("datasets", {})
    blend = datasets.get("Training") or datasets.get("training") or value
    if blend.get("type") == "file":
        blend = {"type": "blended", "datasets": [blend], "weights": [1.0]}
    paths, weights = blend.get("datasets"), blend.get("weights")
    if blend.get("type") != "blended" or not paths or len(paths) != len(weights or ()):
        raise ValueError(
            "A Fast-LLM config must hold data.datasets.Training of type blended, with datasets "
            f"and as many weights; it holds {blend!r}."
        )
    return [
        (
            0,
            [
                Found(float(w), path=each.get("path"))
                for w, each in zip(weights, paths, strict=True)
            ],
        )
    ]


def _lingua(mixture: Mixture) -> str:
    shares = mixture.numbers()
    folders = {name: mixture.one_path(name).rstrip("/") for name in shares}
    roots = sorted({folder.rpartition("/")[0] for folder in folders.values()})
    if len(roots) > 1:
        raise ValueError(
            "lingua's sources are folders of one root_dir; these lie in "
            f"{', '.join(roots)}. Link to them from one folder."
        )
    sources = {PurePosixPath(folders[name]).name: share for name, share in shares.items()}
    return to_yaml({"data": {"root_dir": roots[0] or ".", "sources": sources}})


def _read_lingua(text: str) -> Phases:
    value = from_yaml(text, "A lingua config")
    data = value.get("data", value)
    sources, root = data.get("sources"), str(data.get("root_dir") or ".").rstrip("/")
    if not isinstance(sources, dict) or not sources:
        raise ValueError(f"A lingua config must hold data.sources; it has {sources!r}.")
    return [(0, [Found(float(w), path=f"{root}/{name}") for name, w in sources.items()])]


def _juicer(mixture: Mixture) -> str:
    mixture.require("budget_tokens", why="without max_sample_num it does not look at the weights")
    if mixture.rows == "blocks":
        mixture.require("seq_length", why="rows are blocks, and it counts rows")
    configs = [
        {"type": "local", "path": path, "weight": float(share)}
        for share, path in mixture.weighted_paths()
    ]
    return to_yaml({"dataset": {"max_sample_num": mixture.rows_in_budget(), "configs": configs}})


def _read_juicer(text: str) -> Phases:
    configs = from_yaml(text, "A data-juicer config").get("dataset", {}).get("configs")
    if not isinstance(configs, list) or not configs:
        raise ValueError(f"A data-juicer config must hold dataset.configs; it has {configs!r}.")
    return [(0, [Found(float(each.get("weight", 1.0)), path=each.get("path")) for each in configs])]


_BOTH: tuple[Rows, ...] = ("blocks", "documents")
_SEQUENCES = "It draws sequences of one length, so the weights are token shares."

TARGETS: Sequence[Target] = (
    Target(
        "olmo-core",
        "OLMo-core's SourceMixtureList (SourceMixtureList.from_yaml)",
        _olmo,
        "token files (.npy) or globs",
        traps=(
            "Ratios are of tokens. requested_tokens and global_batch_size go to "
            "SourceMixtureDatasetConfig.",
            "It refuses a source with too few tokens: give budget_tokens, and max_repetition_ratio "
            "allows the passes that it needs by the tokens in the file.",
        ),
        read=_read_olmo,
    ),
    Target(
        "nanotron",
        "nanotron's data_stages",
        _nanotron,
        "folder of tokenized bytes (datatrove)",
        has_phases=True,
        traps=(
            _SEQUENCES,
            "One folder given as a string resets the weights. Release 0.4 on PyPI takes "
            "{folder: weight} under dataset_folder instead.",
        ),
        read=_read_nanotron,
    ),
    Target(
        "levanter",
        "Levanter's data.train_weights",
        _levanter,
        "train URL (jsonl); optional",
        has_phases=True,
        needs_paths=False,
        traps=(
            _SEQUENCES,
            "Phases begin at steps, and at the end of a block of mixture_block_size (2048) "
            "sequences; with batch_size that is seen to. Shares are rounded down to whole "
            "sequences of a block, and the largest gets the rest; the block is made longer where "
            "that would be much. Before 2026 components were called configs, without source.",
        ),
        read=_read_levanter,
    ),
    Target(
        "fast-llm",
        "Fast-LLM's blended data set",
        _fast_llm,
        "dataset config file that fast-llm prepare wrote",
        traps=(_SEQUENCES,),
        read=_read_fast_llm,
    ),
    Target(
        "lingua",
        "Meta lingua's data.sources",
        _lingua,
        "folder of NAME.chunk.*.jsonl; all in one root",
        rows=("documents",),
        default_rows="documents",
        traps=(
            "It draws a document, then tokenizes and packs: the weights count documents.",
            "A source is known by the name of its folder.",
        ),
        read=_read_lingua,
    ),
    Target(
        "data-juicer",
        "data-juicer's dataset.configs",
        _juicer,
        "local file or folder",
        rows=_BOTH,
        default_rows=None,
        traps=(
            "It draws rows. Without max_sample_num it takes all rows of all sets, whatever the "
            "weights.",
            "A set with fewer rows than its share is repeated; sets are put one after another, so "
            "shuffle what comes out.",
        ),
        read=_read_juicer,
    ),
)
