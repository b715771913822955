"""Exported shares are exact, complete and in the target's unit; what is read back is what went."""

import csv
import dataclasses
import io
import json
import math
import random
import re
import shlex
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from doge_fast import cli
from doge_fast.pipeline import records
from doge_fast.pipeline.config import BaseConfig, ExportConfig, TrainingConfig
from doge_fast.pipeline.exports import (
    Target,
    by_document,
    by_token,
    export,
    import_weights,
    largest_remainder,
    registry,
    targets,
)

NAMES = ("book", "code", "web")
WEIGHTS = {"web": 0.4321987, "code": 0.3, "book": 0.2678013}
LENGTHS = {"book": 100_000.0, "code": 4_000.0, "web": 800.0}
# What every target takes, so that one call serves all.
PATHS = {name: f"/data/{name}" for name in NAMES}
PHASES = [
    {"first_step": 0, "weights": {"web": 0.5, "code": 0.3, "book": 0.2}},
    {"first_step": 1024, "weights": {"web": 0.36, "code": 0.3, "book": 0.34}},
]
EVERYTHING: dict[str, Any] = {
    "valid_paths": {"web": "/valid/web"},
    "test_paths": {"web": "/test/web"},
    "mean_doc_tokens": LENGTHS,
    "seq_length": 2048,
    "batch_size": 64,
    "budget_tokens": 10**9,
}
IMPORTED = [name for name, target in targets().items() if target.read]


def record(weights: Mapping[str, float] = WEIGHTS, **fields: Any) -> dict[str, Any]:
    domains = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return {"schema_version": 1, "method": "doge", "domains": domains, **fields}


def made(to: str, weights: Mapping[str, Any] = WEIGHTS, **changes: Any) -> str:
    """The text, with all that a target may ask for."""
    options = EVERYTHING | changes
    paths = options.pop("paths", {name: PATHS[name] for name in PATHS})
    return export(weights, to=to, paths=suited(paths, to), **options).text


def suited(paths: Mapping[str, Any], to: str) -> Mapping[str, Any] | None:
    """The paths, as a target takes them that reads a file by its suffix; or that takes none."""
    if to == "ray":
        return {name: f"{path}.jsonl" for name, path in paths.items()}
    return paths if targets()[to].takes else None


def random_weights(count: int, draw: random.Random) -> dict[str, float]:
    """Of many scales, some of them zero, one of them not."""
    weights = {f"d{i}": draw.random() ** draw.choice((1, 8)) for i in range(count)}
    zeros = draw.sample(sorted(weights), count // 8)
    return weights | dict.fromkeys(zeros, 0.0)


# Rounding.


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 512])
@pytest.mark.parametrize("decimals", [1, 4, 6, 15])
def test_rounded_shares_sum_to_one_and_stay_within_a_unit(count: int, decimals: int) -> None:
    draw = random.Random(count * 100 + decimals)
    for _ in range(5):
        weights = random_weights(count, draw)
        rounded = largest_remainder(weights, decimals)
        assert sum(rounded.values()) == 1
        total = sum(map(Fraction, weights.values()))
        for name, share in rounded.items():
            # No share is off by a whole unit of the last place.
            assert abs(Fraction(share) - Fraction(weights[name]) / total) < Fraction(
                1, 10**decimals
            )
            assert share or not weights[name] or weights[name] / total < 10.0**-decimals
            assert not share or weights[name]
        ordered = sorted(weights, key=weights.__getitem__)
        assert [rounded[name] for name in ordered] == sorted(rounded.values())


def test_rounding_does_not_depend_on_the_order_and_breaks_ties_by_name() -> None:
    draw = random.Random(0)
    for count in (3, 7, 40):
        # Equal weights: every remainder is a tie.
        for weights in ({f"d{i}": 1.0 for i in range(count)}, random_weights(count, draw)):
            expected = largest_remainder(weights, 3)
            for _ in range(5):
                names = draw.sample(sorted(weights), count)
                assert largest_remainder({name: weights[name] for name in names}, 3) == expected
    assert largest_remainder({"b": 1.0, "c": 1.0, "a": 1.0}, 1) == {
        "a": Decimal("0.4"),
        "b": Decimal("0.3"),
        "c": Decimal("0.3"),
    }


def test_rounding_refuses_what_has_no_shares() -> None:
    with pytest.raises(ValueError, match="all 2 are zero"):
        largest_remainder({"a": 0.0, "b": 0.0}, 3)
    for decimals in (0, 16):
        with pytest.raises(ValueError, match=f"1 to 15.*got {decimals}"):
            largest_remainder({"a": 1.0}, decimals)


def test_shares_of_documents_make_the_shares_of_tokens() -> None:
    parts = {"long": Fraction(1, 2), "short": Fraction(1, 2)}
    lengths = {"long": 300.0, "short": 100.0}
    documents = by_document(parts, lengths)
    assert documents == {"long": Fraction(1, 4), "short": Fraction(3, 4)}
    assert by_token(documents, lengths) == parts


# Every target.


@pytest.mark.parametrize("to", targets())
def test_a_target_does_not_depend_on_the_order_of_the_record(to: str) -> None:
    turned = dict(reversed(WEIGHTS.items()))
    assert made(to) == made(to, turned)
    assert made(to) == made(to, {name: 7 * weight for name, weight in WEIGHTS.items()})


@pytest.mark.parametrize("to", targets())
def test_zeros_are_left_out_aloud_and_nothing_else(to: str) -> None:
    weights = WEIGHTS | {"junk": 0.0, "dust": 1e-9}
    options = {**EVERYTHING, "mean_doc_tokens": LENGTHS | {"dust": 800.0}}
    paths = suited(PATHS | {"junk": "/data/junk"}, to)
    result = export(weights, to=to, paths=paths, **options)
    assert "Left out, for the weight is 0: junk." in result.warnings
    assert any("rounds to 0 at 6 decimals: dust." in line for line in result.warnings)
    body = [line for line in result.text.splitlines() if not line.startswith("#")]
    assert "junk" not in "\n".join(body)
    assert "dust" not in "\n".join(body)
    if result.has_comments:
        assert all(line.split()[0] in result.text for line in result.warnings)
    # Twelve decimals keep the small one; paths are then asked for.
    if targets()[to].needs_paths:
        with pytest.raises(ValueError, match="there is none for dust"):
            export(weights, to=to, paths=PATHS, **options, decimals=12)


