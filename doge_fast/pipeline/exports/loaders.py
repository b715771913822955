"""Frameworks that take their mixture in Python: text to paste, which runs as it is."""

import math
from collections.abc import Sequence

from doge_fast.pipeline.exports.mixture import Mixture, Rows
from doge_fast.pipeline.exports.target import Target
from doge_fast.pipeline.exports.text import load_dataset, mapping, plain, sequence, string


def _datasets(mixture: Mixture) -> str:
    shares = mixture.shares()
    calls = {name: load_dataset(mixture.paths_of(name)) for name in shares}
    return (
        "from datasets import interleave_datasets, load_dataset\n\n"
        f"domains = {mapping(calls)}\n"
        f"probabilities = {mapping({name: plain(share) for name, share in shares.items()})}\n"
        "dataset = interleave_datasets(\n"
        "    list(domains.values()),\n"
        "    probabilities=[probabilities[name] for name in domains],\n"
        f"    seed={mixture.settings.seed},\n"
        '    stopping_strategy="all_exhausted",\n'
        ")\n"
    )


def _torchdata(mixture: Mixture) -> str:
    shares = mixture.shares()
    calls = {name: load_dataset(mixture.paths_of(name)) for name in shares}
    return (
        "from datasets import load_dataset\n"
        "from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler, StopCriteria\n\n"
        f"domains = {mapping(calls)}\n"
        f"weights = {mapping({name: plain(share) for name, share in shares.items()})}\n"
        "node = MultiNodeWeightedSampler(\n"
        "    {name: IterableWrapper(rows) for name, rows in domains.items()},\n"
        "    weights,\n"
        "    stop_criteria=StopCriteria.CYCLE_FOREVER,\n"
        f"    seed={mixture.settings.seed},\n"
        ")\n"
    )


def _litdata(mixture: Mixture) -> str:
    length = mixture.settings.seq_length
    blend = mixture.weighted_paths()
    # The last token of a block is only predicted.
    loader = f", item_loader=TokensLoader(block_size={length + 1})" if length else ""
    return (
        "from litdata import CombinedStreamingDataset, StreamingDataset"
        f"{', TokensLoader' if length else ''}\n\n"
        f"folders = {sequence([string(path) for _, path in blend])}\n"
        "datasets = [\n"
        f"    StreamingDataset(folder, shuffle=True{loader})\n"
        "    for folder in folders\n"
        "]\n"
        "dataset = CombinedStreamingDataset(\n"
        "    datasets,\n"
        f"    seed={mixture.settings.seed},\n"
        f"    weights={sequence([plain(share) for share, _ in blend], '    ', '()')},\n"
        "    iterate_over_all=False,\n"
        ")\n"
    )


_TITAN_IMPORTS = """from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetMixConfig,
    IndexedJsonlSource,
    SingleDatasetConfig,
    WeightedDataset,
)
from torchtitan.hf_datasets.text_datasets import TextProcessor
"""
_TITAN_DOMAIN = """def domain(*patterns):
    dataset = SingleDatasetConfig(
        source=IndexedJsonlSource.Config(patterns=patterns),
        processor=TextProcessor.Config(),
        post_filters=(lambda sample: sample is not None,),
    )
    return {domain}
"""


def _torchtitan(mixture: Mixture) -> str:
    """Rows of equal length are packed before they are mixed, documents after."""
    is_packed = mixture.rows == "blocks"
    pack = "ConcatThenSplitPackingConfig(dataset={})"
    weighted = [
        f"WeightedDataset(dataset=domain({_strings(mixture, name)}), weight={plain(share)})"
        for name, share in mixture.shares().items()
    ]
    made = _TITAN_DOMAIN.replace("{domain}", pack.format("dataset") if is_packed else "dataset")
    text = (
        f"{_TITAN_IMPORTS}\n\n{made}\n\n"
        f"mixture = DatasetMixConfig(\n    datasets={sequence(weighted, '    ', '()')},\n)\n"
    )
    return text if is_packed else f"{text}mixture = {pack.format('mixture')}\n"


def _strings(mixture: Mixture, name: str) -> str:
    return ", ".join(string(path) for path in mixture.paths_of(name))


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


def _olmo_composable(mixture: Mixture) -> str:
    mixture.require("seq_length", why="instances are chunks of so many tokens")
    specs = []
    for name, share in mixture.shares().items():
        passes = mixture.passes(name, float(share)) or 1
        repetition = max(1.0, math.ceil(passes * 1000) / 1000)
        specs.append(
            f"domain({string(name)}, {plain(share)}, {repetition}, {_strings(mixture, name)})"
        )
    head = _OLMO.replace("{length}", str(mixture.settings.seq_length))
    return (
        f"{head}source = MixingInstanceSourceConfig(\n"
        f"    source_specs={sequence(specs, '    ')},\n"
        f"    seed={mixture.settings.seed},\n"
        ")\n"
    )


_BOTH: tuple[Rows, ...] = ("blocks", "documents")
_FILES = "jsonl, parquet, csv, txt or arrow files, or one Hub id or folder"
_TRAP_OF_ROWS = "It draws rows. Give --rows blocks where all rows hold equally many tokens."

TARGETS: Sequence[Target] = (
    Target(
        "datasets",
        "Hugging Face datasets' interleave_datasets",
        _datasets,
        _FILES,
        rows=_BOTH,
        default_rows=None,
        traps=(
            _TRAP_OF_ROWS,
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
        rows=_BOTH,
        default_rows=None,
        traps=(
            _TRAP_OF_ROWS,
            "CYCLE_FOREVER never ends: count the steps. Weights must be floats above 0.",
        ),
    ),
    Target(
        "litdata",
        "litdata's (and litgpt's) CombinedStreamingDataset",
        _litdata,
        "folder that litdata.optimize wrote",
        rows=_BOTH,
        default_rows=None,
        cuts_blocks=True,
        traps=(
            "It draws items: blocks with --seq-length, whose TokensLoader cuts them.",
            "iterate_over_all is True by default and then refuses weights; without it the epoch "
            "ends with the first folder that does.",
        ),
    ),
    Target(
        "torchtitan",
        "torchtitan's DatasetMixConfig",
        _torchtitan,
        "jsonl files or globs",
        rows=_BOTH,
        traps=(
            "Packed before they are mixed, rows are of one length and the weights token shares; "
            "--rows documents mixes first, with weights for that.",
            "Where a filter rejects rows, the weights count the attempts.",
        ),
    ),
    Target(
        "olmo-core-composable",
        "OLMo-core's MixingInstanceSourceConfig",
        _olmo_composable,
        "token files (.npy) or globs",
        traps=(
            "Ratios are of instances of sequence_length, so of tokens.",
            "Give budget_tokens, and max_repetition_factor allows the passes that it needs by the "
            "tokens in the file.",
        ),
    ),
)
