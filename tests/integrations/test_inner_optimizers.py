"""Which optimizers can be wrapped: all of torch's that take one dense gradient, and some others'.

Each is trained on one domain, which must be plain training bit for bit, and on three, saved and
resumed half way, which must be the run that was never interrupted.
"""

import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from doge_fast import DoGEOptimizer
from tests.integrations.small import (
    AS_IN_THE_PAPER,
    assert_same,
    collect,
    everything,
    small_model,
    train,
    train_plainly,
    wrapped,
)
from tests.packages import installed

Build = Callable[[nn.Module], Optimizer]

# Takes sparse gradients only.
SPARSE = {torch.optim.SparseAdam}
# Evaluates the loss by itself.
CLOSURES = {torch.optim.LBFGS}
# Takes matrices only.
MATRICES = {torch.optim.Muon}

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds() -> Iterator[tuple[type[Optimizer], dict[str, Any]]]:
    """Every optimizer of torch, in each of its implementations that a CPU has."""
    for found in vars(torch.optim).values():
        if not inspect.isclass(found) or not issubclass(found, Optimizer) or found is Optimizer:
            continue
        if found in SPARSE | CLOSURES:
            continue
        arguments = inspect.signature(found).parameters
        yield found, {}
        for name in ("foreach", "fused"):
            if name in arguments:
                yield found, {name: True}


def assert_wrappable(build: Build, model_of: Callable[[], nn.Module]) -> None:
    """The two checks of this file."""
    plain_model, model = model_of(), model_of()
    plain, optimizer = build(plain_model), wrapped(build, model, domains=["a"])[1]
    train_plainly(plain_model, plain, range(8))
    train(model, optimizer, range(8))
    assert_same(model.parameters(), plain_model.parameters())
    assert not torch.equal(next(model.parameters()), next(model_of().parameters()))

    model, optimizer = wrapped(build, model_of())
    train(model, optimizer, range(4))
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    train(model, optimizer, range(4, 8))
    saved.seek(0)
    resumed_model, resumed = wrapped(build, model_of())
    for each, state in zip(
        (resumed_model, resumed), torch.load(saved, weights_only=True), strict=True
    ):
        each.load_state_dict(state)
    train(resumed_model, resumed, range(4, 8))
    assert_same(everything(resumed_model, resumed), everything(model, optimizer))
    assert resumed.num_steps == 8


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*each, id="-".join((each[0].__name__, *each[1]))) for each in kinds()],
)
def test_optimizers_of_torch(kind: type[Optimizer], options: dict[str, Any]) -> None:
    assert_wrappable(
        lambda model: kind(model.parameters(), **options),
        lambda: small_model(bias=kind not in MATRICES),
    )


@pytest.mark.parametrize("kind", CLOSURES)
def test_one_that_evaluates_the_loss_itself_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(TypeError, match="evaluates the loss several times in a step"):
        wrapped(lambda model: kind(model.parameters()))


@pytest.mark.parametrize("kind", SPARSE)
def test_one_for_sparse_gradients_says_so_itself(kind: type[Optimizer]) -> None:
    model, optimizer = wrapped(lambda model: kind(model.parameters()))
    collect(model, optimizer, 0)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()


def ready(optimizer: Any) -> Any:
    """Schedule-free ones step in training mode only."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


SCHEDULE_FREE = ["SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"]


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
@pytest.mark.parametrize("foreach", [False, True])
def test_schedule_free(kind: str, foreach: bool) -> None:
    found = getattr(installed("schedulefree"), kind)
    assert_wrappable(
        lambda model: ready(found(model.parameters(), lr=0.05, foreach=foreach)), small_model
    )


def test_modes_are_the_wrapped_optimizers() -> None:
    """Hosts switch an optimizer with its model, and ask whether it can be switched."""
    assert not hasattr(wrapped()[1], "train")
    found = installed("schedulefree").AdamWScheduleFree
    model, optimizer = wrapped(lambda model: found(model.parameters(), lr=0.05))
    optimizer.train()
    train(model, optimizer, range(3))
    trained = [param.detach().clone() for param in model.parameters()]
    optimizer.eval()
    assert not torch.equal(model[0].weight, trained[0])
    assert not optimizer.inner.param_groups[0]["train_mode"]
    optimizer.train()
    for one, other in zip(model.parameters(), trained, strict=True):
        torch.testing.assert_close(one, other)


# Blocks of these are quantised from 4096 elements on.
LARGE = 4096


def large_model() -> nn.Module:
    return small_model(width=LARGE)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(kind: str) -> None:
    """Its step without the compiler, which takes half a minute here."""
    found = getattr(installed("torchao.optim"), kind)
    with torch.compiler.set_stance("force_eager"):
        assert_wrappable(lambda model: found(model.parameters(), lr=0.01), large_model)


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "AdamW32bit", "AdEMAMix8bit"])
def test_bitsandbytes(kind: str) -> None:
    found = getattr(installed("bitsandbytes").optim, kind)
    model, optimizer = wrapped(lambda model: found(model.parameters(), lr=0.01), large_model())
    try:
        train(model, optimizer, [0])
    except NotImplementedError as error:
        pytest.skip(f"bitsandbytes has no {kind} for a CPU: {error}")
    assert_wrappable(lambda model: found(model.parameters(), lr=0.01), large_model)


def test_different_optimizers_move_the_weights_alike() -> None:
    """Before the first step W is that of the gradients, whoever uses them."""
    alphas = []
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop):
        model = small_model()
        optimizer = DoGEOptimizer(kind(model.parameters(), lr=0.01), **AS_IN_THE_PAPER)
        train(model, optimizer, [0])
        alphas.append(optimizer.alpha)
    assert_same(alphas[:1] * 2, alphas[1:])
    assert alphas[0].max() > 1 / 3
