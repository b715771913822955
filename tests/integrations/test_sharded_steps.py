"""Ranks that each step their columns: as one process, with a share of the optimizer's state."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from doge_fast import DoGEOptimizer
from doge_fast.distributed import sharded_step
from doge_fast.sampling import pieces
from tests.integrations.test_ranks_that_differ import raised
from tests.integrations.test_rows_that_travel_ahead import replaced
from tests.integrations.test_several_processes import examples, losses
from tests.ranks import Ranks

SIZES = {"a": 5, "b": 1, "c": 2, "d": 4}
STEPS = 10


class Scaled(nn.Module):
    """Layers of two groups, a number, and a head that not all steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(3, 40), nn.Tanh(), nn.LayerNorm(40))
        self.body = nn.Sequential(*layers).double()
        self.factor = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.heads = nn.ModuleList(nn.Linear(40, 2).double() for _ in range(2))

    def forward(self, x: Tensor, num_heads: int) -> Tensor:
        hidden = self.factor * self.body(x)
        return torch.stack([head(hidden) for head in self.heads[:num_heads]]).sum(0)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


Make = Callable[[Any], torch.optim.Optimizer]


def built(make: Make, is_sharded: bool, **options: Any) -> tuple[Scaled, DoGEOptimizer]:
    model = Scaled()
    body = {id(param) for param in model.body.parameters()}
    groups = [
        {"params": list(model.body.parameters()), "lr": 0.02, "weight_decay": 0.0},
        {"params": [param for param in model.parameters() if id(param) not in body]},
    ]
    arguments = {"domains": list(SIZES), "mu": 5.0, "shard_optimizer": is_sharded} | options
    return model, DoGEOptimizer(make(groups), **arguments)


def step(model: nn.Module, optimizer: DoGEOptimizer, number: int) -> None:
    """One step; the second head begins to train with the third and pauses in the sixth."""
    rank, num_ranks = 0, 1
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_heads = 2 if number >= 3 and number != 6 else 1
    for name, (first, last) in pieces(SIZES, rank, num_ranks).items():
        x = examples(name, number, SIZES[name])[first:last]
        with optimizer.domain(name, count=last - first):
            losses(model(x, num_heads), name).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def trained(
    make: Make, is_sharded: bool, is_wrapped: bool, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int]:
    """Parameters, weights, and elements of the optimizer's state."""
    model, optimizer = built(make, is_sharded, **options)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if is_wrapped else model
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner, 3, 0.5)
    # Pieces stay as they are when other parameters are touched.
    with replaced(dist, "all_gather_object", None):
        for number in range(STEPS):
            step(wrapped, optimizer, number)
            scheduler.step()
            if is_sharded:
                assert all(param.grad is None for param in model.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 5]
    return values(model), optimizer.alpha_mean, elements_of(optimizer)


def elements_of(optimizer: DoGEOptimizer) -> int:
    """Of the state on this rank, single numbers left out."""
    states = optimizer.state.values()
    return sum(v.numel() for state in states for v in state.values() if v is not None and v.dim())


@pytest.mark.parametrize(
    ("num_ranks", "make", "is_wrapped", "options"),
    [
        (2, adamw, False, {}),
        (3, adamw, True, {"max_grad_norm": 0.1}),
        (4, adamw, False, {"selection": None, "domain_max_grad_norm": 0.2}),
        (2, sgd, True, {}),
        (4, sgd, False, {"max_grad_norm": 0.1, "micro_batches": None}),
    ],
)
def test_ranks_step_what_one_process_steps(
    ranks: Ranks, num_ranks: int, make: Make, is_wrapped: bool, options: Mapping[str, Any]
) -> None:
    theta_N, alpha_K, num_elements = trained(make, False, False, options)
    answers = ranks.run(num_ranks, trained, make, True, is_wrapped, options)
    for theirs_N, weights_K, _ in answers:
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights_K, alpha_K, rtol=0, atol=1e-12)
        assert torch.equal(theirs_N, answers[0][0])
    # The second group's number is one of the state's numbers without a dimension.
    assert sum(elements for _, _, elements in answers) == num_elements
    assert max(elements for _, _, elements in answers) <= num_elements / num_ranks + 2 * 64


def changing(is_sharded: bool) -> tuple[Tensor, dict[str, Any]]:
    """A layer is frozen for two steps, and the second head comes with the third."""
    model = Scaled()
    late = list(model.heads[1].parameters())
    early = [param for param in model.parameters() if all(param is not each for each in late)]
    inner = torch.optim.AdamW(early, lr=0.02)
    optimizer = DoGEOptimizer(
        inner, domains=list(SIZES), mu=5.0, shard_optimizer=is_sharded, max_grad_norm=0.5
    )
    for number in range(8):
        if number == 3:
            optimizer.add_param_group({"params": late, "lr": 0.01})
        model.body[0].weight.requires_grad_(number not in (4, 5))
        step(model, optimizer, number)
    return values(model), copy.deepcopy(optimizer.state_dict()["state"])


def test_parameters_may_be_frozen_and_added(ranks: Ranks) -> None:
    theta_N, state = changing(False)
    for theirs_N, theirs in ranks.run(3, changing, True):
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(theirs, state, rtol=0, atol=1e-12)


def clipped_by_selection() -> Tensor:
    """A selection leaves columns out, so that the combined gradient's norm is summed over ranks."""
    model = Scaled()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = DoGEOptimizer(
        inner,
        domains=list(SIZES),
        mu=5.0,
        selection=["body.0.weight"],
        domain_max_grad_norm=None,
        max_grad_norm=0.1,
        shard_optimizer=True,
    )
    for number in range(3):
        step(model, optimizer, number)
    return values(model)


