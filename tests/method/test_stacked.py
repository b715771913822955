"""One backward for all domains: the rows are those of one domain after another."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from doge_fast import DoGEOptimizer
from doge_fast.kernels import implementations
from doge_fast.stacked.layers import token_sums
from doge_fast.stacked.losses import domain_losses
from tests.launches import LaunchCounter

SIZES = {"a": 1, "b": 3, "absent": 0, "c": 2}
VOCABULARY, LENGTH = 40, 9

Rows = dict[str, Tensor]


class Tiny(nn.Module):
    """Embeddings, positions without a batch, norms, linear layers, perhaps a tied head."""

    def __init__(self, *, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.places = nn.Embedding(LENGTH, 16)
        self.norm = nn.LayerNorm(16, bias=bias)
        self.up = nn.Linear(16, 24, bias=bias)
        self.root = nn.RMSNorm(24)
        self.down = nn.Linear(24, 16, bias=bias)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids_BL: Tensor) -> Tensor:
        x = self.words(ids_BL) + self.places(torch.arange(ids_BL.shape[1]))
        x = x + self.down(self.root(F.gelu(self.up(self.norm(x)))))
        logits: Tensor = self.head(x)
        return logits


def mean_loss(logits: Tensor, ids_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())


def losses_of(logits: Tensor, ids_BL: Tensor, sizes: dict[str, int]) -> Tensor:
    pairs = zip(logits.split([*sizes.values()]), ids_BL.split([*sizes.values()]), strict=True)
    return torch.stack([mean_loss(part, ids) for part, ids in pairs if len(ids)])


def ids_of(sizes: dict[str, int] = SIZES, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (sum(sizes.values()), LENGTH), generator=generator)


def optimizer_of(model: nn.Module, **options: Any) -> DoGEOptimizer:
    return DoGEOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=0.1),
        domains=list(SIZES),
        absent="keep",
        micro_batches=None,
        domain_max_grad_norm=None,
        **options,
    )


def rows_of(optimizer: DoGEOptimizer, model: nn.Module) -> Rows:
    names = {id(param): name for name, param in model.named_parameters()}
    blocks = optimizer.buffer.touched(optimizer.param_groups[0]["params"])
    rows = {names[id(block.param)]: block.rows_BN.clone() for block in blocks}
    optimizer.zero_grad()
    return rows


def sequential(model: nn.Module, ids_BL: Tensor, sizes: dict[str, int] = SIZES) -> Rows:
    optimizer = optimizer_of(model)
    for (name, size), ids in zip(sizes.items(), ids_BL.split([*sizes.values()]), strict=True):
        if size:
            with optimizer.domain(name):
                mean_loss(model(ids), ids).backward()
    return rows_of(optimizer, model)


def stacked(
    model: nn.Module,
    ids_BL: Tensor,
    sizes: dict[str, int] = SIZES,
    call: Callable[[Tensor], Tensor] | None = None,
) -> Rows:
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, sizes):
        losses_of((model if call is None else call)(ids_BL), ids_BL, sizes).sum().backward()
    return rows_of(optimizer, model)


def assert_same(ours: Rows, expected: Rows) -> None:
    """To 1e-14 of the largest entry: a few float64 roundings, in another order."""
    assert ours.keys() == expected.keys()
    for name, rows_RN in expected.items():
        error = (ours[name] - rows_RN).abs().max() / rows_RN.abs().max()
        assert error <= 1e-14, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_rows_are_those_of_one_domain_after_another(tied: bool, bias: bool) -> None:
    model = Tiny(tied=tied, bias=bias).double()
    ids_BL = ids_of()
    ids_BL[1, 2:5] = 3
    assert_same(stacked(model, ids_BL), sequential(model, ids_BL))


class Odd(nn.Module):
    """A bare parameter, a convolution and a child: no rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.filter = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.inner = nn.Linear(16, 16)

    def forward(self, x_BLD: Tensor, *, factor: float = 1.0) -> tuple[Tensor, float]:
        filtered = self.filter(x_BLD.transpose(1, 2)).transpose(1, 2)
        return self.inner(filtered) * self.scale * factor, factor


