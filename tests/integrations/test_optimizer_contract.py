"""The wrapper in the hands of others: schedulers, hooks, copies, scalers, closures, compilers."""

import copy
import inspect
import itertools
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from doge_fast import DoGEOptimizer
from tests.integrations.isolated import isolated
from tests.integrations.small import (
    AS_IN_THE_PAPER,
    DOMAINS,
    adamw,
    assert_same,
    collect,
    everything,
    loss_of,
    sgd,
    small_model,
    train,
    train_plainly,
    wrapped,
)

STEPS = 9

pytestmark = pytest.mark.usefixtures("one_thread")


# Schedulers.


def halved(step: int) -> float:
    return 0.5**step


def chained(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=3)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.9)])


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


# One for every class: what is new in torch is seen by the test of completeness.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halved),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=7, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": chained,
    "SequentialLR": sequential,
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=4),
}


def settings(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """What schedulers turn: the rate, and the momentum by either of its names."""
    return [(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups]


def run(
    steps_of: Callable[[range], None], optimizer: Optimizer, scheduler: Any, steps: range
) -> list[Any]:
    """Steps of both; the settings that each step has used."""
    seen = []
    for step in steps:
        seen.append(settings(optimizer))
        steps_of(range(step, step + 1))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return seen


def test_every_scheduler_of_torch_is_here() -> None:
    abstract = ("LRScheduler", "_LRScheduler")
    known = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, lr_scheduler.LRScheduler)
        if name not in abstract
    }
    assert known == set(SCHEDULERS)


@pytest.mark.parametrize("inner", [adamw, sgd])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_reaches_the_wrapped_optimizer(name: str, inner: Any) -> None:
    """Also after a state is loaded, in place and into a new run; it is plain training's."""
    plain_model = small_model()
    plain = inner(plain_model)
    expected = run(
        partial(train_plainly, plain_model, plain),
        plain,
        SCHEDULERS[name](plain),
        range(STEPS),
    )
    assert len({str(each) for each in expected}) > 1

    def build() -> tuple[nn.Module, DoGEOptimizer, Any]:
        model, optimizer = wrapped(inner, domains=["a"])
        # It may be given either.
        takes = optimizer if inner is adamw else optimizer.inner
        return model, optimizer, SCHEDULERS[name](takes)

    model, optimizer, scheduler = build()
    seen = []
    for part in (range(3), range(3, 6), range(6, STEPS)):
        seen += run(partial(train, model, optimizer), optimizer.inner, scheduler, part)
        if part.stop == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        elif part.stop == 6:
            states = [each.state_dict() for each in (model, optimizer, scheduler)]
            model, optimizer, scheduler = build()
            for each, state in zip((model, optimizer, scheduler), states, strict=True):
                each.load_state_dict(copy.deepcopy(state))
    assert seen == expected
    assert_same(model.parameters(), plain_model.parameters())


def test_weight_averaging() -> None:
    """The averaged model is a copy whose gradients nobody listens to."""
    averages = []
    for inner in (adamw, lambda model: wrapped(adamw, model, domains=["a"])[1]):
        model = small_model()
        optimizer = inner(model)
        averaged = swa_utils.AveragedModel(model)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        for step in range(5):
            if isinstance(optimizer, DoGEOptimizer):
                train(model, optimizer, [step])
            else:
                train_plainly(model, optimizer, [step])
            averaged.update_parameters(model)
            scheduler.step()
        loss_of(averaged, 0).backward()
        averages.append([*averaged.parameters(), *(p.grad for p in averaged.parameters())])
    assert_same(*averages)


# Accelerate. Its state is one for the process, hence a process for each.


