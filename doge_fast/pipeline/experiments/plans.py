"""Which runs an experiment needs, in which order, and which tables they end in.

A plan is data: jobs, each a stage's configuration, a later one reading what an earlier one has
left; and groups, each the runs behind a table. Runs of one seed start from the same numbers and
see their data in the same order, whatever the arm, so arms are compared seed by seed.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from doge_fast import simplex
from doge_fast.pipeline.config import (
    BaseConfig,
    CorpusConfig,
    DoReMiConfig,
    ExperimentConfig,
    ModelConfig,
    ProxyConfig,
    SelectConfig,
    TrainingConfig,
)
from doge_fast.pipeline.experiments.presets import (
    PAPER_LANGUAGE_TARGETS,
    PAPER_LANGUAGES,
    Settings,
    rates_of,
)

StageConfig = ProxyConfig | BaseConfig | DoReMiConfig | SelectConfig
Json = dict[str, Any]
# For a seed, what `BaseConfig.weights` says.
Source = Callable[[int], str | Path]
# Stages of the paper's curricula; one stage is the global average.
CURRICULA = (2, 3, 10)
RUNS = "runs"


@dataclass(frozen=True)
class Job:
    """A run, and whether its model is measured on held-out text afterwards."""

    config: StageConfig
    is_measured: bool


@dataclass
class Plan:
    """Runs in an order in which each finds what it needs, and the tables they end in."""

    title: str
    question: str
    jobs: list[Job] = field(default_factory=list)
    groups: list[Json] = field(default_factory=list)


def plan_of(
    config: ExperimentConfig,
    settings: Settings,
    names: Sequence[str],
    out: Path,
    tasks: Json | None = None,
) -> Plan:
    """The runs and tables of an experiment.

    Args:
        config: which experiment.
        settings: how large; mu a number.
        names: domains that the corpus holds.
        out: the experiment's directory.
        tasks: of lm-eval, to score base models on: `tasks`, and `task_data_sha256` of their
            documents where they are local.

    Raises:
        ValueError: the corpus lacks a domain that is asked for, or there are tasks and no table of
            base models.
    """
    planner = _Planner(config, settings, tuple(names), out)
    _check_known("domains", settings.domains, planner)
    plan = _PLANS[config.name](planner)
    return _with_tasks(plan, config, tasks) if tasks else plan


def _with_tasks(plan: Plan, config: ExperimentConfig, tasks: Json) -> Plan:
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
                    "shots": config.shots,
                    "task_limit": config.task_limit,
                    "task_data": config.task_data,
                }
            )
    if len(groups) == len(plan.groups):
        raise ValueError(
            f"tasks are scored where base models are compared on all domains; {config.name} does "
            "not. doge-fast evaluate RUN --tasks scores any base run."
        )
    return replace(plan, groups=groups)


def corpus_of(config: ExperimentConfig, settings: Settings) -> CorpusConfig:
    """The whole corpus of an experiment, no domain chosen yet.

    Raises:
        ValueError: the experiment needs one and has no default.
    """
    data: str | None = settings.data
    if config.name == "wiki40b":
        data = settings.language_data
    if data is None:
        raise ValueError(
            "wiki40b needs text in several languages: name a directory with a folder for each, "
            "data=DIR, or take preset=paper with the Hub's Wiki40b."
        )
    is_language = config.name == "wiki40b"
    return CorpusConfig(
        data=data,
        domain_column=settings.domain_column,
        tokenizer="train"
        if is_language and config.preset == "paper" and config.tokenizer is None
        else settings.tokenizer,
        vocab_size=settings.vocab_size,
        block_size=settings.block_size,
        max_tokens_per_domain=settings.max_tokens_per_domain,
        cache_dir=config.cache_dir,
    )


class _Planner:
    """Makes a plan's runs, each once."""

    def __init__(
        self, config: ExperimentConfig, settings: Settings, names: tuple[str, ...], out: Path
    ) -> None:
        self.config, self.settings, self.names, self.out = config, settings, names, out
        self.corpus = corpus_of(config, settings)
        self.jobs: dict[Path, Job] = {}

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains: those asked for, or all."""
        return self.settings.domains or self.names

    def finish(self, title: str, question: str, groups: list[Json]) -> Plan:
        """All that was asked for so far, as a plan."""
        return Plan(title, question, list(self.jobs.values()), groups)

    def over_seeds(self, make: Callable[[int], Path]) -> list[str]:
        """Names of a run for every seed."""
        return [make(seed).name for seed in self.settings.seeds]

    def arm(self, label: str, about: str, make: Callable[[int], Path], **more: Any) -> Json:
        """An arm of a table."""
        return {"label": label, "about": about, "runs": self.over_seeds(make), **more}

    def perplexities(
        self, arms: list[Json], paper: str | None, *, title: str | None = None, **more: Any
    ) -> Json:
        """The table of what base models reach on every domain."""
        return {
            "kind": "perplexity",
            "title": title or f"Base models of size {self.settings.base_models[0]}",
            "paper": paper,
            "aim": list(self.domains),
            "arms": arms,
            **more,
        }

    def proxy(
        self,
        seed: int,
        name: str = "doge",
        *,
        target: tuple[str, ...] | None = None,
        domains: Sequence[str] | None = None,
        model: str | None = None,
        is_measured: bool = False,
        steps: int | None = None,
        training: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        """Learn weights; `changes` are fields of `ProxyConfig`, `training` of its training."""
        settings = self.settings
        model = model or settings.proxy_model
        if target is None:
            target = ("mix",) if self.config.target_batch == "mix" else ("universal",)
        config = ProxyConfig(
            out=self._path("proxy", name, seed),
            corpus=self._corpus(domains),
            model=ModelConfig(model=model),
            training=replace(
                self._training(steps or settings.proxy_steps, seed, model, self._every(1)),
                **(training or {}),
            ),
            target=target,
            sequences_per_domain=settings.sequences_per_domain,
            mu=settings.mu,
            score=settings.score,
            domain_max_grad_norm=settings.domain_max_grad_norm,
        )
        return self._add(replace(config, **changes), is_measured)

    def base(
        self,
        seed: int,
        name: str,
        weights: str | Path,
        *,
        model: str | None = None,
        domains: Sequence[str] | None = None,
        targets: tuple[str, ...] = (),
        stages: int = 1,
        steps: int | None = None,
    ) -> Path:
        """Train at weights."""
        settings = self.settings
        model = model or settings.base_models[0]
        steps = steps or settings.base_steps
        return self._add(
            BaseConfig(
                out=self._path("base", name, seed),
                corpus=self._corpus(domains),
                model=ModelConfig(model=model),
                training=self._training(steps, seed, model, self._every(settings.eval_points)),
                weights=str(weights),
                stages=stages,
                targets=targets,
                batch_size=settings.batch_size,
            ),
            True,
        )

    def trained(self, seed: int, name: str, source: Source, **more: Any) -> Path:
        """Train at the weights that `source` gives for the seed."""
        return self.base(seed, name, source(seed), **more)

    def as_base(self, name: str, source: Source, **more: Any) -> Callable[[int], Path]:
        """`trained` of a seed still to come."""
        return partial(self.trained, name=name, source=source, **more)

    def finetuned(self, seed: int, source: Callable[[int], Path], target: str) -> Path:
        """Go on with a base model on the target alone."""
        settings, base = self.settings, source(seed)
        rate = settings.finetune_learning_rate
        corpus = replace(self.corpus, domains=(target,), tokenizer=str(base / "model"))
        return self._add(
            BaseConfig(
                out=base.with_name(f"finetuned-{base.name.removeprefix('base-')}"),
                corpus=corpus,
                model=ModelConfig(model=str(base / "model"), pretrained=True),
                training=replace(
                    self._training(settings.finetune_steps, seed, "", None),
                    learning_rate=rate,
                    min_learning_rate=rate / 5,
                ),
                batch_size=settings.batch_size,
            ),
            True,
        )

    def reference(self, seed: int, steps: int) -> Path:
        """DoReMi's first model: uniform weights, the proxy's size."""
        model = self.settings.proxy_model
        return self.base(seed, f"reference-{steps}", "uniform", model=model, steps=steps)

    def doremi(self, seed: int, steps: int, variant: Literal["doremi", "doge"] = "doremi") -> Path:
        """Learn weights by excess loss, after a reference of the same size and length."""
        settings = self.settings
        model = settings.proxy_model
        suffix = "" if variant == "doremi" else f"-{variant}"
        return self._add(
            DoReMiConfig(
                out=self._path("doremi", f"{steps}{suffix}", seed),
                reference=self.reference(seed, steps),
                corpus=self._corpus(None),
                model=ModelConfig(model=model),
                training=self._training(steps, seed, model, self._every(1)),
                batch_size=settings.batch_size,
                variant=variant,
            ),
            False,
        )

    def selected(self, seed: int, name: str) -> Path:
        """Learn weights from the gradients of a selection."""
        return self.proxy(seed, name, selection=self.select(seed) / f"selection-{name}.json")

    def select(self, seed: int) -> Path:
        """Measure the cancellation effect."""
        settings = self.settings
        model = settings.proxy_model
        training = self._training(settings.selection_steps, seed, model, None)
        return self._add(
            SelectConfig(
                out=self._path("select", "cancellation", seed),
                corpus=self._corpus(None),
                model=ModelConfig(model=model),
                # The first steps of a long training, whose rate has hardly begun to fall.
                training=replace(training, min_learning_rate=training.learning_rate),
                strategies=settings.strategies,
                batch_size=settings.sequences_per_domain * len(self.domains),
            ),
            False,
        )

    def _path(self, kind: str, name: str, seed: int) -> Path:
        # A domain or a model may be called anything; a directory may not.
        plain = re.sub(r"[^\w.-]+", "-", name)
        if plain != name:
            plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        return self.out / RUNS / f"{kind}-{plain}-seed{seed}"

    def _corpus(self, domains: Sequence[str] | None) -> CorpusConfig:
        chosen = tuple(self.domains if domains is None else domains)
        return replace(self.corpus, domains=chosen)

    def _training(
        self, steps: int, seed: int, model: str, eval_every: Callable[[int], int] | None
    ) -> TrainingConfig:
        peak, end = rates_of(self.settings, model)
        return TrainingConfig(
            steps=steps,
            learning_rate=peak,
            min_learning_rate=end,
            seed=seed,
            eval_every=None if eval_every is None else eval_every(steps),
            # Points of a curve; tables are measured afterwards.
            eval_blocks=min(64, self.settings.eval_blocks or 64),
            dtype=self.settings.dtype,
            device=self.config.device,
        )

    @staticmethod
    def _every(points: int) -> Callable[[int], int]:
        return lambda steps: max(1, steps // points)

    def _add(self, config: StageConfig, is_measured: bool) -> Path:
        known = self.jobs.get(config.out)
        assert known is None or known.config == config, f"two plans for {config.out}"
        is_measured = is_measured or (known is not None and known.is_measured)
        self.jobs[config.out] = Job(config, is_measured)
        return config.out


def _uniform(seed: int) -> str:
    return "uniform"


def _natural(seed: int) -> str:
    return "natural"


def _universal(plan: _Planner) -> Plan:
    """tab:universal_ppl, tab:124M_ppl, tab:dw."""
    groups = [_universal_perplexity(plan, model) for model in plan.settings.base_models]
    learned = [plan.arm("DoGE", "average weights", plan.proxy)]
    learned += [
        plan.arm(_doremi_label(steps), "average weights", partial(plan.doremi, steps=steps))
        for steps in plan.settings.doremi_steps
    ]
    weights = {"kind": "weights", "title": "Domain weights", "paper": "tab:dw", "arms": learned}
    groups.append(weights)
    groups.append(_cost(plan))
    return plan.finish(
        "Universal generalization",
        "Which mixture of the domains lowers the mean held-out loss over all of them, at equal "
        "tokens, model and settings?",
        groups,
    )


def _universal_perplexity(plan: _Planner, model: str) -> Json:
    def trained(name: str, source: Source) -> Callable[[int], Path]:
        return partial(plan.trained, name=f"{name}-{model}", source=source, model=model)

    arms = [
        plan.arm("uniform", "baseline", trained("uniform", _uniform), is_baseline=True),
        plan.arm("natural", "by tokens", trained("natural", _natural)),
        plan.arm("DoGE", "learned", trained("doge", plan.proxy)),
    ]
    arms += [
        plan.arm(
            _doremi_label(steps),
            "learned",
            trained(f"doremi-{steps}", partial(plan.doremi, steps=steps)),
        )
        for steps in plan.settings.doremi_steps
    ]
    return plan.perplexities(
        arms, _paper_table(model), title=f"Base models of size {model}", pairs=_against_doge(arms)
    )


def _paper_table(model: str) -> str:
    """Where the paper prints what base models of a size reach; of other sizes its main table."""
    tables = {"124M": "tab:124M_ppl", "210M": "tab:210M_ppl"}
    return tables.get(model, "tab:universal_ppl")


def _against_doge(arms: Sequence[Json]) -> list[list[str]]:
    """DoGE against the other ways of learning weights."""
    return [["DoGE", arm["label"]] for arm in arms if arm["label"].startswith("DoReMi")]


def _doremi_label(steps: int) -> str:
    return f"DoReMi, {steps} steps"


def _cost(plan: _Planner) -> Json:
    """What it takes to learn weights: tab:robust's last row."""
    methods = [{"label": "DoGE", "runs": [[name] for name in plan.over_seeds(plan.proxy)]}]
    for steps in plan.settings.doremi_steps:
        proxies = plan.over_seeds(partial(plan.doremi, steps=steps))
        references = plan.over_seeds(partial(plan.reference, steps=steps))
        runs = [list(pair) for pair in zip(references, proxies, strict=True)]
        methods.append({"label": _doremi_label(steps), "runs": runs})
    return {"kind": "cost", "title": "What learning the weights costs", "methods": methods}


