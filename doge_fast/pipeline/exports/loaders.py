"""Frameworks that take their mixture in Python: text to paste, which runs as it is."""

from collections.abc import Sequence

from doge_fast.pipeline.exports.blend import Blend
from doge_fast.pipeline.exports.target import Target
from doge_fast.pipeline.exports.text import (
    load_dataset,
    mapping,
    plain,
    reader_of,
    sequence,
    string,
    strings,
)


def _streams(blend: Blend) -> str:
    """{domain: a stream of its rows}, as source text."""
    return mapping({name: load_dataset(blend.paths_of(name)) for name in blend.shares()})


def _datasets(blend: Blend) -> str:
    return (
        "from datasets import interleave_datasets, load_dataset\n\n"
        f"domains = {_streams(blend)}\n"
        f"probabilities = {mapping(blend.shares())}\n"
        "dataset = interleave_datasets(\n"
        "    list(domains.values()),\n"
        "    probabilities=[probabilities[name] for name in domains],\n"
        f"    seed={blend.settings.seed},\n"
        '    stopping_strategy="all_exhausted",\n'
        ")\n"
    )


def _torchdata(blend: Blend) -> str:
    return (
        "from datasets import load_dataset\n"
        "from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler, StopCriteria\n\n"
        f"domains = {_streams(blend)}\n"
        f"weights = {mapping(blend.shares())}\n"
        "node = MultiNodeWeightedSampler(\n"
        "    {name: IterableWrapper(rows) for name, rows in domains.items()},\n"
        "    weights,\n"
        "    stop_criteria=StopCriteria.CYCLE_FOREVER,\n"
        f"    seed={blend.settings.seed},\n"
        ")\n"
    )


def _ray(blend: Blend) -> str:
    calls = {}
    for name in blend.shares():
        paths = blend.paths_of(name)
        reader = reader_of(paths)
        if reader in (None, "arrow"):
            raise ValueError(
                "Ray Data reads a domain by the suffix of its files, jsonl, parquet, csv or txt; "
                f"{name} has {', '.join(paths)}."
            )
        calls[name] = f"ray.data.read_{reader}([{strings(paths)}])"
    return (
        "import ray\n"
        "from ray.data import MixStoppingCondition\n\n"
        f"domains = {mapping(calls)}\n"
        f"weights = {mapping(blend.shares())}\n"
        "first, *others = domains.values()\n"
        "dataset = first.mix(\n"
        "    *others,\n"
        "    weights=list(weights.values()),\n"
        "    stopping_condition=MixStoppingCondition.STOP_ON_SHORTEST,\n"
        ")\n"
    )


def _litdata(blend: Blend) -> str:
    loader, imported = "", ""
    if blend.rows == "blocks":
        blend.require("seq_length", why="a TokensLoader cuts blocks of it; else --rows documents")
        # The last token of a block is only predicted.
        loader = f", item_loader=TokensLoader(block_size={(blend.settings.seq_length or 0) + 1})"
        imported = ", TokensLoader"
    weighted = blend.weighted_paths()
    return (
        f"from litdata import CombinedStreamingDataset, StreamingDataset{imported}\n\n"
        f"folders = {sequence([string(path) for _, path in weighted])}\n"
        "datasets = [\n"
        f"    StreamingDataset(folder, shuffle=True{loader})\n"
        "    for folder in folders\n"
        "]\n"
        "dataset = CombinedStreamingDataset(\n"
        "    datasets,\n"
        f"    seed={blend.settings.seed},\n"
        f"    weights={sequence([share for share, _ in weighted], '    ', '()')},\n"
        "    iterate_over_all=False,\n"
        ")\n"
    )


_TITAN = """from datasets import load_dataset
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


"""