def by_hand(
    steps: range, inner: Any = adamw, *, micro: int, clip: float | None = None
) -> tuple[nn.Module, DoGEOptimizer]:
    model, optimizer = wrapped(inner, micro_batches=micro)
    scheduler = lr_scheduler.LambdaLR(optimizer, halved if inner is adamw else lambda step: 1.0)
    for step in steps:
        for part in range(micro):
            for row, name in enumerate(DOMAINS):
                with optimizer.domain(name):
                    (loss_of(model, micro * step + part, row) / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer


def with_rate(model: nn.Module, optimizer: DoGEOptimizer) -> list[Tensor]:
    return [*everything(model, optimizer), torch.tensor(optimizer.inner.param_groups[0]["lr"])]


def check_accelerate(given: str, micro: int, clip: float | None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model, doge = wrapped(micro_batches=micro)
    scheduler: Any = lr_scheduler.LambdaLR(doge if given == "wrapper" else doge.inner, halved)
    model, optimizer, scheduler = accelerator.prepare(model, doge, scheduler)
    for part in range(4 * micro):
        with accelerator.accumulate(model):
            for row, name in enumerate(DOMAINS):
                with doge.domain(name):
                    accelerator.backward(loss_of(model, part, row))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same(with_rate(model, doge), with_rate(*by_hand(range(4), micro=micro, clip=clip)))
    assert doge.num_steps == 4


@pytest.mark.parametrize(
    ("given", "micro", "clip"), [("wrapper", 1, None), ("inner", 2, None), ("wrapper", 2, 0.01)]
)
def test_accelerate(given: str, micro: int, clip: float | None) -> None:
    isolated(check_accelerate, given, micro, clip)


def round_by_round(num_steps: int, micro: int | None, *, ends_with_loader: bool) -> DoGEOptimizer:
    """A loader for each domain, and one micro-batch of each in an accumulation of accelerate's."""
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=ends_with_loader)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, doge = wrapped(sgd, micro_batches=micro)
    model, optimizer = accelerator.prepare(model, doge)
    # Each of three batches: they end in the middle of steps.
    loaders = [accelerator.prepare(DataLoader(range(3), batch_size=1)) for _ in DOMAINS]
    batches = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in loaders]
    for part in range(4 * num_steps):
        with accelerator.accumulate(model):
            for row, name in enumerate(DOMAINS):
                next(batches[row])
                with doge.domain(name):
                    accelerator.backward(loss_of(model, part, row))
            optimizer.step()
            optimizer.zero_grad()
    assert doge.num_steps == 4
    return doge


def check_loaders() -> None:
    """As the page on accelerate has it: a plain loop's scores and weights."""
    micro = 2
    _, plain = by_hand(range(4), sgd, micro=micro)
    found = round_by_round(micro, micro, ends_with_loader=False)
    torch.testing.assert_close(found.last.gain, plain.last.gain)
    torch.testing.assert_close(found.alpha_mean, plain.alpha_mean)
    with pytest.raises(RuntimeError, match=r"step\(\) needs"):
        round_by_round(micro, micro, ends_with_loader=True)


def check_division() -> None:
    """Losses are not divided by more micro-batches than a domain has, where that can be seen."""
    micro = 2
    num_steps = len(DOMAINS) * micro
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    for micro_batches, is_refused in ((micro, True), (num_steps, False), (None, False)):
        model, doge = wrapped(sgd, micro_batches=micro_batches)
        model, _ = accelerator.prepare(model, doge)
        words = "divides losses by gradient_accumulation_steps=6"
        expected = pytest.raises(RuntimeError, match=words) if is_refused else nullcontext()
        accelerator.step = 0
        with expected, accelerator.accumulate(model), doge.domain(DOMAINS[0]):
            accelerator.backward(loss_of(model, 0, 0))
    # An Accelerator that accumulates nothing now.
    accelerator.step = num_steps - 1
    model, doge = wrapped(sgd, micro_batches=micro)
    with accelerator.accumulate(model), doge.domain(DOMAINS[0]):
        loss_of(model, 0, 0).backward()


@pytest.mark.parametrize("check", [check_loaders, check_division])
def test_accelerate_with_loaders_of_domains(check: Callable[[], None]) -> None:
    isolated(check)


