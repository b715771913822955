"""The paper's experiments: which runs each needs, and which tables they end in.

A plan is data: jobs, each a stage's configuration, a later one reading what an earlier one has
left; and groups, each the runs behind a table.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doge_fast.pipeline.config import ExperimentConfig
from doge_fast.pipeline.experiments.planner import Plan, Planner
from doge_fast.pipeline.experiments.presets import (
    PAPER_LANGUAGE_TARGETS,
    PAPER_LANGUAGES,
    doremi_steps,
)
from doge_fast.pipeline.records.shapes import (
    ArmRecord,
    Group,
    TargetRow,
    TargetsGroup,
    WeightsGroup,
)
from doge_fast.pipeline.selection import check_strategies

# Stages of the paper's curricula; one stage is the global average.
CURRICULA = (2, 3, 10)


def plan_of(
    config: ExperimentConfig,
    names: Sequence[str],
    out: Path,
) -> Plan:
    """The runs and tables of an experiment on a corpus of these domains, in a directory.

    Raises:
        ValueError: the corpus lacks a domain that is asked for.
    """
    planner = Planner(config, names, out)
    planner.check_known("domains", config.corpus.domains)
    return _PLANS[config.name](planner)


def _universal(plan: Planner) -> Plan:
    """tab:universal_ppl, tab:124M_ppl, tab:dw."""
    learned = [plan.arm("DoGE", "average weights", plan.proxy())]
    learned += [plan.arm(label, "average weights", each) for _, label, each in plan.doremis()]
    return plan.plan(
        "Universal generalization",
        "Which mixture of the domains lowers the mean held-out loss over all of them, at equal "
        "tokens, model and settings?",
        *(_universal_perplexity(plan, model) for model in plan.config.base.models),
        WeightsGroup("Domain weights", tuple(learned)),
        plan.cost(),
    )


def _universal_perplexity(plan: Planner, model: str) -> Group:
    arms = [
        plan.uniform(f"uniform-{model}", model=model),
        plan.arm("natural", "by tokens", plan.base(f"natural-{model}", "natural", model=model)),
        plan.doge(f"doge-{model}", model=model),
    ]
    arms += [
        plan.arm(label, "learned", plan.base(f"doremi-{steps}-{model}", each, model=model))
        for steps, label, each in plan.doremis()
    ]
    title = f"Base models of size {model}"
    return plan.perplexities(arms, title, pairs=_against_doge(arms))


def _against_doge(arms: Sequence[ArmRecord]) -> tuple[tuple[str, str], ...]:
    """DoGE against the other ways of learning weights."""
    return tuple(("DoGE", arm.label) for arm in arms if arm.label.startswith("DoReMi"))


def _doremi(plan: Planner) -> Plan:
    """DoReMi in both readings, beside DoGE; tab:robust's last row."""
    steps = doremi_steps(plan.config)[0]
    sources = {
        "DoReMi": ("doremi", plan.doremi(steps)),
        "DoReMi, DoGE authors' variant": ("doremi-doge", plan.doremi(steps, "doge")),
    }
    learned = [plan.arm("DoGE", "average weights", plan.proxy())]
    learned += [plan.arm(label, "average weights", each) for label, (_, each) in sources.items()]
    arms = [plan.uniform(), plan.doge()]
    arms += [
        plan.arm(label, "learned", plan.base(name, each)) for label, (name, each) in sources.items()
    ]
    return plan.plan(
        "DoReMi beside DoGE",
        "Do weights from excess loss over a reference help as much as weights from generalization "
        "estimation, and what does each cost?",
        plan.perplexities(arms, pairs=_against_doge(arms)),
        WeightsGroup("Domain weights", tuple(learned)),
        plan.cost(),
    )


def _ood(plan: Planner) -> Plan:
    """tab:ppl-ood, tab:ood-dw."""
    return _out_of_domain(plan, plan.config.targets or plan.domains, plan.domains)


