"""Rules of a user's modules: which module has one, and what it computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doge_fast.stacked.layers import Sum, register, registry, rule_of
from tests.method.architectures import (
    CUSTOM_RULES,
    SIZES,
    Offset,
    OffsetRule,
    ScaledLinear,
    ScaledLinearRule,
    assert_same,
    ids_of,
    made,
    optimizer_of,
    rows_by_autograd,
    rows_of,
    run,
)


@pytest.fixture(autouse=True)
def custom_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def test_a_rule_runs_once_and_a_module_without_one_once_per_domain():
    model = made("custom rules")
    expected = rows_by_autograd(model, ids_of())
    model.scaled.num_calls = 0
    for _ in range(2):
        optimizer = optimizer_of(model)
        run(optimizer, model, ids_of())
        assert_same(rows_of(optimizer, model), expected)
        # Calls of the module's forward, by three domains with examples. The rule makes no more.
        assert model.scaled.num_calls == 3
        register(ScaledLinear, ScaledLinearRule())


def test_a_rule_may_be_registered_by_name_and_replaced():
    model = made("custom rules")
    optimizer = optimizer_of(model)

    class Doubled(OffsetRule):
        def gradients(self, module: Any, grad: Tensor, *others: Tensor) -> Any:
            yield module.offset, Sum(2 * grad)

    rows = []
    for rule in (OffsetRule(), Doubled()):
        register(f"{Offset.__module__}.{Offset.__qualname__}", rule)
        run(optimizer, model, ids_of())
        rows.append(rows_of(optimizer, model)["offset.offset"])
    torch.testing.assert_close(rows[1], 2 * rows[0])

    class Lacks(OffsetRule):
        input_gradient = registry.LayerRule.input_gradient

    register(Offset, Lacks())
    with pytest.raises(NotImplementedError, match="Lacks"):
        run(optimizer, model, ids_of())


def test_subclasses_and_modules_with_other_parameters_have_no_rule():
    class Derived(Offset):
        pass

    register(Offset, CUSTOM_RULES[Offset])
    assert rule_of(Offset(3)) is CUSTOM_RULES[Offset]
    assert rule_of(Derived(3)) is None
    more = Offset(3)
    more.gain = nn.Parameter(torch.ones(3))
    assert rule_of(more) is None
    computed = Offset(3)
    del computed.offset
    computed.offset = torch.ones(3)
    assert rule_of(computed) is None
    shared = nn.LayerNorm(3)
    shared.bias = shared.weight
    assert rule_of(shared) is None
    shift = nn.LayerNorm(3)
    shift.weight = None
    assert rule_of(shift) is None
    replaced = Offset(3)
    replaced.forward = lambda x: x
    assert rule_of(replaced) is None
    # Its gradient is another one, or a sparse one, or the forward changes the weight.
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        assert rule_of(nn.Embedding(3, 2, **options)) is None
    flattened = nn.Linear(2, 2)
    flattened.weight = nn.Parameter(torch.zeros(4))
    assert rule_of(flattened) is None


def test_a_weight_may_have_two_gradients():
    """Of 16 bits, whose rows become others for the second."""

    class InHalves(ScaledLinearRule):
        def gradients(self, module: Any, grad: Tensor, *others: Tensor) -> Any:
            for _ in range(2):
                yield from super().gradients(module, grad / 2, *others)

    model = ScaledLinear(5, 3, 0.5).bfloat16()
    x_BI = torch.randn(sum(SIZES.values()), 5).bfloat16()
    rows = []
    for rule in (ScaledLinearRule(), InHalves()):
        register(ScaledLinear, rule)
        optimizer = optimizer_of(model)
        with optimizer.stacked(model, SIZES):
            model(x_BI).float().square().sum().backward()
        rows.append(rows_of(optimizer, model)["weight"].float())
    assert torch.equal(*rows)
