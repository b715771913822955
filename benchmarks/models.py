"""The models that steps are measured on: GPT-2-shaped, in the paper's five sizes and any other.

Of torch alone: those of transformers make the host wait in each forward pass. Dropout is off.
`forward` takes tokens and gives logits.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from doge_fast.losses import linear_domain_losses

# Multiple of 64, as in the family.
VOCAB_SIZE = 50_304
SEQUENCE = 512
# As in doge_fast.integrations.causal_lm, which needs transformers.
MOST_LOGITS_BYTES = 4 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the sequences it sees."""

    num_layers: int
    num_heads: int
    width: int
    vocab_size: int = VOCAB_SIZE
    sequence: int = SEQUENCE

    @property
    def flops_per_token(self) -> float:
        """Of a forward and a backward pass: six per weight of a product, and causal attention.

        The output matrix counts, the embedding that shares its memory does not again. Attention
        is two products of [L, L] per layer, half of them masked away.
        """
        products = 12 * self.num_layers * self.width**2 + self.vocab_size * self.width
        return 6.0 * products + 6.0 * self.num_layers * self.width * self.sequence

    def __str__(self) -> str:
        return f"{self.num_layers} layers, {self.width} wide, vocabulary {self.vocab_size}"


# As doge_fast.pipeline.sizes.SIZES, of which the GPU script knows nothing; a test compares them.
PAPER = {
    "60M": Shape(3, 6, 768),
    "82M": Shape(6, 12, 768),
    "124M": Shape(12, 12, 768),
    "210M": Shape(24, 16, 768),
    "684M": Shape(36, 24, 1200),
}

# Dense bfloat16 of the data sheets, for the usual model FLOPs utilisation.
PEAK_TFLOPS = {"A100": 312.0, "H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "GH200": 989.0}


class GPT(nn.Module):
    """A GPT-2 in forty lines of torch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.layers = nn.ModuleList(_layer(shape.width) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, L, V] of `tokens` [B, L]."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """[B, L, H] what the head reads."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.embedding(tokens) + self.position(positions)
        for layer in self.layers:
            hidden = hidden + layer["out"](self._attend(layer["qkv"](layer["norm1"](hidden))))
            inner = nn.functional.gelu(layer["up"](layer["norm2"](hidden)), approximate="tanh")
            hidden = hidden + layer["down"](inner)
        normed: Tensor = self.norm(hidden)
        return normed

    def _attend(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def _layer(width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "out": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width),
            "up": nn.Linear(width, 4 * width),
            "down": nn.Linear(4 * width, width),
        }
    )


def build(shape: Shape, device: torch.device | str) -> GPT:
    """The model, from a fixed seed, drawn on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(shape)


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """[B]: mean next-token loss of each sequence."""
    logits = model(tokens)[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(tokens), -1).mean(1)


def loss_of(model: nn.Module, tokens: Tensor, autocast: torch.dtype | None = None) -> Tensor:
    """Mean next-token loss."""
    with mixed_precision(tokens.device, autocast):
        logits = model(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sum_of_losses(
    model: nn.Module, tokens: Tensor, sizes: Sequence[int], autocast: torch.dtype | None = None
) -> Tensor:
    """Sum over domains of their mean losses; `tokens` are sorted by domain, `sizes` of each.

    With many logits those of one domain at a time, as `DoGETrainer` stacks them.
    """
    head: Any = model.head
    with mixed_precision(tokens.device, autocast):
        if 4 * tokens.numel() * head.weight.shape[0] > MOST_LOGITS_BYTES:
            names = {str(domain): size for domain, size in enumerate(sizes)}
            return linear_domain_losses(model.hidden(tokens), head.weight, tokens, names).sum()
        losses = token_losses(model, tokens)
    # Sequences are of one length: the mean of a domain is that of its sequences.
    return torch.stack([each.mean() for each in losses.split(list(sizes))]).sum()


def mixed_precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype`; None: nothing, also on a device that has no autocast."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def num_parameters(shape: Shape) -> int:
    """Counted without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


def domain_batches(
    shape: Shape, num_domains: int, num_sequences: int, device: torch.device | str
) -> dict[str, Tensor]:
    """{domain: tokens [B_k, L]}; sequences are dealt out as evenly as they go."""
    if num_sequences < num_domains:
        raise ValueError(
            f"every domain needs a sequence; got {num_sequences} sequences for {num_domains} "
            "domains. Give as many sequences as domains, or more."
        )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        shape.vocab_size, (num_sequences, shape.sequence), generator=generator
    ).to(device)
    width = len(str(num_domains - 1))
    shares = tokens.tensor_split(num_domains)
    return {f"domain{k:0{width}}": share for k, share in enumerate(shares)}


def utilisation(shape: Shape, num_tokens: int, step_ms: float, device: Any) -> float | None:
    """Model FLOPs of a step over the data sheet's bfloat16 rate; None where it is not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((rate for part, rate in PEAK_TFLOPS.items() if part in name), None)
    if peak is None:
        return None
    return shape.flops_per_token * num_tokens / (step_ms * 1e-3) / (peak * 1e12)