class Composite(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        self.second = nn.Embedding(VOCABULARY, 16, scale_grad_by_freq=True)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x, _ = self.odd(self.words(ids_BL) + self.second(ids_BL), factor=0.5)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_what_has_no_rule_runs_domain_by_domain() -> None:
    model = Composite().double()
    ids_BL = ids_of()
    assert_same(stacked(model, ids_BL), sequential(model, ids_BL))


def test_a_root_with_parameters_of_its_own() -> None:
    class Root(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.randn(VOCABULARY))

        def forward(self, ids_BL: Tensor) -> Tensor:
            return super().forward(ids_BL) + self.offset

    model = Root().double()
    assert_same(stacked(model, ids_of()), sequential(model, ids_of()))


def test_a_module_called_twice_adds_up() -> None:
    class Twice(Tiny):
        def forward(self, ids_BL: Tensor) -> Tensor:
            x = self.down(F.gelu(self.up(self.words(ids_BL))))
            logits: Tensor = self.head(self.down(F.gelu(self.up(self.norm(x)))))
            return logits

    model = Twice().double()
    assert_same(stacked(model, ids_of()), sequential(model, ids_of()))


def test_micro_batches_of_the_same_and_of_other_domains_add_up() -> None:
    model = Tiny().double()
    batches = [({"a": 1, "b": 2}, 1), ({"b": 1, "c": 2}, 2), ({"c": 3}, 3)]
    optimizer = optimizer_of(model)
    for sizes, seed in batches:
        ids_BL = ids_of(sizes, seed)
        with optimizer.stacked(model, sizes):
            losses_of(model(ids_BL), ids_BL, sizes).sum().backward()
    ours = rows_of(optimizer, model)
    for sizes, seed in batches:
        for name, ids in zip(sizes, ids_of(sizes, seed).split([*sizes.values()]), strict=True):
            with optimizer.domain(name):
                mean_loss(model(ids), ids).backward()
    assert_same(ours, rows_of(optimizer, model))


def test_frozen_parameters_stay_out() -> None:
    model = Tiny().double()
    for param in (*model.up.parameters(), model.norm.bias, model.words.weight):
        param.requires_grad_(False)
    ours = stacked(model, ids_of())
    assert_same(ours, sequential(model, ids_of()))
    assert not {"up.weight", "up.bias", "norm.bias", "words.weight"} & ours.keys()


def test_steps_are_the_same_in_both_modes() -> None:
    models = [Tiny().double(), Tiny().double()]
    models[1].load_state_dict(models[0].state_dict())
    sizes = {"a": 1, "b": 3, "absent": 1, "c": 2}
    ours, other = (
        DoGEOptimizer(
            torch.optim.AdamW(model.named_parameters(), lr=1e-2),
            domains=["a", "b", "c"],
            target={"absent": 1.0},
            mu=0.5,
            max_grad_norm=1.0,
        )
        for model in models
    )
    for step in range(5):
        ids_BL = ids_of(sizes, step)
        with ours.stacked(models[0], sizes):
            losses_of(models[0](ids_BL), ids_BL, sizes).sum().backward()
        for name, ids in zip(sizes, ids_BL.split([*sizes.values()]), strict=True):
            with other.domain(name):
                mean_loss(models[1](ids), ids).backward()
        for optimizer in (ours, other):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.alpha, other.alpha, rtol=1e-12, atol=0)
    for param, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    model = Tiny().double()
    anchor = torch.zeros(1, requires_grad=True, dtype=torch.float64)

    def call(ids_BL: Tensor) -> Tensor:
        # A reentrant checkpoint needs an input that wants a gradient.
        logits: Tensor = checkpoint(
            lambda ids, zero: model(ids) + zero, ids_BL, anchor, use_reentrant=use_reentrant
        )
        return logits

    assert_same(stacked(model, ids_of(), call=call), sequential(model, ids_of()))


# Of torch's own making: its compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled_as_one_graph(backend: str) -> None:
    model = Tiny().double()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = sequential(model, ids_of())
    assert_same(stacked(model, ids_of(), call=compiled), expected)
    # Another batch of the same shape, cut elsewhere, through the same graph.
    sizes = {"a": 2, "b": 1, "c": 3}
    optimizer = optimizer_of(model)
    for seed in (4, 5):
        ids_BL = ids_of(sizes, seed)
        with optimizer.stacked(model, sizes):
            losses_of(compiled(ids_BL), ids_BL, sizes).sum().backward()
        assert_same(rows_of(optimizer, model), sequential(model, ids_BL, sizes))


