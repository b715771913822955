"""Megatron and what is built on it: prefixes of indexed data sets, each after its weight.

Weights count samples, which are sequences of one length, so shares of tokens are taken as they are.
"""

import json
import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from doge_fast.pipeline.exports.mixture import Mixture, Split
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.exports.text import (
    from_yaml,
    plain,
    sequence,
    string,
    to_json,
    to_yaml,
)

_TAKES = "prefix of .bin and .idx"
_FLAGS = {"train": "--train-data-path", "valid": "--valid-data-path", "test": "--test-data-path"}
_SUFFIXES = (".bin", ".idx")
_SEQUENCES = "Megatron draws sequences of --seq-length tokens, so the weights are token shares."
_PREFIXES = "A path is a prefix: .bin and .idx are cut off."


def _blend(mixture: Mixture, split: Split = "train", phase: int = 0) -> list[tuple[Decimal, str]]:
    """[(share, prefix)] of a split; empty where it has no paths.

    Raises:
        ValueError: two paths are one prefix, whose data would count twice.
    """
    if split != "train" and not mixture.paths[split]:
        return []
    blend = [(share, prefix_of(path)) for share, path in mixture.weighted_paths(phase, split)]
    prefixes = [prefix for _, prefix in blend]
    twice = sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1})
    if twice:
        raise ValueError(
            f"A .bin and its .idx are one path, their prefix; {', '.join(twice)} is given twice. "
            "Name it once."
        )
    return blend


def prefix_of(path: str) -> str:
    """A path without .bin or .idx.

    Raises:
        ValueError: it holds white space, at which Megatron splits what it reads.
    """
    if re.search(r"\s", path):
        raise ValueError(
            f"Megatron splits its lists at white space, and then reads none of the weights; "
            f"{path!r} holds some. Rename it, or link to it from a path without."
        )
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def _flat(blend: Sequence[tuple[Decimal, str]]) -> list[str]:
    return [word for share, prefix in blend for word in (plain(share), prefix)]


def _arguments(mixture: Mixture, phase: int = 0) -> str:
    held_out = {split: _blend(mixture, split, phase) for split in ("valid", "test")}
    train = _quoted(_blend(mixture, "train", phase))
    if not any(held_out.values()):
        return f"--data-path {train}\n"
    words = [f"{_FLAGS['train']} {train}"]
    words += [f"{_FLAGS[split]} {_quoted(blend)}" for split, blend in held_out.items() if blend]
    return " \\\n".join(words) + "\n"


def _quoted(blend: Sequence[tuple[Decimal, str]]) -> str:
    return " ".join(shlex.quote(word) for word in _flat(blend))


def _file(mixture: Mixture) -> str:
    return " ".join(_flat(_blend(mixture))) + "\n"


def _per_split(mixture: Mixture) -> str:
    value = {split: _flat(_blend(mixture, split)) or None for split in ("train", "valid", "test")}
    return to_json(value)


def _phases(mixture: Mixture) -> str:
    """A launch for each phase: Megatron has no flag for weights that change."""
    firsts = [phase.first_step for phase in mixture.phases]
    batch = mixture.settings.batch_size
    transitions = ",".join(str(first) for first in firsts[1:])
    lines = []
    for index, first in enumerate(firsts):
        until = f"to {firsts[index + 1]}" if index + 1 < len(firsts) else "to the end"
        samples = f", from sample {first * batch} on" if batch else ""
        lines.append(f"# Phase {index + 1}: iterations {first} {until}{samples}")
        lines.append(f"PHASE_{index + 1}=(")
        if transitions:
            lines.append(f"  --phase-transition-iterations {transitions}")
        # Inside the brackets of an array a line break is white space.
        arguments = _arguments(mixture, index).replace(" \\\n", "\n").splitlines()
        lines += [*(f"  {line}" for line in arguments), ")"]
    return "\n".join(lines) + "\n"


def _bridge(mixture: Mixture) -> str:
    blend = _blend(mixture)
    lines = ["cfg.dataset.blend = ["]
    lines.append(f"    {sequence([string(path) for _, path in blend], '    ')},")
    lines.append(f"    {sequence([plain(share) for share, _ in blend], '    ')},")
    return "\n".join([*lines, "]"]) + "\n"


def _nemo(mixture: Mixture) -> str:
    names = {"train": "train", "validation": "valid", "test": "test"}
    blends = {key: _blend(mixture, split) for key, split in names.items()}  # type: ignore[arg-type]
    missing = [key for key, blend in blends.items() if not blend]
    if missing == ["validation", "test"]:
        paths, split = _strings(_flat(blends["train"]), "    "), '    split="990,9,1",\n'
    elif missing:
        raise ValueError(
            f"NeMo's paths by split take train, validation and test; there is none for "
            f"{', '.join(missing)}. Give valid and test paths, or neither."
        )
    else:
        lists = [
            f'        "{key}": {_strings(_flat(blend), "        ")},\n'
            for key, blend in blends.items()
        ]
        paths, split = "{\n" + "".join(lists) + "    }", ""
    settings = {
        "seq_length": mixture.settings.seq_length,
        "global_batch_size": mixture.settings.batch_size,
        "seed": mixture.settings.seed,
    }
    given = [f"    {key}={value},\n" for key, value in settings.items() if value is not None]
    return (
        "from nemo.collections.llm import PreTrainingDataModule\n\n"
        f"data = PreTrainingDataModule(\n    paths={paths},\n{split}{''.join(given)})\n"
    )


def _strings(items: Sequence[str], indent: str) -> str:
    return sequence([string(item) for item in items], indent)


