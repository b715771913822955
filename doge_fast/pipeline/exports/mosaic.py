"""MosaicML Streaming, and LLM Foundry which reads its streams from YAML.

Weights are proportions of samples: shares of tokens where every sample holds equally many.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from doge_fast.pipeline.exports.blend import REMOTE, Blend
from doge_fast.pipeline.exports.target import Found, Phases, Target
from doge_fast.pipeline.exports.text import from_yaml, plain, sequence, string, to_yaml


def _place(blend: Blend, name: str) -> dict[str, str]:
    """Where MosaicML Streaming finds a domain: a remote copied to a folder, or a folder."""
    path, local = blend.one_path(name), blend.settings.local_dir
    if REMOTE not in path:
        return {"local": path}
    return {"remote": path} | ({"local": f"{local.rstrip('/')}/{name}"} if local else {})


def _mosaic(blend: Blend) -> str:
    settings, rows = blend.settings, blend.rows_in_budget()
    blend.require("batch_size", why="StreamingDataset does not start without one (--batch-size)")
    streams = []
    for name, share in blend.shares().items():
        where = ", ".join(f"{key}={string(value)}" for key, value in _place(blend, name).items())
        streams.append(f"Stream({where}, proportion={plain(share)})")
    epoch = f"    epoch_size={rows},\n" if rows else ""
    return (
        "from streaming import Stream, StreamingDataset\n\n"
        "dataset = StreamingDataset(\n"
        f"    streams={sequence(streams, '    ')},\n"
        "    shuffle=True,\n"
        f"    shuffle_seed={settings.seed},\n"
        '    batching_method="random",\n'
        f"{epoch}"
        f"    batch_size={settings.batch_size},  # of one device: divide by their number\n"
        ")\n"
    )


def _foundry(blend: Blend) -> str:
    length = blend.settings.seq_length
    dataset = {
        "streams": _streams(blend, 0),
        "shuffle": True,
        "batching_method": "random",
        **({"max_seq_len": length} if length else {}),
    }
    value: dict[str, Any] = {"train_loader": {"name": "text", "dataset": dataset}}
    if len(blend.phases) > 1:
        value["callbacks"] = {"curriculum_learning": _curriculum(blend)}
        value["max_duration"] = f"{blend.settings.budget_tokens}tok"
    return to_yaml(value)


def _streams(blend: Blend, phase: int) -> dict[str, Any]:
    return {
        name: _place(blend, name) | {"split": "train", "proportion": share}
        for name, share in blend.numbers(phase).items()
    }


def _curriculum(blend: Blend) -> dict[str, Any]:
    """LLM Foundry counts a phase by its tokens, and the sum must be the whole training."""
    blend.require(
        "seq_length",
        "batch_size",
        "budget_tokens",
        why="phases begin at optimizer steps, and it counts tokens",
    )
    step, budget = blend.settings.tokens_per_step() or 0, blend.settings.budget_tokens or 0
    starts = [phase.first_step * step for phase in blend.phases]
    if starts[-1] >= budget:
        raise ValueError(
            f"The last phase begins after {starts[-1]} tokens ({blend.phases[-1].first_step} "
            f"steps of {step}), and budget_tokens is {budget}: it would never come. Give the "
            "tokens of the whole training, or fewer phases."
        )
    ends = [*starts[1:], budget]
    durations = [f"{end - start}tok" for start, end in zip(starts, ends, strict=True)]
    schedule = [
        {"duration": duration, "dataset": {"streams": _streams(blend, index)}}
        for index, duration in enumerate(durations)
    ]
    return {"duration": durations[0], "schedule": schedule[1:]}


def _read_foundry(text: str) -> Phases:
    value = from_yaml(text)
    value = value.get("variables", {}) | value
    loader = value.get("train_loader", value)
    phases, start = [(0, _proportions(loader.get("dataset", loader)))], 0
    callback = value.get("callbacks", {}).get("curriculum_learning")
    if callback:
        start = _tokens(callback["duration"])
        for each in callback["schedule"]:
            phases.append((start, _proportions(each["dataset"])))
            start += _tokens(each["duration"])
    return phases


def _tokens(duration: Any) -> int:
    number, unit = str(duration)[:-3], str(duration)[-3:]
    if unit != "tok":
        raise ValueError(f"a curriculum's durations are tokens, as in 1000tok, not {duration!r}")
    return int(number)


def _proportions(dataset: Mapping[str, Any]) -> list[Found]:
    return [
        Found(float(each["proportion"]), name=name, path=each.get("remote") or each.get("local"))
        for name, each in dataset["streams"].items()
    ]


_BATCHING = (
    "batching_method stratified would give every batch the mixture, but rounds the shares to whole "
    "samples of a batch; random keeps them over an epoch."
)

TARGETS: Sequence[Target] = (
    Target(
        "mosaic-streaming",
        "MosaicML Streaming's StreamingDataset",
        _mosaic,
        "remote or local folder of MDS shards",
        "mosaicml-streaming 0.13.0, 2026-11-22",
        rows=("blocks", "documents"),
        traps=(
            "shuffle is off unless it is set. " + _BATCHING,
            "Without epoch_size an epoch has as many samples as all streams together.",
        ),
    ),
    Target(
        "llm-foundry",
        "LLM Foundry's train_loader, with the curriculum callback for phases",
        _foundry,
        "remote or local folder of MDS shards, above its split train/",
        "llm-foundry 0.22.0, 2026-11-22",
        rows=("blocks", "documents"),
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
