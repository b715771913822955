"""Every way a state is carried from one run to the next: the run that goes on is the same run.

Bit for bit, with what a step remembers of those before it: scores of domains that are absent, and
the number of the draw of those that take part.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from doge_fast import DoGEOptimizer
from tests.integrations.isolated import isolated
from tests.integrations.small import (
    AS_IN_THE_PAPER,
    DOMAINS,
    adamw,
    assert_same,
    collect,
    everything,
    sgd,
    small_model,
    train,
    train_plainly,
    wrapped,
)

Pair = tuple[nn.Module, DoGEOptimizer]
Build = Callable[[], Pair]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # It says so wherever it runs in one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, at rates of their own."""
    first, last = model[0], model[2]
    return torch.optim.AdamW(
        [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": 0.01}],
        lr=0.05,
    )


def stateless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices, and the rest."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]


RUNS: dict[str, Build] = {
    "several": lambda: wrapped(muon_and_adamw, absent="keep"),
    "adamw": lambda: wrapped(adamw, absent="keep"),
    "groups": lambda: wrapped(groups, target={"a": 1.0, "far": 2.0}, absent="keep"),
    "draws": lambda: wrapped(adamw, domains_per_step=2, absent="keep"),
    "momentum": lambda: wrapped(sgd, absent="keep"),
    "stateless": lambda: wrapped(stateless, absent="keep"),
}


# Routes: from a model and its optimizer to new ones that stand where they stood.


def through_torch(old: Pair, build: Build, path: Path) -> Pair:
    torch.save([each.state_dict() for each in old], path / "all.pt")
    new = build()
    for each, state in zip(new, torch.load(path / "all.pt", weights_only=True), strict=True):
        each.load_state_dict(state)
    return new


def through_pickle(old: Pair, build: Build, path: Path) -> Pair:
    return pickle.loads(pickle.dumps(old))


def through_deepcopy(old: Pair, build: Build, path: Path) -> Pair:
    return copy.deepcopy(old)


def in_memory(options: StateDictOptions) -> Callable[[Pair, Build, Path], Pair]:
    """What a loop hands from one to the other; pickled between, as files do."""

    def route(old: Pair, build: Build, path: Path) -> Pair:
        states = copy.deepcopy(get_state_dict(*old, options=options))
        new = build()
        set_state_dict(
            *new, model_state_dict=states[0], optim_state_dict=states[1], options=options
        )
        return new

    return route


def in_files(options: StateDictOptions) -> Callable[[Pair, Build, Path], Pair]:
    """Files are read into the states of the new ones."""

    def states_of(pair: Pair) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(pair[0]),
            "optimizer": get_optimizer_state_dict(*pair, options=options),
        }

    def route(old: Pair, build: Build, path: Path) -> Pair:
        dcp.save(states_of(old), checkpoint_id=path)
        new = build()
        states = states_of(new)
        dcp.load(states, checkpoint_id=path)
        set_model_state_dict(new[0], states["model"])
        set_optimizer_state_dict(*new, states["optimizer"], options=options)
        return new

    return route


def by_itself(old: Pair, build: Build, path: Path) -> Pair:
    """The domain weights as an entry of their own, the rest as an optimizer without them has it."""
    dcp.save({"model": old[0], "doge": old[1].doge}, checkpoint_id=path)
    new = build()
    # A state dict shares its tensors with the optimizer; a file does not.
    new[1].inner.load_state_dict(copy.deepcopy(old[1].inner.state_dict()))
    dcp.load({"model": new[0], "doge": new[1].doge}, checkpoint_id=path)
    return new


ROUTES = {
    "torch": through_torch,
    "pickle": through_pickle,
    "deepcopy": through_deepcopy,
    "nested": in_memory(NESTED),
    "flattened": in_memory(FLAT),
    "full": in_memory(StateDictOptions(full_state_dict=True, cpu_offload=True)),
    "nested files": in_files(NESTED),
    "flattened files": in_files(FLAT),
    "by itself": by_itself,
}