def check_accelerate_scaler() -> None:
    """Its scaler is handed the wrapper, and a closure of None."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    model, doge = wrapped(scaler=accelerator.scaler)
    scheduler = lr_scheduler.LambdaLR(doge, halved)
    model, optimizer, scheduler = accelerator.prepare(model, doge, scheduler)
    for step in (0, 1, -1, 2, 3):
        before = everything(model, doge)[: -len(doge.doge.state_dict())]
        for row, name in enumerate(DOMAINS):
            with doge.domain(name):
                factor = float("inf") if step < 0 and name == "b" else 1.0
                accelerator.backward(loss_of(model, step, row) * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (step < 0)
        assert doge.num_skipped == (step in (-1, 2, 3))
        if step < 0:
            assert_same(everything(model, doge)[: len(before)], before)
    assert accelerator.scaler.get_scale() == 2.0**11
    expected = with_rate(*by_hand(range(4), micro=1))
    # What is expected has skipped no step.
    expected[-3] = torch.tensor(1)
    assert_same(with_rate(model, doge), expected)


def test_accelerate_with_a_scaler() -> None:
    isolated(check_accelerate_scaler)


# Hooks.


def test_every_hook_of_a_torch_optimizer_runs() -> None:
    model, optimizer = wrapped()
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        def hook(found: Optimizer, *args: Any) -> None:
            assert found is optimizer
            seen.append(what)

        return hook

    handles = [
        optimizer.register_step_pre_hook(note("before step")),
        optimizer.register_step_post_hook(note("after step")),
        optimizer.register_state_dict_pre_hook(note("before state")),
        optimizer.register_state_dict_pre_hook(note("first before state"), prepend=True),
        optimizer.register_state_dict_post_hook(note("after state")),
        optimizer.register_load_state_dict_pre_hook(note("before load")),
        optimizer.register_load_state_dict_post_hook(note("after load")),
    ]
    train(model, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    expected = ["before step", "after step", "first before state", "before state", "after state"]
    expected += ["before load", "after load"]
    assert seen == expected
    for handle in handles:
        handle.remove()
    train(model, optimizer, [1])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == expected


def test_hooks_may_change_what_passes() -> None:
    model, optimizer = wrapped()
    train(model, optimizer, [0])
    collect(model, optimizer, 1)
    called = []
    optimizer.register_step_pre_hook(lambda o, args, kw: ((o, lambda: called.append(1)), {}))
    optimizer.step()
    assert called == [1]
    optimizer.register_state_dict_post_hook(lambda o, state: state | {"mine": 3})
    state = optimizer.state_dict()
    assert state["mine"] == 3
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    before = copy.deepcopy(state)
    optimizer.register_load_state_dict_pre_hook(
        lambda o, found: found | {"doge": found["doge"] | {"alpha": uniform}}
    )
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.alpha, uniform)
    assert not torch.equal(before["doge"]["alpha"], uniform)
    assert state.keys() == before.keys()


def test_hooks_of_both_optimizers_run_and_a_profile_names_their_steps() -> None:
    model, optimizer = wrapped()
    inner, seen = optimizer.inner, []
    inner.register_step_post_hook(lambda *_: seen.append("step"))
    inner.register_state_dict_post_hook(lambda *_: seen.append("state"))
    inner.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    handles = [
        register_optimizer_step_pre_hook(lambda o, args, kw: seen.append(("before", o))),
        register_optimizer_step_post_hook(lambda o, args, kw: seen.append(("after", o))),
    ]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(model, optimizer, [0])
    finally:
        for handle in handles:
            handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    global_hooks = [("before", optimizer), ("before", inner), ("after", inner)]
    assert [each for each in seen if each in global_hooks] == global_hooks
    assert seen[-3:] == [("after", optimizer), "state", "load"]
    assert seen.count("step") == 1
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#DoGEOptimizer.step") == 1
    assert names.count("Optimizer.step#AdamW.step") == 1


# Parameter groups.


@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_a_group_added_later_is_trained_scheduled_and_saved(through: str) -> None:
    model = small_model()
    first, last = model[0], model[2]

    def build() -> DoGEOptimizer:
        return DoGEOptimizer(torch.optim.AdamW(first.parameters(), lr=0.05), domains=DOMAINS)

    optimizer = build()
    for param in last.parameters():
        param.requires_grad_(False)
    train(model, optimizer, [0])
    for param in last.parameters():
        param.requires_grad_(True)
    adder = optimizer if through == "wrapper" else optimizer.inner
    adder.add_param_group({"params": list(last.parameters()), "lr": 0.01})
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = last.weight.detach().clone()
    train(model, optimizer, [1])
    scheduler.step()
    assert not torch.equal(last.weight, before)
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.025, 0.005]
    state = optimizer.state_dict()
    assert len({group["doge"] for group in state["param_groups"]}) == 1
    resumed = build()
    resumed.add_param_group({"params": list(last.parameters())})
    resumed.load_state_dict(state)
    assert_same(everything(model, resumed), everything(model, optimizer))


def test_a_parameter_put_in_the_place_of_another_is_heard() -> None:
    """A new tensor often gets the id of one that has just gone."""
    for _ in range(20):
        body, head = nn.Linear(3, 4), nn.Linear(4, 2)
        groups = [{"params": list(layer.parameters())} for layer in (body, head)]
        optimizer = DoGEOptimizer(
            torch.optim.SGD(groups, lr=0.1), domains=["a"], micro_batches=None
        )
        del optimizer.param_groups[1], head, groups
        head = nn.Linear(4, 2)
        optimizer.add_param_group({"params": list(head.parameters())})
        with optimizer.domain("a"):
            head(body(torch.ones(5, 3))).square().mean().backward()
        assert head.weight.grad is None
        optimizer.step()


# Copies.


def assert_usable(model: nn.Module, optimizer: DoGEOptimizer) -> None:
    """It trains, its hooks run once a step, and its methods are there."""
    counts = [0, 0]

    def count(which: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[which] += 1

        return hook

    optimizer.register_step_pre_hook(count(0))
    optimizer.inner.register_step_post_hook(count(1))
    steps = optimizer.num_steps
    train(model, optimizer, [7, 8])
    optimizer.load_state_dict(optimizer.state_dict())
    assert counts == [2, 2]
    assert optimizer.num_steps == steps + 2
    assert type(optimizer).__name__ in repr(optimizer)


class Inherited(DoGEOptimizer):
    """One of a user's."""


