"""One mean loss per domain, whatever the batch holds."""

import pytest
import torch
from torch.nn import functional as F

from doge_fast.losses import IGNORED, domain_losses

SIZES = {"a": 2, "nobody": 0, "b": 3}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    logits_BLV = torch.randn(5, 6, 11, dtype=torch.float64, requires_grad=True)
    return logits_BLV, torch.randint(11, (5, 6))


def test_each_domain_has_its_own_mean() -> None:
    logits_BLV, labels_BL = batch()
    labels_BL[0, 2:] = IGNORED
    losses = domain_losses(logits_BLV, labels_BL, SIZES)
    expected = torch.stack(
        [
            F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            for logits, labels in zip(
                logits_BLV.split([2, 3]), labels_BL.split([2, 3]), strict=True
            )
        ]
    )
    torch.testing.assert_close(losses, expected)


def test_micro_batches_add_up_to_the_mean_of_the_step() -> None:
    logits_BLV, labels_BL = batch()
    labels_BL[1, 3:] = IGNORED
    whole = domain_losses(logits_BLV, labels_BL, {"a": 5})
    num_targets = {"a": int((labels_BL[:, 1:] != IGNORED).sum())}
    parts = [
        domain_losses(logits, labels, {"a": len(logits)}, num_targets=num_targets)
        for logits, labels in zip(logits_BLV.split([2, 3]), labels_BL.split([2, 3]), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_a_domain_without_targets_has_no_loss() -> None:
    logits_BLV, labels_BL = batch()
    labels_BL[:2] = IGNORED
    losses = domain_losses(logits_BLV, labels_BL, SIZES)
    assert losses[0] == 0
    losses.sum().backward()
    assert logits_BLV.grad is not None
    assert (logits_BLV.grad[:2] == 0).all()


def test_sixteen_bits_are_summed_in_float32() -> None:
    logits_BLV, labels_BL = batch()
    assert domain_losses(logits_BLV.bfloat16(), labels_BL, SIZES).dtype == torch.float32


def test_misuse_speaks() -> None:
    logits_BLV, labels_BL = batch()
    with pytest.raises(ValueError, match=r"logits \[B, L, V\] .* labels \[B, L\]; got \[5, 6\]"):
        domain_losses(logits_BLV[..., 0], labels_BL, SIZES)
    with pytest.raises(ValueError, match=r"add up to the 5 examples .* got \{'a': 4\}"):
        domain_losses(logits_BLV, labels_BL, {"a": 4})
