"""Ranks train what one process trains, in every form."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from doge_fast import DoGEOptimizer
from tests.integrations.over_ranks import (
    LOOPS,
    OPTIONS,
    UNEQUAL,
    Checkpointed,
    adamw,
    bare,
    check,
    ddp,
    ddp_views,
    examples,
    losses,
    muon_and_adamw,
    small_model,
    values,
)

ddp_unused = partial(DistributedDataParallel, find_unused_parameters=True)


def compiled_ddp(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="aot_eager")


def ddp_with_buffers(model: nn.Module) -> nn.Module:
    model.register_buffer("mean", torch.zeros(3))
    return DistributedDataParallel(model)


def checkpointed_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(Checkpointed(model))


EQUAL = {"a": 4, "b": 4}


# Two domains that are clipped to one norm never move.
UNCUT = {"domain_max_grad_norm": None}
FORMS = [
    *((2, form, UNEQUAL, {}, "") for form in (compiled_ddp, checkpointed_ddp)),
    # A rank without a domain waits for no buffers.
    (4, ddp_with_buffers, {"a": 1, "b": 2}, UNCUT, ""),
    *(
        (num_ranks, form, sizes, UNCUT, "")
        for num_ranks, sizes in (
            *((2, EQUAL), (2, UNEQUAL)),
            *((3, {"a": 4, "b": 4, "c": 4}), (4, {"a": 1, "b": 9})),
        )
        for form in (bare, ddp, ddp_views, ddp_unused)
    ),
    *((3, ddp, UNEQUAL, options, "") for options in OPTIONS.values()),
    pytest.param(2, ddp, UNEQUAL, UNCUT | {"inner": muon_and_adamw}, "", id="several optimizers"),
    *((2, ddp, sizes, options, how) for how, (sizes, options) in LOOPS.items()),
]


@pytest.mark.parametrize(("num_ranks", "wrap", "sizes", "options", "how"), FORMS)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["sequential", "stacked"])
def test_ranks_train_what_one_process_trains(
    ranks, num_ranks, wrap, sizes, options, how, is_stacked
):
    check(ranks, num_ranks, wrap, sizes, is_stacked, options, how)


def accumulated_without_sync() -> tuple[Tensor, Tensor]:
    """Parameters after two steps with no_sync() inside the domains, and an ordinary gradient."""
    rank, model = torch.distributed.get_rank(), small_model()
    wrapped = DistributedDataParallel(model)
    optimizer = DoGEOptimizer(*adamw(model), domains=["a", "b"], mu=5.0)
    for is_last_alone in (True, False):
        for name in "ab":
            with optimizer.domain(name):
                with wrapped.no_sync():
                    losses(wrapped(examples(name, rank, 2)), name).mean().backward()
                if is_last_alone:
                    losses(wrapped(examples(name, 2 + rank, 2)), name).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with wrapped.no_sync():
        with optimizer.domain("a"):
            losses(wrapped(examples("a", rank, 2)), "a").mean().backward()
        assert not wrapped.require_backward_grad_sync
    optimizer.zero_grad()
    optimizer.release()
    losses(wrapped(examples("a", rank, 2)), "a").mean().backward()
    return values(model), next(model.parameters()).grad


def test_no_sync_inside_a_domain_changes_nothing(ranks):
    """All gradients are the domains'; after that DistributedDataParallel reduces again."""
    model = small_model()
    optimizer = DoGEOptimizer(*adamw(model), domains=["a", "b"], mu=5.0, micro_batches=None)
    for parts in (range(4), range(2)):
        for name, part in itertools.product("ab", parts):
            with optimizer.domain(name):
                (losses(model(examples(name, part, 2)), name).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    (theta_N, grad), (other_N, other_grad) = ranks.run(2, accumulated_without_sync)
    torch.testing.assert_close(theta_N, values(model), rtol=0, atol=1e-13)
    assert torch.equal(theta_N, other_N)
    assert torch.equal(grad, other_grad)
