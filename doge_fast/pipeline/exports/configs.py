"""Frameworks that read their mixture from YAML, tuners that know data sets by name, and tables."""

import csv
import io
import json
import math
import operator
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial, reduce
from pathlib import PurePosixPath
from typing import Any

from doge_fast.pipeline.exports.blend import Blend, Format, Found, Phases, Split, named, placed
from doge_fast.pipeline.exports.text import arguments, from_yaml, plain, to_json, to_yaml
from doge_fast.pipeline.tables import markdown, table_of

# Levanter fixes how many of each domain a block holds, and changes weights between blocks only.
_LEVANTER_BLOCK = 2048
# A block holds whole sequences of every domain, so its length is how fine the shares can be.
_SHORTEST_BLOCK = 256
# It packs the place in a block into 16 bits.
_LONGEST_BLOCK = 2**16 - 1
# Part of a block that rounding may give to the largest domain before a longer one is asked for.
_MOST_ROUNDED = 0.01


def _olmo(blend: Blend) -> str:
    sources = [
        {
            "source_name": name,
            "target_ratio": share,
            "paths": blend.paths_of(name),
            "max_repetition_ratio": blend.repetition(name),
            "max_source_fraction": 1.0,
        }
        for name, share in blend.shares().items()
    ]
    return to_yaml({"sources": sources})


def _read_olmo(text: str) -> Phases:
    sources = from_yaml(text)["sources"]
    return [(0, named((each["source_name"], each["target_ratio"]) for each in sources))]


def _nanotron(blend: Blend) -> str:
    stages = []
    for index, phase in enumerate(blend.phases):
        shares, folders = zip(*blend.weighted_paths(index), strict=True)
        dataset = {"dataset_folder": folders, "dataset_weights": shares}
        stages.append(
            {
                "name": f"phase {index + 1}" if len(blend.phases) > 1 else "training",
                # The first step is 1 there, 0 here.
                "start_training_step": phase.first_step + 1,
                "data": {
                    "seed": blend.settings.seed,
                    "num_loading_workers": 1,
                    "dataset": dataset,
                },
            }
        )
    return to_yaml({"data_stages": stages})


def _read_nanotron(text: str) -> Phases:
    phases = []
    for stage in from_yaml(text)["data_stages"]:
        dataset = stage["data"]["dataset"]
        folders = dataset["dataset_folder"]
        if isinstance(folders, str):
            folders = {folders: 1.0}
        # A mapping, as releases up to 0.4 have it, or a list beside its weights.
        weights = folders.values() if isinstance(folders, dict) else dataset["dataset_weights"]
        found = placed(zip(weights, folders, strict=True))
        phases.append((int(stage["start_training_step"]) - 1, found))
    return phases


def _levanter(blend: Blend) -> str:
    components: dict[str, Any] = {}
    for name in blend.names():
        if urls := blend.paths_of(name):
            components[name] = {"source": {"type": "url", "train_urls": urls}}
    weights: Any = blend.shares()
    if len(blend.phases) > 1:
        # A domain that a phase leaves out is said to be left out.
        weights = [
            [phase.first_step, dict.fromkeys(blend.names(), 0.0) | blend.shares(index)]
            for index, phase in enumerate(blend.phases)
        ]
    block = _levanter_block(blend)
    own = {} if block == _LEVANTER_BLOCK else {"mixture_block_size": block}
    data = {"components": components} if components else {}
    return to_yaml({"data": data | {"train_weights": weights} | own})


def _levanter_block(blend: Blend) -> int:
    """The first block, from the default on, that holds every domain and rounds little."""
    phases = [blend.numbers(phase) for phase in range(len(blend.phases))]
    lost = set[str]()
    for block in _levanter_blocks(blend):
        # It rounds down; a unit of float64 may be lost where it divides by the sum.
        lost = {n for shares in phases for n, share in shares.items() if share * block < 1 + 1e-12}
        kept = min(sum(int(share * block) for share in shares.values()) for shares in phases)
        if not lost and block - kept <= _MOST_ROUNDED * block:
            break
    if lost:
        raise ValueError(
            f"Levanter draws whole sequences from blocks of {block}, and would draw none of "
            f"{', '.join(sorted(lost))}: their weights are below 1/{block}. Raise them (doge-fast "
            "weights constrain --floor), or leave them out (fewer decimals)."
        )
    return block


def _levanter_blocks(blend: Blend) -> list[int]:
    """Blocks at whose ends all phases begin: from the default on, and the longest."""
    batch, firsts = blend.settings.batch_size, [phase.first_step for phase in blend.phases[1:]]
    if firsts and batch is None:
        return [_LEVANTER_BLOCK]
    end = math.gcd(*(first * (batch or 1) for first in firsts))
    usual = [_LEVANTER_BLOCK * 2**power for power in range(5)]
    longest = next((b for b in range(_LONGEST_BLOCK, _SHORTEST_BLOCK - 1, -1) if end % b == 0), 0)
    if not longest:
        every = _LEVANTER_BLOCK // math.gcd(batch or 1, _LEVANTER_BLOCK)
        raise ValueError(
            f"Levanter changes weights between blocks of {_LEVANTER_BLOCK} sequences; with {batch} "
            f"sequences in a step that is every {every} steps, but phases begin at {[0, *firsts]}. "
            f"Let them begin at or near multiples of {every}."
        )
    return [*(block for block in usual if end % block == 0), longest]


