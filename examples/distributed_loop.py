"""DoGE over several processes with DistributedDataParallel; `fsdp2_loop.py` has shards.

    python examples/distributed_loop.py                         # one process
    torchrun --nproc-per-node 2 examples/distributed_loop.py    # two: the same weights

What to copy into your loop: the lines marked DoGE. A rank gets its piece of the batch that is
sorted by domain, so that it has few domains and sends no more than DDP itself would. Nothing else
differs from the plain loop: `step()` is where the ranks meet.

The data stands in for yours and has a known answer; `plain_loop.py` describes it.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from doge_fast import DoGEOptimizer
from doge_fast.sampling import pieces

DOMAINS = ["stranger", "half", "kin"]
TARGET = "target"
VOCAB, LENGTH, BATCH = 32, 16, 16


def sentences(domain: str, step: int) -> Tensor:
    """Tokens [BATCH, LENGTH]: a function of domain and step, the same on every rank."""
    generator = torch.Generator().manual_seed(10 * step + [*DOMAINS, TARGET].index(domain))
    ours, theirs = (torch.randperm(VOCAB, generator=seeded(seed)) for seed in (0, 1))
    like_target = {"stranger": 0.0, "half": 0.5, "kin": 1.0, TARGET: 1.0}[domain]
    words = [torch.randint(VOCAB, (BATCH,), generator=generator)]
    for _ in range(LENGTH - 1):
        is_ours = torch.rand(BATCH, generator=generator) < like_target
        usual = torch.where(is_ours, ours[words[-1]], theirs[words[-1]])
        is_usual = torch.rand(BATCH, generator=generator) < 0.9
        other = torch.randint(VOCAB, (BATCH,), generator=generator)
        words.append(torch.where(is_usual, usual, other))
    return torch.stack(words, dim=1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(steps: int, device: torch.device) -> DoGEOptimizer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = DoGEOptimizer(  # DoGE
        torch.optim.AdamW(model.parameters(), lr=1e-2), domains=DOMAINS, target=TARGET
    )
    sizes = dict.fromkeys(optimizer.names, BATCH)
    for step in range(steps):
        for domain, (first, last) in pieces(sizes, rank, size).items():  # DoGE: few for a rank
            tokens = sentences(domain, step)[first:last].to(device)
            with optimizer.domain(domain, count=last - first):  # DoGE: whose, and of how many
                loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE over several processes")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("distributed_loop"), help="for results")
    options = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    optimizer = train(options.steps, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        optimizer.save_weights(options.out / "weights.json")  # DoGE: the same on every rank
        for name, weight in optimizer.weights.items():
            print(f"{name:10} {weight:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
