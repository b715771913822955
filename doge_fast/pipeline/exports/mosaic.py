"""MosaicML Streaming, and LLM Foundry which reads its streams from YAML.

Weights are proportions of samples: shares of tokens where every sample holds equally many.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from doge_fast.pipeline.exports.mixture import REMOTE, Mixture, Rows
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.exports.text import from_yaml, plain, sequence, string, to_yaml


def _stream(mixture: Mixture, name: str) -> dict[str, Any]:
    """Where MosaicML Streaming finds a domain: a remote copied to a folder, or a folder."""
    path, local = mixture.one_path(name), mixture.settings.local_dir
    if REMOTE not in path:
        return {"local": path}
    return {"remote": path} | ({"local": f"{local.rstrip('/')}/{name}"} if local else {})


def _batching(mixture: Mixture) -> str:
    """MosaicML's stratified batches where each holds a sample of every domain, else random ones.

    Stratified rounds the shares to whole samples of the batch over all devices, by largest
    remainder, and stops with an error where a domain is left without one.
    """
    batch = mixture.settings.batch_size
    if batch is None:
        return "random"
    phases = range(len(mixture.phases))
    least = min(min(_per_batch(mixture.numbers(phase), batch).values()) for phase in phases)
    return "stratified" if least else "random"


def _per_batch(shares: Mapping[str, float], batch: int) -> dict[str, int]:
    counts = {name: int(share * batch) for name, share in shares.items()}
    by_rest = sorted(counts, key=lambda name: counts[name] - shares[name] * batch)
    for name in by_rest[: batch - sum(counts.values())]:
        counts[name] += 1
    return counts


def _streams(mixture: Mixture, phase: int) -> dict[str, Any]:
    shares = mixture.numbers(phase)
    return {
        name: _stream(mixture, name) | {"split": "train", "proportion": share}
        for name, share in shares.items()
    }


def _foundry(mixture: Mixture) -> str:
    length = mixture.settings.seq_length
    dataset = {
        "streams": _streams(mixture, 0),
        "shuffle": True,
        "batching_method": _batching(mixture),
        **({"max_seq_len": length} if length else {}),
    }
    value: dict[str, Any] = {"train_loader": {"name": "text", "dataset": dataset}}
    if len(mixture.phases) > 1:
        value["callbacks"] = {"curriculum_learning": _curriculum(mixture)}
        value["max_duration"] = f"{mixture.settings.budget_tokens}tok"
    return to_yaml(value)


def _curriculum(mixture: Mixture) -> dict[str, Any]:
    """LLM Foundry counts a phase by its tokens, and the sum must be the whole training."""
    mixture.require(
        "seq_length",
        "batch_size",
        "budget_tokens",
        why="phases begin at optimizer steps, and it counts tokens",
    )
    step, budget = mixture.settings.tokens_per_step() or 0, mixture.settings.budget_tokens or 0
    ends = [phase.first_step * step for phase in mixture.phases[1:]] + [budget]
    starts = [0, *ends[:-1]]
    if starts[-1] >= budget:
        raise ValueError(
            f"The last phase begins after {starts[-1]} tokens ({mixture.phases[-1].first_step} "
            f"steps of {step}), and budget_tokens is {budget}: it would never come. Give the "
            "tokens of the whole training, or fewer phases."
        )
    durations = [f"{end - start}tok" for start, end in zip(starts, ends, strict=True)]
    schedule = [
        {"duration": duration, "dataset": {"streams": _streams(mixture, index)}}
        for index, duration in enumerate(durations)
    ]
    return {"duration": durations[0], "schedule": schedule[1:]}


def _read_foundry(text: str) -> Phases:
    value = from_yaml(text, "An LLM Foundry config")
    value = value.get("variables", {}) | value
    loader = value.get("train_loader", value)
    first = _proportions(loader.get("dataset", loader), "train_loader.dataset")
    callback = value.get("callbacks", {}).get("curriculum_learning")
    if not callback:
        return [(0, first)]
    phases, start = [(0, first)], _tokens(callback.get("duration"))
    for each in callback.get("schedule", ()):
        phases.append((start, _proportions(each.get("dataset", {}), "schedule")))
        start += _tokens(each.get("duration"))
    return phases


def _tokens(duration: Any) -> int:
    words = str(duration)
    if not re.fullmatch(r"\d+tok", words):
        raise ValueError(f"A curriculum's durations must be tokens, as in 1000tok; got {words!r}.")
    return int(words.removesuffix("tok"))


def _proportions(dataset: Mapping[str, Any], where: str) -> list[Found]:
    streams = dataset.get("streams")
    if not isinstance(streams, dict) or any("proportion" not in s for s in streams.values()):
        raise ValueError(f"{where} must hold streams, each with a proportion; it has {streams!r}.")
    return [
        Found(float(each["proportion"]), name=name, path=each.get("remote") or each.get("local"))
        for name, each in streams.items()
    ]


def _mosaic(mixture: Mixture) -> str:
    settings = mixture.settings
    streams = []
    for name, share in mixture.shares().items():
        where = ", ".join(f"{key}={string(value)}" for key, value in _stream(mixture, name).items())
        streams.append(f"Stream({where}, proportion={plain(share)})")
    given = []
    rows = mixture.rows_in_budget()
    if rows:
        given.append(f"    epoch_size={rows},\n")
    if settings.batch_size:
        given.append(
            f"    batch_size={settings.batch_size},  # of one device: divide by their number\n"
        )
    return (
        "from streaming import Stream, StreamingDataset\n\n"
        "dataset = StreamingDataset(\n"
        f"    streams={sequence(streams, '    ')},\n"
        "    shuffle=True,\n"
        f"    shuffle_seed={settings.seed},\n"
        f'    batching_method="{_batching(mixture)}",\n'
        f"{''.join(given)})\n"
    )


_BATCHING = (
    "batching_method is stratified where batch_size gives every domain a sample in each batch (the "
    "shares are then rounded to whole samples of it), else random, with the shares over an epoch."
)
_BOTH: tuple[Rows, ...] = ("blocks", "documents")

TARGETS: Sequence[Target] = (
    Target(
        "mosaic-streaming",
        "MosaicML Streaming's StreamingDataset",
        _mosaic,
        "remote or local folder of MDS shards",
        rows=_BOTH,
        traps=(
            "It draws samples: token shares if each holds equally many tokens.",
            "shuffle is off unless it is set. " + _BATCHING,
            "Without epoch_size an epoch has as many samples as all streams together.",
        ),
    ),
    Target(
        "llm-foundry",
        "LLM Foundry's train_loader, with the curriculum callback for phases",
        _foundry,
        "remote or local folder of MDS shards, above its split train/",
        rows=_BOTH,
        has_phases=True,
        phases_in="tokens",
        traps=(
            "It draws samples: token shares if each holds equally many, as convert_dataset_hf.py "
            "--concat_tokens makes them.",
            "shuffle is off unless it is set. " + _BATCHING,
        ),
        read=_read_foundry,
    ),
)
