"""Which domains of a step have been entered, how often, and what is said of those that were not."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from doge_fast import DoGEOptimizer
from doge_fast.step.step import StepState
from doge_fast.wrapper import checked_scaler, loss_scale


def made(**options: Any) -> tuple[Tensor, DoGEOptimizer]:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    inner = torch.optim.SGD([weight], lr=0.1)
    arguments = {"domains": ["a", "b", "c"], "mu": 1.0, "domain_max_grad_norm": None}
    return weight, DoGEOptimizer(inner, **(arguments | options))


def enter(weight: Tensor, optimizer: DoGEOptimizer, names: str) -> None:
    for name in names:
        with optimizer.domain(name):
            ((ord(name) - 96) * weight.square().sum()).backward()


@pytest.mark.parametrize("absent", ["error", "keep"])
@pytest.mark.parametrize("ends", ["step", "combine"])
def test_a_step_of_no_domain_is_refused(absent: Any, ends: str) -> None:
    """Also where absent domains are kept: nothing says where to step."""
    weight, optimizer = made(absent=absent)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"missing \['a', 'b', 'c'\] of \['a', 'b', 'c'\]"):
            getattr(optimizer, ends)()
        optimizer.zero_grad()
    assert optimizer.num_steps == 0
    # The step after it is whole.
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_absent_domains_are_kept_where_one_has_come() -> None:
    weight, optimizer = made(absent="keep")
    enter(weight, optimizer, "b")
    optimizer.step()
    assert optimizer.num_steps == 1
    weight, optimizer = made(absent="error")
    enter(weight, optimizer, "b")
    with pytest.raises(RuntimeError, match=r"missing \['a', 'c'\] of"):
        optimizer.combine()


@pytest.mark.parametrize("absent", ["error", "keep"])
def test_a_dropped_step_is_no_absence(absent: Any) -> None:
    weight, optimizer = made(absent=absent)
    enter(weight, optimizer, "a")
    with pytest.raises(ZeroDivisionError), optimizer.domain("b"):
        raise ZeroDivisionError
    enter(weight, optimizer, "c")
    said = r"dropped this step's gradients; missing \['a', 'b'\]\. Call optimizer\.zero_grad\(\)"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    optimizer.zero_grad()
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("count", [0, -1.0, math.inf, math.nan, True, "1", None])
def test_what_counts_is_positive_and_finite(count: Any) -> None:
    _, optimizer = made()
    said = f"count must be positive and finite; domain 'a' has {count!r}"
    with pytest.raises(ValueError, match=said), optimizer.domain("a", count):
        pass


def test_in_one_process_counts_change_nothing() -> None:
    after = []
    for count in (1.0, 5e-324, 1e300):
        weight, optimizer = made()
        for name in "abc":
            with optimizer.domain(name, count if name == "b" else 1.0):
                weight.square().sum().backward()
        optimizer.step()
        after.append(weight.detach().clone())
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


@pytest.mark.parametrize(
    ("micro_batches", "ready"), [(1, [False, False, True]), (None, [False, False, False])]
)
def test_the_last_domain_of_a_step_combines_where_their_number_is_agreed(
    micro_batches: int | None, ready: list[bool]
) -> None:
    weight, optimizer = made(micro_batches=micro_batches)
    assert optimizer.micro_batches == micro_batches
    found = []
    for name in "abc":
        enter(weight, optimizer, name)
        found.append(weight.grad is not None)
    assert found == ready
    optimizer.step()
    assert optimizer.num_steps == 1


def test_domains_may_be_entered_in_any_order_and_often() -> None:
    weight, optimizer = made(micro_batches=2)
    enter(weight, optimizer, "abbcc")
    assert weight.grad is None
    with pytest.raises(RuntimeError, match=r"'b' has been entered micro_batches=2 times in this"):
        enter(weight, optimizer, "b")
    enter(weight, optimizer, "a")
    assert weight.grad is not None
    # And anew after the step.
    optimizer.step()
    optimizer.zero_grad()
    enter(weight, optimizer, "aabbcc")
    optimizer.step()
    assert optimizer.num_steps == 2


def test_a_step_that_is_cut_short_is_refused_or_kept() -> None:
    weight, optimizer = made(micro_batches=2)
    enter(weight, optimizer, "aabc")
    said = r"every domain micro_batches=2 times; \['b', 'c'\] were entered less often"
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    optimizer.combine()
    optimizer.step()
    assert optimizer.num_steps == 1
    weight, optimizer = made(micro_batches=2, absent="keep")
    enter(weight, optimizer, "aabc")
    optimizer.step()
    assert optimizer.num_steps == 1
    # Any number has no "less often".
    weight, optimizer = made(micro_batches=None)
    enter(weight, optimizer, "aabc")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_a_copy_has_entered_nothing() -> None:
    weight, optimizer = made()
    enter(weight, optimizer, "ab")
    other: DoGEOptimizer = pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(RuntimeError, match=r"missing \['a', 'b', 'c'\]"):
        other.step()
    enter(weight, optimizer, "c")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_a_released_optimizer_begins_anew() -> None:
    weight, optimizer = made()
    enter(weight, optimizer, "ab")
    optimizer.release()
    assert optimizer.buffer.blocks == []
    weight.sum().backward()
    assert weight.grad is not None
    weight.grad = None
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 1


# The states of a step, and what is refused in each.


def test_states_follow_each_other() -> None:
    weight, optimizer = made()
    step = optimizer._step
    assert step.state is StepState.EMPTY
    enter(weight, optimizer, "a")
    assert step.state is StepState.COLLECTED
    with pytest.raises(ZeroDivisionError), optimizer.domain("b"):
        raise ZeroDivisionError
    assert step.state is StepState.EMPTY
    enter(weight, optimizer, "b")
    assert step.state is StepState.COLLECTED
    optimizer.zero_grad()
    assert step.state is StepState.EMPTY
    enter(weight, optimizer, "abc")
    assert step.state is StepState.COMBINED
    optimizer.step()
    assert step.state is StepState.EMPTY
    optimizer.zero_grad(set_to_none=False)
    assert step.state is StepState.EMPTY
    assert weight.grad is not None
    enter(weight, optimizer, "a")
    assert step.state is StepState.COLLECTED


def test_a_domain_after_combining_is_refused_until_the_gradient_is_cleared() -> None:
    weight, optimizer = made(micro_batches=None)
    enter(weight, optimizer, "abc")
    optimizer.combine()
    with pytest.raises(RuntimeError, match=r"combine\(\) has been called in this step, so its"):
        enter(weight, optimizer, "a")
    # As a scaler's update does where it has skipped.
    weight.grad = None
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 2


def test_a_gradient_that_is_left_is_refused_unless_it_is_zeros() -> None:
    weight, optimizer = made()
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"still holds a gradient from before this domain"):
        enter(weight, optimizer, "a")
    optimizer.zero_grad(set_to_none=False)
    enter(weight, optimizer, "abc")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_a_gradient_that_no_domain_gave_is_refused_by_name() -> None:
    weight, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    inner = torch.optim.SGD([("one", weight), ("other", other)], lr=0.1)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0)
    enter(weight, optimizer, "a")
    other.grad = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"the parameter other has a p\.grad from outside the domains"
    ):
        enter(weight, optimizer, "b")


def test_a_frozen_rate_of_zero_steps_the_wrapped_optimizer_between_domains() -> None:
    """As code does that saves checkpoints."""
    weight, optimizer = made()
    enter(weight, optimizer, "a")
    weight.grad = torch.zeros(2)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = None
    enter(weight, optimizer, "bc")
    optimizer.step()
    assert optimizer.num_steps == 1


def test_names_are_known_or_listed() -> None:
    _, optimizer = made(target={"far": 1.0})
    said = r"unknown domain 'z'; the optimizer knows \['a', 'b', 'c', 'far'\]\. Name it in domains="
    with pytest.raises(ValueError, match=said), optimizer.domain("z"):
        pass


# Factors of losses.


def test_the_factor_is_the_loops_or_the_scalers_or_one() -> None:
    cpu = torch.device("cpu")
    assert loss_scale(None, None, cpu) == 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert checked_scaler(scaler) is scaler
    assert checked_scaler(None) is None
    with pytest.raises(TypeError, match=r"must be a torch\.amp\.GradScaler or None; got 8\.0"):
        checked_scaler(8.0)
    assert float(loss_scale(None, scaler, cpu)) == 8.0
    assert loss_scale(2.0, scaler, cpu) == 2.0
    # A tensor is not looked at.
    given = torch.tensor(-1.0)
    assert loss_scale(given, None, cpu) is given
    for wrong in (0.0, -1.0, math.inf, math.nan, True, "2"):
        with pytest.raises(ValueError, match=f"must be positive and finite; got {wrong!r}"):
            loss_scale(wrong, None, cpu)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [None, 0.25])
def test_a_selection_cuts_the_whole_gradient_afterwards(most: float | None) -> None:
    """The norm is that of all columns; the weights moved by those that were selected."""
    one, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    inner = torch.optim.SGD([one, other], lr=0.1)
    optimizer = DoGEOptimizer(
        inner,
        domains=["a", "b"],
        mu=1.0,
        selection=[one],
        domain_max_grad_norm=None,
        max_grad_norm=most,
    )
    for factor, name in ((1.0, "a"), (3.0, "b")):
        with optimizer.domain(name):
            (factor * one.sum() + factor * 10 * other.sum()).backward()
    last = optimizer.last
    assert last is not None
    # Of one, 2 columns: G = 2 [[1, 3], [3, 9]], W = G (1, 1).
    torch.testing.assert_close(last.gain, torch.tensor([8.0, 24.0], dtype=torch.float64))
    a, b = optimizer.alpha.tolist()
    torch.testing.assert_close(
        optimizer.alpha,
        torch.softmax(torch.tensor([0.8, 2.4], dtype=torch.float64), 0),
        rtol=1e-9,
        atol=0,
    )
    norm = math.sqrt(302) * (a + 3 * b)
    assert last.combined_norm.item() == pytest.approx(norm, rel=1e-5)
    length = math.hypot(*one.grad.tolist(), *other.grad.tolist())  # type: ignore[union-attr]
    assert length == pytest.approx(norm if most is None else most, rel=1e-5)
    assert not last.skipped
    assert last.found_inf == 0
    assert last.found_inf.dtype == torch.float32


def test_an_overflow_outside_the_selection_takes_the_move_back() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    inner = torch.optim.SGD([one, other], lr=0.1)
    optimizer = DoGEOptimizer(
        inner, domains=["a", "b"], mu=1.0, selection=[one], domain_max_grad_norm=None
    )
    for factor, name in ((1.0, "a"), (math.inf, "b")):
        with optimizer.domain(name):
            (one.sum() + factor * other.sum()).backward()
    last = optimizer.last
    assert last is not None
    assert bool(last.skipped)
    assert last.found_inf == 1
    assert last.alpha.tolist() == optimizer.alpha.tolist() == [0.5, 0.5]
    optimizer.step()
    assert (optimizer.num_steps, optimizer.num_skipped) == (0, 1)
    assert one.tolist() == [1.0, 1.0]


def test_selected_columns_are_scored_and_all_are_cut() -> None:
    """With a cut of each domain's gradient: by its norm over all columns."""
    one, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = DoGEOptimizer(
        torch.optim.SGD([one, other], lr=0.1),
        domains=["a", "b"],
        mu=1.0,
        selection=[one],
        domain_max_grad_norm=1.0,
    )
    for name in "ab":
        with optimizer.domain(name):
            (3 * one + 4 * other).sum().backward()
    last = optimizer.last
    assert last is not None
    torch.testing.assert_close(last.grad_norms, torch.tensor([5.0, 5.0]).double())
    # Cut to length 1 the selected column is 0.6: W = 0.36 + 0.36.
    torch.testing.assert_close(last.gain, torch.tensor([0.72, 0.72]).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(one.grad, torch.tensor([0.6]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_whether_a_step_is_skipped_is_sent_once_and_when_it_is_settled(
    selects: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the columns outside the selection alone overflow."""
    one, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    inner = torch.optim.SGD([one, other], lr=0.1)
    chosen = [one] if selects else None
    optimizer = DoGEOptimizer(
        inner, domains=["a", "b"], mu=1.0, selection=chosen, domain_max_grad_norm=None
    )
    sent: list[bool] = []
    monkeypatch.setattr(
        optimizer._step._flag, "send", lambda skipped, inner: sent.append(bool(skipped))
    )
    exchange = optimizer._step.exchange
    asked: dict[str, tuple[Any, ...]] = {}
    for verb in ("complete", "deliver"):
        real = getattr(exchange, verb)
        monkeypatch.setattr(
            exchange,
            verb,
            lambda *words, verb=verb, real=real: asked.update({verb: words}) or real(*words),
        )
    for name in "ab":
        with optimizer.domain(name):
            (one + value * other).sum().backward()
    assert sent == [value == math.inf]
    # What ranks would be told.
    assert asked["complete"][1] == ({id(one)} if selects else ())
    assert asked["deliver"][2] is optimizer._weights.shared_state


def test_what_counts_over_ranks_is_the_sum_over_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, optimizer = made(micro_batches=2)
    exchange = optimizer._step.exchange
    agree, reports = exchange.agree, []
    monkeypatch.setattr(
        exchange, "agree", lambda rows, report: reports.append(report) or agree(rows, report)
    )
    for name, count in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 1.0), ("b", 0.5), ("c", 1.0)):
        with optimizer.domain(name, count):
            weight.square().sum().backward()
    (report,) = reports
    assert report.counts == {"a": 4.0, "b": 2.5, "c": 2.0}
    assert report.order == ["a", "b", "a", "c", "b", "c"]


def test_zeros_of_a_parameter_that_no_domain_touches_are_no_gradient() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = DoGEOptimizer(torch.optim.SGD([one, other], lr=0.1), domains=["a", "b"], mu=1.0)
    for uses_other in (1.0, 0.0):
        for name in "ab":
            with optimizer.domain(name):
                loss = one.square().sum()
                (loss + other.square().sum() if uses_other else loss).backward()
        optimizer.step()
        assert (other.grad is not None) == bool(uses_other)
        optimizer.zero_grad(set_to_none=False)
    assert optimizer.num_steps == 2
