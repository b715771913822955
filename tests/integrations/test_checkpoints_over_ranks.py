"""A run that goes on with another number of ranks ends where it would have ended."""

from functools import partial
from typing import Any

import pytest

from tests.integrations.test_optimizer_checkpoints import FILES
from tests.integrations.test_several_processes import (
    adamw,
    assert_ranks_are,
    bare,
    ddp,
    muon_and_adamw,
    sgd_and_adamw,
    shares,
    trained,
    whole_pieces,
)
from tests.integrations.test_sharded import SIZES, sharded

# The draw of domains goes on as well.
OPTIONS: dict[str, Any] = {"domains_per_step": 3, "seed": 5}


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("before", "after", "wrap", "files", "inner"),
    [
        # Equal shares of four examples need two or four ranks.
        (2, 4, ddp, "torch", muon_and_adamw),
        (2, 4, sharded, "nested", sgd_and_adamw),
        (2, 4, sharded, "flattened", adamw),
        pytest.param(4, 1, ddp, "torch", adamw, marks=MORE),
        pytest.param(4, 1, sharded, "nested", adamw, marks=MORE),
        pytest.param(4, 1, sharded, "flattened", sgd_and_adamw, marks=MORE),
        pytest.param(1, 3, ddp, "torch", adamw, marks=MORE),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks, tmp_path, before, after, wrap, files, inner
):
    save, load = (partial(each, tmp_path) for each in FILES[files])
    deal = whole_pieces if wrap is ddp else shares
    given = (SIZES, False, OPTIONS | {"inner": inner}, "", deal)
    one = trained(bare, *given)
    # A model that is whole needs no wrapper where it is alone.
    first, second = (wrap if num_ranks > 1 else bare for num_ranks in (before, after))
    ranks.run(before, trained, first, *given, range(3), None, save)
    assert_ranks_are(one, ranks.run(after, trained, second, *given, range(3, 6), load))
