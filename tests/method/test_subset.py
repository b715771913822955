"""Few of many domains in a step: what is drawn, what is estimated, what is kept."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from doge_fast.flat_buffer import ALIGNMENT
from doge_fast.weights.objective import Objective
from doge_fast.weights.subset import Subset
from tests.models import enter, take_step

K, S, WIDTH = 5, 3, 6
NAMES = [f"d{j}" for j in range(K)]


def model_of(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double()


def optimizer_of(model: nn.Module, names: list[str] = NAMES, **options: Any) -> DoGEOptimizer:
    usual = {"domains_per_step": S, "mu": 0.1, "domain_max_grad_norm": None}
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return DoGEOptimizer(inner, domains=names, **(usual | options))


def loss_of(model: nn.Module, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(int(name[1:]))
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def fill(optimizer: DoGEOptimizer, model: nn.Module, *names: str) -> None:
    enter(optimizer, names, lambda name: loss_of(model, name))


def run_step(optimizer: DoGEOptimizer, model: nn.Module, *targets: str) -> None:
    names = (*optimizer.domains_of_step, *targets)
    take_step(optimizer, names, lambda name: loss_of(model, name))


def test_draws_are_a_function_of_seed_and_number_and_even():
    subset = Subset(Objective.of(NAMES), S, 7)
    drawn = []
    for number in range(3000):
        subset.draw(number)
        drawn.append(subset.domains)
        assert len(set(subset.domains)) == S
        assert list(subset.domains) == sorted(subset.domains)
    again = Subset(Objective.of(NAMES), S, 7)
    again.draw(41)
    assert again.domains == drawn[41]
    assert len(Counter(drawn)) == 10
    # Of 3000 draws every triple is 300; five standard deviations.
    for count in Counter(drawn).values():
        assert abs(count - 300) < 5 * (3000 * 0.1 * 0.9) ** 0.5
    other = Subset(Objective.of(NAMES), S, 8)
    assert any(other.draw(number) or other.domains != drawn[number] for number in range(10))


@pytest.mark.parametrize("target", ["universal", {"d1": 0.5, "d4": 2.0, "d9": 1.5}], ids=str)
def test_the_rows_of_a_step_are_those_of_its_domains(target):
    """In `p.grad` too; tests/operators/test_reweight.py has what is estimated over all draws."""
    model = model_of()
    objective = Objective.of(NAMES, target)
    params = list(model.parameters())
    grads = [torch.autograd.grad(loss_of(model, name), params) for name in objective.names]
    grads_RN = torch.stack([torch.cat([g.flatten() for g in parts]) for parts in grads])
    optimizer = optimizer_of(model, target=target, max_grad_norm=0.01)
    names = (*optimizer.domains_of_step, *objective.measured)
    fill(optimizer, model, *names)
    optimizer.combine()
    there = [objective.names.index(name) for name in names]
    rows_BN = grads_RN[there]
    torch.testing.assert_close(optimizer.last.gram[there][:, there], rows_BN @ rows_BN.T)
    combined_N = torch.cat([p.grad.flatten() for p in params])
    torch.testing.assert_close(optimizer.last.coefficients @ rows_BN, combined_N)
    # The norm that is clipped is that of the estimate for all domains.
    assert combined_N.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_draw_stays_until_the_step_is_taken():
    model = model_of()
    optimizer = optimizer_of(model)
    drawn = optimizer.domains_of_step
    fill(optimizer, model, drawn[0])
    optimizer.zero_grad()
    for _ in range(2):
        fill(optimizer, model, *drawn)
        optimizer.combine()
        model.zero_grad()
    assert optimizer.domains_of_step == drawn
    state = optimizer.state_dict()
    run_step(optimizer, model)
    assert optimizer._step.subset.draws == 1
    assert optimizer.domains_of_step != drawn
    optimizer.load_state_dict(state)
    assert optimizer.domains_of_step == drawn
    # Of a loop that steps the wrapped optimizer alone every step would have this draw.
    fill(optimizer, model, *drawn)
    optimizer._inner.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="draws the next ones"), optimizer.domain(drawn[0]):
        pass
    # Once: it goes on with this draw. A step without gradients, as of a checkpoint, is none.
    fill(optimizer, model, *drawn)
    optimizer.zero_grad()
    optimizer._inner.step()
    run_step(optimizer, model)


def test_memory_is_that_of_the_domains_in_the_step():
    """512 domains, one of them in a step, and one measured target: two rows."""
    names = [f"d{j}" for j in range(512)]
    model = model_of()
    optimizer = optimizer_of(model, names, domains_per_step=1, target={"d512": 1.0})
    for _ in range(3):
        run_step(optimizer, model, "d512")
    padded = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in model.parameters()]
    assert optimizer.buffer.num_bytes == 2 * 8 * sum(padded)
    assert optimizer.last.gram.shape == (513, 513)
    assert int(optimizer.last.gram.diagonal().count_nonzero()) == 2
    assert float(optimizer.alpha.sum()) == pytest.approx(1)
    assert optimizer.num_steps == 3


def test_a_domain_that_was_not_drawn_is_refused():
    model = model_of()
    optimizer = optimizer_of(model)
    left_out = next(name for name in NAMES if name not in optimizer.domains_of_step)
    sizes = {left_out: 2, optimizer.domains_of_step[0]: 1}
    for entered in (optimizer.domain(left_out), optimizer.stacked(model, sizes)):
        with pytest.raises(ValueError, match=f"{left_out}.* none of this step's"), entered:
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains_per_step": 1}, "between 2 and the 5"),
        ({"domains_per_step": 6}, "between 2 and the 5"),
        ({"domains_per_step": 0, "target": "far"}, "between 1 and the 5"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(model_of(), **options)