def check_copies(pickled: bytes) -> None:
    """Where no optimizer has been built before: copies, fresh ones, and subclasses, all whole."""
    model, optimizer = pickle.loads(pickled)
    fresh_model, fresh = wrapped()
    lr_scheduler.ConstantLR(fresh, factor=1.0)
    train(fresh_model, fresh, range(3))
    assert_same(everything(model, optimizer), everything(fresh_model, fresh))
    copied = copy.deepcopy((fresh_model, fresh))
    assert_same(everything(*copied), everything(fresh_model, fresh))
    for each in ((model, optimizer), (fresh_model, fresh), copied, wrapped()):
        assert_usable(*each)
    model = small_model()
    inherited = Inherited(adamw(model), domains=DOMAINS)
    assert_usable(*copy.deepcopy((model, inherited)))
    assert_usable(model, inherited)
    plain_model = small_model()
    train_plainly(plain_model, adamw(plain_model), [0])


def test_copies_leave_the_class_whole() -> None:
    model, optimizer = wrapped()
    lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    train(model, optimizer, range(3))
    isolated(check_copies, pickle.dumps((model, optimizer)))


def test_setstate_hands_on_what_is_the_wrapped_optimizers() -> None:
    """The way some loaders give an optimizer its groups."""
    _, optimizer = wrapped()
    groups = [dict(group, lr=0.5) for group in optimizer.param_groups]
    optimizer.__setstate__({"state": {}, "param_groups": groups})
    assert optimizer.inner.param_groups is groups
    assert optimizer.inner.state == {}
    assert "state" not in vars(optimizer)


# Loss scaling.

IMPLEMENTATIONS = {"plain": {"foreach": False}, "foreach": {"foreach": True}}
IMPLEMENTATIONS["fused"] = {"fused": True}


def scaled_step(
    model: nn.Module, optimizer: DoGEOptimizer, scaler: Any, step: int, way: str, spoilt: str = ""
) -> None:
    for row, name in enumerate(optimizer.rows):
        with optimizer.domain(name):
            factor = float("inf") if name == spoilt else 1.0
            scaler.scale(loss_of(model, step, row) * factor).backward()
    if way == "combined":
        optimizer.combine(grad_scale=scaler.get_scale())
    if way == "unscaled":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def reads_factor(scaler: Any, way: str) -> dict[str, Any]:
    """How the optimizer learns of the scaler's factor."""
    return {"micro_batches": None} if way == "combined" else {"scaler": scaler}


