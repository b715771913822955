"""DoGE in a training loop with Hugging Face accelerate: micro-batches, states saved and loaded.

    python examples/accelerate_loop.py                     # prints the learned weights
    python examples/accelerate_loop.py --stop-at 30        # killed on the way ...
    python examples/accelerate_loop.py                     # ... goes on, to the same bits

What to copy into your loop: the lines marked DoGE. `accelerator.prepare` wraps the optimizer once
more, so keep a name for the DoGEOptimizer: domains are entered through it, the step is taken
through accelerate. `micro_batches` says how often each domain is entered in a step; after the last
time the weighted gradient is in `p.grad`, where `clip_grad_norm_` finds it. Run it in one process
on one device (no `accelerate launch` with several).

The data stands in for yours and has a known answer: the target is a linear function of eight
features. "exact" has its labels, "wrong" those of another function, "half" either for half of the
examples. To do well on the target one should read exact, then half.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from doge_fast import DoGEOptimizer

DOMAINS = ["wrong", "half", "exact"]
TARGET = "target"
MICRO_BATCHES = 2


def examples(domain: str, number: int) -> tuple[Tensor, Tensor]:
    """Features [32, 8] and labels [32, 1], a function of domain and micro-batch."""
    generator = torch.Generator().manual_seed(10 * number + [*DOMAINS, TARGET].index(domain))
    features = torch.randn(32, 8, generator=generator)
    share = {"wrong": 0.0, "half": 0.5, "exact": 1.0, TARGET: 1.0}[domain]
    is_right = torch.rand(32, 1, generator=generator) < share
    return features, torch.where(
        is_right, features.sum(1, True), features[:, :1] - features[:, 1:2]
    )


def train(steps: int, stop_at: int, folder: Path) -> DoGEOptimizer:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    doge = DoGEOptimizer(  # DoGE: the optimizer, wrapped before it is prepared
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        domains=DOMAINS,
        target=TARGET,
        micro_batches=MICRO_BATCHES,  # DoGE: for gradient accumulation
        scaler=accelerator.scaler,  # DoGE: for float16; None otherwise
    )
    schedule = torch.optim.lr_scheduler.LinearLR(doge, 1.0, 0.1, total_iters=steps)
    model, optimizer, schedule = accelerator.prepare(model, doge, schedule)

    start = 0
    if folder.exists():
        accelerator.load_state(str(folder))
        start = accelerator.step  # counted by accelerate in micro-batches
    for number in range(start, MICRO_BATCHES * min(stop_at, steps)):
        with accelerator.accumulate(model):
            for domain in doge.rows:  # DoGE: one backward pass per domain, and for the target
                features, labels = (
                    part.to(accelerator.device) for part in examples(domain, number)
                )
                with doge.domain(domain):  # DoGE: whose gradient this is
                    loss = (model(features) - labels).square().mean()
                    accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return doge


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE with accelerate")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps, as a kill would")
    parser.add_argument("--out", type=Path, default=Path("accelerate_loop"), help="results go here")
    options = parser.parse_args()
    stop_at = options.steps if options.stop_at is None else options.stop_at
    doge = train(options.steps, stop_at, options.out / "state")
    doge.save_weights(options.out / "weights.json")  # DoGE: the result
    for name, weight in doge.weights.items():
        print(f"{name:10} {weight:.3f}")


if __name__ == "__main__":
    main()
