"""Rules of a user's own modules: rows and norms per example are those of the module without one."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast import DoGEOptimizer
from doge_fast.stacked.example_norms import ExampleNorms
from doge_fast.stacked.layers import LayerRule, Outer, Sum, register, registry, rule_of
from doge_fast.stacked.layers.batch import Segment, SortedBatch

SIZES = {"a": 1, "b": 3, "c": 2}
LENGTH, WIDTH, HIDDEN = 7, 5, 4

# A few float64 roundings, in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-15}


class Offset(nn.Module):
    """A bias and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class OffsetRule(LayerRule):
    params = ("offset",)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return x + module.offset, ()

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        return grad

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, Sum]]:
        yield module.offset, Sum(grad)


class ScaledLinear(nn.Module):
    """y = s W x, whose s is a number."""

    def __init__(self, inputs: int, outputs: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.scale = scale
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.scale * F.linear(x, self.weight)


class ScaledLinearRule(LayerRule):
    params = ("weight",)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return module.scale * F.linear(x, module.weight), (module.weight,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        return module.scale * grad @ saved[0]

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, Outer]]:
        yield module.weight, Outer(module.scale * grad, x)


class Mean(nn.Module):
    """A matrix on the mean over tokens: each example's gradient as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.mean(1) @ self.matrix)[:, None]


class MeanRule(LayerRule):
    params = ("matrix",)

    def forward(self, module: Any, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return x + (x.mean(1) @ module.matrix)[:, None], (module.matrix,)

    def input_gradient(self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
        return grad + (grad.sum(1) @ saved[0].t())[:, None] / x.shape[1]

    def gradients(
        self, module: Any, grad: Tensor, x: Tensor, *saved: Tensor
    ) -> Iterator[tuple[nn.Parameter | None, Sum]]:
        yield module.matrix, Sum(x.mean(1)[:, :, None] * grad.sum(1)[:, None, :])


RULES = {Offset: OffsetRule(), ScaledLinear: ScaledLinearRule(), Mean: MeanRule()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = ScaledLinear(WIDTH, HIDDEN, 0.5)
        self.offset = Offset(HIDDEN)
        self.mean = Mean(HIDDEN)
        self.down = ScaledLinear(HIDDEN, 1, 2.0)
        self.double()

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden = torch.tanh(self.mean(self.offset(self.up(x_BLD))))
        return self.down(self.offset(hidden)).flatten(1)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


@pytest.fixture
def registered() -> None:
    for module_class, rule in RULES.items():
        register(module_class, rule)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (sum(SIZES.values()), LENGTH, WIDTH)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def losses_of(outputs_BL: Tensor) -> Tensor:
    """[B]"""
    return outputs_BL.square().mean(1)


def optimizer_of(model: nn.Module) -> DoGEOptimizer:
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    return DoGEOptimizer(inner, domains=list(SIZES), micro_batches=None)


def rows_of(optimizer: DoGEOptimizer) -> list[Tensor]:
    blocks = optimizer.buffer.touched(optimizer.param_groups[0]["params"])
    rows = [block.rows_BN.clone() for block in blocks]
    optimizer.zero_grad()
    return rows


def sequential(model: nn.Module, x_BLD: Tensor) -> list[Tensor]:
    optimizer = optimizer_of(model)
    for name, part in zip(SIZES, x_BLD.split([*SIZES.values()]), strict=True):
        with optimizer.domain(name):
            losses_of(model(part)).sum().backward()
    return rows_of(optimizer)


def stacked(model: nn.Module, x_BLD: Tensor, call: Any = None) -> list[Tensor]:
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES):
        losses_of((model if call is None else call)(x_BLD)).sum().backward()
    return rows_of(optimizer)


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(ours) == len(expected)
    for rows, rows_of_each in zip(ours, expected, strict=True):
        torch.testing.assert_close(rows, rows_of_each, **EXACT)


def test_rows_are_those_of_one_domain_after_another(registered: None) -> None:
    model = Model()
    assert_same(stacked(model, batch()), sequential(model, batch()))


def test_a_rule_runs_once_and_a_module_without_one_once_per_domain() -> None:
    model = Model()
    expected = sequential(model, batch())
    model.up.num_calls = 0
    assert_same(stacked(model, batch()), expected)
    assert model.up.num_calls == len(SIZES)
    register(ScaledLinear, ScaledLinearRule())
    assert_same(stacked(model, batch()), expected)
    assert model.up.num_calls == len(SIZES)


def test_norms_per_example_are_those_of_one_example_at_a_time(registered: None) -> None:
    model, x_BLD = Model(), batch()
    params = dict(model.named_parameters())
    norms = ExampleNorms(model, params)
    with norms.recording(len(x_BLD)):
        losses_of(model(x_BLD)).sum().backward()
    for example, x_LD in enumerate(x_BLD):
        grads = torch.autograd.grad(losses_of(model(x_LD[None])).sum(), [*params.values()])
        for name, grad in zip(params, grads, strict=True):
            squared = norms.squared[name][example]
            torch.testing.assert_close(squared, grad.square().sum(), rtol=1e-12, atol=0, msg=name)


# Of torch's own making: its compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rules_of_users_compile_as_one_graph(registered: None) -> None:
    model = Model()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(stacked(model, batch(), compiled), sequential(model, batch()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_serves_every_cut_of_a_batch() -> None:
    """Another first domain of the same batch is no reason to compile again."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(WIDTH, 1)).double()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = optimizer_of(model)
    for sizes in ({"a": 1, "b": 5}, {"a": 4, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}):
        with optimizer.stacked(model, sizes):
            compiled(batch()).sum().backward()
    assert len(graphs) == 1