@pytest.mark.parametrize("to", [name for name, each in targets().items() if each.takes])
def test_a_path_of_no_domain_is_refused_by_name(to: str) -> None:
    with pytest.raises(ValueError, match=r"paths name wbe, which .* book, code, web"):
        made(to, paths=PATHS | {"wbe": "/data/wbe"})


@pytest.mark.parametrize("to", [name for name, each in targets().items() if each.needs_paths])
def test_every_domain_needs_a_path(to: str) -> None:
    with pytest.raises(ValueError, match=r"none for code.*--paths NAME=PATH"):
        made(to, paths={name: PATHS[name] for name in ("web", "book")})


@pytest.mark.parametrize("to", targets())
def test_every_target_says_what_it_is(to: str) -> None:
    target, result = targets()[to], made(to)
    assert target.name == to
    assert target.title
    assert target.traps or target.name in ("json", "csv")
    assert target.takes or not target.needs_paths
    # A version or a commit, and when it was read.
    assert re.search(r"20\d\d-\d\d-\d\d$", target.checked) or "own" in target.checked
    assert f"checked {target.checked}" in registry.listing()
    assert result.endswith("\n")
    assert "\t" not in result
    comments = [line for line in result.splitlines() if line.startswith("# ")]
    assert bool(comments) == (target.comment is not None)
    assert all(len(line) <= 88 for line in comments)


def test_every_format_has_its_target() -> None:
    """A name in FORMATS alone would never be offered; one in targets.yaml alone fails at once."""
    families = (registry.configs, registry.loaders, registry.megatron)
    assert {name for family in families for name in family.FORMATS} == set(registry._ours())


# What is written.


def test_megatron_takes_weights_and_prefixes_in_turn() -> None:
    plain = export(WEIGHTS, to="megatron", paths=PATHS).text
    assert plain == ("--data-path 0.267801 /data/book 0.300000 /data/code 0.432199 /data/web\n")
    assert shlex.split(made("megatron").replace("\\\n", " ")) == [
        *("--train-data-path", "0.267801", "/data/book", "0.300000", "/data/code"),
        *("0.432199", "/data/web", "--valid-data-path", "1.000000", "/valid/web"),
        *("--test-data-path", "1.000000", "/test/web"),
    ]
    assert made("megatron-file").split() == plain.split()[1:]


def test_megatron_json_has_all_three_splits() -> None:
    value = json.loads(export(WEIGHTS, to="megatron-json", paths=PATHS).text)
    assert value["train"][:2] == ["0.267801", "/data/book"]
    assert (value["valid"], value["test"]) == (None, None)
    assert json.loads(made("megatron-json"))["valid"] == ["1.000000", "/valid/web"]


@pytest.mark.parametrize(
    "to", [name for name in targets() if name.startswith("megatron") or name == "curator"]
)
def test_megatron_prefixes_are_cut_and_hold_no_white_space(to: str) -> None:
    assert made(to) == made(to, paths=PATHS | {"web": "/data/web.bin", "code": "/data/code.idx"})
    with pytest.raises(ValueError, match=r"splits its lists at white space.*'/my data/web'"):
        made(to, paths=PATHS | {"web": "/my data/web"})


@pytest.mark.parametrize("to", ["megatron", "neox", "fast-llm", "energon"])
def test_held_out_paths_are_of_domains_with_a_weight(to: str) -> None:
    with pytest.raises(ValueError, match="valid paths are of domains without a weight: junk"):
        made(to, WEIGHTS | {"junk": 0.0}, valid_paths={"junk": "/valid/junk"})


def test_a_prefix_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one path, their prefix; /data/web is given twice"):
        made("megatron", paths=PATHS | {"web": "/data/web.bin", "code": "/data/web"})
    for suffix in (".bin", ".idx"):
        (tmp_path / f"web{suffix}").write_bytes(bytes(100))
    both = [str(tmp_path / "web.bin"), str(tmp_path / "web.idx")]
    with pytest.raises(ValueError, match=r"web is given twice\. Name it once"):
        export({"web": 1.0}, to="megatron-json", paths={"web": both})


def test_several_paths_share_a_weight_by_their_parts_or_bytes(tmp_path: Path) -> None:
    given = PATHS | {"web": {"/data/a": 3, "/data/b": 1}}
    words = export(
        {"web": 0.8, "code": 0.2},
        to="megatron-file",
        decimals=3,
        paths={name: given[name] for name in ("web", "code")},
    ).text.split()
    assert words == ["0.200", "/data/code", "0.600", "/data/a", "0.200", "/data/b"]
    for name, size in {"a": 300, "b": 100}.items():
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
    seen = {"web": [str(tmp_path / "a"), str(tmp_path / "b")]}
    words = export({"web": 1.0}, to="megatron-file", decimals=3, paths=seen).text.split()
    assert words[::2] == ["0.750", "0.250"]
    with pytest.raises(
        ValueError,
        match=r"web has 2 paths, and this target needs a weight for each.*\{'web': \{path",
    ):
        export({"web": 1.0}, to="megatron-file", paths={"web": ["/nowhere/a", "/nowhere/b"]})
    with pytest.raises(ValueError, match=r"share of /data/b rounds to 0 at 2 decimals"):
        export(
            {"web": 1.0},
            to="megatron-file",
            decimals=2,
            paths={"web": {"/data/a": 10_000, "/data/b": 1}},
        )
    with pytest.raises(ValueError, match="one path per domain; web has 2"):
        made("llm-foundry", paths=PATHS | {"web": ["/a", "/b"]})


def test_neox_takes_all_splits_or_none() -> None:
    value = yaml.safe_load(made("neox"))
    assert value["train-data-weights"] == [0.267801, 0.3, 0.432199]
    assert [len(value[f"{split}-data-paths"]) for split in ("train", "valid", "test")] == [3, 1, 1]
    assert value["weight_by_num_documents"] is False
    with pytest.raises(ValueError, match="none for valid and test"):
        made("neox", valid_paths={}, test_paths={})


