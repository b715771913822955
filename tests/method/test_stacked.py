"""One backward for all domains: the rows are those of autograd, one domain after another."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from doge_fast import DoGEOptimizer
from doge_fast.kernels import implementations
from doge_fast.losses import domain_losses
from doge_fast.stacked.layers import linear, registry, token_sums
from tests.dispatched import Dispatched
from tests.grids import grid
from tests.method.architectures import (
    ARCHITECTURES,
    CUSTOM_RULES,
    LENGTH,
    SIZES,
    VOCABULARY,
    Recurrent,
    Tiny,
    assert_same,
    ids_of,
    losses_of,
    made,
    mean_loss,
    optimizer_of,
    rows_by_autograd,
    rows_of,
    run,
)
from tests.packages import installed

EQUAL = {"a": 2, "b": 2, "absent": 0, "c": 2}


@pytest.fixture
def custom_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {**registry._RULES, **CUSTOM_RULES})


def sequential(optimizer: DoGEOptimizer, model: nn.Module, ids_BL: Tensor, sizes: Any) -> None:
    for (name, size), ids in zip(sizes.items(), ids_BL.split([*sizes.values()]), strict=True):
        if size:
            with optimizer.domain(name):
                mean_loss(model(ids), ids).backward()


def checkpointed(
    optimizer: DoGEOptimizer, model: nn.Module, ids_BL: Tensor, sizes: Any, *, reentrant: bool
) -> None:
    # A reentrant checkpoint needs an input that wants a gradient.
    anchor = torch.zeros(1, requires_grad=True, dtype=torch.float64)

    def call(ids_BL: Tensor) -> Tensor:
        logits: Tensor = checkpoint(
            lambda ids, zero: model(ids) + zero, ids_BL, anchor, use_reentrant=reentrant
        )
        return logits

    run(optimizer, model, ids_BL, sizes, call)


MODES: dict[str, Callable[..., None]] = {
    "sequential": sequential,
    "stacked": run,
    "saved": partial(checkpointed, reentrant=False),
    "reentrant": partial(checkpointed, reentrant=True),
    # Sums over tokens as on a GPU: those of all domains in one operator.
    "at once": run,
    "at once, triton": run,
}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if implementations("cpu")[backend] is not None:
        pytest.skip(f"{backend} does not run on a CPU here")
    monkeypatch.setattr(token_sums, "ONE_BY_ONE", ())
    monkeypatch.setenv("DOGE_FAST_BACKEND", backend)


@pytest.mark.parametrize(
    ("kind", "mode", "sizes"),
    grid(
        ARCHITECTURES,
        MODES,
        (SIZES, EQUAL),
        # Two directions of a recurrent network are as many as a domain has examples.
        some=lambda kind, mode, sizes: (
            kind in ("tied", "slices")
            or (sizes is SIZES and "triton" not in mode)
            or (kind in ("lstm", "gru") and mode == "stacked")
        ),
    ),
)
def test_rows_are_those_of_autograd(kind, mode, sizes, custom_rules, monkeypatch):
    """After one batch, and after three of which each has other domains; to the bit again."""
    if "at once" in mode:
        as_on_a_gpu(monkeypatch, "triton" if "triton" in mode else "torch")
    model = made(kind)
    optimizer = optimizer_of(model)
    ids_BL = ids_of(sizes)
    expected = rows_by_autograd(model, ids_BL, sizes)
    rows = []
    for _ in range(2):
        MODES[mode](optimizer, model, ids_BL, sizes)
        rows.append(rows_of(optimizer, model))
    assert_same(rows[0], expected)
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in expected)
    batches = [({"a": 1, "b": 2}, 1), ({"b": 1, "c": 2}, 2), ({"c": 3}, 3)]
    sums = {name: torch.zeros_like(rows_RN) for name, rows_RN in expected.items()}
    for some_sizes, seed in batches:
        whole = dict.fromkeys(SIZES, 0) | some_sizes
        MODES[mode](optimizer, model, ids_of(some_sizes, seed), some_sizes)
        for name, rows_RN in rows_by_autograd(model, ids_of(whole, seed), whole).items():
            sums[name] += rows_RN
    assert_same(rows_of(optimizer, model), sums)
    assert not any("forward" in module.__dict__ for module in model.modules())


# Of torch's own making: its compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("tied", "aot_eager"),
        ("custom rules", "aot_eager"),
        pytest.param("tied", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_as_one_graph(kind, backend, custom_rules):
    """A batch of the same shape with other domains goes through the same graph."""
    model = made(kind)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = optimizer_of(model)
    for sizes, seed in ((SIZES, 0), ({"a": 2, "b": 1, "absent": 0, "c": 3}, 4)):
        ids_BL = ids_of(sizes, seed)
        run(optimizer, model, ids_BL, sizes, compiled)
        assert_same(rows_of(optimizer, model), rows_by_autograd(model, ids_BL, sizes))
    assert num_graphs() == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Initializing zero-element")
def test_a_compiled_layer_without_outputs():
    """Its bias has no elements, so there is nothing to sum."""
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)).double()
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with optimizer.stacked(model, {"a": 2, "b": 3}):
        compiled(torch.randn(5, 4).double()).square().sum().backward()
    assert optimizer.last.gram.shape == (2, 2)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def flat_head(model: Tiny, hidden: Tensor) -> Tensor:
    """The head on a flattened batch, whose length only the layers before it know."""
    logits: Tensor = model.head(hidden.flatten(0, 1))
    return logits.unflatten(0, hidden.shape[:2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("dynamic", "is_saved", "num"),
    # torch.compile alone takes three: the first shape, one for any B, one for any B and L.
    [(None, False, 3), (True, False, 1), (True, True, 1)],
    ids=["default", "dynamic", "checkpointed"],
)
def test_one_graph_is_for_any_number_of_examples_and_any_length(dynamic, is_saved, num):
    """Rows are those without a graph, also with activations that are computed again."""
    model = made("tied")
    optimizer = optimizer_of(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def hidden(ids_BL: Tensor) -> Tensor:
        if not is_saved:
            return model.hidden(ids_BL)
        states: Tensor = checkpoint(model.hidden, ids_BL, use_reentrant=False)
        return states

    compiled = torch.compile(hidden, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    shapes = [
        ({"a": 1, "b": 3}, LENGTH),
        ({"b": 2, "c": 4}, LENGTH),
        ({"a": 5, "b": 2, "c": 1}, LENGTH - 3),
        ({"c": 3}, LENGTH - 5),
    ]
    for sizes, length in shapes:
        ids_BL = torch.clone(ids_of(sizes)[:, :length], memory_format=torch.contiguous_format)
        rows = []
        for body in (model.hidden, compiled):
            run(optimizer, model, ids_BL, sizes, lambda ids, body=body: flat_head(model, body(ids)))
            rows.append(rows_of(optimizer, model))
        assert_same(*rows)
    assert num_graphs() == num
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("kind", "num"), [("without rules", 3), ("lstm", 2)])
def test_modules_without_a_rule_stay_outside_graphs(kind, num):
    """Their domains have many sizes; what runs before, between and after them is compiled once."""
    model = made(kind)
    optimizer = optimizer_of(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for sizes in (SIZES, {"a": 4, "c": 3}, {"b": 2, "c": 5}):
        ids_BL = ids_of(sizes)
        expected = rows_by_autograd(model, ids_BL, dict.fromkeys(SIZES, 0) | sizes)
        run(optimizer, model, ids_BL, sizes, compiled)
        assert_same(rows_of(optimizer, model), expected)
    assert num_graphs() == num


def test_under_autocast_rows_are_what_was_computed():
    """Products of bfloat16 in bfloat16, without loss; norms and sums in float32, or float64."""
    model, ids_BL = made("untied"), ids_of()
    expected = rows_by_autograd(model, ids_BL)
    optimizer = optimizer_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(optimizer, model, ids_BL)
    assert_same(rows_of(optimizer, model), expected)
    optimizer = optimizer_of(model.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(optimizer, model, ids_BL)
    rows = rows_of(optimizer, model)
    assert rows["up.weight"].dtype == torch.bfloat16
    assert rows["norm.weight"].dtype == torch.float32
    for name, rows_RN in expected.items():
        error = (rows[name].double() - rows_RN).norm() / rows_RN.norm()
        # Some ten roundings to eight bits on the way.
        assert error < 10 * torch.finfo(torch.bfloat16).eps, name
    # A second micro-batch adds up in float32.
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(optimizer, model, ids_BL)
    twice = rows_of(optimizer, model)
    assert twice["up.weight"].dtype == torch.float32
    torch.testing.assert_close(twice["up.weight"], 2 * rows["up.weight"].float())


transformers = installed("transformers")


def llama_norm(width: int, eps: float) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(width, eps)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "plain"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, llama_norm])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_16_bits_give_what_the_module_gives(norm, norm_dtype, autocast):
    """To the bit, whatever the dtypes of input and weight; the gradients to their roundings."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    ends = [nn.Linear(16, 16).to(dtype), nn.Linear(16, 16).to(dtype)]
    # An epsilon that counts.
    middle = norm(16, eps=0.1).to(norm_dtype)
    nn.init.normal_(middle.weight)
    model = nn.Sequential(ends[0], middle, ends[1] if autocast else nn.Identity())
    x = torch.randn(4, 5, 16, dtype=dtype)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # Torch's note that input and weight have two dtypes.
        warnings.simplefilter("ignore", UserWarning)
        plain = model(x)
        with optimizer.stacked(model, {"a": 2, "b": 2}):
            ours = model(x)
            ours.float().square().sum().backward()
        grads = torch.autograd.grad(plain.float().square().sum(), [*model.parameters()])
    assert torch.equal(ours, plain)
    assert ours.dtype == plain.dtype
    blocks = optimizer.buffer.touched([*model.parameters()])
    for block, grad in zip(blocks, grads, strict=True):
        total_N = block.rows_BN.double().sum(0)
        error = (total_N - grad.double().flatten()).norm() / total_N.norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps


