"""Several wrapped optimizers: one W over all parameters, one mixture, and each steps its own.

Their steps are those of the reference in test_optimizer_twins; over ranks and in one pass for all
domains: test_several_processes and test_sharded; resumed: the two tests of checkpoints; with hooks
and scalers: test_optimizer_contract.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from doge_fast import DoGEOptimizer
from tests.integrations import small

pytestmark = pytest.mark.usefixtures("one_thread")


def kind_of(kind: type[Optimizer], is_one_of_two: bool) -> Callable[[nn.Module], Any]:
    """Of an optimizer alone, or of one for the vectors behind an SGD for the matrices."""

    def build(model: nn.Module) -> Any:
        if not is_one_of_two:
            return kind(model.parameters(), lr=0.1)
        matrices, others = small.divided(model)
        return [torch.optim.SGD(matrices, lr=0.1), kind(others, lr=0.1)]

    return build


def last_of(optimizer: DoGEOptimizer) -> Any:
    return getattr(optimizer.inner, "optimizers", [optimizer.inner])[-1]


def test_groups_and_state_are_those_of_the_optimizers():
    model, optimizer = small.wrapped(small.pair)
    sgd, adamw = optimizer.inner.optimizers
    assert [id(group) for group in optimizer.param_groups] == [
        id(group) for group in (*sgd.param_groups, *adamw.param_groups)
    ]
    small.train(model, optimizer, range(2))
    assert dict(optimizer.state) == {**sgd.state, **adamw.state}
    assert len(optimizer.state) == 4
    bias = model[0].bias
    assert bias in optimizer.state
    optimizer.state[bias]["mine"] = 3
    assert adamw.state[bias]["mine"] == 3
    with pytest.raises(TypeError):
        optimizer.state[bias] = {}
    # As accelerate does it on loading: new lists and dicts.
    adamw.load_state_dict(copy.deepcopy(adamw.state_dict()))
    optimizer.param_groups[1]["lr"] = 0.7
    assert adamw.param_groups[0]["lr"] == 0.7
    groups, state = list(optimizer.param_groups), dict(optimizer.state)
    optimizer.__setstate__({"param_groups": copy.copy(groups), "state": state})
    assert sgd.param_groups == groups[:1]
    assert adamw.param_groups == groups[1:]
    assert {**sgd.state, **adamw.state} == state


def test_the_mirror_step_uses_the_rate_of_the_first_group():
    model, optimizer = small.wrapped(small.pair, mu=None, domains=["a", "b"])
    assert optimizer.mu == 20 * 0.05 * 3 / 2
    small.train(model, optimizer, [0])
    assert optimizer.last.lr == optimizer.state_dict()["doge"]["lr"] == 0.05


def test_schedulers_take_the_wrapper_the_joined_one_or_each():
    found = []
    for given in ("wrapper", "joined", "each"):
        model, optimizer = small.wrapped(small.pair)
        owners: list[Optimizer] = {
            "wrapper": [optimizer],
            "joined": [optimizer.inner],
            "each": [*optimizer.inner.optimizers],
        }[given]
        schedulers = [lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in owners]
        for step in range(6):
            small.train(model, optimizer, [step])
            for scheduler in schedulers:
                scheduler.step()
        rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
        assert rates == [torch.tensor(0.05 / 64), torch.tensor(0.02 / 64)]
        found.append(small.everything(model, optimizer))
    small.assert_same(found[0], found[1])
    small.assert_same(found[0], found[2])
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5, cycle_momentum=False)


class Averaging(torch.optim.SGD):
    """As schedule-free ones: hosts ask whether there are modes, and set them."""

    mode = "none"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("is_one_of_two", [False, True])
def test_train_and_eval_reach_schedule_free_optimizers(is_one_of_two):
    assert not hasattr(small.wrapped(kind_of(torch.optim.SGD, is_one_of_two))[1], "train")
    optimizer = small.wrapped(kind_of(Averaging, is_one_of_two))[1]
    for _ in range(2):
        optimizer.eval()
        assert last_of(optimizer).mode == "eval"
        optimizer.train()
        assert last_of(optimizer).mode == "train"
        optimizer.__setstate__({})


def test_groups_are_added_to_one_of_them():
    model, optimizer = small.wrapped(small.pair)
    more = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="AdamW"):
        optimizer.add_param_group({"params": [more.weight]})
    optimizer.inner.optimizers[0].add_param_group({"params": [more.weight]})
    before = more.weight.clone()
    small.collect(nn.Sequential(model, more), optimizer, 0)
    optimizer.step()
    assert not torch.equal(more.weight, before)
    names = [group["doge_optimizer"] for group in optimizer.state_dict()["param_groups"]]
    assert names == ["SGD", "SGD", "AdamW"]


@pytest.mark.parametrize("is_one_of_two", [False, True])
def test_a_group_may_have_a_key_named_optimizer(is_one_of_two):
    """As those of loops that choose the rule of each group by it."""
    model, optimizer = small.wrapped(kind_of(torch.optim.SGD, is_one_of_two))
    last_of(optimizer).param_groups[0]["optimizer"] = "muon"
    saved = optimizer.state_dict()
    assert saved["param_groups"][-1]["optimizer"] == "muon"
    optimizer.load_state_dict(saved)
    small.train(model, optimizer, range(1))
    assert last_of(optimizer).param_groups[0]["optimizer"] == "muon"


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (small.pair, small.two_sgds),
        (small.pair, lambda model: small.pair(model)[::-1]),
        (small.pair, small.sgd),
        (small.sgd, small.pair),
        (
            small.pair,
            lambda model: [*small.pair(model), torch.optim.AdamW([nn.Parameter(torch.ones(2))])],
        ),
    ],
    ids=["other classes", "other order", "one", "of one", "more"],
)
def test_a_checkpoint_of_other_optimizers_is_refused(saved, into):
    state = small.wrapped(saved)[1].state_dict()
    model, optimizer = small.wrapped(into)
    before = small.everything(model, optimizer)
    with pytest.raises(ValueError, match=r"those of this optimizer are of .*SGD"):
        optimizer.load_state_dict(state)
    small.assert_same(small.everything(model, optimizer), before)


def test_state_without_a_parameter_is_saved_with_its_optimizer():
    optimizer, again = (small.wrapped(small.two_sgds)[1] for _ in range(2))
    for count, each in enumerate(optimizer.inner.optimizers):
        each.state["count"] = count
    again.load_state_dict(optimizer.state_dict())
    assert [each.state["count"] for each in again.inner.optimizers] == [0, 1]


def test_a_list_of_optimizers_must_have_disjoint_parameters():
    model = small.small_model()
    sgd, one = small.sgd(model), {"domains": ["a"]}
    assert DoGEOptimizer([sgd], **one).inner is sgd
    with pytest.raises(ValueError, match="AdamW"):
        DoGEOptimizer([sgd, torch.optim.AdamW(model[0].parameters())], **one)


class AsksForTheLoss(torch.optim.SGD):
    """As AliG: the rate is computed from the loss."""

    seen: Any = None

    def step(self, closure: Any = None) -> None:
        self.seen = closure()
        super().step()


class AsksByAnotherName(AsksForTheLoss):
    def step(self, loss_closure: Any = None) -> None:
        super().step(loss_closure)


class HandsOn(AsksForTheLoss):
    def step(self, *arguments: Any) -> None:
        super().step(*arguments)


class NeedsTheLoss(AsksForTheLoss):
    def step(self, closure: Any) -> None:
        super().step(closure)


class Sharpness(torch.optim.SGD):
    """As SAM: the gradient is taken again, at other parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad)
        self.zero_grad()
        closure()
        super().step()


