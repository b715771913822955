"""DoGE with a model in shards: FSDP2's `fully_shard`, saved and resumed on any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2_loop.py
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py --stop-at 60   # killed on the way ...
    torchrun --nproc-per-node 4 examples/fsdp2_loop.py                # ... goes on with four ranks

What to copy into your loop: the lines marked DoGE. Rows, combined gradient and optimizer state stay
in shards. All ranks run the same K domains, each with its share of their examples. Keep the
parameters between domains: a step then sends K + 1 times what gathering the parameters once does,
and not 3 K times. For hybrid shards pass fully_shard a mesh of two dimensions,
init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")).

The data stands in for yours and has a known answer; `plain_loop.py` describes it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from doge_fast import DoGEOptimizer

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


def built(device: torch.device) -> tuple[nn.Module, DoGEOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)).to(device)
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    return model, DoGEOptimizer(  # DoGE: after the model is sharded
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        domains=DOMAINS,
        target=TARGET,
    )


def train_step(model: nn.Module, optimizer: DoGEOptimizer, step: int) -> None:
    for domain in optimizer.names:  # DoGE: the same domains on all ranks
        tokens = sentences(domain, step).chunk(dist.get_world_size())[dist.get_rank()]
        is_last = domain == optimizer.names[-1]
        model.set_reshard_after_backward(is_last)  # DoGE: gathered once a step
        with optimizer.domain(domain):  # DoGE: whose
            loss_of(model, tokens.to(next(model.parameters()).device)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: DoGEOptimizer, step: int) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def train(steps: int, stop_at: int, device: torch.device, out: Path) -> None:
    model, optimizer = built(device)
    checkpoint, first = out / "checkpoint", 0
    if checkpoint.exists():
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=checkpoint)  # DoGE: the domain weights are in it
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        first = state["step"]
    last = min(steps, stop_at)
    for step in range(first, last):
        train_step(model, optimizer, step)
    dcp.save(state_of(model, optimizer, last), checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        optimizer.save_weights(out / "weights.json")  # DoGE: the same on every rank
        for name, weight in optimizer.weights.items():
            print(f"{name:10} {weight:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE with a model in shards")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--stop-at", type=int, default=160, help="step to stop at, to resume later")
    parser.add_argument("--out", type=Path, default=Path("fsdp2_loop"), help="for results")
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.steps, options.stop_at, device, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