class Wide(torch.autograd.Function):
    """x w, whose gradient of w is float32 whatever w is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad.float() * x.float()).flatten(0, -2).sum(0)


class WideGain(nn.Module):
    """A module without a rule whose gradient is wider than its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return Wide.apply(x, self.gain)


def backward_of(mode: str, optimizer: DoGEOptimizer, model: nn.Module, x: Tensor) -> None:
    """Two domains of as many examples: one after another, or stacked."""
    parts = dict(zip("ab", x.chunk(2), strict=True))
    if mode == "stacked":
        with optimizer.stacked(model, {name: len(part) for name, part in parts.items()}):
            model(x).float().square().sum().backward()
        return
    for name, part in parts.items():
        with optimizer.domain(name):
            model(part).float().square().sum().backward()


NARROW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(NARROW, FULL), (FULL, NARROW), (NARROW, None)], ids=str
)
def test_gradients_have_the_dtype_that_their_parameter_demands(mode, dtype, grad_dtype):
    """`grad_dtype`; None allows any. Float32 gradients of 16-bit parameters are not rounded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), WideGain(8), nn.LayerNorm(8)).to(dtype)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    x = torch.randn(4, 1, 8, dtype=dtype)
    backward_of(mode, optimizer, model, x)
    losses = [model(part).float().square().sum() for part in x.chunk(2)]
    expected = torch.stack([torch.autograd.grad(loss, model[1].gain)[0] for loss in losses])
    (block,) = optimizer.buffer.touched([model[1].gain])
    assert block.rows_BN.dtype == (grad_dtype or FULL)
    bound = 4 * torch.finfo(NARROW).eps * expected.double().abs().max()
    assert (block.rows_BN - expected.double()).abs().max() < bound
    assert {param.grad.dtype for param in model.parameters()} == {grad_dtype or dtype}
    weighted = optimizer.last.coefficients @ block.rows_BN.double()
    rounding = torch.finfo(grad_dtype or dtype).eps
    torch.testing.assert_close(model[1].gain.grad.double(), weighted, rtol=4 * rounding, atol=0)
    optimizer.step()


@pytest.mark.parametrize("mode", ["sequential", "stacked"])
# Torch's note that there is nothing to initialise.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_parameter_without_elements_has_an_empty_gradient(mode):
    empty = nn.Linear(8, 0), nn.LayerNorm(0), WideGain(0), nn.Linear(0, 3)
    model = nn.Sequential(nn.Linear(4, 8), *empty).double()
    bias = nn.init.ones_(model[4].bias)
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    backward_of(mode, optimizer, model, torch.randn(4, 4).double())
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.shape == param.shape
    # The loss of a domain is the sum of two examples' bias^2.
    expected = optimizer.last.coefficients.sum() * 2 * 2 * bias.detach()
    torch.testing.assert_close(bias.grad, expected)
    optimizer.step()
    assert (bias < 1).all()


LINEAR = nn.Linear(4, 4)


class Around(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return torch.cat([output.flatten() for output in outputs])


def test_batch_statistics_are_refused():
    """In eval mode too, where there are no running ones."""
    model = Around(nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False, track_running_stats=False))
    optimizer = optimizer_of(model)
    for layer in range(2):
        with pytest.raises(ValueError, match=rf"layers\.{layer} is a BatchNorm1d"):
            optimizer.stacked(model, SIZES).__enter__()
        model.eval()
    del model.layers[1]
    with optimizer.stacked(model, SIZES):
        model(torch.randn(6, 4)).square().sum().backward()


@pytest.mark.parametrize(
    ("layers", "shapes"),
    [
        ([LINEAR], [(7, 4)]),
        ([LINEAR], [(12, 4)]),
        # A length is known, and it is another.
        ([LINEAR, LINEAR], [(6, 2, 4), (18, 4)]),
        ([LINEAR, LINEAR], [(6, 2, 4), (13, 4)]),
        # Of [B, features] no dimension is a length.
        ([nn.Linear(2, 4), LINEAR], [(6, 2), (12, 4)]),
        # Time may come first.
        ([LINEAR, LINEAR], [(6, 2, 4), (12, 6, 4)]),
        # Indices of another length are no flattened batch.
        ([nn.Embedding(9, 4), nn.Embedding(9, 4)], [(6, 2), (12, 3)]),
        # As many outputs as twice the examples.
        ([nn.Linear(4, 12)], [(4,)]),
    ],
    ids=[
        *("batch", "no length", "another length", "a rest", "features", "time first", "indices"),
        "a vector",
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, False, True], ids=["eager", "compiled", "dynamic"])
def test_an_input_without_the_batch_in_front_is_refused(layers, shapes, dynamic):
    """Compiled too: while it is traced, or by its shapes at the end of every pass."""
    model = Around(*layers)
    optimizer = optimizer_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=dynamic, fullgraph=True)
    call = model if dynamic is None else compiled
    dtype = torch.long if isinstance(layers[0], nn.Embedding) else torch.float32
    message = rf"the 6 examples.* {type(layers[-1]).__name__} .*\{list(shapes[-1])}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
            call(*(torch.ones(shape, dtype=dtype) for shape in shapes)).sum().backward()
        optimizer.zero_grad()


def compiled_tiny(ids_BL: Tensor, sizes: dict[str, int]) -> None:
    model = Tiny()
    torch._dynamo.reset()
    run(optimizer_of(model), model, ids_BL, sizes, torch.compile(model, backend="eager"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_positions_are_not_taken_for_examples():
    """As many positions as examples: [L] could be either, unless another length is known."""
    sizes = {"a": 4, "b": 5}
    ids_BL = ids_of(sizes)
    assert len(ids_BL) == LENGTH
    model = Tiny()
    with pytest.raises(RuntimeError, match="9 positions"):
        run(optimizer_of(model), model, ids_BL, sizes)
    with pytest.raises(RuntimeError, match="9 positions"):
        compiled_tiny(ids_BL, sizes)
    model = Around(nn.Embedding(9, 4), nn.Embedding(9, 4)).double()
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match="9 positions"), optimizer.stacked(model, sizes):
        model.layers[1](torch.arange(9))
    with optimizer.stacked(model, sizes):
        # One index per example, beside tokens of another length.
        model(ids_BL[:, :4] % 9, torch.arange(9)).sum().backward()
    _, row_of_each = (
        block.rows_BN.view(4, 9, 4) for block in optimizer.buffer.touched([*model.parameters()])
    )
    assert (row_of_each[0, :4] == 1).all()
    assert (row_of_each[1, 4:] == 1).all()
    model = Around(Positions(9, 4)).double()
    with (
        pytest.raises(RuntimeError, match="9 positions"),
        optimizer_of(model).stacked(model, sizes),
    ):
        model.layers[0](ids_BL, position_ids=torch.arange(9))


class Positions(nn.Embedding):
    """As BART's, which takes them by keyword."""

    def forward(self, ids_BL: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(position_ids)


class Columns(nn.Linear):
    def forward(self, x_BLE: Tensor) -> Tensor:
        return super().forward(x_BLE).flatten(1).T


@pytest.mark.parametrize("sizes", [SIZES, {"a": 3, "b": 3}], ids=str)
def test_what_cannot_be_sliced_or_joined_is_refused(sizes):
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), Columns(16, 1))
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match="Columns"), optimizer.stacked(model, sizes):
        model(ids_of(sizes)[:, :8])
    with pytest.raises(RuntimeError, match="Columns"), optimizer.stacked(model, sizes):
        model[1](torch.randn(8, 5, 16))
    late = Recurrent(nn.LSTM, batch_first=False)
    optimizer = optimizer_of(late)
    with pytest.raises(RuntimeError, match="batch_first"), optimizer.stacked(late, sizes):
        late(ids_of(sizes)[:, :6])