@pytest.mark.parametrize("kind", [AsksForTheLoss, AsksByAnotherName, HandsOn, NeedsTheLoss])
@pytest.mark.parametrize("is_one_of_two", [False, True])
def test_step_passes_the_loss_to_an_optimizer_that_takes_a_closure(kind, is_one_of_two):
    def closure() -> Tensor:
        small.collect(model, optimizer, 0)
        return torch.tensor(3.0)

    model, optimizer = small.wrapped(kind_of(kind, is_one_of_two))
    twin, plain = small.wrapped(kind_of(torch.optim.SGD, is_one_of_two))
    assert optimizer.step(closure) == 3.0
    assert last_of(optimizer).seen == 3.0
    small.train(twin, plain, [0])
    small.assert_same(model.parameters(), twin.parameters())

    model, optimizer = small.wrapped(kind_of(Sharpness, is_one_of_two))
    with pytest.raises(RuntimeError, match="Sharpness"):
        optimizer.step(closure)


class ReadsTheLatestLoss(torch.optim.SGD):
    """As OLMo-core's SkipStepAdamW: its host sets what its step reads."""

    latest_loss: Any = None

    def first_step(self) -> None:
        """As SAM has it: a step of its own, which moves the parameters."""


@pytest.mark.parametrize("is_one_of_two", [False, True])
def test_attributes_of_the_wrapped_optimizer_are_forwarded_and_its_methods_are_not(is_one_of_two):
    optimizer: Any = small.wrapped(kind_of(ReadsTheLatestLoss, is_one_of_two))[1]
    inner = last_of(optimizer)
    optimizer.latest_loss = 3.0
    assert inner.latest_loss == optimizer.latest_loss == 3.0
    # Nobody's yet: a step may read it with a default.
    optimizer.of_a_host = 1
    for each in getattr(optimizer.inner, "optimizers", [inner]):
        assert each.of_a_host == 1
    inner.of_a_host = 2
    optimizer.of_a_host = 3
    assert (optimizer.of_a_host, inner.of_a_host) == (3, 3)
    assert not hasattr(optimizer, "missing")
    # The parameters would move twice in one step of the domain weights.
    assert not hasattr(optimizer, "first_step")
    optimizer._step_supports_amp_scaling = True
    assert not inner.__dict__.get("_step_supports_amp_scaling")
    assert copy.deepcopy(optimizer).of_a_host == 3
