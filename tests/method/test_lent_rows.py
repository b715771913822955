"""Stacked passes that are a whole step: rows are read when others need their memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from doge_fast import DoGEOptimizer, flat_buffer
from doge_fast.losses import domain_losses, linear_domain_losses
from doge_fast.weights.aligned import WAITING_STEPS
from tests.method.architectures import ARCHITECTURES, LENGTH, PADDING, VOCABULARY, Odd, Tiny, Twice

DOMAINS, TARGET = ("a", "b"), {"a": 1.0, "far": 2.0}
SIZES = {"a": 2, "b": 3, "far": 5}
STEPS = WAITING_STEPS + 6

Losses = Callable[[nn.Module, Tensor], Tensor]


def losses_of(model: nn.Module, ids_BL: Tensor) -> Tensor:
    return domain_losses(model(ids_BL), ids_BL, SIZES)


def linear_losses_of(model: Any, ids_BL: Tensor) -> Tensor:
    return linear_domain_losses(model.hidden(ids_BL), model.head.weight, ids_BL, SIZES)


def both_losses_of(model: Any, ids_BL: Tensor) -> Tensor:
    """The head's weight is used by its module, and by a function."""
    hidden_BLD, weight = model.hidden(ids_BL), model.head.weight
    losses_D = domain_losses(model.head(hidden_BLD), ids_BL, SIZES)
    return losses_D + linear_domain_losses(hidden_BLD, weight, ids_BL, SIZES)


def scaled_losses_of(model: nn.Module, ids_BL: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return 2.0**10 * losses_of(model, ids_BL)


class Checkpointed(Tiny):
    """Its middle is computed again in the backward pass."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def middle(self, x: Tensor) -> Tensor:
        return self.down(self.root(F.gelu(self.up(self.norm(x)))))

    def hidden(self, ids_BL: Tensor) -> Tensor:
        x: Tensor = self.words(ids_BL)
        return x + checkpoint(self.middle, x, use_reentrant=self.is_reentrant)


class Twisted(Tiny):
    """A layer whose calls are all checkpoints, and whose weight a module without a rule uses."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.square = Odd(), nn.Linear(16, 16)
        self.odd.twin.weight = self.square.weight

    def hidden(self, ids_BL: Tensor) -> Tensor:
        x, _ = self.odd(self.words(ids_BL))
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=True)
        return torch.tanh(self.square(x))

    def middle(self, x: Tensor) -> Tensor:
        return x + self.down(self.root(F.gelu(self.up(self.norm(x)))))


