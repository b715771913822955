"""The two forms of the domain weights in a checkpoint, part by part, and what each refuses."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from doge_fast import DoGEOptimizer
from doge_fast.weights import checkpoint
from doge_fast.weights.objective import Objective
from doge_fast.weights.state import DomainWeights, UpdateRule

OBJECTIVE = Objective.of(np.array(["a", "b"]), {"a": 1.0, "far": 2.0})


def state(**parts: Any) -> dict[str, Any]:
    """What `named` gives after some steps."""
    weights = DomainWeights(OBJECTIVE, UpdateRule(np.float64(0.5)))
    ours = {
        "alpha": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "alpha_mean": torch.tensor([0.5, 0.5], dtype=torch.float64),
        "gain": torch.tensor([-1.5, 1e-300], dtype=torch.float64),
        "num_steps": torch.tensor(7),
        "num_skipped": torch.tensor(2),
    }
    named = checkpoint.named(weights.state() | ours, OBJECTIVE, draws=9, mu=weights.rule.mu)
    return named | parts


def test_numbers_go_there_and_back():
    named = state()
    assert (
        named.items() >= {"version": 2, "names": ["a", "b", "far"], "draws": 9, "mu": 0.5}.items()
    )
    checkpoint.check(named, OBJECTIVE)
    # weights_only=True reads no numbers and strings of numpy.
    assert {type(each) for each in (named["mu"], *named["domains"])} == {float, str}
    values = checkpoint.packed(named, OBJECTIVE)
    fingerprint = checkpoint.fingerprint(OBJECTIVE)
    vectors = (0.25, 0.75, 0.5, 0.5, -1.5, 1e-300)
    assert values == (2.0, fingerprint, 9.0, *vectors, 7.0, 2.0, 0.5)
    back = checkpoint.unpacked(values, OBJECTIVE)
    assert back.keys() == named.keys()
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            # With its shape and dtype.
            torch.testing.assert_close(back[name], value, rtol=0, atol=0)
        else:
            assert back[name] == value
    assert type(back["draws"]) is int


def test_a_fingerprint_is_48_bits_of_the_names_in_their_order():
    """Fixed: checkpoints of every release carry it."""
    assert checkpoint.fingerprint(OBJECTIVE) == 50459378464989.0
    others = [
        Objective.of(["b", "a"], {"a": 1.0, "far": 2.0}),
        Objective.of(["a", "b"]),
        Objective.of(["a", "b"], {"a": 1.0, "near": 2.0}),
    ]
    assert len({checkpoint.fingerprint(each) for each in (OBJECTIVE, *others)}) == 4


def test_states_of_removed_methods_are_refused():
    """Weights of targets that moved, and running norms behind them, in both forms."""
    values, further = checkpoint.packed(state(), OBJECTIVE), (1.0, 0.0, 2.0)
    for name, numbers in (("tau", further), ("norms", (0.0, 0.0, 0.0, *further))):
        with pytest.raises(ValueError, match=f"'{name}' .*before-the-card"):
            checkpoint.unpacked((*values[:-1], *numbers, values[-1]), OBJECTIVE)
        with pytest.raises(ValueError, match=f"'{name}' .*before-the-card"):
            checkpoint.check(state(**{name: torch.ones(3)}), OBJECTIVE)
    with pytest.raises(ValueError, match="weights of other domains or another target"):
        checkpoint.unpacked((*values[:-1], 1.0, values[-1]), OBJECTIVE)


@pytest.mark.parametrize("name", ["alpha", "alpha_mean"])
def test_weights_are_not_negative_and_sum_to_one_within_a_billionth(name):
    """Rounding of a long run is far below, an edited file's far above."""
    for right in ([0.0, 1.0], [0.5, 0.5 + 9e-10], [0.5, 0.5 - 9e-10]):
        checkpoint.check(state(**{name: torch.tensor(right, dtype=torch.float64)}), OBJECTIVE)
    for wrong in ([0.5, 0.5 + 1.1e-9], [-1e-12, 1 + 1e-12], [math.nan, 1.0], [math.inf, -math.inf]):
        with pytest.raises(ValueError, match=f"{name} must be "):
            checkpoint.check(state(**{name: torch.tensor(wrong, dtype=torch.float64)}), OBJECTIVE)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"alpha": torch.tensor([0.5, 0.25, 0.25])}, "alpha must be 2"),
        ({"alpha": [0.5, 0.5]}, "alpha must be .* tensor"),
        ({"gain": torch.zeros(3)}, r"gain must be 2 finite .* is tensor\(\[0\., 0\."),
        ({"gain": torch.tensor([0.0, math.nan])}, "gain must be 2 finite"),
        ({"version": 1}, r"version 1; .* reads version 2\. Take the doge_fast that wrote it\."),
        ({"version": 3}, r"version 3; .* reads version 2\. .* that wrote it, or a later one\."),
        ({"version": True}, "version must be a count; it is True"),
        ({"version": -1}, "version must be a count; it is -1"),
        ({"draws": torch.tensor(2)}, "draws must be a count; it is tensor"),
        ({"names": ["a", "b"]}, r"has the names \['a', 'b'\]"),
        ({"domains": ["b", "a"]}, r"has the domains \['b', 'a'\]"),
        ({"num_steps": torch.ones(2)}, "num_steps must be a count"),
        ({"num_steps": torch.tensor(math.nan)}, "num_steps must be a count"),
        ({"num_steps": torch.tensor(2.5)}, "num_steps must be a count"),
        ({"mu": 0.0}, "positive and finite; got 0.0"),
    ],
)
def test_parts_of_another_kind_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.check(state(**parts), OBJECTIVE)


