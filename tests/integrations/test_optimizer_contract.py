"""The wrapper in the hands of others: schedulers, hooks, copies, scalers, closures, compilers."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from doge_fast import DoGEOptimizer
from tests.integrations.small import (
    DOMAINS,
    adamw,
    assert_same,
    collect,
    everything,
    pair,
    sgd,
    small_model,
    train,
    train_plainly,
    two_sgds,
    wrapped,
)
from tests.ranks import FORKSERVER

STEPS = 9

pytestmark = pytest.mark.usefixtures("one_thread")


def isolated(check: Callable[..., None], *args: object) -> None:
    """Run `check(*args)` in a process in which nothing of ours has been built yet.

    For what stays behind in classes and in singletons; `check` is a function of this module.
    """
    with ProcessPoolExecutor(1, mp_context=FORKSERVER) as pool:
        pool.submit(_alone, check, args).result()


def _alone(check: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    # As in every test: what others say of themselves changes with their versions.
    warnings.filterwarnings("error", module=r"(doge_fast|tests)\b")
    warnings.filterwarnings("ignore", "doge_fast runs")
    check(*args)


def halved(step: int) -> float:
    return 0.5**step


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


# A factor of the rate; momentum or betas as well; a metric; two in turn; towards a fixed rate.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halved),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": sequential,
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=4),
}


@pytest.mark.parametrize("inner", [adamw, sgd])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_reaches_the_wrapped_optimizer(name, inner):
    """Also after a state is loaded, in place and into a new run; it is plain training's."""

    def build() -> tuple[nn.Module, DoGEOptimizer, Any]:
        model, optimizer = wrapped(inner, domains=["a"])
        # It may be given either.
        takes = optimizer if inner is adamw else optimizer.inner
        return model, optimizer, SCHEDULERS[name](takes)

    plain_model = small_model()
    plain = inner(plain_model)
    plain_scheduler = SCHEDULERS[name](plain)
    model, optimizer, scheduler = build()
    for step in range(STEPS):
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 6:
            states = [each.state_dict() for each in (model, optimizer, scheduler)]
            model, optimizer, scheduler = build()
            for each, state in zip((model, optimizer, scheduler), states, strict=True):
                each.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, [step])
        train_plainly(plain_model, plain, [step])
        metric = [1.0] if name == "ReduceLROnPlateau" else []
        for each in (scheduler, plain_scheduler):
            each.step(*metric)
    assert plain.param_groups[0]["lr"] != 0.05
    assert optimizer.inner.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same(model.parameters(), plain_model.parameters())


def by_hand(
    steps: range, inner: Any = adamw, *, micro: int, clip: float | None = None
) -> tuple[nn.Module, DoGEOptimizer]:
    model, optimizer = wrapped(inner, micro_batches=micro)
    scheduler = lr_scheduler.LambdaLR(optimizer, halved if inner is adamw else lambda step: 1.0)
    for step in steps:
        for part in range(micro):
            number = micro * step + part
            collect(model, optimizer, number, backward=lambda loss: (loss / micro).backward())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer


def with_rate(model: nn.Module, optimizer: DoGEOptimizer) -> list[Tensor]:
    return [*everything(model, optimizer), torch.tensor(optimizer.inner.param_groups[0]["lr"])]