def ids_of(seed: int) -> Tensor:
    ids_BL = torch.randint(0, VOCABULARY, (sum(SIZES.values()), LENGTH), generator=seeded(seed))
    return ids_BL.masked_fill(ids_BL == PADDING, 0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(
    build: Callable[[], nn.Module] = Tiny, dtype: torch.dtype = torch.float64, **arguments: Any
) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = build().to(dtype)
    inner = arguments.pop("inner", torch.optim.AdamW)
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    arguments = {"target": TARGET, "score": "aligned", **arguments}
    optimizer = DoGEOptimizer(inner(trained, lr=1e-2), domains=DOMAINS, **arguments)
    return model, optimizer


def fill(
    model: nn.Module, optimizer: DoGEOptimizer, seed: int, losses: Losses, *, keep_rows: bool
) -> None:
    with optimizer.stacked(model, SIZES, keep_rows=keep_rows):
        losses(model, ids_of(seed)).sum().backward()


def names_read(model: nn.Module, optimizer: DoGEOptimizer) -> set[str]:
    """Of the parameters whose rows have been read before the end of the pass."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(block.param)] for block in optimizer.buffer.read_blocks()}


def assert_nothing_is_left(model: nn.Module, optimizer: DoGEOptimizer) -> None:
    """Of a step that failed: the next one is a new optimizer's first."""
    optimizer.zero_grad()
    twin, other = made()
    for each, by in ((model, optimizer), (twin, other)):
        fill(each, by, 2, losses_of, keep_rows=False)
        by.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of each layer are read before those of the next one are written."""
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {"cpu": 1})


KINDS: dict[str, tuple[Callable[[], nn.Module], Losses, dict[str, Any], set[str]]] = {
    # Parameters whose rows stay: those of the layer that is last in the backward pass, weights
    # that are used twice, and what no rule knows.
    "plain": (Tiny, losses_of, {}, {"words.weight"}),
    "tied": (lambda: Tiny(tied=True), losses_of, {}, {"words.weight", "places.weight"}),
    "losses of the head": (Tiny, linear_losses_of, {}, {"words.weight", "head.weight"}),
    "called twice": (
        Twice,
        losses_of,
        {},
        {"words.weight", "up.weight", "up.bias", "down.weight", "down.bias", "norm.weight"}
        | {"norm.bias"},
    ),
    "checkpointed": (
        lambda: Checkpointed(is_reentrant=False),
        losses_of,
        {},
        {"words.weight"},
    ),
    "checkpointed, reentrant": (
        lambda: Checkpointed(is_reentrant=True),
        losses_of,
        {},
        {"words.weight"},
    ),
    "both losses": (
        Tiny,
        both_losses_of,
        {},
        {"words.weight", "head.weight"},
    ),
    "both losses in 16 bits": (
        Tiny,
        both_losses_of,
        {"buffer_dtype": torch.bfloat16},
        {"words.weight", "head.weight"},
    ),
    "not to be told": (
        Twisted,
        losses_of,
        {},
        {
            "words.weight",
            "odd.twin.weight",
            *(f"{m}.{p}" for m in ("up", "down", "norm") for p in ("weight", "bias")),
        }
        | {"root.weight", "odd.scale", "odd.inner.weight", "odd.inner.bias", "odd.filter.weight"}
        | {"odd.filter.bias", "odd.twin.bias"},
    ),
    "selection": (Tiny, losses_of, {"selection": ["up.weight", "words.weight"]}, {"words.weight"}),
    "clipped": (Tiny, losses_of, {"max_grad_norm": 0.1}, {"words.weight"}),
    "no second moments": (Tiny, losses_of, {"inner": torch.optim.SGD}, {"words.weight"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_one_with_rows(kind, one_layer):
    build, losses, arguments, kept = KINDS[kind]
    # Products of 16-bit rows are summed in float32 over a tile: csrc/cpu/gram.h has the bound.
    rtol = 1e-6 if "buffer_dtype" in arguments else 1e-9
    model, optimizer = made(build, **arguments)
    twin, other = made(build, **arguments)
    for seed in range(STEPS):
        fill(model, optimizer, seed, losses, keep_rows=False)
        fill(twin, other, seed, losses, keep_rows=True)
        read, touched = (
            names_read(model, optimizer),
            {name for name, param in model.named_parameters() if param.grad is not None},
        )
        assert touched - read <= kept
        assert read or kind == "called twice"
        assert not names_read(twin, other)
        assert touched == {n for n, param in twin.named_parameters() if param.grad is not None}
        assert optimizer.last is not None
        assert other.last is not None
        for field in ("gram", "coefficients", "grad_norms", "gain", "alpha", "combined_norm"):
            ours, theirs = (getattr(each.last, field) for each in (optimizer, other))
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-3 * rtol)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert (optimizer.alpha - 1 / len(DOMAINS)).abs().max() > 1e-3
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-3 * rtol)


def test_memory_is_that_of_the_largest_layer(one_layer):
    model, optimizer = made(dtype=torch.float32)
    for seed in range(3):
        fill(model, optimizer, seed, losses_of, keep_rows=False)
        optimizer.step()
        optimizer.zero_grad()
    of_layers = [
        sum(flat_buffer._stride_of(p.numel(), p.dtype) * 4 for p in module.parameters(False))
        for module in model.modules()
    ]
    assert optimizer.buffer.num_bytes == 2 * len(SIZES) * max(of_layers)


def test_rows_of_16_bits_and_a_loss_scale(one_layer):
    found = []
    for keep_rows in (False, True):
        model, optimizer = made(dtype=torch.float32, buffer_dtype=torch.bfloat16)
        for seed in range(STEPS):
            with optimizer.stacked(model, SIZES, keep_rows=keep_rows):
                scaled_losses_of(model, ids_of(seed)).sum().backward()
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad / 2**10
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.alpha)
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


class Widening(Tiny):
    """The backward pass reaches small layers before a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.up, self.root = nn.Linear(8, VOCABULARY), nn.Linear(16, 99), nn.RMSNorm(99)
        self.narrow, self.down = nn.Linear(16, 8), nn.Linear(99, 16)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        return self.narrow(super().hidden(ids_BL))


def test_what_is_read_together_is_the_same_in_every_step(monkeypatch):
    """To the bit, as a process that goes on from a checkpoint: its memory has not grown yet."""
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {"cpu": 16_000})
    model, optimizer = made(Widening, dtype=torch.float32)
    names = {id(param): name for name, param in model.named_parameters()}
    steps: list[list[list[str]]] = []
    read = optimizer._step._read

    def noted(blocks: list[flat_buffer.Block]) -> None:
        steps[-1].append([names[id(block.param)] for block in blocks])
        read(blocks)

    monkeypatch.setattr(optimizer._step, "_read", noted)
    for seed in range(4):
        steps.append([])
        model.get_parameter("up.weight").requires_grad_(seed > 0)
        fill(model, optimizer, seed, losses_of, keep_rows=False)
        optimizer.step()
        optimizer.zero_grad()
    _, first, *others = steps
    assert len(first) > 3
    assert others == [first, first]


