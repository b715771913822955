"""The two forms of the domain weights in a checkpoint, part by part, and what each refuses."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from doge_fast import DoGEOptimizer
from doge_fast.weights import checkpoint
from doge_fast.weights.objective import Objective
from doge_fast.weights.reweight import MirrorStep
from doge_fast.weights.state import DomainWeights

OBJECTIVE = Objective.of(np.array(["a", "b"]), {"a": 1.0, "far": 2.0})
# 48 bits of a hash of the names in their order, as every checkpoint has them.
FINGERPRINT = 50459378464989.0


def state(**parts: Any) -> dict[str, Any]:
    """What `as_dict` gives after some steps."""
    weights = DomainWeights(OBJECTIVE, MirrorStep(mu=np.float64(0.5)))
    moved = {
        "alpha": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "alpha_mean": torch.tensor([0.5, 0.5], dtype=torch.float64),
        "gain": torch.tensor([-1.5, 1e-300], dtype=torch.float64),
        "num_steps": torch.tensor(7),
        "num_skipped": torch.tensor(2),
    }
    return checkpoint.as_dict(weights.state() | moved, OBJECTIVE, draws=9) | parts


def test_numbers_go_there_and_back():
    saved = state()
    assert saved["names"] == ["a", "b", "far"]
    checkpoint.check(saved, OBJECTIVE)
    # weights_only=True reads no numbers and strings of numpy.
    assert {type(each) for each in (saved["mu"], *saved["domains"])} == {float, str}
    values = checkpoint.as_tuple(saved, OBJECTIVE)
    vectors = (0.25, 0.75, 0.5, 0.5, -1.5, 1e-300)
    assert values == (3.0, FINGERPRINT, 9.0, *vectors, 7.0, 2.0, 0.5)
    back = checkpoint.from_tuple(values, OBJECTIVE)
    assert back.keys() == saved.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            # With its shape and dtype.
            torch.testing.assert_close(back[name], value, rtol=0, atol=0)
        else:
            assert back[name] == value
    assert type(back["draws"]) is int


def test_a_tuple_of_other_names_or_of_another_version_is_refused():
    values = checkpoint.as_tuple(state(), OBJECTIVE)
    for objective in (
        Objective.of(["b", "a"], {"a": 1.0, "far": 2.0}),
        Objective.of(["a", "b"]),
        Objective.of(["a", "b"], {"a": 1.0, "near": 2.0}),
    ):
        with pytest.raises(ValueError, match="other domains or another target"):
            checkpoint.from_tuple(values, objective)
    with pytest.raises(ValueError, match="version 4"):
        checkpoint.from_tuple((4.0, *values[1:]), OBJECTIVE)


@pytest.mark.parametrize("name", ["alpha", "alpha_mean"])
def test_weights_are_not_negative_and_sum_to_one_within_a_billionth(name):
    """Rounding of a long run is far below, an edited file's far above."""
    for right in ([0.0, 1.0], [0.5, 0.5 + 9e-10], [0.5, 0.5 - 9e-10]):
        checkpoint.check(state(**{name: torch.tensor(right, dtype=torch.float64)}), OBJECTIVE)
    for wrong in ([0.5, 0.5 + 1.1e-9], [-1e-12, 1 + 1e-12], [math.nan, 1.0], [math.inf, -math.inf]):
        with pytest.raises(ValueError, match=f"{name} must be "):
            checkpoint.check(state(**{name: torch.tensor(wrong, dtype=torch.float64)}), OBJECTIVE)


@pytest.mark.parametrize(
    "parts", [{"version": 1}, {"names": ["a", "b"]}, {"domains": ["b", "a"]}], ids=str
)
def test_a_dict_of_other_names_or_of_another_version_is_refused(parts):
    (value,) = parts.values()
    with pytest.raises(ValueError, match=f"another target.*{re.escape(str(value))}"):
        checkpoint.check(state(**parts), OBJECTIVE)


def test_a_dict_of_another_version_may_have_other_keys():
    earlier = state(version=2)
    earlier["rows"] = earlier.pop("names")
    with pytest.raises(ValueError, match=r"another version.*2"):
        checkpoint.check(earlier, OBJECTIVE)


