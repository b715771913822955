"""Exports in the hands of those who take them: each framework's own code reads and draws.

Packages that are not installed are skipped; `test_exports.py` checks the same targets by form.
"""

import importlib
import itertools
import json
import math
import shlex
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from doge_fast.pipeline.exports import export
from doge_fast.pipeline.exports.text import arguments
from tests.packages import installed
from tests.processes import printed_by

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


def tokens_of(documents: Iterable[str]) -> list[str]:
    return [word for document in documents for word in document.split()]


POSITIVE = {name: weight for name, weight in WEIGHTS.items() if weight}


def documents_of(weights: Mapping[str, float]) -> dict[str, float]:
    parts = {name: weight / LENGTHS[name] for name, weight in weights.items()}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{domain: file of documents}; more of them than are drawn."""
    folder = tmp_path_factory.mktemp("rows")
    paths = {}
    for name, length in LENGTHS.items():
        line = json.dumps({"text": " ".join([name] * length)}) + "\n"
        paths[name] = str(folder / f"{name}.jsonl")
        Path(paths[name]).write_text(line * 1200)
    return paths


@pytest.fixture
def hf_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = installed("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# datasets.


@pytest.mark.usefixtures("hf_cache")
@pytest.mark.parametrize("kind", ["documents", "blocks"])
def test_datasets_draws_the_learned_shares(kind: Any, rows: dict[str, str]) -> None:
    text = export(WEIGHTS, to="datasets", paths=rows, rows=kind, mean_doc_tokens=LENGTHS).text
    dataset = run(text)["dataset"]
    documents = [row["text"] for row in itertools.islice(dataset, DRAWN)]
    expected = documents_of(POSITIVE) if kind == "documents" else POSITIVE
    assert_shares((document.split()[0] for document in documents), expected)
    if kind == "documents":
        # What was learned is the share of tokens; one of its draws is a whole document.
        assert_shares(tokens_of(documents), POSITIVE, slack=5 * math.sqrt(max(LENGTHS.values())))


@pytest.mark.parametrize("count", [3, 7, 64])
def test_datasets_takes_the_sum_of_any_shares(count: int) -> None:
    datasets = installed("datasets")
    draw = np.random.default_rng(count)
    weights = {f"d{i}": float(weight) for i, weight in enumerate(draw.dirichlet(np.ones(count)))}
    probabilities = json.loads(export(weights, to="json", decimals=4).text)
    rounded = [round(weights[name], 4) for name in probabilities]
    children = [datasets.Dataset.from_dict({"name": [name] * 3}) for name in probabilities]
    mixed = datasets.interleave_datasets(
        children, probabilities=list(probabilities.values()), seed=0
    )
    assert set(mixed["name"]) <= set(probabilities)
    # What each weight rounded by itself gives: the reason for the largest remainder.
    if sum(map(Decimal, map(str, rounded))) != 1:
        with pytest.raises(ValueError, match="do not sum to 1"):
            datasets.interleave_datasets(children, probabilities=rounded, seed=0)


# torchdata.


@pytest.mark.usefixtures("hf_cache")
def test_torchdata_draws_the_learned_shares(rows: dict[str, str]) -> None:
    installed("torchdata.nodes")
    text = export(WEIGHTS, to="torchdata", paths=rows, mean_doc_tokens=LENGTHS).text
    node = run(text)["node"]
    node.reset()
    drawn = [next(node)["text"].split()[0] for _ in range(DRAWN)]
    assert_shares(drawn, documents_of(POSITIVE))


# litdata.


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{domain: folder of litdata's}, the domain's index as every token."""
    litdata = installed("litdata")
    writer = importlib.import_module("litdata.streaming.writer")
    paths = {}
    for index, name in enumerate(POSITIVE):
        paths[name] = str(tmp_path_factory.mktemp(name))
        loader = litdata.TokensLoader(block_size=9)
        binary = writer.BinaryWriter(paths[name], chunk_bytes="1MB", item_loader=loader)
        for document in range(300):
            binary.add_item(document, torch.full((30,), index, dtype=torch.int32))
        binary.done()
        binary.merge()
    return paths


