"""An unbiased score where its parts meet other options."""

import pytest
import torch

from doge_fast.generalization import Score
from tests.method.test_unbiased_score import (
    NAMES,
    TO_ROUNDING,
    half_gradients,
    model_of,
    optimizer_of,
    run_by_halves,
)


def test_a_negative_difficulty_is_no_overflow() -> None:
    """Columns are selected and no row is cut: norms come from the columns that enter W."""
    model = model_of()
    options = {"selection": ["2.weight"], "domain_max_grad_norm": None}
    optimizer = optimizer_of(model, score=Score(is_unbiased=True), **options)
    lowest = 0.0
    for step in range(12):
        norms_K = [
            torch.stack(half_gradients(model, name, step)).sum(0)[30:55].norm() for name in NAMES
        ]
        run_by_halves(optimizer, model, step)
        last = optimizer.last
        assert last is not None
        torch.testing.assert_close(last.grad_norms, torch.stack(norms_K), **TO_ROUNDING)
        lowest = min(lowest, float(last.difficulty.min()))
        optimizer.step()
        optimizer.zero_grad()
    assert lowest < 0
    assert optimizer.num_skipped == 0


def test_an_unbiased_score_has_no_mean_norm() -> None:
    with pytest.raises(ValueError, match="cannot both be is_unbiased and scale_by_mean_norm"):
        Score(is_unbiased=True, scale_by_mean_norm=True)