def test_under_autocast_rows_are_what_was_computed() -> None:
    """Products of bfloat16 are stored in bfloat16, without loss; norms and sums in float32."""
    model = Tiny(tied=False)
    ids_BL = ids_of()
    expected = sequential(model.double(), ids_BL)
    model.float()
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES), torch.autocast("cpu", dtype=torch.bfloat16):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    rows = rows_of(optimizer, model)
    assert rows["up.weight"].dtype == torch.bfloat16
    assert rows["norm.weight"].dtype == torch.float32
    for name, rows_RN in expected.items():
        error = (rows[name].double() - rows_RN).norm() / rows_RN.norm()
        # Some ten roundings to eight bits on the way.
        assert error < 10 * torch.finfo(torch.bfloat16).eps, name
    # A second micro-batch adds up in float32.
    for _ in range(2):
        with optimizer.stacked(model, SIZES), torch.autocast("cpu", dtype=torch.bfloat16):
            losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    twice = rows_of(optimizer, model)
    assert twice["up.weight"].dtype == torch.float32
    torch.testing.assert_close(twice["up.weight"], 2 * rows["up.weight"].float())


def test_the_model_is_as_before() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    ids_BL = ids_of()
    before = model(ids_BL)
    with optimizer.stacked(model, SIZES):
        assert torch.equal(model(ids_BL), before)
        with torch.no_grad():
            assert torch.equal(model(ids_BL), before)
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(param.grad is None for param in model.parameters())


class Refused(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_batch_statistics_are_refused() -> None:
    model = Refused(nn.BatchNorm1d(4))
    optimizer = optimizer_of(model)
    with (
        pytest.raises(ValueError, match=r"layer is a BatchNorm1d, whose statistics mix"),
        optimizer.stacked(model, SIZES),
    ):
        pass
    model.eval()
    with optimizer.stacked(model, SIZES):
        (model(torch.randn(6, 4)) ** 2).sum().backward()


def test_a_parameter_used_past_its_module_is_named() -> None:
    model = Tiny(tied=False)
    optimizer = optimizer_of(model)
    message = r"the parameter up\.weight received a gradient of the whole"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model.up.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="dropped this step's gradients"):
        optimizer.step()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((7, 4), r"6 examples .* Linear got shape \[7, 4\]"), ((12, 4), r"got shape \[12, 4\]")],
    ids=["another batch", "flattened, length unknown"],
)
def test_an_input_without_the_batch_in_front_is_refused(
    shape: tuple[int, int], message: str
) -> None:
    model = Refused(nn.Linear(4, 4))
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model(torch.randn(shape)).sum().backward()