# Its own: it reads a memory map without a copy.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_litdata_draws_the_learned_shares(tokens: dict[str, str]) -> None:
    installed("litdata")
    text = export(WEIGHTS, to="litdata", paths=tokens, seq_length=8).text
    dataset = run(text)["dataset"]
    names = list(POSITIVE)
    blocks = list(itertools.islice(dataset, DRAWN))
    assert all(block.shape == (9,) for block in blocks)
    assert_shares((names[int(block[0])] for block in blocks), POSITIVE)


def test_litdata_is_asked_for_the_blocks_that_litgpt_draws(tokens: dict[str, str]) -> None:
    # The lengths of documents are known, and are not what is drawn.
    with pytest.raises(ValueError, match=r"needs seq_length.*else --rows documents"):
        export(WEIGHTS, to="litdata", paths=tokens, mean_doc_tokens=LENGTHS)


# torchtitan.


class Words:
    """A tokenizer whose tokens are the domains."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [list(POSITIVE).index(word) for word in text.split()]


@pytest.mark.usefixtures("hf_cache")
@pytest.mark.filterwarnings("ignore")
def test_torchtitan_draws_the_learned_shares_of_tokens(rows: dict[str, str]) -> None:
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


# Ray Data: rows are dealt, so no share is off by more than one of its slices.


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_ray_draws_the_learned_shares(rows: dict[str, str]) -> None:
    ray = installed("ray")
    if not hasattr(installed("ray.data").Dataset, "mix"):
        pytest.skip("this ray has no Dataset.mix")
    text = export(WEIGHTS, to="ray", paths=rows, mean_doc_tokens=LENGTHS).text
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", configure_logging=False)
    try:
        drawn = [row["text"].split()[0] for row in run(text)["dataset"].iter_rows()]
    finally:
        ray.shutdown()
    counts = Counter(drawn)
    assert all(
        abs(counts[name] / len(drawn) - share) < 0.01
        for name, share in documents_of(POSITIVE).items()
    )


# Tuners: their own arguments and their own mixing.


@pytest.mark.filterwarnings("ignore")
def test_llama_factory_draws_the_learned_shares() -> None:
    data_arguments = installed("llamafactory.hparams.data_args").DataArguments
    merge = installed("llamafactory.data.data_utils").merge_dataset
    datasets = installed("datasets")
    text = export(WEIGHTS, to="llama-factory", mean_doc_tokens=LENGTHS).text
    given = data_arguments(**yaml.safe_load(text))
    children = [datasets.Dataset.from_dict({"name": [name] * 1200}) for name in given.dataset]
    drawn = merge(children, given, seed=0)["name"]
    assert_shares(drawn[:DRAWN], documents_of(POSITIVE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("hf_cache")
def test_swift_draws_the_learned_shares(tmp_path: Path) -> None:
    load_dataset = installed("swift.dataset.loader").load_dataset
    paths = {}
    for name in POSITIVE:
        line = {"messages": [{"role": role, "content": name} for role in ("user", "assistant")]}
        paths[name] = str(tmp_path / f"{name}.jsonl")
        Path(paths[name]).write_text(f"{json.dumps(line)}\n" * 1200)
    words = export(WEIGHTS, to="ms-swift", paths=paths, mean_doc_tokens=LENGTHS).text
    train, _ = load_dataset(
        arguments(words, "--dataset"),
        interleave_prob=[float(share) for share in arguments(words, "--interleave_prob")],
        stopping_strategy=arguments(words, "--stopping_strategy")[0],
    )
    drawn = [row["messages"][0]["content"] for row in train.select(range(DRAWN))]
    assert_shares(drawn, documents_of(POSITIVE))


def test_dataflex_deals_the_learned_shares() -> None:
    module = installed("dataflex.train.dataset.mixed_proportion_manager")
    datasets = installed("datasets")
    value = yaml.safe_load(export(WEIGHTS, to="dataflex").text)
    children = {
        name: datasets.Dataset.from_dict({"name": [name] * 500})
        for name in value["dataset"].split(",")
    }
    manager = module.MixedProportionManager(
        children, value["mixture_sample_rule"], value["init_mixture_proportions"]
    )
    drawn = manager.rebuild(1000)
    counts = Counter(drawn[i]["name"] for i in range(len(drawn)))
    assert counts == {name: 1000 * weight for name, weight in POSITIVE.items()}


# Megatron.


@pytest.mark.filterwarnings("ignore")
def test_energon_reads_the_blend(tmp_path: Path) -> None:
    load = installed("megatron.energon.dataset_config").load_config
    path = installed("megatron.energon.epathlib").EPath(tmp_path / "blend.yaml")
    file = tmp_path / "blend.yaml"
    file.write_text(export(WEIGHTS, to="energon", paths=PREFIXES, rows="blocks").text)
    found = load(path, default_type=None, default_kwargs={"path": path})
    blend = [(each.path, each.weight) for each in found.splits["train"].blend]
    assert blend == [(PREFIXES[name], weight) for name, weight in POSITIVE.items()]


@pytest.fixture(scope="module")
def megatron() -> Any:
    installed("megatron.core")
    return types.SimpleNamespace(
        blend=installed("megatron.core.datasets.utils").get_blend_from_list,
        helpers=installed("megatron.core.datasets.helpers_cpp"),
        config=installed("megatron.core.datasets.blended_megatron_dataset_config"),
    )


PREFIXES = {name: f"/data/{name}_text_document" for name in POSITIVE}
BLEND = (list(PREFIXES.values()), list(POSITIVE.values()))


def words_of(target: str) -> list[str]:
    """The list that Megatron makes of an export, by the rules of its argument parser."""
    text = export(WEIGHTS, to=target, paths=PREFIXES).text
    if target == "megatron-json":
        value = json.loads(text)
        assert [value["valid"], value["test"]] == [None, None]
        return list(value["train"])
    if target == "megatron":
        return shlex.split(text)[1:]
    if target == "curator":
        text = printed_by("bash", "-c", text)
    return text.split()


@pytest.mark.parametrize("target", ["megatron", "megatron-file", "megatron-json", "curator"])
def test_megatron_reads_the_blend(target: str, megatron: Any) -> None:
    assert megatron.blend(words_of(target)) == BLEND


def test_megatron_knows_a_split_without_data(megatron: Any) -> None:
    value = json.loads(export(WEIGHTS, to="megatron-json", paths=PREFIXES).text)
    assert megatron.blend(value["test"]) is None


def test_megatron_draws_the_learned_shares(megatron: Any) -> None:
    prefixes, weights = megatron.blend(words_of("megatron-file"))
    config = megatron.config.BlendedMegatronDatasetConfig(
        random_seed=0, sequence_length=8, blend=(prefixes, weights), split="1,0,0"
    )
    assert config.blend == BLEND
    index = np.zeros(DRAWN, dtype=np.int16)
    sample = np.zeros(DRAWN, dtype=np.int64)
    megatron.helpers.build_blending_indices(
        index, sample, np.asarray(weights), len(weights), DRAWN, False
    )
    counts = np.bincount(index)
    # Not drawn but dealt: never more than one off.
    assert np.abs(counts - DRAWN * np.asarray(list(POSITIVE.values()))).max() <= 1


def test_bridge_holds_the_same_blend() -> None:
    cfg = types.SimpleNamespace(dataset=types.SimpleNamespace())
    text = export(WEIGHTS, to="megatron-bridge", paths=PREFIXES).text
    exec(compile(text, "<exported>", "exec"), {"cfg": cfg})
    assert tuple(cfg.dataset.blend) == BLEND


@pytest.mark.parametrize("phase", [1, 2])
def test_phases_are_arrays_that_a_shell_hands_over(phase: int, megatron: Any) -> None:
    record = {
        "domains": [{"name": name, "weight": weight} for name, weight in POSITIVE.items()],
        "phases": [
            {"first_step": 0, "weights": POSITIVE},
            {"first_step": 50, "weights": {"book": 0.1, "code": 0.2, "web": 0.7}},
        ],
    }
    text = export(record, to="megatron-phases", paths=PREFIXES, valid_paths=PREFIXES).text
    script = f'{text}\nprintf "%s\\n" "${{PHASE_{phase}[@]}}"'
    words = printed_by("bash", "-c", script).split()
    assert words[:2] == ["--phase-transition-iterations", "50"]
    first = words.index("--train-data-path") + 1
    blend = megatron.blend(words[first : words.index("--valid-data-path")])
    assert blend == (BLEND[0], list(record["phases"][phase - 1]["weights"].values()))  # type: ignore[index]


# MosaicML Streaming, and LLM Foundry which makes the same streams.


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{domain: folder of MDS shards}, with a split train below."""
    streaming = installed("streaming")
    paths = {}
    for name in POSITIVE:
        paths[name] = str(tmp_path_factory.mktemp(name))
        with streaming.MDSWriter(out=f"{paths[name]}/train", columns={"name": "str"}) as writer:
            for _ in range(400):
                writer.write({"name": name})
    return paths