def test_olmo_allows_the_passes_that_the_budget_needs() -> None:
    entries = [
        {"name": name, "weight": weight, "tokens": 10_000_000} for name, weight in WEIGHTS.items()
    ]
    text = made("olmo-core", {"domains": entries}, budget_tokens=50_000_000)
    sources = yaml.safe_load(text)["sources"]
    assert [source["source_name"] for source in sources] == list(NAMES)
    for source in sources:
        needed = 50_000_000 * source["target_ratio"] / 10_000_000
        # Rounded up, and a sequence of 2048 tokens may be cut off.
        most = max(1, needed * 10_000_000 / (10_000_000 - 2048)) + 1e-3
        assert needed <= source["max_repetition_ratio"] <= most
    assert sum(Decimal(str(source["target_ratio"])) for source in sources) == 1


def test_lingua_counts_documents_and_knows_sources_by_their_folder() -> None:
    data = yaml.safe_load(made("lingua"))["data"]
    assert data["root_dir"] == "/data"
    tokens = {name: share * LENGTHS[name] for name, share in data["sources"].items()}
    total = sum(tokens.values())
    for name, weight in WEIGHTS.items():
        # Half a unit of the sixth decimal of the rarest.
        assert tokens[name] / total == pytest.approx(
            weight, rel=5e-7 / min(data["sources"].values())
        )
    with pytest.raises(ValueError, match=r"one root_dir; these lie in /data, /other"):
        made("lingua", paths=PATHS | {"web": "/other/web"})
    with pytest.raises(ValueError, match="by its own decision; rows='blocks'"):
        made("lingua", rows="blocks")


@pytest.mark.parametrize(
    "to",
    [
        "datasets",
        "torchdata",
        "ray",
        "data-juicer",
        "energon",
        "maxtext",
        "llama-factory",
        "lingua",
    ],
)
def test_a_target_of_documents_asks_for_their_length(to: str) -> None:
    with pytest.raises(ValueError, match=r"draws documents.*for book, code, web.*--rows blocks"):
        made(to, mean_doc_tokens={}, seq_length=None)
    with pytest.raises(ValueError, match="mean_doc_tokens names wbe"):
        made(to, mean_doc_tokens=LENGTHS | {"wbe": 3.0}, seq_length=None)
    held = [
        {"name": name, "weight": weight, "tokens": 5 * LENGTHS[name], "documents": 5}
        for name, weight in WEIGHTS.items()
    ]
    assert made(to, {"domains": held}, mean_doc_tokens={}, rows="documents") == made(
        to, rows="documents"
    )


def test_data_juicer_draws_as_many_rows_as_the_budget_has() -> None:
    dataset = yaml.safe_load(made("data-juicer"))["dataset"]
    mean = 1 / sum(weight / LENGTHS[name] for name, weight in WEIGHTS.items())
    assert dataset["max_sample_num"] == pytest.approx(10**9 / mean, rel=1e-6)
    blocks = yaml.safe_load(made("data-juicer", rows="blocks"))["dataset"]
    assert blocks["max_sample_num"] == 10**9 // 2048
    assert [each["weight"] for each in blocks["configs"]] == [0.267801, 0.3, 0.432199]
    with pytest.raises(ValueError, match="needs budget_tokens"):
        made("data-juicer", budget_tokens=None)


def test_mosaic_draws_at_random_and_asks_for_a_batch() -> None:
    rare = {"web": 0.999, "code": 0.001}
    places = {"web": "s3://b/web", "code": "/c"}
    text = export(
        rare, to="mosaic-streaming", paths=places, batch_size=64, local_dir="/tmp/x/"
    ).text
    assert 'batching_method="random"' in text
    assert "batch_size=64," in text
    assert 'Stream(remote="s3://b/web", local="/tmp/x/web", proportion=0.999000)' in text
    assert 'Stream(local="/c", proportion=0.001000)' in text
    with pytest.raises(ValueError, match="needs batch_size: StreamingDataset does not start"):
        export(rare, to="mosaic-streaming", paths=places)
    foundry = yaml.safe_load(export(rare, to="llm-foundry", paths=places).text)
    assert foundry["train_loader"]["dataset"]["batching_method"] == "random"


EXACT = {
    "energon": """__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
    - weight: 0.5
      path: /d/a
    - weight: 0.3
      path: /d/b
    - weight: 0.2
      path: /d/c
  val:
    blend:
    - weight: 1.0
      path: /v/a
""",
    "maxtext": """dataset_type: grain
grain_file_type: arrayrecord
grain_train_files: /d/a,0.500000;/d/b,0.300000;/d/c,0.200000
""",
    "llama-factory": """dataset: /d/a,/d/b,/d/c
mix_strategy: interleave_over
interleave_probs: 0.500000,0.300000,0.200000
""",
    "ms-swift": """--dataset /d/a /d/b /d/c \\
--interleave_prob 0.500000 0.300000 0.200000 \\
--stopping_strategy all_exhausted
""",
    "dataflex": """dataset: /d/a,/d/b,/d/c
train_type: dynamic_mix
static_mix: true
mixture_sample_rule: mixture
init_mixture_proportions:
- 0.5
- 0.3
- 0.2
""",
}
ABC = {"a": 0.5, "b": 0.3, "c": 0.2}


@pytest.mark.parametrize("to", EXACT)
def test_a_target_writes_exactly_this(to: str) -> None:
    paths = {name: f"/d/{name}" for name in ABC}
    result = export(ABC, to=to, paths=paths, valid_paths={"a": "/v/a"}, rows="blocks")
    kept = [line for line in result.text.splitlines(keepends=True) if line[:2] != "# "]
    assert "".join(kept) == EXACT[to]