def check_accelerate(given: str, micro: int, clip: float | None) -> None:
    """Accelerate's state is one for the process, hence a process for each check."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model, doge = wrapped(micro_batches=micro)
    scheduler: Any = lr_scheduler.LambdaLR(doge if given == "wrapper" else doge.inner, halved)
    model, optimizer, scheduler = accelerator.prepare(model, doge, scheduler)
    for part in range(4 * micro):
        with accelerator.accumulate(model):
            collect(model, doge, part, backward=accelerator.backward)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same(with_rate(model, doge), with_rate(*by_hand(range(4), micro=micro, clip=clip)))
    assert doge.num_steps == 4


def check_loaders() -> None:
    """As the page on accelerate has it: a loader for each domain, and a plain loop's weights."""
    micro = 2
    for ends_with_loader in (False, True):
        plugin = GradientAccumulationPlugin(micro, sync_with_dataloader=ends_with_loader)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model, doge = wrapped(sgd, micro_batches=micro)
        model, optimizer = accelerator.prepare(model, doge)
        # Each of three batches: they end in the middle of steps.
        loaders = [accelerator.prepare(DataLoader(range(3), batch_size=1)) for _ in DOMAINS]
        batches = [itertools.chain.from_iterable(itertools.repeat(each)) for each in loaders]
        refused = pytest.raises(RuntimeError, match=r"step\(\) needs")
        with refused if ends_with_loader else nullcontext():
            for part in range(4 * micro):
                with accelerator.accumulate(model):
                    for each in batches:
                        next(each)
                    collect(model, doge, part, backward=accelerator.backward)
                    optimizer.step()
                    optimizer.zero_grad()
        if not ends_with_loader:
            _, plain = by_hand(range(4), sgd, micro=micro)
            assert doge.num_steps == 4
            torch.testing.assert_close(doge.last.gain, plain.last.gain)
            torch.testing.assert_close(doge.alpha_mean, plain.alpha_mean)


def check_accelerate_scaler() -> None:
    """Its scaler is handed the wrapper, and a closure of None."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    model, doge = wrapped(scaler=accelerator.scaler)
    scheduler = lr_scheduler.LambdaLR(doge, halved)
    model, optimizer, scheduler = accelerator.prepare(model, doge, scheduler)
    for step in (0, 1, -1, 2, 3):
        # One domain that overflows is enough.
        spoilt = "b" if step < 0 else ""
        collect(model, doge, step, spoilt=spoilt, backward=accelerator.backward)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (step < 0)
    assert accelerator.scaler.get_scale() == 2.0**11
    expected = with_rate(*by_hand(range(4), micro=1))
    # What is expected has skipped no step.
    expected[-3] = torch.tensor(1)
    assert_same(with_rate(model, doge), expected)


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (check_accelerate, ("wrapper", 1, None)),
        (check_accelerate, ("inner", 2, None)),
        (check_accelerate, ("wrapper", 2, 0.01)),
        *((check, ()) for check in (check_loaders, check_accelerate_scaler)),
    ],
)
def test_accelerate(check, given):
    isolated(check, *given)


def test_every_hook_of_all_optimizers_runs_and_a_profile_names_their_steps():
    model, optimizer = wrapped(pair)
    every = (optimizer, optimizer.inner, *optimizer.inner.optimizers)
    kinds = ("step", "state_dict", "load_state_dict")
    seen: list[str] = []
    handles = [
        # For whatever optimizer steps.
        register_optimizer_step_pre_hook(lambda found, *_: seen.append(type(found).__name__))
    ]
    for each, kind, when in itertools.product(every, kinds, ("pre", "post")):
        said = f"{kind} {type(each).__name__} {when}"
        register = getattr(each, f"register_{kind}_{when}_hook")
        handles.append(register(lambda *_, said=said: seen.append(said)))
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(model, optimizer, [0])
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    names = [event.name for event in profile.events()]
    train(model, optimizer, [1])
    optimizer.load_state_dict(optimizer.state_dict())
    order = [
        *("DoGEOptimizer pre", "JoinedOptimizer pre", "SGD pre", "SGD post"),
        *("AdamW pre", "AdamW post", "JoinedOptimizer post", "DoGEOptimizer post"),
    ]
    expected = [f"{kind} {each}" for kind in kinds for each in order]
    for name in ("DoGEOptimizer", "JoinedOptimizer", "SGD", "AdamW"):
        expected.insert(expected.index(f"step {name} pre"), name)
        assert names.count(f"Optimizer.step#{name}.step") == 1
    assert seen == expected


def test_hooks_may_change_what_passes():
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


@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_a_group_added_later_is_trained_and_scheduled(through):
    """And saved: a run of test_optimizer_checkpoints."""
    model = small_model()
    first, last = model[0], model[2]
    optimizer = DoGEOptimizer(torch.optim.AdamW(first.parameters(), lr=0.05), domains=DOMAINS)
    last.requires_grad_(False)
    train(model, optimizer, [0])
    last.requires_grad_(True)
    adder = optimizer if through == "wrapper" else optimizer.inner
    adder.add_param_group({"params": list(last.parameters()), "lr": 0.01})
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = last.weight.detach().clone()
    train(model, optimizer, [1])
    scheduler.step()
    assert not torch.equal(last.weight, before)
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.025, 0.005]
    groups = optimizer.state_dict()["param_groups"]
    assert len({group["doge"] for group in groups}) == 1


def test_a_replaced_parameter_is_tracked():
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


def assert_usable(model: nn.Module, optimizer: DoGEOptimizer) -> None:
    """It trains, its hooks run once a step, and its methods are there."""
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("outer"))
    optimizer.inner.register_step_post_hook(lambda *_: seen.append("inner"))
    steps = optimizer.num_steps
    train(model, optimizer, [7, 8])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["outer", "inner"] * 2
    assert optimizer.num_steps == steps + 2
    assert type(optimizer).__name__ in repr(optimizer)


class Inherited(DoGEOptimizer):
    """One of a user's."""