def _neox(mixture: Mixture) -> str:
    missing = [split for split in ("valid", "test") if not mixture.paths[split]]
    if missing:
        raise ValueError(
            "GPT-NeoX takes train, valid and test paths together or none of them; there are none "
            f"for {' and '.join(missing)}. Give them (--valid-paths, --test-paths)."
        )
    value: dict[str, Any] = {}
    for split in ("train", "valid", "test"):
        blend = _blend(mixture, split)
        value[f"{split}-data-paths"] = [path for _, path in blend]
        value[f"{split}-data-weights"] = [float(share) for share, _ in blend]
    value["weight_by_num_documents"] = False
    return to_yaml(value)


def _curator(mixture: Mixture) -> str:
    lines = [f"{plain(share)} {path}" for share, path in _blend(mixture)]
    return "#!/bin/bash\ncat <<'EOF'\n" + "\n".join(lines) + "\nEOF\n"


def _pairs(words: Sequence[str], where: str) -> Phases:
    """[weight, prefix, weight, prefix, ...] -> shares."""
    try:
        if not words or len(words) % 2:
            raise ValueError
        found = [Found(float(words[i]), path=words[i + 1]) for i in range(0, len(words), 2)]
    except ValueError:
        raise ValueError(
            f"{where} must hold weights and prefixes in turn, as in 0.3 /a/x 0.7 /b/y; it holds "
            f"{' '.join(words[:4]) or 'nothing'}{' ...' if len(words) > 4 else ''}."
        ) from None
    return [(0, found)]


def _read_file(text: str) -> Phases:
    return _pairs(text.split(), "A Megatron data file")


def _read_arguments(text: str) -> Phases:
    # A line that goes on is one for the shell.
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for flag in ("--data-path", _FLAGS["train"]):
        if flag in words:
            rest = words[words.index(flag) + 1 :]
            ends = [i for i, word in enumerate(rest) if word.startswith("--")]
            return _pairs(rest[: ends[0]] if ends else rest, flag)
    raise ValueError(f"Megatron arguments must hold --data-path or {_FLAGS['train']}.")


def _read_per_split(text: str) -> Phases:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"A per-split data file must hold JSON: {error}.") from None
    train = value.get("train") if isinstance(value, dict) else None
    words = train.split() if isinstance(train, str) else [str(word) for word in train or ()]
    return _pairs(words, 'The "train" of a per-split data file')


def _read_neox(text: str) -> Phases:
    value = from_yaml(text, "A GPT-NeoX config")
    paths = value.get("train-data-paths") or value.get("train_data_paths")
    weights = value.get("train-data-weights") or value.get("train_data_weights")
    if not paths or len(weights or paths) != len(paths):
        raise ValueError(
            "A GPT-NeoX config must hold train-data-paths and as many train-data-weights; it holds "
            f"{paths!r} and {weights!r}."
        )
    weights = weights or [1.0] * len(paths)
    return [(0, [Found(float(w), path=path) for w, path in zip(weights, paths, strict=True)])]


def _read_curator(text: str) -> Phases:
    kept = [line for line in text.splitlines() if not line.startswith(("#", "cat ", "EOF"))]
    return _pairs(" ".join(kept).split(), "A Curator mixture file")


_SPLITS = (
    "Without valid and test paths Megatron cuts them from the same data by --split; with them they "
    "take the training shares."
)

TARGETS = (
    Target(
        "megatron",
        "Megatron-LM arguments",
        _arguments,
        _TAKES,
        comment=None,
        traps=(_SEQUENCES, _PREFIXES, _SPLITS),
        read=_read_arguments,
    ),
    Target(
        "megatron-file",
        "the file of Megatron-LM's --data-args-path",
        _file,
        _TAKES,
        comment=None,
        traps=(_SEQUENCES, _PREFIXES, "Whoever edits it: it is split at white space."),
        read=_read_file,
    ),
    Target(
        "megatron-json",
        "the file of --per-split-data-args-path (Megatron-LM, Megatron-Bridge)",
        _per_split,
        _TAKES,
        comment=None,
        traps=(
            _SEQUENCES,
            _PREFIXES,
            "All three keys must be there; null is a split without data.",
        ),
        read=_read_per_split,
    ),
    Target(
        "megatron-phases",
        "a Megatron-LM launch for each phase",
        _phases,
        _TAKES,
        has_phases=True,
        traps=(
            _SEQUENCES,
            _PREFIXES,
            "Stop at each transition and launch again with the next phase's arguments: "
            "--phase-transition-iterations has no weights, and asks for a fixed global batch.",
        ),
    ),
    Target(
        "megatron-bridge",
        "Megatron-Bridge's cfg.dataset.blend",
        _bridge,
        _TAKES,
        traps=(_SEQUENCES, _PREFIXES, "blend_weights, in an old migration guide, is not read."),
    ),
    Target(
        "nemo",
        "NeMo 2's PreTrainingDataModule",
        _nemo,
        _TAKES,
        traps=(
            _SEQUENCES,
            _PREFIXES,
            "The key is validation, not valid, and its weights are not read where "
            "limit_val_batches <= 1.",
        ),
    ),
    Target(
        "neox",
        "GPT-NeoX config lines",
        _neox,
        _TAKES,
        traps=(
            "GPT-NeoX draws sequences of seq_length tokens, so the weights are token shares.",
            _PREFIXES,
            "weight_by_num_documents would override the weights; train_epochs cannot go with them.",
        ),
        read=_read_neox,
    ),
    Target(
        "curator",
        "a mixture file of NeMo Curator's CLIMB recipe, whose output --train-data-path takes",
        _curator,
        _TAKES,
        comment=None,
        traps=(_SEQUENCES, _PREFIXES),
        read=_read_curator,
    ),
)
