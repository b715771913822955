"""How far from the best mixture: a swarm of base models, a regression over it, and every method.

The truth by brute force, and RegMix as a baseline: base models at mixtures drawn around uniform,
natural and learned weights show how each domain's loss follows from the mixture, and those at these
weights themselves too. `swarm` holds the regression; here is which runs it takes.
"""

from functools import partial
from pathlib import Path

from doge_fast.pipeline.experiments.planner import (
    RUNS,
    Best,
    Drawn,
    Json,
    Plan,
    Planner,
    Source,
    at,
)
from doge_fast.pipeline.records.weights import read_named

MIXTURES = "mixtures"
# Draws around learned weights lie so much nearer to them.
_NEARER = 4.0


def regret(plan: Planner) -> Plan:
    """Every method's distance from the best mixture, predicted and measured."""
    arms = [
        plan.uniform(),
        plan.natural(),
        plan.doge() | {"spent": [[name] for name in plan.over_seeds(plan.proxy)]},
        *_doremi_arms(plan),
    ]
    # All but what is judged by it: those that are given, and its own.
    swarm = [*_swarm(plan), *(name for arm in arms for name in arm["runs"])]
    # Draws around learned weights cost what learning these does.
    learned = [name for arm in arms for names in arm.get("spent", ()) for name in names]
    given = _given_arms(plan)
    own = f"best-of-{plan.config.swarm.mixtures}"
    best = plan.as_base(
        own,
        at(str(plan.out / MIXTURES / f"{own}.json")),
        recipe=Best(
            tuple(plan.out / RUNS / name for name in swarm),
            tuple(name for arm in given for name in arm["runs"]),
        ),
    )
    judged = [*given, plan.arm("regression", "best by it", best, spent=[learned])]
    arms += judged
    group = {
        "kind": "regret",
        "title": "Regret",
        "aim": list(plan.domains),
        "arms": arms,
        "swarm": swarm,
        "apart": [name for arm in judged for name in arm["runs"]],
        "focus": "regression",
    }
    return plan.finish(
        "How far from the best mixture",
        "How much was there to win over uniform weights on this corpus at this size, and how much "
        "of it does each method find?",
        [group, plan.perplexities(arms, None, focus="regression")],
    )


def _doremi_arms(plan: Planner) -> list[Json]:
    arms = []
    for steps, label, make in plan.doremis():
        arm = plan.at_weights(label, "learned", f"doremi-{steps}", make)
        references = plan.over_seeds(partial(plan.reference, steps=steps))
        pairs = zip(references, plan.over_seeds(make), strict=True)
        arms.append(arm | {"spent": [list(pair) for pair in pairs]})
    return arms


def _given_arms(plan: Planner) -> list[Json]:
    """Those of `--weights NAME=FILE`."""
    given = read_named(plan.config.weights, domains=plan.domains)
    return [
        plan.at_weights(label, "given", f"given-{label}", at(str(file)))
        for label, file in given.items()
    ]


def _swarm(plan: Planner) -> list[str]:
    """Base models at drawn mixtures: around uniform, natural and learned weights in turn."""
    told, seeds = plan.config.swarm, plan.config.seeds
    learned: list[Source] = [plan.proxy, *(make for _, _, make in plan.doremis())]
    runs = []
    for number in range(told.mixtures):
        turn, place = divmod(number, 3)
        seed = seeds[turn % len(seeds)]
        around: list[str | Path] = ["uniform", "natural"]
        around.append(learned[turn // len(seeds) % len(learned)](seed))
        recipe = Drawn(
            around=around[place],
            concentration=told.concentration * (_NEARER if place == 2 else 1.0),
            number=number,
        )
        file = plan.out / MIXTURES / f"drawn-{number}.json"
        runs.append(plan.base(seed, f"drawn-{number}", str(file), recipe=recipe).name)
    return runs
