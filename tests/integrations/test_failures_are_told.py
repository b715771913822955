"""What the optimizer refuses on one rank is heard by the others, and nobody waits."""

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from doge_fast import DoGEOptimizer
from tests.integrations.test_ranks_that_differ import built, enter, own, raised, values
from tests.ranks import Ranks


def refused(how: str) -> tuple[str, Tensor]:
    """Rank 1 is refused in the first try; both then run the step again."""
    rank = dist.get_rank()
    model, optimizer = built(**({"micro_batches": 2} if how == "too few times" else {}))
    if rank == 1 and how == "a count of zero":
        said = raised(lambda: optimizer.domain("b", count=0).__enter__())
    elif rank == 1 and how == "an unknown name":
        said = raised(lambda: optimizer.domain("nobody").__enter__())
    elif rank == 1 and how == "outside of domains":
        next(model.parameters()).sum().backward()
        said = raised(optimizer.step)
    else:
        for _ in range(1 + (how == "too few times" and rank == 0)):
            enter(model, optimizer, own(rank))
        if rank == 1 and how == "too often":
            said = raised(lambda: enter(model, optimizer, own(rank)))
        else:
            said = raised(optimizer.step)
    optimizer.zero_grad()
    for _ in range(optimizer.micro_batches or 1):
        enter(model, optimizer, own(rank))
    optimizer.step()
    return said, values(model)


@pytest.mark.parametrize(
    "how",
    ["a count of zero", "an unknown name", "too often", "too few times", "outside of domains"],
)
def test_what_is_refused_on_one_rank_is_heard_by_the_others(ranks: Ranks, how: str) -> None:
    (said, theta_N), (_, other_N) = ranks.run(2, refused, how)
    assert said.startswith("this step was dropped on all ranks, since rank 1 raised")
    assert torch.equal(theta_N, other_N)


def zeroed() -> tuple[Tensor, float]:
    """A parameter that no domain touches, on a rank without a domain; and one that is frozen."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    params = nn.ParameterList([nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))])
    inner = torch.optim.AdamW(params.parameters(), lr=0.1, weight_decay=0.0)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0)

    def step(names: str, used: list[nn.Parameter]) -> None:
        for name in names:
            with optimizer.domain(name):
                sum((param * torch.arange(1.0, 5.0)).sum() for param in used).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step("ab"[rank], list(params))
    step("" if rank else "ab", [params[0]])
    theta_N = torch.cat([param.detach() for param in params])
    step("ab"[rank], list(params))
    before = params[0].detach().clone()
    params[0].requires_grad_(False)
    step("ab"[rank], [params[1]])
    step("ab"[rank], [params[1]])
    return theta_N, float((params[0] - before).abs().max())


def test_zeros_that_are_left_step_nothing(ranks: Ranks) -> None:
    (theta_N, moved), (other_N, _) = ranks.run(2, zeroed)
    assert torch.equal(theta_N, other_N)
    assert moved == 0