class Returning(nn.Module):
    """Without a rule: its outputs are what `returns` makes of its gain and its input."""

    def __init__(self, returns: Callable[..., Any]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.returns = returns

    def forward(self, *inputs: Any) -> Any:
        return self.returns(self.gain, *inputs)


@dataclass
class Output:
    hidden: Tensor


X_BLE = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
PACKED = pack_padded_sequence(X_BLE, torch.tensor([2, 4, 1]), True, enforce_sorted=False)


@pytest.mark.parametrize(
    ("returns", "x", "message"),
    [
        (lambda gain, x: Output(gain * x), X_BLE, "Output"),
        # A number of each example, beside a tensor.
        (lambda gain, x: (gain * x, [int(x[0, 0, 0] * 100)]), X_BLE, "outputs of int"),
        (lambda gain, x: [gain * x] * (1 + int(x[0, 0, 0] > 0)), X_BLE, "structure"),
        # A state of two layers.
        (lambda gain, x: (gain * x, gain.expand(2, 1, 3)), X_BLE, "2, 1, 3"),
        (lambda gain, x: gain * x.data, PACKED, "PackedSequence"),
        # Two codes, which all examples share, and no example has two tokens.
        (lambda gain, x: (gain * x, gain.expand(2, 3)), X_BLE, "2, 3"),
        # Of the whole domain: loads of five experts.
        (lambda gain, x: (gain * x, x.sum() * torch.ones(5)), X_BLE, r"tensors of \[\[5\]"),
        (lambda gain, x: (gain * x, x.sum()), X_BLE, r"tensors of \[\[\]"),
    ],
    ids=["object", "numbers", "structure", "state", "packed", "codes", "loads", "a sum"],
)
def test_what_belongs_to_one_domain_alone_is_not_given_to_all(returns, x, message):
    model = Returning(returns)
    optimizer = optimizer_of(model)
    with (
        pytest.raises(RuntimeError, match=message),
        optimizer.stacked(model, dict.fromkeys("abc", 1)),
    ):
        model(x)


def test_what_all_domains_have_in_common_is_joined():
    model = Returning(lambda gain, x: (gain * x, (gain * x).flatten(0, 1), 2, "tanh", None))
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, dict.fromkeys("abc", 1)):
        whole, flat, *rest = model(X_BLE)
        assert torch.equal(whole, X_BLE)
        assert torch.equal(flat, X_BLE.flatten(0, 1))
        assert rest == [2, "tanh", None]
        whole.sum().backward()


