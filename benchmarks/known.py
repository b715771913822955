"""Corpora whose best mixture is known by construction, and a ladder of shares to measure it with.

    python -m benchmarks.known out --data mini_slimpajama --target github
    doge-fast proxy --data out/hidden --domains book arxiv ... --target github --out runs/hidden
    doge-fast base --data out/hidden --domains book arxiv ... --targets github \
        --weights out/hidden-odds-x8.json --out runs/hidden-x8

Each case changes a corpus in one way, so that the share of some of its domains, the special ones,
has an answer: more, or less, than equal weights give. Base models at the shares of the ladder show
where the best one lies, and so whether the construction holds on this corpus.

Without `--data` the text is made from a seed. A domain is then a chain of words: each word is
followed by one of a few, which the domain's name decides. Half of a domain's words are those of all
domains, so that domains help each other with words, and hardly with what follows them.
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from doge_fast.pipeline.config import CorpusConfig
from doge_fast.pipeline.records import write_json, write_weights
from doge_fast.pipeline.sources import find_parts

# {(domain, split): documents}
Texts = Mapping[tuple[str, str], Sequence[str]]
TRAIN, HELD_OUT = "train", "validation"
GENERATED = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")
# Characters of a domain that are read; tiny models see less.
_MOST_CHARS = 2_000_000
_HIDDEN = 0.1
# What the odds of the special domains are multiplied by, in the weights beside uniform.
_LESS, _MORE = (1 / 8, 1 / 2, 2), (1 / 2, 2, 8, 32)
_CIPHER = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "".join(chr(0x0430 + (7 * place) % 26) for place in range(26))
    + "".join(chr(0x0410 + (7 * place) % 26) for place in range(26)),
)


@dataclass(frozen=True)
class KnownCase:
    """A corpus with an answer."""

    name: str
    domains: tuple[str, ...]
    """Trained on."""
    targets: tuple[str, ...]
    """Domains that the loss is averaged over, and DoGE's targets."""
    special: tuple[str, ...]
    """Those whose share has an answer."""
    is_more: bool
    """Whether the answer is more than their share of uniform weights, or less."""
    change: Callable[[Texts], Texts]
    """The case's corpus, from the one that was given."""

    def ladder(self) -> dict[str, dict[str, float]]:
        """{name: weights}: uniform within and without the special domains, odds multiplied."""
        found = {}
        number, special = len(self.domains), len(self.special)
        for factor in _MORE if self.is_more else _LESS:
            odds = factor * special / (number - special)
            share = odds / (1 + odds)
            found[f"{self.name}-odds-x{factor:g}"] = {
                name: share / special if name in self.special else (1 - share) / (number - special)
                for name in self.domains
            }
        return found


def cases(names: Sequence[str], target: str) -> list[KnownCase]:
    """The four cases on a corpus of these domains.

    Args:
        names: at least four domains.
        target: one of them: what the case `hidden` hides.

    Raises:
        ValueError: there are fewer domains, or the target is none of them.
    """
    if len(names) < 4 or target not in names:
        raise ValueError(
            f"cases need four domains or more, and a target among them; got {', '.join(names)} and "
            f"the target {target}."
        )
    first, twin = names[0], f"{names[0]}-again"
    sources = tuple(name for name in names if name != target)
    own, foreign = tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :])
    return [
        # The words of a domain are in random order.
        KnownCase("noise", tuple(names), tuple(names), (first,), False, partial(_shuffled, first)),
        # A domain is there twice, and counts once.
        KnownCase(
            "twins",
            (*names, twin),
            tuple(names),
            (first, twin),
            False,
            partial(_doubled, first, twin),
        ),
        # A tenth of a domain is text of the target, which is not trained on.
        KnownCase(
            "hidden",
            sources,
            (target,),
            sources[:1],
            True,
            partial(_hidden, sources[0], target),
        ),
        # Domains in another alphabet do not help the target, which is not trained on.
        KnownCase(
            "groups",
            (*own[:-1], *foreign),
            own[-1:],
            foreign,
            False,
            partial(_enciphered, foreign),
        ),
    ]