def train_with_absences(pair: Pair, steps: range) -> None:
    """One domain or another is missing, so that its last score counts."""
    model, optimizer = pair
    for step in steps:
        collect(model, optimizer, step, absent=DOMAINS[step % 3])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_resumed_run_is_the_run(route: str, run: str, tmp_path: Path) -> None:
    if (route, run) == ("full", "stateless"):
        pytest.skip("torch refuses a full state dict without tensors, of a bare SGD as well")
    build = RUNS[run]
    old = build()
    train_with_absences(old, range(4))
    before = everything(*old)
    new = ROUTES[route](old, build, tmp_path)
    assert new[1] is not old[1]
    # Saving has changed nothing, and what is read is what was saved.
    assert_same(everything(*old), before)
    assert_same(everything(*new), before)
    assert new[1].num_steps == 4
    for pair in (old, new):
        train_with_absences(pair, range(4, 8))
    assert_same(everything(*new), everything(*old))
    assert all(group["doge"] == () for pair in (old, new) for group in pair[1].param_groups)


def test_a_group_added_later_travels_flattened() -> None:
    """Loaders take a flattened state apart by the keys of the groups that live."""
    states, pairs = [], []
    for _ in range(2):
        model = small_model()
        inner = torch.optim.AdamW(model[0].parameters(), lr=0.05)
        optimizer = DoGEOptimizer(inner, **AS_IN_THE_PAPER)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        pairs.append((model, optimizer))
        if not states:
            train(model, optimizer, range(3))
            states += copy.deepcopy(get_state_dict(model, optimizer, options=FLAT))
    assert {len(states[1][f"param_groups.{name}.doge"]) for name in ("0.bias", "2.weight")} == {15}
    set_state_dict(*pairs[1], model_state_dict=states[0], optim_state_dict=states[1], options=FLAT)
    assert_same(everything(*pairs[1]), everything(*pairs[0]))


def check_accelerate(path: str) -> None:
    """Through save_state and load_state; prepare() itself passes the state through once."""
    accelerator = Accelerator(cpu=True)
    build = RUNS["draws"]
    old = build()
    train_with_absences(old, range(2))
    prepared = accelerator.prepare(*old)
    train_with_absences((prepared[0], old[1]), range(2, 4))
    accelerator.save_state(path)
    expected = everything(*old)
    train_with_absences((prepared[0], old[1]), range(4, 8))
    # Into the same objects, which have gone on.
    final = everything(*old)
    accelerator.load_state(path)
    assert_same(everything(*old), expected)
    train_with_absences((prepared[0], old[1]), range(4, 8))
    assert_same(everything(*old), final)
    # And into new ones.
    accelerator.free_memory()
    new = build()
    accelerator.prepare(*new)
    accelerator.load_state(path)
    assert_same(everything(*new), expected)
    train_with_absences(new, range(4, 8))
    assert_same(everything(*new), final)


def test_accelerate_saves_and_loads(tmp_path: Path) -> None:
    isolated(check_accelerate, str(tmp_path))


