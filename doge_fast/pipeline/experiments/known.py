"""Corpora whose best mixture is known by construction, and what is learned on them.

Each case changes a corpus in one way, so that the share of some of its domains has an answer. Base
models at several such shares, all else alike, show the best one; DoGE is set beside them.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from doge_fast.pipeline import generated_corpus, named
from doge_fast.pipeline.config import CorpusConfig, ExperimentConfig
from doge_fast.pipeline.experiments.planner import Json, Plan, Planner
from doge_fast.pipeline.experiments.presets import is_generated
from doge_fast.pipeline.records.weights import write_weights
from doge_fast.pipeline.sources import find_parts

CORPORA = "corpora"
# {(domain, split): documents}
Texts = Mapping[tuple[str, str], Sequence[str]]
TRAIN, HELD_OUT = "train", "validation"
# Characters of a domain that are read; tiny models see less.
_MOST_CHARS = 2_000_000
_HIDDEN = 0.1
_FEWEST = 4
# What the odds of the share in question are multiplied by, in the arms beside uniform.
_LESS, _MORE = (1 / 8, 1 / 2, 2), (1 / 2, 2, 8, 32)
_CIPHER = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "".join(chr(0x0430 + (7 * place) % 26) for place in range(26))
    + "".join(chr(0x0410 + (7 * place) % 26) for place in range(26)),
)


@dataclass(frozen=True)
class Case:
    """A corpus with an answer."""

    name: str
    title: str
    domains: tuple[str, ...]
    """Trained on."""
    special: tuple[str, ...]
    """Those whose share has an answer."""
    is_more: bool
    """Whether the answer is more than their share of uniform weights, or less."""
    make: Callable[[Texts], Texts]
    """The corpus, from the one that was given."""
    target: str | None = None
    """Of the out-of-domain cases."""
    aim: tuple[str, ...] = ()
    """Domains that the loss is averaged over, and DoGE's targets; empty: the target, or all."""


def known(plan: Planner) -> Plan:
    """Each case: uniform, a ladder of shares, and DoGE."""
    names = plan.domains
    if len(names) < _FEWEST:
        raise ValueError(f"known needs {_FEWEST} domains and more; got {', '.join(names)}.")
    named.check("targets", plan.config.targets, names, "the experiment")
    target, *more = plan.config.targets or names[-1:]
    if more:
        raise ValueError(f"known has one target; got {', '.join(plan.config.targets)}.")
    groups, learned, corpora = [], [], []
    for case in _cases(names, target):
        folder = plan.out / CORPORA / case.name
        group, proxies = _group(plan, case, folder)
        groups.append(group)
        learned.append(proxies)
        corpora.append(partial(_write, case, folder, plan.config))
    table = plan.weights(learned, None, title="What DoGE finds")
    return plan.finish(
        "Corpora whose best mixture is known",
        "Where a domain is noise, is there twice, hides the target or helps nobody, is it given "
        "what it should be?",
        [*groups, table],
        corpora=corpora,
    )