def test_ray_mixes_what_it_reads() -> None:
    paths: dict[str, Any] = {"a": ["/d/1.jsonl.gz", "/d/2.jsonl"], "b": "/d/b.parquet"}
    text = export({"a": 0.5, "b": 0.5}, to="ray", paths=paths, rows="blocks").text
    assert text.partition("import ray")[2].splitlines()[3:] == [
        "domains = {",
        '    "a": ray.data.read_json(["/d/1.jsonl.gz", "/d/2.jsonl"]),',
        '    "b": ray.data.read_parquet(["/d/b.parquet"]),',
        "}",
        "weights = {",
        '    "a": 0.500000,',
        '    "b": 0.500000,',
        "}",
        "first, *others = domains.values()",
        "dataset = first.mix(",
        "    *others,",
        "    weights=list(weights.values()),",
        "    stopping_condition=MixStoppingCondition.STOP_ON_SHORTEST,",
        ")",
    ]
    with pytest.raises(ValueError, match=r"by the suffix of its files.*; b has /d/b"):
        export({"b": 1.0}, to="ray", paths={"b": "/d/b"}, rows="blocks")


def test_what_a_new_consumer_would_misread_is_refused() -> None:
    for to in ("llama-factory", "dataflex"):
        with pytest.raises(ValueError, match="at commas; a,b holds one"):
            export({"a,b": 1.0}, to=to, rows="blocks")
        # Without a path a domain is known by its own name.
        assert "dataset: web\n" in export({"web": 1.0}, to=to, rows="blocks").text
    with pytest.raises(ValueError, match=r"rounds weights to 4 decimals.*none of /d/b"):
        export(
            {"a": 0.99997, "b": 0.00003},
            to="maxtext",
            paths={"a": "/d/a", "b": "/d/b"},
            rows="blocks",
        )
    with pytest.raises(ValueError, match=r"splits grain_train_files.*/d/a;b"):
        export({"a": 1.0}, to="maxtext", paths={"a": "/d/a;b"}, rows="blocks")
    # One set has no weight there.
    alone = export({"a": 1.0}, to="maxtext", paths={"a": "/d/a*"}, rows="blocks")
    assert "grain_train_files: /d/a*\n" in alone.text
    with pytest.raises(ValueError, match=r"names in lower case.*Web, web"):
        export({"Web": 0.5, "web": 0.5}, to="torchtitan", paths={"Web": "/a", "web": "/b"})


def test_olmo_is_given_the_budget_and_the_passes() -> None:
    entries = [{"name": "a", "weight": 1.0, "tokens": 1001}]
    options: dict[str, Any] = {"paths": {"a": "/d/a.npy"}, "seq_length": 10}
    text = export(
        {"domains": entries}, to="olmo-core-composable", budget_tokens=2002, **options
    ).text
    assert "    num_tokens=2002,\n" in text
    # 991 tokens are in whole sequences at least.
    assert 'domain("a", 1.000000, 2.021, "/d/a.npy")' in text
    assert "num_tokens" not in "".join(
        line
        for line in export({"a": 1.0}, to="olmo-core-composable", **options).text.splitlines()
        if line[:1] != "#"
    )


def test_phases_go_where_they_are_known_and_are_averaged_elsewhere() -> None:
    weights = record(phases=PHASES)
    stages = yaml.safe_load(made("nanotron", weights))["data_stages"]
    assert [stage["start_training_step"] for stage in stages] == [1, 1025]
    assert stages[1]["data"]["dataset"] == {
        "dataset_folder": ["/data/book", "/data/code", "/data/web"],
        "dataset_weights": [0.34, 0.3, 0.36],
    }
    levanter = yaml.safe_load(made("levanter", weights))["data"]["train_weights"]
    assert levanter == [[0, PHASES[0]["weights"]], [1024, PHASES[1]["weights"]]]
    foundry = yaml.safe_load(made("llm-foundry", weights))
    curriculum = foundry["callbacks"]["curriculum_learning"]
    first = 1024 * 64 * 2048
    assert curriculum["duration"] == f"{first}tok"
    assert [each["duration"] for each in curriculum["schedule"]] == [f"{10**9 - first}tok"]
    assert foundry["max_duration"] == f"{10**9}tok"
    for to in ("megatron", "datasets"):
        result = export(weights, to=to, paths=PATHS, mean_doc_tokens=LENGTHS)
        assert any(
            "Left out: 2 phases. These are the weights that" in line for line in result.warnings
        )
    assert made("nanotron", weights, is_constant=True) == made(
        "nanotron", record(phases=None)
    ).replace(
        "# Weights are",
        "# Left out: 2 phases. These are the weights that the record has beside them, constant\n"
        "#   throughout.\n# Weights are",
    )


def test_a_phase_says_which_domains_it_leaves_out() -> None:
    phases = [PHASES[0], {"first_step": 64, "weights": {"web": 0.5, "code": 0.5, "book": 0.0}}]
    weights = record(stages=phases)
    levanter = yaml.safe_load(made("levanter", weights))["data"]["train_weights"]
    assert levanter[1] == [64, {"book": 0.0, "code": 0.5, "web": 0.5}]
    stages = yaml.safe_load(made("nanotron", weights))["data_stages"]
    assert stages[1]["data"]["dataset"]["dataset_folder"] == ["/data/code", "/data/web"]
    assert not export(weights, to="nanotron", paths=PATHS).warnings


def test_megatron_phases_are_launches() -> None:
    text = made("megatron-phases", record(phases=PHASES), valid_paths={}, test_paths={})
    assert "--phase-transition-iterations 1024\n" in text
    assert "# Phase 2: iterations 1024 to the end, from sample 65536 on" in text
    assert "--data-path 0.340000 /data/book 0.300000 /data/code 0.360000 /data/web" in text


def test_phases_that_no_consumer_would_take_are_refused() -> None:
    weights = record(phases=PHASES)
    early = record(phases=[PHASES[0], PHASES[1] | {"first_step": 1}])
    with pytest.raises(
        ValueError,
        match=r"blocks of 2048.*with 8 sequences in a step that is every 256 steps.*\[0, 1\]",
    ):
        made("levanter", early, batch_size=8)
    with pytest.raises(ValueError, match=r"needs seq_length and batch_size and budget_tokens"):
        made("llm-foundry", weights, seq_length=None, batch_size=None, budget_tokens=None)
    with pytest.raises(ValueError, match="it would never come"):
        made("llm-foundry", weights, budget_tokens=1000)
    with pytest.raises(ValueError, match="begin at step 0"):
        made("nanotron", record(phases=PHASES[1:]))


