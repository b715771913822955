"""DoGE in a training loop of one's own: domain weights from three more lines, saved and resumed.

    python examples/plain_loop.py                          # prints the learned weights
    python examples/plain_loop.py --stop-at 60             # killed on the way ...
    python examples/plain_loop.py                          # ... goes on, to the same bits

What to copy into your loop: the lines marked DoGE. Schedulers take the wrapper like any optimizer,
checkpoints hold the domain weights in its state_dict, and `p.grad` holds the weighted gradient, to
be clipped or logged, when the last domain of a step is left. On a GPU the loop below runs in
float16 with a GradScaler, which the wrapper is given to weigh unscaled gradients.

The data stands in for yours and has a known answer: sentences of a made-up language in which each
word has a usual successor. "kin" follows the grammar of the held-out target, "stranger" another
one, "half" each for half of the words. To do well on the target one should read kin, then half.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doge_fast import DoGEOptimizer

DOMAINS = ["stranger", "half", "kin"]
TARGET = "target"
VOCAB, LENGTH, BATCH = 32, 16, 16


def sentences(domain: str, step: int) -> Tensor:
    """Tokens [BATCH, LENGTH]: a function of domain and step, so that resuming replays nothing."""
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


def train(steps: int, stop_at: int, checkpoint: Path) -> DoGEOptimizer:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_half = device.type == "cuda"
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)).to(device)

    scaler = torch.amp.GradScaler(device.type, enabled=is_half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = DoGEOptimizer(  # DoGE: the optimizer, wrapped before the schedule is made
        optimizer, domains=DOMAINS, target=TARGET, scaler=scaler
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    start = load(checkpoint, parts) if checkpoint.exists() else 0

    for step in range(start, min(stop_at, steps)):
        for domain in optimizer.names:  # DoGE: one backward pass per domain, and for the target
            tokens = sentences(domain, step).to(device)
            with optimizer.domain(domain):  # DoGE: whose gradient this is
                with torch.autocast(device.type, torch.float16, enabled=is_half):
                    loss = loss_of(model, tokens)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    save(checkpoint, parts, step=min(stop_at, steps))
    return optimizer


def save(path: Path, parts: dict, step: int) -> None:
    """Written beside and renamed: a kill leaves the old checkpoint or the new one."""
    beside = path.with_suffix(".tmp")
    torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, beside)
    os.replace(beside, path)


def load(path: Path, parts: dict) -> int:
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE in a plain training loop")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps, as a kill would")
    parser.add_argument("--out", type=Path, default=Path("plain_loop"), help="where results go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stop_at = options.steps if options.stop_at is None else options.stop_at
    optimizer = train(options.steps, stop_at, options.out / "checkpoint.pt")
    optimizer.save_weights(options.out / "weights.json")  # DoGE: the result
    for name, weight in optimizer.weights.items():
        print(f"{name:10} {weight:.3f}")


if __name__ == "__main__":
    main()
