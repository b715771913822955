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

from tests.integrations.small import (
    assert_same,
    everything,
    small_model,
    train,
    train_plainly,
    wrapped,
)
from tests.packages import installed

Build = Callable[[nn.Module], Optimizer]

# The first takes sparse gradients only, the other evaluates the loss by itself.
UNSUPPORTED = {torch.optim.SparseAdam, torch.optim.LBFGS}
# Takes matrices only.
MATRICES = {torch.optim.Muon}

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds() -> Iterator[tuple[type[Optimizer], dict[str, Any]]]:
    """Every optimizer of torch, in each of its implementations that a CPU has."""
    for found in vars(torch.optim).values():
        is_one = inspect.isclass(found) and issubclass(found, Optimizer)
        if is_one and found is not Optimizer and found not in UNSUPPORTED:
            yield found, {}
            for name in sorted({"foreach", "fused"} & inspect.signature(found).parameters.keys()):
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
    states = torch.load(saved, weights_only=True)
    resumed_model.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    train(resumed_model, resumed, range(4, 8))
    assert_same(everything(resumed_model, resumed), everything(model, optimizer))
    assert resumed.num_steps == 8


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*each, id="-".join((each[0].__name__, *each[1]))) for each in kinds()],
)
def test_optimizers_of_torch(kind, options):
    assert_wrappable(
        lambda model: kind(model.parameters(), **options),
        lambda: small_model(bias=kind not in MATRICES),
    )


# Blocks of quantised ones begin at 4096 elements.
LARGE = 4096


@pytest.mark.parametrize(
    ("package", "kind"),
    [
        *(("schedulefree", f"{kind}ScheduleFree") for kind in ("SGD", "AdamW", "RAdam")),
        *(("torchao.optim", kind) for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        *(("bitsandbytes.optim", kind) for kind in ("AdamW8bit", "Lion8bit", "AdEMAMix8bit")),
    ],
)
def test_optimizers_of_other_packages(package, kind):
    found = getattr(installed(package), kind)

    def build(model: nn.Module) -> Optimizer:
        optimizer = found(model.parameters(), lr=0.01)
        if package == "schedulefree":
            # They step in training mode only.
            optimizer.train()
        return optimizer

    # The compiler takes half a minute for a step of torchao's.
    with torch.compiler.set_stance("force_eager"):
        try:
            assert_wrappable(build, lambda: small_model(width=LARGE))
        except NotImplementedError as error:
            pytest.skip(f"{package} has no {kind} for a CPU: {error}")
