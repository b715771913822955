"""What a proxy's direction and a measured distance are worth, against other ways to spend the cost.

    python -m benchmarks.known out/known --data mini_slimpajama --target github
    python -m benchmarks.temperature out/hidden --data out/known/hidden --target github \
        --domains book arxiv c4 commoncrawl stackexchange wikipedia --steps 400
    python -m benchmarks.temperature out/hidden --table
    python -m benchmarks.temperature out/larger --data mini_wiki40b --target ca \
        --domains en de fr es ru --model mini --steps 400 --longer 2000 --seeds 0

For each seed a proxy is trained, and base models along its direction choose a temperature
(`doge-fast temperature`). About the same number of trainings is given to what a user would try
instead: a proxy with a quarter of mu, a proxy that is trained four times as long, as many random
mixtures of which the best is kept, and a regression on those. Base models with another seed, which
chose nothing, then judge all mixtures. With `--one-proxy`, only what one proxy gives is judged: the
paper's rule, a quarter of mu, and the aligned rule; `--no-others` leaves the aligned rule alone.
With `--extend`, the aligned rule is added to the seeds of a record. Uniform weights of the first
one are judged once more: the same loss shows that the others are comparable. With `--weights`,
nothing is learned: base models of this length and size judge the uniform and the aligned weights of
a record. With `--longer`, only this is asked: is the temperature that base models of `--steps` find
also the best for longer ones? The same command resumes.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from doge_fast.pipeline import records
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    EvaluateConfig,
    ModelConfig,
    ProxyConfig,
    TemperatureConfig,
    TrainingConfig,
)
from doge_fast.pipeline.evaluation import evaluate
from doge_fast.pipeline.proxy import learn_weights
from doge_fast.pipeline.reporting.statistics import change_text, paired_difference
from doge_fast.pipeline.sizes import Settings
from doge_fast.pipeline.tables import table_of, text
from doge_fast.pipeline.temperature import sharpened, temperature

Weights = dict[str, float]
# Blocks of each domain in a step of a proxy; a base model's batch has as many in all.
BLOCKS = 2
# Added to a proxy's seed: for the models that choose, and for those that judge.
CHOOSING, JUDGING = 100, 200
# Of log weights in the regression; the shares of a Dirichlet distribution are of the order of one.
RIDGE = 0.1
SIMULATED = 10_000
# Between two judges of the same weights, where another machine may round differently: a tenth of a
# percent of perplexity, the last digit that a table prints.
SAME_LOSS = 1e-3
RECORD = "temperature.json"
MEASURED, ALIGNED = "DoGE, measured distance", "aligned"
BOTH = "aligned, measured distance"


@dataclass(frozen=True)
class Question:
    """A corpus, and the loss that counts."""

    out: Path
    corpus: CorpusConfig
    targets: tuple[str, ...]
    """Held out; empty: the mean over all domains counts."""
    steps: int
    model: str = "tiny"

    def training(self, seed: int, steps: int | None = None) -> TrainingConfig:
        """The settings that all models share."""
        steps = steps or self.steps
        return TrainingConfig(steps, 1e-3, 2e-4, seed=seed, save_every=0)

    def proxy(
        self,
        name: str,
        seed: int,
        *,
        steps: int | None = None,
        mu: float | None = None,
        score: Literal["paper", "aligned"] = "paper",
    ) -> Path:
        """Train a proxy; its run directory."""
        config = ProxyConfig(
            self.out / f"seed{seed}" / name,
            self.corpus,
            model=ModelConfig(self.model),
            training=self.training(seed, steps),
            target=self.targets or ("universal",),
            sequences_per_domain=BLOCKS,
            mu=mu,
            score=score,
            log_every=10,
        )
        return learn_weights(config).path

    def search(self, proxy: Path, name: str, seed: int, steps: int) -> records.Json:
        """Choose a temperature with base models of so many steps; what was written."""
        out = self.out / f"seed{seed}" / name
        config = TemperatureConfig(proxy, out=out, steps=steps, seeds=(seed + CHOOSING,))
        return records.read_weights(temperature(config).path)

    def loss(self, name: str, weights: Mapping[str, float], seed: int) -> float:
        """Train a base model at these weights; its mean loss on the targets, or on all domains."""
        out = self.out / "runs" / f"{name}-seed{seed}"
        given = ",".join(f"{domain}={weight!r}" for domain, weight in weights.items())
        config = BaseConfig(
            out,
            replace(self.corpus, domains=tuple(weights)),
            model=ModelConfig(self.model),
            training=self.training(seed),
            weights=given,
            targets=self.targets,
            batch_size=BLOCKS * len(weights),
        )
        train_base(config)
        if not records.is_measured(out, config.training.eval_blocks):
            evaluate(EvaluateConfig(run=out, blocks=config.training.eval_blocks))
        losses = records.load_evaluation(out).loss
        return float(np.mean([losses[each] for each in self.targets or weights]))


def random_mixtures(domains: Sequence[str], count: int, seed: int) -> list[Weights]:
    """Draws from the Dirichlet distribution around uniform weights, all concentrations one."""
    draws = np.random.default_rng(seed).dirichlet(np.ones(len(domains)), count)
    return [dict(zip(domains, map(float, draw), strict=True)) for draw in draws]


def regressed(mixtures: Sequence[Weights], losses: Sequence[float], seed: int) -> Weights:
    """The mean of the hundred mixtures with the lowest loss that a ridge regression predicts.

    As RegMix (Liu et al., ICLR 2025), with a linear model of the weights, and of as many models.
    """
    names = list(mixtures[0])
    points = np.array([list(each.values()) for each in mixtures])
    centred = points - points.mean(0)
    normal = centred.T @ centred + RIDGE * np.eye(len(names))
    slopes = np.linalg.solve(normal, centred.T @ (np.array(losses) - np.mean(losses)))
    tried = np.array([list(each.values()) for each in random_mixtures(names, SIMULATED, seed)])
    best = tried[np.argsort(tried @ slopes)[:100]].mean(0)
    return dict(zip(names, map(float, best), strict=True))


def points(found: records.Json) -> dict[str, float]:
    """{1/T: mean loss} of what a search measured."""
    return {f"{each['inverse_temperature']:g}": each["loss"] for each in found["points"]}


def weights_of(run: Path) -> Weights:
    """{domain: weight} of a run."""
    return dict(records.weights_by_name(records.read_weights(run)))


def measured(question: Question, seed: int, others: bool) -> records.Json:
    """All methods from one seed: their weights, their cost in trainings, and the judge's losses."""
    proxy = question.proxy("proxy", seed)
    alpha = weights_of(proxy)
    found = question.search(proxy, "temperature", seed, question.steps)
    methods = {
        "uniform": (dict.fromkeys(alpha, 1 / len(alpha)), 0),
        "DoGE": (alpha, 1),
        MEASURED: (records.weights_by_name(found), 1 + len(found["points"])),
    }
    if others:
        methods |= other_ways(question, proxy, len(found["points"]), seed)
    return {
        "seed": seed,
        "inverse_temperature": found["inverse_temperature"],
        "points": points(found),
        "methods": judged(question, methods, seed),
    }


