"""Runs written by hand, so that every number in a report has a known cause."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    ModelConfig,
    ProxyConfig,
    TrainingConfig,
    parse_target,
)


def by_name(names: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


DOMAINS = ("stdlib", "reference", "headers", "docstrings", "tests", "licences", "metadata")
TOKENS = by_name(DOMAINS, (812_000, 92_000, 610_000, 401_000, 655_000, 130_000, 48_000))
# What base models at uniform weights reach, per domain.
UNIFORM_LOSS = by_name(DOMAINS, (3.21, 4.05, 2.48, 3.66, 2.95, 2.10, 1.87))
BLOCK_SIZE = 128
STEPS = 200
# Of held-out text in an experiment; fewer than any domain has.
BLOCKS = 10
TRAINING = TrainingConfig(steps=STEPS, learning_rate=2e-3)


def corpus(
    domains: Sequence[str], targets: Sequence[str] = (), tokens: Mapping[str, int] = TOKENS
) -> records.CorpusRecord:
    def sizes(name: str) -> records.DomainSizes:
        blocks = tokens[name] // BLOCK_SIZE
        return records.DomainSizes(
            train_tokens=tokens[name],
            train_blocks=blocks,
            validation_blocks=max(1, blocks // 20),
            documents=max(1, blocks // 6),
        )

    return records.CorpusRecord(
        domains={name: sizes(name) for name in domains},
        targets={name: sizes(name) for name in targets if name != "mix"},
        tokenizer_sha256="ab" * 32,
        block_size=BLOCK_SIZE,
        vocab_size=4096,
    )


def without(*targets: str) -> tuple[str, ...]:
    return tuple(name for name in DOMAINS if name not in targets)


def write_proxy(
    out: Path,
    *,
    domains: Sequence[str] = DOMAINS,
    target: tuple[str, ...] = ("universal",),
    logits: Sequence[float] = (0.9, -0.4, 0.3, 1.1, 0.5, -0.9, -1.4),
    seed: int = 0,
    steps: int = STEPS,
    last_step: int | None = None,
    skipped: Sequence[int] = (),
    is_finished: bool = True,
    score: str = "paper",
    tokens: Mapping[str, int] = TOKENS,
    noise: float = 0.15,
) -> Path:
    """A proxy run whose weights go from uniform to softmax(logits) within a third of its steps."""
    names = tuple(domains)
    targets = () if target == ("universal",) else tuple(item.split("=")[0] for item in target)
    rows = (*names, *targets)
    config = ProxyConfig(
        out=out,
        corpus=CorpusConfig(domains=names),
        model=ModelConfig(model="tiny"),
        training=replace(TRAINING, steps=steps, seed=seed),
        target=target,
        mu=None if score == "aligned" else 0.02,
        score=score,  # type: ignore[arg-type]
    )
    records.open_run(config, corpus=corpus(names, targets, tokens))
    draw = np.random.default_rng([seed, len(names), len(targets)])
    uniform = dict.fromkeys(names, 1 / len(names))
    records.append_metrics(
        out, {"step": 0, "kind": "train", "alpha": uniform, "alpha_mean": uniform}
    )
    total, average = np.zeros(len(names)), np.full(len(names), 1 / len(names))
    alpha = average
    for step in range(1, (last_step or steps) + 1):
        pushed = np.asarray(logits[: len(names)]) * min(1.0, 3 * step / steps)
        pushed = pushed + noise * draw.standard_normal(len(names))
        alpha = np.exp(pushed) / np.exp(pushed).sum()
        total += alpha
        average = total / step
        line = {"step": step, "kind": "train", "lr": 2e-3, "seconds": 0.21}
        line |= {"alpha": by_name(names, alpha), "alpha_mean": by_name(names, average)}
        records.append_metrics(out, line | {"skipped": step in skipped})
    if not is_finished:
        return out
    records.append_metrics(out, {"step": steps, "kind": "eval", "loss": dict.fromkeys(rows, 3.1)})
    natural = sum(tokens[name] for name in names)
    entries = [
        {
            "name": name,
            "weight": average[j],
            "weight_last": alpha[j],
            "prior": tokens[name] / natural,
            "tokens": tokens[name],
        }
        for j, name in enumerate(names)
    ]
    record = {"method": "doge", "score": score, "domains": entries, "model": "tiny"}
    record |= {"target": parse_target(target)}
    records.write_weights(out, record | {"steps": steps, "seed": seed})
    return out


def write_base(
    out: Path,
    *,
    weights: str = "uniform",
    loss: Mapping[str, float] | None = None,
    change: float = 0.0,
    domains: Sequence[str] = DOMAINS,
    targets: Sequence[str] = (),
    seed: int = 0,
    steps: int = STEPS,
    learning_rate: float = TRAINING.learning_rate,
    is_evaluated: bool = True,
    blocks: int = 128,
    tokens: Mapping[str, int] = TOKENS,
) -> Path:
    """A base run whose held-out losses are `loss`, or uniform's plus `change` on every domain."""
    names = tuple(domains)
    rows = (*names, *targets)
    losses = loss or {name: UNIFORM_LOSS[name] + change for name in rows}
    config = BaseConfig(
        out=out,
        corpus=CorpusConfig(domains=names),
        model=ModelConfig(model="tiny"),
        training=replace(TRAINING, steps=steps, seed=seed, learning_rate=learning_rate),
        weights=weights,
        targets=tuple(targets),
    )
    records.open_run(config, corpus=corpus(names, targets, tokens))
    for step in range(10, steps + 1, 10):
        line = {"step": step, "kind": "train", "lr": 1e-3, "loss": 3 + 4 * math.exp(-step / 50)}
        records.append_metrics(out, line | {"seconds": 0.3})
    given = dict.fromkeys(names, 1 / len(names))
    if (Path(weights) / records.WEIGHTS).exists():
        given = records.weights_by_name(records.read_weights(Path(weights)))
    method = weights if weights in ("uniform", "natural") else "given"
    entries = [{"name": name, "weight": given[name]} for name in names]
    records.write_weights(out, {"method": method, "domains": entries})
    if is_evaluated:
        measured = records.evaluation(
            step=steps, blocks=dict.fromkeys(rows, blocks), loss=losses, block_size=BLOCK_SIZE
        )
        records.write_json(out / records.EVALUATION, measured)
    return out