def _wiki40b(plan: Planner) -> Plan:
    """tab:ood-wiki-dw, fig:dw_ood."""
    targets = plan.config.targets or PAPER_LANGUAGE_TARGETS
    found = tuple(name for name in PAPER_LANGUAGES if name in plan.names)
    chosen = plan.config.corpus.domains or found or plan.names
    return _out_of_domain(plan, targets, [name for name in chosen if name not in targets])


def _out_of_domain(plan: Planner, targets: Sequence[str], domains: Sequence[str]) -> Plan:
    """Every target against the same arms; `domains` but for it teach."""
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
        tuned, then = "uniform, fine-tuned", "then on the target"
        oracle = plan.base(f"uniform-with-{target}", "uniform", domains=(*others, target))
        arms = (
            plan.arm("uniform", "without the target", uniform, is_baseline=True),
            plan.arm("DoGE", "learned for the target", doge),
            plan.arm(tuned, then, plan.finetuned(uniform, target)),
            plan.arm("DoGE, fine-tuned", then, plan.finetuned(doge, target), baseline=tuned),
            plan.arm("oracle", "uniform, target included", oracle),
        )
        rows.append(TargetRow(target, arms))
        learned.append(plan.arm(f"for {target}", "average weights", proxy))
    return plan.plan(
        "Out-of-domain generalization",
        "Which mixture of the other domains lowers the loss on a target that nobody trains on, and "
        "does it still help when training goes on with the target alone?",
        TargetsGroup("Perplexity on the target", tuple(rows)),
        WeightsGroup("Domain weights by target", tuple(learned)),
    )


def _scales(plan: Planner) -> Plan:
    """tab:robust."""
    models = plan.config.proxy.models
    if len(models) != 3:
        raise ValueError(f"proxy.models must name three sizes; got {', '.join(models)}.")
    arms = [plan.arm(model, "proxy", plan.proxy(model, model=model)) for model in models]
    return plan.plan(
        "The size of the proxy",
        "Does a smaller or larger proxy find the same weights?",
        WeightsGroup("Domain weights by the size of the proxy", tuple(arms), models[1]),
    )


def _selection(plan: Planner) -> Plan:
    """tab:cc-dw, tab:cc-ppl."""
    strategies = plan.config.selection.strategies
    check_strategies(strategies)
    sources = {"full": plan.proxy("full")} | {name: plan.selected(name) for name in strategies}
    about = {name: "all parameters" if name == "full" else "selected" for name in sources}
    arms = [plan.arm(name, about[name], each) for name, each in sources.items()]
    bases = [plan.uniform()]
    bases += [plan.arm(name, about[name], plan.base(name, each)) for name, each in sources.items()]
    pairs = tuple((name, "full") for name in strategies)
    return plan.plan(
        "Selection by the cancellation effect",
        "Are the gradients of a few parameters enough to learn the weights?",
        plan.perplexities(bases, focus="full", pairs=pairs),
        WeightsGroup("Domain weights by selection", tuple(arms)),
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
    learned = plan.arm("DoGE", "average weights", proxy)
    return plan.plan(
        "Stage-wise curriculum",
        "Is it better to let the weights follow the proxy's stages than to take their average?",
        plan.perplexities(arms),
        WeightsGroup("The average weights", (learned,)),
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
    return plan.plan(
        "The proxy as a model",
        "Is the proxy, whose gradients were reweighted, as good as a model of its size that was "
        "trained on the resampled corpus with as many tokens?",
        plan.perplexities(arms, title, pairs=(("DoGE proxy", "DoGE base"),)),
    )


_PLANS: dict[str, Callable[[Planner], Plan]] = {
    "universal": _universal,
    "doremi": _doremi,
    "ood": _ood,
    "wiki40b": _wiki40b,
    "scales": _scales,
    "selection": _selection,
    "curriculum": _curriculum,
    "proxy_vs_base": _proxy_vs_base,
}
