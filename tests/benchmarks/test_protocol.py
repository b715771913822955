"""The protocol: who runs when, what is divided by what."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks import protocol
from benchmarks.protocol import Clock


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine became twice as slow in the second half: the ratio of medians would be 1.
    variant, baseline = [2.0, 2.0, 4.0, 4.0], [1.0, 1.0, 2.0, 2.0]
    ratio = protocol.ratio_of(variant, baseline)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 4)
    assert (ratio.variant_ms, ratio.baseline_ms) == (3.0, 1.5)
    assert protocol.ratio_of(variant, baseline, scale=0.5).ratio == 1.0


def test_everything_runs_once_a_round_and_everyone_is_first_some_time() -> None:
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = protocol.alternated(calls, rounds=6)
    assert {name: len(each) for name, each in times.items()} == {"a": 6, "b": 6, "c": 6}
    rounds = [ran[first : first + 3] for first in range(0, len(ran), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {"a", "b", "c"}


def test_what_runs_before_a_sample_is_not_timed() -> None:
    seen: list[str] = []
    times = protocol.alternated(
        {"call": lambda: seen.append("call")}, rounds=3, before=lambda: seen.append("before")
    )
    assert seen == ["before", "call"] * 3
    assert all(0 <= ms < 1000 for ms in times["call"])


def test_time_ends_the_rounds_but_not_the_first_three() -> None:
    times = protocol.alternated({"call": lambda: None}, rounds=50, seconds=0.0)
    assert len(times["call"]) == protocol.MIN_ROUNDS
    assert Clock(0.0).expired()
    assert not Clock().expired()


def test_small_data_are_made_cold_and_large_ones_are() -> None:
    cache = protocol.last_cache_bytes("cpu")
    assert cache >= 1 << 18
    assert protocol.cold(protocol.CACHES_FOR_COLD * cache) is None
    flush = protocol.cold(1)
    assert flush is not None
    flush()


@pytest.mark.parametrize(
    ("text", "expected"), [("32K", 32 << 10), ("32768K\n", 32 << 20), ("2M", 2 << 20), ("12", 12)]
)
def test_cache_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert protocol._parsed_size(text) == expected


def test_a_record_says_where_it_comes_from(tmp_path: Path) -> None:
    record = protocol.machine("cpu")
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["commit"]
    assert torch.backends.cpu.get_cpu_capability() in record["device"]
    protocol.write(tmp_path / "new" / "record.json", record)
    assert (tmp_path / "new" / "record.json").read_text().startswith("{")


def test_numbers_keep_their_leading_digits() -> None:
    assert protocol.rounded(0.000123456) == 0.0001235
    assert protocol.rounded(12345.678) == 12350.0
    assert protocol.rounded(7) == 7
    assert math.isclose(protocol.rounded(1.23456, 2), 1.2)
