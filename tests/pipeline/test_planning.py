"""`doge-fast plan`: what it prints, chooses and refuses; the page that shows it."""

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from doge_fast import cli, planning, scale
from doge_fast.pipeline.config import PlanConfig
from doge_fast.pipeline.sizes import SIZES, num_parameters
from tests.processes import printed_by

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
SHOWN = re.findall(
    r"```bash\n(doge-fast plan[^\n]*)\n```\n\n```text\n(.*?)```", PAGE.read_text(), re.S
)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_what_is_printed(
    command: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last digit. To write the page anew: put there what the command prints, COLUMNS=100."""
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown


def test_the_page_goes_up_to_a_thousand() -> None:
    assert len(SHOWN) == 3
    assert any("--domains 1000" in command and " 1024 " in command for command, _ in SHOWN)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for gpus in ((64,), (1, 8, 1024)):
        told = planning.plan(PlanConfig(model="32x4096", domains=1000, gpus=gpus))
        lines = "\n".join(told).splitlines()
        assert max(map(len, lines)) <= width
        # One table, not cut into parts.
        assert sum(set(line) == {"-"} for line in lines) == 1


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    size = SIZES[name]
    shape = {"n_layer": size.num_layers, "n_head": size.num_heads, "n_embd": size.embed_dim}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=640, n_positions=128, **shape)
        )
    assert model.num_parameters() == num_parameters(size.num_layers, size.embed_dim, 640, 128)


def ways(**changes: object) -> dict[str, planning.Way]:
    config = dataclasses.replace(PlanConfig(domains=50, gpus=(64,)), **changes)  # type: ignore[arg-type]
    return {
        way.name: way for way in planning._ways(config, planning._model_of(config), config.gpus[0])
    }


def test_a_number_of_domains_that_divides_the_ranks_costs_what_plain_training_does() -> None:
    even, odd = (ways(domains_per_step=num) for num in (32, 33))
    plain = scale.ddp_bytes(num_parameters(36, 1200, 50304, 1024), 64)
    assert even["DDP"].sent == pytest.approx(plain, rel=0.01)
    assert even["DDP"].overhead < 0.05 < odd["DDP"].overhead
    assert (even["DDP"].passes, odd["DDP"].passes) == (1, 2)


def test_what_is_asked_for_changes_what_it_should() -> None:
    as_is, half, stacked, some = (
        ways(**each)["DDP"]
        for each in ({}, {"rows": "bfloat16"}, {"mode": "stacked"}, {"selection": 0.25})
    )
    assert half.memory["rows"] == as_is.memory["rows"] / 2
    assert half.memory["exchange"] == as_is.memory["exchange"] / 2
    assert half.sent < as_is.sent
    assert stacked.memory["waiting gradient"] == 0 < as_is.memory["waiting gradient"]
    assert stacked.memory["activations"] == 2 * as_is.memory["activations"]
    assert (as_is.passes, stacked.passes) == (2, 1)
    assert some.seconds["passes over rows"] < as_is.seconds["passes over rows"]
    assert (some.num_bytes, some.sent) == (as_is.num_bytes, as_is.sent)
    # FSDP2 refuses it.
    assert set(ways(mode="stacked")) == {"DDP"}


def advice(**changes: object) -> str:
    config = dataclasses.replace(PlanConfig(domains=50, gpus=(64,)), **changes)  # type: ignore[arg-type]
    return " ".join(planning.plan(config)[-1].split())


def test_what_to_choose() -> None:
    assert advice(domains=32).startswith("64 x h100: choose DDP: ")
    assert "Or DDP with --rows bfloat16: " in advice()
    large = advice(model="32x4096", domains=1000, tokens=1 << 22)
    assert "choose FSDP2 with --rows bfloat16 --domains-per-step 64: " in large
    assert "Or FSDP2 with --rows bfloat16 --domains-per-step 2: " in large
    assert "none is possible" in advice(model="400x16384")
    assert "none is possible" in advice(tokens=64 * 1024 - 1)
    assert "choose DDP: " in advice(domains=64, tokens=64 * 1024)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "7B"], "model must be a size of the family"),
        (["--model", "12x0"], "model must be a size of the family"),
        (["--gpus", "0"], "gpus must be at least 1; got 0"),
        (["--domains", "5", "--domains-per-step", "6"], "domains_per_step must be at most domains"),
        (["--selection", "0"], "selection must be greater than 0 and at most 1"),
        (["--tokens", "0"], "tokens must be at least 1"),
    ],
)
def test_what_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words]) == cli.EXIT_REFUSED
    assert re.search(sentence, capsys.readouterr().err)


def test_a_plan_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from doge_fast import cli\n"
        "cli.main(['plan', '--gpus', '64'])\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    told = printed_by(sys.executable, "-c", code)
    assert "choose DDP" in told
    assert told.endswith("set()\n")