def _doremi(plan: _Planner) -> Plan:
    """DoReMi in both readings, beside DoGE; tab:robust's last row."""
    steps = plan.settings.doremi_steps[0]
    sources = {
        "DoReMi": partial(plan.doremi, steps=steps),
        "DoReMi, DoGE authors' variant": partial(plan.doremi, steps=steps, variant="doge"),
    }
    learned = [plan.arm("DoGE", "average weights", plan.proxy)]
    learned += [plan.arm(label, "average weights", each) for label, each in sources.items()]
    arms = [
        plan.arm("uniform", "baseline", plan.as_base("uniform", _uniform), is_baseline=True),
        plan.arm("DoGE", "learned", plan.as_base("doge", plan.proxy)),
    ]
    arms += [
        plan.arm(label, "learned", plan.as_base(name, each))
        for name, (label, each) in zip(("doremi", "doremi-doge"), sources.items(), strict=True)
    ]
    return plan.finish(
        "DoReMi beside DoGE",
        "Do weights from excess loss over a reference help as much as weights from generalization "
        "estimation, and what does each cost?",
        [
            plan.perplexities(
                arms, _paper_table(plan.settings.base_models[0]), pairs=_against_doge(arms)
            ),
            {"kind": "weights", "title": "Domain weights", "paper": None, "arms": learned},
            _cost(plan),
        ],
    )