def test_levanter_gets_a_block_at_whose_end_the_phases_begin() -> None:
    for first, batch, block in ((1024, 64, None), (1024 + 8, 64, 33024), (12, 64, 768)):
        weights = record(phases=[PHASES[0], PHASES[1] | {"first_step": first}])
        data = yaml.safe_load(made("levanter", weights, batch_size=batch))["data"]
        assert data.get("mixture_block_size") == block
        assert first * batch % (block or 2048) == 0
    assert "mixture_block_size:" not in made("levanter", batch_size=7)


def counts_of_levanter(data: Mapping[str, Any]) -> dict[str, int]:
    """Sequences in a block: each share rounded down, the largest domain gets the rest."""
    block = data.get("mixture_block_size", 2048)
    weights = data["train_weights"]
    counts = {name: int(weight / sum(weights.values()) * block) for name, weight in weights.items()}
    counts[max(counts, key=counts.__getitem__)] += block - sum(counts.values())
    return counts


def test_levanter_gets_a_block_that_holds_every_domain() -> None:
    rare = {"web": 0.9999, "code": 0.0001}
    data = yaml.safe_load(export(rare, to="levanter").text)["data"]
    assert data["mixture_block_size"] == 16384
    assert counts_of_levanter(data) == {"web": 16383, "code": 1}
    # A domain of exactly one sequence would lose it to the division by the sum.
    exact = {"web": 1 - 2.0**-11, "code": 2.0**-11}
    data = yaml.safe_load(export(exact, to="levanter", decimals=15).text)["data"]
    assert counts_of_levanter(data)["code"] == 2
    # Between the longest power of two and what 16 bits hold.
    rarer = {"web": 1 - 2e-5, "code": 2e-5}
    data = yaml.safe_load(export(rarer, to="levanter").text)["data"]
    assert data["mixture_block_size"] == 65535
    assert counts_of_levanter(data)["code"] == 1
    with pytest.raises(ValueError, match=r"blocks of 65535, and would draw none of code"):
        export({"web": 0.99999, "code": 0.00001}, to="levanter")
    # Of many domains each loses half a sequence.
    many = {f"d{i}": 1 / 299 for i in range(299)}
    data = yaml.safe_load(export(many, to="levanter").text)["data"]
    assert max(counts_of_levanter(data).values()) / data["mixture_block_size"] < 0.02


def test_levanter_gets_no_longer_block_than_the_phases() -> None:
    phases = [{"first_step": 0, "weights": {"web": 0.9999, "code": 0.0001}}]
    phases.append({"first_step": 512, "weights": {"web": 0.5, "code": 0.5}})
    weights = record({"web": 0.5, "code": 0.5}, phases=phases)
    data = yaml.safe_load(export(weights, to="levanter", batch_size=32).text)["data"]
    assert data["mixture_block_size"] == 16384
    for batch in (16, None):
        with pytest.raises(
            ValueError, match=r"would draw none of code: their weights are below 1/"
        ):
            export(weights, to="levanter", batch_size=batch)


def test_the_last_phase_begins_within_the_training() -> None:
    weights = record(phases=PHASES)
    for steps in (1024, 3):
        with pytest.raises(ValueError, match=f"at step 1024, and the training has {steps}: it wou"):
            export(weights, to="json", steps=steps)
    # Of a record whose own steps end before its phases.
    with pytest.raises(ValueError, match="at step 2048, and the training has 1000"):
        export(record(phases=PHASES, steps=500), to="json", steps=1000)
    assert len(json.loads(export(weights, to="json", steps=1025).text)) == 2


def test_phases_are_stretched_to_the_training_they_go_to() -> None:
    weights = record(phases=PHASES, steps=2048)
    for asked in ({"steps": 100_000}, {"seq_length": 2048, "batch_size": 64}):
        changes = {"budget_tokens": None} | asked
        if "seq_length" in asked:
            changes["budget_tokens"] = 100_000 * 2048 * 64
        result = export(weights, to="nanotron", paths=PATHS, **changes)
        stages = yaml.safe_load(result.text)["data_stages"]
        assert [stage["start_training_step"] for stage in stages] == [1, 50_001]
        assert result.warnings == ("Phases of a run of 2048 steps, at the like parts of 100000.",)
    kept = export(weights, to="nanotron", paths=PATHS)
    assert "start_training_step: 1025" in kept.text
    assert "Give the steps of yours" in kept.warnings[0]
    assert not export(weights, to="nanotron", paths=PATHS, steps=2048).warnings
    with pytest.raises(ValueError, match="2 phases of a run of 2048 steps do not fit in one of 1"):
        export(weights, to="nanotron", paths=PATHS, steps=1)


def test_a_table_shows_what_is_known_largest_first() -> None:
    entries = [
        {"name": "a|b", "weight": 0.25, "prior": 0.5, "tokens": 1000},
        {"name": "c", "weight": 0.75, "prior": 0.5, "tokens": 3000, "weight_std": 0.01},
    ]
    lines = export({"domains": entries}, to="markdown", budget_tokens=8000, decimals=3).text
    header, _, first, second = (line.strip() for line in lines.splitlines())
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    assert cells == ["domain", "weight", "weight_std", "prior", "ratio", "tokens", "epochs"]
    assert first.split("|")[1].strip() == "c"
    assert [cell.strip() for cell in first.split("|")[2:-1]] == [
        *("0.750", "0.010", "0.500", "1.50", "3,000", "2.00")
    ]
    assert "a\\|b" in second
    rows = list(csv.DictReader(io.StringIO(export({"domains": entries}, to="csv").text)))
    assert [(row["domain"], row["weight"]) for row in rows] == [
        ("c", "0.750000"),
        ("a|b", "0.250000"),
    ]
    assert list(rows[0]) == ["domain", "weight", "weight_std", "prior", "ratio", "tokens"]


# Back again.


