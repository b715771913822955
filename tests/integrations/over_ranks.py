"""A model that ranks train in shares of a batch, and one process as a whole: their twins."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from doge_fast import DoGEOptimizer
from doge_fast.sampling import pieces
from tests.integrations.small import divided
from tests.ranks import Ranks

STEPS = 6
Wrap = Callable[[nn.Module], nn.Module]
Sizes = Mapping[str, int]
Deal = Callable[[Sizes, int, int], list[tuple[str, int, int]]]


def whole_pieces(sizes: Sizes, rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
    return [(name, *piece) for name, piece in pieces(sizes, rank, num_ranks).items()]


def shares(sizes: Sizes, rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
    """Of every domain the same share for every rank, as sharded parameters need it."""
    first, last = ((place, num_ranks) for place in (rank, rank + 1))
    return [
        (name, size * first[0] // first[1], size * last[0] // last[1])
        for name, size in sizes.items()
    ]


def bare(model: nn.Module) -> nn.Module:
    return model


ddp = DistributedDataParallel
ddp_views = partial(DistributedDataParallel, gradient_as_bucket_view=True)


class Checkpointed(nn.Sequential):
    """Computes its activations once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
    return nn.Sequential(*layers).double()


def examples(domain: str, step: int, size: int) -> Tensor:
    """[size, 3] float64: domains differ in where they lie."""
    row = ord(domain) - ord("a")
    generator = torch.Generator().manual_seed(1000 * step + row)
    return torch.randn(size, 3, generator=generator, dtype=torch.float64) + row


def losses(outputs: Tensor, domain: str) -> Tensor:
    """[size] of each example."""
    return (outputs - (ord(domain) - ord("a"))).square().mean(1)


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.named_parameters(), lr=0.01)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices, others = divided(model)
    return [torch.optim.Muon(matrices, lr=0.005), torch.optim.AdamW(others, lr=0.002)]


def sgd_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices, others = divided(model)
    groups = [{"params": others[:2]}, {"params": others[2:], "lr": 0.001}]
    return [torch.optim.SGD(matrices, lr=0.01, momentum=0.9), torch.optim.AdamW(groups, lr=0.002)]


