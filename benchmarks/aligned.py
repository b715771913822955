"""The aligned rule, one part of it changed at a time: what each part is worth.

    python -m benchmarks.aligned out/aligned/github --data mini_slimpajama --target github \
        --domains arxiv book c4 commoncrawl stackexchange wikipedia --steps 400
    python -m benchmarks.aligned out/aligned/github --table

A proxy for each variant and seed; base models with the seeds of `benchmarks.temperature` judge the
weights. The rule is computed on the host, so that its parts can be changed: exactly, and slowly. It
is not `doge-fast proxy --score aligned` to the bit. Half of a domain's blocks are drawn under a
second name; v has its bias correction; the scale of a step is that of the halves; the model moves
by the weights after the step, not before it; and the bounds of the slope are simpler. The same
command resumes, and adds to the record.
"""

import argparse
import json
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.temperature import (
    BLOCKS,
    JUDGING,
    Question,
    add_question,
    question_of,
    record_of,
    slug,
)
from doge_fast.pipeline import records, stage
from doge_fast.pipeline.config import ModelConfig, ProxyConfig
from doge_fast.pipeline.proxy import ProxyTrainer
from doge_fast.pipeline.reporting.statistics import change_text, paired_difference
from doge_fast.pipeline.tables import table_of, text
from doge_fast.step.step import Step
from doge_fast.weights.aligned import FOLLOWED, RATE, WAITING_STEPS
from doge_fast.weights.reweight import state_views

Array = np.ndarray[Any, np.dtype[np.float64]]
# Of a domain's second half: a domain of its own to the trainer.
HALF = "#2"
# The least weight beside uniform, the least a'Ga beside G's mean diagonal, and the least eigenvalue
# beside the mean one.
LEAST, LEAST_GAIN = 0.01, 0.1
RECORD = "aligned.json"


@dataclass(frozen=True)
class Variant:
    """The rule, or the rule with one part changed."""

    metric: str = "adamw"
    """"adamw": 1 / (sqrt(v) + eps); "euclid"."""
    diagonal: str = "halves"
    """"halves": <a_j, b_j>; "noisy": <g_j, g_j>; "before": with the gradient of the step before."""
    followed: float = FOLLOWED
    """Share of alpha, beside uniform weights, in the weights that the model moves by."""
    decay: float | None = None
    """Of the average of the matrices; None: the mean of all steps so far."""
    is_exact: bool = False
    """The exact maximum at every step, in the place of one mirror step."""
    is_averaged: bool = False
    """The result is the mean of alpha over the second half of the run, in the place of the last."""


RULE = Variant()
VARIANTS = {
    "rule": RULE,
    "exact maximum": replace(RULE, is_exact=True),
    "exact, 50 steps": replace(RULE, is_exact=True, decay=0.98, is_averaged=True),
    "last 20 steps": replace(RULE, decay=0.95),
    "last 50 steps": replace(RULE, decay=0.98),
    "last 100 steps": replace(RULE, decay=0.99),
    "mean of the second half": replace(RULE, is_averaged=True),
    "all the way": replace(RULE, followed=1.0),
    "uniform trajectory": replace(RULE, followed=0.0),
    "Euclidean metric": replace(RULE, metric="euclid"),
    "Euclidean, all the way": replace(RULE, metric="euclid", followed=1.0),
    "noisy diagonal": replace(RULE, diagonal="noisy"),
    "step before": replace(RULE, diagonal="before"),
}


def exact_mixture(gram: Array, gain: Array) -> Array:
    """argmax over the simplex of W.a / sqrt(a'Ga); uniform where no domain helps.

    b / sum b, where b >= 0 minimises b'Gb / 2 - W.b, by the active sets of Lawson and Hanson.
    """
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    # An average over few steps may have negative eigenvalues.
    gram = (vectors * np.maximum(values, LEAST * max(values.mean(), 0.0) + 1e-12)) @ vectors.T
    found, inside = np.zeros(len(gain)), np.zeros(len(gain), bool)
    for _ in range(10 * len(gain)):
        slope = np.where(inside, -np.inf, gain - gram @ found)
        if slope.max() <= 1e-10 * np.abs(gain).max():
            break
        inside[slope.argmax()] = True
        while inside.any():
            best = np.zeros(len(gain))
            best[inside] = np.linalg.solve(gram[np.ix_(inside, inside)], gain[inside])
            low = inside & (best <= 0)
            if not low.any():
                found = best
                break
            found = found + np.min(found[low] / (found[low] - best[low])) * (best - found)
            inside &= found > 1e-12 * found.max()
            found[~inside] = 0
    return found / found.sum() if found.sum() > 0 else np.full(len(gain), 1 / len(gain))