def check_copies(pickled: bytes) -> None:
    """Where no optimizer has been built before: copies, fresh ones, and subclasses, all whole.

    That they hold the same numbers: test_optimizer_checkpoints.
    """
    loaded = pickle.loads(pickled)
    model = small_model()
    inherited = model, Inherited(adamw(model), domains=DOMAINS)
    for each in (loaded, copy.deepcopy(loaded), wrapped(), copy.deepcopy(inherited), inherited):
        assert_usable(*each)
    plain_model = small_model()
    train_plainly(plain_model, adamw(plain_model), [0])


def test_copies_leave_the_class_whole():
    model, optimizer = wrapped()
    lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    train(model, optimizer, range(3))
    isolated(check_copies, pickle.dumps((model, optimizer)))


INNER: dict[str, Callable[[nn.Module], Any]] = {
    "plain": partial(adamw, foreach=False),
    "foreach": partial(adamw, foreach=True),
    "fused": partial(adamw, fused=True),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.05),
    "pair": pair,
}


def scaled_step(
    model: nn.Module,
    optimizer: DoGEOptimizer,
    scaler: Any,
    step: int,
    way: str,
    *,
    spoilt: Collection[str] = (),
) -> None:
    collect(
        model, optimizer, step, spoilt=spoilt, backward=lambda loss: scaler.scale(loss).backward()
    )
    if way == "combined":
        optimizer.combine(grad_scale=scaler.get_scale())
    if way == "unscaled":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", ["direct", "combined", "unscaled"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in INNER),
        ("plain", {"domains_per_step": 2, "target": {"a": 1.0, "b": 1.0, "far": 1.0}}),
        ("plain", {"max_grad_norm": 0.01}),
        ("named", {"domain_max_grad_norm": 0.02, "selection": ["0.weight"]}),
    ],
    ids=[*INNER, "drawn", "clipped", "selected"],
)
def test_a_scaler_changes_nothing_and_skips_what_overflows(name, options, way):
    """Bit for bit, since the scale is a power of two; weights are frozen on the skipped step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    # How the optimizer learns of the scaler's factor.
    given = {"micro_batches": None} if way == "combined" else {"scaler": scaler}
    model, optimizer = wrapped(INNER[name], **options, **given)
    twin, plain = wrapped(INNER[name], **options)
    for step in range(4):
        scaled_step(model, optimizer, scaler, step, way)
        collect(twin, plain, step)
        if way == "unscaled":
            nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        plain.step()
        plain.zero_grad()
    assert_same(everything(model, optimizer), everything(twin, plain))
    before = everything(model, optimizer)
    scaled_step(model, optimizer, scaler, 99, way, spoilt=optimizer.names)
    # The last two: steps skipped, and the number of the draw.
    assert_same(everything(model, optimizer)[:-2], before[:-2])
    assert scaler.get_scale() == 2.0**9
    scaled_step(model, optimizer, scaler, 4, way)
    assert (optimizer.num_steps, optimizer.num_skipped) == (5, 1)
    assert all(param.grad is None for param in model.parameters())


def test_a_scaler_refuses_a_step_that_is_not_combined():
    """Unscaling before combining, a missing domain: no inf check, so no step."""
    for micro_batches, absent in ((None, ""), (1, "bc")):
        model, optimizer = wrapped(micro_batches=micro_batches)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        collect(model, optimizer, 0, absent=absent)
        before = everything(model, optimizer)
        if micro_batches is None:
            scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        assert_same(everything(model, optimizer), before)


@pytest.mark.parametrize("way", ["positional", "keyword", "patched"])
def test_a_closure_runs_once_with_gradients(way):
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


def check_compiled(what: str, inner: Callable[[nn.Module], Any]) -> None:
    """The step, a whole training step with its domains, or the model, against an uncompiled twin.

    With SGD: torch compiles Adam's arithmetic in another order, wrapped or not.
    """
    # The compiler's own.
    warnings.simplefilter("ignore", DeprecationWarning)
    twin, plain = wrapped(inner)
    train(twin, plain, range(3))
    model, optimizer = wrapped(inner)
    forward = torch.compile(model, backend="aot_eager") if what == "model" else model
    update = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

    def train_once(step: int) -> None:
        collect(forward, optimizer, step)
        update()
        optimizer.zero_grad()

    if what == "training":
        train_once = torch.compile(train_once, backend="eager")
    for step in range(3):
        train_once(step)
    ours, theirs = everything(model, optimizer), everything(twin, plain)
    if what == "model":
        torch.testing.assert_close(ours, theirs)
    else:
        assert_same(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", [sgd, two_sgds], ids=["one", "several"])
@pytest.mark.parametrize("what", ["step", "training", "model"])
def test_compilers(what, inner):
    isolated(check_compiled, what, inner)


def compiled_steps(optimizer: Optimizer, collect_step: Callable[[int], Any]) -> tuple[int, ...]:
    """(graphs, operators, breaks) of four compiled steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("eager")
    update = torch.compile(optimizer.step, backend=counter)
    for step in range(4):
        collect_step(step)
        update()
        optimizer.zero_grad()
    breaks = torch._dynamo.utils.counters["graph_break"]
    return counter.frame_count, counter.op_count, sum(breaks.values())


