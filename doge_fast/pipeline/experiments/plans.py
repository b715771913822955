"""The paper's experiments and ours: which runs each needs, and which tables they end in.

A plan is data: jobs, each a stage's configuration, a later one reading what an earlier one has
left; and groups, each the runs behind a table.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.experiments.planner import Json, Plan, Planner
from doge_fast.pipeline.experiments.presets import (
    PAPER_LANGUAGE_TARGETS,
    PAPER_LANGUAGES,
    doremi_steps,
    rates_of,
)
from doge_fast.pipeline.records.weights import read_named

# Stages of the paper's curricula; one stage is the global average.
CURRICULA = (2, 3, 10)
# Of the domains of text found on a machine, the one that the demo holds out.
DEMO_TARGET = "reference"


def plan_of(
    config: ExperimentConfig, names: Sequence[str], out: Path, tasks: Json | None = None
) -> Plan:
    """The runs and tables of an experiment.

    Args:
        config: which experiment, how large.
        names: domains that the corpus holds.
        out: the experiment's directory.
        tasks: of lm-eval, to score base models on: `tasks`, and `task_data_sha256` of their
            documents where they are local.

    Raises:
        ValueError: the corpus lacks a domain that is asked for, or there are tasks and no table of
            base models.
    """
    planner = Planner(config, names, out)
    planner.check_known("domains", config.corpus.domains)
    plan = _PLANS[config.name](planner)
    return _with_tasks(plan, tasks) if tasks else plan


def _with_tasks(plan: Plan, tasks: Json) -> Plan:
    """A table of accuracies after each of perplexities."""
    groups = []
    for group in plan.groups:
        groups.append(group)
        if group["kind"] == "perplexity" and "until" not in group:
            groups.append(
                {
                    "kind": "tasks",
                    "title": f"Tasks: {group['title']}",
                    "arms": group["arms"],
                    "focus": group.get("focus"),
                    **tasks,
                    "shots": plan.config.tasks.shots,
                    "task_limit": plan.config.tasks.task_limit,
                    "task_data": plan.config.tasks.task_data,
                }
            )
    if len(groups) == len(plan.groups):
        raise ValueError(
            "tasks are scored where base models are compared on all domains; "
            f"{plan.config.name} does not. doge-fast evaluate RUN --tasks scores any base run."
        )
    return replace(plan, groups=groups)


def _demo(plan: Planner) -> Plan:
    """Both halves of the paper's question on one corpus, in minutes."""
    targets = plan.config.targets or (DEMO_TARGET,)
    arms = [plan.uniform(), plan.natural(), plan.doge()]
    table, learned = _targeted(plan, targets, plan.domains, is_short=True)
    learned = [plan.arm("DoGE", "for all domains", plan.proxy()), *learned]
    return plan.finish(
        "Domain weights, learned and tried out",
        "Which mixture of the domains lowers the held-out loss, over all of them and on one that "
        "nobody trains on?",
        [plan.perplexities(arms, None), table, plan.weights(learned, None)],
    )


def _universal(plan: Planner) -> Plan:
    """tab:universal_ppl, tab:124M_ppl, tab:dw."""
    groups = [_universal_perplexity(plan, model) for model in plan.config.base.models]
    learned = [plan.arm("DoGE", "average weights", plan.proxy())]
    learned += [plan.arm(label, "average weights", each) for _, label, each in plan.doremis()]
    return plan.finish(
        "Universal generalization",
        "Which mixture of the domains lowers the mean held-out loss over all of them, at equal "
        "tokens, model and settings?",
        [*groups, plan.weights(learned, "tab:dw"), plan.cost()],
    )


def _universal_perplexity(plan: Planner, model: str) -> Json:
    arms = [
        plan.uniform(f"uniform-{model}", model=model),
        plan.natural(f"natural-{model}", model=model),
        plan.doge(f"doge-{model}", model=model),
    ]
    arms += [
        plan.arm(label, "learned", plan.base(f"doremi-{steps}-{model}", each, model=model))
        for steps, label, each in plan.doremis()
    ]
    arms += _given_arms(plan, [arm["label"] for arm in arms], model)
    return plan.perplexities(
        arms, _paper_table(model), title=f"Base models of size {model}", pairs=_against_doge(arms)
    )


def _given_arms(plan: Planner, taken: Sequence[str], model: str) -> list[Json]:
    """Those of `--weights NAME=FILE`; `taken` are the labels of the arms beside them."""
    named = read_named(plan.config.weights, domains=plan.domains, taken=taken)
    return [
        plan.arm(label, "given", plan.base(f"given-{label}-{model}", file, model=model))
        for label, file in named.items()
    ]


def _paper_table(model: str) -> str:
    """Where the paper prints what base models of a size reach; of other sizes its main table."""
    tables = {"124M": "tab:124M_ppl", "210M": "tab:210M_ppl"}
    return tables.get(model, "tab:universal_ppl")


def _against_doge(arms: Sequence[Json]) -> list[list[str]]:
    """DoGE against the other ways of learning weights."""
    return [["DoGE", arm["label"]] for arm in arms if arm["label"].startswith("DoReMi")]