@pytest.mark.parametrize("name", IMPORTED)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_what_was_exported_is_read_back(name: str, count: int) -> None:
    draw = random.Random(count)
    weights = {f"d{i}": 0.1 + draw.random() for i in range(count)}
    total = sum(weights.values())
    lengths = {each: draw.uniform(50, 5000) for each in weights}
    paths = {each: f"/data/{each}-files" for each in weights}
    held_out = {"d0": "/valid/d0"}
    options = EVERYTHING | {
        "mean_doc_tokens": lengths,
        "valid_paths": held_out,
        "test_paths": held_out,
        "decimals": 12,
    }
    has_paths = bool(targets()[name].takes)
    text = export(weights, to=name, paths=paths if has_paths else None, **options).text
    # By its paths, where the format does not name domains.
    found = import_weights(text, source=name, paths=paths, mean_doc_tokens=lengths)
    assert {entry["name"] for entry in found["domains"]} == set(weights)
    assert math.fsum(entry["weight"] for entry in found["domains"]) == pytest.approx(1, abs=1e-12)
    for entry in found["domains"]:
        # A unit of the twelfth decimal, times the spread of the lengths.
        assert entry["weight"] == pytest.approx(weights[entry["name"]] / total, abs=1e-10)


@pytest.mark.parametrize("name", [name for name in IMPORTED if targets()[name].has_phases])
def test_phases_are_read_back(name: str) -> None:
    phases = [*PHASES, {"first_step": 3072, "weights": PHASES[0]["weights"]}]
    text = made(name, record(phases=phases))
    found = import_weights(text, source=name, paths=PATHS, seq_length=2048, batch_size=64)
    assert found["phases"] == phases
    weights = {entry["name"]: entry["weight"] for entry in found["domains"]}
    assert weights == phases[-1]["weights"]
    if targets()[name].phases_in == "tokens":
        with pytest.raises(ValueError, match="give seq_length and batch_size"):
            import_weights(text, source=name, paths=PATHS)


def test_a_phase_without_a_domain_is_read_back_as_documents() -> None:
    phases = [PHASES[0], {"first_step": 1024, "weights": {"web": 0.5, "code": 0.5, "book": 0.0}}]
    text = made("llm-foundry", record(phases=phases), rows="documents", decimals=12)
    options = {"rows": "documents", "mean_doc_tokens": LENGTHS}
    found = import_weights(text, source="llm-foundry", seq_length=2048, batch_size=64, **options)
    for phase, given in zip(found["phases"], phases, strict=True):
        assert phase["weights"] == pytest.approx(given["weights"], abs=1e-7)


def test_an_imported_domain_is_known_by_the_end_of_its_path() -> None:
    found = import_weights("30 /a/web_text_document 10 /b/code", source="megatron-file")
    assert [(each["name"], each["weight"]) for each in found["domains"]] == [
        ("web_text_document", 0.75),
        ("code", 0.25),
    ]
    # Two paths of one domain are added.
    merged = import_weights(
        "30 /a/web.bin 10 /b/code",
        source="megatron-file",
        paths={"all": ["/a/web", "/b/code"]},
    )
    assert merged["domains"] == [{"name": "all", "weight": 1.0}]
    with pytest.raises(ValueError, match="paths name wbe, and the file holds none of their paths"):
        import_weights("1 /a/web", source="megatron-file", paths={"wbe": "/a/wbe"})


def test_formats_that_others_write_are_read() -> None:
    cases = {
        "megatron": "python pretrain.py --train-data-path 3 /a/x 1 /a/y --split 1,0,0",
        "megatron-json": '{"train": "3 /a/x 1 /a/y", "valid": "/v", "test": "/t"}',
        "neox": '{"train_data_paths": ["/a/x", "/a/y"], "train_data_weights": [3, 1]}',
        "curator": "#!/bin/bash\ncat <<EOF\n0.75 /a/x\n0.25 /a/y\nEOF\n",
        "levanter": "data:\n  train_weights: {x: 0.75, y: 0.25}",
        "nanotron": "data_stages:\n- {name: s, start_training_step: 1, data: {dataset: "
        "{dataset_folder: {/a/x: 3, /a/y: 1}}}}",
        "json": '{"x": 3, "y": 1}',
        "csv": "domain,weight\nx,3\ny,1\n",
    }
    for source, text in cases.items():
        found = import_weights(text, source=source)
        weights = {entry["name"]: entry["weight"] for entry in found["domains"]}
        assert weights == {"x": 0.75, "y": 0.25}, source


@pytest.mark.parametrize("name", IMPORTED)
@pytest.mark.parametrize("text", ["", "[1, 2]", "nothing: here", "0.5 /a/x 0.5"])
def test_what_is_not_the_format_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"must (hold|be|have)"):
        import_weights(text, source=name, mean_doc_tokens=LENGTHS)


@pytest.mark.parametrize("name", [name for name in IMPORTED if name != "megatron"])
@pytest.mark.parametrize(
    "text",
    [
        "train: 3\ntrain-data-paths: 3\ntrain_loader: 3\nsources: 3\ndata_stages: 3\ndata: 3\n"
        "dataset: 3\nother: [1]",
        "sources: [1]\ndata_stages: [1]\ndata: {train_weights: [1], sources: [1], datasets: 1}\n"
        "dataset: {configs: [1]}\ntrain_loader: {dataset: {streams: {a: 1}}}",
        "data_stages: [{start_training_step: 1, data: 3}]\n"
        "data: {train_weights: [[0, 1]], datasets: {Training: 3}}\n"
        "train_loader: {dataset: {streams: {a: {proportion: 1}}}}\n"
        "callbacks: {curriculum_learning: {duration: 5tok, schedule: [1]}}",
        '[{"first_step": 0, "weights": []}]',
        "[]",
    ],
    ids=["numbers", "lists", "within", "no-names", "empty"],
)
def test_another_structure_is_refused_and_not_stumbled_over(name: str, text: str) -> None:
    found = text if text.startswith("[") else json.dumps(yaml.safe_load(text))
    with pytest.raises(ValueError, match=r"must (hold|be|have)"):
        import_weights(found, source=name, rows=None, mean_doc_tokens=LENGTHS)


def test_imported_phases_begin_at_later_and_later_steps() -> None:
    text = "data: {train_weights: [[0, {a: 1}], [9, {a: 1}], [5, {a: 1}]]}"
    with pytest.raises(ValueError, match=r"text of levanter: phases must begin .* \[0, 9, 5\]"):
        import_weights(text, source="levanter")


