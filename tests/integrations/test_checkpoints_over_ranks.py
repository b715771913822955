"""A run that goes on with another number of ranks ends where it would have ended."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from doge_fast import DoGEOptimizer
from tests.integrations.test_several_processes import bare, ddp, shares, trained, whole_pieces
from tests.integrations.test_sharded import SIZES, sharded
from tests.ranks import Ranks

# The draw of domains goes on as well.
OPTIONS: dict[str, Any] = {"domains_per_step": 3, "seed": 5}


def save_with_torch(path: Path, *pair: Any) -> None:
    if dist.get_rank() == 0:
        torch.save([each.state_dict() for each in pair], path / "all.pt")
    dist.barrier()


def load_with_torch(path: Path, *pair: Any) -> None:
    for each, state in zip(pair, torch.load(path / "all.pt", weights_only=True), strict=True):
        each.load_state_dict(state)


def with_dcp(
    verb: str, is_flat: bool, path: Path, model: nn.Module, optimizer: DoGEOptimizer
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    names = ("model_state_dict", "optim_state_dict")
    state = dict(zip(names, get_state_dict(model, optimizer, options=options), strict=True))
    if verb == "save":
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, **state, options=options)


TORCH = (save_with_torch, load_with_torch)
NESTED = (partial(with_dcp, "save", False), partial(with_dcp, "load", False))
FLAT = (partial(with_dcp, "save", True), partial(with_dcp, "load", True))
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("before", "after", "wrap", "route"),
    [
        # Equal shares of four examples need two or four ranks.
        pytest.param(2, 4, ddp, TORCH, id="torch"),
        pytest.param(2, 4, sharded, NESTED, id="nested"),
        pytest.param(2, 4, sharded, FLAT, id="flat"),
        pytest.param(4, 1, ddp, TORCH, id="torch, to one", marks=MORE),
        pytest.param(4, 1, sharded, NESTED, id="nested, to one", marks=MORE),
        pytest.param(4, 1, sharded, FLAT, id="flat, to one", marks=MORE),
        pytest.param(1, 3, ddp, TORCH, id="torch, from one", marks=MORE),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int, wrap: Any, route: Any
) -> None:
    save, load = (partial(each, tmp_path) for each in route)
    deal = whole_pieces if wrap is ddp else shares
    given = (SIZES, False, OPTIONS, "", deal)
    one = trained(bare, *given)
    assert one[1].max() - one[1].min() > 1e-5
    # A model that is whole needs no wrapper where it is alone.
    first, second = (wrap if num_ranks > 1 else bare for num_ranks in (before, after))
    ranks.run(before, trained, first, *given, range(3), None, save)
    answers = ranks.run(after, trained, second, *given, range(3, 6), load)
    for found in answers:
        for value, expected, same in zip(found, one, answers[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
            assert torch.equal(value, same)
