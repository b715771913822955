"""Models here have thousands of parameters: a second thread costs more than it brings."""

import pytest

from doge_fast.step import parameters


@pytest.fixture(scope="module", autouse=True)
def small_models(one_thread: None) -> None:
    pass


@pytest.fixture
def taken_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain takes its gradients when it is left, as elsewhere than on a CPU."""
    monkeypatch.setattr(parameters, "takes_at_once", lambda param: False)


@pytest.fixture(params=["at once", "when the domain is left"])
def taken(request: pytest.FixtureRequest) -> None:
    """When a domain takes its gradients: as on a CPU, and as elsewhere."""
    if request.param != "at once":
        request.getfixturevalue("taken_late")
