"""The states of a step, what each of them refuses, and what stays as it was after a refusal."""

import math
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from doge_fast.step.step import loss_scale
from tests import models

pytestmark = pytest.mark.usefixtures("taken")


def made(model: nn.Module | None = None, **options: Any) -> tuple[Any, DoGEOptimizer]:
    """A weight, or the model that is given, and its optimizer."""
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    params = [weight] if model is None else model.parameters()
    arguments = {"domains": ["a", "b", "c"], "mu": 1.0, "domain_max_grad_norm": None}
    inner = torch.optim.SGD(params, lr=0.1)
    return model or weight, DoGEOptimizer(inner, **(arguments | options))


def enter(weight: Tensor, optimizer: DoGEOptimizer, names: str) -> None:
    models.enter(optimizer, names, lambda name: (ord(name) - 96) * weight.square().sum())


def refused(words: str, error: type[Exception] = RuntimeError) -> Any:
    return pytest.raises(error, match=words)


def assert_steps(weight: Tensor, optimizer: DoGEOptimizer, number: int = 1) -> None:
    """A whole step can be taken, and is the `number`th."""
    optimizer.zero_grad()
    enter(weight, optimizer, "abc" * (optimizer.micro_batches or 1))
    optimizer.step()
    assert optimizer.num_steps == number


@pytest.mark.parametrize(("entered", "missing"), [("ac", r"\['b'\]"), ("b", r"\['a', 'c'\]")])
@pytest.mark.parametrize("ends", ["step", "combine"])
def test_a_step_without_some_domain_is_refused_and_moves_nothing(entered, missing, ends):
    weight, optimizer = made()
    enter(weight, optimizer, entered)
    for _ in range(2):
        with refused(f"missing {missing}"):
            getattr(optimizer, ends)()
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.alpha.tolist() == [1 / 3] * 3
    assert optimizer.num_steps == 0
    assert_steps(weight, optimizer)


@pytest.mark.parametrize("absent", ["error", "keep"])
def test_a_step_without_any_domain_does_nothing_and_cannot_be_combined(absent):
    weight, optimizer = made(absent=absent)
    optimizer.step()
    with refused(r"missing \['a', 'b', 'c'\]"):
        optimizer.combine()
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.num_steps == 0
    assert_steps(weight, optimizer)


@pytest.mark.parametrize(
    ("micro_batches", "absent", "before", "after"),
    [
        (1, "error", "a", "c"),
        (1, "keep", "a", "c"),
        (2, "keep", "abc", "abc"),
        (None, "keep", "abc", "abc"),
    ],
)
@pytest.mark.parametrize("ends", ["step", "combine"])
def test_an_exception_inside_a_domain_drops_the_step(micro_batches, absent, before, after, ends):
    """It is no absence: what the step has lost must be run again."""
    weight, optimizer = made(micro_batches=micro_batches, absent=absent)
    enter(weight, optimizer, before)

    def fail() -> None:
        weight.sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), optimizer.domain("b"):
        fail()
    assert weight.grad is None
    enter(weight, optimizer, after)
    for _ in range(2):
        with refused("dropped .*zero_grad"):
            getattr(optimizer, ends)()
    assert_steps(weight, optimizer)


