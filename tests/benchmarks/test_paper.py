"""The paper's experiments: every command line is one, in an order that can be run."""

import shlex

import pytest

from benchmarks import paper
from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import BaseConfig, ProxyConfig
from doge_fast.pipeline.trainer import RecordedTrainer
from tests.pipeline.corpora import texts, write_jsonl

NAMES = ("code", "prose", "verse")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The words after doge-fast of every line."""
    assert paper.main(words) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines} == {"doge-fast"}
    return [line[1:] for line in lines]


@pytest.mark.parametrize("size", paper.SIZES)
@pytest.mark.parametrize("name", paper.EXPERIMENTS)
def test_every_line_is_a_command_and_reads_what_stands_above(name, size, capsys):
    data = () if size == "paper" else ("--data", "corpus", "--domains", *NAMES)
    seen: set[str] = set()
    for line in printed(capsys, name, "--size", size, "--seeds", "1", *data):
        config = cli.parse(line)
        read = {word for word in line[:-2] if word.startswith("experiments/")}
        assert all(any(word.startswith(run) for run in seen) for word in read), line
        out = str(config.out)
        assert out not in seen
        seen.add(out)
    assert any(run.endswith(".html") for run in seen)


def test_the_papers_universal_experiment(capsys):
    lines = printed(capsys, "universal", "--size", "paper", "--seeds", "2")
    configs = [cli.parse(line) for line in lines]
    proxies = [config for config in configs if isinstance(config, ProxyConfig)]
    bases = [config for config in configs if isinstance(config, BaseConfig)]
    assert [proxy.training.seed for proxy in proxies] == [2]
    proxy = proxies[0]
    assert (proxy.model.model, proxy.training.steps) == ("82M", 10_000)
    assert proxy.sequences_per_domain * len(proxy.corpus.domains) == 126
    assert (proxy.training.learning_rate, proxy.training.min_learning_rate) == (5e-4, 1e-4)
    # Five arms of three sizes, and the references of DoReMi's two lengths.
    assert len(bases) == 5 * 3 + 2
    large = [base.training.learning_rate for base in bases if base.model.model == "684M"]
    assert set(large) == {1.5e-4}


def test_a_target_is_never_trained_on_but_by_the_oracle_and_afterwards(capsys):
    words = ("ood", "--data", "x", "--domains", *NAMES, "--targets", "verse", "--seeds", "0")
    for line in printed(capsys, *words)[:-1]:
        config = cli.parse(line)
        is_trained_on = "verse" in config.corpus.domains
        name = config.out.name
        assert is_trained_on == name.startswith(("base-uniform-with-", "base-tuned-")), name
        assert config.training.learning_rate == (2e-4 if "tuned" in name else 1e-3)


@pytest.mark.usefixtures("one_thread")
def test_a_tiny_one_runs_on_local_text_and_once(tmp_path, monkeypatch):
    for name in NAMES:
        write_jsonl(tmp_path / "corpus" / f"{name}.jsonl", texts(name, 60))
    out = tmp_path / "out"
    words = ["proxy_vs_base", "--data", str(tmp_path / "corpus"), "--domains", *NAMES]
    words += ["--size", "tiny", "--seeds", "0", "--out", str(out), "--run"]
    # To every verb that trains.
    words += ["--steps", "3", "--vocab-size", "320", "--block-size", "16", "--eval-blocks", "4"]
    words += ["--device", "cpu", "--cache-dir", str(tmp_path / "cache"), "--model", "micro"]
    assert paper.main(words) == 0
    runs = sorted(path.name for path in (out / "runs").iterdir())
    assert runs == ["base-doge-seed0", "base-uniform-seed0", "proxy-doge-seed0"]
    assert "learned weights" in (out / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(RecordedTrainer, "go_on", lambda *_: pytest.fail("it was trained already"))
    assert paper.main(words) == 0
    # Those that read a run that is damaged fail.
    (out / "runs" / "proxy-doge-seed0" / records.WEIGHTS).write_text("{")
    assert paper.main(words) == 1
