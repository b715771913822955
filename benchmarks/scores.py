"""Other scores than the paper's, tried where the truth is known: which weights would they learn?

    python -m benchmarks.evidence unpack benchmarks/results/evidence-universal-mu.json universal-mu
    python -m benchmarks.scores learn universal-mu/runs/proxy-doge-seed0 --out scores.json
    python -m benchmarks.evidence unpack benchmarks/results/evidence-regret.json regret
    python -m benchmarks.scores judge scores.json --swarm regret

    python -m benchmarks.scores weights scores.json

`learn` trains the proxies of runs again, for every score and seed, in a plain loop: every row's
batch in two halves, one gradient each, all inner products in float32, everything R x R in NumPy and
float64.
So nothing of a score has to be in an operator before it is known to be worth it, and the loop with
the paper's score checks the library: its weights are those of the run.

`weights` shows what was learned. `judge` asks the regression over a swarm of base models what base
models would come to at these weights, and whether what a score says of a domain is what the swarm
says that it is worth.
"""

import argparse
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.special import softmax
from transformers import Trainer, set_seed

from doge_fast.pipeline import records, swarm, training
from doge_fast.pipeline.config import ProxyConfig
from doge_fast.pipeline.config.fields import filled, read_file
from doge_fast.pipeline.domains import load_corpus, mix_sampler, proxy_batch
from doge_fast.pipeline.model import build_model
from doge_fast.pipeline.proxy import parse_target
from doge_fast.pipeline.reporting.regret import against, swarm_of, worth_of
from doge_fast.pipeline.reporting.runs import open_runs
from doge_fast.pipeline.reporting.statistics import change_text, stat_of
from doge_fast.pipeline.reporting.wording import as_ascii, weight_text
from doge_fast.pipeline.tables import PIPE_WIDTH, Table, table_of, text
from doge_fast.weights.objective import WORST, Objective

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Steps that a running norm looks back.
_NORM_MEMORY = 20
# A gradient is cut to so many times its domain's running norm.
_SPIKE = 2.0
_NORM_FLOOR = 1e-6
# Shares of the way from uniform weights to the learned ones, in logarithms.
_WAY = (0.25, 0.5, 1.0)
_QUARTERS = ("first", "second", "third", "last")

Learned = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Variant:
    """A score: what becomes of the inner products of a step before their rows are summed."""

    is_common: bool = False
    """All rows are divided by the mean of the training domains' running norms, and a row is cut to
    twice its own; False: every row is cut to the run's `domain_max_grad_norm`."""
    is_unbiased: bool = False
    """||g_j||^2 is the inner product of the gradients of the batch's two halves, which do not share
    their noise; False: that of the whole batch with itself."""
    has_difficulty: bool = True
    """Whether ||g_j||^2 counts at all."""
    memory: int = 1
    """Steps of which the Gram matrix is a running mean; 1: of this step."""


VARIANTS = {
    "paper": Variant(),
    "common": Variant(is_common=True),
    "unbiased": Variant(is_unbiased=True),
    "common, unbiased": Variant(is_common=True, is_unbiased=True),
    "influence": Variant(has_difficulty=False),
    "averaged": Variant(memory=20),
    "all three": Variant(is_common=True, is_unbiased=True, memory=20),
}


class Score:
    """A variant and what it remembers."""

    def __init__(self, variant: Variant, max_norm: float, objective: Objective) -> None:
        self.variant = variant
        self.max_norm = max_norm
        self.number = len(objective.domains)
        self.tau_R = np.array(objective.tau)
        self._norms_R: Floats | None = None
        self._gram_RR: Floats | None = None
        self._step = 0

    def of(self, halves_HH: Floats) -> tuple[Floats, Floats, Floats]:
        """(W, the difficulty in it, cut factors of the training rows), [K] each.

        Args:
            halves_HH: [2 R, 2 R] inner products, the halves of a row side by side; the training
                domains first, then what is measured only.
        """
        self._step += 1
        rows, own = len(self.tau_R), slice(self.number)
        of_pairs = halves_HH.reshape(rows, 2, rows, 2)
        gram_RR = of_pairs.mean((1, 3))
        norms_R = np.sqrt(gram_RR.diagonal())
        factors_R, scale = self._factors(norms_R)
        if self.variant.is_unbiased:
            np.fill_diagonal(gram_RR, of_pairs[range(rows), 0, range(rows), 1])
        if not self.variant.has_difficulty:
            np.fill_diagonal(gram_RR, 0.0)
        gram_RR = self._remembered(gram_RR * np.outer(factors_R, factors_R) / scale**2)
        difficulty_R = self.tau_R * gram_RR.diagonal()
        return (gram_RR @ self.tau_R)[own], difficulty_R[own], factors_R[own]

    def _factors(self, norms_R: Floats) -> tuple[Floats, float]:
        if not self.variant.is_common:
            return np.minimum(1, self.max_norm / (norms_R + _NORM_FLOOR)), 1.0
        if self._norms_R is None:
            self._norms_R = norms_R
        factors_R = np.minimum(1, _SPIKE * self._norms_R / (norms_R + _NORM_FLOOR))
        share = 1 / min(self._step, _NORM_MEMORY)
        self._norms_R = self._norms_R + share * (factors_R * norms_R - self._norms_R)
        return factors_R, float(self._norms_R[: self.number].mean())

    def _remembered(self, gram_RR: Floats) -> Floats:
        if self._gram_RR is None:
            self._gram_RR = gram_RR
        share = 1 / min(self._step, self.variant.memory)
        self._gram_RR = self._gram_RR + share * (gram_RR - self._gram_RR)
        return self._gram_RR


