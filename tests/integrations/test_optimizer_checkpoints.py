"""Every way a state is carried from one run to the next: the run that goes on is the same run.

Bit for bit, with what a step remembers of those before it: scores of domains that are absent, and
the number of the draw of those that take part.
"""

import copy
import io
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


RUNS: dict[str, Build] = {
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
    ours = optimizer.doge.state_dict()
    with pytest.warns(UserWarning, match="and no domain weights; they stay as they are"):
        optimizer.load_state_dict(plain.state_dict())
    for name, value in optimizer.doge.state_dict().items():
        assert torch.equal(value, ours[name]) if isinstance(value, torch.Tensor) else True
    assert optimizer.num_steps == 2
    mine = [value for state in optimizer.state.values() for value in state.values()]
    theirs = [value for state in plain.state.values() for value in state.values()]
    assert_same(mine, theirs)
    model.load_state_dict(plain_model.state_dict())
    train(model, optimizer, [3])
    assert optimizer.num_steps == 3


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


def test_the_inner_state_dict_holds_no_old_weights() -> None:
    model, optimizer = wrapped()
    optimizer.inner.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2))
    assert optimizer.inner.state_dict()["param_groups"][0]["doge"] == ()
    with pytest.warns(UserWarning, match="and no domain weights"):
        optimizer.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.num_steps == 2


# What the two places say.


def trained_state() -> dict[str, Any]:
    model, optimizer = wrapped()
    train(model, optimizer, range(3))
    return optimizer.state_dict()


def test_numbers_in_the_groups_are_plain_and_exact() -> None:
    state = trained_state()
    values = state["param_groups"][0]["doge"]
    assert type(values) is tuple
    assert {type(value) for value in values} == {float}
    assert list(values[3:6]) == state["doge"]["alpha"].tolist()
    assert list(values[6:9]) == state["doge"]["alpha_mean"].tolist()
    assert list(values[9:12]) == state["doge"]["gain"].tolist()
    assert values[12:] == (3.0, 0.0, 30.0)


def test_the_named_entry_wins() -> None:
    """It says what is what, and it is the one that a person edits."""
    state = trained_state()
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    state["doge"] |= {"alpha": uniform, "num_steps": torch.tensor(7)}
    _, optimizer = wrapped()
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.alpha, uniform)
    assert optimizer.num_steps == 7


def without_entry(change: Callable[[tuple[float, ...]], Any]) -> dict[str, Any]:
    state = trained_state()
    del state["doge"]
    for group in state["param_groups"]:
        group["doge"] = change(group["doge"])
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: (3.0, *values[1:]), "has version 3; this library reads up to 2"),
        (lambda values: values[:-1], "weights of other domains or another target"),
        (lambda values: values[:1], "weights of other domains or another target"),
        (lambda values: (*values[:3], float("nan"), *values[4:]), "weights that sum to one"),
        (lambda values: (*values[:9], float("inf"), *values[10:]), "must be 3 finite scores"),
    ],
)
def test_spoilt_numbers_in_the_groups_change_nothing(change: Any, message: str) -> None:
    state = without_entry(change)
    model, optimizer = wrapped()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same(everything(model, optimizer), before)


@pytest.mark.parametrize(
    "other", [{"domains": ["a", "c", "b"]}, {"target": "far"}, {"domains": ["a", "b"]}]
)
def test_numbers_of_other_names_are_refused(other: dict[str, Any]) -> None:
    """By their fingerprint: the groups hold floats alone."""
    _, optimizer = wrapped(**other)
    with pytest.raises(ValueError, match="weights of other domains or another target"):
        optimizer.load_state_dict(without_entry(tuple))


def test_groups_that_differ_are_refused() -> None:
    _, optimizer = wrapped(groups)
    state = optimizer.state_dict()
    del state["doge"]
    values = state["param_groups"][0]["doge"]
    state["param_groups"][1]["doge"] = (*values[:-1], 1.0)
    with pytest.raises(ValueError, match="hold 2 different states of the domain weights"):
        optimizer.load_state_dict(state)
    # One that a group added later has not got yet is no difference.
    state["param_groups"][1]["doge"] = ()
    optimizer.load_state_dict(state)
    del state["param_groups"][1]["doge"]
    state["param_groups"][0]["doge"] = list(values)
    optimizer.load_state_dict(state)


def test_the_entry_by_itself_is_checked() -> None:
    _, optimizer = wrapped()
    state = optimizer.doge.state_dict()
    _, other = wrapped(domains=["a", "c", "b"])
    with pytest.raises(ValueError, match=r"has the domains \['a', 'b', 'c'\]"):
        other.doge.load_state_dict(state)
    assert isinstance(optimizer.doge, dcp.stateful.Stateful)
    with (
        pytest.raises(RuntimeError, match=r"load_state_dict\(\) must be called outside domain"),
        optimizer.domain("a"),
    ):
        optimizer.doge.load_state_dict(state)


def test_an_older_checkpoint_without_numbers_in_the_groups_loads() -> None:
    state = trained_state()
    for group in state["param_groups"]:
        del group["doge"]
    _, optimizer = wrapped()
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.alpha, state["doge"]["alpha"])


def test_a_state_dict_is_a_copy() -> None:
    """One kept in memory does not go on with the run."""
    model, optimizer = wrapped()
    train(model, optimizer, range(2))
    kept = optimizer.state_dict()
    buffer = io.BytesIO()
    torch.save((kept["doge"], kept["param_groups"]), buffer)
    train(model, optimizer, range(2, 4))
    optimizer.load_state_dict(kept)
    buffer.seek(0)
    ours, _ = torch.load(buffer, weights_only=True)
    assert torch.equal(optimizer.alpha, ours["alpha"])
    assert kept["param_groups"][0]["doge"] != ()
