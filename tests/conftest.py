"""What every test runs on: a device, a seed, memory that starts as NaN, quiet operators."""

import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

# Nothing a test asks for is on the Hub; a wrong name need not wait for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything imports Triton: without a GPU its kernels run in the interpreter, those of CUDA in
# an emulator.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("DOGE_FAST_CUDA_EMULATE", "1")

from doge_fast.kernels import implementations
from doge_fast.kernels.dispatch import IMPLEMENTATIONS, OPERATORS, choose
from tests.ranks import Ranks

# Absent where operators and method are tested with few packages.
if importlib.util.find_spec("hypothesis") is not None:
    from tests import properties

    properties.settings.load_profile("few")


def pytest_configure() -> None:
    """Settle the operators once, so that no test meets the warning of a missing compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        choose("gram", default_device(), None)
        choose("gram", torch.device("cpu"), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let others say what they say on one release of CPython."""
    said: tuple[str, ...] = ()
    if sys.version_info[:3] == (3, 13, 0):
        said = ("ignore:Guards may run slower on Python 3.13.0",)
    elif sys.version_info >= (3, 14):
        # Hypothesis counts references, of which 3.14 has fewer.
        said = ("ignore:It looks like `register_random`",)
    for item in items:
        for message in said:
            item.add_marker(pytest.mark.filterwarnings(message))


def pytest_collection_finish() -> None:
    """Take what is imported out of what the garbage collector looks through.

    Accelerate collects at the end of every training, which is 0.4 s of a test of 0.9 s here.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back: libraries count what is left when the process ends."""
    gc.unfreeze()


def default_device() -> torch.device:
    """DOGE_FAST_TEST_DEVICE, else the GPU, else the CPU."""
    fallback = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(os.environ.get("DOGE_FAST_TEST_DEVICE", fallback))
    return torch.empty(0, device=device).device


@pytest.fixture
def device() -> torch.device:
    return default_device()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Every implementation that can run on the device, of the module's OPERATOR if it has one."""
    name: str = request.param
    operator = OPERATORS[getattr(request.module, "OPERATOR", "gram")]
    if name not in operator.implementations:
        pytest.skip(f"{operator.name} is not written in {name}")
    reason = implementations(device)[name]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20240601)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that are the ranks of a group."""
    kept = Ranks()
    yield kept
    kept.close()
