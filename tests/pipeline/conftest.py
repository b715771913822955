"""Corpora of seconds: one to train on, with settings, and one in every layout that is read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DoReMiConfig,
    ModelConfig,
    ProxyConfig,
    SelectConfig,
    TrainingConfig,
)
from doge_fast.pipeline.domains import Corpus, load_corpus
from doge_fast.pipeline.doremi import learn_by_excess_loss
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.selection import measure_cancellation
from tests.pipeline.corpora import texts, write_jsonl, write_parquet
from tests.pipeline.stages import NAMES


@pytest.fixture(scope="session", autouse=True)
def one_thread_throughout() -> Iterator[None]:
    """As `one_thread`, for fixtures of the whole session that train too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of four domains, 60 documents each, 200 of prose."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in NAMES:
        write_jsonl(folder / f"{name}.jsonl", texts(name, 200 if name == "prose" else 60))
    return folder


@pytest.fixture(scope="session")
def blocks_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def settings(small_corpus: Path, blocks_cache: Path) -> dict[str, Any]:
    """Corpus, model and training of a run that takes a second."""
    return {
        "corpus": CorpusConfig(
            data=str(small_corpus),
            vocab_size=320,
            block_size=16,
            validation_fraction=0.2,
            cache_dir=blocks_cache,
        ),
        "model": ModelConfig(model="micro"),
        "training": TrainingConfig(
            steps=8,
            learning_rate=3e-3,
            warmup_steps=1,
            eval_blocks=8,
            save_every=0,
            device="cpu",
        ),
    }


@pytest.fixture
def configured(settings: dict[str, Any], tmp_path: Path) -> Callable[..., Callable[..., Any]]:
    """Of a stage's class: what makes its configuration, in a directory of the test's.

    Keywords replace its settings, those of corpus, model and training by their own names.
    """

    def configured(stage: type, **defaults: Any) -> Callable[..., Any]:
        name = stage.__name__.removesuffix("Config").lower()

        def make(out: str = name, **changes: Any) -> Any:
            return stage(out=tmp_path / out, **_changed(settings, defaults | changes))

        return make

    return configured


@pytest.fixture
def stage(
    configured: Callable[..., Callable[..., Any]], trained_base: Path
) -> Callable[[str], tuple[Callable[[Any], Any], Callable[..., Any]]]:
    """Of a verb's name: its function, and what makes its configuration."""
    kinds: dict[str, tuple[Callable[[Any], Any], type, dict[str, Any]]] = {
        "proxy": (learn_weights, ProxyConfig, {"sequences_per_domain": 2}),
        "base": (train_base, BaseConfig, {"batch_size": 8}),
        "doremi": (
            learn_by_excess_loss,
            DoReMiConfig,
            {"batch_size": 8, "reference": trained_base},
        ),
        "select": (measure_cancellation, SelectConfig, {"batch_size": 8, "strategies": ("low5",)}),
    }

    def stage(name: str) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
        call, config, defaults = kinds[name]
        return call, configured(config, **defaults)

    return stage


@pytest.fixture
def proxy(configured: Callable[..., Callable[..., Any]]) -> Callable[..., ProxyConfig]:
    """Makes a ProxyConfig."""
    return configured(ProxyConfig, sequences_per_domain=2)


@pytest.fixture
def base(configured: Callable[..., Callable[..., Any]]) -> Callable[..., BaseConfig]:
    """Makes a BaseConfig."""
    return configured(BaseConfig, batch_size=8, log_every=1)


@pytest.fixture(scope="session")
def trained_base(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of `base()`; who changes it takes a copy."""
    out = tmp_path_factory.mktemp("trained") / "base"
    return train_base(BaseConfig(out=out, batch_size=8, log_every=1, **settings)).path


@pytest.fixture(scope="session")
def trained_proxy(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of `proxy()`; who changes it takes a copy."""
    out = tmp_path_factory.mktemp("trained") / "proxy"
    return learn_weights(ProxyConfig(out=out, sequences_per_domain=2, **settings)).path


def _changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with others, and what is none of theirs."""
    rest, parts = dict(changes), {}
    for part, values in settings.items():
        fields = {key: rest.pop(key) for key in changes if key in vars(values)}
        parts[part] = replace(values, **fields)
    return parts | rest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains in three layouts: files that name splits, one parquet, text."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "code" / "train-0.jsonl", texts("code", 30))
    write_jsonl(folder / "code" / "train-1.jsonl", texts("more code", 30))
    write_jsonl(folder / "code" / "validation.jsonl", texts("held-out code", 9))
    write_parquet(folder / "prose.parquet", text=texts("prose", 50), source=["x"] * 50)
    write_jsonl(folder / "verse" / "anything.jsonl", texts("verse", 40))
    (folder / "README.md").write_text("not a domain")
    return folder


@pytest.fixture(scope="session")
def config(data: Path, blocks_cache: Path) -> CorpusConfig:
    shape = {"vocab_size": 300, "block_size": 16, "validation_fraction": 0.1}
    return CorpusConfig(data=str(data), cache_dir=blocks_cache, **shape)


@pytest.fixture
def load(config: CorpusConfig, tmp_path: Path) -> Callable[..., Corpus]:
    """Loads what lies in the test's folder, or at a place in it; keywords replace settings."""

    def load(place: str = "", *, is_measured: bool = False, **changes: Any) -> Corpus:
        asked = replace(config, data=str(tmp_path / place), **changes)
        return load_corpus(asked, is_measured=is_measured)

    return load


@pytest.fixture(scope="session")
def corpus(config: CorpusConfig) -> Corpus:
    return load_corpus(config)


@pytest.fixture(scope="session")
def mixed(config: CorpusConfig) -> Corpus:
    """One held-out target, and "mix"."""
    return load_corpus(config, targets=["verse", "mix"])