def _ood(plan: _Planner) -> Plan:
    """tab:ppl-ood, tab:ood-dw."""
    targets = plan.config.targets or plan.domains
    _check_known("targets", targets, plan)
    sources = {target: tuple(name for name in plan.domains if name != target) for target in targets}
    if not all(sources.values()):
        raise ValueError(f"ood needs a domain to learn from beside {', '.join(targets)}.")
    return _targeted(plan, sources, paper=("tab:ppl-ood", "tab:ood-dw"))


def _wiki40b(plan: _Planner) -> Plan:
    """tab:ood-wiki-dw, fig:dw_ood."""
    targets = plan.config.targets or PAPER_LANGUAGE_TARGETS
    _check_known("targets", targets, plan)
    found = tuple(name for name in PAPER_LANGUAGES if name in plan.names)
    chosen = plan.config.domains or found or plan.names
    domains = tuple(name for name in chosen if name not in targets)
    if not domains:
        raise ValueError(f"wiki40b needs languages to learn from beside {', '.join(targets)}.")
    return _targeted(plan, dict.fromkeys(targets, domains), paper=(None, "tab:ood-wiki-dw"))


def _check_known(what: str, names: Sequence[str], plan: _Planner) -> None:
    unknown = [name for name in names if name not in plan.names]
    if unknown:
        raise ValueError(
            f"{what} must name domains of {plan.corpus.data}, which are {', '.join(plan.names)}; "
            f"{', '.join(unknown)} is not among them."
        )