def of_one_proxy(question: Question, seed: int, others: bool) -> records.Json:
    """What the cost of a single proxy gives: the paper's rule, a quarter of mu, the aligned one."""
    alpha = weights_of(question.proxy("proxy-aligned", seed, score="aligned"))
    methods = {"uniform": (dict.fromkeys(alpha, 1 / len(alpha)), 0)}
    if others:
        paper = question.proxy("proxy", seed)
        smaller = question.proxy("proxy-mu", seed, mu=records.read_weights(paper)["mu"] / 4)
        methods |= {"DoGE": (weights_of(paper), 1), "DoGE, mu / 4": (weights_of(smaller), 1)}
    return {"seed": seed, "methods": judged(question, methods | {ALIGNED: (alpha, 1)}, seed)}


def of_record(question: Question, record: records.Json, seeds: Sequence[int]) -> list[records.Json]:
    """These seeds of a record, whose uniform and aligned weights this question's models judge."""
    return [
        {
            "seed": each["seed"],
            "methods": judged(
                question,
                {
                    name: (each["methods"][name]["weights"], each["methods"][name]["trainings"])
                    for name in ("uniform", ALIGNED)
                },
                each["seed"],
            ),
        }
        for each in record["seeds"]
        if each["seed"] in seeds
    ]


