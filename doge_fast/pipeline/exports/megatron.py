"""Megatron and what is built on it: prefixes of indexed data sets, each after its weight.

Weights count samples, which are sequences of one length, so shares of tokens are taken as they are.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from doge_fast.pipeline.exports.blend import Blend, Format, Phases, Split, placed
from doge_fast.pipeline.exports.text import (
    arguments,
    from_yaml,
    plain,
    sequence,
    string,
    to_json,
    to_yaml,
)

_FLAGS: dict[Split, str] = {
    "train": "--train-data-path",
    "valid": "--valid-data-path",
    "test": "--test-data-path",
}


def _prefixes(blend: Blend, split: Split = "train", phase: int = 0) -> list[tuple[str, str]]:
    """[(share, prefix)] of a split; empty where it has no paths."""
    found = []
    for share, path in blend.weighted_paths(phase, split):
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


def _words(blend: Blend, split: Split = "train", phase: int = 0) -> list[str]:
    return [word for pair in _prefixes(blend, split, phase) for word in pair]


def _flags(blend: Blend, phase: int = 0) -> list[str]:
    """A flag for each split that has paths, with its words."""
    words = {flag: _words(blend, split, phase) for split, flag in _FLAGS.items()}
    given = {flag: shlex.join(each) for flag, each in words.items() if each}
    if len(given) == 1:
        given = {"--data-path": given[_FLAGS["train"]]}
    return [f"{flag} {each}" for flag, each in given.items()]


def _phases(blend: Blend) -> str:
    """A launch for each phase: Megatron has no flag for weights that change."""
    firsts = [phase.first_step for phase in blend.phases]
    batch = blend.settings.batch_size
    lines = []
    for index, (first, until) in enumerate(zip(firsts, [*firsts[1:], "the end"], strict=True)):
        samples = f", from sample {first * batch} on" if batch else ""
        lines.append(f"# Phase {index + 1}: iterations {first} to {until}{samples}")
        lines.append(f"PHASE_{index + 1}=(")
        if len(firsts) > 1:
            lines.append(f"  --phase-transition-iterations {','.join(map(str, firsts[1:]))}")
        lines += [*(f"  {flag}" for flag in _flags(blend, index)), ")"]
    return "\n".join(lines) + "\n"


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


def _curator(blend: Blend) -> str:
    lines = map(" ".join, _prefixes(blend))
    return "#!/bin/bash\ncat <<'EOF'\n" + "\n".join(lines) + "\nEOF\n"


def _pairs(words: Sequence[str]) -> Phases:
    """[weight, prefix, weight, prefix, ...] -> shares."""
    return [(0, placed(zip(words[::2], words[1::2], strict=True)))]


def _read_per_split(text: str) -> Phases:
    train = json.loads(text)["train"]
    return _pairs(train.split() if isinstance(train, str) else [str(word) for word in train])


def _read_neox(text: str) -> Phases:
    given = {key.replace("_", "-"): value for key, value in from_yaml(text).items()}
    paths = given["train-data-paths"]
    weights = given.get("train-data-weights") or [1.0] * len(paths)
    return [(0, placed(zip(weights, paths, strict=True)))]


def _read_curator(text: str) -> Phases:
    kept = [line for line in text.splitlines() if not line.startswith(("#", "cat ", "EOF"))]
    return _pairs(" ".join(kept).split())


FORMATS: Mapping[str, Format] = {
    "megatron": (
        lambda blend: " \\\n".join(_flags(blend)) + "\n",
        lambda text: _pairs(arguments(text, "--data-path") or arguments(text, _FLAGS["train"])),
    ),
    "megatron-file": (
        lambda blend: " ".join(_words(blend)) + "\n",
        lambda text: _pairs(text.split()),
    ),
    "megatron-json": (
        lambda blend: to_json({split: _words(blend, split) or None for split in _FLAGS}),
        _read_per_split,
    ),
    "megatron-phases": (_phases, None),
    "megatron-bridge": (_bridge, None),
    "neox": (_neox, _read_neox),
    "curator": (_curator, _read_curator),
}
