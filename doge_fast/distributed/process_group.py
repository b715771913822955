"""The collectives of a step in one process group, with errors that name missing ranks."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.kernels.schema import STORAGE_DTYPES

# Seconds to wait before missing ranks are named, so that one that is merely slow is not named.
STRAGGLER_SECONDS = 2.0
# Largest number of settings. A message is padded to it: a rank that fails sends one of the same
# length without knowing the settings.
MOST_SETTINGS = 12

# torch 2.13 introduced all_gather_single and deprecated all_gather_into_tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that learn together, as the user gives them.

    Raises:
        ValueError: this process is not in `group`.
    """

    group: ProcessGroup | None
    """None: the default group, or the mesh of sharded parameters."""

    def __post_init__(self) -> None:
        if not (self.group is None or isinstance(self.group, ProcessGroup)):
            raise ValueError(
                "process_group must be a group of torch.distributed that this process is in; got "
                f"{self.group!r}. Build the optimizer on the group's ranks alone."
            )

    def __deepcopy__(self, memo: object) -> "Ranks":
        """The same object: a process group cannot be copied."""
        return self


class Report(NamedTuple):
    """What a rank has received in a step."""

    counts: Mapping[str, float]
    """{domain: count}; 0 for a domain that was entered and not left."""
    order: Sequence[str]
    """Names of the domains in order of entry, one for each micro-batch."""
    params: Sequence[Tensor]
    """The parameters that are trained."""
    dtypes: Sequence[torch.dtype | None]
    """The dtype of each parameter's rows; None without a gradient on this rank."""
    settings: Mapping[str, object]
    """{name for messages: JSON value that must be the same on all ranks}."""
    is_first: bool
    """Whether this is the ranks' first agreement."""


class Agreement(NamedTuple):
    """What all ranks together have received in a step."""

    seen: frozenset[str]
    """Domains with a gradient on some rank."""
    dtypes: Sequence[torch.dtype | None]
    """The dtype of each parameter's rows; None without a gradient on any rank."""


class Communicator:
    """The collectives of a step in a group of several ranks, with errors that name a lost rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.num_ranks, self.rank = group.size(), group.rank()
        # Made with the first message, since making a group is a collective.
        self._cpu_group: ProcessGroup | None = None
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._num_messages = 0
        # Several optimizers may use one group; each counts its own messages.
        self._place = self._store.add(f"doge_fast/communicators/{self.rank}", 1)
        self._store.set(self._key(self.rank), "0")

    def agree(self, rows: Sequence[str], report: Report) -> tuple[Tensor, Agreement]:
        """As `Exchange.agree`; and [n, B] float64 on the CPU, the counts of every rank."""
        lengths = [len(rows), len(report.dtypes)]
        self._compare({"the number of domains or of parameters": lengths, **report.settings})
        counts_B = [report.counts.get(name, 0.0) for name in rows]
        codes = [0 if dtype is None else 1 + STORAGE_DTYPES.index(dtype) for dtype in report.dtypes]
        counts_nB, codes_nU = torch.split(self._gather([*counts_B, *codes]), lengths, dim=1)
        is_seen_B = (counts_nB > 0).any(0).tolist()
        seen = frozenset(name for name, is_seen in zip(rows, is_seen_B, strict=True) if is_seen)
        return counts_nB, Agreement(seen, [_widest(codes) for codes in codes_nU.int().T.tolist()])

    def fail(self) -> str:
        """As `Exchange.fail`."""
        try:
            self._gather([1.0] + [0.0] * MOST_SETTINGS)
        except RuntimeError as lost:
            return str(lost)
        return ""

    def _compare(self, settings: Mapping[str, object]) -> None:
        """Raise the same RuntimeError on all ranks if one has failed or a setting differs."""
        digests = [_digest(value) for value in settings.values()]
        assert len(digests) <= MOST_SETTINGS
        padding = [0.0] * (MOST_SETTINGS - len(digests))
        has_failed_n, *digests_Dn = self._gather([0.0, *digests, *padding]).T.tolist()
        if any(has_failed_n):
            ranks = [rank for rank, has_failed in enumerate(has_failed_n) if has_failed]
            raise RuntimeError(
                f"this step was dropped on all ranks, since {_named(ranks)} raised an exception "
                "inside a domain or before combine(); see the output there. Call "
                "optimizer.zero_grad() on all ranks and run the domains of the step again."
            )
        for name, digests_n in zip(settings, digests_Dn, strict=False):
            refuse_difference(digests_n, name)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, added in their order, so that all ranks get the same bits."""
        parts = part.new_empty(self.num_ranks, *part.shape)
        with self.naming_lost_ranks():
            all_gather(parts.view(-1), part.flatten(), group=self.group)
        total: Tensor = reduce(torch.add, parts)
        return total

    def broadcast(self, state_S: Tensor) -> None:
        """Overwrite the domain weights by rank 0's, since machines may round differently."""
        with self.naming_lost_ranks():
            dist.broadcast(state_S, group=self.group, group_src=0)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """If a collective inside fails, raise a RuntimeError that names the missing rank."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._missing_ranks()} did not answer, so this step cannot be combined. See the "
                "output there, and resume the run from its last checkpoint. (torch: "
                f"{str(error).splitlines()[0]})"
            ) from error

    def _gather(self, words: list[float]) -> Tensor:
        """[n, words] float64 on the CPU: the numbers of every rank, all of one length."""
        mine = torch.tensor(words, dtype=torch.float64, device="cpu")
        messages = mine.new_empty(self.num_ranks * len(words))
        self._num_messages += 1
        with self.naming_lost_ranks():
            if self._cpu_group is None:
                self._cpu_group = _cpu_group_of(self.group)
            # For `_missing_ranks` on other ranks; setting it waits for none of them.
            self._store.set(self._key(self.rank), str(self._num_messages))
            all_gather(messages, mine, group=self._cpu_group)
        return messages.view(self.num_ranks, -1)

    def _missing_ranks(self) -> str:
        """The ranks that have sent fewer messages than this one."""
        time.sleep(STRAGGLER_SECONDS)
        try:
            numbers = [
                # `get` would wait for a rank that has never begun.
                int(self._store.get(key)) if self._store.check([key]) else -1
                for key in map(self._key, range(self.num_ranks))
            ]
        except RuntimeError:
            # The store lives in the process of rank 0.
            return "rank 0, or the process that keeps the group's store,"
        missing = [rank for rank, number in enumerate(numbers) if number < self._num_messages]
        return _named(missing) if missing else "a rank"

    def _key(self, rank: int) -> str:
        return f"doge_fast/messages/{self._place}/{rank}"


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


def _digest(value: object) -> float:
    """A hash of a value: 48 bits, which a float holds exactly."""
    text = json.dumps(value, sort_keys=True, default=str)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


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
