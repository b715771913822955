"""The formulas of docs/scale.md where one process can count."""

import pytest
import torch
from torch import nn

from doge_fast import DoGEOptimizer
from doge_fast.sampling import pieces
from tests import scale
from tests.models import enter


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 50])
def test_pieces_are_counted_as_they_are_dealt(num_rows, num_ranks):
    # So large that n pieces are equal.
    sizes = {str(row): num_ranks for row in range(num_rows)}
    dealt = [len(pieces(sizes, rank, num_ranks)) for rank in range(num_ranks)]
    assert max(dealt) == scale.most_rows(num_rows, num_ranks)
    assert sum(dealt) == scale.num_pieces(num_rows, num_ranks)


def test_one_process_holds_what_is_said():
    model = nn.Linear(256, 255, bias=False)
    num_params = model.weight.numel()
    optimizer = DoGEOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), domains=list("abcde"), mu=1.0
    )
    enter(optimizer, "abcde", lambda _: model(torch.ones(2, 256)).square().mean())
    optimizer.step()
    (state,) = optimizer.state.values()
    held = {
        "parameters": model.weight.nbytes,
        "gradients": model.weight.grad.nbytes,
        "AdamW": sum(value.nbytes for value in state.values() if value.dim()),
    }
    assert held == scale.training_bytes(num_params)
    assert optimizer.buffer.num_bytes == scale.rows_bytes(num_params, 5, 4)
    assert scale.exchanged_bytes(num_params, 5, 1, 4) == 0
    assert scale.data_parallel_bytes(num_params, 5, 1, 4) == 0