def mirror_mixture(alpha: Array, gram: Array, gain: Array) -> Array:
    """One mirror step on log(W.a / sqrt(a'Ga)), with a floor under both denominators."""
    share = gain / max(gain @ alpha, LEAST_GAIN * np.abs(gain).max())
    square = max(alpha @ gram @ alpha, LEAST * gram.diagonal().mean())
    logs = np.log(alpha) + RATE * (share - (share @ alpha) * (gram @ alpha) / square)
    moved = np.exp(logs - logs.max())
    raised = np.maximum(moved / moved.sum(), LEAST / len(alpha))
    return raised / raised.sum()


@dataclass
class HostRule:
    """Gram matrices of a proxy's halves, and the weights that follow from them."""

    variant: Variant
    num_domains: int
    tau_R: Array
    mean_RR: Array | None = None
    alphas: list[Array] = field(default_factory=list)
    num_matrices: int = 0
    before: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, step: Step) -> Array:
        """The weights that the model moves by in this step, [K]."""
        same, lagged = self._products(step)
        alpha = self.alphas[-1] if self.alphas else np.full(self.num_domains, 1 / self.num_domains)
        if same is not None and same.trace() > 0:
            scale = len(same) / same.trace()
            own = self._unbiased(scale * same, scale * lagged)
            self.num_matrices += 1
            decay = self.variant.decay
            share = 1 / self.num_matrices if decay is None else 1 - decay
            last = 0.0 if self.mean_RR is None else self.mean_RR
            self.mean_RR = share * own + (1 - share) * last
            if len(self.alphas) >= WAITING_STEPS:
                gram, gain = self.mean_RR[:, : self.num_domains], self.mean_RR @ self.tau_R
                gram, gain = gram[: self.num_domains], gain[: self.num_domains]
                is_exact = self.variant.is_exact
                alpha = exact_mixture(gram, gain) if is_exact else mirror_mixture(alpha, gram, gain)
        self.alphas.append(alpha)
        return self.variant.followed * alpha + (1 - self.variant.followed) / self.num_domains

    def _unbiased(self, same: Array, lagged: Array) -> Array:
        # Rows of the buffer: domains, their second halves, targets, their second halves.
        num_domains, num_names = self.num_domains, len(self.tau_R)
        num_targets = num_names - num_domains
        first = [*range(num_domains), *range(2 * num_domains, 2 * num_domains + num_targets)]
        second = [at + (num_domains if at < num_domains else num_targets) for at in first]

        def whole(products: Array) -> Array:
            parts = ((i, j) for i in (first, second) for j in (first, second))
            total: Array = sum((products[np.ix_(i, j)] for i, j in parts), np.zeros(1))
            return total / 4

        gram = whole(same)
        if self.variant.diagonal == "halves":
            np.fill_diagonal(gram, same[first, second])
        elif self.variant.diagonal == "before":
            np.fill_diagonal(gram, whole(lagged).diagonal())
        return gram

    def _products(self, step: Step) -> tuple[Array | None, Array]:
        """Of the halves in this variant's metric; and of those of the step before with them."""
        inner = step.parameters.optimizer
        eps = inner.param_groups[0]["eps"]
        num_rows = 2 * len(self.tau_R)
        same, lagged = (torch.zeros(num_rows, num_rows, dtype=torch.float64) for _ in range(2))
        for block in (block for block in step.buffer.blocks if block.written):
            rows, state = block.rows_BN, inner.state.get(block.param, {})
            if "exp_avg_sq" not in state:
                return None, lagged.numpy()
            measured = rows
            if self.variant.metric == "adamw":
                correction = 1 - inner.param_groups[0]["betas"][1] ** float(state["step"])
                measured = rows / ((state["exp_avg_sq"].flatten() / correction).sqrt() + eps)
            same += (measured @ rows.T).double()
            if self.variant.diagonal == "before":
                if (last := self.before.get(id(block.param))) is not None:
                    lagged += (last @ measured.T).double()
                self.before[id(block.param)] = rows.clone()
        return same.numpy(), lagged.numpy()


class AlignedTrainer(ProxyTrainer):
    """Steps that the host's rule weighs; evaluates nothing."""

    rule: HostRule

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As usual; before each step is combined the rule sets the domain weights."""
        optimizer = super().create_optimizer(*args, **kwargs)
        step = self.doge._step
        if "_combine" not in vars(step):
            combine = step._combine

            def weighed(grad_scale: Any) -> None:
                alpha = self.rule.observe(step)
                views = state_views(step._weights.state_S)
                views.alpha.copy_(torch.from_numpy(np.concatenate([alpha, alpha]) / 2))
                combine(grad_scale)

            step._combine = weighed  # type: ignore[method-assign]
        return optimizer

    def line(self, step: int) -> records.Json:
        """The loss alone: names of halves are nobody's."""
        assert self.step_loss is not None
        return {"loss": float(self.step_loss)}

    def evaluate_domains(self) -> dict[str, Any]:
        """Nothing is measured."""
        return {}