# The compiler's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# The second break of several optimizers is at our hook on their steps.
@pytest.mark.parametrize(("inner", "most_breaks"), [(sgd, 1), (adamw, 1), (two_sgds, 2)])
@pytest.mark.parametrize("micro_batches", [1, None], ids=["combined", "not combined"])
def test_a_compiled_step_breaks_once_and_compiles_the_wrapped_one(
    inner, most_breaks, micro_batches
):
    """The graphs are those of the wrapped optimizer alone; what is ours runs around them."""
    model, optimizer = wrapped(inner, micro_batches=micro_batches)
    *graphs, num_breaks = compiled_steps(optimizer, lambda step: collect(model, optimizer, step))
    alone, other = wrapped(inner)

    def set_gradients(step: int) -> None:
        for param in alone.parameters():
            param.grad = torch.ones_like(param)

    assert graphs == [*compiled_steps(other.inner, set_gradients)][:2]
    assert num_breaks <= most_breaks
    twin, eager = wrapped(inner, micro_batches=micro_batches)
    train(twin, eager, range(4))
    if inner is adamw:
        # torch compiles its arithmetic in another order, wrapped or not.
        torch.testing.assert_close(
            [*model.parameters()], [*twin.parameters()], rtol=1e-4, atol=1e-6
        )
    else:
        assert_same(everything(model, optimizer), everything(twin, eager))
