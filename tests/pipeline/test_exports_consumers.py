"""Exports in the hands of those who take them: each framework's own code reads and draws.

Packages that are not installed are skipped; `test_exports.py` checks the same targets by form.
"""

import importlib
import itertools
import math
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doge_fast.pipeline.exports import export
from tests.packages import installed
from tests.pipeline.corpora import write_jsonl

# What they warn of is their own.
pytestmark = pytest.mark.filterwarnings("ignore")
# The text of a document says its domain; those of book are ten times as long.
WEIGHTS = {"book": 0.5, "code": 0.2, "web": 0.3, "junk": 0.0}
LENGTHS = {"book": 100, "code": 10, "web": 20}
DRAWN = 1500


def run(text: str) -> dict[str, Any]:
    """The names that an exported Python text defines."""
    names: dict[str, Any] = {}
    exec(compile(text, "<exported>", "exec"), names)
    return names


def assert_shares(drawn: Iterable[str], expected: Mapping[str, float], slack: float = 5.0) -> None:
    """Counts of a sample are within `slack` standard deviations of a multinomial's."""
    counts = Counter(drawn)
    total = sum(counts.values())
    assert total
    for name, share in expected.items():
        deviation = math.sqrt(total * share * (1 - share))
        assert abs(counts[name] - total * share) <= slack * deviation + 1, (name, counts)
    assert set(counts) == set(expected)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = installed("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


POSITIVE = {name: weight for name, weight in WEIGHTS.items() if weight}


def documents_of(weights: Mapping[str, float]) -> dict[str, float]:
    parts = {name: weight / LENGTHS[name] for name, weight in weights.items()}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{domain: file of documents}; more of them than are drawn."""
    folder = tmp_path_factory.mktemp("rows")
    texts = {name: " ".join([name] * length) for name, length in LENGTHS.items()}
    files = {name: folder / f"{name}.jsonl" for name in texts}
    return {name: str(write_jsonl(file, [texts[name]] * 1200)) for name, file in files.items()}


@pytest.mark.parametrize("kind", ["documents", "blocks"])
def test_datasets_draws_the_learned_shares(kind, rows):
    text = export(WEIGHTS, to="datasets", paths=rows, rows=kind, mean_doc_tokens=LENGTHS).text
    dataset = run(text)["dataset"]
    documents = [row["text"] for row in itertools.islice(dataset, DRAWN)]
    expected = documents_of(POSITIVE) if kind == "documents" else POSITIVE
    assert_shares((document.split()[0] for document in documents), expected)
    if kind == "documents":
        # What was learned is the share of tokens; one of its draws is a whole document.
        tokens = " ".join(documents).split()
        assert_shares(tokens, POSITIVE, slack=5 * math.sqrt(max(LENGTHS.values())))


def test_litdata_draws_the_learned_shares(tmp_path):
    litdata = installed("litdata")
    writer = importlib.import_module("litdata.streaming.writer")
    paths = {name: str(tmp_path / name) for name in POSITIVE}
    for index, path in enumerate(paths.values()):
        loader = litdata.TokensLoader(block_size=9)
        binary = writer.BinaryWriter(path, chunk_bytes="1MB", item_loader=loader)
        for document in range(300):
            # The domain's index is every token.
            binary.add_item(document, torch.full((30,), index, dtype=torch.int32))
        binary.done()
        binary.merge()
    text = export(WEIGHTS, to="litdata", paths=paths, seq_length=8).text
    dataset = run(text)["dataset"]
    names = list(POSITIVE)
    blocks = list(itertools.islice(dataset, DRAWN))
    assert all(block.shape == (9,) for block in blocks)
    assert_shares((names[int(block[0])] for block in blocks), POSITIVE)


class Words:
    """A tokenizer whose tokens are the domains."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [list(POSITIVE).index(word) for word in text.split()]


def test_torchtitan_draws_the_learned_shares_of_tokens(rows):
    loader = installed("torchtitan.hf_datasets.text_datasets").InterleavedHuggingFaceTextDataLoader
    text = export(WEIGHTS, to="torchtitan", paths=rows).text
    made = loader(
        run(text)["dataloader"],
        dp_world_size=1,
        dp_rank=0,
        tokenizer=Words(),
        seq_len=8,
        local_batch_size=1,
    )
    names = list(POSITIVE)
    drawn = [names[int(labels[0, 0])] for _, labels in itertools.islice(made, DRAWN)]
    assert_shares(drawn, POSITIVE)


PREFIXES = {name: f"/data/{name}_text_document" for name in POSITIVE}
BLEND = (list(PREFIXES.values()), list(POSITIVE.values()))


def test_megatron_draws_the_learned_shares():
    installed("megatron.core")
    blend_of = installed("megatron.core.datasets.utils").get_blend_from_list
    helpers = installed("megatron.core.datasets.helpers_cpp")
    configs = installed("megatron.core.datasets.blended_megatron_dataset_config")
    words = export(WEIGHTS, to="megatron", paths=PREFIXES).text.split()[1:]
    prefixes, weights = blend_of(words)
    config = configs.BlendedMegatronDatasetConfig(
        random_seed=0, sequence_length=8, blend=(prefixes, weights), split="1,0,0"
    )
    assert config.blend == BLEND
    index = np.zeros(DRAWN, dtype=np.int16)
    sample = np.zeros(DRAWN, dtype=np.int64)
    helpers.build_blending_indices(index, sample, np.asarray(weights), len(weights), DRAWN, False)
    counts = np.bincount(index)
    # Not drawn but dealt: never more than one off.
    assert np.abs(counts - DRAWN * np.asarray(list(POSITIVE.values()))).max() <= 1


def test_bridge_holds_the_same_blend():
    cfg = types.SimpleNamespace(dataset=types.SimpleNamespace())
    text = export(WEIGHTS, to="megatron-bridge", paths=PREFIXES).text
    exec(compile(text, "<exported>", "exec"), {"cfg": cfg})
    assert tuple(cfg.dataset.blend) == BLEND


def test_mosaic_draws_the_learned_shares_unrounded(tmp_path):
    streaming = installed("streaming")
    paths = {name: str(tmp_path / name) for name in POSITIVE}
    for name, path in paths.items():
        with streaming.MDSWriter(out=path, columns={"name": "str"}) as writer:
            for _ in range(400):
                writer.write({"name": name})
    learned = {"book": 0.276, "code": 0.375, "web": 0.349}
    text = export(
        learned,
        to="mosaic-streaming",
        paths=paths,
        seq_length=8,
        # Stratified batches of 20 would hold .3, .4 and .3.
        batch_size=20,
    ).text
    counts = Counter(sample["name"] for sample in run(text)["dataset"])
    total = sum(counts.values())
    assert counts == pytest.approx(
        {name: total * weight for name, weight in learned.items()}, abs=1
    )


def test_olmo_selects_the_tokens_of_the_learned_shares(tmp_path):
    mixture = installed("olmo_core.data.source_mixture")
    data = installed("olmo_core.data")
    paths = {name: str(tmp_path / f"{name}.npy") for name in POSITIVE}
    for index, path in enumerate(paths.values()):
        np.full(2000, index + 1, dtype=np.uint32).tofile(path)
    sources = tmp_path / "sources.yaml"
    sources.write_text(export(WEIGHTS, to="olmo-core", paths=paths).text)
    built = mixture.SourceMixtureDatasetConfig(
        source_list=mixture.SourceMixtureList.from_yaml(str(sources)),
        requested_tokens=8000,
        global_batch_size=80,
        quiet=True,
        render_tables=False,
    ).build(npdtype=data.NumpyDatasetDType.uint32.as_np_dtype(), sequence_length=8)
    selected = {
        source.name: sum(each.tokens for each in source.path_tokens) for source in built.sources
    }
    # Twice the tokens of book: it would refuse without the repetition that is written.
    for name, weight in POSITIVE.items():
        assert selected[name] == pytest.approx(8000 * weight, abs=8)