def test_a_parameter_that_every_example_gets_is_an_output_of_examples():
    """As the token before an image's patches, which is expanded and no copy."""
    model = Returning(lambda gain, x: gain.expand(len(x), 1, 3))
    optimizer = optimizer_of(model, "ab")
    with optimizer.stacked(model, {"a": 2, "b": 1}):
        (model(X_BLE) * X_BLE[:, :1]).sum().backward()
    expected = torch.stack([X_BLE[:2, 0].sum(0), X_BLE[2, 0]])
    torch.testing.assert_close(rows_of(optimizer, model)["gain"], expected)


def test_an_example_is_no_input_that_all_share():
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 4))
    optimizer = optimizer_of(model)
    message = r"6 examples.*\[1, 9, 16\]"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model[1](model[0](ids_of(SIZES))[:1])


def test_what_follows_a_layer_may_change_it_in_place():
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 8),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, VOCABULARY),
    ).double()
    optimizer, ids_BL = optimizer_of(model), ids_of(SIZES)
    run(optimizer, model, ids_BL)
    assert_same(rows_of(optimizer, model), rows_by_autograd(model, ids_BL))


class Masked(nn.Module):
    """A layer of torch's, with one mask: of positions, or of the examples' own tokens."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)

    def forward(self, ids_BL: Tensor) -> Tensor:
        length = ids_BL.shape[1]
        is_last = torch.arange(length) == length - 1
        masks = {
            "src_mask": torch.ones(length, length, dtype=torch.bool).triu(1),
            "src_key_padding_mask": is_last & (ids_BL[:, :1] % 2 == 0),
        }
        hidden = self.encoder(self.embedding(ids_BL), **{self.mask: masks[self.mask]})
        output: Tensor = self.head(hidden)
        return output


@pytest.mark.parametrize("mask", ["src_mask", "src_key_padding_mask"])
def test_masks_of_as_many_positions_as_examples_go_by_the_names_of_torch(mask):
    ids_BL = ids_of(SIZES)
    ids_BL = ids_BL[:, : len(ids_BL)]
    model = Masked(mask).double()
    optimizer = optimizer_of(model)
    run(optimizer, model, ids_BL)
    assert_same(rows_of(optimizer, model), rows_by_autograd(model, ids_BL))


class Argued(nn.Module):
    """A module without a rule, which takes an argument that all domains would share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.codes = nn.Parameter(torch.ones(16, 4))

    def forward(self, x_BH: Tensor, other: Any = None) -> Any:
        return (x_BH * self.weight, self.codes) if other == "codes" else x_BH * self.weight


