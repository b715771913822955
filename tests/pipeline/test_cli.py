"""The command line says what the dataclasses say, and refuses in one sentence."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import BaseConfig, EvaluateConfig, ProxyConfig, ReportConfig
from tests.pipeline.stages import words_of


def fields_of(config: type) -> list[str]:
    """Names of the fields, those of nested dataclasses in place of theirs."""
    names = []
    for field in dataclasses.fields(config):
        is_nested = dataclasses.is_dataclass(field.type)
        names += fields_of(cast(type, field.type)) if is_nested else [field.name]
    return names


def test_the_verbs_run_one_after_the_other(
    proxy: Callable[..., ProxyConfig],
    base: Callable[..., BaseConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned, trained = proxy(), base()
    words = ["--target", "verse", "--sequences-per-domain", "2"]
    assert cli.main(["proxy", *words_of(learned), *words]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{learned.out.name}, for verse: most goes to ")
    assert told.endswith(f"weights: {learned.out / 'weights.json'}\n")
    assert records.read_weights(learned.out)["target"] == {"verse": 1.0}
    words = ["--weights", str(learned.out), "--targets", "verse", "--batch-size", "8"]
    assert cli.main(["base", *words_of(trained), *words]) == 0
    assert capsys.readouterr().out == f"model: {trained.out / 'model'}\n"
    assert cli.main(["evaluate", str(trained.out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [
        "domain",
        *("-" * len(printed.splitlines()[1]), "code", "prose", "table", "verse", "average"),
    ]
    average = records.read_evaluation(trained.out)["average_perplexity"]
    assert f"{average:.2f}" in printed


def test_flags_are_the_fields(tmp_path: Path) -> None:
    words = "proxy --data DIR --target ca --out runs/x --model mini --steps 300 --mu 0.05"
    config = cli._parse(words.split())
    assert isinstance(config, ProxyConfig)
    assert (config.corpus.data, config.target, config.mu) == ("DIR", ("ca",), 0.05)
    assert (config.model.model, config.training.steps) == ("mini", 300)
    assert config.out == Path("runs/x")
    config = cli._parse(["report", "--runs", "a", "b"])
    assert config == ReportConfig(runs=(Path("a"), Path("b")))
    assert cli._parse(["experiment", "ood", "--seeds", "0", "1"]).seeds == (0, 1)
    config = cli._parse(["evaluate", "a", "--domains", "x", "y"])
    assert config == EvaluateConfig(run=Path("a"), domains=("x", "y"))
    assert cli._parse(["base", "--out", "x", "--pretrained"]).model.pretrained


@pytest.mark.parametrize(
    "verb",
    ["demo", "proxy", "base", "doremi", "select", "evaluate", "report", "experiment", "export"],
)
def test_every_verb_has_help_for_every_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: doge-fast {verb}" in printed
    named = {"evaluate": "run", "experiment": "name", "export": "file"}
    for flag in (name.strip("_").replace("_", "-") for name in fields_of(cli._VERBS[verb])):
        if flag == named.get(verb):
            assert "positional arguments" in printed
            continue
        # No prefix of the nested dataclass, and a sentence below or beside it.
        found = re.search(rf"--{flag}\b[^(]*?[A-Za-z]{{3,}}[^(]*\(", printed)
        assert found, f"--{flag} has no help in:\n{printed}"


def test_a_refusal_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["proxy", "--out", str(tmp_path / "x"), "--data", str(tmp_path / "nothing"), "--mu"]
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.main([*words, "1"]) == cli.EXIT_REFUSED
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("doge-fast: ")
    assert said.err.count("\n") == 1
    assert "nothing" in said.err
    assert not (tmp_path / "x").exists()
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(ValueError, match="nothing"):
        cli.main([*words, "1"])


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: ProxyConfig) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._STAGES, ProxyConfig, interrupted)
    assert cli.main(["proxy", "--out", str(tmp_path)]) == cli.EXIT_INTERRUPTED
    assert "resumes from its last checkpoint" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.main(["proxy", "--out", str(tmp_path)]) == cli.EXIT_REFUSED
    said = capsys.readouterr().err
    assert said == "doge-fast: This verb needs tyro, which is not installed: pip install " + (
        "'doge-fast[pipeline]'.\n"
    )


@pytest.mark.exhaustive
def test_python_m_is_the_same_program(tmp_path: Path) -> None:
    words = ["proxy", "--out", str(tmp_path / "x"), "--target", "universal", "verse"]
    done = subprocess.run(
        [sys.executable, "-m", "doge_fast", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == cli.EXIT_REFUSED
    assert done.stderr.splitlines()[-1].startswith("doge-fast: target must be universal alone")
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m doge_fast export --list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("megatron: ")
    assert done.stderr == ""