def test_imported_weights_are_numbers_with_a_sum() -> None:
    for text, words in (
        ("-1 /a/x 2 /a/y", "finite number >= 0; x has -1"),
        ("nan /a/x 2 /a/y", "finite number >= 0; x has nan"),
        ("0 /a/x", "all 1 are zero"),
    ):
        with pytest.raises(ValueError, match=words):
            import_weights(text, source="megatron-file")


# What comes from outside.


def test_a_package_adds_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Target("ours", "a line", lambda mixture: f"{mixture.shares()['web']}\n", "file")
    loaded: Any = ours

    class Point(EntryPoint):
        def load(self) -> Any:
            return loaded

    point = Point("ours", "package:target", registry.GROUP)
    assert registry.GROUP == "doge_fast.exporters"
    monkeypatch.setattr(registry, "_points", lambda: (point,))
    assert export({"web": 1.0}, to="ours", paths={"web": "/w"}).text.endswith("\n1.000000\n")
    loaded = "not a target"
    with pytest.raises(
        ValueError, match=r"must load a Target; ours \(package:target\) loads a str"
    ):
        targets()
    loaded = Target("megatron", "again", ours.write)
    with pytest.raises(ValueError, match="adds the target megatron, which there is"):
        targets()


def test_bad_weights_and_settings_are_refused() -> None:
    for weights, words in (
        ({}, "at least one domain"),
        ({"a": float("nan")}, "that of a is nan"),
        ({"a": -1.0, "b": 2.0}, "that of a is -1.0"),
        ({"a": 0.0}, "all 1 are zero"),
        ({"domains": [{"name": "a", "weight": 0.5}] * 2}, "has one weight; the names are a, a"),
        ({"domains": [{"name": "a", "weight": 1, "tokens": -3}]}, "tokens must be a whole"),
    ):
        with pytest.raises(ValueError, match=words):
            export(weights, to="json")
    with pytest.raises(
        ValueError, match=r"'megatrno'; did you mean megatron or .*--list names all"
    ):
        export(WEIGHTS, to="megatrno")
    with pytest.raises(ValueError, match="no target 'xyz'; there are megatron,"):
        export(WEIGHTS, to="xyz")
    with pytest.raises(ValueError, match="seq_length must be at least 1; got 0"):
        export(WEIGHTS, to="json", seq_length=0)
    # LLM Foundry would be told "1000000000.0tok".
    with pytest.raises(
        ValueError, match=r"budget_tokens must be a whole number.*; got 1000000000\.0"
    ):
        export(WEIGHTS, to="json", budget_tokens=1e9)
    with pytest.raises(ValueError, match="mean_doc_tokens must be above 0; that of web is 0"):
        export(WEIGHTS, to="json", mean_doc_tokens={"web": 0.0})
    with pytest.raises(ValueError, match="datasets is not read back; these are: megatron,"):
        import_weights("", source="datasets")
    for given in ([], ["/a", "/a"], {"/a": 0}, {}, 3, [3]):
        found: Any = {"web": given}
        with pytest.raises(ValueError, match="web"):
            export({"web": 1.0}, to="megatron", paths=found)
    with pytest.raises(ValueError, match="belongs to one domain; /a is given to web, code"):
        export(WEIGHTS, to="nanotron", paths={"web": "/a/", "code": ["/a"], "book": "/b"})


# The command line.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    records.write_weights(path, record(WEIGHTS | {"junk": 0.0}))
    return path


def words_of(paths: Mapping[str, str]) -> list[str]:
    return [f"{name}={path}" for name, path in paths.items()]


