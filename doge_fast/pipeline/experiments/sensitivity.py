"""How much the weights, and what they are good for, depend on the settings of the proxy."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from doge_fast.defaults import default_mu
from doge_fast.pipeline.experiments.planner import Plan, Planner
from doge_fast.pipeline.experiments.presets import rates_of


def sensitivity(plan: Planner) -> Plan:
    """The proxy with one setting changed at a time, and base models at what each learns."""
    sources: dict[str, Callable[[int], Path]] = {
        label: partial(plan.proxy, name=_slug(label), **each)
        for label, each in _changes(plan).items()
    }
    # Each base model follows its proxy, so that an experiment that is stopped has whole arms.
    arms = [plan.uniform(), plan.natural()]
    arms += [
        plan.at_weights(f"DoGE, {label}", "learned", _slug(label), each)
        for label, each in sources.items()
    ]
    learned = [plan.arm(label, "proxy", each) for label, each in sources.items()]
    return plan.finish(
        "Settings of the proxy",
        "Which settings of the proxy decide whether its weights help?",
        [plan.perplexities(arms, None), plan.weights(learned, "tab:dw")],
    )


def _changes(plan: Planner) -> dict[str, dict[str, Any]]:
    """{label: what differs from the proxy as it is set}."""
    told = plan.config.proxy
    mu, clip = told.mu, None if told.domain_max_grad_norm else 1.0
    assert mu is not None
    is_mix = told.target_batch == "mix"
    peak, end = rates_of(plan.config, told.model)
    target, name = ("target same batch", ("universal",)) if is_mix else ("target mix", ("mix",))
    # W towards one target spreads less than towards all, so the target has a mu of its own.
    other: dict[str, Any] = {"target": name, "mu": mu}
    if not plan.is_mu_given:
        other["mu"] = default_mu(peak, len(plan.domains) if is_mix else 1)
    pace, factor = ("mu x 16", 16) if clip is None else ("mu / 16", 1 / 16)
    changes: dict[str, dict[str, Any]] = {
        "as set": {},
        target: other,
        f"{target}, domain clip {clip}": {**other, "domain_max_grad_norm": clip},
        f"domain clip {clip}": {"domain_max_grad_norm": clip},
        # W grows with the square of the gradients, which are two to four times as long uncut.
        f"domain clip {clip}, {pace}": {"domain_max_grad_norm": clip, "mu": mu * factor},
        "mu x 4": {"mu": mu * 4},
        "mu / 4": {"mu": mu / 4},
        "average from 1/3": {"average_from": 1 / 3},
        "steps x 3": {"steps": 3 * told.steps},
        "batch x 2": {"sequences_per_domain": 2 * told.sequences_per_domain},
        "mu x 16": {"mu": mu * 16},
    }
    other_score = "paper" if told.score == "published" else "published"
    changes[f"score {other_score}"] = {"score": other_score}
    for times, factor in {"x 2": 2.0, "/ 2": 0.5}.items():
        # The weights move by lr W / mu: at the same pace, so that it is the proxy that differs.
        rates = {"learning_rate": peak * factor, "min_learning_rate": end * factor}
        changes[f"learning rate and mu {times}"] = {"mu": mu * factor, "training": rates}
    return changes


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