def test_an_error_in_combining_drops_the_step():
    layers = nn.ModuleDict({"used": nn.Linear(2, 1), "not": nn.Linear(2, 1)})
    model, optimizer = made(layers, selection=[layers["not"].weight])
    for name in "abc" * 2:
        fails = refused("no selected parameter") if name == "c" else nullcontext()
        with fails, optimizer.domain(name):
            model["used"](torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("count", [0, math.inf, math.nan])
def test_the_count_of_a_domain_must_be_positive_and_finite(count):
    _, optimizer = made()
    with refused(f"count .* domain 'a' has {count!r}", ValueError), optimizer.domain("a", count):
        pass


def test_counts_of_micro_batches_add_up(monkeypatch):
    weight, optimizer = made(micro_batches=2)
    exchange = optimizer._step.exchange
    agree = mock.Mock(wraps=exchange.agree)
    monkeypatch.setattr(exchange, "agree", agree)
    for name, count in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 1.0), ("b", 0.5), ("c", 1.0)):
        with optimizer.domain(name, count):
            weight.square().sum().backward()
    ((_, report),) = (call.args for call in agree.call_args_list)
    entries = {name: (entry.counts, entry.places) for name, entry in report.entries.items()}
    # A rule without halves has all of it in the first.
    assert entries == {
        "a": ([4.0, 0.0], [0, 2]),
        "b": ([2.5, 0.0], [1, 4]),
        "c": ([2.0, 0.0], [3, 5]),
    }
    # Reading the weights waits for the device: ranks compare them until they have agreed.
    values, step = optimizer._weights.state_S.tolist(), optimizer._step
    assert step._settings([], 1.0)["the domain weights"] is None
    step.begin_loaded()
    assert step._settings([], 1.0)["the domain weights"] == values
    # In one process they change nothing, whatever their size.
    twin, plain = made(micro_batches=2)
    for name, count in (("a", 1.0), ("b", 5e-324), ("c", 1e300)) * 2:
        with plain.domain(name, count):
            twin.square().sum().backward()
    assert torch.equal(weight.grad, twin.grad)


@pytest.mark.parametrize("micro_batches", [1, 2, None])
def test_leaving_the_last_domain_combines_if_micro_batches_is_given(micro_batches):
    """In any order, and anew after the step."""
    weight, optimizer = made(micro_batches=micro_batches)
    assert optimizer.micro_batches == micro_batches
    for step, order in enumerate(("abc", "cba") if micro_batches == 1 else ("abbcca", "aabbcc")):
        enter(weight, optimizer, order[:-1])
        assert weight.grad is None
        if micro_batches:
            with refused(f"'b' has been entered micro_batches={micro_batches} times"):
                enter(weight, optimizer, "b")
        enter(weight, optimizer, order[-1])
        assert (weight.grad is not None) == (micro_batches is not None)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.num_steps == step + 1


def test_a_step_with_too_few_micro_batches_is_refused_unless_absent_keep():
    weight, optimizer = made(micro_batches=2)
    enter(weight, optimizer, "aabc")
    with refused(r"micro_batches=2 times; \['b', 'c'\] were"):
        optimizer.step()
    optimizer.combine()
    optimizer.step()
    assert optimizer.num_steps == 1
    # Any number has no "less often".
    for options in ({"micro_batches": 2, "absent": "keep"}, {"micro_batches": None}):
        weight, optimizer = made(**options)
        enter(weight, optimizer, "aabc")
        optimizer.step()
        assert optimizer.num_steps == 1


def test_a_pickled_copy_starts_an_empty_step():
    weight, optimizer = made()
    enter(weight, optimizer, "ab")
    other: DoGEOptimizer = pickle.loads(pickle.dumps(optimizer))
    with refused(r"missing \['a', 'b', 'c'\]"):
        other.combine()
    enter(weight, optimizer, "c")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_domain_refuses_unknown_names_nesting_and_missing_gradients():
    _, optimizer = made(target={"far": 1.0})
    said = r"domain 'z' .* \['a', 'b', 'c', 'far'\]"
    with refused(said, ValueError), optimizer.domain("z"):
        pass
    with (
        refused(r"domain\('b'\) must be called outside domain.*'a'"),
        optimizer.domain("a"),
        optimizer.domain("b"),
    ):
        pass
    # Of a parameter that was put in the place of another, for example.
    with refused("gradient inside domain 'a'"), optimizer.domain("a"):
        nn.Parameter(torch.ones(2)).sum().backward()


@pytest.mark.parametrize("what", ["step", "combine", "zero_grad", "release", "load_state_dict"])
def test_methods_that_are_refused_inside_a_domain(what):
    weight, optimizer = made()
    arguments = [optimizer.state_dict()] if what == "load_state_dict" else []
    with optimizer.domain("a"):
        weight.sum().backward()
        with refused(rf"{what}\(\).* must be called outside domain.*'a'"):
            getattr(optimizer, what)(*arguments)