class Recurrent(Tiny):
    """Reads the last state of both directions, [2, examples, 8]."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, batch_first: bool = True) -> None:
        super().__init__()
        self.memory = kind(16, 8, bidirectional=True, batch_first=batch_first)

    def forward(self, ids_BL: Tensor) -> Tensor:
        states_BLE, last = self.memory(self.words(ids_BL))
        last_2BE = last[0] if isinstance(last, tuple) else last
        logits: Tensor = self.head(states_BLE + last_2BE.transpose(0, 1).flatten(1)[:, None])
        return logits


# Of equal size, and of a size that the number of directions hides behind.
@pytest.mark.parametrize("sizes", [SIZES, {"a": 3, "b": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_state_of_a_recurrent_network_keeps_its_examples(
    kind: type[nn.LSTM | nn.GRU], sizes: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model, ids_BL = Recurrent(kind).double(), ids_of(sizes)
    assert_same(stacked(model, ids_BL, sizes), sequential(model, ids_BL, sizes))


def test_time_before_the_batch_is_refused() -> None:
    model = Recurrent(nn.LSTM, batch_first=False)
    ids_BL = ids_of()[:, :6]
    optimizer = optimizer_of(model)
    message = r"LSTM was made with batch_first=False and has them in the second"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, SIZES):
        model(ids_BL)


class Columns(nn.Linear):
    def forward(self, x_BLE: Tensor) -> Tensor:
        return super().forward(x_BLE).flatten(1).T


@pytest.mark.parametrize("sizes", [SIZES, {"a": 3, "b": 3}])
def test_an_output_without_the_domain_in_front_is_refused(sizes: dict[str, int]) -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), Columns(16, 1))
    optimizer = optimizer_of(model)
    message = r"Columns once per domain and cannot join its output of shape \[8, [13]\]"
    with pytest.raises(RuntimeError, match=message), optimizer.stacked(model, sizes):
        model(ids_of(sizes)[:, :8])


def test_a_flattened_batch_is_cut_where_its_length_is_known() -> None:
    class Flat(Tiny):
        def forward(self, ids_BL: Tensor) -> Tensor:
            x = self.norm(self.words(ids_BL))
            return self.head(x.flatten(0, 1)).view(*ids_BL.shape, -1)  # type: ignore[no-any-return]

    model = Flat(tied=False).double()
    assert_same(stacked(model, ids_of()), sequential(model, ids_of()))


def test_positions_are_not_taken_for_examples() -> None:
    """As many positions as examples: [L] could be either, [1, L] is not."""

    class Row(Tiny):
        def forward(self, ids_BL: Tensor) -> Tensor:
            x = self.words(ids_BL) + self.places(torch.arange(ids_BL.shape[1])[None])
            logits: Tensor = self.head(x)
            return logits

    sizes = {"a": 4, "b": 5}
    ids_BL = ids_of(sizes)
    assert len(ids_BL) == LENGTH
    with pytest.raises(RuntimeError, match=r"cannot tell 9 positions from one index"):
        stacked(Tiny(), ids_BL, sizes)
    model = Row().double()
    assert_same(stacked(model, ids_BL, sizes), sequential(model, ids_BL, sizes))


def test_a_replaced_forward_is_kept() -> None:
    model = Tiny().double()
    forward = model.up.forward
    model.up.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    assert_same(stacked(model, ids_of()), sequential(model, ids_of()))
    assert "forward" in model.up.__dict__


def test_sizes_are_checked() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    wrong: list[tuple[Any, str]] = [
        ({"nobody": 3}, "unknown domain 'nobody'"),
        ([3, 2], r"a dict .* got \[3, 2\]"),
        ({"a": 1.5, "b": 1}, "numbers of examples; 'a' has 1.5"),
        ({"a": -1, "b": 2}, "numbers of examples; 'a' has -1"),
        ({"a": 0}, "at least one example"),
    ]
    for sizes, message in wrong:
        with pytest.raises(ValueError, match=message), optimizer.stacked(model, sizes):
            pass
    with (
        pytest.raises(RuntimeError, match=r"received a gradient inside stacked\(\)"),
        optimizer.stacked(model, SIZES),
    ):
        pass


def test_a_backward_pass_after_the_context_is_refused() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    ids_BL = ids_of()
    with optimizer.stacked(model, SIZES):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
        loss = losses_of(model(ids_BL), ids_BL, SIZES).sum()
    with pytest.raises(RuntimeError, match=r"ran outside its context"):
        loss.backward()


def rows_of_one_optimizer(
    model: nn.Module, ids_BL: Tensor, change: Callable[[nn.Module], object]
) -> tuple[Rows, Rows]:
    """Rows after a stacked step of the model as it was and a `change`: stacked and sequential."""
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, SIZES):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    optimizer.zero_grad()
    change(model)
    with optimizer.stacked(model, SIZES):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    return rows_of(optimizer, model), sequential(model, ids_BL)


def double_the_output(model: nn.Module) -> None:
    before = model.up.forward
    model.up.forward = lambda x: 2 * before(x)


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def change_the_class(model: nn.Module) -> None:
    model.up.__class__ = Halved


@pytest.mark.parametrize("change", [double_the_output, change_the_class])
def test_a_module_that_changed_since_the_last_step_is_seen(
    change: Callable[[nn.Module], object],
) -> None:
    assert_same(*rows_of_one_optimizer(Tiny().double(), ids_of(), change))


def test_a_weight_that_became_a_product_since_is_refused_by_name() -> None:
    """A hook computes it before the forward, where domains cannot be told apart."""
    with pytest.raises(RuntimeError, match="received a gradient of the whole batch"):
        rows_of_one_optimizer(
            Tiny().double(),
            ids_of(),
            lambda model: prune.l1_unstructured(model.down, "weight", amount=0.5),
        )


def test_equal_neighbours_fill_their_rows_together_and_others_by_themselves() -> None:
    """Runs of equal sizes, with an empty domain between and rows half written already."""
    sizes = {"a": 2, "b": 2, "absent": 0, "c": 2}
    model = Tiny().double()
    first, second = ids_of(sizes), ids_of({"a": 2, "b": 0, "absent": 0, "c": 0}, seed=1)
    optimizer = optimizer_of(model)
    with optimizer.stacked(model, {"a": 2, "b": 0, "absent": 0, "c": 0}):
        mean_loss(model(second), second).backward()
    with optimizer.stacked(model, sizes):
        losses_of(model(first), first, sizes).sum().backward()
    ours = rows_of(optimizer, model)
    optimizer = optimizer_of(model)
    for name, ids in (("a", second), *zip("abc", first.split(2), strict=True)):
        with optimizer.domain(name):
            mean_loss(model(ids), ids).backward()
    assert_same(ours, rows_of(optimizer, model))


def test_a_module_of_two_parents_is_one() -> None:
    model = Tiny().double()
    model.again = nn.ModuleList([model.norm])
    optimizer = optimizer_of(model)
    ids_BL = ids_of()
    for _ in range(2):
        with optimizer.stacked(model, SIZES):
            losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
        stack = optimizer._step._stacked_model
        optimizer.zero_grad()
    with optimizer.stacked(model, SIZES):
        losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
    assert optimizer._step._stacked_model is stack


class Named(Tiny):
    """Arguments by the names that torch's modules have for them."""

    def forward(self, ids_BL: Tensor) -> Tensor:
        x = self.words(input=ids_BL)
        logits: Tensor = self.head(input=self.norm(input=x))
        return logits


