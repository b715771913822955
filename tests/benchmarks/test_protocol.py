"""Cold samples, and where a result is from."""

import gc
import math
import weakref

import pytest
import torch

from benchmarks import protocol
from tests.processes import shell_script


def test_small_data_are_made_cold_and_large_ones_are():
    cache = protocol.last_cache_bytes("cpu")
    assert cache >= 1 << 18
    assert protocol.cold(protocol.CACHES_FOR_COLD * cache) is None
    flush = protocol.cold(1)
    assert flush is not None
    flush()


@pytest.mark.parametrize(
    ("text", "expected"), [("32K", 32 << 10), ("32768K\n", 32 << 20), ("2M", 2 << 20), ("12", 12)]
)
def test_cache_sizes_are_read_with_their_unit(text, expected):
    assert protocol._parsed_size(text) == expected


def test_a_record_says_where_it_comes_from(tmp_path):
    record = protocol.machine("cpu")
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["commit"]
    assert torch.backends.cpu.get_cpu_capability() in record["device"]
    protocol.write(tmp_path / "new" / "record.json", record)
    assert (tmp_path / "new" / "record.json").read_text().startswith("{")


def test_numbers_keep_their_leading_digits():
    assert protocol.rounded(0.000123456) == 0.0001235
    assert protocol.rounded(12345.678) == 12350.0
    assert protocol.rounded(7) == 7
    assert math.isclose(protocol.rounded(1.23456, 2), 1.2)


def test_a_step_is_freed_when_it_is_released():
    class Wrapper:
        """As an optimizer that its parameters' hooks hold, which it holds."""

        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        reference = weakref.ref(Wrapper())
        assert reference() is not None
        protocol.release("cpu")
        assert reference() is None
    finally:
        gc.enable()


def test_the_driver_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert protocol.driver() is None
    for text, expected in (("echo 580.82\necho 580.82", "580.82"), ("echo no; exit 9", None)):
        shell_script(tmp_path / "nvidia-smi", text)
        assert protocol.driver() == expected