def write_experiment(folder: Path, changes: Sequence[float]) -> Path:
    """An experiment whose learned arm's losses differ from uniform's by `changes`, one a seed."""
    seeds = range(len(changes))
    names = {arm: tuple(f"{arm}-seed{seed}" for seed in seeds) for arm in ("uniform", "doge")}
    arms = (
        records.ArmRecord("uniform", "baseline", names["uniform"], is_baseline=True),
        records.ArmRecord("DoGE", "learned", names["doge"]),
    )
    records.write_experiment(
        folder,
        records.ExperimentRecord(
            name="universal",
            title="Universal generalization",
            question="Which?",
            settings=records.ExperimentSettings(tuple(seeds), BLOCKS),
            data="installed",
            runs=(*names["uniform"], *(f"proxy-seed{seed}" for seed in seeds), *names["doge"]),
            groups=(records.PerplexityGroup("Base models", arms, DOMAINS),),
        ),
    )
    runs = folder / "runs"
    for seed, change in zip(seeds, changes, strict=True):
        # Seeds differ by far more than arms do.
        shift = 0.3 * seed
        loss = {name: UNIFORM_LOSS[name] + shift for name in DOMAINS}
        write_base(runs / f"uniform-seed{seed}", loss=loss, seed=seed, blocks=BLOCKS)
        proxy = write_proxy(runs / f"proxy-seed{seed}", seed=seed)
        moved = {name: value + change for name, value in loss.items()}
        write_base(
            runs / f"doge-seed{seed}", weights=str(proxy), loss=moved, seed=seed, blocks=BLOCKS
        )
    return folder