@pytest.mark.filterwarnings("ignore")
def test_mosaic_draws_the_learned_shares_unrounded(shards: dict[str, str]) -> None:
    trains = {name: f"{path}/train" for name, path in shards.items()}
    learned = {"book": 0.276, "code": 0.375, "web": 0.349}
    text = export(
        learned,
        to="mosaic-streaming",
        paths=trains,
        seq_length=8,
        # Stratified batches of 20 would hold .3, .4 and .3.
        batch_size=20,
        budget_tokens=8 * 1000,
    ).text
    counts = Counter(sample["name"] for sample in run(text)["dataset"])
    assert counts == {name: round(1000 * weight) for name, weight in learned.items()}


@pytest.mark.filterwarnings("ignore")
def test_foundry_makes_streams_of_the_config(shards: dict[str, str]) -> None:
    streaming = installed("streaming")
    text = export(WEIGHTS, to="llm-foundry", paths=shards, seq_length=8).text
    dataset = yaml.safe_load(text)["train_loader"]["dataset"]
    made = streaming.StreamingDataset(
        streams=[streaming.Stream(**stream) for stream in dataset["streams"].values()],
        batching_method=dataset["batching_method"],
        shuffle=dataset["shuffle"],
        epoch_size=1000,
        batch_size=20,
    )
    counts = Counter(sample["name"] for sample in made)
    assert counts == {name: 1000 * weight for name, weight in POSITIVE.items()}


