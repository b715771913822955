"""Corpora whose best mixture is known: what each changes, and the shares of its ladder."""

import json

import pytest

from benchmarks import known
from benchmarks.known import HELD_OUT, TRAIN
from doge_fast.pipeline.records import read_weights, weights_by_name
from tests.pipeline.corpora import write_jsonl

NAMES = ("alpha", "beta", "gamma", "delta")
TEXTS = {(name, TRAIN): list(known.generated(name, 40)) for name in NAMES}
TEXTS |= {(name, HELD_OUT): list(known.generated(name, 50))[40:] for name in NAMES}


def made(name: str) -> known.Texts:
    (case,) = (case for case in known.cases(NAMES, "delta") if case.name == name)
    return case.change(TEXTS)


def test_noise_has_the_same_words_in_another_order():
    found = made("noise")
    for split in (TRAIN, HELD_OUT):
        own, other = found["alpha", split], TEXTS["alpha", split]
        assert [sorted(text.split()) for text in own] == [sorted(text.split()) for text in other]
        assert not set(own) & set(other)
    assert all(found[key] == TEXTS[key] for key in TEXTS if key[0] != "alpha")


def test_twins_are_the_same_text():
    found = made("twins")
    assert found["alpha-again", TRAIN] == found["alpha", TRAIN] == TEXTS["alpha", TRAIN]


def test_a_tenth_of_a_domain_is_the_hidden_target():
    found = made("hidden")["alpha", TRAIN]
    target = set(TEXTS["delta", TRAIN])
    strange = sum(len(text) for text in found if text in target)
    assert strange / sum(map(len, found)) == pytest.approx(0.1, abs=0.03)


def test_groups_have_not_a_letter_in_common():
    found = made("groups")
    for name in ("gamma", "delta"):
        foreign = found[name, TRAIN]
        assert not any("a" <= letter <= "z" for text in foreign for letter in text)
        # Nothing is lost.
        assert [len(text) for text in foreign] == [len(text) for text in TEXTS[name, TRAIN]]
    assert found["alpha", TRAIN] == TEXTS["alpha", TRAIN]


def test_the_odds_of_the_ladder():
    uniform = {"noise": 1 / 4, "twins": 2 / 5, "hidden": 1 / 3, "groups": 2 / 3}
    for case in known.cases(NAMES, "delta"):
        share = uniform[case.name]
        odds = []
        for weights in case.ladder().values():
            assert sum(weights.values()) == pytest.approx(1)
            own = sum(weights[name] for name in case.special)
            odds.append(own / (1 - own) / (share / (1 - share)))
        expected = [1 / 2, 2, 8, 32] if case.name == "hidden" else [1 / 8, 1 / 2, 2]
        assert odds == pytest.approx(expected)


@pytest.mark.parametrize(("names", "target"), [(NAMES[:3], "alpha"), (NAMES, "nowhere")])
def test_too_few_domains_or_no_target(names, target):
    with pytest.raises(ValueError, match=target):
        known.cases(names, target)


def test_a_corpus_in_files(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    for name in NAMES:
        write_jsonl(data / f"{name}.jsonl", TEXTS[name, TRAIN])
    assert known.main([str(out), "--data", str(data), "--target", "beta"]) == 0
    told = json.loads((out / "cases.json").read_text(encoding="utf-8"))["cases"]
    assert [case["targets"] for case in told if case["name"] == "hidden"] == [["beta"]]
    for case in told:
        folders = {path.name for path in (out / case["name"]).iterdir()}
        assert folders >= {*case["domains"], *case["targets"]}
        for name, weights in case["ladder"].items():
            assert weights_by_name(read_weights(out / f"{name}.json")) == pytest.approx(weights)
