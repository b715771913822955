"""The formulas of docs/scale.md where one process can count."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.models import PAPER, num_parameters
from doge_fast import DoGEOptimizer
from doge_fast.sampling import pieces
from tests import scale
from tests.models import enter

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_page_shows_what_the_formulas_give():
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 7
    num_params = num_parameters(PAPER["684M"])
    for cells in rows:
        num_ranks, num_rows = int(cells[0]), int(cells[1])
        waiting = scale.FLOAT32 * num_params
        gram = scale.gathered_gram_bytes(num_rows, num_ranks)
        own = scale.most_rows(num_rows, num_ranks)
        memory = sum(scale.training_bytes(num_params).values()) + waiting + gram
        memory += scale.rows_bytes(num_params, own, 4)
        memory += scale.exchanged_bytes(num_params, num_rows, num_ranks, 4)
        sent = scale.data_parallel_bytes(num_params, num_rows, num_ranks, 4)
        assert cells[2].strip() == f"{memory / 1e9:.1f}"
        if num_ranks == 1:
            continue
        assert cells[3].strip() == _sent(sent, scale.ddp_bytes(num_params, num_ranks))
        shards = sum(scale.training_bytes(num_params, num_ranks).values()) + waiting / num_ranks
        # The parameters of all shards are kept between domains.
        shards += scale.FLOAT32 * num_params + gram
        shards += scale.rows_bytes(num_params, num_rows, 4) / num_ranks
        sent = scale.sharded_bytes(num_params, num_rows, num_ranks, num_rows, are_kept=True)
        plain = scale.sharded_bytes(num_params, 0, num_ranks, 1, are_kept=False)
        assert cells[4].strip() == f"{shards / 1e9:.1f}"
        assert cells[5].strip() == _sent(sent, plain)


def _sent(num_bytes: float, plain: float) -> str:
    return f"{num_bytes / 1e9:.1f} ({num_bytes / plain:.2f})"
