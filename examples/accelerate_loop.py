"""DoGE in a training loop with Hugging Face accelerate: micro-batches, states saved and loaded.

    python examples/accelerate_loop.py                     # prints the learned weights
    python examples/accelerate_loop.py --stop-at 30        # killed on the way ...
    python examples/accelerate_loop.py                     # ... goes on, to the same bits
    torchrun --nproc-per-node 2 examples/accelerate_loop.py    # the same weights

What to copy into your loop: the lines marked DoGE. `accelerator.prepare` wraps the optimizer once
more, so keep a name for the DoGEOptimizer: domains are entered through it, the step is taken
through accelerate. `micro_batches` says how often each domain is entered in a step; after
`combine()` the weighted gradient is in `p.grad`, where `clip_grad_norm_` finds it. Of several
processes each has its piece of the batch, which is sorted by domain.

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
from doge_fast.sampling import pieces

DOMAINS = ["wrong", "half", "exact"]
TARGET = "target"
BATCH, MICRO_BATCHES = 32, 2


def examples(domain: str, number: int) -> tuple[Tensor, Tensor]:
    """Features [BATCH, 8] and labels [BATCH, 1]: the same on every rank."""
    generator = torch.Generator().manual_seed(10 * number + [*DOMAINS, TARGET].index(domain))
    features = torch.randn(BATCH, 8, generator=generator)
    share = {"wrong": 0.0, "half": 0.5, "exact": 1.0, TARGET: 1.0}[domain]
    is_right = torch.rand(BATCH, 1, generator=generator) < share
    return features, torch.where(
        is_right, features.sum(1, True), features[:, :1] - features[:, 1:2]
    )


def train(steps: int, stop_at: int, folder: Path) -> tuple[DoGEOptimizer, bool]:
    """The optimizer at the end, and whether this is the process that writes."""
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

    place = accelerator.process_index, accelerator.num_processes
    start = 0
    if folder.exists():
        accelerator.load_state(str(folder))
        start = accelerator.step  # counted by accelerate in micro-batches
    for number in range(start, MICRO_BATCHES * min(stop_at, steps)):
        with accelerator.accumulate(model):
            # DoGE: one backward pass per domain, and for the target; with ranks, for a rank's own
            for domain, (first, last) in pieces(dict.fromkeys(doge.names, BATCH), *place).items():
                features, labels = (
                    part[first:last].to(accelerator.device) for part in examples(domain, number)
                )
                with doge.domain(domain, count=last - first):  # DoGE: whose, and of how many
                    loss = (model(features) - labels).square().mean()
                    accelerator.backward(loss)
            if accelerator.sync_gradients:
                doge.combine()  # DoGE: no rank knows when the last domain is left elsewhere
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return doge, accelerator.is_main_process


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE with accelerate")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps, as a kill would")
    parser.add_argument("--out", type=Path, default=Path("accelerate_loop"), help="results go here")
    options = parser.parse_args()
    stop_at = options.steps if options.stop_at is None else options.stop_at
    doge, is_main = train(options.steps, stop_at, options.out / "state")
    if is_main:
        doge.save_weights(options.out / "weights.json")  # DoGE: the result, on every rank the same
        for name, weight in doge.weights.items():
            print(f"{name:10} {weight:.3f}")


if __name__ == "__main__":
    main()