def test_the_verb_prints_writes_and_lists(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    export_it = ["export", str(file), "--to", "megatron", "--paths", *words_of(PATHS)]
    with caplog.at_level("INFO", logger="doge_fast"):
        assert cli.main([*export_it, "--decimals", "3"]) == 0
    assert (
        capsys.readouterr().out == "--data-path 0.268 /data/book 0.300 /data/code 0.432 /data/web\n"
    )
    assert "Left out, for the weight is 0: junk." in caplog.messages
    assert any("shares of tokens" in line for line in caplog.messages)
    out = file.with_name("blend.txt")
    assert cli.main([*export_it, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out}\n"
    assert out.read_text().startswith("--data-path 0.267801")
    assert cli.main(["export", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{listed}" for name in targets())
    assert max(map(len, listed.splitlines())) <= 100


def test_the_verb_writes_over_nothing_that_it_reads_or_a_run_keeps(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = file.with_name("run")
    corpus = {"domains": {name: {"train_tokens": 1} for name in NAMES}, "targets": {}}
    records.open_run(run, stage="base", config={}, corpus=corpus)
    records.write_weights(run, record())
    blend, paths = file.with_name("blend.txt"), file.with_name("paths.json")
    blend.write_text("3 /data/web 1 /data/code")
    paths.write_text(json.dumps(PATHS))
    before = {each: each.read_bytes() for each in file.parent.rglob("*.*")}
    into, back = [str(file), "--to", "megatron"], [str(blend), "--from", "megatron-file"]
    for words, out, why in (
        (into, file, "what is read here"),
        (into, paths, "what is read here"),
        (into, run / "config.json", "in a run directory"),
        ([str(run), "--to", "json"], run / "weights.json", "what is read here"),
        (back, blend, "what is read here"),
        (back, run, "in a run directory"),
        (back, run / "weights.json", "in a run directory"),
        (back, file.with_name("no") / "x.json", "x.json cannot be written: No such file"),
    ):
        asked = ["--out", str(out)] + (["--paths", str(paths)] if words is into else [])
        assert cli.main(["export", *words, *asked]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("doge-fast: ") == 1
    assert {each: each.read_bytes() for each in file.parent.rglob("*.*")} == before
    folder = file.with_name("folder")
    folder.mkdir()
    assert cli.main(["export", *back, "--out", str(folder)]) == 0
    assert capsys.readouterr().out == f"weights: {folder / 'weights.json'}\n"
    assert cli.main(["export", *into, "--paths", str(paths), "--out", str(run / "blend.txt")]) == 0


def test_paths_come_from_a_file_too(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"web": {"/data/a": 1, "/data/b": 1}, "code": ["/data/code"], "book": "/data/book"}
    written = yaml.safe_dump(parts)
    marked = f"%YAML 1.1\n---\n# Where they lie.\n{written}"
    for name, text in (
        ("paths.json", json.dumps(parts)),
        ("paths.yaml", written),
        ("marked.yml", marked),
    ):
        paths = file.with_name(name)
        paths.write_text(text)
        assert cli.main(["export", str(file), "--to", "megatron-file", "--paths", str(paths)]) == 0
        assert capsys.readouterr().out.split()[-4:] == [
            *("0.216100", "/data/a", "0.216099", "/data/b")
        ]


def test_a_file_that_is_no_yaml_is_refused_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = file.with_name("paths.yaml")
    for text in ("web: [/a\n", "web: /a\n---\nweb: /b\n", "web: {\t"):
        paths.write_text(text)
        assert cli.main(["export", str(file), "--to", "megatron", "--paths", str(paths)]) == 2
        said = capsys.readouterr().err
        assert "paths.yaml must be YAML or JSON and is not" in said
        assert said.count("\n") == 1


def test_the_verb_reads_back_and_translates(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blend = file.with_name("blend.txt")
    blend.write_text("3 /data/web 1 /data/code")
    out = file.with_name("imported.json")
    assert cli.main(["export", "--from", "megatron-file", str(blend), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"weights: {out}\n"
    found = records.read_weights(out)
    assert records.weights_by_name(found) == {"web": 0.75, "code": 0.25}
    assert (found["method"], found["source"]) == ("imported", "megatron-file")
    words = ["--to", "nanotron", "--paths", "web=/data/web", "code=/data/code"]
    assert cli.main(["export", str(blend), "--from", "megatron-file", *words]) == 0
    stages = yaml.safe_load(capsys.readouterr().out)["data_stages"]
    assert stages[0]["data"]["dataset"]["dataset_weights"] == [0.25, 0.75]


# Of a run's config.json, beside its domains.
CORPUS = {"targets": {}, "tokenizer_sha256": "0" * 64, "block_size": 128, "vocab_size": 512}


def test_a_run_directory_knows_the_length_of_its_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"train_tokens": 8000, "train_blocks": 10, "validation_blocks": 1, "documents": 10}
    corpus = CORPUS | {"domains": {"web": held, "code": held | {"documents": 40}}}
    run = tmp_path / "run"
    records.open_run(run, stage="base", config=BaseConfig(run), corpus=corpus)
    # As every stage writes them.
    counts = {"web": {"mean_doc_tokens": 800.0}, "code": {"tokens": 8000, "documents": 40}}
    domains = [{"name": name, "weight": 0.5, **each} for name, each in counts.items()]
    records.write_weights(run, {"domains": domains})
    words = ["--to", "lingua", "--paths", "web=/data/web", "code=/data/code"]
    for file in (run, run / "weights.json"):
        assert cli.main(["export", str(file), *words]) == 0
        sources = yaml.safe_load(capsys.readouterr().out)["data"]["sources"]
        assert sources == {"web": 0.2, "code": 0.8}
    flags = ["--mean-doc-tokens", "web=100", "code=100"]
    assert cli.main(["export", str(run), *words, *flags]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["sources"] == {"web": 0.5, "code": 0.5}


def test_phases_come_from_another_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["export", str(file), "--to", "json", "--phases"]
    as_list, as_record = file.with_name("phases.yaml"), file.with_name("base.json")
    as_list.write_text(yaml.safe_dump(PHASES))
    records.write_weights(as_record, record(stages=PHASES))
    for given in (as_list, as_record):
        assert cli.main([*base, str(given)]) == 0
        assert json.loads(capsys.readouterr().out) == PHASES
    assert cli.main([*base, str(as_list), "--constant"]) == 0
    assert json.loads(capsys.readouterr().out)["web"] == 0.432199
    assert cli.main([*base, str(file)]) == 2
    assert "must hold phases" in capsys.readouterr().err


def test_the_phases_of_a_base_run_know_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    held = {"train_tokens": 8000, "train_blocks": 10, "validation_blocks": 1, "documents": 10}
    corpus = CORPUS | {"domains": {name: held for name in NAMES}}
    config = BaseConfig(run, training=TrainingConfig(steps=2048))
    records.open_run(run, stage="base", config=config, corpus=corpus)
    records.write_weights(run, record(stages=PHASES))
    for words in ([str(run)], [str(run / "weights.json"), "--phases", str(run)]):
        assert cli.main(["export", *words, "--to", "json", "--steps", "4096"]) == 0
        phases = json.loads(capsys.readouterr().out)
        assert [phase["first_step"] for phase in phases] == [0, 2048]


def test_every_flag_of_the_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["export", "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: doge-fast export" in printed
    assert "A weights.json, or a run directory" in printed
    names = [field.name.strip("_") for field in dataclasses.fields(ExportConfig)]
    for flag in (name.replace("_", "-") for name in names if name != "file"):
        assert re.search(rf"--{flag}\b[^(]*?[A-Za-z]{{3,}}[^(]*\(", printed), flag


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["FILE", "--to", "json", "--budget-tokens", "inf"], "budget_tokens must be a finite"),
        (["FILE", "--to", "json", "--out", "/nowhere/x"], "/nowhere/x cannot be written"),
        (["--to", "json"], "export needs a file"),
        (["FILE"], "--to TARGET to write it"),
        (["FILE", "--to", "megatron", "--paths", "web"], "takes NAME=PATH ...*got 'web'"),
        (["FILE", "--to", "megatron", "--paths", "no.json"], "no.json cannot be read"),
        (
            ["FILE", "--to", "json", "--mean-doc-tokens", "web=x"],
            "mean_doc_tokens must be a number, or NAME=NUMBER",
        ),
        (["no.json", "--to", "json"], "no.json does not exist"),
        (["no.txt", "--from", "json"], "no.txt cannot be read"),
    ],
)
def test_the_verb_refuses_in_one_sentence(
    words: list[str], sentence: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(file) if word == "FILE" else word for word in words]
    assert cli.main(["export", *asked]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in sentence.split("*"))
