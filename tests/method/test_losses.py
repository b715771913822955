"""One mean loss per domain, whatever the batch holds."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from doge_fast.stacked.losses import IGNORED, domain_losses
from tests.launches import LaunchCounter

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


def mixed_counts(sizes: dict[str, int]) -> dict[str, int | Tensor]:
    """Numbers of the host and tensors in turn, as different collators count."""
    return {
        name: index + 1 if index % 2 else torch.tensor(index + 1)
        for index, name in enumerate(sizes)
    }


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 0, "c": 3}, {"a": 2, "b": 0, "c": 2}], ids=str)
def test_a_loss_that_is_not_a_number_stays_in_its_domain(sizes: dict[str, int]) -> None:
    logits_BLV, labels_BL = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    logits_BLV[-1] = torch.nan
    losses_D = domain_losses(logits_BLV, labels_BL, sizes)
    assert losses_D.isnan().tolist() == [False, True]


def test_counts_of_host_and_device_are_one_vector() -> None:
    sizes = {"a": 1, "b": 2, "c": 3}
    logits_BLV, labels_BL = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    ints = dict.fromkeys(sizes, 4)
    sums_D = 4 * domain_losses(logits_BLV, labels_BL, sizes, num_targets=ints)
    mixed_D = domain_losses(logits_BLV, labels_BL, sizes, num_targets=mixed_counts(sizes))
    torch.testing.assert_close(mixed_D, sums_D / torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("counts", ["none", "ints", "tensors"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_operators_do_not_grow_with_the_number_of_domains(counts: str, is_ragged: bool) -> None:
    numbers = []
    for num_domains in (4, 12):
        sizes = {str(row): 2 + (is_ragged and row % 2) for row in range(num_domains)}
        one: int | Tensor = torch.zeros((), dtype=torch.int64, device="meta")
        one = 3 if counts == "ints" else one
        num_targets = None if counts == "none" else dict.fromkeys(sizes, one)
        with torch.device("meta"):
            logits_BLV = torch.zeros(sum(sizes.values()), 5, 7)
            labels_BL = torch.zeros(sum(sizes.values()), 5, dtype=torch.int64)
        with LaunchCounter() as counter:
            domain_losses(logits_BLV, labels_BL, sizes, num_targets=num_targets)
        numbers.append(len(counter.names))
    assert numbers[0] == numbers[1]