def extended(question: Question, record: records.Json, searches: bool) -> list[records.Json]:
    """The seeds of a record, with the aligned rule, and if asked a distance measured along it.

    RuntimeError: the record's losses do not come again.
    """
    seeds = []
    for each in record["seeds"]:
        seed, methods = each["seed"], each["methods"]
        if not seeds:
            weights, loss = (methods["uniform"][part] for part in ("weights", "loss"))
            again = judged(question, {"uniform": (weights, 0)}, seed)["uniform"]["loss"]
            if abs(again - loss) > SAME_LOSS:
                raise RuntimeError(
                    f"uniform weights came out at {again}, in the record at {loss}: the losses of "
                    "this machine are not comparable with the record's."
                )
        proxy = question.proxy("proxy-aligned", seed, score="aligned")
        added = {ALIGNED: (weights_of(proxy), 1)}
        if searches:
            found = question.search(proxy, "temperature-aligned", seed, question.steps)
            added[BOTH] = (records.weights_by_name(found), 1 + len(found["points"]))
        seeds.append(each | {"methods": methods | judged(question, added, seed)})
    return seeds


def judged(
    question: Question, methods: Mapping[str, tuple[Weights, int]], seed: int
) -> records.Json:
    """Of {method: (weights, trainings of `steps` steps before the base model)} the judge's loss."""
    return {
        name: {
            "weights": weights,
            "trainings": trainings,
            "loss": question.loss(f"judge-{slug(name)}", weights, seed + JUDGING),
        }
        for name, (weights, trainings) in methods.items()
    }


def other_ways(
    question: Question, proxy: Path, count: int, seed: int
) -> dict[str, tuple[Weights, int]]:
    """{method: (weights, trainings)} of other proxies, and of `count` random mixtures."""
    own = records.read_weights(proxy)
    mixtures = random_mixtures(list(records.weights_by_name(own)), count, seed)
    losses = [question.loss(f"random{n}", each, seed + CHOOSING) for n, each in enumerate(mixtures)]
    smaller = question.proxy("proxy-mu", seed, mu=own["mu"] / 4)
    longer = question.proxy("proxy-long", seed, steps=4 * question.steps)
    return {
        "DoGE, mu / 4": (weights_of(smaller), 1),
        "DoGE, four times as long": (weights_of(longer), 4),
        "best of random mixtures": (mixtures[int(np.argmin(losses))], count),
        "regression on them": (regressed(mixtures, losses, seed), count),
    }


def compared_lengths(question: Question, longer: int, seed: int) -> records.Json:
    """The search with base models of `question.steps` and of `longer` steps, along one direction.

    The longer ones are also measured at the temperature that the shorter ones find.
    """
    proxy = question.proxy("proxy", seed)
    searches = {}
    for steps in (question.steps, longer):
        found = question.search(proxy, f"temperature-{steps}", seed, steps)
        searches[str(steps)] = {"found": found["inverse_temperature"], "points": points(found)}
    short, long = searches.values()
    if (place := f"{short['found']:g}") not in long["points"]:
        mixture = sharpened(weights_of(proxy), short["found"])
        question = replace(question, steps=longer)
        long["points"][place] = question.loss(f"longer-{place}", mixture, seed + CHOOSING)
    return {"seed": seed, "weights": weights_of(proxy), "searches": searches}


def lengths_table(seed: records.Json) -> str:
    """A row for each temperature, a column for each length; the best of a column has a star."""
    searches = seed["searches"].values()
    places = sorted({place for each in searches for place in each["points"]}, key=float)

    def cell(search: records.Json, place: str) -> str:
        losses = search["points"]
        if place not in losses:
            return ""
        star = " *" if losses[place] == min(losses.values()) else ""
        return f"{math.exp(losses[place]):.1f}{star}"

    rows = [[place, *(cell(each, place) for each in searches)] for place in places]
    return text(table_of(["1/T", *(f"{steps} steps" for steps in seed["searches"])], rows))


def slug(name: str) -> str:
    """A name as a part of a folder's."""
    return "".join(c for c in name.replace(" ", "-") if c.isalnum() or c == "-")