def _cases(names: Sequence[str], target: str) -> Iterator[Case]:
    first = names[0]
    yield Case(
        name="noise",
        title=f"Noise: the words of {first} are shuffled",
        domains=tuple(names),
        special=(first,),
        is_more=False,
        make=partial(_shuffled, first),
    )
    twin = f"{first}-again"
    yield Case(
        name="twins",
        title=f"Twins: {first} is there twice",
        domains=(*names, twin),
        special=(first, twin),
        is_more=False,
        make=partial(_doubled, first, twin),
        aim=tuple(names),
    )
    sources = tuple(name for name in names if name != target)
    yield Case(
        name="hidden",
        title=f"Hidden: a tenth of {sources[0]} is {target}, the target",
        domains=sources,
        special=sources[:1],
        is_more=True,
        make=partial(_hidden, sources[0], target),
        target=target,
    )
    own, foreign = names[: len(names) // 2], names[len(names) // 2 :]
    yield Case(
        name="groups",
        title=f"Groups: {', '.join(foreign)} in another alphabet, {own[-1]} the target",
        domains=(*own[:-1], *foreign),
        special=tuple(foreign),
        is_more=False,
        make=partial(_enciphered, foreign),
        target=own[-1],
    )


def _group(whole: Planner, case: Case, folder: Path) -> tuple[Json, Json]:
    """The arms of a case, its runs added to the plan; and the arm of its proxies."""
    corpus = replace(
        whole.config.corpus,
        data=str(folder),
        domains=case.domains,
        text_column=CorpusConfig().text_column,
        domain_column=None,
        streaming=False,
    )
    targets = () if case.target is None else (case.target,)
    plan = Planner(replace(whole.asked, corpus=corpus), case.domains, whole.out)
    plan.jobs = whole.jobs
    # Those that a case names are the targets, whatever stands for all of the domains.
    aimed = case.aim or targets
    own: dict[str, Any] = {"target": aimed, "mu": plan.mu_towards(len(aimed))} if aimed else {}
    learn = plan.proxy(case.name, **own)
    arms = [plan.uniform(f"{case.name}-uniform", targets=targets)]
    for file, weights in _ladder(case, folder).items():
        share = sum(weights[name] for name in case.special)
        base = plan.base(file.stem, file, targets=targets)
        arms.append(plan.arm(f"share {share:.3f}", "given", base))
    doge = plan.base(f"{case.name}-doge", learn, targets=targets)
    arms.append(plan.arm("DoGE", "learned", doge))
    if case.aim:
        # Who does not know that some of the domains are the same.
        unaware = plan.base(f"{case.name}-universal", plan.proxy(f"{case.name}-universal"))
        arms.append(plan.arm("DoGE, all as targets", "learned", unaware))
    group = {
        "kind": "regret",
        "title": case.title,
        "aim": list(case.aim or targets or case.domains),
        "arms": arms,
        "special": list(case.special),
        "is_more": case.is_more,
        "focus": "DoGE",
    }
    return group, plan.arm(case.name, "average weights", learn)


def _ladder(case: Case, folder: Path) -> dict[Path, dict[str, float]]:
    """{file: weights}: uniform within and without the special domains, their odds multiplied."""
    ladder = {}
    number, special = len(case.domains), len(case.special)
    for factor in _MORE if case.is_more else _LESS:
        odds = factor * special / (number - special)
        share = odds / (1 + odds)
        ladder[folder.with_name(f"{case.name}-odds-x{factor:g}.json")] = {
            name: share / special if name in case.special else (1 - share) / (number - special)
            for name in case.domains
        }
    return ladder


def _write(case: Case, folder: Path, config: ExperimentConfig) -> None:
    """The case's corpus and its ladder's weights, unless they are there."""
    if not folder.exists():
        beside = folder.with_name(f".{folder.name}")
        shutil.rmtree(beside, ignore_errors=True)
        for (name, split), documents in case.make(_texts(config)).items():
            file = beside / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
            file.write_text("".join(lines), encoding="utf-8")
        os.replace(beside, folder)
    for file, weights in _ladder(case, folder).items():
        entries = [{"name": name, "weight": weight} for name, weight in weights.items()]
        write_weights(file, {"method": "given", "domains": entries})


def _texts(config: ExperimentConfig) -> dict[tuple[str, str], list[str]]:
    """The corpus that was given, or generated text where none was."""
    if is_generated(config):
        names = config.corpus.domains or generated_corpus.DOMAINS
        return {(name, TRAIN): list(generated_corpus.documents(name)) for name in names}
    parts = find_parts(config.corpus, [])
    found = {}
    for name in config.corpus.domains or sorted(parts):
        for split, read in ((TRAIN, parts[name].train), (HELD_OUT, parts[name].validation)):
            if read is not None:
                own = (text for domain, text in read() if domain == name)
                found[name, split] = list(_first(own, _MOST_CHARS))
    return found


def _first(documents: Iterator[str], chars: float) -> Iterator[str]:
    """As many documents as come to so many characters."""
    while chars > 0 and (text := next(documents, None)) is not None:
        chars -= len(text)
        yield text


def _shuffled(name: str, texts: Texts) -> Texts:
    draw = random.Random(name)

    def shuffle(text: str) -> str:
        words = text.split()
        draw.shuffle(words)
        return " ".join(words)

    return {
        key: [shuffle(text) for text in each] if key[0] == name else each
        for key, each in texts.items()
    }


def _doubled(name: str, twin: str, texts: Texts) -> Texts:
    return {**texts, **{(twin, key[1]): each for key, each in texts.items() if key[0] == name}}


def _hidden(name: str, target: str, texts: Texts) -> Texts:
    """Of the training text of `name` a tenth becomes the target's, document by document."""
    own, other = texts[name, TRAIN], texts[target, TRAIN]
    chars = sum(map(len, own))
    mixed = [
        *_first(iter(own), (1 - _HIDDEN) * chars),
        *_first(iter(other), _HIDDEN * chars),
    ]
    random.Random(name).shuffle(mixed)
    return {**texts, (name, TRAIN): mixed}


def _enciphered(names: Sequence[str], texts: Texts) -> Texts:
    """Letters become those of another alphabet, so that no word is common."""
    return {
        key: [text.translate(_CIPHER) for text in each] if key[0] in names else each
        for key, each in texts.items()
    }