def learned(question: Question, variant: Variant, seed: int, out: Path) -> Array:
    """Train a proxy; its weights at every step, [T, K]."""
    file = out / "alphas.npz"
    if file.exists():
        alphas: Array = np.load(file)["alphas"]
        return alphas
    config = ProxyConfig(
        out,
        question.corpus,
        model=ModelConfig(question.model),
        training=question.training(seed),
        target=question.targets or ("universal",),
        sequences_per_domain=BLOCKS // 2,
        # The host's rule sets the weights, and the mirror step leaves them.
        score="paper",
        mu=1e9,
        domain_max_grad_norm=0,
    )
    config = stage.resolved(config)
    existing = stage.existing_run(config)
    corpus, model = stage.corpus_and_model(config, existing, check=lambda *_: None)
    names, targets = corpus.names, corpus.targets
    halves = {f"{name}{HALF}": name for name in (*names, *targets)}
    doubled = {
        part: {**getattr(corpus, part), **{h: getattr(corpus, part)[n] for h, n in halves.items()}}
        for part in ("train", "validation", "packed")
    }
    own, other = (tuple(f"{name}{HALF}" for name in group) for group in (names, targets))
    corpus = replace(corpus, names=(*names, *own), targets=(*targets, *other), **doubled)
    rows = (*corpus.names, *corpus.targets)
    tau = {name: float(halves.get(name, name) in (question.targets or names)) for name in rows}
    objective: Any = types.SimpleNamespace(names=rows, target=tau)
    tau_R = np.array([tau[name] for name in (*names, *targets)])
    AlignedTrainer.rule = HostRule(variant, len(names), tau_R)
    trainer = AlignedTrainer(config, corpus, model, objective=objective, mu=1e9, selection=None)
    with stage.directory(trainer, existing, resolved={"mu": 1e9}) as checkpoint:
        trainer.go_on(checkpoint)
    alphas = np.stack(AlignedTrainer.rule.alphas)
    np.savez_compressed(file, alphas=alphas)
    return alphas


def judged(
    question: Question, domains: Sequence[str], seed: int, names: Sequence[str]
) -> records.Json:
    """{variant: weights and the judge's loss} of one seed; uniform weights first."""
    weights = {"uniform": dict.fromkeys(domains, 1 / len(domains))}
    for name in names:
        variant = VARIANTS[name]
        alphas = learned(question, variant, seed, question.out / f"seed{seed}" / slug(name))
        last = alphas[len(alphas) // 2 :].mean(0) if variant.is_averaged else alphas[-1]
        weights[name] = dict(zip(domains, last.tolist(), strict=True))
    return {
        "seed": seed,
        "methods": {
            name: {
                "weights": each,
                "loss": question.loss(f"judge-{slug(name)}", each, seed + JUDGING),
            }
            for name, each in weights.items()
        },
    }


def table(record: records.Json) -> str:
    """A row for each variant: each seed, and the mean with its interval, against uniform and rule.

    A change is of the perplexity on the target, and negative where the variant is better.
    """
    seeds = record["seeds"]
    losses = {
        name: {s["seed"]: s["methods"][name]["loss"] for s in seeds if name in s["methods"]}
        for name in dict.fromkeys(name for each in seeds for name in each["methods"])
    }

    def change(name: str, other: str) -> str:
        common = losses[name].keys() & losses.get(other, {}).keys()
        if name == other or not common:
            return ""
        ours, theirs = ({s: losses[n][s] for s in sorted(common)} for n in (name, other))
        return change_text(paired_difference(ours, theirs))

    rows = []
    for name, own in losses.items():
        each = ", ".join(f"{100 * np.expm1(own[s] - losses['uniform'][s]):+.1f}" for s in own)
        rows.append([name, each, change(name, "uniform"), change(name, "rule")])
    return text(table_of(["weights", "each seed, %", "against uniform", "against the rule"], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_question(parser, RECORD)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args(arguments)
    file = args.out / RECORD if args.out.is_dir() or not args.table else args.out
    if not args.table:
        if not args.domains:
            parser.error("--domains says what is trained on.")
        torch.set_num_threads(1)
        before = json.loads(file.read_text(encoding="utf-8"))["seeds"] if file.exists() else []
        seeds = {each["seed"]: each for each in before}
        for seed in args.seeds:
            methods = seeds.get(seed, {}).get("methods", {})
            new = judged(question_of(args), args.domains, seed, args.variants)
            seeds[seed] = new | {"methods": methods | new["methods"]}
        records.write_json(file, record_of("aligned", args, [seeds[n] for n in sorted(seeds)]))
    print(table(json.loads(file.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
