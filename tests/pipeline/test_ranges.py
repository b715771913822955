"""Numbers of a configuration: every field has a range, and is checked against it."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from doge_fast import cli
from doge_fast.pipeline import config as configs
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    ModelConfig,
    ProxyConfig,
    TrainingConfig,
)
from doge_fast.pipeline.config.ranges import check

# Which take any number; none may stand here without a reason.
FREE = {
    # Checked by the export against what float64 can repeat.
    ("ExportConfig", "decimals"),
}


def test_every_number_of_every_verb_has_a_range() -> None:
    free = set()
    for name, config in vars(configs).items():
        if not name.endswith("Config") or not dataclasses.is_dataclass(config):
            continue
        for field, hint in get_type_hints(config, include_extras=True).items():
            words = str(hint)
            if "Range(" not in words and any(
                kind in words for kind in ("'int'", "'float'", "int |")
            ):
                free.add((name, field))
    assert free == FREE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1; got 0."),
        ({"embed_dim": 0}, "embed_dim must be at least 1; got 0."),
        ({"num_heads": -1}, "num_heads must be at least 1; got -1."),
        ({"seed": -1}, "seed must be at least 0 and at most 4294967295; got -1."),
        ({"seed": 2**32}, "seed must be at least 0 and at most 4294967295; got 4294967296."),
        ({"steps": 2.5}, "steps must be a whole number, at least 1; got 2.5."),
        ({"steps": True}, "steps must be a whole number, at least 1; got True."),
        ({"steps": 2**63}, "steps must be at most 9223372036854775807; got 9223372036854775808."),
        ({"steps": 10**400}, "steps must be at most 9223372036854775807; got 10000"),
        ({"steps": -(10**400)}, "steps must be a whole number, at least 1; got -10000"),
        ({"mu": 10**400}, "mu must be a finite number, greater than 0; got 10000"),
        (
            {"weight_decay": float("nan")},
            "weight_decay must be a finite number, at least 0; got nan",
        ),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number, greater than 0"),
        (
            {"learning_rate": "1e-3"},
            "learning_rate must be a finite number, greater than 0; got '1e",
        ),
        (
            {"validation_fraction": 1.0},
            "validation_fraction must be greater than 0 and less than 1",
        ),
        ({"block_size": 1}, "block_size must be at least 2 and at most 16777216; got 1."),
        # A word is several letters.
        ({"target": "verse"}, "target must be a tuple of values; got 'verse'."),
        ({"domains": 7}, "domains must be a tuple of values; got 7."),
        ({"mode": "fast"}, "mode must be one of auto, sequential, stacked; got 'fast'."),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16; got 'int8'."),
    ],
)
def test_what_is_out_of_its_range_is_named(changes: dict[str, Any], message: str) -> None:
    config = ProxyConfig(
        out=Path("never"),
        **{
            name: part(**{key: changes[key] for key in fields_of(part) & changes.keys()})
            for name, part in PARTS.items()
        },
        **{key: changes[key] for key in fields_of(ProxyConfig) & changes.keys()},
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check(config)


PARTS: dict[str, Any] = {"corpus": CorpusConfig, "model": ModelConfig, "training": TrainingConfig}


def fields_of(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_defaults_lie_in_their_ranges() -> None:
    check(ProxyConfig(out=Path("never")))
    check(BaseConfig(out=Path("never")))


@pytest.mark.parametrize(
    "words",
    [
        "proxy --num-layers 0",
        "base --embed-dim 0",
        "doremi --reference x --num-heads -1",
        "select --steps 0",
        "experiment universal --seeds -1",
        "profile --domains 0",
    ],
)
def test_the_command_line_refuses_before_anything_is_written(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb = words.split()
    out = [] if verb[0] == "profile" else ["--out", "run"]
    assert cli.main([*verb, *out]) == cli.EXIT_REFUSED
    assert "must be at least" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_switch_is_no_number_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("training:\n  steps: true\n")
    words = ["base", "--config", str(file), "--out", str(tmp_path / "run")]
    assert cli.main(words) == cli.EXIT_REFUSED
    assert "steps is true; it is no switch." in capsys.readouterr().err
