"""One mean loss per domain; with the head in one, the same numbers and never all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from doge_fast import losses
from doge_fast.losses import IGNORED, domain_losses, linear_domain_losses, token_losses
from tests.dispatched import Dispatched
from tests.method.architectures import VOCABULARY, Tiny, losses_of, optimizer_of

MM = torch.ops.aten.mm
SIZES = {"a": 2, "nobody": 0, "b": 3}
LENGTH, WIDTH = 7, 5


def batch() -> tuple[Tensor, Tensor]:
    logits_BLV = torch.randn(5, 6, 11, dtype=torch.float64, requires_grad=True)
    return logits_BLV, torch.randint(11, (5, 6))


def test_each_domain_has_its_own_mean():
    logits_BLV, labels_BL = batch()
    labels_BL[0, 2:] = IGNORED
    expected = losses_of(logits_BLV, labels_BL, SIZES)
    torch.testing.assert_close(domain_losses(logits_BLV, labels_BL, SIZES), expected)


def test_micro_batches_add_up_to_the_mean_of_the_step():
    logits_BLV, labels_BL = batch()
    labels_BL[1, 3:] = IGNORED
    whole = domain_losses(logits_BLV, labels_BL, {"a": 5})
    num_targets = {"a": int((labels_BL[:, 1:] != IGNORED).sum())}
    parts = [
        domain_losses(logits, labels, {"a": len(logits)}, num_targets=num_targets)
        for logits, labels in zip(logits_BLV.split([2, 3]), labels_BL.split([2, 3]), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_sixteen_bits_are_summed_in_float32():
    logits_BLV, labels_BL = batch()
    losses_BT = token_losses(logits_BLV.bfloat16(), labels_BL)
    assert losses_BT.dtype == torch.float32
    exact_BTV = logits_BLV.bfloat16()[:, :-1].double().log_softmax(-1)
    exact_BT = -exact_BTV.gather(2, labels_BL[:, 1:, None])[..., 0]
    torch.testing.assert_close(losses_BT.double(), exact_BT, rtol=8 * 2**-23, atol=0)


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 0, "c": 3}, {"a": 2, "b": 0, "c": 2}], ids=str)
def test_a_loss_that_is_not_a_number_stays_in_its_domain(sizes):
    logits_BLV, labels_BL = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    logits_BLV[-1] = torch.nan
    losses_D = domain_losses(logits_BLV, labels_BL, sizes)
    assert losses_D.isnan().tolist() == [False, True]


def test_counts_of_host_and_device_are_one_vector():
    sizes = {"a": 1, "b": 2, "c": 3}
    logits_BLV, labels_BL = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    ints = dict.fromkeys(sizes, 4)
    sums_D = 4 * domain_losses(logits_BLV, labels_BL, sizes, num_targets=ints)
    mixed = {"a": torch.tensor(1), "b": 2, "c": torch.tensor(3)}
    mixed_D = domain_losses(logits_BLV, labels_BL, sizes, num_targets=mixed)
    torch.testing.assert_close(mixed_D, sums_D / torch.tensor([1, 2, 3]))


Case = tuple[Tensor, Tensor, Tensor]


def case(dtype: torch.dtype = torch.float64) -> Case:
    """hidden, weight, labels; some labels are not predicted."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for shape in ((5, LENGTH, WIDTH), (VOCABULARY, WIDTH))
    )
    labels = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
    labels[0, 2:5] = IGNORED
    return hidden, weight, labels


def fused(inputs: Case, **options: Any) -> Tensor:
    hidden, weight, labels = inputs
    return linear_domain_losses(hidden, weight, labels, SIZES, **options)


def naive(inputs: Case, **options: Any) -> Tensor:
    hidden, weight, labels = inputs
    return domain_losses(F.linear(hidden, weight), labels, SIZES, **options)


