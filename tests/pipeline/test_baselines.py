"""Weights that need no proxy are on the simplex and weigh what they say."""

import pytest

from doge_fast.pipeline.baselines import BASELINES, natural, uniform

TOKENS = {"arxiv": 300, "book": 100, "c4": 600}


def test_uniform_looks_at_no_size_and_natural_at_nothing_else() -> None:
    assert uniform(TOKENS) == dict.fromkeys(TOKENS, 1 / 3)
    assert natural(TOKENS) == {"arxiv": 0.3, "book": 0.1, "c4": 0.6}
    assert natural({name: 7 * count for name, count in TOKENS.items()}) == natural(TOKENS)


@pytest.mark.parametrize("name", BASELINES)
def test_a_domain_without_tokens_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"each with tokens.*Leave out \['c4'\]"):
        BASELINES[name](TOKENS | {"c4": 0})
    with pytest.raises(ValueError, match="name a domain"):
        BASELINES[name]({})
