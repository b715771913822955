"""Frameworks that take their mixture in Python: text to paste, which runs as it is.

With them LLM Foundry, which makes MosaicML's streams of YAML.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from doge_fast.pipeline.exports.blend import REMOTE, Blend, Format, Found, Phases
from doge_fast.pipeline.exports.text import (
    from_yaml,
    mapping,
    plain,
    sequence,
    string,
    strings,
    to_yaml,
)

# The reader that a suffix asks for, by the name that `datasets` and Ray Data give it.
_READERS = {
    **{".jsonl": "json", ".json": "json", ".parquet": "parquet"},
    **{".csv": "csv", ".txt": "text", ".arrow": "arrow"},
}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


def _reader_of(paths: Sequence[str]) -> str | None:
    """json, parquet, csv, text or arrow, as the suffixes of a domain's paths say; else None."""
    readers = set()
    for path in paths:
        suffixes = PurePosixPath(path.split(REMOTE)[-1]).suffixes
        kept = ["", *(suffix for suffix in suffixes if suffix not in _PACKED)]
        readers.add(_READERS.get(kept[-1]))
    if len(readers) > 1:
        raise ValueError(f"The files of a domain must be of one kind; {', '.join(paths)} are not.")
    return readers.pop() if readers else None


def _opened(paths: Sequence[str]) -> str:
    """What load_dataset opens a domain by: a reader and its files, or one folder or Hub id."""
    reader = _reader_of(paths)
    if reader is None and len(paths) > 1:
        raise ValueError(
            f"load_dataset takes one directory or Hub id; got {', '.join(paths)}. Name files "
            "(jsonl, parquet, csv, txt, arrow), or make each a domain."
        )
    return f"{string(reader)}, data_files=[{strings(paths)}]" if reader else string(paths[0])


def _streams(blend: Blend) -> str:
    """{domain: the call that opens it as a stream}."""
    opened = {name: _opened(blend.paths_of(name)) for name in blend.shares()}
    return mapping(
        {n: f'load_dataset({each}, split="train", streaming=True)' for n, each in opened.items()}
    )


def _datasets(blend: Blend) -> str:
    return f"""from datasets import interleave_datasets, load_dataset

domains = {_streams(blend)}
probabilities = {mapping(blend.shares())}
dataset = interleave_datasets(
    list(domains.values()),
    probabilities=[probabilities[name] for name in domains],
    seed={blend.settings.seed},
    stopping_strategy="all_exhausted",
)
"""


def _torchdata(blend: Blend) -> str:
    return f"""from datasets import load_dataset
from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler, StopCriteria

domains = {_streams(blend)}
weights = {mapping(blend.shares())}
node = MultiNodeWeightedSampler(
    {{name: IterableWrapper(rows) for name, rows in domains.items()}},
    weights,
    stop_criteria=StopCriteria.CYCLE_FOREVER,
    seed={blend.settings.seed},
)
"""


def _ray(blend: Blend) -> str:
    calls = {}
    for name in blend.shares():
        paths = blend.paths_of(name)
        reader = _reader_of(paths)
        if reader in (None, "arrow"):
            raise ValueError(
                "Ray Data reads a domain by the suffix of its files, jsonl, parquet, csv or txt; "
                f"{name} has {', '.join(paths)}."
            )
        calls[name] = f"ray.data.read_{reader}([{strings(paths)}])"
    return f"""import ray
from ray.data import MixStoppingCondition

domains = {mapping(calls)}
weights = {mapping(blend.shares())}
first, *others = domains.values()
dataset = first.mix(
    *others,
    weights=list(weights.values()),
    stopping_condition=MixStoppingCondition.STOP_ON_SHORTEST,
)
"""


def _litdata(blend: Blend) -> str:
    loader, imported = "", ""
    if blend.rows == "blocks":
        blend.require("seq_length", why="a TokensLoader cuts blocks of it; else --rows documents")
        # The last token of a block is only predicted.
        loader = f", item_loader=TokensLoader(block_size={(blend.settings.seq_length or 0) + 1})"
        imported = ", TokensLoader"
    shares, folders = zip(*blend.weighted_paths(), strict=True)
    return f"""from litdata import CombinedStreamingDataset, StreamingDataset{imported}

folders = {sequence(map(string, folders))}
datasets = [
    StreamingDataset(folder, shuffle=True{loader})
    for folder in folders
]
dataset = CombinedStreamingDataset(
    datasets,
    seed={blend.settings.seed},
    weights={sequence(shares, "    ", "()")},
    iterate_over_all=False,
)
"""


def _torchtitan(blend: Blend) -> str:
    # It looks names up in lower case.
    sources = [
        f"source({string(name.lower())}, {plain(share)}, {_opened(blend.paths_of(name))})"
        for name, share in blend.shares().items()
    ]
    names = {name.lower() for name in blend.shares()}
    if len(names) < len(sources):
        raise ValueError(
            "torchtitan knows data sets by their names in lower case, and two of these are then "
            f"the same: {', '.join(blend.shares())}. Rename one (doge-fast export --to json)."
        )
    return f"""from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    InterleavedHuggingFaceTextDataLoader,
)


def source(name, weight, reader, **files):
    DATASETS[name] = DatasetConfig(
        path=reader,
        loader=lambda path: load_dataset(path, **files, split="train", streaming=True),
        sample_processor=lambda row: row["text"],
    )
    return HFDataSource(dataset=name, weight=weight)


dataloader = InterleavedHuggingFaceTextDataLoader.Config(
    sources={sequence(sources, "    ")},
    seed={blend.settings.seed},
)
"""


