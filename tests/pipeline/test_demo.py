"""The demo makes the runs that it tells of, at equal tokens and seeds, and can be repeated."""

from pathlib import Path

import pytest

from doge_fast.pipeline import records
from doge_fast.pipeline.config import DemoConfig
from doge_fast.pipeline.demo import story, tell


@pytest.fixture
def demo(tmp_path: Path, small_corpus: Path, blocks_cache: Path) -> DemoConfig:
    return DemoConfig(
        out=tmp_path / "demo",
        data=str(small_corpus),
        target="verse",
        proxy_steps=4,
        base_steps=4,
        sequences_per_domain=1,
        batch_size=4,
        eval_blocks=4,
        device="cpu",
        cache_dir=blocks_cache,
    )


def test_the_story_compares_at_equal_tokens_and_seeds(demo: DemoConfig) -> None:
    runs = story(demo)
    assert [proxy.target for proxy in runs.proxies] == [("universal",), ("verse",)]
    assert len({base.out for base in runs.bases}) == len(runs.bases) == 5
    first = runs.bases[0]
    for base in runs.bases:
        assert (base.training, base.batch_size) == (first.training, first.batch_size)
        assert (base.model, base.corpus) == (first.model, first.corpus)
    # Every arm with the target left out has a uniform one to be compared with.
    assert [base.weights for base in runs.bases if base.targets] == [
        "uniform",
        str(runs.proxies[1].out),
    ]


@pytest.mark.exhaustive
def test_the_demo_ends_with_a_table_and_a_page(demo: DemoConfig) -> None:
    lines = tell(demo)
    page = Path(lines[-1].removeprefix("report: "))
    assert page.is_file()
    assert page.parent == demo.out
    table = lines[0]
    for base in story(demo).bases:
        measured = records.read_evaluation(base.out)
        assert set(measured["loss"]) == {"code", "prose", "table", "verse"}
    for name in ("code", "prose", "table", "verse", "uniform"):
        assert name in table
    tokenizers = {
        records.read_config(base.out)["corpus"]["tokenizer_sha256"] for base in story(demo).bases
    }
    assert len(tokenizers) == 1
    models = {file: file.stat().st_mtime_ns for file in demo.out.rglob("*.safetensors")}
    assert len(models) == 7
    assert tell(demo)[0] == table
    assert {file: file.stat().st_mtime_ns for file in models} == models