def _doremi(plan: Planner) -> Plan:
    """DoReMi in both readings, beside DoGE; tab:robust's last row."""
    steps = doremi_steps(plan.config)[0]
    sources = {
        "DoReMi": plan.doremi(steps),
        "DoReMi, DoGE authors' variant": plan.doremi(steps, "doge"),
    }
    learned = [plan.arm("DoGE", "average weights", plan.proxy())]
    learned += [plan.arm(label, "average weights", each) for label, each in sources.items()]
    arms = [plan.uniform(), plan.doge()]
    arms += [
        plan.arm(label, "learned", plan.base(name, each))
        for name, (label, each) in zip(("doremi", "doremi-doge"), sources.items(), strict=True)
    ]
    paper = _paper_table(plan.config.base.models[0])
    return plan.finish(
        "DoReMi beside DoGE",
        "Do weights from excess loss over a reference help as much as weights from generalization "
        "estimation, and what does each cost?",
        [
            plan.perplexities(arms, paper, pairs=_against_doge(arms)),
            plan.weights(learned, None),
            plan.cost(),
        ],
    )


def _ood(plan: Planner) -> Plan:
    """tab:ppl-ood, tab:ood-dw."""
    targets = plan.config.targets or plan.domains
    return _out_of_domain(plan, targets, plan.domains, paper=("tab:ppl-ood", "tab:ood-dw"))


def _wiki40b(plan: Planner) -> Plan:
    """tab:ood-wiki-dw, fig:dw_ood."""
    targets = plan.config.targets or PAPER_LANGUAGE_TARGETS
    found = tuple(name for name in PAPER_LANGUAGES if name in plan.names)
    chosen = plan.config.corpus.domains or found or plan.names
    domains = [name for name in chosen if name not in targets]
    return _out_of_domain(plan, targets, domains, paper=(None, "tab:ood-wiki-dw"))


def _out_of_domain(
    plan: Planner,
    targets: Sequence[str],
    domains: Sequence[str],
    *,
    paper: tuple[str | None, str],
) -> Plan:
    table, learned = _targeted(plan, targets, domains, paper=paper[0])
    return plan.finish(
        "Out-of-domain generalization",
        "Which mixture of the other domains lowers the loss on a target that nobody trains on, and "
        "does it still help when training goes on with the target alone?",
        [
            table,
            plan.weights(learned, paper[1], title="Domain weights by target", is_affinity=True),
        ],
    )


def _targeted(
    plan: Planner,
    targets: Sequence[str],
    domains: Sequence[str],
    *,
    paper: str | None = None,
    is_short: bool = False,
) -> tuple[Json, list[Json]]:
    """The table of every target against the same arms, and what `domains` but for it teach.

    `is_short`: no model that goes on with the target, nor one that was trained on it too.
    """
    plan.check_known("targets", targets)
    if odd := [name for name in targets if "=" in name]:
        raise ValueError(f"A target's name may hold no '=', which gives weights; got {odd[0]!r}.")
    rows, learned = [], []
    for target in targets:
        others = tuple(name for name in domains if name != target)
        if not others:
            raise ValueError(
                f"{plan.config.name} needs a domain to learn from beside {', '.join(targets)}."
            )
        proxy = plan.proxy(f"for-{target}", target=(target,), domains=others)
        without = {"domains": others, "targets": (target,)}
        uniform = plan.base(f"uniform-without-{target}", "uniform", **without)
        doge = plan.base(f"doge-for-{target}", proxy, **without)
        arms = [
            plan.arm("uniform", "without the target", uniform, is_baseline=True),
            plan.arm("DoGE", "learned for the target", doge),
        ]
        if not is_short:
            tuned, then = "uniform, fine-tuned", "then on the target"
            all_domains = (*others, target)
            oracle = plan.base(f"uniform-with-{target}", "uniform", domains=all_domains)
            arms += [
                plan.arm(tuned, then, plan.finetuned(uniform, target)),
                plan.arm("DoGE, fine-tuned", then, plan.finetuned(doge, target), baseline=tuned),
                plan.arm("oracle", "uniform, target included", oracle),
            ]
        rows.append({"target": target, "domains": list(others), "arms": arms})
        learned.append(plan.arm(f"for {target}", "average weights", proxy, target=target))
    table = {"kind": "targets", "title": "Perplexity on the target", "paper": paper, "rows": rows}
    return table, learned


def _scales(plan: Planner) -> Plan:
    """tab:robust."""
    models = plan.config.proxy.models
    if len(models) != 3:
        raise ValueError(f"proxy.models must name three sizes; got {', '.join(models)}.")
    arms = [plan.arm(model, "proxy", plan.proxy(model, model=model)) for model in models]
    title = "Domain weights by the size of the proxy"
    return plan.finish(
        "The size of the proxy",
        "Does a smaller or larger proxy find the same weights?",
        [plan.weights(arms, "tab:robust", title=title, reference=models[1])],
    )