def _targeted(
    plan: _Planner, sources: Mapping[str, tuple[str, ...]], *, paper: tuple[str | None, str]
) -> Plan:
    """Every target against the same arms, before and after going on with the target alone."""
    odd = [name for name in sources if "=" in name]
    if odd:
        raise ValueError(f"A target's name may hold no '=', which gives weights; got {odd[0]!r}.")
    rows, learned = [], []
    for target, domains in sources.items():
        proxy = partial(plan.proxy, name=f"for-{target}", target=(target,), domains=domains)
        without = {"domains": domains, "targets": (target,)}
        uniform = plan.as_base(f"uniform-without-{target}", _uniform, **without)
        doge = plan.as_base(f"doge-for-{target}", proxy, **without)
        oracle = plan.as_base(f"uniform-with-{target}", _uniform, domains=(*domains, target))
        arms = [
            plan.arm("uniform", "without the target", uniform, is_baseline=True),
            plan.arm("DoGE", "learned for the target", doge),
            plan.arm(
                "uniform, fine-tuned",
                "then on the target",
                partial(plan.finetuned, source=uniform, target=target),
            ),
            plan.arm(
                "DoGE, fine-tuned",
                "then on the target",
                partial(plan.finetuned, source=doge, target=target),
                baseline="uniform, fine-tuned",
            ),
            plan.arm("oracle", "uniform, target included", oracle),
        ]
        rows.append({"target": target, "domains": list(domains), "arms": arms})
        learned.append(plan.arm(f"for {target}", "average weights", proxy, target=target))
    groups: list[Json] = [
        {"kind": "targets", "title": "Perplexity on the target", "paper": paper[0], "rows": rows},
        {
            "kind": "weights",
            "title": "Domain weights by target",
            "paper": paper[1],
            "arms": learned,
            "is_affinity": True,
        },
    ]
    return plan.finish(
        "Out-of-domain generalization",
        "Which mixture of the other domains lowers the loss on a target that nobody trains on, and "
        "does it still help when training goes on with the target alone?",
        groups,
    )


