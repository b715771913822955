"""Ranks that do not do the same, refuse what they are given, or end: all raise, none waits long."""

import copy
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from doge_fast import DoGEOptimizer
from doge_fast.distributed import process_group
from tests.integrations.over_ranks import examples, losses, raised, small_model, values
from tests.models import take_step
from tests.ranks import group

SIZES = {"a": 4, "b": 4}


def built(**options: Any) -> tuple[nn.Module, DoGEOptimizer]:
    model = small_model()
    lr = options.pop("lr", 0.01)
    arguments = {"domains": list(SIZES), "mu": 5.0} | options
    return model, DoGEOptimizer(torch.optim.SGD(model.named_parameters(), lr=lr), **arguments)


def enter(model: nn.Module, optimizer: DoGEOptimizer, name: str, factor: float = 1.0) -> None:
    with optimizer.domain(name):
        (factor * losses(model(examples(name, 0, 4)), name).mean()).backward()


def own(rank: int) -> str:
    return list(SIZES)[rank]


def in_two_groups(is_alone_first: bool) -> tuple[Tensor, Tensor]:
    """A step before there is a group and one over ranks; or one over ranks and one of a copy alone.

    In one process both steps have all domains.
    """
    has_ranks = dist.is_initialized()
    rank = dist.get_rank() if has_ranks else 0
    store = dist.distributed_c10d._get_default_store() if has_ranks else None
    if has_ranks and is_alone_first:
        dist.destroy_process_group()
    model, optimizer = built()
    for is_alone in (is_alone_first, not is_alone_first):
        for name in [own(rank)] if has_ranks and not is_alone else SIZES:
            enter(model, optimizer, name)
        optimizer.step()
        optimizer.zero_grad()
        if has_ranks and is_alone_first and is_alone:
            again = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
        elif has_ranks and not is_alone_first and not is_alone:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            model, optimizer = copy.deepcopy((model, optimizer))
    return values(model), optimizer.alpha_mean


@pytest.mark.parametrize("is_alone_first", [True, False])
def test_a_process_group_may_begin_or_end_between_steps(ranks, is_alone_first):
    one = in_two_groups(is_alone_first)
    for found in ranks.run(2, in_two_groups, is_alone_first):
        for value, expected in zip(found, one, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-13)


def with_others(*options: dict[str, Any]) -> str:
    """What a step says where rank 0 has the first options, and rank 1 the second.

    "is_moved", "entered", "later_alpha" and "grad_scale" are no options of the optimizer; the last
    two come after two whole steps.
    """
    rank = dist.get_rank()
    here = dict(options[rank])
    is_moved, entered = here.pop("is_moved", False), here.pop("entered", own(rank))
    alpha, scale = here.pop("later_alpha", None), here.pop("grad_scale", None)
    model, optimizer = built(**here)
    if is_moved:
        with torch.no_grad():
            next(model.parameters()).add_(1e-9)
    for _ in range(2 if "micro_batches" in here else 0):
        step_again(model, optimizer, [entered])
        optimizer.zero_grad()
    if alpha is not None:
        state = optimizer.doge.state_dict()
        optimizer.doge.load_state_dict(state | {"alpha": torch.tensor(alpha).double()})
    enter(model, optimizer, entered)
    return raised(lambda: optimizer.combine(grad_scale=scale) if scale else optimizer.step())


BIAS = {"selection": ["0.bias"]}
LATER = {"micro_batches": None}


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({}, {"smoothing": 0.1}, "the settings of DoGEOptimizer"),
        ({}, {"domains": ["b", "a"]}, "the domains or the target"),
        ({}, {"domains": ["a", "b", "c"]}, "the number of domains or of parameters"),
        ({}, {"lr": np.float32(0.02)}, "the learning rate"),
        ({}, {"lr": torch.tensor(0.02)}, "the learning rate"),
        ({}, {"initial": {"a": 0.3, "b": 0.7}}, "the domain weights"),
        ({}, {"selection": ["0.weight"]}, "the selection"),
        (BIAS, {"selection": ["0.weight"]}, "the selection"),
        ({}, {"absent": "keep"}, "micro_batches or absent"),
        ({}, {"is_moved": True}, "the values of the parameters"),
        ({}, {"entered": "a"}, ""),
        (LATER, LATER | {"later_alpha": [0.25, 0.75]}, "the domain weights"),
        (LATER | {"grad_scale": 2.0}, LATER | {"grad_scale": 3.0}, "grad_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_differ_in_a_setting_are_refused(ranks, first, second, what):
    said, other = ranks.run(2, with_others, first, second)
    assert said == other
    assert (f"differ in {what}: rank 1 from rank 0." if what else "missing ['b']") in said


def of_a_group() -> tuple[list[float], list[float]]:
    """The weights of two ranks of three, and those of a copy."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 2:
        return [], []
    model, optimizer = built(process_group=group)
    copies = copy.deepcopy((model, optimizer))
    for each, its in ((model, optimizer), copies):
        enter(each, its, own(rank))
        its.step()
    return optimizer.alpha.tolist(), copies[1].alpha.tolist()


def test_process_group_selects_the_ranks_also_of_a_copy(ranks):
    first, second, _ = ranks.run(3, of_a_group)
    assert first == second
    assert first[0] == first[1] != [0.5, 0.5]


REDUCING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "static_graph=True": partial(DistributedDataParallel, static_graph=True),
    "something has set p.grad inside a domain": replicate,
}
FORWARD_FIRST = "Run forward and backward inside the domain"


def enter_reducing(message: str) -> str:
    """What a model that reduces its gradients raises in a domain."""
    model, name = small_model(), own(dist.get_rank())
    wrapped = REDUCING.get(message, DistributedDataParallel)(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DoGEOptimizer(inner, domains=list(SIZES), mu=5.0)
    if message != FORWARD_FIRST:
        return raised(lambda: enter(wrapped, optimizer, name))
    outputs = wrapped(examples(name, 0, 4))
    return raised(lambda: enter(lambda _: outputs, optimizer, name))


@pytest.mark.parametrize("message", [*REDUCING, FORWARD_FIRST])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_reduces_its_gradients_is_refused(ranks, message):
    for sentence in ranks.run(2, enter_reducing, message):
        assert message in sentence


def reduce_before_the_first_step() -> Tensor:
    """Rank 1 has no domain, and the loop reduces its loss; a group without gloo, as NCCL's is."""

    def separate(group: dist.ProcessGroup) -> object:
        return dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_cpu_group_of", separate)
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = DoGEOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), domains=["a", "b"])
        loss = torch.zeros(())
        if dist.get_rank() == 0:
            for name in optimizer.domains:
                with optimizer.domain(name):
                    loss = model(torch.ones(2, 3)).square().mean()
                    loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    return model.weight.detach().clone()