def _read_levanter(text: str) -> Phases:
    value = from_yaml(text)
    weights = value.get("data", value)["train_weights"]
    stages: Any = [[0, weights]] if isinstance(weights, dict) else weights
    return [(int(first), named(stage.items())) for first, stage in stages]


def _fast_llm(blend: Blend) -> str:
    splits: dict[str, Split] = {"training": "train", "validation": "valid"}
    datasets = {}
    for name, split in splits.items():
        if weighted := blend.weighted_paths(split=split):
            files = [{"type": "file", "path": path} for _, path in weighted]
            shares = [share for share, _ in weighted]
            blended = {"type": "blended", "datasets": files, "weights": shares}
            # It takes no blend of one.
            datasets[name] = blended if len(files) > 1 else files[0]
    return to_yaml({"data": {"datasets": datasets}})


def _read_fast_llm(text: str) -> Phases:
    value = from_yaml(text)
    datasets = value.get("data", {}).get("datasets", {})
    # Earlier releases spelt it in upper case.
    found = datasets.get("training") or datasets.get("Training") or value
    if found["type"] == "file":
        return [(0, placed([(1.0, found["path"])]))]
    paths = [each["path"] for each in found["datasets"]]
    return [(0, placed(zip(found["weights"], paths, strict=True)))]


def _lingua(blend: Blend) -> str:
    shares = blend.shares()
    folders = {name: PurePosixPath(blend.one_path(name).rstrip("/")) for name in shares}
    roots = sorted({str(folder.parent) for folder in folders.values()})
    if len(roots) > 1:
        raise ValueError(
            "lingua's sources are folders of one root_dir; these lie in "
            f"{', '.join(roots)}. Link to them from one folder."
        )
    sources = {folders[name].name: share for name, share in shares.items()}
    return to_yaml({"data": {"root_dir": roots[0], "sources": sources}})


def _read_lingua(text: str) -> Phases:
    value = from_yaml(text)
    data = value.get("data", value)
    root = str(data.get("root_dir") or ".").rstrip("/")
    return [(0, placed((w, f"{root}/{name}") for name, w in data["sources"].items()))]


def _juicer(blend: Blend) -> str:
    blend.require("budget_tokens", why="without max_sample_num it does not look at the weights")
    if blend.rows == "blocks":
        blend.require("seq_length", why="rows are blocks, and it counts rows")
    weighted = blend.weighted_paths()
    configs = [{"type": "local", "path": path, "weight": share} for share, path in weighted]
    return to_yaml({"dataset": {"max_sample_num": blend.rows_in_budget(), "configs": configs}})