def learn(config: ProxyConfig, variant: Variant) -> dict[str, Any]:
    """Train the proxy of a configuration with a score.

    Returns:
        {"weights": {domain: average}, "gain" and "difficulty": {domain: mean of each quarter}}.
    """
    told = config.training
    corpus = load_corpus(config.corpus, targets=config.targets)
    objective = Objective.of(corpus.names, parse_target(config.target))
    assert objective.named != WORST, "the weights of the targets stay in the loop"
    set_seed(told.seed)
    model = build_model(config.model, corpus.tokenizer, block_size=corpus.block_size)
    trainer = Trainer(model=model, args=training.training_arguments(told, config.out))
    trainer.create_optimizer_and_scheduler(told.steps)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    assert optimizer is not None
    assert scheduler is not None
    assert config.mu is not None
    parameters = [each for each in model.parameters() if each.requires_grad]
    number, size = len(corpus.names), config.sequences_per_domain
    mix = mix_sampler(corpus, size=size, seed=told.seed)
    num_halves = 2 * len(objective.rows)
    rows_HN = torch.empty(num_halves, sum(each.numel() for each in parameters))
    score = Score(variant, config.domain_max_grad_norm or np.inf, objective)
    logs_K, sum_K = np.zeros(number), np.zeros(number)
    seen: list[tuple[Floats, Floats]] = []
    set_seed(told.seed)
    for step in range(told.steps):
        batch = proxy_batch(corpus, step, size=size, seed=told.seed, mix=mix)
        for row_N, half in zip(rows_HN, _halves(batch, objective.rows), strict=True):
            model.zero_grad()
            model(**half).loss.backward()
            torch.cat([each.grad.flatten() for each in parameters], out=row_N)
        halves_HH = (rows_HN @ rows_HN.T).double().numpy()
        gain_K, difficulty_K, factors_K = score.of(halves_HH)
        seen.append((gain_K, difficulty_K))
        logs_K = logs_K + optimizer.param_groups[0]["lr"] * gain_K / config.mu
        alpha_K = softmax(logs_K)
        sum_K += alpha_K
        coefficients_H = torch.from_numpy(np.repeat(alpha_K * factors_K / 2, 2)).float()
        start = 0
        for each in parameters:
            columns = rows_HN[:, start : start + each.numel()]
            each.grad = (coefficients_H @ columns[: 2 * number]).view_as(each)
            start += each.numel()
        torch.nn.utils.clip_grad_norm_(parameters, told.max_grad_norm)
        optimizer.step()
        scheduler.step()
    quarters_TQK = np.array_split(np.array(seen), 4)
    of_quarters_QSK = np.array([quarter.mean(0) for quarter in quarters_TQK])
    named = {
        what: {name: of_quarters_QSK[:, place, k].tolist() for k, name in enumerate(corpus.names)}
        for place, what in enumerate(("gain", "difficulty"))
    }
    average = dict(zip(corpus.names, (sum_K / told.steps).tolist(), strict=True))
    return {"weights": average, **named}