def test_making_a_state_to_load_into_moves_nothing() -> None:
    """torch.distributed.checkpoint has an optimizer without state step on zeros at rate zero."""
    model, optimizer = wrapped()
    before = everything(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    after = [*model.parameters(), *everything(model, optimizer)[-6:]]
    assert_same(after, before)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (optimizer.num_steps, optimizer.num_skipped) == (0, 0)


@pytest.mark.parametrize("inner", [adamw, stateless])
def test_saving_in_the_middle_of_a_step_takes_no_step(inner: Any) -> None:
    """What the domains have collected goes, and the next step says so."""
    model, optimizer = wrapped(inner, micro_batches=None)
    collect(model, optimizer, 0)
    before = [*everything(model, wrapped(inner)[1])]
    get_optimizer_state_dict(model, optimizer)
    assert (optimizer.num_steps, optimizer.num_skipped) == (0, 0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_same([*model.parameters(), optimizer.alpha], before[:4] + before[-6:-5])
    with pytest.raises(RuntimeError, match="missing"):
        optimizer.step()
    collect(model, optimizer, 0)
    optimizer.step()
    assert optimizer.num_steps == 1


# Between the wrapper and the bare optimizer.


def test_a_plain_checkpoint_leaves_the_weights_and_says_so() -> None:
    plain_model = small_model()
    plain = adamw(plain_model)
    train_plainly(plain_model, plain, range(3))
    model, optimizer = wrapped()
    train(model, optimizer, range(2))
    ours = [each for each in optimizer.doge.state_dict().values() if isinstance(each, torch.Tensor)]
    with pytest.warns(UserWarning, match="no domain weights"):
        optimizer.load_state_dict(plain.state_dict())
    theirs = [value for state in plain.state.values() for value in state.values()]
    assert_same(everything(model, optimizer)[4:-1], theirs + ours)
    # Nor does the wrapped optimizer's own state hold weights.
    assert optimizer.inner.state_dict()["param_groups"][0]["doge"] == ()


@pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flattened"])
def test_a_plain_checkpoint_is_loaded_before_wrapping(options: StateDictOptions) -> None:
    """A flattened one cannot be loaded later: the wrapper's groups ask for their weights."""
    plain_model = small_model()
    plain = adamw(plain_model)
    train_plainly(plain_model, plain, range(3))
    state = copy.deepcopy(get_optimizer_state_dict(plain_model, plain, options=options))
    model = small_model()
    inner = adamw(model)
    set_optimizer_state_dict(model, inner, state, options=options)
    optimizer = DoGEOptimizer(inner, **(AS_IN_THE_PAPER | {"domains": ["a"]}))
    model.load_state_dict(plain_model.state_dict())
    train(model, optimizer, [3])
    train_plainly(plain_model, plain, [3])
    assert_same(model.parameters(), plain_model.parameters())


@pytest.mark.parametrize("options", [None, NESTED, FLAT], ids=["torch", "nested", "flattened"])
def test_the_wrappers_checkpoint_goes_back_into_a_plain_optimizer(options: Any) -> None:
    model, optimizer = wrapped(domains=["a"])
    train(model, optimizer, range(3))
    plain_model = small_model()
    plain_model.load_state_dict(model.state_dict())
    plain = adamw(plain_model)
    if options is None:
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        set_optimizer_state_dict(plain_model, plain, state, options=options)
    train(model, optimizer, [3])
    train_plainly(plain_model, plain, [3])
    assert_same(model.parameters(), plain_model.parameters())


# What is refused, part by part, stands in tests/method/test_checkpoint.py.


def trained_state(*, named: bool = True) -> dict[str, Any]:
    model, optimizer = wrapped()
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    if not named:
        del state["doge"]
    return state


def test_numbers_in_the_groups_are_plain_and_exact() -> None:
    state = trained_state()
    values = state["param_groups"][0]["doge"]
    assert type(values) is tuple
    assert {type(value) for value in values} == {float}
    assert list(values[3:6]) == state["doge"]["alpha"].tolist()
    assert values[12:] == (3.0, 0.0, 30.0)


@pytest.mark.parametrize(
    ("other", "spoilt", "message"),
    [
        ({}, {0: 3.0}, "has version 3"),
        ({}, {3: float("nan")}, "weights that sum to one"),
        ({"domains": ["a", "c", "b"]}, {}, "weights of other domains or another target"),
        ({"domains": ["a", "b"]}, {}, "weights of other domains or another target"),
        ({"target": "far"}, {}, "weights of other domains or another target"),
    ],
)
def test_refused_numbers_in_the_groups_change_nothing(
    other: dict[str, Any], spoilt: dict[int, float], message: str
) -> None:
    state = trained_state(named=False)
    for group in state["param_groups"]:
        group["doge"] = tuple(spoilt.get(i, value) for i, value in enumerate(group["doge"]))
    model, optimizer = wrapped(**other)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same(everything(model, optimizer), before)


def test_the_entry_by_itself_is_checked() -> None:
    _, optimizer = wrapped()
    state = optimizer.doge.state_dict()
    _, other = wrapped(domains=["a", "c", "b"])
    with pytest.raises(ValueError, match=r"has the domains \['a', 'b', 'c'\]"):
        other.doge.load_state_dict(state)
    assert isinstance(optimizer.doge, dcp.stateful.Stateful)


def test_a_state_dict_is_a_copy() -> None:
    """One kept in memory does not go on with the run; without numbers in the groups, as once."""
    model, optimizer = wrapped()
    train(model, optimizer, range(2))
    kept, alpha = optimizer.state_dict(), optimizer.alpha.clone()
    for group in kept["param_groups"]:
        del group["doge"]
    train(model, optimizer, range(2, 4))
    assert not torch.equal(optimizer.alpha, alpha)
    optimizer.load_state_dict(kept)
    assert torch.equal(optimizer.alpha, alpha)
