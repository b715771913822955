"""Rows that travel before the ranks agree: the same bits as when all travel after that."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from doge_fast import DoGEOptimizer
from doge_fast.distributed import data_parallel
from doge_fast.distributed.rounds import Rounds, pieces_of
from tests.integrations.test_ranks_that_differ import raised
from tests.integrations.test_several_processes import examples, losses
from tests.ranks import Ranks

DOMAINS = "abcd"
# By rank, the domains that it enters; a step ends with "|", what is before "!" is dropped by
# zero_grad(), and in a domain after "?" an exception is raised. Capitals use the model's other
# branch as well.
Script = Sequence[str]


class Branched(nn.Module):
    """A trunk, a head, and another head that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8)).double()
        self.head = nn.Linear(8, 2).double()
        self.other = nn.Linear(8, 2).double()

    def forward(self, x: Tensor, uses_other: bool) -> Tensor:
        hidden = self.trunk(x)
        return self.head(hidden) + self.other(hidden) if uses_other else self.head(hidden)


class Oops(Exception):
    """What goes wrong on one rank."""


def nothing_planned(*_: Any) -> None:
    """In the place of `Rounds.plan_next`."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def trained(script: Script, options: Mapping[str, Any], reduces: bool) -> list[Any]:
    """After each step: parameters, weights, and how many rows have come ahead and late."""
    rank = dist.get_rank()
    model = Branched()
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    arguments: dict[str, Any] = {"domains": list(DOMAINS), "mu": 5.0} | dict(options)
    optimizer = DoGEOptimizer(inner, **arguments)
    come: list[tuple[int, int]] = []

    def noted(*given: Any) -> Any:
        pieces = pieces_of(*given)
        come.append((sum(pieces.counts) - sum(pieces.late), sum(pieces.late)))
        return pieces

    found = []
    with replaced(data_parallel, "pieces_of", noted):
        for number, step in enumerate(script[rank].split("|")):
            if optimizer.micro_batches == 2:
                step = step + step
            come.clear()
            if run(model, optimizer, step, number, reduces):
                said = raised(optimizer.step)
                assert not said or said.startswith("this step was dropped on all ranks")
            optimizer.zero_grad()
            theta_N = torch.cat([param.detach().flatten() for param in model.parameters()])
            found.append((theta_N.clone(), optimizer.alpha, *come[-1:]))
    return found


def run(model: nn.Module, optimizer: DoGEOptimizer, step: str, number: int, reduces: bool) -> bool:
    """The domains of a step on this rank; whether all went well."""
    for position, letter in enumerate(step):
        if letter == "!":
            optimizer.zero_grad()
        elif letter != "?":
            name = letter.lower()
            count = 1.0 + ord(name) - ord("a") + dist.get_rank()
            x = examples(name, 10 * number + position, 3) + dist.get_rank()
            with suppress(Oops), optimizer.domain(name, count=count):
                losses(model(x, letter.isupper()), name).mean().backward()
                if step[position - 1 : position] == "?":
                    raise Oops
            if step[position - 1 : position] == "?":
                # The others hear of it.
                return False
        if reduces and position == 0:
            dist.all_reduce(torch.ones(3))
    return True


def both(script: Script, options: Mapping[str, Any], reduces: bool) -> tuple[list[Any], list[Any]]:
    """With rows that travel ahead, and without."""
    ahead = trained(script, options, reduces)
    with replaced(Rounds, "plan_next", nothing_planned):
        return ahead, trained(script, options, reduces)


SCRIPTS: dict[str, tuple[Script, dict[str, Any], list[tuple[int, int]]]] = {
    "constant": (
        ["ab|ab|ab|ab", "bcd|bcd|bcd|bcd"],
        {},
        [(0, 5), (0, 5), (5, 0), (5, 0)],
    ),
    "other domains": (
        ["ab|ab|cd|ba|ac", "cd|cd|ab|dc|db"],
        {},
        [(0, 4), (0, 4), (4, 0), (4, 0), (4, 0)],
    ),
    "more and fewer": (
        ["ab|ab|abc|a|ab|abcd||ab", "cd|cd|bd|bdc|cd||abcd|dc"],
        {},
        [(0, 4), (0, 4), (4, 1), (3, 1), (3, 1), (2, 2), (0, 4), (2, 2)],
    ),
    "other parameters": (
        ["ab|ab|aB|aB|aB|ab|ab|Ab", "cd|cd|cd|cd|cD|cd|cd|cd"],
        {},
        [(0, 4), (0, 4), (0, 4), (0, 4), (4, 0), (0, 4), (0, 4), (0, 4)],
    ),
    "parameters of some": (
        ["AB|AB|AB|aB|Ab", "cd|cd|cd|cd|cD"],
        {},
        [(0, 4), (0, 4), (4, 0), (4, 0), (4, 0)],
    ),
    "micro-batches": (
        ["ab|ab|ab|a", "cd|cd|cd|bcd"],
        {"micro_batches": 2},
        [(0, 4), (0, 4), (4, 0), (3, 1)],
    ),
    "any number": (
        ["ab|ab|aab|ab", "cd|cd|dcd|cd"],
        {"micro_batches": None},
        [(0, 4), (0, 4), (4, 0), (4, 0)],
    ),
    "an exception": (
        ["ab|ab|ab|ab|ab|ab", "cd|cd|c?d|cd|?cd|dc"],
        {},
        [(0, 4), (0, 4), (), (4, 0), (), (4, 0)],
    ),
    "zero_grad": (
        ["ab|ab|a!ab|ab|ab!ba|ab", "cd|cd|cd|c!d!cd|cd|cd"],
        {},
        [(0, 4), (0, 4), (3, 1), (2, 2), (2, 2), (4, 0)],
    ),
    "absent": (
        ["ab|ab|a|ab|b", "cd|cd|c|cd|dc"],
        {"absent": "keep"},
        [(0, 4), (0, 4), (2, 0), (2, 2), (3, 0)],
    ),
    "a selection": (
        ["ab|ab|ab|ba", "bcd|bcd|bcd|bcd"],
        {"selection": ["head.weight", "trunk.0.weight"], "max_grad_norm": 0.1},
        [(0, 5), (0, 5), (5, 0), (5, 0)],
    ),
    "three ranks": (
        ["a|a|a|b|ab", "bcd|bcd|bcd|acd|", "||||cd"],
        {},
        [(0, 4), (0, 4), (4, 0), (4, 0), (1, 3)],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_bits_are_the_same(ranks: Ranks, name: str) -> None:
    script, options, come = SCRIPTS[name]
    answers = ranks.run(len(script), both, script, options, False)
    check(answers)
    for ahead, _ in answers:
        assert [step[2] if len(step) > 2 else () for step in ahead] == come


def check(answers: Sequence[tuple[list[Any], list[Any]]]) -> None:
    """Every step has the same bits on all ranks, both ways."""
    first = answers[0][0]
    for ahead, late in answers:
        for step, other, expected in zip(ahead, late, first, strict=True):
            for value in (step, other):
                assert torch.equal(value[0], expected[0])
                assert torch.equal(value[1], expected[1])
    thetas = [step[0] for step in first]
    assert not torch.equal(thetas[-1], thetas[0])


def test_loops_may_reduce_between_domains(ranks: Ranks) -> None:
    """On the group that the optimizer has too; ranks come to it before or after other rounds."""
    script = ["abd|abd|abd|abd", "c|c|c|c"]
    check(ranks.run(2, both, script, {}, True))


def drawn() -> tuple[list[Any], list[Any]]:
    """Steps whose domains are drawn, with a target, with rows that travel ahead and without."""

    def once() -> list[Any]:
        model = Branched()
        optimizer = DoGEOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            domains=["a", "b", "c"],
            target={"d": 1.0, "a": 0.5},
            domains_per_step=2,
            mu=5.0,
        )
        found = []
        for step in range(6):
            names = [*optimizer.domains_of_step, "d"]
            run(model, optimizer, "".join(names[dist.get_rank() :: 2]), step, False)
            optimizer.step()
            optimizer.zero_grad()
            theta_N = torch.cat([param.detach().flatten() for param in model.parameters()])
            found.append((theta_N.clone(), optimizer.alpha))
        return found

    ahead = once()
    with replaced(Rounds, "plan_next", nothing_planned):
        return ahead, once()


def test_domains_may_be_drawn(ranks: Ranks) -> None:
    check(ranks.run(2, drawn))


@pytest.mark.parametrize(
    ("counts", "planned", "void", "places", "late"),
    [
        # Rank 0's only row goes in the last round.
        ((1, 2), (0, 0), (0, 0), [1, 0, 2], [1, 2]),
        ((1, 2), (1, 2), (0, 0), [0, 1, 2], [0, 0]),
        ((2, 2), (1, 2), (0, 0), [1, 0, 3, 2], [1, 0]),
        ((1, 1), (1, 2), (0, 0), [1, 0], [0, 0]),
        ((1, 2), (1, 2), (0, 1), [2, 1, 3], [0, 1]),
        ((0, 2), (1, 2), (1, 2), [0, 1], [0, 2]),
    ],
)
def test_rows_are_found(
    counts: Sequence[int],
    planned: Sequence[int],
    void: Sequence[int],
    places: Sequence[int],
    late: Sequence[int],
) -> None:
    pieces = pieces_of(counts, planned, void)
    assert pieces.late == late
    assert pieces.places == places
