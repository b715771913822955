"""Every way a state is carried from one run to the next: the run that goes on is the same run.

Bit for bit, with what a step remembers of those before it: scores of domains that are absent, and
the number of the draw of those that take part.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from doge_fast import DoGEOptimizer
from tests.integrations.over_ranks import (
    SIZES,
    assert_ranks_are,
    bare,
    ddp,
    muon_and_adamw,
    sgd_and_adamw,
    sharded,
    shares,
    trained,
    whole_pieces,
)
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


def added() -> Pair:
    """A group that came later: loaders take a flattened state apart by the keys of the groups."""
    model = small_model()
    inner = torch.optim.AdamW(model[0].parameters(), lr=0.05)
    optimizer = DoGEOptimizer(inner, **AS_IN_THE_PAPER, absent="keep")
    optimizer.add_param_group({"params": list(model[2].parameters())})
    return model, optimizer


RUNS: dict[str, Build] = {
    "several": lambda: wrapped(muon_and_adamw, absent="keep"),
    "adamw": lambda: wrapped(adamw, absent="keep"),
    "groups": lambda: wrapped(groups, target={"a": 1.0, "far": 2.0}, absent="keep"),
    "added": added,
    "draws": lambda: wrapped(adamw, domains_per_step=2, absent="keep"),
    "momentum": lambda: wrapped(sgd, absent="keep"),
    "stateless": lambda: wrapped(stateless, absent="keep"),
}


def in_memory(options: StateDictOptions) -> Callable[[Pair, Build, Path], Pair]:
    """What a loop hands from one to the other."""

    def route(old: Pair, build: Build, path: Path) -> Pair:
        states = copy.deepcopy(states_of(old, options))
        new = build()
        set_state_dict(*new, **states, options=options)
        return new

    return route


def save_with_torch(path: Path, *pair: Any) -> None:
    """By the first rank, where there are several."""
    has_ranks = dist.is_initialized()
    if not has_ranks or dist.get_rank() == 0:
        torch.save([each.state_dict() for each in pair], path / "all.pt")
    if has_ranks:
        dist.barrier()


def load_with_torch(path: Path, *pair: Any) -> None:
    for each, state in zip(pair, torch.load(path / "all.pt", weights_only=True), strict=True):
        each.load_state_dict(state)


def save_with_dcp(options: StateDictOptions, path: Path, *pair: Any) -> None:
    dcp.save(states_of(pair, options), checkpoint_id=path)


def load_with_dcp(options: StateDictOptions, path: Path, *pair: Any) -> None:
    """Files are read into the states of the new ones."""
    states = states_of(pair, options)
    dcp.load(states, checkpoint_id=path)
    set_state_dict(*pair, **states, options=options)


def states_of(pair: Any, options: StateDictOptions) -> dict[str, Any]:
    names = ("model_state_dict", "optim_state_dict")
    return dict(zip(names, get_state_dict(*pair, options=options), strict=True))


FILES = {
    "torch": (save_with_torch, load_with_torch),
    "nested": (partial(save_with_dcp, NESTED), partial(load_with_dcp, NESTED)),
    "flattened": (partial(save_with_dcp, FLAT), partial(load_with_dcp, FLAT)),
}


def in_files(name: str) -> Callable[[Pair, Build, Path], Pair]:
    save, load = FILES[name]

    def route(old: Pair, build: Build, path: Path) -> Pair:
        save(path, *old)
        new = build()
        load(path, *new)
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


# From a model and its optimizer to new ones that stand where they stood.
ROUTES: dict[str, Callable[[Pair, Build, Path], Pair]] = {
    "pickle": lambda old, build, path: pickle.loads(pickle.dumps(old)),
    "deepcopy": lambda old, build, path: copy.deepcopy(old),
    "nested": in_memory(NESTED),
    "flattened": in_memory(FLAT),
    "full": in_memory(StateDictOptions(full_state_dict=True, cpu_offload=True)),
    **{f"{name} files": in_files(name) for name in FILES},
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
def test_a_resumed_run_is_the_run(route, run, tmp_path):
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


@pytest.mark.parametrize("inner", [adamw, stateless])
@pytest.mark.parametrize("is_begun", [False, True])
def test_saving_with_dcp_takes_no_step(inner, is_begun):
    """torch.distributed.checkpoint has an optimizer without state step on zeros at rate zero.

    What the domains have collected goes, and the next step says so.
    """
    model, optimizer = wrapped(inner, micro_batches=None)
    # Parameters and domain weights.
    before = everything(model, optimizer)
    if is_begun:
        collect(model, optimizer, 0)
    get_optimizer_state_dict(model, optimizer)
    assert (optimizer.num_steps, optimizer.num_skipped) == (0, 0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    after = everything(model, optimizer)
    assert_same(after[:4] + after[-6:], before[:4] + before[-6:])
    if is_begun:
        with pytest.raises(RuntimeError, match="missing"):
            optimizer.step()
    train(model, optimizer, [0])
    assert optimizer.num_steps == 1


def test_a_plain_checkpoint_leaves_the_weights_and_says_so():
    plain_model = small_model()
    plain = adamw(plain_model)
    train_plainly(plain_model, plain, range(3))
    model, optimizer = wrapped()
    train(model, optimizer, range(2))
    ours = [each for each in optimizer.doge.state_dict().values() if isinstance(each, torch.Tensor)]
    with pytest.warns(UserWarning, match="no domain weights") as caught:
        optimizer.load_state_dict(plain.state_dict())
    assert caught[0].filename == __file__
    theirs = [value for state in plain.state.values() for value in state.values()]
    assert_same(everything(model, optimizer)[4:-1], theirs + ours)
    # Nor does the wrapped optimizer's own state hold weights.
    assert optimizer.inner.state_dict()["param_groups"][0]["doge"] == ()


@pytest.mark.parametrize("options", [None, NESTED, FLAT], ids=["torch", "nested", "flattened"])
@pytest.mark.parametrize("is_from_wrapper", [False, True], ids=["from plain", "from the wrapper"])
def test_plain_training_and_the_wrapper_read_each_others_checkpoints(is_from_wrapper, options):
    """That of plain training before wrapping: a flattened one cannot be loaded later."""

    def carry(model: nn.Module, optimizer: Any, other_model: nn.Module, other: Any) -> None:
        other_model.load_state_dict(model.state_dict())
        if options is None:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            set_optimizer_state_dict(other_model, other, state, options=options)

    model, plain_model = small_model(), small_model()
    inner, plain = adamw(model), adamw(plain_model)
    if is_from_wrapper:
        optimizer = wrapped(lambda _: inner, model, domains=["a"])[1]
        train(model, optimizer, range(3))
        carry(model, optimizer, plain_model, plain)
    else:
        train_plainly(plain_model, plain, range(3))
        carry(plain_model, plain, model, inner)
        optimizer = wrapped(lambda _: inner, model, domains=["a"])[1]
    train(model, optimizer, [3])
    train_plainly(plain_model, plain, [3])
    assert_same(model.parameters(), plain_model.parameters())


def test_refused_numbers_in_the_groups_change_nothing():
    """What is refused, part by part, stands in tests/method/test_checkpoint.py."""
    model, optimizer = wrapped()
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    del state["doge"]
    for others in ({"domains": ["a", "c", "b"]}, {"domains": ["a", "b"]}, {"target": "far"}):
        model, optimizer = wrapped(**others)
        before = everything(model, optimizer)
        with pytest.raises(ValueError, match="other domains or another target"):
            optimizer.load_state_dict(state)
        assert_same(everything(model, optimizer), before)
        assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_state_dict_is_a_copy():
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


@pytest.mark.parametrize(
    ("before", "after", "wrap", "files", "inner"),
    [
        # Equal shares of four examples need two or four ranks.
        (2, 4, ddp, "torch", muon_and_adamw),
        (2, 4, sharded, "nested", sgd_and_adamw),
        (2, 4, sharded, "flattened", adamw),
        pytest.param(4, 1, ddp, "torch", adamw, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, sharded, "nested", adamw, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, sharded, "flattened", sgd_and_adamw, marks=pytest.mark.exhaustive),
        pytest.param(1, 3, ddp, "torch", adamw, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks, tmp_path, before, after, wrap, files, inner
):
    save, load = (partial(each, tmp_path) for each in FILES[files])
    deal = whole_pieces if wrap is ddp else shares
    # The draw of domains goes on as well.
    given = (SIZES, False, {"domains_per_step": 3, "seed": 5, "inner": inner}, "", deal)
    one = trained(bare, *given)
    # A model that is whole needs no wrapper where it is alone.
    first, second = (wrap if num_ranks > 1 else bare for num_ranks in (before, after))
    ranks.run(before, trained, first, *given, range(3), None, save)
    assert_ranks_are(one, ranks.run(after, trained, second, *given, range(3, 6), load))
