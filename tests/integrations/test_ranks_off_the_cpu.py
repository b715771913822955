"""Ranks whose gradients are taken when a domain is left, as on GPUs; here on CPU memory."""

from typing import Any
from unittest import mock

import pytest
import torch

from doge_fast.step import parameters
from tests.integrations.test_several_processes import (
    OPTIONS,
    UNEQUAL,
    bare,
    ddp,
    ddp_views,
    shares,
    trained,
    whole_pieces,
)
from tests.integrations.test_sharded import SIZES, TWICE, copies_of_shards, replicated, sharded
from tests.ranks import Ranks


def trained_off_the_cpu(*given: Any) -> tuple[torch.Tensor, ...]:
    """`trained` as it runs elsewhere than on a CPU."""
    with mock.patch.object(parameters, "takes_at_once", return_value=False):
        return trained(*given)


CLIPS, TWO = OPTIONS["clips"], {"micro_batches": 2}
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("num_ranks", "given"),
    [
        pytest.param(2, (ddp, UNEQUAL, False, CLIPS, "", whole_pieces), id="ddp"),
        pytest.param(2, (ddp_views, TWICE, False, TWO, "halves", whole_pieces), id="views"),
        pytest.param(3, (ddp, UNEQUAL, True, CLIPS, "", whole_pieces), id="stacked", marks=MORE),
        pytest.param(2, (sharded, SIZES, False, CLIPS, "", shares), id="shards"),
        pytest.param(2, (sharded, TWICE, False, TWO, "halves", shares), id="halves", marks=MORE),
        pytest.param(2, (replicated, SIZES, False, CLIPS, "", shares), id="whole", marks=MORE),
        pytest.param(
            4, (copies_of_shards, SIZES, False, CLIPS, "", shares), id="copies", marks=MORE
        ),
    ],
)
def test_ranks_train_what_one_process_trains(
    ranks: Ranks, num_ranks: int, given: tuple[Any, ...]
) -> None:
    _, sizes, _, *rest = given
    one = trained(bare, sizes, False, *rest[:2])
    answers = ranks.run(num_ranks, trained_off_the_cpu, *given)
    for found in answers:
        for value, expected, first in zip(found, one, answers[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
            assert torch.equal(value, first)