@pytest.mark.parametrize(
    "damage", [{"gain": math.nan}, {"mu": math.inf}, {"alpha_mean": 0.5}], ids=str
)
def test_a_damaged_checkpoint_changes_neither_optimizer(damage):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = DoGEOptimizer(torch.optim.Adam([weight]), domains=["a", "b"], mu=1.0)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    for name, value in damage.items():
        is_vector = isinstance(saved["doge"][name], torch.Tensor)
        saved["doge"][name] = torch.full((1,), value) if is_vector else value
    before = optimizer.inner.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="checkpoint"):
        optimizer.load_state_dict(saved)
    assert optimizer.inner.param_groups[0]["lr"] == before


def test_a_part_that_is_missing_changes_nothing():
    weights = DomainWeights(OBJECTIVE, MirrorStep(mu=0.5), is_mu_default=True)
    for part in ("alpha", "gain", "num_skipped", "mu"):
        damaged = state()
        del damaged[part]
        with pytest.raises(KeyError, match=part):
            weights.load(damaged)
        assert weights.read("alpha").tolist() == [0.5, 0.5]
    # What a file's format makes of them.
    restored = state(num_steps=torch.ones(1), domains=("a", "b"))
    checkpoint.check(restored, OBJECTIVE)
    weights.load(restored)
    assert weights.read("num_steps") == 1


def test_a_state_dict_holds_both_forms_and_gives_one_back():
    theirs = {"state": {}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
    both = checkpoint.add(theirs, state(), OBJECTIVE)
    values = checkpoint.as_tuple(state(), OBJECTIVE)
    assert both["param_groups"] == [{"lr": 0.1, "doge": values}, {"lr": 0.2, "doge": values}]
    assert theirs == {"state": {}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
    weights, rest = checkpoint.separate(both, OBJECTIVE)
    assert weights is both["doge"]
    assert "doge" not in rest
    assert "doge" in both
    # The named form is read where groups differ, and the other is not looked at.
    both["param_groups"][1]["doge"] = values[:-1]
    assert checkpoint.separate(both, OBJECTIVE)[0] is weights
    del both["doge"]
    with pytest.raises(ValueError, match="too many values"):
        checkpoint.separate(both, OBJECTIVE)
    both["param_groups"][1]["doge"] = values
    assert checkpoint.separate(both, OBJECTIVE)[0]["mu"] == 0.5
    both["param_groups"] = [{"doge": (4.0, *values[1:])}]
    with pytest.raises(ValueError, match="version 4"):
        checkpoint.separate(both, OBJECTIVE)
    assert checkpoint.separate({"param_groups": [{}]}, OBJECTIVE)[0] is None
    assert checkpoint.separate({}, OBJECTIVE) == (None, {})
    # Groups of a live optimizer have the key alone.
    groups: list[dict[str, Any]] = [{"doge": (1.0,)}, {}]
    checkpoint.add_empty_key(groups)
    assert groups == [{"doge": ()}, {"doge": ()}]


def optimizer_of(**options: Any) -> tuple[torch.Tensor, DoGEOptimizer]:
    weight = torch.ones(2, requires_grad=True)
    inner = torch.optim.SGD([weight], lr=0.1)
    return weight, DoGEOptimizer(
        inner, domains=["a", "b"], target={"a": 1.0, "far": 2.0}, **options
    )


def test_a_mu_that_was_named_stays_and_another_is_the_checkpoints():
    for options, mu in (({"mu": 3.0}, 3.0), ({}, 0.5)):
        _, optimizer = optimizer_of(**options)
        optimizer.doge.load_state_dict(state())
        assert optimizer.mu == mu
    assert optimizer.num_steps == 7
    assert optimizer.num_skipped == 2


def test_loading_forgets_the_step_under_way():
    weight, optimizer = optimizer_of(mu=1.0)
    with optimizer.domain("a"):
        weight.sum().backward()
    optimizer.doge.load_state_dict(state())
    with pytest.raises(RuntimeError, match=r"missing \['a', 'b', 'far'\]"):
        optimizer.combine()