def _torchtitan(blend: Blend) -> str:
    sources = []
    for name, share in blend.shares().items():
        paths = blend.paths_of(name)
        reader = reader_of(paths)
        files = f", data_files=[{strings(paths)}]" if reader else ""
        where = string(reader or blend.one_path(name))
        # It looks names up in lower case.
        sources.append(f"source({string(name.lower())}, {plain(share)}, {where}{files})")
    names = {name.lower() for name in blend.shares()}
    if len(names) < len(sources):
        raise ValueError(
            "torchtitan knows data sets by their names in lower case, and two of these are then "
            f"the same: {', '.join(blend.shares())}. Rename one (doge-fast export --to json)."
        )
    return (
        f"{_TITAN}dataloader = InterleavedHuggingFaceTextDataLoader.Config(\n"
        f"    sources={sequence(sources, '    ')},\n"
        f"    seed={blend.settings.seed},\n"
        ")\n"
    )


_OLMO = """from olmo_core.data import TokenizerConfig
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


"""


def _olmo_composable(blend: Blend) -> str:
    blend.require("seq_length", why="instances are chunks of so many tokens")
    settings = blend.settings
    specs = [
        f"domain({string(name)}, {plain(share)}, {blend.repetition(name)}, "
        f"{strings(blend.paths_of(name))})"
        for name, share in blend.shares().items()
    ]
    budget = f"    num_tokens={settings.budget_tokens},\n" if settings.budget_tokens else ""
    return (
        f"{_OLMO.replace('{length}', str(settings.seq_length))}"
        "source = MixingInstanceSourceConfig(\n"
        f"    source_specs={sequence(specs, '    ')},\n"
        f"    seed={settings.seed},\n{budget}"
        ")\n"
    )


_FILES = "jsonl, parquet, csv, txt or arrow files, or one Hub id or folder"

TARGETS: Sequence[Target] = (
    Target(
        "datasets",
        "Hugging Face datasets' interleave_datasets",
        _datasets,
        _FILES,
        "datasets 5.2.0, 2026-11-22",
        rows=("documents", "blocks"),
        traps=(
            "stopping_strategy defaults to first_exhausted, which ends with the smallest domain; "
            "all_exhausted repeats the small ones until every row was seen.",
            "With several workers or ranks that rule holds in each process for its own shards.",
        ),
    ),
    Target(
        "torchdata",
        "torchdata's MultiNodeWeightedSampler",
        _torchdata,
        _FILES,
        "torchdata 0.11.0, 2026-11-22",
        rows=("documents", "blocks"),
        traps=("CYCLE_FOREVER never ends: count the steps. Weights must be floats above 0.",),
    ),
    Target(
        "ray",
        "Ray Data's Dataset.mix",
        _ray,
        "jsonl, parquet, csv or txt files",
        "ray 2.60.0, 2026-11-22",
        rows=("documents", "blocks"),
        traps=(
            "stopping_condition defaults to STOP_ON_LONGEST_DROP, under which a domain that ends "
            "leaves the mixture; STOP_ON_SHORTEST keeps the shares and ends with the first.",
            "It mixes blocks of Ray's, each of one domain: give local_shuffle_buffer_size where "
            "batches are drawn.",
        ),
    ),
    Target(
        "litdata",
        "litdata's (and litgpt's) CombinedStreamingDataset",
        _litdata,
        "folder that litdata.optimize wrote",
        "litdata 0.2.76 and litgpt 0.5.13, 2026-11-22",
        rows=("blocks", "documents"),
        traps=(
            "It draws items: as litgpt has it, blocks of --seq-length tokens that a TokensLoader "
            "cuts; with --rows documents, the items that were written.",
            "iterate_over_all is True by default and then refuses weights; without it the epoch "
            "ends with the first folder that does.",
        ),
    ),
    Target(
        "torchtitan",
        "torchtitan's InterleavedHuggingFaceTextDataLoader",
        _torchtitan,
        _FILES,
        "torchtitan 0.3.0, 2026-11-22",
        traps=(
            "It packs each source before it draws.",
            "Every source begins again when it ends (infinite). The text is taken from a row's "
            "text; put the result as dataloader= into the Trainer.Config.",
        ),
    ),
    Target(
        "olmo-core-composable",
        "OLMo-core's MixingInstanceSourceConfig",
        _olmo_composable,
        "token files (.npy) or globs",
        "ai2-olmo-core 3.0.0, 2026-11-22",
        traps=(
            "Give budget_tokens: without num_tokens it makes as much as the sources hold. "
            "max_repetition_factor allows the passes that it needs by the tokens in the file.",
        ),
    ),
)
