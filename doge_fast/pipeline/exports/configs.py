"""Frameworks that read their mixture from YAML or arguments, tuners that know data sets by name."""

import shlex
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

from doge_fast.pipeline.exports.blend import Blend
from doge_fast.pipeline.exports.text import plain, to_json, to_yaml

# Levanter fixes how many of each domain a block holds: the default, and up to what 16 bits hold.
_LEVANTER_BLOCK = 2048
_LEVANTER_BLOCKS = (2048, 4096, 8192, 16384, 32768, 2**16 - 1)
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


def _nanotron(blend: Blend) -> str:
    shares, folders = zip(*blend.weighted_paths(), strict=True)
    dataset = {"dataset_folder": folders, "dataset_weights": shares}
    data = {"seed": blend.settings.seed, "num_loading_workers": 1, "dataset": dataset}
    stage = {"name": "training", "start_training_step": 1, "data": data}
    return to_yaml({"data_stages": [stage]})


def _levanter(blend: Blend) -> str:
    components: dict[str, Any] = {}
    for name in blend.shares():
        if urls := blend.paths_of(name):
            components[name] = {"source": {"type": "url", "train_urls": urls}}
    block = _levanter_block(blend)
    own = {} if block == _LEVANTER_BLOCK else {"mixture_block_size": block}
    data = {"components": components} if components else {}
    return to_yaml({"data": data | {"train_weights": blend.shares()} | own})


def _levanter_block(blend: Blend) -> int:
    """The first block, from the default on, that holds every domain and rounds little."""
    shares = blend.numbers()
    for block in _LEVANTER_BLOCKS:
        # It rounds down; a unit of float64 may be lost where it divides by the sum.
        lost = [name for name, share in shares.items() if share * block < 1 + 1e-12]
        kept = sum(int(share * block) for share in shares.values())
        if not lost and block - kept <= _MOST_ROUNDED * block:
            break
    if lost:
        raise ValueError(
            f"Levanter draws whole sequences from blocks of {block}, and would draw none of "
            f"{', '.join(lost)}: their weights are below 1/{block}. Raise them (doge-fast weights "
            "constrain --floor), or leave them out (fewer decimals)."
        )
    return block


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


def _swift(blend: Blend) -> str:
    shares, paths = zip(*blend.weighted_paths(), strict=True)
    lines = [
        f"--dataset {shlex.join(paths)}",
        f"--interleave_prob {' '.join(map(plain, shares))}",
        "--stopping_strategy all_exhausted",
    ]
    return " \\\n".join(lines) + "\n"


WRITERS: Mapping[str, Callable[[Blend], str]] = {
    "olmo-core": _olmo,
    "nanotron": _nanotron,
    "levanter": _levanter,
    "lingua": _lingua,
    "maxtext": _maxtext,
    "llama-factory": _factory,
    "ms-swift": _swift,
    "json": lambda blend: to_json(blend.shares()),
}