@pytest.mark.parametrize("other", [object(), [1.0] * 8, "codes"], ids=["object", "list", "codes"])
def test_arguments_and_outputs_of_no_domain_are_refused(other):
    model = Argued()
    optimizer = optimizer_of(model)
    with (
        pytest.raises(RuntimeError, match="one domain after another"),
        optimizer.stacked(model, {"a": 4, "b": 4}),
    ):
        model(torch.ones(8, 4), other)


def test_sizes_are_checked():
    model = Tiny()
    optimizer = optimizer_of(model)
    for sizes, message in (
        ({"nobody": 3}, "nobody"),
        ({"a": -1, "b": 2}, "'a': -1"),
        ({"a": 0}, "at least one example"),
    ):
        with pytest.raises(ValueError, match=message), optimizer.stacked(model, sizes):
            pass
    with pytest.raises(RuntimeError, match="gradient"), optimizer.stacked(model, SIZES):
        pass


@pytest.mark.parametrize("kind", ["untied", "without rules"])
def test_a_gradient_past_the_context_is_refused(kind):
    model, ids_BL = made(kind), ids_of()
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
        late, later, last = (losses_of(model(ids_BL), ids_BL, SIZES).sum() for _ in range(3))
    with pytest.raises(RuntimeError, match="outside"):
        late.backward()
    optimizer.zero_grad()
    # Nor in another pass.
    with pytest.raises(RuntimeError, match="outside"), optimizer.domain("a"):
        later.backward()
    with pytest.raises(RuntimeError, match="outside"), optimizer.stacked(model, EQUAL):
        last.backward()