def _scales(plan: _Planner) -> Plan:
    """tab:robust."""
    models = plan.settings.proxy_models
    if len(models) != 3:
        raise ValueError(f"proxy_models must name three sizes; got {', '.join(models)}.")
    arms = [
        plan.arm(model, "proxy", partial(plan.proxy, name=model, model=model)) for model in models
    ]
    group: Json = {
        "kind": "weights",
        "title": "Domain weights by the size of the proxy",
        "paper": "tab:robust",
        "arms": arms,
        "reference": models[1],
    }
    return plan.finish(
        "The size of the proxy",
        "Does a smaller or larger proxy find the same weights?",
        [group],
    )


def _selection(plan: _Planner) -> Plan:
    """tab:cc-dw, tab:cc-ppl."""
    sources: dict[str, Callable[[int], Path]] = {"full": partial(plan.proxy, name="full")}
    sources |= {name: partial(plan.selected, name=name) for name in plan.settings.strategies}
    about = {name: "all parameters" if name == "full" else "selected" for name in sources}
    arms = [plan.arm(name, about[name], each) for name, each in sources.items()]
    bases = [plan.arm("uniform", "baseline", plan.as_base("uniform", _uniform), is_baseline=True)]
    bases += [
        plan.arm(name, about[name], plan.as_base(name, each)) for name, each in sources.items()
    ]
    weights = {
        "kind": "weights",
        "title": "Domain weights by selection",
        "paper": "tab:cc-dw",
        "arms": arms,
        "has_columns": True,
    }
    return plan.finish(
        "Selection by the cancellation effect",
        "Are the gradients of a few parameters enough to learn the weights?",
        [
            plan.perplexities(
                bases,
                "tab:cc-ppl",
                focus="full",
                pairs=[[name, "full"] for name in plan.settings.strategies],
            ),
            weights,
        ],
    )