def trained(
    wrap: Wrap,
    sizes: Sizes,
    is_stacked: bool,
    options: Mapping[str, Any],
    how: str = "",
    deal: Deal = whole_pieces,
    steps: range = range(STEPS),
    load: Callable[[nn.Module, DoGEOptimizer], None] | None = None,
    save: Callable[[nn.Module, DoGEOptimizer], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parameters, the average weights and the last norm after some steps.

    Args:
        wrap: of the model.
        sizes: of a step's batch.
        is_stacked: one backward pass for all domains of a rank.
        options: of the optimizer; "inner": a function that makes those that are wrapped.
        how: "halves": in two micro-batches; "scaled": with a GradScaler; "overflow": and the last
            rank's examples of the second step are not numbers; "absent": the second step has no c.
        deal: the examples among the ranks.
        steps: the part of a run.
        load, save: what is done before and after them.
    """
    rank, num_ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = small_model()
    wrapped = wrap(model)
    is_scaled = how in ("scaled", "overflow")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    arguments: dict[str, Any] = {"domains": list(sizes), "mu": 5.0} | dict(options)
    if is_scaled:
        arguments["scaler"] = scaler
    inner = arguments.pop("inner", adamw)(model)
    optimizer = DoGEOptimizer(inner, **arguments)
    num_parts = 2 if how == "halves" else 1
    if load is not None:
        load(model, optimizer)
    for step in steps:
        here = [name for name in sizes if name in optimizer.domains_of_step]
        here += [name for name in sizes if name not in optimizer.domains]
        if how == "absent" and step == 1:
            here.remove("c")
        mine = deal({name: sizes[name] for name in here}, rank, num_ranks)
        batch = [
            (name, examples(name, step, sizes[name])[first:last]) for name, first, last in mine
        ]
        if how == "overflow" and step == 1 and rank == num_ranks - 1:
            batch = [(name, float("nan") * rows) for name, rows in batch]
        for part in range(num_parts):
            parts = {name: rows.chunk(num_parts)[part] for name, rows in batch}
            run(wrapped, optimizer, parts, is_stacked, scaler, 1 / num_parts)
        if is_scaled:
            # A rank cannot know by itself that the last domain has been left somewhere.
            optimizer.combine()
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        save(model, optimizer)
    assert optimizer.num_skipped == (how == "overflow")
    return values(model), optimizer.alpha_mean, optimizer.last.combined_norm


def values(model: nn.Module) -> Tensor:
    """All parameters, in one process."""
    wholes = [getattr(param, "full_tensor", lambda p=param: p)() for param in model.parameters()]
    return torch.cat([whole.detach().flatten() for whole in wholes])


def run(
    model: nn.Module,
    optimizer: DoGEOptimizer,
    batch: Mapping[str, Tensor],
    is_stacked: bool,
    scaler: torch.amp.GradScaler,
    share: float,
) -> None:
    """The backward passes of a batch by domain."""
    if is_stacked and batch:
        sizes = {name: len(rows) for name, rows in batch.items()}
        with optimizer.stacked(model, sizes):
            outputs = model(torch.cat(list(batch.values()))).split(list(sizes.values()))
            by_domain = zip(outputs, sizes, strict=True)
            total = sum(losses(output, name).mean() for output, name in by_domain)
            scaler.scale(share * total).backward()
        return
    for name, rows in batch.items():
        with optimizer.domain(name, count=len(rows)):
            scaler.scale(share * losses(model(rows), name).mean()).backward()


def assert_ranks_are(
    one: tuple[Tensor, Tensor, Tensor], answers: list[Any], *, atol: float = 1e-12
) -> None:
    """What `trained` gives on ranks, against that of one process, whose weights have moved."""
    assert one[1].max() - one[1].min() > 1e-5
    for found in answers:
        for value, expected, first in zip(found, one, answers[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=atol)
            assert torch.equal(value, first)


UNEQUAL = {"a": 5, "b": 1, "c": 2, "d": 4}


def check(
    ranks: Ranks,
    num_ranks: int,
    *given: Any,
    atol: float = 1e-12,
    work: Callable[..., tuple[Tensor, Tensor, Tensor]] = trained,
) -> None:
    """Ranks end where one process ends, and all of them on the same bits."""
    _, sizes, _, *rest = given
    # Options and loop; one process has all examples.
    one = trained(bare, sizes, False, *rest[:2])
    assert_ranks_are(one, ranks.run(num_ranks, work, *given), atol=atol)


OPTIONS: dict[str, dict[str, Any]] = {
    "clips": {"max_grad_norm": 0.5, "domain_max_grad_norm": 0.3},
    "no clips": {"domain_max_grad_norm": None},
    "published": {"score": "published", "smoothing": 0.1},
    "selection": {"selection": ["0.weight", "3.bias"]},
    "selection, uncut": {
        "selection": ["0.weight"],
        "domain_max_grad_norm": None,
        "max_grad_norm": 0.5,
    },
    "targets": {"domains": ["a", "b", "c"], "target": {"d": 1.0, "a": 0.5}},
    "a few of many": {"domains_per_step": 2, "seed": 5},
    "any number": {"micro_batches": None},
    "rows of another type": {"buffer_dtype": torch.float64},
}
LOOPS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "halves": ({"a": 8, "b": 4, "c": 4, "d": 8}, {"micro_batches": 2}),
    "scaled": (UNEQUAL, {"max_grad_norm": 0.5}),
    "overflow": (UNEQUAL, {}),
    "absent": (UNEQUAL, {"absent": "keep"}),
}


def raised(work: Callable[[], object]) -> str:
    """What a call raises, as the error says it; empty where it does not."""
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# Shares of every domain are equal on two and on four ranks.
SIZES = {"a": 4, "b": 8, "c": 4, "d": 4}


def sharded(model: nn.Module, mesh_shape: tuple[int, ...] = (), **options: Any) -> nn.Module:
    """The layers and the model in shards; the default mesh is that of all ranks."""
    if mesh_shape:
        options["mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("copies", "shards"))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)