def test_memory_that_could_not_grow_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(flat_buffer, "SHARED_BYTES", {"cpu": 50_000})
    model, optimizer = made()
    fill(model, optimizer, 0, losses_of, keep_rows=False)
    optimizer.zero_grad()
    for shared in optimizer.buffer._shared.values():
        shared.memory_N = shared.memory_N.new_empty(0)
    fill(model, optimizer, 0, losses_of, keep_rows=False)
    assert names_read(model, optimizer)
    optimizer.step()


def test_a_second_backward_pass_is_refused(one_layer):
    def losses_after_a_pass(model: nn.Module, ids_BL: Tensor) -> Tensor:
        losses_of(model, ids_BL).sum().backward()
        return losses_of(model, ids_BL)

    model, optimizer = made()
    with pytest.raises(RuntimeError, match="second gradient in a step whose rows are not kept"):
        fill(model, optimizer, 0, losses_after_a_pass, keep_rows=False)
    assert_nothing_is_left(model, optimizer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"score": "paper", "mu": 1.0},
        {"micro_batches": 2, "is_twice": True},
        {"micro_batches": None, "is_divided": True},
    ],
    ids=["another rule", "after another pass", "after other domains"],
)
def test_rows_that_are_needed_are_kept(arguments, one_layer):
    is_twice, is_divided = (arguments.pop(name, False) for name in ("is_twice", "is_divided"))
    model, optimizer = made(**arguments)
    parts = [{"a": 2, "b": 3}, {"far": 5}] if is_divided else [SIZES]
    ids_BL = ids_of(0)
    if is_twice:
        fill(model, optimizer, 1, losses_of, keep_rows=True)
    for sizes in parts:
        with optimizer.stacked(model, sizes, keep_rows=sizes is not parts[-1]):
            x, ids_BL = ids_BL.split([sum(sizes.values()), len(ids_BL) - sum(sizes.values())])
            domain_losses(model(x), x, sizes).sum().backward()
            assert not names_read(model, optimizer)
    optimizer.combine()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_has_the_gradients_of_kept_rows(kind, one_layer):
    """Modules without a rule among them, whose rows stay."""
    found = []
    for keep_rows in (False, True):
        model, optimizer = made(ARCHITECTURES[kind])
        fill(model, optimizer, 0, losses_of, keep_rows=keep_rows)
        assert optimizer.last is not None
        found.append([optimizer.last.gram, *(param.grad for param in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_an_exception_in_the_pass_drops_what_was_read(one_layer):
    def fails_after_a_pass(model: nn.Module, ids_BL: Tensor) -> Tensor:
        losses_of(model, ids_BL).sum().backward()
        assert names_read(model, optimizer)
        raise KeyError

    model, optimizer = made()
    with pytest.raises(KeyError):
        fill(model, optimizer, 0, fails_after_a_pass, keep_rows=False)
    assert not names_read(model, optimizer)
    assert_nothing_is_left(model, optimizer)


def test_an_infinite_gradient_in_a_row_that_was_read_skips_the_step(one_layer):
    model, optimizer = made()
    before = [param.clone() for param in model.parameters()]
    with optimizer.stacked(model, SIZES, keep_rows=False):
        (losses_of(model, ids_of(0)) * torch.tensor([1.0, float("inf"), 1.0])).sum().backward()
    optimizer.step()
    assert optimizer.num_skipped == 1
    assert all(map(torch.equal, model.parameters(), before))


# Of torch's own making: its compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_compiled_model(is_tied, one_layer):
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        model, optimizer = made(lambda: Tiny(tied=is_tied))
        forward = torch.compile(model, backend="aot_eager") if is_compiled else model
        for seed in range(2):
            with optimizer.stacked(model, SIZES, keep_rows=False):
                domain_losses(forward(ids_of(seed)), ids_of(seed), SIZES).sum().backward()
            assert names_read(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_that_is_called_twice_is_refused(one_layer):
    torch._dynamo.reset()
    model, optimizer = made(Twice)
    compiled = torch.compile(model, backend="aot_eager")
    with (
        pytest.raises(RuntimeError, match="Pass keep_rows=True"),
        optimizer.stacked(model, SIZES, keep_rows=False),
    ):
        domain_losses(compiled(ids_of(0)), ids_of(0), SIZES).sum().backward()