def test_the_norm_is_that_of_all_columns(ranks: Ranks) -> None:
    theta_N = clipped_by_selection()
    for theirs_N in ranks.run(3, clipped_by_selection):
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)


def part_of_a_run(
    first: int, last: int, is_sharded: bool, state: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps from a state to the next; both as `state_dict` has them."""
    model, optimizer = built(adamw, is_sharded)
    if state is not None:
        # Tensors come to the ranks in memory that they share.
        state = copy.deepcopy(state)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for number in range(first, last):
        step(model, optimizer, number)
    if is_sharded and dist.is_initialized():
        # Of two momenta; the state that was loaded is gone.
        share = 2 * values(model).numel() / dist.get_world_size()
        assert elements_of(optimizer) <= share + 2 * 64
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def test_states_are_those_of_parameters_and_fit_any_number_of_ranks(ranks: Ranks) -> None:
    expected = part_of_a_run(0, 8, False, None)
    state = part_of_a_run(0, 2, False, None)
    for first, last, num_ranks in ((2, 4, 2), (4, 6, 4), (6, 7, 3)):
        answers = ranks.run(num_ranks, part_of_a_run, first, last, True, state)
        state = answers[0]
        for other in answers[1:]:
            compare(other, state, 0.0)
    found = part_of_a_run(7, 8, False, state)
    compare(found, expected, 1e-12)


def compare(found: Any, expected: Any, tolerance: float) -> None:
    """The tensors of two models and of two optimizers."""
    for one, other in ((found[0], expected[0]), (found[1]["state"], expected[1]["state"])):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    ours, theirs = (each[1]["doge"] for each in (found, expected))
    for name in ("alpha", "alpha_mean", "gain"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance)


def with_nan() -> tuple[int, bool, bool]:
    model, optimizer = built(adamw, True)
    step(model, optimizer, 0)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    with optimizer.domain("abcd"[dist.get_rank()]):
        factor = float("nan") if dist.get_rank() else 1.0
        (factor * model(examples("a", 0, 2), 1).sum()).backward()
    with optimizer.domain("abcd"[2 + dist.get_rank()]):
        model(examples("a", 0, 2), 1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = optimizer.state_dict()["state"]
    torch.testing.assert_close(after, state, rtol=0, atol=0)
    is_kept = torch.equal(values(model), before)
    step(model, optimizer, 1)
    return optimizer.num_skipped, is_kept, bool(values(model).isfinite().all())


def test_a_step_may_be_skipped(ranks: Ranks) -> None:
    assert ranks.run(2, with_nan) == [(1, True, True)] * 2


def bytes_of() -> tuple[int, int]:
    """Bytes of parameters that this rank has sent in a step, and those of the model."""
    torch.manual_seed(0)
    model = nn.Linear(96, 96, bias=False)
    optimizer = DoGEOptimizer(
        torch.optim.AdamW(model.parameters()), domains=["a", "b"], mu=1.0, shard_optimizer=True
    )
    sent = 0
    all_gather = sharded_step.all_gather

    def count(there: Tensor, here: Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += here.nbytes * (dist.get_world_size() - 1)
        return all_gather(there, here, **options)

    sharded_step.all_gather = count
    try:
        with optimizer.domain("ab"[dist.get_rank()]):
            model(torch.randn(2, 96)).square().mean().backward()
        optimizer.step()
    finally:
        sharded_step.all_gather = all_gather
    return sent, model.weight.nbytes


def test_parameters_are_gathered_once(ranks: Ranks) -> None:
    for sent, num_bytes in ranks.run(2, bytes_of):
        assert sent == num_bytes / 2


def test_what_cannot_be_cut_is_refused() -> None:
    matrix = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="Adafactor looks at the shapes of parameters"):
        DoGEOptimizer(torch.optim.Adafactor([matrix]), domains=["a"], mu=1.0, shard_optimizer=True)
    with pytest.raises(ValueError, match=r"GradScaler reads p\.grad"):
        DoGEOptimizer(
            torch.optim.SGD([matrix], lr=0.1),
            domains=["a"],
            mu=1.0,
            scaler=torch.amp.GradScaler("cpu"),
            shard_optimizer=True,
        )


def misused() -> list[str]:
    model, optimizer = built(adamw, True)
    step(model, optimizer, 0)
    said = [raised(lambda: copy.deepcopy(optimizer))]
    with optimizer.domain("abcd"[dist.get_rank()]):
        model(examples("a", 0, 2), 1).sum().backward()
    with optimizer.domain("abcd"[2 + dist.get_rank()]):
        model(examples("a", 0, 2), 1).sum().backward()
    optimizer.combine()
    said.append(raised(lambda: optimizer.domain("a").__enter__()))
    optimizer.zero_grad()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return [*said, raised(optimizer.step)]


def test_what_would_be_lost_is_refused(ranks: Ranks) -> None:
    for copied, entered, given in ranks.run(2, misused):
        assert copied.startswith("an optimizer with shard_optimizer=True cannot be copied")
        assert "micro_batches=1 times in this step" in entered
        assert given.startswith("with shard_optimizer=True a gradient from outside the domains")


def saved_on_one_rank() -> str:
    """Rank 0 saves as with whole parameters, while the other goes on."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = DoGEOptimizer(
        adamw(model.parameters()), domains=["a", "b"], mu=5.0, shard_optimizer=True
    )

    def step() -> None:
        with optimizer.domain("ab"[rank]):
            model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return raised(step if rank else optimizer.state_dict)


def test_a_state_that_one_rank_reads_is_refused_on_all(ranks: Ranks) -> None:
    one, other = ranks.run(2, saved_on_one_rank)
    assert one == other
    assert "and only rank 0 called it. Call it on all ranks" in one