def _selection(plan: Planner) -> Plan:
    """tab:cc-dw, tab:cc-ppl."""
    strategies = plan.config.selection.strategies
    sources = {"full": plan.proxy("full")} | {name: plan.selected(name) for name in strategies}
    about = {name: "all parameters" if name == "full" else "selected" for name in sources}
    arms = [plan.arm(name, about[name], each) for name, each in sources.items()]
    bases = [plan.uniform()]
    bases += [plan.arm(name, about[name], plan.base(name, each)) for name, each in sources.items()]
    pairs = [[name, "full"] for name in strategies]
    title = "Domain weights by selection"
    return plan.finish(
        "Selection by the cancellation effect",
        "Are the gradients of a few parameters enough to learn the weights?",
        [
            plan.perplexities(bases, "tab:cc-ppl", focus="full", pairs=pairs),
            plan.weights(arms, "tab:cc-dw", title=title, has_columns=True),
        ],
    )


def _curriculum(plan: Planner) -> Plan:
    """fig:curriculum_dw, fig:curriculum_ppl."""
    shortest = min(plan.config.proxy.steps, plan.config.base.steps)
    if shortest < CURRICULA[0]:
        raise ValueError(f"curriculum needs runs of {CURRICULA[0]} steps and more; got {shortest}.")
    proxy = plan.proxy()
    arms = [
        plan.arm("uniform", "uniform weights", plan.base("uniform", "uniform")),
        plan.arm("global average", "one stage", plan.base("doge", proxy), is_baseline=True),
    ]
    arms += [
        plan.arm(f"K = {n}", f"{n} stages", plan.base(f"stages-{n}", proxy, stages=n))
        for n in CURRICULA
        if n <= shortest
    ]
    learned = [plan.arm("DoGE", "average weights", proxy)]
    return plan.finish(
        "Stage-wise curriculum",
        "Is it better to let the weights follow the proxy's stages than to take their average?",
        [
            plan.perplexities(arms, None),
            plan.weights(learned, "tab:dw", title="The average weights"),
        ],
    )


def _early(plan: Planner) -> Plan:
    """fig:early_stage."""
    arms = [plan.uniform(), plan.natural(), plan.doge()]
    quarter = plan.perplexities(arms, None, title="After a quarter of the steps", until=0.25)
    return plan.finish(
        "The first quarter of training",
        "Do learned weights pay early, on every domain?",
        [quarter, plan.perplexities(arms, None, title="At the end")],
    )


def _proxy_vs_base(plan: Planner) -> Plan:
    """fig:proxy."""
    told = plan.config
    # As many tokens as the proxy saw.
    blocks = told.proxy.steps * told.proxy.sequences_per_domain * len(plan.domains)
    alike: dict[str, Any] = {
        "model": told.proxy.model,
        "steps": round(blocks / told.base.batch_size),
    }
    proxy = plan.proxy(is_measured=True)
    arms = [
        plan.uniform(**alike),
        plan.arm("DoGE base", "resampled", plan.base("doge", proxy, **alike)),
        plan.arm("DoGE proxy", "reweighted gradients", proxy),
    ]
    title = f"Models of size {told.proxy.model}"
    return plan.finish(
        "The proxy as a model",
        "Is the proxy, whose gradients were reweighted, as good as a model of its size that was "
        "trained on the resampled corpus with as many tokens?",
        [plan.perplexities(arms, None, title=title, pairs=[["DoGE proxy", "DoGE base"]])],
    )


def _sensitivity(plan: Planner) -> Plan:
    """The proxy with one setting changed at a time, and base models at what each learns."""
    sources = {label: plan.proxy(_slug(label), **each) for label, each in _changes(plan).items()}
    # Each base model follows its proxy, so that an experiment that is stopped has whole arms.
    arms = [plan.uniform(), plan.natural()]
    arms += [
        plan.arm(f"DoGE, {label}", "learned", plan.base(_slug(label), each))
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
    own = plan.mu_towards(len(plan.domains) if is_mix else 1)
    other: dict[str, Any] = {"target": name, "mu": own}
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
    if told.score == "unbiased":
        # It cuts gradients itself.
        changes = {label: each for label, each in changes.items() if "domain clip" not in label}
    other_score = "paper" if told.score == "published" else "published"
    changes[f"score {other_score}"] = {"score": other_score}
    for times, factor in {"x 2": 2.0, "/ 2": 0.5}.items():
        # The weights move by lr W / mu: at the same pace, so that it is the proxy that differs.
        rates = (peak * factor, end * factor)
        changes[f"learning rate and mu {times}"] = {"mu": mu * factor, "rates": rates}
    return changes


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


_PLANS: dict[str, Callable[[Planner], Plan]] = {
    "demo": _demo,
    "universal": _universal,
    "doremi": _doremi,
    "ood": _ood,
    "wiki40b": _wiki40b,
    "scales": _scales,
    "selection": _selection,
    "curriculum": _curriculum,
    "early": _early,
    "proxy_vs_base": _proxy_vs_base,
    "sensitivity": _sensitivity,
}
