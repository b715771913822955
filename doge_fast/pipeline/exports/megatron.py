"""Megatron and what is built on it: prefixes of indexed data sets, each after its weight.

Weights count samples, which are sequences of one length, so shares of tokens are taken as they are.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from doge_fast.pipeline.exports.blend import Blend, Split
from doge_fast.pipeline.exports.text import plain, sequence, string, to_yaml

_FLAGS: dict[Split, str] = {
    "train": "--train-data-path",
    "valid": "--valid-data-path",
    "test": "--test-data-path",
}


def _prefixes(blend: Blend, split: Split = "train") -> list[tuple[str, str]]:
    """[(share, prefix)] of a split; empty where it has no paths."""
    found = []
    for share, path in blend.weighted_paths(split):
        if re.search(r"\s", path):
            raise ValueError(
                "Megatron splits its lists at white space, and then reads none of the weights; "
                f"{path!r} has white space. Rename it, or link to it from a path without white "
                "space."
            )
        found.append((plain(share), path.removesuffix(".bin").removesuffix(".idx")))
    counts = Counter(prefix for _, prefix in found)
    twice = sorted(prefix for prefix, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"A .bin and its .idx are one path, their prefix; {', '.join(twice)} is given twice. "
            "Name it once."
        )
    return found


def _words(blend: Blend, split: Split = "train") -> list[str]:
    return [word for pair in _prefixes(blend, split) for word in pair]


def _megatron(blend: Blend) -> str:
    """A flag for each split that has paths, with its words."""
    words = {flag: _words(blend, split) for split, flag in _FLAGS.items()}
    given = {flag: shlex.join(each) for flag, each in words.items() if each}
    if len(given) == 1:
        given = {"--data-path": given[_FLAGS["train"]]}
    return " \\\n".join(f"{flag} {each}" for flag, each in given.items()) + "\n"


def _bridge(blend: Blend) -> str:
    shares, prefixes = zip(*_prefixes(blend), strict=True)
    lists = sequence(map(string, prefixes), "    "), sequence(shares, "    ")
    return f"cfg.dataset.blend = [\n    {lists[0]},\n    {lists[1]},\n]\n"


def _neox(blend: Blend) -> str:
    missing = [split for split in ("valid", "test") if not blend.paths[split]]
    if missing:
        raise ValueError(
            "GPT-NeoX takes train, valid and test paths together or none of them; there are none "
            f"for {' and '.join(missing)}. Give them (--valid-paths, --test-paths)."
        )
    value: dict[str, Any] = {}
    for split in _FLAGS:
        found = _prefixes(blend, split)
        value[f"{split}-data-paths"] = [path for _, path in found]
        value[f"{split}-data-weights"] = [float(share) for share, _ in found]
    return to_yaml(value | {"weight_by_num_documents": False})


WRITERS: Mapping[str, Callable[[Blend], str]] = {
    "megatron": _megatron,
    "megatron-file": lambda blend: " ".join(_words(blend)) + "\n",
    "megatron-bridge": _bridge,
    "neox": _neox,
}
