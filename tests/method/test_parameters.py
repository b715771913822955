"""Groups, names, rates and hooks of the parameters that the wrapped optimizer trains."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer
from doge_fast.step import parameters
from doge_fast.step.parameters import TrackedParameters, resolve


def tracked(groups: Any, lr: Any = 0.1, **options: Any) -> TrackedParameters:
    return TrackedParameters(torch.optim.SGD(groups, lr=lr), options.get("selection"))


def param(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **options))


@pytest.mark.parametrize("kind", ["names", "tensors of groups with names", "tensors"])
def test_a_selection_survives_replaced_parameters(kind):
    one, other, later = param(2), param(3), param(3)
    groups: Any = [one, other] if kind == "tensors" else [("one", one), ("other", other)]
    assert tracked(groups).selected_ids is None
    ours = tracked(groups, selection=["other"] if kind == "names" else [other])
    assert ours.selected_ids == {id(other)}
    if kind == "tensors":
        # It waits where nothing is trained yet: a host empties the groups before it fills them.
        ours.scan()
        ours.groups[0]["params"] = []
        assert ours.scan() == []
        assert ours.selected_ids == set()
        ours.groups[0]["params"] = [one, other]
        ours.scan()
        assert ours.selected_ids == {id(other)}
    ours.groups[0]["params"] = [one, later]
    if kind == "tensors":
        with pytest.raises(RuntimeError, match="none of the parameters of the selection any more"):
            ours.scan()
    else:
        ours.scan()
        assert ours.selected_ids == {id(later)}


def test_on_host_reads_no_number_from_a_device():
    values = (None, 0.5, torch.tensor(0.5), torch.empty((), device="meta"))
    assert list(map(parameters.on_host, values)) == [None, 0.5, 0.5, None]


@pytest.mark.parametrize(
    ("noted", "peak"),
    [
        ({}, 0.1),
        ({"initial_lr": 0.3}, 0.3),
        ({"initial_lr": 0.01, "max_lr": 0.7}, 0.7),
        ({"initial_lr": 0.01}, 0.1),
    ],
)
def test_peak_lr_is_the_largest_rate_in_the_group(noted, peak):
    ours = tracked([param(2)])
    ours.groups[0].update(noted)
    assert ours.peak_lr == peak


def test_complex_parameters_are_refused():
    params = [param(2), param(2, dtype=torch.complex64)]
    with pytest.raises(ValueError, match="complex parameters"):
        tracked(params)
    # One that is not trained takes part in nothing.
    params[1].requires_grad_(False)
    assert tracked(params).params == params[:1]


@pytest.mark.parametrize("micro_batches", [1, None], ids=["combined", "not combined"])
@pytest.mark.parametrize(
    ("lr", "later", "is_refused"),
    [
        (0.1, 0.2, True),
        (0.1, 0.1, False),
        (0.1, torch.tensor(0.2), True),
        (torch.tensor(0.1), 0.2, True),
        (torch.tensor(0.1), 0.1, False),
    ],
    ids=repr,
)
def test_a_learning_rate_that_changes_after_combining_is_refused(
    lr, later, is_refused, micro_batches
):
    weight = param(2)
    inner = torch.optim.SGD([weight], lr=lr)
    optimizer = DoGEOptimizer(inner, domains=["a"], mu=1.0, micro_batches=micro_batches)
    with optimizer.domain("a"):
        weight.sum().backward()
    optimizer.param_groups[0]["lr"] = later
    if is_refused and micro_batches:
        with pytest.raises(RuntimeError, match=r"rate has changed from 0\.1 to 0\.2"):
            optimizer.step()
        return
    with warnings.catch_warnings():
        # torch's of a tensor that is no longer the same one.
        warnings.simplefilter("ignore")
        optimizer.step()
    assert optimizer.last.lr == (lr if micro_batches else later)


def test_the_last_step_keeps_its_rate_if_a_scheduler_writes_into_the_tensor():
    weight, lr = param(2), torch.tensor(0.1)
    optimizer = DoGEOptimizer(torch.optim.SGD([weight], lr=lr), domains=["a"], mu=1.0)
    with optimizer.domain("a"):
        weight.sum().backward()
    lr.fill_(0.2)
    assert optimizer.last.lr == torch.tensor(0.1)
    with pytest.raises(RuntimeError, match=r"rate has changed from 0\.1 to 0\.2"):
        optimizer.step()


def test_a_selection_names_what_is_trained():
    trained, frozen = param(2), param(2)
    by_name = {"trained": trained, "frozen": frozen}
    assert resolve(["trained"], [trained], by_name) == [trained]
    assert resolve([trained], [trained], {}) == [trained]
    for item, said in (
        ("frozen", r"'frozen', .* knows \['frozen', 'trained'\]"),
        ("nobody", "'nobody', "),
        (frozen, "'a tensor', "),
        (None, "'a tensor', "),
    ):
        with pytest.raises(ValueError, match=said):
            resolve([item], [trained], by_name)
    with pytest.raises(ValueError, match=r"named_parameters\(\) .* knows \[\]"):
        resolve([frozen], [trained], {})
    many = {f"p{i}": param(1) for i in range(10)}
    with pytest.raises(ValueError, match=r"knows \['p0', .*'p7'\] \.\.\.$"):
        resolve(["p"], list(many.values()), many)
