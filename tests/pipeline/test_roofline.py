"""The yardstick: the fastest way counts, in bytes per second, and is measured once."""

from collections.abc import Mapping

import pytest
import torch

from doge_fast.pipeline import roofline
from doge_fast.pipeline.roofline import bandwidth


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_measured", roofline._measured.__wrapped__)


def test_the_fastest_way_counts(monkeypatch):
    """Seconds by hand: three reads, then two copies."""
    seconds = [[2.0] * 9, [1.0] * 9, [4.0] * 9, [8.0] * 4 + [4.0] + [2.0] * 4, [16.0] * 9]

    def alternated(calls: Mapping[str, object], **_: object) -> dict[str, list[float]]:
        return {name: [1e3 * s for s in each] for name, each in zip(calls, seconds, strict=True)}

    monkeypatch.setattr(roofline, "alternated", alternated)
    limits = bandwidth("cpu", 4096)
    assert limits.read == 4096 / 1.0
    # Read and written; quartiles 2 and 8 around 4.
    assert limits.copy == 2 * 4096 / 4.0
    assert limits.spread == 6 / 4


def test_a_copy_arrives(monkeypatch):
    """What is timed as a copy is one."""
    copied: list[torch.Tensor] = []

    def spy(rows: torch.Tensor, c_R: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        copied.append(roofline_sum(rows, c_R, out=out))
        return copied[-1]

    roofline_sum = roofline.weighted_sum
    monkeypatch.setattr(roofline, "weighted_sum", spy)
    bandwidth("cpu", 4096)
    assert len(copied) == roofline.REPEATS + 1
    assert torch.equal(copied[-1], torch.ones(1024))
