"""How times are compared: who runs when, what is divided by what."""

import contextlib
from functools import partial

import pytest
import torch

from doge_fast import alternation
from doge_fast.alternation import (
    COUNTED_CYCLES,
    HOST_MARGIN,
    HOST_SAMPLES,
    MIN_ROUNDS,
    Clock,
    alternated,
    cycles_to_hide,
    ratio_of,
)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine became twice as slow in the second half: the ratio of medians would be 1.
    variant, baseline = [2.0, 2.0, 4.0, 4.0], [1.0, 1.0, 2.0, 2.0]
    ratio = ratio_of(variant, baseline)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 4)
    assert (ratio.variant_ms, ratio.baseline_ms) == (3.0, 1.5)
    assert ratio_of(variant, baseline, scale=0.5).ratio == 1.0


def test_everything_runs_once_a_round_and_everyone_is_first_some_time() -> None:
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = alternated(calls, rounds=6, before=lambda: ran.append("before"))
    assert {name: len(each) for name, each in times.items()} == {"a": 6, "b": 6, "c": 6}
    assert ran[::2] == ["before"] * 18
    rounds = [ran[first : first + 6 : 2] for first in range(1, len(ran), 6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[0] for each in rounds} == {"a", "b", "c"}


def test_time_ends_the_rounds_but_not_the_first_three() -> None:
    times = alternated({"call": lambda: None}, rounds=50, seconds=0.0)
    assert len(times["call"]) == MIN_ROUNDS
    assert Clock(0.0).expired()
    assert not Clock().expired()


class Event:
    """Of a fake GPU."""

    def __init__(self, gpu: "Gpu", *, enable_timing: bool) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.seen.append("event")
        self.at_ms = self.gpu.slept_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, last: "Event") -> float:
        return last.at_ms - self.at_ms


class Gpu:
    """A GPU that counts a million cycles a millisecond and a host with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str | int] = []
        self.host_ms = self.slept_ms = 0.0
        monkeypatch.setattr(torch.cuda, "Event", partial(Event, self))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(alternation.time, "perf_counter", lambda: self.host_ms / 1e3)

    def sleep(self, cycles: int) -> None:
        self.seen.append(cycles)
        self.slept_ms += cycles / 1e6

    def call(self, *host_ms: float) -> alternation.Call:
        """What takes the host so long, the last time for ever."""
        times = list(host_ms)

        def queue() -> None:
            self.seen.append("call")
            self.host_ms += times.pop(0) if len(times) > 1 else times[0]

        return queue


def test_the_sleep_follows_the_slowest_call_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    # A million cycles a millisecond; the second of three calls is the slowest.
    assert HOST_SAMPLES == 3
    cycles = cycles_to_hide(gpu.call(0.6, 0.9, 0.6), "cuda")
    assert cycles == pytest.approx(HOST_MARGIN * 0.9e6, rel=1e-6)
    assert cycles_to_hide(gpu.call(6.0), "cuda") == pytest.approx(HOST_MARGIN * 6e6, rel=1e-6)
    assert gpu.seen.count(COUNTED_CYCLES) == 2 * HOST_SAMPLES


def test_only_an_operators_samples_hide_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    alternated({"step": gpu.call(2.0)}, rounds=3, device="cuda")
    assert gpu.seen == ["event", "call", "event"] * 3
    gpu.seen.clear()
    calls = {"slow": gpu.call(2.0), "quick": gpu.call(0.5)}
    alternated(calls, rounds=3, device="cuda", hide_host=True)
    sleeps = [each for each in gpu.seen if isinstance(each, int) and each != COUNTED_CYCLES]
    assert sorted(sleeps) == pytest.approx([HOST_MARGIN * 0.5e6] * 3 + [HOST_MARGIN * 2e6] * 3)
    # Each sleep comes right before the first event of a sample.
    samples = [gpu.seen[i : i + 4] for i, each in enumerate(gpu.seen) if each in sleeps]
    assert [each[1:] for each in samples] == [["event", "call", "event"]] * 6


def test_a_cpu_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def asleep(_: int) -> None:
        raise AssertionError("a CPU has no queue to fill")

    monkeypatch.setattr(torch.cuda, "_sleep", asleep)
    assert cycles_to_hide(lambda: None, "cpu") == 0
    times = alternated({"call": lambda: None}, rounds=3, hide_host=True)
    assert len(times["call"]) == 3