def write(case: KnownCase, texts: Texts, out: Path) -> None:
    """Write `out`/NAME/DOMAIN/SPLIT.jsonl, unless it is there, and `out`/NAME-odds-xF.json."""
    folder, beside = out / case.name, out / f".{case.name}"
    if not folder.exists():
        shutil.rmtree(beside, ignore_errors=True)
        for (name, split), documents in case.change(texts).items():
            file = beside / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
            file.write_text("".join(lines), encoding="utf-8")
        os.replace(beside, folder)
    for name, weights in case.ladder().items():
        entries = [{"name": domain, "weight": weight} for domain, weight in weights.items()]
        write_weights(out / f"{name}.json", {"method": "given", "domains": entries})


def read(corpus: CorpusConfig) -> Texts:
    """The first two million characters of every domain and split of a corpus."""
    parts, found = find_parts(corpus, []), {}
    for name in corpus.domains or sorted(parts):
        for split, held_out in ((TRAIN, False), (HELD_OUT, True)):
            if not held_out or parts[name].is_divided:
                documents = parts[name].documents(held_out=held_out)
                own = (text for domain, text in documents if domain == name)
                found[name, split] = list(_first(own, _MOST_CHARS))
    return found


def generated(domain: str, count: int = 400) -> Iterator[str]:
    """So many documents of 150 words, always the same for a domain's name."""
    words = [*_words("all domains", 60), *_words(domain, 60)]
    draw = random.Random(f"{domain} chain")
    following = [[draw.randrange(len(words)) for _ in range(4)] for _ in words]
    draw = random.Random(f"{domain} documents")
    for _ in range(count):
        place, text = draw.randrange(len(words)), []
        for _ in range(150):
            text.append(words[place])
            # The first of its followers is the most likely.
            place = following[place][min(draw.randrange(4), draw.randrange(4))]
        yield " ".join(text)


def _words(name: str, count: int) -> list[str]:
    syllables = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so"]
    draw = random.Random(f"{name} words")
    return ["".join(draw.choices(syllables, k=draw.randint(2, 3))) for _ in range(count)]


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

    return {k: [shuffle(text) for text in v] if k[0] == name else v for k, v in texts.items()}


def _doubled(name: str, twin: str, texts: Texts) -> Texts:
    return {**texts, **{(twin, key[1]): each for key, each in texts.items() if key[0] == name}}


def _hidden(name: str, target: str, texts: Texts) -> Texts:
    """Of the training text of `name` a tenth becomes the target's, document by document."""
    own, other = texts[name, TRAIN], texts[target, TRAIN]
    chars = sum(map(len, own))
    mixed = [*_first(iter(own), (1 - _HIDDEN) * chars), *_first(iter(other), _HIDDEN * chars)]
    random.Random(name).shuffle(mixed)
    return {**texts, (name, TRAIN): mixed}


def _enciphered(names: Sequence[str], texts: Texts) -> Texts:
    """Letters become those of another alphabet, so that no word is common."""
    return {
        key: [text.translate(_CIPHER) for text in each] if key[0] in names else each
        for key, each in texts.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the corpora, their ladders, and cases.json, which says what belongs to each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", help="a directory with a folder or file for each domain")
    parser.add_argument("--target", help="the domain that is hidden; the last one otherwise")
    args = parser.parse_args(arguments)
    if args.data:
        texts = read(CorpusConfig(data=args.data))
    else:
        texts = {(name, TRAIN): list(generated(name)) for name in GENERATED}
    names = list(dict.fromkeys(name for name, _ in texts))
    made = cases(names, args.target or names[-1])
    for case in made:
        write(case, texts, args.out)
    fields = ("name", "domains", "targets", "special", "is_more")
    told = [
        {**{field: getattr(case, field) for field in fields}, "ladder": case.ladder()}
        for case in made
    ]
    write_json(args.out / "cases.json", {"benchmark": "known", "cases": told})
    print(args.out / "cases.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
