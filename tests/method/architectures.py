"""Small models of every kind in one table, each from token ids [B, L] to logits [B, L, V]."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from doge_fast import DoGEOptimizer
from doge_fast.stacked.layers import LayerRule, Outer, Sum

SIZES = {"a": 1, "b": 3, "absent": 0, "c": 2}
VOCABULARY, LENGTH, PADDING = 40, 9, 3

Rows = dict[str, Tensor]


class Tiny(nn.Module):
    """Embeddings, positions without a batch, norms, linear layers, perhaps a tied head."""

    def __init__(self, *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, padding_idx=PADDING)
        self.places = nn.Embedding(LENGTH, 16)
        self.norm = nn.LayerNorm(16, bias=bias)
        self.up = nn.Linear(16, 24, bias=bias)
        self.root = nn.RMSNorm(24)
        self.down = nn.Linear(24, 16, bias=bias)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, ids_BL: Tensor) -> Tensor:
        positions_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        x: Tensor = self.words(ids_BL) + self.places(positions_L)
        return x + self.down(self.root(F.gelu(self.up(self.norm(x)))))

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.head(self.hidden(ids_BL))


class Twice(Tiny):
    """Modules called twice, with arguments by name, and with other tensors as parameters."""

    def forward(self, ids_BL: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(self.words(input=ids_BL))))
        half = {name: param.detach() / 2 for name, param in self.down.named_parameters()}
        x = x + functional_call(self.down, half, self.up(x))
        return self.head(input=self.down(F.gelu(self.up(self.norm(input=x)))))


class Shapes(Tiny):
    """[1, L] positions, [1, L, 2] vectors, a flattened batch, a norm over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(2, 16)
        self.wide = nn.LayerNorm([2, 8], bias=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        length = ids_BL.shape[1]
        angles_1L2 = torch.linspace(0, 1, 2 * length, dtype=torch.float64).view(1, length, 2)
        x = self.words(ids_BL) + self.places(torch.arange(length)[None]) + self.angles(angles_1L2)
        x = torch.tanh(self.wide(x.unflatten(-1, (2, 8))).flatten(-2))
        return self.head(x.flatten(0, 1)).view(*ids_BL.shape, -1)


class Slices(Tiny):
    """Norms of slices, as of queries and keys that one matrix makes."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(16, 32)
        self.offset = nn.LayerNorm(16)
        self.offset.weight.requires_grad_(False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        query, key = self.both(self.words(ids_BL)).chunk(2, -1)
        # The gradient of a sum is one number for each token, with a stride of 0.
        factor_BL1 = 1 + self.offset(key).sum(2, keepdim=True)
        return self.head(self.norm(query) * factor_BL1)


class Frozen(Tiny):
    def __init__(self) -> None:
        super().__init__()
        for param in (*self.up.parameters(), self.norm.bias, self.words.weight):
            param.requires_grad_(False)
        self.down.weight.register_hook(lambda grad: grad.flip(0))


class Odd(nn.Module):
    """A bare parameter, a convolution, a tied pair of children: no rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.filter = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.inner, self.twin = nn.Linear(16, 16), nn.Linear(16, 16)
        self.twin.weight = self.inner.weight

    def forward(self, x_BLD: Tensor, *, factor: float = 1.0) -> tuple[Tensor, float]:
        filtered = self.filter(x_BLD.transpose(1, 2)).transpose(1, 2)
        return self.twin(torch.tanh(self.inner(filtered))) * self.scale * factor, factor


class Listed(nn.Module):
    """Whose only parameters are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([*torch.randn(2, 16)])

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD * self.gains[0] * self.gains[1]


class Composite(Tiny):
    """Modules without a rule beside others."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.odd, self.listed = Odd(), Listed()
        self.mixed = weight_norm(nn.Linear(16, 16, bias=False))
        self.second = nn.Embedding(VOCABULARY, 16, scale_grad_by_freq=True)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x, _ = self.odd(self.words(ids_BL) + self.second(ids_BL), factor=0.5)
        return self.head(self.norm(self.mixed(self.listed(x))))


class Root(Tiny):
    """A model that owns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(VOCABULARY))
        self.offset.register_hook(lambda grad: 2 * grad)

    def forward(self, ids_BL: Tensor) -> Tensor:
        return super().forward(ids_BL) + self.offset


class Recurrent(Tiny):
    """Reads the last state of both directions, [2, examples, 8]."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, batch_first: bool = True) -> None:
        super().__init__()
        self.memory = kind(16, 8, bidirectional=True, batch_first=batch_first)

    def forward(self, ids_BL: Tensor) -> Tensor:
        states_BLE, last = self.memory(self.words(ids_BL))
        last_2BE = last[0] if isinstance(last, tuple) else last
        return self.head(states_BLE + last_2BE.transpose(0, 1).flatten(1)[:, None])


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


CUSTOM_RULES = {Offset: OffsetRule(), ScaledLinear: ScaledLinearRule(), Mean: MeanRule()}


class Custom(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = ScaledLinear(16, 16, 0.5)
        self.offset = Offset(16)
        self.mean = Mean(16)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x = torch.tanh(self.mean(self.offset(self.scaled(self.words(ids_BL)))))
        return self.head(self.offset(x))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: Tiny(tied=True),
    "untied": Tiny,
    "no bias": lambda: Tiny(tied=True, bias=False),
    "twice": Twice,
    "shapes": Shapes,
    "slices": Slices,
    "custom rules": Custom,
    "frozen": Frozen,
    "without rules": Composite,
    "root": Root,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[kind]().double()


def ids_of(sizes: dict[str, int] = SIZES, seed: int = 0) -> Tensor:
    """[B, L]; some tokens are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(VOCABULARY, (sum(sizes.values()), LENGTH), generator=generator)
    ids_BL[-1, 2:5] = PADDING
    return ids_BL


def mean_loss(logits: Tensor, ids_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())


def losses_of(logits: Tensor, ids_BL: Tensor, sizes: dict[str, int]) -> Tensor:
    pairs = zip(logits.split([*sizes.values()]), ids_BL.split([*sizes.values()]), strict=True)
    return torch.stack([mean_loss(part, ids) for part, ids in pairs if len(ids)])


def rows_by_autograd(model: nn.Module, ids_BL: Tensor, sizes: dict[str, int] = SIZES) -> Rows:
    """{name: [domains, numel]} of the parameters that any domain gives a gradient."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rows = []
    for ids in ids_BL.split([*sizes.values()]):
        grads: Sequence[Tensor | None] = [None] * len(params)
        if len(ids):
            loss = mean_loss(model(ids), ids)
            grads = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
        rows.append(grads)
    return {
        name: torch.stack(
            [(torch.zeros_like(param) if grad is None else grad).flatten() for grad in column]
        )
        for (name, param), *column in zip(params.items(), *rows, strict=True)
        if any(grad is not None for grad in column)
    }


def optimizer_of(model: nn.Module, domains: Iterable[str] = SIZES, **options: Any) -> DoGEOptimizer:
    """Of the parameters that take a gradient; the loop says when a step ends."""
    return DoGEOptimizer(
        torch.optim.SGD([p for p in model.named_parameters() if p[1].requires_grad], lr=0.1),
        domains=list(domains),
        absent="keep",
        micro_batches=None,
        domain_max_grad_norm=None,
        **options,
    )


def rows_of(optimizer: DoGEOptimizer, model: nn.Module) -> Rows:
    """What the buffer holds; the step is forgotten."""
    names = {id(param): name for name, param in model.named_parameters()}
    blocks = optimizer.buffer.touched(optimizer.param_groups[0]["params"])
    rows = {names[id(block.param)]: block.rows_BN.clone() for block in blocks}
    optimizer.zero_grad()
    return rows


def assert_same(ours: Rows, expected: Rows, bound: float = 1e-14) -> None:
    """To `bound` of the largest entry: a few float64 roundings, in another order."""
    assert ours.keys() == expected.keys()
    for name, rows_RN in expected.items():
        error = (ours[name] - rows_RN).abs().max() / rows_RN.abs().max()
        assert error <= bound, f"{name} is off by {error:.1e}"


def run(
    optimizer: DoGEOptimizer,
    model: nn.Module,
    ids_BL: Tensor,
    sizes: dict[str, int] = SIZES,
    call: Callable[[Tensor], Tensor] | None = None,
) -> None:
    with optimizer.stacked(model, sizes):
        losses_of((model if call is None else call)(ids_BL), ids_BL, sizes).sum().backward()