# OLMo-core.


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{domain: file of 2000 tokens}, the domain's index as every token."""
    folder = tmp_path_factory.mktemp("arrays")
    for index, name in enumerate(POSITIVE):
        np.full(2000, index + 1, dtype=np.uint32).tofile(folder / f"{name}.npy")
    return {name: str(folder / f"{name}.npy") for name in POSITIVE}


def held(tokens: int) -> dict[str, Any]:
    return {
        "domains": [
            {"name": name, "weight": weight, "tokens": tokens} for name, weight in WEIGHTS.items()
        ]
    }


@pytest.mark.filterwarnings("ignore")
def test_olmo_selects_the_tokens_of_the_learned_shares(
    arrays: dict[str, str], tmp_path: Path
) -> None:
    mixture = installed("olmo_core.data.source_mixture")
    data = installed("olmo_core.data")
    text = export(held(2000), to="olmo-core", paths=arrays, budget_tokens=8000).text
    path = tmp_path / "sources.yaml"
    path.write_text(text)
    built = mixture.SourceMixtureDatasetConfig(
        source_list=mixture.SourceMixtureList.from_yaml(str(path)),
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


@pytest.mark.filterwarnings("ignore")
def test_olmo_mixes_instances_at_the_learned_shares(arrays: dict[str, str], tmp_path: Path) -> None:
    installed("olmo_core.data.composable")
    text = export(
        held(2000), to="olmo-core-composable", paths=arrays, seq_length=8, budget_tokens=3000
    ).text
    source = run(text)["source"].build(tmp_path)
    names = list(POSITIVE)
    drawn = [names[int(source[i]["input_ids"][0]) - 1] for i in range(len(source))]
    # The budget, though the sources hold 6000 tokens.
    assert len(drawn) * 8 == pytest.approx(3000, abs=24)
    counts = Counter(drawn)
    for name, weight in POSITIVE.items():
        assert counts[name] == pytest.approx(len(drawn) * weight, abs=2)


# By form, where the framework cannot be installed beside this one.


def _nanotron(value: Any) -> list[float]:
    (stage,) = value["data_stages"]
    assert stage["start_training_step"] == 1
    dataset = stage["data"]["dataset"]
    assert isinstance(dataset["dataset_folder"], list)
    return list(dataset["dataset_weights"])


def _levanter(value: Any) -> list[float]:
    data = value["data"]
    assert set(data["train_weights"]) <= set(data["components"])
    assert all(each["source"]["type"] == "url" for each in data["components"].values())
    return list(data["train_weights"].values())


def _fast_llm(value: Any) -> list[float]:
    # Its trainer asks for the name of the phase, and refuses a config without it.
    assert set(value["data"]["datasets"]) == {"training"}
    training = value["data"]["datasets"]["training"]
    assert training["type"] == "blended"
    assert [set(each) for each in training["datasets"]] == [{"type", "path"}] * 3
    return list(training["weights"])


def _neox(value: Any) -> list[float]:
    assert not value["weight_by_num_documents"]
    for split in ("train", "valid", "test"):
        assert len(value[f"{split}-data-paths"]) == len(value[f"{split}-data-weights"]) > 0
    return list(value["train-data-weights"])


def _juicer(value: Any) -> list[float]:
    # Without it data-juicer takes every weight for one.
    assert value["dataset"]["max_sample_num"] > 0
    configs = value["dataset"]["configs"]
    assert all(each["type"] == "local" for each in configs)
    return [each["weight"] for each in configs]


SCHEMAS: dict[str, Callable[[Any], list[float]]] = {
    "nanotron": _nanotron,
    "levanter": _levanter,
    "fast-llm": _fast_llm,
    "neox": _neox,
    "data-juicer": _juicer,
}


@pytest.mark.parametrize("target", SCHEMAS)
def test_yaml_has_the_form_that_is_asked_for(target: str) -> None:
    held_out = {"book": "/valid/book"} if target == "neox" else {}
    text = export(
        WEIGHTS,
        to=target,
        paths=PREFIXES,
        valid_paths=held_out,
        test_paths=held_out,
        rows="blocks",
        seq_length=8,
        budget_tokens=8000,
    ).text
    weights = SCHEMAS[target](yaml.safe_load(text))
    assert all(type(weight) is float and weight > 0 for weight in weights)
    assert weights == list(POSITIVE.values())


def test_python_texts_are_python() -> None:
    for target in ("mosaic-streaming", "olmo-core-composable", "litdata"):
        text = export(WEIGHTS, to=target, paths=PREFIXES, seq_length=8, batch_size=64).text
        compile(text, target, "exec")
        assert max(len(line) for line in text.splitlines()) <= 100, target