def test_a_rule_may_be_registered_by_name_and_replaced() -> None:
    model = Model()
    optimizer = optimizer_of(model)
    name = f"{Offset.__module__}.{Offset.__qualname__}"

    class Doubled(OffsetRule):
        def gradients(self, module: Any, grad: Tensor, *others: Tensor) -> Any:
            yield module.offset, Sum(2 * grad)

    rows = []
    for rule in (OffsetRule(), Doubled()):
        register(name, rule)
        with optimizer.stacked(model, SIZES):
            losses_of(model(batch())).sum().backward()
        rows.append(rows_of(optimizer)[1])
    torch.testing.assert_close(rows[1], 2 * rows[0])


def test_subclasses_and_modules_with_other_parameters_have_no_rule(registered: None) -> None:
    class Derived(Offset):
        pass

    assert rule_of(Offset(3)) is RULES[Offset]
    assert rule_of(Derived(3)) is None
    more = Offset(3)
    more.gain = nn.Parameter(torch.ones(3))
    assert rule_of(more) is None
    computed = Offset(3)
    del computed.offset
    computed.offset = torch.ones(3)
    assert rule_of(computed) is None
    replaced = Offset(3)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert rule_of(replaced) is None


def test_what_cannot_be_registered_is_refused() -> None:
    for module_class, rule, message in (
        (nn.Linear(2, 2), OffsetRule(), r"a class of modules or its full name.*got Linear"),
        (int, OffsetRule(), "a class of modules or its full name"),
        ("Offset", OffsetRule(), "full name, 'package.module.Class'; got 'Offset'"),
        (Offset, OffsetRule, "an instance of a LayerRule; got <class"),
    ):
        with pytest.raises(ValueError, match=message):
            register(module_class, rule)  # type: ignore[arg-type]


def test_a_module_of_several_inputs_has_no_rule_to_follow() -> None:
    class Bilinear(ScaledLinear):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * other

    register(Bilinear, ScaledLinearRule())
    model = Bilinear(WIDTH, 1, 1.0).double()
    optimizer = optimizer_of(model)
    message = "for modules with one tensor argument; a Bilinear got 2 arguments"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model(batch(), batch())


def test_a_forward_that_returns_the_output_alone_is_refused() -> None:
    class Forgets(OffsetRule):
        def forward(self, module: Any, x: Tensor) -> Any:
            return x + module.offset

    register(Offset, Forgets())
    model = Model()
    optimizer = optimizer_of(model)
    message = r"forward\(\) of Forgets must return the output and .* Return \(output, \(\)\)"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model(batch())


class Shared(nn.Module):
    """Positions as vectors [1, L, D] and as indices [1, L]: the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, HIDDEN)
        self.places = nn.Linear(2, HIDDEN)
        self.table = nn.Embedding(LENGTH, HIDDEN, padding_idx=2)
        self.double()

    def forward(self, x_BLD: Tensor) -> Tensor:
        place_1L2 = torch.linspace(0, 1, 2 * LENGTH, dtype=x_BLD.dtype).view(1, LENGTH, 2)
        places_1LD = self.places(place_1L2) + self.table(torch.arange(LENGTH)[None])
        return torch.tanh(self.words(x_BLD) + places_1LD).flatten(1)


def test_what_all_examples_share_counts_for_each() -> None:
    model, x_BLD = Shared(), batch()
    assert_same(stacked(model, x_BLD), sequential(model, x_BLD))
    params = dict(model.named_parameters())
    norms = ExampleNorms(model, params)
    with norms.recording(len(x_BLD)):
        losses_of(model(x_BLD)).sum().backward()
    for example, x_LD in enumerate(x_BLD):
        grads = torch.autograd.grad(losses_of(model(x_LD[None])).sum(), [*params.values()])
        for name, grad in zip(params, grads, strict=True):
            squared = norms.squared[name][example]
            torch.testing.assert_close(squared, grad.square().sum(), rtol=1e-12, atol=0, msg=name)


def test_runs_are_neighbours_in_batch_and_buffer() -> None:
    batch = SortedBatch.of(
        [Segment(0, 0, 2), Segment(1, 2, 4), Segment(3, 4, 6), Segment(4, 6, 9), Segment(5, 9, 12)]
    )
    first, second = batch.runs
    assert (first.rows, first.borders, first.is_equal) == (range(2), (0, 2, 4), True)
    assert (second.rows, second.borders, second.is_equal) == (range(3, 6), (4, 6, 9, 12), False)
    assert [(part, run.rows, run.borders) for part, run in second.equal_parts] == [
        (slice(0, 1), range(3, 4), (4, 6)),
        (slice(1, 3), range(4, 6), (6, 9, 12)),
    ]
    x_BLF = torch.arange(24.0).view(12, 2, 1)
    assert first.cut(x_BLF, 1).tolist() == x_BLF[:4].reshape(2, 4, 1).tolist()
    assert second.tokens(x_BLF.flatten(0, 1), 1).tolist() == x_BLF[4:].reshape(16, 1).tolist()
    assert second.token_borders(16, torch.device("cpu")).tolist() == [0, 4, 10, 16]