@pytest.mark.parametrize("change", [Tensor.double, Tensor.t])
def test_a_model_may_be_cast_or_reshaped_between_steps(change):
    weight, optimizer = made()
    weight.data = torch.ones(2, 3).half()
    assert_steps(weight, optimizer)
    weight.data = change(weight.data)
    assert_steps(weight, optimizer, 2)
    (block,) = optimizer.buffer.blocks
    assert (block.rows_BN.dtype, block.rows[0].shape) == (weight.dtype, weight.shape)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_sparse_gradient_fails_and_leaves_nothing(is_later):
    model, optimizer = made(nn.Embedding(5, 2, sparse=not is_later))
    if is_later:
        with optimizer.domain("a"):
            model(torch.tensor([1, 2])).sum().backward()
        model.sparse = True
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)sparse"), optimizer.domain("b"):
        model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad is None


def test_a_backward_pass_outside_any_domain_is_refused():
    weight, optimizer = made()
    weight.sum().backward()
    for refuses in (optimizer.step, optimizer.domain("a").__enter__):
        with refused("outside any domain"):
            refuses()
    # Nor is one added to the combined gradient.
    optimizer.zero_grad()
    enter(weight, optimizer, "abc")
    alpha = optimizer.alpha
    weight.sum().backward()
    with refused("outside any domain"):
        optimizer.step()
    assert weight.tolist() == [1.0, 2.0]
    assert torch.equal(optimizer.alpha, alpha)
    assert_steps(weight, optimizer, 2)


def test_after_a_release_the_model_trains_as_without_domains():
    weight, optimizer = made()
    enter(weight, optimizer, "ab")
    optimizer.release()
    assert optimizer.buffer.blocks == []
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.tolist() == pytest.approx([0.7, 1.7])
    assert optimizer.num_steps == 0
    assert_steps(weight, optimizer)


def test_a_combined_gradient_must_be_cleared_before_the_next_domain():
    weight, optimizer = made(micro_batches=None)
    enter(weight, optimizer, "abc")
    optimizer.combine()
    gradient = weight.grad.clone()
    optimizer.combine()
    assert torch.equal(weight.grad, gradient)
    late_weight, late = made()
    enter(late_weight, late, "abc")
    late.combine()
    with refused("without this grad_scale"):
        late.combine(grad_scale=8.0)
    with refused("still holds a gradient .*combined"):
        enter(weight, optimizer, "a")
    # As a scaler's update does where it has skipped.
    weight.grad = None
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 2


def test_a_gradient_from_before_the_domain_is_refused():
    weight, optimizer = made()
    weight.grad = torch.ones(2)
    with refused("still holds a gradient from before this domain"):
        enter(weight, optimizer, "a")
    assert_steps(weight, optimizer)


def test_a_parameter_that_is_unfrozen_within_a_step_is_refused_until_the_next():
    model, optimizer = made(nn.Linear(2, 1).double(), micro_batches=None)
    model.bias.requires_grad_(False)
    x = torch.ones(1, 2).double()
    for name in "abc":
        with optimizer.domain(name):
            model(x).sum().backward()
        model.bias.requires_grad_(True)
    with refused(r"\[1\] has a p.grad that no domain gave"):
        optimizer.combine()
    optimizer.zero_grad()
    models.enter(optimizer, "abc", lambda _: model(x).sum())
    optimizer.combine()
    torch.testing.assert_close(model.bias.grad, optimizer.alpha.sum()[None])


def test_two_wrappers_of_one_model_can_take_turns():
    weight, old = made()
    new = DoGEOptimizer(torch.optim.SGD([weight], lr=0.1), domains=["a", "b", "c"])
    for optimizer in (new, old, new):
        enter(weight, optimizer, "abc")
        optimizer.step()
        optimizer.zero_grad()
    assert (new.num_steps, old.num_steps) == (2, 1)


def test_loss_scale_is_that_of_the_call_or_the_scaler_or_one():
    cpu = torch.device("cpu")
    assert loss_scale(None, None, cpu) == 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    factor = loss_scale(None, scaler, cpu)
    assert factor == 8.0
    # It lies on the device of the parameters.
    assert loss_scale(None, torch.amp.GradScaler("cpu"), torch.device("meta")).is_meta
    assert loss_scale(2.0, scaler, cpu) == 2.0
    # A tensor is not looked at.
    given = torch.tensor(-1.0)
    assert loss_scale(given, None, cpu) is given
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with refused(f"positive and finite; got {wrong!r}", ValueError):
            loss_scale(wrong, None, cpu)