def _halves(batch: Any, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    for name in names:
        half = len(batch[name]["input_ids"]) // 2
        for part in (slice(0, half), slice(half, 2 * half)):
            yield {key: rows[part] for key, rows in batch[name].items()}


def _learn_all(runs: Sequence[Path], out: Path, seeds: Sequence[int], names: Sequence[str]) -> None:
    learned = records.read_json(out)["learned"] if out.exists() else []
    known = {(each["proxy"], each["score"], each["seed"]) for each in learned}
    for seed, run, name in itertools.product(seeds, runs, names):
        proxy = re.sub(r"-seed\d+$", "", run.name)
        if (proxy, name, seed) in known:
            continue
        began = time.monotonic()
        config = filled(ProxyConfig(out), read_file(run / records.CONFIG, "proxy"))
        told = replace(config, training=replace(config.training, seed=seed))
        found = learn(told, VARIANTS[name])
        learned.append({"proxy": proxy, "score": name, "seed": seed, **found})
        records.write_json(out, {"benchmark": "scores", "learned": learned})
        weights = ", ".join(f"{each} {w:.4f}" for each, w in found["weights"].items())
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{proxy}, {name}, seed {seed}: {weights} ({took})", flush=True)


def shown(file: Path) -> str:
    """A table for each proxy: its weights by every score, with standard errors over seeds.

    Args:
        file: what `learn` left.
    """
    found: dict[str, Learned] = {}
    for each in records.read_json(file)["learned"]:
        found.setdefault(each["proxy"], {}).setdefault(each["score"], []).append(each)
    return _told(_learned_table(proxy, learned) for proxy, learned in found.items())


def _learned_table(proxy: str, found: Learned) -> Table:
    first, *_ = (each for seeds in found.values() for each in seeds)
    lines = []
    for name in first["weights"]:
        weights = (stat_of(each["weights"][name] for each in seeds) for seeds in found.values())
        lines.append([name, *(weight_text(each) for each in weights)])
    lines.append(["seeds", *(str(len(seeds)) for seeds in found.values())])
    return table_of(["domain", *found], lines, title=f"Weights of {proxy}")


def judged(file: Path, experiment: Path) -> str:
    """Tables: what the swarm says of the weights of each score, and of what it says of a domain.

    Args:
        file: what `learn` left.
        experiment: of `doge-fast experiment regret`, or what was unpacked of it.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for each in records.read_json(file)["learned"]:
        found.setdefault(each["score"], []).append(each)
    (group,) = (g for g in records.read_experiment(experiment)["groups"] if g.get("swarm"))
    runs = {run.name: run for run in open_runs([experiment / "runs"])}
    members = swarm_of(runs.values(), group["apart"], runs[group["swarm"][0]])
    regression = swarm.fitted(swarm.read([run.path for run in members], group["aim"]))
    tables = (
        _weights_table(found, regression),
        _ranks_table(found, regression),
        *_agreement_tables(found, regression.swarm.names),
    )
    return _told(tables)


def _told(tables: Iterable[Table]) -> str:
    told = (f"{table.title}\n\n{text(table, width=PIPE_WIDTH).rstrip()}" for table in tables)
    return as_ascii("\n\n".join(told))


def _weights_table(found: Learned, regression: swarm.Regression) -> Table:
    names, lines = regression.swarm.names, []
    uniform_K = np.full(len(names), 1 / len(names))
    for score, seeds in found.items():
        weights_K = np.mean([[each["weights"][name] for name in names] for each in seeds], axis=0)
        predicted = [
            change_text(against(regression, softmax(share * np.log(weights_K)), uniform_K))
            for share in _WAY
        ]
        lines.append([score, str(len(seeds)), *(f"{w:.3f}" for w in weights_K), *predicted])
    way = [f"at {share:g} of the way" for share in _WAY]
    return table_of(["score", "seeds", *names, *way], lines, title="Weights, and what they predict")


def _ranks_table(found: Learned, regression: swarm.Regression) -> Table:
    """Whether domains that are worth more in the swarm have the higher W."""
    names = regression.swarm.names
    gained_K = [-worth_of(regression, place).mean for place in range(len(names))]
    lines = []
    for score, seeds in found.items():
        gains_QK = _of_quarters(seeds, "gain", names)
        ranks = [stats.spearmanr(gain_K, gained_K).statistic for gain_K in gains_QK]
        lines.append([score, *(f"{rank:+.2f}" for rank in ranks)])
    title = "Rank correlation of W with a domain's worth in the swarm, by quarter of the proxy"
    return table_of(["score", *_QUARTERS], lines, title=title)


def _agreement_tables(found: Learned, names: Sequence[str]) -> Iterator[Table]:
    """Of a gradient's squared norm, the share that is not noise of the batch."""
    if not {"paper", "unbiased"} <= found.keys():
        return
    whole_QK = _of_quarters(found["paper"], "difficulty", names)
    shares_KQ = (_of_quarters(found["unbiased"], "difficulty", names) / whole_QK).T
    lines = [
        [name, *(f"{share:.2f}" for share in shares_Q)]
        for name, shares_Q in zip(names, shares_KQ, strict=True)
    ]
    title = "Share of a squared norm that two halves of a batch agree on"
    yield table_of(["domain", *_QUARTERS], lines, title=title)


def _of_quarters(seeds: Sequence[dict[str, Any]], what: str, names: Sequence[str]) -> Floats:
    """[4, K]: mean over seeds."""
    return np.mean([[each[what][name] for name in names] for each in seeds], axis=0).T


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn, show what was learned, or judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    learner = verbs.add_parser("learn")
    learner.add_argument("runs", type=Path, nargs="+", help="directories of proxy runs")
    learner.add_argument("--out", type=Path, required=True, help="JSON; what it has is kept")
    learner.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    learner.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    shower = verbs.add_parser("weights")
    shower.add_argument("file", type=Path, help="what learn left")
    judge = verbs.add_parser("judge")
    judge.add_argument("file", type=Path, help="what learn left")
    judge.add_argument("--swarm", type=Path, required=True, help="an experiment regret")
    args = parser.parse_args(arguments)
    if args.verb == "learn":
        _learn_all(args.runs, args.out, args.seeds, args.only)
    else:
        print(shown(args.file) if args.verb == "weights" else judged(args.file, args.swarm))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
