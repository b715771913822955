"""Small models and batches that the tests of the method share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer, Score


class TiedTransformer(nn.Module):
    """A causal transformer whose output matrix is its embedding: a few thousand parameters."""

    def __init__(self, vocab_size: int = 32, width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    # No bias: that of the keys has a gradient of exactly zero, and AdamW turns
                    # the rounding noise it gets in place of it into steps of 1e-9.
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss of `tokens` [B, L]."""
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](hidden)).chunk(3, dim=-1)
            hidden = hidden + layer["out"](
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            )
            hidden = hidden + layer["down"](nn.functional.gelu(layer["up"](layer["norm2"](hidden))))
        logits = self.norm(hidden) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tied_transformer(seed: int = 0, **kwargs: int) -> TiedTransformer:
    """A TiedTransformer in float64, initialised from `seed`."""
    torch.manual_seed(seed)
    return TiedTransformer(**kwargs).double()


def domain_tokens(row: int, step: int, *, batch: int = 2, length: int = 12) -> Tensor:
    """Tokens [batch, length] of domain `row` at `step`: each domain uses another part of 0..31."""
    generator = torch.Generator().manual_seed(1000 * step + row)
    low = 4 * row % 24
    return torch.randint(low, low + 8, (batch, length), generator=generator)


@dataclass(frozen=True)
class Bounded(Score):
    """One that the kernels do not know: the paper's W within bounds."""

    low: float
    high: float

    def gain(self, gram_RR: Tensor, tau_R: Tensor, present_K: Tensor) -> Tensor:
        return (gram_RR @ tau_R)[: len(present_K)].clamp(self.low, self.high)


def tiny_gpt2(num_layers: int = 2, **options: Any) -> Any:
    """transformers' GPT-2 without dropout, the same at each call: 48 words, at most 12 of them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": num_layers, "n_embd": 16, "n_head": 2, "n_positions": 12, "vocab_size": 48}
    others = options | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    others |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(**shape, **others))


def enter(optimizer: DoGEOptimizer, names: Iterable[str], loss_of: Callable[[str], Tensor]) -> None:
    """One backward pass in each domain, of the loss that its name gives."""
    for name in names:
        with optimizer.domain(name):
            loss_of(name).backward()


def take_step(
    optimizer: DoGEOptimizer, names: Iterable[str], loss_of: Callable[[str], Tensor]
) -> None:
    """A whole step of these domains."""
    enter(optimizer, names, loss_of)
    optimizer.step()
    optimizer.zero_grad()


class KeepsGradient(torch.optim.Optimizer):
    """Moves by the gradient and its change, and keeps no copy of it, as MARS does.

    Beside it the state has a kind of tensor without memory of its own.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"]):
            grad = param.grad.data
            last = self.state[param].get("last_grad", torch.zeros_like(param))
            param.sub_(0.1 * grad + 0.05 * (grad - last))
            self.state[param] |= {"last_grad": grad, "sparse": torch.eye(2).to_sparse()}
