"""The collectives of a step in one process group, and checks that all ranks do the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.kernels.schema import STORAGE_DTYPES
from doge_fast.weights.weights_file import fingerprint_of

# torch 2.13 introduced all_gather_single and deprecated all_gather_into_tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class GroupArgument:
    """The argument `process_group` of `DoGEOptimizer`, in an object that can be copied."""

    group: ProcessGroup | None
    """The ranks that learn together; None: the default group, or the mesh of DTensors."""

    def __deepcopy__(self, memo: object) -> "GroupArgument":
        """The same object: a process group cannot be copied."""
        return self


@dataclass
class Entry:
    """What a rank has collected of one domain in a step."""

    places: list[int] = field(default_factory=list)
    """Its places in the sequence of this step's domains: one for each time that it was left."""
    counts: list[float] = field(default_factory=[0.0, 0.0].copy)
    """Weight of each half of this rank's gradient in the mean over ranks; without halves the second
    is 0."""
    half_weights: list[float] = field(default_factory=[0.0, 0.0].copy)
    """Weight of each half in this rank's gradient, up to a common factor; without those that losses
    have measured (`Step`)."""


class Report(NamedTuple):
    """What a rank has received in a step."""

    entries: Mapping[str, Entry]
    """{domain: what was collected of it}, in the order in which they were first left."""
    first_shares: Mapping[str, float | Tensor]
    """{domain: the share of the first half in this rank's gradient}; 0 or 1 in one piece. Numbers
    if there are several ranks."""
    params: Sequence[Tensor]
    """The parameters that are trained."""
    dtypes: Sequence[torch.dtype | None]
    """The dtype of each parameter's rows; None without a gradient on this rank."""
    settings: Mapping[str, object]
    """{name for messages: JSON value that must be the same on all ranks}."""
    is_first: bool
    """Whether this is the ranks' first agreement."""

    def counts_of(self, name: str) -> list[float]:
        """A domain's count, divided between the halves by their shares in the gradient."""
        if name not in self.entries:
            return [0.0, 0.0]
        count, first = sum(self.entries[name].counts), float(self.first_shares[name])
        return [count * first, count * (1 - first)]


class Agreement(NamedTuple):
    """What all ranks together have received in a step."""

    first_shares: Mapping[str, float | Tensor]
    """{domain with a gradient on some rank: the share of its first half}; 0 or 1 in one piece."""
    dtypes: Sequence[torch.dtype | None]
    """The dtype of each parameter's rows; None without a gradient on any rank."""


class Communicator:
    """The collectives of a step in a group of several ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.num_ranks, self.rank = group.size(), group.rank()
        # Made with the first message, since making a group is a collective.
        self._cpu_group: ProcessGroup | None = None

    def agree(self, names: Sequence[str], report: Report) -> tuple[Tensor, Agreement]:
        """As `Exchange.agree`; and [n, B, 2] float64 on the CPU, every rank's counts of halves."""
        lengths = [2 * len(names), len(report.dtypes)]
        self._compare({"the number of domains or of parameters": lengths, **report.settings})
        counts_B2 = [report.counts_of(name) for name in names]
        codes = [0 if dtype is None else 1 + STORAGE_DTYPES.index(dtype) for dtype in report.dtypes]
        words = [*chain(*counts_B2), *codes]
        counts_nC, codes_nU = torch.split(self._gather(words), lengths, dim=1)
        counts_nB2 = counts_nC.view(self.num_ranks, -1, 2)
        dtypes = [_widest(codes) for codes in codes_nU.int().T.tolist()]
        return counts_nB2, Agreement(first_shares_of(names, counts_nB2), dtypes)

    def _compare(self, settings: Mapping[str, object]) -> None:
        """Raise the same RuntimeError on all ranks if a setting differs."""
        digests_Dn = self._gather([*map(fingerprint_of, settings.values())]).T.tolist()
        for name, digests_n in zip(settings, digests_Dn, strict=True):
            refuse_difference(digests_n, name)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, added in their order, so that all ranks get the same bits."""
        parts = part.new_empty(self.num_ranks, *part.shape)
        all_gather(parts.view(-1), part.flatten(), group=self.group)
        total: Tensor = reduce(torch.add, parts)
        return total

    def broadcast(self, state_S: Tensor) -> None:
        """Overwrite the domain weights by rank 0's, since machines may round differently."""
        dist.broadcast(state_S, group=self.group, group_src=0)

    def _gather(self, words: list[float]) -> Tensor:
        """[n, words] float64 on the CPU: the numbers of every rank, all of one length."""
        mine = torch.tensor(words, dtype=torch.float64, device="cpu")
        messages = mine.new_empty(self.num_ranks * len(words))
        if self._cpu_group is None:
            self._cpu_group = _cpu_group_of(self.group)
        all_gather(messages, mine, group=self._cpu_group)
        return messages.view(self.num_ranks, -1)


def default_group() -> ProcessGroup | None:
    """The default process group; None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def group_of(ranks: Sequence[int], like: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    """A new group of these ranks, all of which must call this.

    It has the timeout of the group `like`; `new_group` would use torch's default of 30 minutes.
    """
    options = like._get_backend(like._device_types[0]).options
    group = dist.new_group(
        list(ranks),
        # torch's fake backend has no options.
        timeout=None if options is None else options._timeout,
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(group, ProcessGroup)
    return group


def _cpu_group_of(group: ProcessGroup) -> ProcessGroup:
    """The same ranks with a CPU backend, so that messages do not wait for the device."""
    config = str(dist.get_backend_config(group))
    if "cpu:" in config or config in ("gloo", "mpi"):
        return group
    return group_of(dist.get_process_group_ranks(group), group, "gloo")


def first_shares_of(names: Sequence[str], counts_nB2: Tensor) -> dict[str, float]:
    """As `Agreement.first_shares`, from every rank's counts of halves."""
    totals_B2 = counts_nB2.sum(0).tolist()
    return {
        name: first / (first + second)
        for name, (first, second) in zip(names, totals_B2, strict=True)
        if first + second > 0
    }


def _widest(codes: Sequence[int]) -> torch.dtype | None:
    """The dtype that can hold those of all ranks; None if no rank has one."""
    dtypes = [STORAGE_DTYPES[code - 1] for code in codes if code]
    return reduce(torch.promote_types, dtypes) if dtypes else None


def refuse_difference(values: Sequence[float], what: str) -> None:
    """Raise the same RuntimeError on all ranks unless every rank has rank 0's value."""
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        raise RuntimeError(
            f"the ranks differ in {what}: {_named(others)} from rank 0. Every rank must build the "
            "same model and DoGEOptimizer, from the same seed, and take equally many steps."
        )


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