def _energon(blend: Blend) -> str:
    splits: dict[str, Split] = {"train": "train", "val": "valid", "test": "test"}
    value = {}
    for name, split in splits.items():
        if weighted := blend.weighted_paths(split=split):
            value[name] = {"blend": [{"weight": share, "path": path} for share, path in weighted]}
    return to_yaml(
        {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": value}
    )


def _read_list(text: str, keys: Sequence[str]) -> Phases:
    """A list of objects with a path, and a weight where it is not 1, under keys in keys."""
    found = reduce(operator.getitem, keys, from_yaml(text))
    return [(0, placed((each.get("weight", 1.0), each["path"]) for each in found))]


def _maxtext(blend: Blend) -> str:
    weighted = blend.weighted_paths()
    lost = [path for share, path in weighted if not round(float(share), 4)]
    if lost:
        raise ValueError(
            f"MaxText rounds weights to 4 decimals and would draw none of {', '.join(lost)}. Leave "
            "them out (decimals=4), or raise them (doge-fast weights constrain --floor)."
        )
    unreadable = [path for _, path in weighted if "," in path or ";" in path]
    if unreadable:
        raise ValueError(
            f"MaxText splits grain_train_files at , and ; and these paths hold one: "
            f"{', '.join(unreadable)}. Rename them."
        )
    # A pattern alone has no weight.
    files = [f"{path},{plain(share)}" for share, path in weighted]
    patterns = ";".join(files) if len(files) > 1 else weighted[0][1]
    return to_yaml(
        {"dataset_type": "grain", "grain_file_type": "arrayrecord", "grain_train_files": patterns}
    )


def _read_maxtext(text: str) -> Phases:
    patterns = [pattern.split(",") for pattern in from_yaml(text)["grain_train_files"].split(";")]
    if len(patterns) == 1:
        patterns = [[*patterns[0], "1"]]
    return [(0, placed((weight, path) for path, weight in patterns))]


def _datasets(blend: Blend) -> dict[str, Decimal]:
    """{data set: share}, by its name in dataset_info.json: the path given, or else the domain's."""
    found = {
        blend.one_path(name) if blend.paths_of(name) else name: share
        for name, share in blend.shares().items()
    }
    split = [name for name in found if "," in name]
    if split:
        raise ValueError(
            f"LLaMA-Factory splits the names of data sets at commas; {', '.join(split)} holds one. "
            "Give it another name in dataset_info.json, and here as --paths NAME=DATASET."
        )
    return found


def _factory(blend: Blend) -> str:
    found = _datasets(blend)
    return to_yaml(
        {
            "dataset": ",".join(found),
            "mix_strategy": "interleave_over",
            "interleave_probs": ",".join(map(plain, found.values())),
        }
    )


def _flex(blend: Blend) -> str:
    found, steps = _datasets(blend), blend.settings.total_steps()
    value: dict[str, Any] = {
        "dataset": ",".join(found),
        "train_type": "dynamic_mix",
        "static_mix": True,
        "mixture_sample_rule": "mixture",
        "init_mixture_proportions": list(found.values()),
    }
    return to_yaml(value | ({"train_step": steps} if steps else {}))


def _read_datasets(text: str, key: str) -> Phases:
    """Names may be what `paths` gives a domain, or the domains' own."""
    value = from_yaml(text)
    names, shares = value["dataset"].split(","), value[key]
    shares = shares if isinstance(shares, list) else str(shares).split(",")
    pairs = zip(map(str.strip, names), map(float, shares), strict=True)
    return [(0, [Found(share, name=name, path=name) for name, share in pairs])]


def _swift(blend: Blend) -> str:
    shares, paths = zip(*blend.weighted_paths(), strict=True)
    lines = [
        f"--dataset {shlex.join(paths)}",
        f"--interleave_prob {' '.join(map(plain, shares))}",
        "--stopping_strategy all_exhausted",
    ]
    return " \\\n".join(lines) + "\n"


def _read_swift(text: str) -> Phases:
    paths, shares = arguments(text, "--dataset"), arguments(text, "--interleave_prob")
    return [(0, placed(zip(shares, paths, strict=True)))]


def _rows(blend: Blend) -> list[dict[str, Any]]:
    """A row per domain, largest weight first; columns that no domain has are left out."""
    shares, budget = blend.shares(), blend.settings.budget_tokens
    rows = []
    for name in sorted(shares, key=lambda name: (-shares[name], name)):
        entry, share = blend.entries[name], float(shares[name])
        prior, tokens = entry.get("prior"), entry.get("tokens")
        rows.append(
            {
                "domain": name,
                "weight": shares[name],
                "weight_std": entry.get("weight_std"),
                "last": entry.get("weight_last"),
                "prior": prior,
                "ratio": share / prior if prior else None,
                "tokens": tokens,
                "epochs": budget * share / tokens if budget and tokens else None,
            }
        )
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def _markdown(blend: Blend) -> str:
    forms = {"domain": "", "weight": "f", "tokens": ",", "ratio": ".2f", "epochs": ".2f"}
    share, rows = f".{blend.settings.decimals}f", _rows(blend)
    cells = [
        ["" if row[key] is None else format(row[key], forms.get(key, share)) for key in row]
        for row in rows
    ]
    return markdown(table_of(list(rows[0]), cells)) + "\n"


def _csv(blend: Blend) -> str:
    rows = _rows(blend)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "weight": plain(row["weight"])} for row in rows)
    return text.getvalue()


def _read_csv(text: str) -> Phases:
    rows = csv.DictReader(io.StringIO(text))
    try:
        return [(0, named((row["domain"], row["weight"]) for row in rows))]
    except csv.Error as error:
        # Which is no ValueError.
        raise ValueError(str(error)) from error


def _json(blend: Blend) -> str:
    phases = [
        {"first_step": phase.first_step, "weights": blend.shares(index)}
        for index, phase in enumerate(blend.phases)
    ]
    return to_json(phases if len(phases) > 1 else blend.shares())


def _read_json(text: str) -> Phases:
    value = json.loads(text)
    if isinstance(value, dict):
        value = [{"first_step": 0, "weights": value}]
    return [(int(each["first_step"]), named(each["weights"].items())) for each in value]


FORMATS: Mapping[str, Format] = {
    "olmo-core": (_olmo, _read_olmo),
    "nanotron": (_nanotron, _read_nanotron),
    "levanter": (_levanter, _read_levanter),
    "fast-llm": (_fast_llm, _read_fast_llm),
    "lingua": (_lingua, _read_lingua),
    "data-juicer": (_juicer, partial(_read_list, keys=("dataset", "configs"))),
    "energon": (_energon, partial(_read_list, keys=("splits", "train", "blend"))),
    "maxtext": (_maxtext, _read_maxtext),
    "llama-factory": (_factory, partial(_read_datasets, key="interleave_probs")),
    "ms-swift": (_swift, _read_swift),
    "dataflex": (_flex, partial(_read_datasets, key="init_mixture_proportions")),
    "markdown": (_markdown, None),
    "json": (_json, _read_json),
    "csv": (_csv, _read_csv),
}
