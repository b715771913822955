"""Domain weights with the text there is: learned, given, the baselines, and the paper's."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from doge_fast.pipeline import records
from doge_fast.pipeline.reporting.paper import TABLES, canonical
from doge_fast.pipeline.reporting.runs import Run
from doge_fast.pipeline.reporting.study import UNIVERSAL, Arm, Study
from doge_fast.pipeline.reporting.wording import Stat

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0


def effective_domains(weights: Mapping[str, Stat] | Mapping[str, float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain gets everything."""
    means = [each.mean if isinstance(each, Stat) else each for each in weights.values()]
    return math.exp(-math.fsum(mean * math.log(mean) for mean in means if mean > 0))


@dataclass(frozen=True)
class Mixture:
    """Domain weights together with the text there is."""

    label: str
    about: str
    weights: Mapping[str, Stat]
    train_tokens: Mapping[str, int]
    targets: tuple[str, ...]
    is_learned: bool

    def epochs(self, budget: int) -> dict[str, float]:
        """How often `budget` tokens at these weights go through each domain."""
        return {
            name: stat.mean * budget / self.train_tokens[name]
            if self.train_tokens[name]
            else math.inf
            for name, stat in self.weights.items()
        }


def mixtures_of(study: Study) -> list[Mixture]:
    """Every set of weights: of each proxy, and those given to base runs from elsewhere."""
    found = [
        Mixture(
            proxy.label,
            proxy.about,
            proxy.weights,
            proxy.first.train_tokens,
            proxy.first.targets,
            is_learned=True,
        )
        for proxy in study.proxies
        if proxy.weights
    ]
    for run, arm in _given(study):
        assert run.weights is not None
        weights = {name: Stat(w) for name, w in records.weights_by_name(run.weights).items()}
        found.append(
            Mixture(arm.label, arm.about, weights, run.train_tokens, run.targets, is_learned=True)
        )
    return found


def _given(study: Study) -> Iterator[tuple[Run, Arm]]:
    """The first run of every arm whose weights no proxy of this report learned."""
    for comparison in study.comparisons:
        for arm in comparison.arms:
            if arm.kind == "given" and arm.runs[0].weights is not None:
                yield arm.runs[0], arm


def baselines_of(run: Run) -> list[Mixture]:
    """Uniform and natural weights on the domains of a run."""
    tokens = run.train_tokens
    total = sum(tokens.values())
    uniform = {name: Stat(1 / len(tokens)) for name in tokens}
    natural = {name: Stat(count / total) for name, count in tokens.items()} if total else uniform
    return [
        Mixture("uniform", "baseline", uniform, tokens, run.targets, is_learned=False),
        Mixture("natural", "by tokens", natural, tokens, run.targets, is_learned=False),
    ]


def budget_of(study: Study, token_budget: int | None) -> int:
    """Asked for; else that of the longest base run; else that of the longest proxy."""
    if token_budget is not None:
        return token_budget
    return max(run.tokens for run in study.bases or study.runs)


_SLIMPAJAMA = frozenset(TABLES["tab:dw"]["DoGE"])
# tab:dw; tab:ood-dw and tab:ood-wiki-dw by target.
_PAPER_WEIGHTS = {
    UNIVERSAL: TABLES["tab:dw"]["DoGE"],
    **{
        column.removeprefix("for "): weights
        for table in ("tab:ood-dw", "tab:ood-wiki-dw")
        for column, weights in TABLES[table].items()
    },
}
PAPER_NOTE = (
    " The paper's weights are those of an 82M proxy after 10k steps on the full corpora: compare "
    "the order of the domains, not the digits."
)
# tab:universal_ppl.
PAPER_VERDICT = (
    "The paper, with 684M models on the full SlimPajama: better on 5 of 7 domains than uniform; "
    "average perplexity 15.81 against 16.53 (−4.4 %)."
)


def is_slimpajama(names: Iterable[str]) -> bool:
    """Whether these are the paper's seven domains."""
    return {canonical(name) for name in names} == _SLIMPAJAMA


def paper_mixture(mixture: Mixture, study: Study) -> Mixture | None:
    """The paper's weights for the same domains and target, as a further column."""
    proxy = next((proxy for proxy in study.proxies if proxy.label == mixture.label), None)
    if proxy is None or proxy.is_doremi or len(proxy.first.config["target"]) != 1:
        return None
    target = canonical(str(proxy.first.config["target"][0]))
    paper = _PAPER_WEIGHTS.get(target, {})
    if {canonical(name) for name in mixture.weights} != set(paper):
        return None
    weights = {name: Stat(paper[canonical(name)]) for name in mixture.weights}
    about = "universal" if target == UNIVERSAL else f"for {target}"
    return replace(mixture, label="paper", about=about, weights=weights, is_learned=False)
