"""DoGE in a Lightning module: manual optimization, a schedule, checkpoints of Lightning's own.

    python examples/lightning_module.py                    # prints the learned weights
    python examples/lightning_module.py --stop-at 30       # killed on the way ...
    python examples/lightning_module.py --resume           # ... goes on, to the same bits
    torchrun --nproc-per-node 2 examples/lightning_module.py   # strategy "ddp": the same weights

What to copy into your module: the lines marked DoGE. Several backward passes for one step are what
Lightning calls manual optimization. Domains are entered through the DoGEOptimizer itself, which
`self.optimizers(use_pl_optimizer=False)` gives; the step is taken through Lightning's wrapper,
which counts it. Of several processes each has its piece of the batch, which is sorted by domain;
DistributedDataParallel is told not to reduce gradients, since `step()` combines them.

The data stands in for yours and has a known answer: the target is a linear function of eight
features. "exact" has its labels, "wrong" those of another function, "half" either for half of the
examples. To do well on the target one should read exact, then half.
"""

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn

from doge_fast import DoGEOptimizer
from doge_fast.sampling import pieces

DOMAINS = ["wrong", "half", "exact"]
TARGET = "target"


class Batches:
    """{domain: (features [32, 8], labels [32, 1])}, in the place of your loader.

    Lightning resumes in the middle of an epoch with a loader that has a state.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.number = steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        while self.number < self.steps:
            batch = {name: self.examples(name, self.number) for name in [*DOMAINS, TARGET]}
            self.number += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]

    def examples(self, domain: str, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * number + [*DOMAINS, TARGET].index(domain))
        features = torch.randn(32, 8, generator=generator)
        share = {"wrong": 0.0, "half": 0.5, "exact": 1.0, TARGET: 1.0}[domain]
        is_right = torch.rand(32, 1, generator=generator) < share
        labels = torch.where(is_right, features.sum(1, True), features[:, :1] - features[:, 1:2])
        return features, labels


class Module(lightning.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False  # DoGE: several backward passes for one step
        self.steps = steps
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_optimizers(self) -> dict:
        inner = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        optimizer = DoGEOptimizer(  # DoGE: the optimizer, wrapped
            inner, domains=DOMAINS, target=TARGET, max_grad_norm=1.0
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @property
    def doge(self) -> DoGEOptimizer:
        return self.optimizers(use_pl_optimizer=False)

    def training_step(self, batch: dict[str, tuple[Tensor, Tensor]], number: int) -> None:
        optimizer = self.optimizers()
        sizes = {domain: len(features) for domain, (features, _) in batch.items()}
        mine = pieces(sizes, self.global_rank, self.trainer.world_size)
        # DoGE: nothing but step() reduces gradients over ranks
        with getattr(self.trainer.strategy.model, "no_sync", nullcontext)():
            for domain, (first, last) in mine.items():  # DoGE: one backward pass per domain
                features, labels = (part[first:last] for part in batch[domain])
                with self.doge.domain(domain, count=last - first):  # DoGE: whose, of how many
                    self.manual_backward((self.model(features) - labels).square().mean())
        optimizer.step()
        self.lr_schedulers().step()
        optimizer.zero_grad()
        self.log_dict({f"alpha_mean/{name}": w for name, w in self.doge.weights.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE in a Lightning module")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps, as a kill would")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument(
        "--out", type=Path, default=Path("lightning_module"), help="results go here"
    )
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    checkpoint = options.out / "last.ckpt"
    module = Module(options.steps)
    trainer = lightning.Trainer(
        max_steps=options.steps if options.stop_at is None else options.stop_at,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp" if "LOCAL_WORLD_SIZE" in os.environ else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        Batches(options.steps),
        ckpt_path=checkpoint if options.resume else None,
        weights_only=True,
    )
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        module.doge.save_weights(options.out / "weights.json")  # DoGE: the same on every rank
        for name, weight in module.doge.weights.items():
            print(f"{name:10} {weight:.3f}")


if __name__ == "__main__":
    main()
