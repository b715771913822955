"""The aligned rule on several ranks gives what one process gives, when the halves are the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from doge_fast.losses import domain_losses
from tests.integrations.over_ranks import (
    Wrap,
    adamw,
    assert_ranks_are,
    bare,
    ddp,
    examples,
    losses,
    muon_and_adamw,
    sharded,
    small_model,
    values,
)

# "d" is held out. The weights move in the last six steps.
NAMES, STEPS, SIZE = "abcd", 26, 8
INNER = {"adamw": adamw, "muon and adamw": muon_and_adamw}


def trained(
    wrap: Wrap,
    inner: str,
    halves: tuple[tuple[int, ...], ...],
    selection: Sequence[str] | None = None,
) -> tuple[Tensor, ...]:
    """As `over_ranks.trained`; `halves` are those that each rank runs, in its order."""
    rank, num_ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = halves[rank]
    # The ranks that share a half of the examples.
    sharing = [r for r in range(num_ranks) if mine and mine[0] in halves[r]]
    model = small_model()
    wrapped = wrap(model)
    optimizer = DoGEOptimizer(
        INNER[inner](model),
        domains=list("abc"),
        target={"d": 1.0, "a": 0.2},
        score="aligned",
        micro_batches=len(halves[0]),
        selection=selection,
    )
    for step in range(STEPS):
        for half in mine:
            for name in NAMES:
                whole = examples(name, step, SIZE).chunk(2)[half]
                part = whole.chunk(len(sharing))[sharing.index(rank)]
                with optimizer.domain(name):
                    (losses(wrapped(part), name).mean() / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), optimizer.alpha_mean, optimizer.last.combined_norm


@pytest.mark.parametrize(
    ("wrap", "inner", "halves"),
    [
        # A data-parallel rank's first gradient goes to another half than that of the rank before.
        pytest.param(ddp, "adamw", ((0, 1), (1, 0)), id="ranks"),
        pytest.param(ddp, "muon and adamw", ((0, 1), (1, 0)), id="several optimizers"),
        pytest.param(ddp, "adamw", ((0,), (1,)), id="a half on each rank"),
        # Both would give the first half.
        pytest.param(ddp, "adamw", ((0,), (), (1,)), id="two ranks of one parity"),
        pytest.param(sharded, "adamw", ((0, 1), (0, 1)), id="shards"),
    ],
)
def test_ranks_align_as_one_process(ranks, wrap, inner, halves):
    one = trained(bare, inner, ((0, 1),))
    assert_ranks_are(one, ranks.run(len(halves), trained, wrap, inner, halves))


@pytest.mark.parametrize(
    ("wrap", "halves"),
    [
        pytest.param(ddp, ((0, 1), (1, 0)), id="ranks"),
        pytest.param(sharded, ((0, 1), (0, 1)), id="shards"),
    ],
)
def test_ranks_align_by_the_gradients_of_a_selection(ranks, wrap, halves):
    """One process is held to the reference in `tests/method/test_aligned.py`."""
    selection = ["0.weight", "3.bias"]
    one = trained(bare, "adamw", ((0, 1),), selection)
    assert_ranks_are(one, ranks.run(len(halves), trained, wrap, "adamw", halves, selection))
    # The rule without a selection goes another way.
    assert (one[1] - trained(bare, "adamw", ((0, 1),))[1]).abs().max() > 1e-5


def products_and_squares() -> tuple[Tensor, Tensor]:
    """Of examples that differ in their number of targets alone."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()
    optimizer = DoGEOptimizer(
        torch.optim.SGD(model.parameters()), domains=["a", "b"], score="aligned"
    )
    # The second rank has one example of b, in one piece.
    sizes = {"a": 2, "b": 2 - rank}
    ids = torch.repeat_interleave(torch.tensor([*sizes.values()]))[:, None].expand(-1, 11)
    labels = ids.clone()
    labels[0, 3 + 4 * rank :] = -100
    with optimizer.stacked(model, sizes):
        domain_losses(model(ids), labels, sizes).sum().backward()
    optimizer.step()
    assert optimizer.last is not None
    return optimizer.last.gram.diagonal(), optimizer.last.grad_norms**2


def test_halves_of_ranks_weigh_as_their_losses_do(ranks):
    for products, squares in ranks.run(2, products_and_squares):
        torch.testing.assert_close(products, squares, rtol=1e-13, atol=0)
