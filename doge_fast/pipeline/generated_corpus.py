"""Text that a seed makes, for corpora whose every property is known.

A domain is a chain of words: each word is followed by one of a few, which the domain's name
decides. Half of a domain's words are those of all domains, so that domains help each other with
words, and hardly with what follows them.
"""

import functools
import random
from collections.abc import Iterator, Sequence

DOMAINS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")
DOCUMENTS = 400
_WORDS = 120
_LENGTH = 150
_FOLLOWERS = 4
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so")


def documents(domain: str, count: int = DOCUMENTS) -> Iterator[str]:
    """So many documents of a domain, always the same.

    Args:
        domain: any name.
        count: of documents, of 150 words each.
    """
    words, following = _chain(domain)
    draw = random.Random(f"{domain} documents")
    for _ in range(count):
        place, text = draw.randrange(len(words)), []
        for _ in range(_LENGTH):
            text.append(words[place])
            # The first of its followers is the most likely.
            place = following[place][min(draw.randrange(_FOLLOWERS), draw.randrange(_FOLLOWERS))]
        yield " ".join(text)


@functools.cache
def _chain(domain: str) -> tuple[Sequence[str], Sequence[Sequence[int]]]:
    """Words, and of each the places of those that follow it."""
    words = [*_words("all domains", _WORDS // 2), *_words(domain, _WORDS // 2)]
    draw = random.Random(f"{domain} chain")
    return words, [[draw.randrange(len(words)) for _ in range(_FOLLOWERS)] for _ in words]


def _words(name: str, count: int) -> list[str]:
    draw = random.Random(f"{name} words")
    return ["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 3))) for _ in range(count)]