def _olmo_composable(blend: Blend) -> str:
    blend.require("seq_length", why="instances are chunks of so many tokens")
    settings, length = blend.settings, blend.settings.seq_length
    specs = [
        f"domain({string(name)}, {plain(share)}, {blend.repetition(name)}, "
        f"{strings(blend.paths_of(name))})"
        for name, share in blend.shares().items()
    ]
    budget = f"    num_tokens={settings.budget_tokens},\n" if settings.budget_tokens else ""
    return f"""from olmo_core.data import TokenizerConfig
from olmo_core.data.composable import (
    ConcatAndChunkInstanceSourceConfig,
    MixingInstanceSourceConfig,
    MixingInstanceSourceSpecConfig,
    NumpyDocumentSourceConfig,
)

tokenizer = TokenizerConfig.dolma2()  # put here the one that wrote the files


def domain(label, ratio, repetition, *paths):
    documents = NumpyDocumentSourceConfig(source_paths=list(paths), tokenizer=tokenizer)
    chunks = ConcatAndChunkInstanceSourceConfig(sources=[documents], sequence_length={length})
    return MixingInstanceSourceSpecConfig(
        source=chunks, ratio=ratio, max_repetition_factor=repetition, label=label
    )


source = MixingInstanceSourceConfig(
    source_specs={sequence(specs, "    ")},
    seed={settings.seed},
{budget})
"""


def _place(blend: Blend, name: str) -> dict[str, str]:
    """Where MosaicML Streaming finds a domain: a remote copied to a folder, or a folder."""
    path, local = blend.one_path(name), blend.settings.local_dir
    if REMOTE not in path:
        return {"local": path}
    return {"remote": path} | ({"local": f"{local.rstrip('/')}/{name}"} if local else {})


def _mosaic(blend: Blend) -> str:
    settings, rows = blend.settings, blend.rows_in_budget()
    blend.require("batch_size", why="StreamingDataset does not start without one (--batch-size)")
    streams = []
    for name, share in blend.shares().items():
        where = ", ".join(f"{key}={string(value)}" for key, value in _place(blend, name).items())
        streams.append(f"Stream({where}, proportion={plain(share)})")
    epoch = f"    epoch_size={rows},\n" if rows else ""
    return f"""from streaming import Stream, StreamingDataset

dataset = StreamingDataset(
    streams={sequence(streams, "    ")},
    shuffle=True,
    shuffle_seed={settings.seed},
    batching_method="random",
{epoch}    batch_size={settings.batch_size},  # of one device: divide by their number
)
"""


def _foundry(blend: Blend) -> str:
    dataset = {"streams": _mds_streams(blend, 0), "shuffle": True, "batching_method": "random"}
    if blend.settings.seq_length:
        dataset["max_seq_len"] = blend.settings.seq_length
    value: dict[str, Any] = {"train_loader": {"name": "text", "dataset": dataset}}
    if len(blend.phases) > 1:
        value["callbacks"] = {"curriculum_learning": _curriculum(blend)}
        value["max_duration"] = f"{blend.settings.budget_tokens}tok"
    return to_yaml(value)


def _mds_streams(blend: Blend, phase: int) -> dict[str, Any]:
    return {
        name: _place(blend, name) | {"split": "train", "proportion": share}
        for name, share in blend.shares(phase).items()
    }


def _curriculum(blend: Blend) -> dict[str, Any]:
    """LLM Foundry counts a phase by its tokens, and the sum must be the whole training."""
    why = "phases begin at optimizer steps, and it counts tokens"
    blend.require("seq_length", "batch_size", "budget_tokens", why=why)
    step, budget = blend.settings.tokens_per_step() or 0, blend.settings.budget_tokens or 0
    starts = [phase.first_step * step for phase in blend.phases]
    if starts[-1] >= budget:
        raise ValueError(
            f"The last phase begins after {starts[-1]} tokens ({blend.phases[-1].first_step} "
            f"steps of {step}), and budget_tokens is {budget}: it would never come. Give the "
            "tokens of the whole training, or fewer phases."
        )
    ends = [*starts[1:], budget]
    durations = [f"{end - start}tok" for start, end in zip(starts, ends, strict=True)]
    schedule = [
        {"duration": duration, "dataset": {"streams": _mds_streams(blend, index)}}
        for index, duration in enumerate(durations)
    ]
    return {"duration": durations[0], "schedule": schedule[1:]}


def _read_foundry(text: str) -> Phases:
    value = from_yaml(text)
    value = value.get("variables", {}) | value
    loader = value.get("train_loader", value)
    phases, start = [(0, _proportions(loader.get("dataset", loader)))], 0
    if callback := value.get("callbacks", {}).get("curriculum_learning"):
        start = _tokens(callback["duration"])
        for each in callback["schedule"]:
            phases.append((start, _proportions(each["dataset"])))
            start += _tokens(each["duration"])
    return phases


def _proportions(dataset: Mapping[str, Any]) -> list[Found]:
    return [
        Found(float(each["proportion"]), name=name, path=each.get("remote") or each.get("local"))
        for name, each in dataset["streams"].items()
    ]


def _tokens(duration: Any) -> int:
    number, unit = str(duration)[:-3], str(duration)[-3:]
    if unit != "tok":
        raise ValueError(f"a curriculum's durations are tokens, as in 1000tok, not {duration!r}")
    return int(number)


FORMATS: Mapping[str, Format] = {
    "mosaic-streaming": (_mosaic, None),
    "llm-foundry": (_foundry, _read_foundry),
    "datasets": (_datasets, None),
    "torchdata": (_torchdata, None),
    "ray": (_ray, None),
    "litdata": (_litdata, None),
    "torchtitan": (_torchtitan, None),
    "olmo-core-composable": (_olmo_composable, None),
}
