"""FSDP2 and tensor parallelism: placements say what is whose, and what is a copy."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from doge_fast import DoGEOptimizer
from doge_fast.step import parameters
from tests.integrations.over_ranks import (
    LOOPS,
    OPTIONS,
    SIZES,
    UNEQUAL,
    Checkpointed,
    Sizes,
    Wrap,
    bare,
    check,
    ddp,
    ddp_views,
    examples,
    losses,
    raised,
    sgd_and_adamw,
    sharded,
    shares,
    small_model,
    trained,
    whole_pieces,
)

TWICE = {name: 2 * size for name, size in SIZES.items()}


copies_of_shards = partial(sharded, mesh_shape=(2, 2))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(sharded(model), backend="aot_eager")


def compiled_layers(model: nn.Module) -> nn.Module:
    for layer in model:
        layer.compile(backend="aot_eager")
    return sharded(model)


def replicated(model: nn.Module) -> nn.Module:
    """The form of replicate() that fully_shard's machinery runs; the other one is refused."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            replicate(layer)
    return replicate(model)


def checkpointed(model: nn.Module) -> nn.Module:
    return fully_shard(Checkpointed(sharded(model)))


def second_dimension(model: nn.Module) -> nn.Module:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    return sharded(model, shard_placement_fn=placement)


CLIPS, TWO, MORE = OPTIONS["clips"], {"micro_batches": 2}, pytest.mark.exhaustive
FORMS = {
    "kept": partial(sharded, reshard_after_forward=False),
    "second dimension": second_dimension,
    "offloaded": partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "compiled": compiled,
    "compiled layers": compiled_layers,
    "checkpointed": checkpointed,
    "replicated": replicated,
}
# An option, a loop and a form of each kind; DDP goes through all of them in seconds.
SOME = (
    *("as it comes", "targets", "selection, uncut", "halves", "overflow"),
    *("copies", "second dimension", "replicated", "several optimizers"),
)


def case(
    name: str,
    num_ranks: int,
    wrap: Wrap,
    options: dict[str, Any],
    sizes: Sizes = SIZES,
    how: str = "",
) -> Any:
    marks = () if name in SOME else MORE
    return pytest.param(num_ranks, wrap, options, sizes, how, id=name, marks=marks)


@pytest.mark.parametrize(
    ("num_ranks", "wrap", "options", "sizes", "how"),
    [
        case("as it comes", 2, sharded, {}),
        *(case(name, 2, sharded, options) for name, options in OPTIONS.items()),
        case("copies", 4, copies_of_shards, CLIPS),
        case("4, clips", 4, sharded, CLIPS),
        case("4, uncut", 4, sharded, OPTIONS["selection, uncut"]),
        case("copies, uncut", 4, copies_of_shards, OPTIONS["selection, uncut"]),
        *(case(how, 2, sharded, options, TWICE, how) for how, (_, options) in LOOPS.items()),
        *(case(name, 2, form, CLIPS) for name, form in FORMS.items()),
        case("bfloat16", 2, sharded, {"buffer_dtype": torch.bfloat16}),
        case("several optimizers", 2, sharded, {"inner": sgd_and_adamw}),
    ],
)
def test_shards_train_what_one_process_trains(ranks, num_ranks, wrap, options, sizes, how):
    # Rows are rounded after the reduction, so shards round as one process does. Plain torch
    # multiplies rows of bfloat16 in float32; rows that are rounded twice are 1e-4 off.
    atol = 1e-7 if options.get("buffer_dtype") == torch.bfloat16 else 1e-12
    check(ranks, num_ranks, wrap, sizes, False, options, how, shares, atol=atol)


