"""Models here have thousands of parameters: a second thread costs more than it brings."""

import pytest

from doge_fast.step import parameters


@pytest.fixture(scope="module", autouse=True)
def small_models(one_thread: None) -> None:
    pass


@pytest.fixture(params=["at once", "when the domain is left"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a domain takes its gradients: as on a CPU, and as elsewhere."""
    if request.param != "at once":
        monkeypatch.setattr(parameters, "takes_at_once", lambda param: False)