def test_weights_that_are_kept_for_the_whole_batch_are_refused():
    model, ids_BL = made("without rules"), ids_of()
    with pytest.raises(RuntimeError, match="cached"), parametrize.cached():
        run(optimizer_of(model), model, ids_BL)


Losses = Callable[[], Tensor]


def read_features(model: nn.Module, loss_of: Losses) -> None:
    features: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda *call: features.append(call[2]))
    loss = loss_of()
    hook.remove()
    torch.autograd.grad(loss, features, retain_graph=True)
    every = [param for param in model.parameters() if param.requires_grad]
    torch.autograd.grad(loss, every, retain_graph=True, allow_unused=True)
    loss.backward()


def freeze_for_one_forward(model: nn.Module, loss_of: Losses) -> None:
    parts = nn.ModuleList([model.odd, model.norm])
    parts.requires_grad_(False)
    frozen = loss_of()
    parts.requires_grad_(True)
    (frozen - 2 * loss_of()).backward()


def set_data(model: nn.Module, loss_of: Losses) -> None:
    """As convolutions with bounded weights do."""

    def bound(module: nn.Module, _: Any) -> None:
        module.weight.data = module.weight.data.clamp(max=0.1)

    hook = model.odd.filter.register_forward_pre_hook(bound)
    loss_of().backward()
    hook.remove()
    assert model.odd.filter.weight.max() == 0.1


@pytest.mark.parametrize("backward", [read_features, freeze_for_one_forward, set_data])
def test_a_backward_pass_fills_what_it_was_asked_for(backward):
    """By rules and by slices, as `domain()` does."""
    ids_BL = ids_of()

    def loss_of(model: nn.Module, ids_BL: Tensor, sizes: dict[str, int]) -> Tensor:
        return losses_of(model(ids_BL), ids_BL, sizes).sum()

    model = made("without rules")
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES):
        backward(model, partial(loss_of, model, ids_BL, SIZES))
    rows = rows_of(optimizer, model)
    model = made("without rules")
    optimizer = optimizer_of(model)
    for name, ids in zip(SIZES, ids_BL.split([*SIZES.values()]), strict=True):
        if len(ids):
            with optimizer.domain(name):
                backward(model, partial(loss_of, model, ids, {name: len(ids)}))
    assert_same(rows, rows_of(optimizer, model))


