"""How far from the best mixture: a swarm of base models, a regression over it, and every method.

The truth by brute force, and RegMix as a baseline: base models at mixtures drawn around uniform,
natural and learned weights show how each domain's loss follows from the mixture, and those at these
weights themselves too. `swarm` holds the regression; here is which runs it takes, and the weights
that follow from other runs, which are written when the run that trains at them begins.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from doge_fast import failures
from doge_fast.pipeline import records
from doge_fast.pipeline import swarm as swarms
from doge_fast.pipeline.base import resolve_phases
from doge_fast.pipeline.config import BaseConfig
from doge_fast.pipeline.domains import load_corpus
from doge_fast.pipeline.experiments.planner import RUNS, Json, Make, Plan, Planner
from doge_fast.pipeline.records.movement import Floats
from doge_fast.pipeline.records.weights import read_named
from doge_fast.pipeline.reporting.regret import swarm_of
from doge_fast.pipeline.reporting.runs import open_runs

MIXTURES = "mixtures"
# Draws around learned weights lie so much nearer to them.
_NEARER = 4.0
# Of every drawn mixture this share is uniform: nothing is known of domains without any text.
_SMOOTHING = 0.02


def regret(plan: Planner) -> Plan:
    """Every method's distance from the best mixture, predicted and measured."""
    if len(plan.domains) < 2:
        raise ValueError(f"regret needs 2 domains and more; got {', '.join(plan.domains)}.")
    arms = [
        plan.uniform(),
        plan.natural(),
        plan.doge() | {"spent": [[name] for name in plan.over_seeds(plan.proxy())]},
    ]
    for steps, label, make in plan.doremis():
        arm = plan.arm(label, "learned", plan.base(f"doremi-{steps}", make))
        arms.append(arm | {"spent": plan.with_reference(steps, make)})
    # All but what is judged by it: those that are given, and its own.
    runs = [*_swarm(plan), *(name for arm in arms for name in arm["runs"])]
    # Draws around learned weights cost what learning these does.
    learned = [name for arm in arms for names in arm.get("spent", ()) for name in names]
    given = given_arms(plan, [*(arm["label"] for arm in arms), "regression"])
    own = f"best-of-{plan.config.swarm.mixtures}"
    swarm_paths = tuple(plan.out / RUNS / name for name in runs)
    apart = tuple(name for arm in given for name in arm["runs"])
    best = plan.base(
        own,
        plan.out / MIXTURES / f"{own}.json",
        recipe=partial(_write_best, swarm=swarm_paths, apart=apart),
        reads=swarm_paths,
    )
    judged = [*given, plan.arm("regression", "best by it", best, spent=[learned])]
    arms += judged
    group = {
        "kind": "regret",
        "title": "Regret",
        "aim": list(plan.domains),
        "arms": arms,
        "swarm": runs,
        "apart": [name for arm in judged for name in arm["runs"]],
        "focus": "regression",
    }
    return plan.finish(
        "How far from the best mixture",
        "How much was there to win over uniform weights on this corpus at this size, and how much "
        "of it does each method find?",
        [group, plan.perplexities(arms, None, focus="regression")],
    )


def given_arms(plan: Planner, taken: Sequence[str], ending: str = "", **more: Any) -> list[Json]:
    """Those of `--weights NAME=FILE`; `more` as for `Planner.base`, `ending` of the runs' names,
    `taken` the labels of the arms beside them."""
    named = read_named(plan.config.weights, domains=plan.domains, taken=taken)
    return [
        plan.arm(label, "given", plan.base(f"given-{label}{ending}", file, **more))
        for label, file in named.items()
    ]


def _swarm(plan: Planner) -> list[str]:
    """Base models at drawn mixtures: around uniform, natural and learned weights in turn."""
    told, seeds = plan.config.swarm, plan.config.seeds
    learned: list[Make] = [plan.proxy(), *(make for _, _, make in plan.doremis())]
    runs = []
    for number in range(told.mixtures):
        turn, place = divmod(number, 3)
        seed = seeds[turn % len(seeds)]
        around = ("uniform", "natural", learned[turn // len(seeds) % len(learned)](seed))[place]
        concentration = told.concentration * (_NEARER if place == 2 else 1.0)
        name = f"drawn-{number}"
        drawn = plan.base(
            name,
            plan.out / MIXTURES / f"{name}.json",
            recipe=partial(_write_drawn, around=around, concentration=concentration, number=number),
            reads=(around,),
        )
        runs.append(drawn(seed).name)
    return runs


def _write_drawn(
    config: BaseConfig, *, around: str | Path, concentration: float, number: int
) -> None:
    """w ~ Dirichlet(concentration K centre), a little of it uniform."""
    corpus = load_corpus(config.corpus, targets=config.targets)
    (phase,) = resolve_phases(replace(config, weights=str(around)), corpus)
    centre_K = np.array([phase.weights[name] for name in corpus.names])
    num_domains = len(centre_K)
    draw = np.random.default_rng([number, config.training.seed, num_domains])
    drawn_K = draw.dirichlet(concentration * num_domains * centre_K)
    weights_K = (1 - _SMOOTHING) * drawn_K + _SMOOTHING / num_domains
    _write(Path(config.weights), "drawn", corpus.names, weights_K)


def _write_best(config: BaseConfig, *, swarm: tuple[Path, ...], apart: tuple[str, ...]) -> None:
    """The weights that are best by the regression over a swarm; `apart` is not part of it.

    Raises:
        RuntimeError: a run of the swarm has not been measured as the others have.
    """
    names = config.corpus.domains
    runs = swarm_of(open_runs([config.out.parent]), apart, open_runs(swarm[:1])[0])
    if missing := {path.name for path in swarm} - {run.name for run in runs}:
        raise RuntimeError(
            f"The best mixture follows from the whole swarm; {', '.join(sorted(missing))} has not "
            "been measured as the rest. Repeat the command, which does that first."
        )
    read = swarms.read([run.path for run in runs], names)
    _write(Path(config.weights), "regression", names, swarms.fitted(read).best_K)


def _write(file: Path, method: str, names: Sequence[str], weights_K: Floats) -> None:
    entries = [
        {"name": name, "weight": float(weight)}
        for name, weight in zip(names, weights_K, strict=True)
    ]
    with failures.writing(file):
        records.write_weights(file, {"method": method, "domains": entries})
