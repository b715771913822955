"""DoGE with one forward and one backward pass for all domains.

    python examples/stacked_loop.py

What to copy into your loop: the lines marked DoGE. The batch is sorted by domain and `sizes` says
how many examples each has; the loss is the sum of the domains' mean losses. The gradients are those
of one domain after another (examples/plain_loop.py) to rounding, at the price of one pass, which
pays where the domains' batches are small. `--compare` takes both ways and prints the difference.

The data stands in for yours and has a known answer: sentences of a made-up language in which each
word has a usual successor. "kin" follows the grammar of the held-out target, "stranger" another
one, "half" each for half of the words. To do well on the target one should read kin, then half.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast import DoGEOptimizer
from doge_fast.losses import domain_losses

DOMAINS = ["stranger", "half", "kin"]
TARGET = "target"
SIZES = {"stranger": 6, "half": 4, "kin": 6, TARGET: 8}
VOCAB, LENGTH = 32, 16


def sentences(domain: str, step: int) -> Tensor:
    """Tokens [examples, LENGTH], a function of domain and step."""
    count = SIZES[domain]
    generator = torch.Generator().manual_seed(10 * step + [*SIZES].index(domain))
    ours, theirs = (torch.randperm(VOCAB, generator=seeded(seed)) for seed in (0, 1))
    like_target = {"stranger": 0.0, "half": 0.5, "kin": 1.0, TARGET: 1.0}[domain]
    words = [torch.randint(VOCAB, (count,), generator=generator)]
    for _ in range(LENGTH - 1):
        is_ours = torch.rand(count, generator=generator) < like_target
        usual = torch.where(is_ours, ours[words[-1]], theirs[words[-1]])
        is_usual = torch.rand(count, generator=generator) < 0.9
        other = torch.randint(VOCAB, (count,), generator=generator)
        words.append(torch.where(is_usual, usual, other))
    return torch.stack(words, dim=1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Model(nn.Module):
    """Stands for any model whose modules see the examples in the first dimension."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(F.gelu(self.up(self.norm(hidden)))))


def train(steps: int, *, is_stacked: bool = True) -> DoGEOptimizer:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = DoGEOptimizer(optimizer, domains=DOMAINS, target=TARGET)  # DoGE: wrapped
    for step in range(steps):
        tokens = torch.cat([sentences(domain, step) for domain in SIZES])
        if is_stacked:
            with optimizer.stacked(model, SIZES):  # DoGE: both passes run inside
                domain_losses(model(tokens), tokens, SIZES).sum().backward()
        else:
            for domain, part in zip(SIZES, tokens.split([*SIZES.values()]), strict=True):
                with optimizer.domain(domain):
                    domain_losses(model(part), part, {domain: len(part)}).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE with one backward pass for all domains")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compare", action="store_true", help="with one domain after another")
    options = parser.parse_args()
    weights = train(options.steps).weights
    for name, weight in weights.items():
        print(f"{name:10} {weight:.3f}")
    if options.compare:
        others = train(options.steps, is_stacked=False).weights
        print(f"difference {max(abs(weights[name] - others[name]) for name in weights):.1e}")


if __name__ == "__main__":
    main()