def double_the_output(model: nn.Module) -> None:
    before = model.up.forward
    model.up.forward = lambda x: 2 * before(x)


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def change_the_class(model: nn.Module) -> None:
    model.up.__class__ = Halved


def take_the_bias(model: nn.Module) -> None:
    model.up.bias = None


@pytest.mark.parametrize("change", [double_the_output, change_the_class, take_the_bias])
def test_a_module_that_changed_since_the_last_step_is_seen(change):
    model, ids_BL = made("untied"), ids_of()
    optimizer = optimizer_of(model)
    run(optimizer, model, ids_BL)
    optimizer.zero_grad()
    change(model)
    run(optimizer, model, ids_BL)
    assert_same(rows_of(optimizer, model), rows_by_autograd(model, ids_BL))
    double = {name: 2 * param for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match="whole batch"):
        run(optimizer, model, ids_BL, call=lambda ids: functional_call(model, double, ids))
    # A hook computes this weight before the forward, where domains cannot be told apart.
    prune.l1_unstructured(model.down, "weight", amount=0.5)
    with pytest.raises(RuntimeError, match="whole batch"):
        run(optimizer, model, ids_BL)


def test_a_model_is_prepared_once():
    """A module with two parents is one."""
    model, ids_BL = made("untied"), ids_of()
    model.again = nn.ModuleList([model.norm])
    optimizer = optimizer_of(model)
    prepared = []
    for _ in range(2):
        run(optimizer, model, ids_BL)
        prepared.append(optimizer._step._stacked_model)
        optimizer.zero_grad()
    assert prepared[0] is prepared[1]


def test_what_another_optimizer_trains_keeps_its_gradient():
    grads = []
    for way in (run, sequential):
        model = made("untied")
        mine = [(name, param) for name, param in model.named_parameters() if name != "up.bias"]
        optimizer = DoGEOptimizer(torch.optim.SGD(mine, lr=0.1), domains=list(SIZES), absent="keep")
        way(optimizer, model, ids_of(), SIZES)
        assert model.up.bias.grad is not None
        grads.append(model.up.bias.grad)
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-15)


def launches(dispatched: Dispatched) -> list[str]:
    """Names of the operators that make no view."""
    return [str(func) for func, *_ in dispatched.calls if not func.is_view]


@pytest.mark.parametrize("counts", ["none", "ints", "tensors"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_launches_do_not_grow_with_the_number_of_domains(counts, is_ragged):
    """On a device that has no CPU's kernels; products of unequal domains are one each."""
    num_launches = []
    for num_domains in (4, 12):
        sizes = {str(row): 2 + (is_ragged and row % 2) for row in range(num_domains)}
        with torch.device("meta"):
            model = Tiny(tied=True)
            ids_BL = torch.zeros(sum(sizes.values()), LENGTH, dtype=torch.int64)
            one = 3 if counts == "ints" else torch.zeros((), dtype=torch.int64)
            targets = None if counts == "none" else dict.fromkeys(sizes, one)
            optimizer = optimizer_of(model, sizes)
            with optimizer.stacked(model, sizes), Dispatched() as dispatched:
                losses_D = domain_losses(model(ids_BL), ids_BL, sizes, num_targets=targets)
                losses_D.sum().backward()
        products = ("aten.mm.", "aten.addmm", "aten.bmm", "aten.baddbmm") if is_ragged else ()
        num_launches.append(sum(not name.startswith(products) for name in launches(dispatched)))
    assert num_launches[0] == num_launches[1]


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 1, "b": 3}], ids=["equal", "ragged"])
def test_a_gain_and_its_bias_are_one_sum(sizes):
    """On a device that has no CPU's kernels. A frozen gain leaves the bias a sum of its own."""
    sums = []
    for is_trained in (True, False):
        with torch.device("meta"):
            model, x_BLD = nn.LayerNorm(16), torch.zeros(4, LENGTH, 16)
        model.weight.requires_grad_(is_trained)
        optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=[*sizes])
        with optimizer.stacked(model, sizes), Dispatched() as dispatched:
            output_BLD = model(x_BLD)
            output_BLD.backward(output_BLD.detach())
        sums.append([name for name in launches(dispatched) if "sum" in name])
    assert sums[0] == ["doge_fast.segment_sum.default"]
    assert len(sums[1]) == 1


