"""Tuners that know data sets by name and draw examples: LLaMA-Factory, ms-swift, DataFlex."""

import shlex
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from doge_fast.pipeline.exports.blend import Blend
from doge_fast.pipeline.exports.target import Found, Phases, Target, placed
from doge_fast.pipeline.exports.text import arguments, from_yaml, plain, to_yaml


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
            "Name it otherwise in dataset_info.json, and here as --paths NAME=DATASET."
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


def _read_factory(text: str) -> Phases:
    value = from_yaml(text)
    names, shares = value["dataset"].split(","), str(value["interleave_probs"]).split(",")
    return [(0, _known(names, shares))]


def _known(names: Sequence[str], shares: Sequence[Any]) -> list[Found]:
    """Shares of data sets, whose names may be what `paths` gives a domain, or the domains' own."""
    pairs = zip((name.strip() for name in names), shares, strict=True)
    return [Found(float(share), name=name, path=name) for name, share in pairs]


def _flex(blend: Blend) -> str:
    found, steps = _datasets(blend), blend.settings.total_steps()
    value: dict[str, Any] = {
        "dataset": ",".join(found),
        "train_type": "dynamic_mix",
        "static_mix": True,
        "mixture_sample_rule": "mixture",
        "init_mixture_proportions": [float(share) for share in found.values()],
    }
    return to_yaml(value | ({"train_step": steps} if steps else {}))


def _read_flex(text: str) -> Phases:
    value = from_yaml(text)
    return [(0, _known(value["dataset"].split(","), value["init_mixture_proportions"]))]


def _swift(blend: Blend) -> str:
    weighted = blend.weighted_paths()
    lines = [
        f"--dataset {shlex.join(path for _, path in weighted)}",
        f"--interleave_prob {' '.join(plain(share) for share, _ in weighted)}",
        "--stopping_strategy all_exhausted",
    ]
    return " \\\n".join(lines) + "\n"


def _read_swift(text: str) -> Phases:
    paths, shares = arguments(text, "--dataset"), arguments(text, "--interleave_prob")
    return [(0, placed(zip(shares, paths, strict=True)))]


_NAMES = "name in dataset_info.json; without one, the domain's own"

TARGETS: Sequence[Target] = (
    Target(
        "llama-factory",
        "LLaMA-Factory's mix_strategy and interleave_probs",
        _factory,
        _NAMES,
        "llamafactory 0.9.5, 2026-11-22",
        rows=("documents", "blocks"),
        needs_paths=False,
        traps=(
            "It packs examples after they are drawn.",
            "mix_strategy is concat unless it is set, and then refuses probabilities. "
            "interleave_over repeats small sets until every example was seen; interleave_under "
            "ends with the first set that does.",
            "An eval_dataset must name as many sets; val_size does without.",
        ),
        read=_read_factory,
    ),
    Target(
        "ms-swift",
        "ms-swift's arguments --dataset and --interleave_prob",
        _swift,
        "file, folder or id of a data set",
        "ms-swift 4.6.0, 2026-11-22",
        rows=("documents", "blocks"),
        comment=None,
        traps=(
            "It packs examples after they are drawn.",
            "Without --interleave_prob it puts the sets one after another. stopping_strategy is "
            "first_exhausted unless it is set.",
            "In an id # and : begin a number of examples and subsets.",
        ),
        read=_read_swift,
    ),
    Target(
        "dataflex",
        "DataFlex's static mixture (init_mixture_proportions)",
        _flex,
        _NAMES,
        "dataflex 1.1.0, 2026-11-22",
        rows=("blocks", "documents"),
        needs_paths=False,
        traps=(
            "It draws examples after their preparation: in pretraining (stage: pt) these are "
            "blocks of cutoff_len, and the weights token shares; elsewhere give --rows documents.",
            "Without train_step it trains for one pass; --steps, or a budget, sets it.",
        ),
        read=_read_flex,
    ),
)