def test_ranks_make_no_group_before_all_are_there(ranks):
    first, second = ranks.run(2, reduce_before_the_first_step)
    assert torch.equal(first, second)


def step_again(model: nn.Module, optimizer: DoGEOptimizer, names: Iterable[str]) -> None:
    """A whole step, whatever was collected before."""
    optimizer.zero_grad()
    for _ in range(optimizer.micro_batches or 1):
        for name in names:
            enter(model, optimizer, name)
    optimizer.step()


def drop_a_domain() -> str:
    """The loop of rank 1 catches an exception in a domain and goes on with this step."""
    model, optimizer = built()
    name = own(dist.get_rank())
    if dist.get_rank() == 1:
        with suppress(KeyError), optimizer.domain(name):
            raise KeyError
    enter(model, optimizer, name)
    return raised(optimizer.step) if dist.get_rank() == 1 else ""


def test_a_rank_that_has_dropped_a_domain_does_not_combine(ranks):
    _, message = ranks.run(2, drop_a_domain)
    assert "dropped" in message


def untouched() -> tuple[Tensor, float]:
    """A parameter that no domain touches, on a rank without a domain; and one that is frozen."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    params = nn.ParameterList([nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))])
    inner = torch.optim.AdamW(params.parameters(), lr=0.1, weight_decay=0.0)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=1.0)

    def step(names: str, used: list[nn.Parameter]) -> None:
        factors_N = torch.arange(1.0, 5.0)
        take_step(optimizer, names, lambda _: sum((param * factors_N).sum() for param in used))

    step("ab"[rank], list(params))
    step("" if rank else "ab", [params[0]])
    theta_N = torch.cat([param.detach() for param in params])
    step("ab"[rank], list(params))
    before = params[0].detach().clone()
    params[0].requires_grad_(False)
    step("ab"[rank], [params[1]])
    step("ab"[rank], [params[1]])
    return theta_N, float((params[0] - before).abs().max())


def test_a_parameter_without_gradient_stays_on_all_ranks(ranks):
    (theta_N, moved), (other_N, _) = ranks.run(2, untouched)
    assert torch.equal(theta_N, other_N)
    assert moved == 0


# A rank that ends or hangs: the collectives of the others end with torch's error.

TIMEOUT_SECONDS = 8.0
LOST = 1
# Of starting processes that import FSDP2, on a busy machine.
PATIENCE_SECONDS = 120


def run_rank(
    rank: int,
    num_ranks: int,
    kind: str,
    how: str,
    store: str,
    answers: "Queue[tuple[int, float]]",
) -> None:
    torch.set_num_threads(1)
    with group(rank, num_ranks, store, TIMEOUT_SECONDS):
        model: nn.Module = small_model()
        if kind == "shards":
            model = fully_shard(model)
        names = "ab" if kind == "shards" else "abcdefgh"
        here = names if kind == "shards" else (names[rank], names[rank + num_ranks])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DoGEOptimizer(inner, domains=list(names), mu=5.0, micro_batches=None)
        start = 0.0
        try:
            for step in range(3):
                is_lost = rank == LOST and step == 1
                enter(model, optimizer, here[0])
                if is_lost and how == "ends":
                    os._exit(3)
                start = time.monotonic()
                enter(model, optimizer, here[1])
                if is_lost:
                    time.sleep(60)
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError:
            answers.put((rank, time.monotonic() - start))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ends", "hangs"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("columns", 4), ("shards", 2)])
def test_a_lost_rank_ends_the_others(tmp_path, kind, num_ranks, how):
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[int, float]] = context.Queue()
    shared = (num_ranks, kind, how, str(tmp_path / "store"), answers)
    processes = [
        context.Process(target=run_rank, args=(rank, *shared)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=PATIENCE_SECONDS) for _ in range(num_ranks - 1))
    finally:
        for process in processes:
            process.kill()
    assert [rank for rank, _ in found] == [rank for rank in range(num_ranks) if rank != LOST]
    for _, seconds in found:
        assert seconds < TIMEOUT_SECONDS + 5