def _curriculum(plan: _Planner) -> Plan:
    """fig:curriculum_dw, fig:curriculum_ppl."""
    shortest = min(plan.settings.proxy_steps, plan.settings.base_steps)
    if shortest < CURRICULA[0]:
        raise ValueError(f"curriculum needs runs of {CURRICULA[0]} steps and more; got {shortest}.")
    average = plan.as_base("doge", plan.proxy)
    arms = [
        plan.arm("uniform", "uniform weights", plan.as_base("uniform", _uniform)),
        plan.arm("global average", "one stage", average, is_baseline=True),
    ]
    arms += [
        plan.arm(
            f"K = {stages}",
            f"{stages} stages",
            plan.as_base(f"stages-{stages}", plan.proxy, stages=stages),
        )
        for stages in CURRICULA
        if stages <= shortest
    ]
    weights = {
        "kind": "weights",
        "title": "The average weights",
        "paper": "tab:dw",
        "arms": [plan.arm("DoGE", "average weights", plan.proxy)],
    }
    return plan.finish(
        "Stage-wise curriculum",
        "Is it better to let the weights follow the proxy's stages than to take their average?",
        [plan.perplexities(arms, None), weights],
    )


def _early(plan: _Planner) -> Plan:
    """fig:early_stage."""
    arms = [
        plan.arm("uniform", "baseline", plan.as_base("uniform", _uniform), is_baseline=True),
        plan.arm("natural", "by tokens", plan.as_base("natural", _natural)),
        plan.arm("DoGE", "learned", plan.as_base("doge", plan.proxy)),
    ]
    quarter = plan.perplexities(arms, None, title="After a quarter of the steps", until=0.25)
    return plan.finish(
        "The first quarter of training",
        "Do learned weights pay early, on every domain?",
        [quarter, plan.perplexities(arms, None, title="At the end")],
    )


def _proxy_vs_base(plan: _Planner) -> Plan:
    """fig:proxy."""
    settings = plan.settings
    # As many tokens as the proxy saw.
    blocks = settings.proxy_steps * settings.sequences_per_domain * len(plan.domains)
    alike = {"model": settings.proxy_model, "steps": round(blocks / settings.batch_size)}
    proxy = partial(plan.proxy, is_measured=True)
    arms = [
        plan.arm(
            "uniform", "baseline", plan.as_base("uniform", _uniform, **alike), is_baseline=True
        ),
        plan.arm("DoGE base", "resampled", plan.as_base("doge", proxy, **alike)),
        plan.arm("DoGE proxy", "reweighted gradients", proxy),
    ]
    title = f"Models of size {settings.proxy_model}"
    return plan.finish(
        "The proxy as a model",
        "Is the proxy, whose gradients were reweighted, as good as a model of its size that was "
        "trained on the resampled corpus with as many tokens?",
        [plan.perplexities(arms, None, title=title, pairs=[["DoGE proxy", "DoGE base"]])],
    )