def test_arguments_may_have_their_names() -> None:
    model, ids_BL = Named().double(), ids_of()
    assert_same(stacked(model, ids_BL), sequential(model, ids_BL))


@pytest.mark.filterwarnings("ignore:parameters that no wrapped optimizer owns")
def test_what_another_optimizer_trains_keeps_its_gradient() -> None:
    model, ids_BL = Tiny(tied=False).double(), ids_of()
    mine = [(name, param) for name, param in model.named_parameters() if name != "up.bias"]
    grads = []
    for is_stacked in (True, False):
        optimizer = DoGEOptimizer(torch.optim.SGD(mine, lr=0.1), domains=list(SIZES), absent="keep")
        if is_stacked:
            with optimizer.stacked(model, SIZES):
                losses_of(model(ids_BL), ids_BL, SIZES).sum().backward()
        else:
            for name, ids in zip(SIZES, ids_BL.split([*SIZES.values()]), strict=True):
                if len(ids):
                    with optimizer.domain(name):
                        mean_loss(model(ids), ids).backward()
        grads.append(model.up.bias.grad)
        model.up.bias.grad = None
        optimizer.zero_grad()
    assert grads[0] is not None
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-13, atol=1e-15)


@pytest.fixture(params=["torch", "triton"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tokens as on a GPU: those of all domains in one operator."""
    if implementations("cpu")[request.param] is not None:
        pytest.skip(f"{request.param} does not run on a CPU here")
    monkeypatch.setattr(token_sums, "ONE_BY_ONE", ())
    monkeypatch.setenv("DOGE_FAST_BACKEND", request.param)


@pytest.mark.parametrize("sizes", [SIZES, {"a": 2, "b": 2, "absent": 0, "c": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sums_of_all_domains_at_once_give_the_same_rows(
    tied: bool, sizes: dict[str, int], at_once: None
) -> None:
    """To the bit when they are computed again."""
    model, ids_BL = Tiny(tied=tied).double(), ids_of(sizes)
    ids_BL[1, 2:5] = 3
    rows = stacked(model, ids_BL, sizes)
    assert_same(rows, sequential(model, ids_BL, sizes))
    again = stacked(model, ids_BL, sizes)
    assert all(torch.equal(rows[name], again[name]) for name in rows)


def test_sums_of_all_domains_at_once_add_up(at_once: None) -> None:
    test_micro_batches_of_the_same_and_of_other_domains_add_up()


@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_launches_do_not_grow_with_the_number_of_domains(is_ragged: bool) -> None:
    """On a device that has no CPU's kernels; products of unequal domains are one each."""
    counts = []
    for num_domains in (4, 12):
        sizes = {str(row): 2 + (is_ragged and row % 2) for row in range(num_domains)}
        with torch.device("meta"):
            model = Tiny()
            ids_BL = torch.zeros(sum(sizes.values()), LENGTH, dtype=torch.int64)
            optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=[*sizes])
            with optimizer.stacked(model, sizes), LaunchCounter() as counter:
                domain_losses(model(ids_BL), ids_BL, sizes).sum().backward()
        products = ("aten.mm.", "aten.addmm", "aten.bmm", "aten.baddbmm")
        counts.append(sum(not name.startswith(products) for name in counter.names))
        if not is_ragged:
            counts[-1] = len(counter.names)
    assert counts[0] == counts[1]


def test_embeddings_of_16_bits_add_in_float32(at_once: None) -> None:
    """A word that comes 300 times: its sum is rounded once."""
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

    monkeypatch.setattr(token_sums, "WIDE_PRODUCTS", ("cpu",))
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm.dtype_out", bmm, "CPU")
    library.impl("baddbmm.dtype_out", baddbmm, "CPU")
    yield shapes
    library._destroy()


def rows_of_a_tied_head(num_steps: int) -> tuple[Tensor, Tensor]:
    """[K, V, D] rows of a tied matrix in bfloat16 after some steps; those of its gradients."""
    torch.manual_seed(0)
    sizes = {"a": 1, "b": 2, "c": 3}
    model, ids_BL = Tiny().bfloat16(), ids_of(sizes)
    optimizer = optimizer_of(model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with optimizer.stacked(model, sizes):
            losses_of(model(ids_BL), ids_BL, sizes).sum().backward()
    (block,) = optimizer.buffer.touched([model.words.weight])
    exact = sequential(model.double(), ids_BL, sizes)["words.weight"]
    return block.rows_BN.clone(), exact


def test_a_tied_head_goes_to_float32_rows_without_a_temporary(
    wide_products: list[torch.Size],
) -> None:
    first, exact = rows_of_a_tied_head(1)
    assert not wide_products
    second, _ = rows_of_a_tied_head(2)
    # Two domains of one size are one product; each size here is another.
    assert wide_products == [torch.Size([1, VOCABULARY, 16])] * 3
    assert first.dtype == second.dtype == torch.float32
    narrow, wide = (float((rows.double() - exact).norm()) for rows in (first, second))
    # The head's product is not rounded any more; the pass itself is.
    assert wide < narrow * 1.05


def test_products_apart_are_the_same_a_few_domains_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_GRT, right_GTC = (torch.randn(shape).bfloat16() for shape in ((5, 3, 4), (5, 4, 6)))
    made = []
    for most in (1 << 26, 2 * 3 * 6 * 2, 1):
        monkeypatch.setattr(token_sums, "MOST_TEMPORARY_BYTES", most)
        out = torch.full((5, 3, 6), 2.0)
        token_sums.products(left_GRT, right_GTC)(out, True)
        token_sums.products(left_GRT, right_GTC)(out, True)
        made.append(out)
    expected = 2 + 2 * torch.bmm(left_GRT, right_GTC).float()
    assert all(torch.equal(out, expected) for out in made)


def test_graphs_of_kernels_leave_the_rows_outside() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.doge_fast.fill_rows_.default.tags


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
def test_norms_under_autocast_are_as_without(norm: Any, own: torch.dtype) -> None:
    """Their output to the bit, whatever the dtypes of input and weight."""
    model = nn.Sequential(nn.Linear(16, 16), norm(16).to(own), nn.Linear(16, 16))
    x = torch.randn(4, 5, 16)
    outputs = []
    optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        # Torch's note that input and weight have two dtypes.
        warnings.simplefilter("ignore", UserWarning)
        outputs.append(model(x))
        with optimizer.stacked(model, {"a": 2, "b": 2}):
            outputs.append(model(x))
            outputs[-1].float().square().sum().backward()
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