def add_question(parser: argparse.ArgumentParser, record: str) -> None:
    """The arguments of a question and its seeds; `record` is the file of what was measured."""
    parser.add_argument("out", type=Path, help=f"a directory, or with --table its {record}")
    parser.add_argument("--table", action="store_true", help="print what was measured")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--domains", nargs="*", default=[], help="trained on; all unless given")
    parser.add_argument("--target", nargs="*", default=[], help="held out; universal unless given")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def question_of(args: argparse.Namespace) -> Question:
    """The question that these arguments ask."""
    corpus = CorpusConfig(args.data, tuple(args.domains), vocab_size=args.vocab_size)
    return Question(args.out, corpus, tuple(args.target), args.steps, args.model)


def record_of(benchmark: str, args: argparse.Namespace, seeds: list[records.Json]) -> records.Json:
    """What was asked, and what each seed gave."""
    return {
        "benchmark": benchmark,
        "data": Path(args.data).name,
        "domains": args.domains,
        "target": args.target,
        "steps": args.steps,
        "model": args.model,
        "versions": records.versions(),
        "seeds": seeds,
    }


def table(record: records.Json) -> str:
    """A row for each method: perplexity, changes with their intervals over seeds, tokens before."""
    seeds = record["seeds"]
    if "searches" in seeds[0]:
        return "\n".join(lengths_table(each) for each in seeds)
    losses = {
        name: {s: each["methods"][name]["loss"] for s, each in enumerate(seeds)}
        for name in seeds[0]["methods"]
    }

    def change(own: str, other: str) -> str:
        return "" if own == other else change_text(paired_difference(losses[own], losses[other]))

    # What is compared with every other way, in a column each.
    measured_ways = [way for way in (MEASURED, ALIGNED) if way in losses]
    rows = []
    for name, own in losses.items():
        cost = np.mean([each["methods"][name]["trainings"] for each in seeds])
        perplexity = f"{math.exp(np.mean(list(own.values()))):.1f}"
        changes = change(name, "uniform"), *(change(way, name) for way in measured_ways)
        # A proxy reads its targets too.
        domains = seeds[0]["methods"][name]["weights"].keys()
        has_proxy = name.startswith((ALIGNED, "DoGE"))
        proxies = 0 if not has_proxy else 1 if name in (MEASURED, BOTH) else cost
        rows_read = proxies * len(domains | record["target"]) + (cost - proxies) * len(domains)
        steps = record.get("learned_steps", record["steps"])
        tokens = rows_read * BLOCKS * steps * Settings().block_size
        rows.append([name, perplexity, *changes, f"{tokens / 1e6:.1f}M"])
    heads = {MEASURED: "measured against it", ALIGNED: "aligned against it"}
    against = [heads[way] for way in measured_ways]
    printed = text(table_of(["weights", "perplexity", "against uniform", *against, "tokens"], rows))
    if MEASURED not in losses:
        return printed
    found = ", ".join(f"{each['inverse_temperature']:g}" for each in seeds)
    return f"1/T found: {found}\n{printed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_question(parser, RECORD)
    parser.add_argument("--longer", type=int, help="steps of longer base models; only these")
    parser.add_argument("--no-others", action="store_true", help="leave out the other ways")
    parser.add_argument("--one-proxy", action="store_true", help="what one proxy gives, by rule")
    parser.add_argument("--extend", type=Path, help="a record to add the aligned rule to")
    parser.add_argument("--search", action="store_true", help="and a distance measured along it")
    parser.add_argument("--weights", type=Path, help="a record whose weights are judged")
    args = parser.parse_args(arguments)
    file = args.out / RECORD if args.out.is_dir() or not args.table else args.out
    if not args.table:
        question = question_of(args)
        if args.extend:
            record = records.read_json(args.extend)
            added = {
                "seeds": extended(question, record, args.search),
                "versions": records.versions(),
            }
            records.write_json(file, record | added)
        elif args.weights:
            record = records.read_json(args.weights)
            judges = of_record(question, record, args.seeds)
            judged_record = record_of("temperature", args, judges)
            learned = {f"learned_{part}": record[part] for part in ("steps", "model")}
            records.write_json(file, judged_record | learned)
        else:
            seeds = [
                compared_lengths(question, args.longer, seed)
                if args.longer
                else of_one_proxy(question, seed, not args.no_others)
                if args.one_proxy
                else measured(question, seed, not args.no_others)
                for seed in args.seeds
            ]
            records.write_json(file, record_of("temperature", args, seeds))
    print(table(json.loads(file.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