def test_a_bias_that_two_norms_share_is_added_to(monkeypatch):
    """Beside a gain that is not, so that no one sum makes both."""
    as_on_a_gpu(monkeypatch, "torch")
    norms = nn.LayerNorm(VOCABULARY), nn.LayerNorm(VOCABULARY)
    model = nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), *norms).double()
    model[2].bias = model[1].bias
    optimizer = optimizer_of(model)
    run(optimizer, model, ids_of())
    assert_same(rows_of(optimizer, model), rows_by_autograd(model, ids_of()))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_embeddings_of_16_bits_add_in_float32(backend, monkeypatch):
    """A word that comes 300 times: its sum is rounded once."""
    as_on_a_gpu(monkeypatch, backend)
    model = nn.Embedding(3, 8).bfloat16()
    ids_BL, factor_BLD = torch.ones(2, 300).long(), torch.rand(2, 300, 8).bfloat16() + 1
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    with optimizer.stacked(model, {"a": 1, "b": 1}):
        (model(ids_BL) * factor_BLD).sum().backward()
    (block,) = optimizer.buffer.touched(list(model.parameters()))
    exact_GRC = torch.zeros(2, 3, 8, dtype=torch.float64)
    exact_GRC[:, 1] = factor_BLD.double().sum(1)
    error = (block.rows_BN.view(2, 3, 8).double() - exact_GRC).abs()
    # The interpreter of Triton cuts bits off where it narrows: a whole unit.
    assert (error <= torch.finfo(torch.bfloat16).eps * exact_GRC).all()


@pytest.fixture
def wide_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """What a GPU has and a CPU lacks, products of 16 bits into float32; the shapes of results."""
    shapes: list[torch.Size] = []

    def bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert out.dtype == out_dtype == torch.float32
        shapes.append(out.shape)
        return torch.bmm(left.float(), right.float(), out=out)

    def baddbmm(
        self: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: Tensor,
    ) -> Tensor:
        assert self is out or self.data_ptr() == out.data_ptr()
        return out.add_(bmm(left, right, out_dtype, out=torch.empty_like(out)))

    monkeypatch.setattr(linear, "WIDE_PRODUCTS", ("cpu",))
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm.dtype_out", bmm, "CPU")
    library.impl("baddbmm.dtype_out", baddbmm, "CPU")
    yield shapes
    library._destroy()


def test_a_tied_head_goes_to_float32_rows_without_a_temporary(wide_products):
    sizes = {"a": 1, "b": 2, "absent": 0, "c": 3}
    errors = []
    for num_steps in (1, 2):
        model, ids_BL = made("tied").bfloat16(), ids_of(sizes)
        optimizer = optimizer_of(model)
        for _ in range(num_steps):
            # The second step knows that the rows are float32.
            optimizer.zero_grad()
            assert not wide_products
            run(optimizer, model, ids_BL, sizes)
        (block,) = optimizer.buffer.touched([model.words.weight])
        assert block.rows_BN.dtype == torch.float32
        exact = rows_by_autograd(model.double(), ids_BL, sizes)["words.weight"]
        errors.append(float((block.rows_BN.double() - exact).norm()))
    # Two domains of one size are one product; each size here is another.
    assert wide_products == [torch.Size([1, VOCABULARY, 16])] * 3
    # The head's product is not rounded any more; the pass itself is.
    assert errors[1] < errors[0] * 1.05


def test_products_of_another_dtype_are_the_same_a_few_domains_at_a_time(monkeypatch):
    left_GRT, right_GTC = (torch.randn(shape).bfloat16() for shape in ((5, 3, 4), (5, 4, 6)))
    expected = 2 + 2 * torch.bmm(left_GRT, right_GTC).float()
    for most in (1 << 26, 2 * 3 * 6 * 2, 1):
        monkeypatch.setattr(linear, "MOST_TEMPORARY_BYTES", most)
        out = torch.full((5, 3, 6), 2.0)
        linear.multiply(out, left_GRT, right_GTC, True)
        linear.multiply(out, left_GRT, right_GTC, True)
        assert torch.equal(out, expected)


def test_graphs_of_kernels_leave_the_rows_outside():
    assert torch.Tag.cudagraph_unsafe in torch.ops.doge_fast.fill_rows_.default.tags