def gradients(losses_D: Tensor, inputs: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad((losses_D * torch.tensor([0.3, -2.0])).sum(), inputs[:2])


@pytest.mark.parametrize("options", [{}, {"num_targets": {"a": 40, "b": 50}}], ids=str)
def test_losses_and_gradients_are_those_of_the_naive_head(options):
    inputs = case()
    ours = fused(inputs, **options)
    theirs = naive(inputs, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
    for actual, expected in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", [naive, fused])
def test_nothing_to_predict_is_no_loss(way):
    hidden, weight, labels = case()
    labels[:2] = IGNORED
    losses_D = way((hidden, weight, labels))
    assert losses_D[0] == 0
    losses_D.sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad[:2] == 0).all()
    assert (hidden.grad[2:, :-1] != 0).all()
    short = linear_domain_losses(hidden[:, :1], weight, labels[:, :1], SIZES)
    assert short.tolist() == [0, 0]


def test_under_autocast_products_are_of_its_dtype():
    inputs = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused(inputs), naive(inputs)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for actual, expected in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= 0.02 * expected.norm()


def largest_of(dispatched: Dispatched) -> int:
    """How many numbers the largest result has."""
    results = (result for *_, result in dispatched.calls)
    return max(result.numel() for result in results if isinstance(result, Tensor))


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 20])
def test_logits_exist_for_one_domain_or_for_several_small_ones_at_a_time(chunk_bytes, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", {"cpu": chunk_bytes})
    inputs = case()
    with Dispatched() as dispatched:
        losses_D = fused(inputs)
        losses_D.sum().backward()
    torch.testing.assert_close(losses_D, naive(inputs), rtol=1e-14, atol=0)
    sizes = SIZES.values()
    tokens = (sum(sizes) if chunk_bytes else max(sizes)) * (LENGTH - 1)
    products = [result for func, *_, result in dispatched.calls if func.overloadpacket is MM]
    assert max(len(result) for result in products if VOCABULARY in result.shape[1:]) == tokens
    # Rows of logits start at multiples of 16 elements.
    padded = -(-VOCABULARY // 16) * 16
    assert largest_of(dispatched) == max(tokens * padded, inputs[0].numel(), inputs[1].numel())
    with Dispatched() as dispatched:
        naive(inputs).sum().backward()
    assert largest_of(dispatched) >= 5 * (LENGTH - 1) * VOCABULARY


def products_in(dispatched: Dispatched) -> int:
    """The number of matrix products of the head's size."""
    aten = torch.ops.aten
    return sum(
        func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_, aten.bmm)
        and any(VOCABULARY in each.shape for each in args if isinstance(each, Tensor))
        for func, args, *_ in dispatched.calls
    )


IDS_BL = torch.randint(VOCABULARY, (5, LENGTH), generator=torch.Generator().manual_seed(4))


def rows_of_passes(
    model: Tiny, weigh: Any, *, is_fused: bool, buffer_dtype: Any = None, passes: int = 1
) -> tuple[list[Tensor], int]:
    """The rows of stacked passes, and the products of the last one's backward pass.

    `weigh` makes the loss of the domains' losses, and may call a function for those of another
    head with the same weight.
    """
    optimizer = optimizer_of(model, SIZES, buffer_dtype=buffer_dtype)

    def losses_of_hidden(hidden: Tensor) -> Tensor:
        if is_fused:
            return linear_domain_losses(hidden, model.head.weight, IDS_BL, SIZES)
        return domain_losses(model.head(hidden), IDS_BL, SIZES)

    for _ in range(passes):
        with optimizer.stacked(model, SIZES):
            losses_D = losses_of_hidden(model.hidden(IDS_BL))
            loss = weigh(losses_D, lambda: losses_of_hidden(model.hidden(IDS_BL).sin()))
            with Dispatched() as dispatched:
                loss.backward()
    blocks = optimizer.buffer.touched(optimizer.param_groups[0]["params"])
    return [block.rows_BN.clone() for block in blocks], products_in(dispatched)


def summed(losses_D: Tensor, _: Any) -> Tensor:
    return losses_D.sum()


def products_of_equal_rows(model: Tiny, weigh: Any = summed, passes: int = 1) -> int:
    """Those of the fused head's backward pass, whose rows are the naive head's."""
    ours, products = rows_of_passes(model, weigh, is_fused=True, passes=passes)
    theirs, _ = rows_of_passes(model, weigh, is_fused=False, passes=passes)
    assert len(ours) == len(theirs) == sum(p.requires_grad for p in model.parameters())
    for actual, expected in zip(ours, theirs, strict=True):
        assert (actual - expected).abs().max() <= 1e-14 * expected.abs().max()
    return products


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("frozen", ["", "head"], ids=["trained", "frozen"])
@pytest.mark.parametrize("passes", [1, 2])
def test_in_a_stacked_batch_each_domain_has_its_row(tied, frozen, passes):
    model = Tiny(tied=tied).double()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    products = products_of_equal_rows(model, passes=passes)
    # Of a frozen head, and in the first pass, the gradients are computed with the losses.
    assert (products == 0) == (bool(frozen) or passes == 1)


# The loss, and whether the logits are not computed again.
FUNCTIONS: dict[str, tuple[Any, bool]] = {
    "scaled": (lambda losses_D, _: 1024 * losses_D.sum(), True),
    "weighted": (lambda losses_D, _: (losses_D * torch.tensor([0.3, -2.0])).sum(), True),
    "one": (lambda losses_D, _: losses_D[1], True),
    "square": (lambda losses_D, _: losses_D.square().sum(), True),
    # A loss that is not used leaves nothing in the rows; two heads on one matrix add up.
    "not used": (lambda losses_D, more: (more(), losses_D.sum())[1], False),
    "two heads": (lambda losses_D, more: losses_D.sum() + 3 * more().sum(), False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_of_the_head_are_those_of_any_function_of_the_losses(name, tied):
    weigh, is_early = FUNCTIONS[name]
    products = products_of_equal_rows(Tiny(tied=tied).double(), weigh)
    assert (products == 0) == is_early


@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu", "hidden states"])
def test_hooks_and_other_gradients_change_no_row(how):
    model = Tiny().double()
    expected, _ = rows_of_passes(model, summed, is_fused=True)
    optimizer = optimizer_of(model, SIZES)

    def losses(hidden: Tensor) -> Tensor:
        return linear_domain_losses(hidden, model.head.weight, IDS_BL, SIZES)

    with optimizer.stacked(model, SIZES):
        if how == "checkpoint":
            losses_D = checkpoint(losses, model.hidden(IDS_BL), use_reentrant=False)
        elif how == "hidden states":
            hidden = model.hidden(IDS_BL)
            losses_D = losses(hidden)
            torch.autograd.grad(losses_D.sum(), hidden, retain_graph=True)
        else:
            with torch.autograd.graph.save_on_cpu():
                losses_D = losses(model.hidden(IDS_BL))
        losses_D.sum().backward()
    blocks = optimizer.buffer.touched(optimizer.param_groups[0]["params"])
    for block, rows in zip(blocks, expected, strict=True):
        assert (block.rows_BN - rows).abs().max() <= 1e-14 * rows.abs().max()


def test_a_step_without_the_losses_backward_has_no_row_of_the_head():
    model = Tiny()
    rows, _ = rows_of_passes(model, lambda *_: model.hidden(IDS_BL).square().sum(), is_fused=True)
    assert len(rows) == len([*model.parameters()]) - 1


def test_without_gradients_nothing_is_reserved():
    model = Tiny()
    optimizer = optimizer_of(model, "ab")
    with optimizer.stacked(model, SIZES):
        with torch.no_grad():
            linear_domain_losses(model.hidden(IDS_BL), model.head.weight, IDS_BL, SIZES)
        assert not optimizer.buffer.blocks
        model(IDS_BL).sum().backward()


def test_a_narrow_row_is_the_product_rounded_once():
    model = Tiny()
    (*_, narrow), _ = rows_of_passes(model, summed, is_fused=True, buffer_dtype=torch.bfloat16)
    (*_, wide), _ = rows_of_passes(model, summed, is_fused=True)
    assert wide.dtype == torch.float32
    assert torch.equal(narrow, wide.bfloat16())


def test_other_sizes_than_the_batch_are_refused():
    model = Tiny()
    optimizer = optimizer_of(model, "ab")
    message = r"\[2, 3\]; got \[3, 2\]"
    with pytest.raises(ValueError, match=message), optimizer.stacked(model, SIZES):
        linear_domain_losses(
            model.hidden(IDS_BL), model.head.weight, IDS_BL, {"a": 3, "b": 2}
        ).sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": (4, LENGTH)}, r"\[4, 7\]"),
        ({"labels": (5, LENGTH - 1)}, r"\[5, 6\]"),
        ({"sizes": {"a": 5, "b": 1}}, "sizes .*'a': 5"),
        ({"sizes": {"a": 6, "b": -1}}, "sizes .*-1"),
    ],
    ids=str,
)
def test_misuse_speaks(changes, message):
    hidden = torch.zeros(5, LENGTH, WIDTH)
    labels = torch.zeros(changes.get("labels", (5, LENGTH))).long()
    sizes = changes.get("sizes", SIZES)
    with pytest.raises(ValueError, match=message):
        linear_domain_losses(hidden, torch.zeros(VOCABULARY, WIDTH), labels, sizes)
    with pytest.raises(ValueError, match=message):
        domain_losses(hidden, labels, sizes)
