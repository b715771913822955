"""Stacked batches of transformers' architectures: the rows of one domain after another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from doge_fast.integrations.causal_lm import PLAIN_HEADS, STACKABLE
from doge_fast.losses import IGNORED, domain_losses, linear_domain_losses
from doge_fast.stacked.layers import token_sums
from tests.grids import grid
from tests.integrations.trainers import LENGTH, VOCABULARY, tiny
from tests.method.architectures import SIZES, Rows, assert_same, optimizer_of, rows_of


def batch(*, padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and labels; some sequences end early."""
    generator = torch.Generator().manual_seed(5)
    ids_BL = torch.randint(1, VOCABULARY, (sum(SIZES.values()), LENGTH), generator=generator)
    labels_BL, inputs = ids_BL.clone(), {"input_ids": ids_BL}
    if padded:
        mask_BL = torch.arange(LENGTH) < torch.tensor([10, 7, 10, 4, 9, 10])[:, None]
        inputs["attention_mask"] = mask_BL.long()
        labels_BL[~mask_BL] = IGNORED
    return inputs, labels_BL


def sequential(model: PreTrainedModel, inputs: dict[str, Tensor], labels_BL: Tensor) -> Rows:
    optimizer = optimizer_of(model)
    first = 0
    for name, size in SIZES.items():
        part = slice(first, first + size)
        first += size
        if size:
            with optimizer.domain(name):
                mine = {key: value[part] for key, value in inputs.items()}
                # The model's own loss would round float64 logits to float32.
                logits = model(**mine, use_cache=False).logits
                domain_losses(logits, labels_BL[part], {name: size}).sum().backward()
    return rows_of(optimizer, model)


def stacked(
    model: PreTrainedModel, inputs: dict[str, Tensor], labels_BL: Tensor, *, fused: bool = False
) -> Rows:
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES):
        losses_of(model, inputs, labels_BL, fused=fused).sum().backward()
    return rows_of(optimizer, model)


def losses_of(
    model: Any, inputs: dict[str, Tensor], labels_BL: Tensor, *, fused: bool = False
) -> Tensor:
    if fused:
        hidden, head = model.base_model(**inputs).last_hidden_state, model.get_output_embeddings()
        return linear_domain_losses(hidden, head.weight, labels_BL, SIZES)
    return domain_losses(model(**inputs, use_cache=False).logits, labels_BL, SIZES)


# One with learned positions, one with rotary ones and grouped heads.
SOME = ("gpt2", "llama")


# The name that works in all versions that we accept is on its way out in the latest.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "way", "padding"),
    grid(
        STACKABLE,
        ("stacked", "eager attention", "at once", "fused head", "saved", "reentrant"),
        ("full", "padded"),
        some=lambda kind, way, padding: kind in SOME and (padding == "padded" or way == "stacked"),
    ),
)
def test_rows_are_those_of_one_domain_after_another(kind, way, padding, monkeypatch):
    if way == "fused head" and kind not in PLAIN_HEADS:
        pytest.skip("its head is more than a product")
    model = tiny(kind, "eager" if way == "eager attention" else None)
    inputs, labels_BL = batch(padded=padding == "padded")
    expected = sequential(model, inputs, labels_BL)
    assert len(expected) == sum(1 for _ in model.parameters())
    if way == "at once":
        # As on a GPU: each norm, bias and embedding in one operator for all domains.
        monkeypatch.setattr(token_sums, "ONE_BY_ONE", ())
    if way in ("saved", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    if way == "reentrant":
        model.enable_input_require_grads()
    actual = stacked(model, inputs, labels_BL, fused=way == "fused head")
    # Twice that of one layer: the depth of the model.
    assert_same(actual, expected, bound=2e-14)


@pytest.mark.parametrize("kind", SOME)
def test_dropout_draws_the_masks_of_the_whole_batch(kind):
    """Other masks than domain after domain; with the same ones rows add up to plain training's."""
    changes = {"attention_dropout": 0.3} if kind == "llama" else {}
    model = tiny(kind, **changes)
    if kind == "gpt2":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
    inputs, labels_BL = batch(padded=False)
    torch.manual_seed(9)
    rows = stacked(model, inputs, labels_BL)
    torch.manual_seed(9)
    params = dict(model.named_parameters())
    total = losses_of(model, inputs, labels_BL).sum()
    plain = dict(zip(params, torch.autograd.grad(total, [*params.values()]), strict=True))
    undropped = sequential(model.eval(), inputs, labels_BL)
    for name, rows_RN in rows.items():
        torch.testing.assert_close(rows_RN.sum(0), plain[name].flatten(), rtol=1e-10, atol=1e-13)
    assert any(not torch.allclose(rows[name], undropped[name], rtol=0.01) for name in rows)