@pytest.mark.parametrize("way", ["direct", "combined", "unscaled"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_scaler_changes_nothing_and_skips_what_overflows(implementation: str, way: str) -> None:
    """Bit for bit, since the scale is a power of two; weights are frozen on the skipped step."""
    options = IMPLEMENTATIONS[implementation]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer = wrapped(lambda model: adamw(model, **options), **reads_factor(scaler, way))
    twin, plain = wrapped(lambda model: adamw(model, **options))
    for step in range(4):
        if step == 2:
            before = everything(model, optimizer)
            scaled_step(model, optimizer, scaler, 99, way, spoilt="b")
            after = everything(model, optimizer)
            # The last two: steps skipped, and the number of the draw.
            assert_same(after[:-2], before[:-2])
            assert scaler.get_scale() == 2.0**9
            assert optimizer.num_skipped == 1
        scaled_step(model, optimizer, scaler, step, way)
        collect(twin, plain, step)
        if way == "unscaled":
            nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        plain.step()
        plain.zero_grad()
    assert_same(everything(model, optimizer)[:-2], everything(twin, plain)[:-2])
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("norms", [{}, {"max_grad_norm": 0.01}, {"domain_max_grad_norm": 0.02}])
@pytest.mark.parametrize("selected", [False, True])
def test_a_scale_without_combine_is_that_of_combine(norms: Any, selected: bool) -> None:
    """To rounding, at a scale that is no power of two; with clipping and with a selection."""
    found = []
    for way in ("direct", "combined"):
        model = small_model()
        inner = torch.optim.AdamW(model.named_parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        optimizer = DoGEOptimizer(
            inner,
            selection=["0.weight"] if selected else None,
            **(AS_IN_THE_PAPER | {"mu": 0.01} | norms | reads_factor(scaler, way)),
        )
        for step in range(3):
            scaled_step(model, optimizer, scaler, step, way)
        # Overflow in columns that are not selected.
        handle = model[2].bias.register_hook(lambda grad: grad * float("nan"))
        scaled_step(model, optimizer, scaler, 3, way)
        handle.remove()
        assert (optimizer.num_steps, optimizer.num_skipped) == (3, 1)
        scaled_step(model, optimizer, scaler, 4, way)
        found.append([*model.parameters(), optimizer.alpha])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_scaler_of_drawn_domains() -> None:
    """Bit for bit; an overflow skips the step and draws anew."""
    options: Any = {"domains_per_step": 2, "target": {"a": 1.0, "b": 1.0, "far": 1.0}}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, optimizer = wrapped(**options, scaler=scaler)
    twin, plain = wrapped(**options)

    def scaled(step: int, factor: float) -> None:
        for row, name in enumerate(optimizer.rows):
            if name == "far" or name in optimizer.domains_of_step:
                with optimizer.domain(name):
                    scaler.scale(loss_of(model, step, row) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for step in range(4):
        scaled(step, 1.0)
        train(twin, plain, [step])
    assert_same(everything(model, optimizer), everything(twin, plain))
    scaled(4, float("inf"))
    scaled(4, 1.0)
    assert (optimizer.num_steps, optimizer.num_skipped) == (5, 1)


def test_looking_at_the_scalers_flag_leaves_a_step_as_it_was() -> None:
    """As debuggers do, which read every attribute."""
    model, optimizer = wrapped()
    twin, plain = wrapped()
    for step in range(2):
        assert not optimizer._step_supports_amp_scaling
        with optimizer.domain("a"):
            loss_of(model, step, 0).backward()
        assert not optimizer._step_supports_amp_scaling
        for row, name in ((1, "b"), (2, "c")):
            with optimizer.domain(name):
                loss_of(model, step, row).backward()
        assert not optimizer._step_supports_amp_scaling
        if step:
            optimizer.combine()
            assert not optimizer._step_supports_amp_scaling
        optimizer.step()
        optimizer.zero_grad()
    train(twin, plain, range(2))
    assert_same(everything(model, optimizer), everything(twin, plain))


def test_what_a_scaler_cannot_do_is_no_silent_step() -> None:
    """Unscaling before combining, a missing domain: no inf check, so no step."""
    for micro_batches, names in ((None, DOMAINS), (1, "a")):
        model, optimizer = wrapped(micro_batches=micro_batches)
        scaler = torch.amp.GradScaler("cpu")
        for row, name in enumerate(names):
            with optimizer.domain(name):
                scaler.scale(loss_of(model, 0, row)).backward()
        before = everything(model, optimizer)
        if micro_batches is None:
            scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        assert_same(everything(model, optimizer), before)


def test_a_scaler_that_is_off_has_no_factor() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = wrapped(scaler=scaler)
    twin, plain = wrapped()
    train(twin, plain, [0])
    collect(model, optimizer, 0)
    scaler.step(optimizer)
    assert_same(everything(model, optimizer), everything(twin, plain))


# Closures and compilers.


@pytest.mark.parametrize("way", ["positional", "keyword", "patched"])
def test_a_closure_runs_once_with_gradients(way: str) -> None:
    model, optimizer = wrapped()
    twin, plain = wrapped()
    if way == "patched":
        lr_scheduler.ConstantLR(optimizer, factor=1.0)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        collect(model, optimizer, len(calls))
        calls.append(torch.is_grad_enabled())
        return 0.25 * len(calls)

    with torch.no_grad():
        for step in range(2):
            found = optimizer.step(closure=closure) if way == "keyword" else optimizer.step(closure)
            assert found == 0.25 * (step + 1)
    assert calls == [True, True]
    train(twin, plain, range(2))
    assert_same(everything(model, optimizer), everything(twin, plain))


def check_compiled() -> None:
    """The step alone, and a whole one with its domains, against an uncompiled twin.

    With SGD: torch compiles Adam's arithmetic in another order, wrapped or not.
    """
    # The compiler's own.
    warnings.simplefilter("ignore", DeprecationWarning)
    twin, plain = wrapped(sgd)
    train(twin, plain, range(3))
    model, optimizer = wrapped(sgd)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(3):
        collect(model, optimizer, step)
        compiled()
        optimizer.zero_grad()
    assert_same(everything(model, optimizer), everything(twin, plain))
    model, optimizer = wrapped(sgd)
    compiled_training = torch.compile(train, backend="eager")
    for step in range(3):
        compiled_training(model, optimizer, [step])
    assert_same(everything(model, optimizer), everything(twin, plain))


def check_compiled_model() -> None:
    twin, plain = wrapped(sgd)
    train(twin, plain, range(3))
    model, optimizer = wrapped(sgd)
    train(torch.compile(model, backend="aot_eager"), optimizer, range(3))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "check", [pytest.param(check_compiled, marks=pytest.mark.exhaustive), check_compiled_model]
)
def test_compilers(check: Callable[[], None]) -> None:
    isolated(check)


# Stand-ins, and gradients of somebody else's.


class StandIn:
    """What Lightning hands out: of a class derived from the optimizer's, with a dict of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.original = optimizer
        self.__class__ = type("StandInForOne", (StandIn, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def step(self) -> Any:
        return self.original.step()


def test_a_stand_in_is_entered_as_the_optimizer() -> None:
    model, optimizer = wrapped()
    twin, plain = wrapped()
    stand_in: Any = StandIn(optimizer)
    for step in range(3):
        collect(model, stand_in, step)
        if step == 1:
            stand_in.combine()
        stand_in.step()
        stand_in.zero_grad(set_to_none=False)
        assert set(vars(stand_in)) == {"original"}
        train(twin, plain, [step])
    stand_in.load_state_dict(stand_in.state_dict())
    assert_same(everything(model, stand_in), everything(twin, plain))


def test_a_foreign_gradient_on_what_a_domain_touched_is_not_lost_silently() -> None:
    model, optimizer = wrapped(micro_batches=None)
    collect(model, optimizer, 0)
    before = everything(model, optimizer)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"has a p\.grad from outside the domains"):
        optimizer.step()
    assert_same(everything(model, optimizer), before)
    optimizer.zero_grad()
    train(model, optimizer, [0])
    assert optimizer.num_steps == 1


def test_stepping_the_wrapper_whose_domains_did_not_run() -> None:
    """As after the cell of a notebook that builds the optimizer has run twice."""
    model, old = wrapped(micro_batches=None)
    _, new = wrapped(adamw, model)
    collect(model, old, 0)
    with pytest.raises(RuntimeError, match=r"missing \['a', 'b', 'c'\]"):
        new.step()
    old.step()
    assert (old.num_steps, new.num_steps) == (1, 0)
