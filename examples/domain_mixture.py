"""Learn domain weights and sample by them in one loop: while a proxy learns, a base model follows.

    python examples/domain_mixture.py                      # prints weights, and what was drawn
    python examples/domain_mixture.py --stop-at 60         # killed on the way ...
    python examples/domain_mixture.py                      # ... goes on, to the same bits
    python examples/domain_mixture.py --workers 2          # the same bits from worker processes

What to copy into your loop: the lines marked MIXTURE. `DomainMixture` draws from any data sets at
weights that may change: here it deals the proxy equal parts of all domains, and the base model what
the proxy has learned so far. New weights hold from a step that the loop names, AHEAD of it, so that
the run is the same whatever number of batches the loaders take in advance. If you only want to
sample, leave the proxy out and call `set_weights` when you like.

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
from torch.utils.data import DataLoader

from doge_fast import DoGEOptimizer
from doge_fast.mixture import DomainMixture

LIKE_TARGET = {"stranger": 0.0, "half": 0.5, "kin": 1.0, "target": 1.0}
DOMAINS, TARGET = ["stranger", "half", "kin"], "target"
SIZES = {"stranger": 900, "half": 500, "kin": 300, "target": 200}
VOCAB, LENGTH, BATCH = 32, 16, 16
# More than the loaders take in advance, workers * prefetch_factor batches.
AHEAD = 8


def sentences(domain: str) -> list[dict[str, Tensor]]:
    """The rows of a domain: {"tokens": [LENGTH]}."""
    generator = torch.Generator().manual_seed(list(LIKE_TARGET).index(domain))
    ours, theirs = (torch.randperm(VOCAB, generator=seeded(seed)) for seed in (10, 11))
    number = SIZES[domain]
    words = [torch.randint(VOCAB, (number,), generator=generator)]
    for _ in range(LENGTH - 1):
        is_ours = torch.rand(number, generator=generator) < LIKE_TARGET[domain]
        usual = torch.where(is_ours, ours[words[-1]], theirs[words[-1]])
        is_usual = torch.rand(number, generator=generator) < 0.9
        other = torch.randint(VOCAB, (number,), generator=generator)
        words.append(torch.where(is_usual, usual, other))
    return [{"tokens": tokens} for tokens in torch.stack(words, dim=1)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(steps: int, stop_at: int, checkpoint: Path, workers: int) -> dict[str, float]:
    torch.manual_seed(0)
    proxy = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB))
    base = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB))
    weigher = DoGEOptimizer(
        torch.optim.AdamW(proxy.parameters(), lr=1e-2), domains=DOMAINS, target=TARGET
    )
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    rows = {name: sentences(name) for name in LIKE_TARGET}

    lessons = DomainMixture(  # MIXTURE: for the proxy, equal parts of all domains and the target
        rows, batch_size=len(rows) * BATCH, steps=stop_at, domain_key="domain"
    )
    reading = DomainMixture(  # MIXTURE: for the base model, training domains at learned weights
        {name: rows[name] for name in DOMAINS}, batch_size=BATCH, steps=stop_at
    )
    models = {"proxy": proxy, "model": base, "weigher": weigher, "optimizer": optimizer}
    mixtures = {"lessons": lessons, "reading": reading}
    start = load(checkpoint, models | mixtures) if checkpoint.exists() else 0

    loaders = (  # MIXTURE: a dataset with its own batch sampler
        DataLoader(mixture, batch_sampler=mixture.batches(), num_workers=workers)
        for mixture in (lessons, reading)
    )
    for step, (lesson, text) in enumerate(zip(*loaders, strict=True), start=start):
        for name in weigher.names:
            tokens = lesson["tokens"][lesson["domain"] == lessons.names.index(name)]
            with weigher.domain(name):
                loss_of(proxy, tokens).backward()
        weigher.step()
        weigher.zero_grad()

        loss_of(base, text["tokens"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        # MIXTURE: what was learned so far, from a step on that no loader has reached
        reading.set_weights(weigher.weights, from_step=step + AHEAD)

    end = max(start, min(stop_at, steps))
    states = {name: part.state_dict() for name, part in models.items()}
    # MIXTURE: the loop knows how many batches it has finished; the loaders may be ahead of it
    states |= {name: mixture.state_dict(end) for name, mixture in mixtures.items()}
    save(checkpoint, states | {"step": end})
    weigher.save_weights(checkpoint.parent / "weights.json")
    drawn = reading.drawn(end)  # MIXTURE: the rows that were really drawn, by name
    return {name: rows / sum(drawn.values()) for name, rows in drawn.items()}


def save(path: Path, states: dict) -> None:
    """Written beside and renamed: a kill leaves the old checkpoint or the new one."""
    beside = path.with_suffix(".tmp")
    torch.save(states, beside)
    os.replace(beside, path)


def load(path: Path, parts: dict) -> int:
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling that changes, by weights being learned")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps, as a kill would")
    parser.add_argument("--workers", type=int, default=0, help="processes of each loader, up to 3")
    parser.add_argument("--out", type=Path, default=Path("domain_mixture"), help="results go here")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stop_at = options.steps if options.stop_at is None else min(options.stop_at, options.steps)
    shares = train(options.steps, stop_at, options.out / "checkpoint.pt", options.workers)
    for name, share in shares.items():
        print(f"{name:10} {share:.3f} of the rows drawn")


if __name__ == "__main__":
    main()