def _settings(plan: _Planner) -> Plan:
    """The proxy with one setting changed at a time, and base models at what each learns."""
    settings = plan.settings
    assert settings.mu is not None
    other_score = "paper" if settings.score == "published" else "published"
    clip = None if settings.domain_max_grad_norm is not None else 1.0
    pace, factor = ("mu x 16", 16) if clip is None else ("mu / 16", 1 / 16)
    is_mix = plan.config.target_batch == "mix"
    peak, end = rates_of(settings, settings.proxy_model)
    target, name = ("target same batch", ("universal",)) if is_mix else ("target mix", ("mix",))
    # The pace of another target is its own, unless one was asked for.
    other_mu = settings.mu
    if plan.config.mu is None:
        other_mu = simplex.default_mu(peak, len(plan.domains) if is_mix else 1)
    changes: dict[str, dict[str, Any]] = {
        "as set": {},
        target: {"target": name, "mu": other_mu},
        f"{target}, domain clip {clip}": {
            "target": name,
            "mu": other_mu,
            "domain_max_grad_norm": clip,
        },
        f"domain clip {clip}": {"domain_max_grad_norm": clip},
        # W grows with the square of the gradients, which are two to four times as long uncut.
        f"domain clip {clip}, {pace}": {"domain_max_grad_norm": clip, "mu": settings.mu * factor},
        "mu x 4": {"mu": settings.mu * 4},
        "mu / 4": {"mu": settings.mu / 4},
        "average from 1/3": {"average_from": 1 / 3},
        "steps x 3": {"steps": 3 * settings.proxy_steps},
        "batch x 2": {"sequences_per_domain": 2 * settings.sequences_per_domain},
        f"score {other_score}": {"score": other_score},
        "mu x 16": {"mu": settings.mu * 16},
    }
    for times, factor in {"x 2": 2.0, "/ 2": 0.5}.items():
        # The weights move by lr W / mu: at the same pace, so that it is the proxy that differs.
        rates = {"learning_rate": peak * factor, "min_learning_rate": end * factor}
        changes[f"learning rate and mu {times}"] = {"mu": settings.mu * factor, "training": rates}
    sources: dict[str, Callable[[int], Path]] = {
        label: partial(plan.proxy, name=_slug(label), **each) for label, each in changes.items()
    }
    arms = [
        plan.arm("uniform", "baseline", plan.as_base("uniform", _uniform), is_baseline=True),
        plan.arm("natural", "by tokens", plan.as_base("natural", _natural)),
    ]
    # Each base model follows its proxy, so that an experiment that is stopped has whole arms.
    arms += [
        plan.arm(f"DoGE, {label}", "learned", plan.as_base(_slug(label), each))
        for label, each in sources.items()
    ]
    learned = [plan.arm(label, "proxy", each) for label, each in sources.items()]
    weights = {"kind": "weights", "title": "Domain weights", "paper": "tab:dw", "arms": learned}
    return plan.finish(
        "Settings of the proxy",
        "Which settings of the proxy decide whether its weights help?",
        [plan.perplexities(arms, None), weights],
    )


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


_PLANS: dict[str, Callable[[_Planner], Plan]] = {
    "universal": _universal,
    "doremi": _doremi,
    "ood": _ood,
    "wiki40b": _wiki40b,
    "scales": _scales,
    "selection": _selection,
    "curriculum": _curriculum,
    "early": _early,
    "proxy_vs_base": _proxy_vs_base,
    "settings": _settings,
}
