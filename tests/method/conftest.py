"""Models here have thousands of parameters: a second thread costs more than it brings."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_models(one_thread: None) -> None:
    pass
