"""A run that goes on with another number of ranks ends where it would have ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from doge_fast import DoGEOptimizer
from tests.integrations.test_several_processes import (
    Deal,
    examples,
    losses,
    shares,
    small_model,
    values,
    whole_pieces,
)
from tests.ranks import Ranks

SIZES = {"a": 4, "b": 8, "c": 4, "d": 4}
# The draw of domains goes on as well.
OPTIONS: dict[str, Any] = {"domains": list(SIZES), "mu": 5.0, "domains_per_step": 3, "seed": 5}

Pair = tuple[nn.Module, DoGEOptimizer]
Route = Callable[[Pair, Path], None]
Result = tuple[Tensor, Tensor]


def save_with_torch(pair: Pair, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save([each.state_dict() for each in pair], path / "all.pt")
    dist.barrier()


def load_with_torch(pair: Pair, path: Path) -> None:
    for each, state in zip(pair, torch.load(path / "all.pt", weights_only=True), strict=True):
        each.load_state_dict(state)


def with_dcp(options: StateDictOptions, verb: str, pair: Pair, path: Path) -> None:
    model, optimizer = get_state_dict(*pair, options=options)
    state = {"model": model, "optimizer": optimizer}
    if verb == "save":
        dcp.save(state, checkpoint_id=path)
        return
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        *pair,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def keep(how: str, verb: str, pair: Pair, path: Path) -> None:
    """Save, or load into `pair`."""
    if how == "torch":
        (save_with_torch if verb == "save" else load_with_torch)(pair, path)
    else:
        with_dcp(StateDictOptions(flatten_optimizer_state_dict=how == "flat dcp"), verb, pair, path)


def part(deal: Deal, how: str, steps: range, verb: str, path: Path | None) -> Result:
    """Some steps of a run: the parameters and the average weights after them."""
    rank, num_ranks = 0, 1
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = small_model()
    if verb == "load":
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    wrapped = model
    if num_ranks > 1 and deal is whole_pieces:
        wrapped = DistributedDataParallel(model)
    elif num_ranks > 1:
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = DoGEOptimizer(inner, **OPTIONS)
    if path is not None and verb == "load":
        keep(how, verb, (model, optimizer), path)
    for step in steps:
        sizes = {name: SIZES[name] for name in optimizer.domains_of_step}
        for name, first, last in deal(sizes, rank, num_ranks):
            with optimizer.domain(name, count=last - first):
                each = losses(wrapped(examples(name, step, SIZES[name])[first:last]), name)
                each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if path is not None and verb == "save":
        keep(how, verb, (model, optimizer), path)
    return values(model), optimizer.alpha_mean


ROUTES = [(whole_pieces, "torch"), (shares, "dcp"), (shares, "flat dcp")]
# Of ranks, before and after; equal shares of four examples need two or four.
CHANGES = {(2, 4): ROUTES, (4, 1): ROUTES, (1, 3): ROUTES[:1]}


@pytest.mark.parametrize(
    ("before", "after", "deal", "how"),
    [
        pytest.param(*change, *route, marks=() if change == (2, 4) else pytest.mark.exhaustive)
        for change, routes in CHANGES.items()
        for route in routes
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int, deal: Deal, how: str
) -> None:
    theta_N, alpha_K = part(whole_pieces, "", range(6), "", None)
    assert alpha_K.max() - alpha_K.min() > 1e-5
    ranks.run(before, part, deal, how, range(3), "save", tmp_path)
    answers = ranks.run(after, part, deal, how, range(3, 6), "load", tmp_path)
    for theirs_N, weights_K in answers:
        torch.testing.assert_close(theirs_N, theta_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights_K, alpha_K, rtol=0, atol=1e-12)
        assert torch.equal(theirs_N, answers[0][0])
        assert torch.equal(weights_K, answers[0][1])
