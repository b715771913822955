"""Losses and the gradients of logits, in every implementation, against autograd in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.kernels import cross_entropy
from doge_fast.kernels.triton_support import is_interpreted
from tests.laws import assert_torch_knows

OPERATOR = "cross_entropy"
pytestmark = pytest.mark.usefixtures("nan_memory")

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Problem:
    """Rows of logits; a name for each kind of difficulty."""

    num_tokens: int = 5
    width: int = 40
    dtype: torch.dtype = FLOAT32
    scale: float = 3.0
    padding: int = 0
    """Columns between rows."""
    offset: float = 0.0

    def arguments(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """logits, targets of which the second is ignored, shares of both signs."""
        memory = torch.randn(self.num_tokens, self.width + self.padding, device=device)
        logits_TV = (memory * self.scale + self.offset).to(self.dtype)[:, : self.width]
        targets_T = torch.randint(self.width, (self.num_tokens,), device=device)
        targets_T[1:2] = -100
        wide = FLOAT64 if self.dtype == FLOAT64 else FLOAT32
        return logits_TV, targets_T, torch.randn(self.num_tokens, device=device, dtype=wide)


PROBLEMS = {
    "float32": Problem(),
    "bfloat16": Problem(dtype=BFLOAT16),
    "float16": Problem(dtype=FLOAT16),
    "float64": Problem(dtype=FLOAT64),
    "several blocks": Problem(3, 20_001),
    "several blocks of 16 bits": Problem(3, 20_001, BFLOAT16),
    "padded rows": Problem(padding=24, dtype=BFLOAT16),
    "one word": Problem(3, 1),
    "one token": Problem(1, 17),
    "far from zero": Problem(offset=1e4),
    "certain": Problem(scale=300.0),
    "no tokens": Problem(0),
}


def exact(logits_TV: Tensor, targets_T: Tensor, shares_T: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 losses and gradients, by torch."""
    wide_TV = logits_TV.double().requires_grad_()
    losses_T = F.cross_entropy(wide_TV, targets_T, reduction="none", ignore_index=-100)
    (gradient_TV,) = torch.autograd.grad((losses_T * shares_T.double()).sum(), wide_TV)
    return losses_T.detach(), gradient_TV


@pytest.mark.parametrize("name", PROBLEMS)
def test_losses_and_gradients_are_those_of_autograd(name, implementation, device):
    """With the same bits in the next call, and nothing beside them."""
    logits_TV, targets_T, shares_T = PROBLEMS[name].arguments(device)
    losses_T, gradient_TV = exact(logits_TV, targets_T, shares_T)
    before = logits_TV.clone()
    beside = logits_TV._base[:, logits_TV.shape[1] :].clone()
    alone_T = cross_entropy(logits_TV, targets_T, implementation=implementation)
    assert torch.equal(logits_TV, before)
    found_T = cross_entropy(logits_TV, targets_T, shares_T, implementation=implementation)
    assert torch.equal(found_T, alone_T)
    assert torch.equal(logits_TV._base[:, logits_TV.shape[1] :], beside)
    again = before
    cross_entropy(again, targets_T, shares_T, implementation=implementation)
    assert torch.equal(again, logits_TV)
    if not len(losses_T):
        return
    assert found_T.dtype == shares_T.dtype
    # An exponent is rounded to a unit of the largest difference of two logits, and by as much its
    # exponential; sums lose a unit for each of a few steps.
    eps = torch.finfo(found_T.dtype).eps
    span = float(PROBLEMS[name].scale * 10 + 16)
    slack = 2 * span * eps
    assert (found_T.double() - losses_T).abs().max() <= slack * (1 + losses_T.abs().max())
    stored = torch.finfo(logits_TV.dtype).eps / 2
    if implementation == "triton" and is_interpreted():
        # The interpreter cuts bits off where it narrows, by less than one unit.
        stored *= 2
    error_TV = (logits_TV.double() - gradient_TV).abs()
    bound_TV = stored * gradient_TV.abs() + slack * shares_T.double().abs()[:, None]
    # float16 has no numbers below this.
    assert (error_TV <= bound_TV + torch.finfo(logits_TV.dtype).smallest_normal).all()
    assert not logits_TV[1:2].any()
    assert not found_T[1:2].any()


def test_words_that_are_masked_away_have_no_gradient(implementation, device):
    """Also where all of a block is minus infinity."""
    logits_TV = torch.randn(2, 9000, device=device)
    logits_TV[:, :8500] = -math.inf
    targets_T = torch.tensor([8600, 8999], device=device)
    arguments = targets_T, torch.ones(2, device=device)
    losses_T, gradient_TV = exact(logits_TV, *arguments)
    found_T = cross_entropy(logits_TV, *arguments, implementation=implementation)
    torch.testing.assert_close(found_T.double(), losses_T, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits_TV.double(), gradient_TV, rtol=1e-5, atol=1e-7)
    assert not logits_TV[:, :8500].any()


def test_a_logit_that_is_not_a_number_stays_in_its_row(implementation, device):
    logits_TV = torch.zeros(3, 5, device=device)
    logits_TV[1, 2] = math.nan
    arguments = torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    losses_T = cross_entropy(logits_TV, *arguments, implementation=implementation)
    assert losses_T.isnan().tolist() == [False, True, False]
    assert logits_TV.isnan().all(1).tolist() == [False, True, False]


def test_gradients_of_a_row_add_up_to_nothing_and_grow_with_the_share(implementation, device):
    logits_TV = torch.randn(4, 30, device=device, dtype=FLOAT64)
    targets_T = torch.arange(4, device=device)
    twice_TV = logits_TV.clone()
    shares_T = torch.rand(4, device=device, dtype=FLOAT64)
    cross_entropy(logits_TV, targets_T, shares_T, implementation=implementation)
    cross_entropy(twice_TV, targets_T, 2 * shares_T, implementation=implementation)
    assert logits_TV.sum(1).abs().max() <= 30 * torch.finfo(FLOAT64).eps
    assert torch.equal(twice_TV, 2 * logits_TV)


@pytest.mark.parametrize("name", ["bfloat16", "padded rows"])
def test_torch_knows_it(name, implementation, device):
    arguments = PROBLEMS[name].arguments(device)
    assert_torch_knows("cross_entropy", arguments, implementation, changed=arguments[0])
    assert_torch_knows("cross_entropy", (*arguments[:2], None), implementation)
