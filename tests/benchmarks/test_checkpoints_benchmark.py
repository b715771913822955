"""What a checkpoint costs is measured on files like a run's, and nothing of them stays."""

from pathlib import Path

from benchmarks import checkpoints


def test_every_part_takes_time_and_nothing_stays(tmp_path: Path) -> None:
    times = checkpoints.measured(1000, tmp_path, 2)
    assert len(times) == 4
    assert all(seconds > 0 and busy >= 0 for seconds, busy in times.values())
    assert list(tmp_path.iterdir()) == []
