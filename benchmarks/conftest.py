"""Options of the benchmarks that run under pytest."""

from types import SimpleNamespace

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks of doge_fast")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.addoption("--device", default=default, help="where the operators run")
    group.addoption("--megabytes", type=float, default=256, help="of the rows of a problem")
    group.addoption("--rounds", type=int, default=5, help="samples of each formulation")


@pytest.fixture(scope="session")
def options(pytestconfig: pytest.Config) -> SimpleNamespace:
    """--device, --megabytes and --rounds."""
    return SimpleNamespace(
        device=pytestconfig.getoption("--device"),
        megabytes=pytestconfig.getoption("--megabytes"),
        rounds=pytestconfig.getoption("--rounds"),
    )