def test_mixed_precision_is_as_close_as_its_type(ranks):
    """Forward and backward in float32, gradients added up in float64."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    lower = partial(sharded, mp_policy=policy)
    one = trained(bare, SIZES, False, {})
    first, second = ranks.run(2, trained, lower, SIZES, False, {}, "", shares)
    for value, same, expected in zip(first, second, one, strict=True):
        assert torch.equal(value, same)
        # A hundred ulp of float32: Adam divides gradients by their size.
        torch.testing.assert_close(value, expected, rtol=0, atol=100 * 2**-23)
        assert not torch.equal(value, expected)


def refused(what: str) -> str:
    model = small_model()
    if what == "all":
        fully_shard(model[0])
    else:
        sharded(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DoGEOptimizer(inner, domains=["a", "b"], mu=5.0, micro_batches=None)
    rank = dist.get_rank()
    count = 1 + rank if what == "count" else 1

    def stack() -> None:
        with optimizer.stacked(model, {"a": 4, "b": 4}):
            raise AssertionError("entered")

    # The model can be trained on after that.
    said = raised(stack) if what == "whole parameters" else ""

    def step() -> None:
        for name in "ba" if what == "order" and rank else "ab":
            with optimizer.domain(name, count=count):
                losses(model(examples(name, 0, 4)), name).mean().backward()
        optimizer.step()
        if what == "twice":
            inner.step()

    return said + raised(step)


@pytest.mark.parametrize("what", ["count", "order", "all", "twice", "whole parameters"])
def test_refusals_under_fsdp2(ranks, what):
    one, other = ranks.run(2, refused, what)
    assert what in one
    assert one == other


def trained_off_the_cpu(*given: Any) -> tuple[torch.Tensor, ...]:
    """`trained` where gradients are taken when a domain is left, as on GPUs; on CPU memory."""
    with mock.patch.object(parameters, "takes_at_once", return_value=False):
        return trained(*given)


@pytest.mark.parametrize(
    ("num_ranks", "given"),
    [
        pytest.param(2, (ddp, UNEQUAL, False, CLIPS, "", whole_pieces), id="ddp"),
        pytest.param(2, (ddp_views, TWICE, False, TWO, "halves", whole_pieces), id="views"),
        pytest.param(3, (ddp, UNEQUAL, True, CLIPS, "", whole_pieces), id="stacked", marks=MORE),
        pytest.param(2, (sharded, SIZES, False, CLIPS, "", shares), id="shards"),
        pytest.param(2, (sharded, TWICE, False, TWO, "halves", shares), id="halves", marks=MORE),
        pytest.param(2, (replicated, SIZES, False, CLIPS, "", shares), id="whole", marks=MORE),
        pytest.param(
            4, (copies_of_shards, SIZES, False, CLIPS, "", shares), id="copies", marks=MORE
        ),
    ],
)
def test_ranks_whose_gradients_are_taken_late(ranks, num_ranks, given):
    check(ranks, num_ranks, *given, work=trained_off_the_cpu)


SIZES_OF_PAIRS = {"a": 8, "b": 8, "c": 8}
CLIPS_OF_PAIRS = {"max_grad_norm": 0.5, "domain_max_grad_norm": 2.0}


def as_copies(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
    return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)


def as_local(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


def parallel(model: nn.Sequential, how: str) -> nn.Module:
    """The model over pairs of ranks, each pair with a shard where there are two.

    Args:
        model: two linear layers, with a norm between them.
        how: "copies": the norm is, and its gradients; "sequence": each rank has some of the
            examples there, so that gradients of the norm are partial sums; "plain": the norm is
            left as it is.
    """
    names = ("data", "tensors")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)
    between = Shard(0) if how == "sequence" else Replicate()
    plan: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(output_layouts=between),
        "3": RowwiseParallel(input_layouts=between),
    }
    if how == "sequence":
        plan["2"] = SequenceParallel(sequence_dim=0)
    parallelize_module(model, mesh["tensors"], plan)
    if how == "copies":
        distribute_module(model[2], mesh["tensors"], input_fn=as_copies, output_fn=as_local)
    if mesh["data"].size() > 1:
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer, mesh=mesh["data"])
    return model


def shares_of_pairs(
    sizes: Mapping[str, int], rank: int, num_ranks: int
) -> list[tuple[str, int, int]]:
    """Both ranks of a pair have the same examples."""
    return shares(sizes, rank // 2, max(1, num_ranks // 2))


on_ranks = pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])


@pytest.mark.parametrize("how", ["copies", "sequence"])
@on_ranks
def test_placements_give_what_one_process_trains(ranks, num_ranks, how):
    wrap = partial(parallel, how=how)
    check(ranks, num_ranks, wrap, SIZES_OF_PAIRS, False, CLIPS_OF_PAIRS, "", shares_of_pairs)


def refused_placement() -> str:
    plain = partial(parallel, how="plain")
    return raised(
        lambda: trained(plain, SIZES_OF_PAIRS, False, CLIPS_OF_PAIRS, "", shares_of_pairs)
    )


@on_ranks
def test_parameters_outside_the_mesh_are_refused(ranks, num_ranks):
    for said in ranks.run(num_ranks, refused_placement):
        assert said.startswith("the optimizer's parameters must all be sharded or replicated")