def test_parts_that_are_missing_are_named():
    for part in ("domains", "names", "draws", "mu", "alpha"):
        ours = state()
        del ours[part]
        with pytest.raises(ValueError, match=rf"lacks \['{part}'\]; it was not written by"):
            checkpoint.check(ours, OBJECTIVE)
    # What a file's format makes of them.
    ours = state(num_steps=torch.ones(1), domains=("a", "b"))
    checkpoint.check(ours, OBJECTIVE)
    weights = DomainWeights(OBJECTIVE, UpdateRule(0.5))
    weights.load(ours)
    assert weights.read("num_steps") == 1


def test_a_state_dict_holds_both_forms_and_gives_one_back():
    theirs = {"state": {}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
    both = checkpoint.put_into(theirs, state(), OBJECTIVE)
    values = checkpoint.packed(state(), OBJECTIVE)
    assert both["param_groups"] == [{"lr": 0.1, "doge": values}, {"lr": 0.2, "doge": values}]
    assert theirs == {"state": {}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
    ours, rest = checkpoint.taken_from(both, OBJECTIVE)
    assert ours is both["doge"]
    assert "doge" not in rest
    assert "doge" in both
    # The named form is read where groups differ, and the other is not looked at.
    both["param_groups"][1]["doge"] = values[:-1]
    assert checkpoint.taken_from(both, OBJECTIVE)[0] is ours
    del both["doge"]
    with pytest.raises(ValueError, match="hold 2 different states of the domain weights"):
        checkpoint.taken_from(both, OBJECTIVE)
    both["param_groups"][1]["doge"] = values
    assert checkpoint.taken_from(both, OBJECTIVE)[0]["mu"] == 0.5
    both["param_groups"] = [{"doge": (3.0, *values[1:])}]
    with pytest.raises(ValueError, match="has version 3"):
        checkpoint.taken_from(both, OBJECTIVE)
    assert checkpoint.taken_from({"param_groups": [{}]}, OBJECTIVE)[0] is None
    assert checkpoint.taken_from({}, OBJECTIVE) == (None, {})
    # Groups of a living optimizer have an empty place.
    groups: list[dict[str, Any]] = [{"doge": (1.0,)}, {}]
    checkpoint.mark(groups)
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
    with pytest.raises(TypeError, match=r"state_dict\(\) returned; got \[\]"):
        optimizer.doge.load_state_dict([])
    with pytest.raises(ValueError, match="not written by state_dict"):
        optimizer.doge.load_state_dict({})
