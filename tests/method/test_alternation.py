"""How times are compared: who runs when, what is divided by what."""

import math

from doge_fast.alternation import MIN_ROUNDS, alternated, ratio_of


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    # The machine became twice as slow in the second half: the ratio of medians would be 1.
    variant, baseline = [2.0, 2.0, 4.0, 4.0], [1.0, 1.0, 2.0, 2.0]
    ratio = ratio_of(variant, baseline)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 4)
    assert (ratio.variant_ms, ratio.baseline_ms) == (3.0, 1.5)
    assert ratio_of(variant, baseline, scale=0.5).ratio == 1.0


def test_everything_runs_once_a_round_and_everyone_is_first_some_time():
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = alternated(calls, rounds=6, before=lambda: ran.append("before"))
    assert {name: len(each) for name, each in times.items()} == {"a": 6, "b": 6, "c": 6}
    assert ran[::2] == ["before"] * 18
    rounds = [ran[first : first + 6 : 2] for first in range(1, len(ran), 6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {"a", "b", "c"}


def test_time_ends_the_rounds_but_not_the_first_three():
    for seconds, rounds in ((0.0, MIN_ROUNDS), (math.inf, 50)):
        times = alternated({"call": lambda: None}, rounds=50, seconds=seconds)
        assert len(times["call"]) == rounds
