"""The processes of a group: what they tell each other of a step, and who is missing."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from doge_fast.distributed.exchange import Agreement, Report
from doge_fast.kernels.schema import STORAGE_DTYPES

# Seconds that a rank which is only slower may take, before those that are missing are named.
STRAGGLER_SECONDS = 2.0
# Places for digests in a rank's message.
MOST_SETTINGS = 12

# What a rank says first of its step.
_FINE, _FAILED, _HAS_CHANGED = 0.0, 1.0, 2.0

# all_gather_single from torch 2.13 on, which deprecates the other.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LostRank(RuntimeError):
    """A rank did not answer."""


class Company:
    """The processes of a group, and what they tell each other of a step.

    Args:
        group: at least two processes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # Made when all ranks are there: a rank without a domain is not, before they agree.
        self._talk: ProcessGroup | None = None
        self._length: int | None = None
        self._has_agreed = False
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._number = 0
        # Of several optimizers with this group each has numbers of its own.
        self._place = self._store.add(f"doge_fast/companies/{self.rank}", 1)
        self._store.set(self._key(self.rank), "0")

    def told(self, rows: Sequence[str], report: Report) -> tuple[Tensor, Agreement]:
        """One small message to all, and one from each.

        Args:
            rows: as for `Exchange.agree`.
            report: as there.

        Returns:
            [n, R] float64 on the CPU, the counts of every rank; and what all together have.

        Raises:
            RuntimeError: as `Exchange.agree`.
        """
        digests_nD, counts_nR, codes_nP = torch.split(
            self._gathered(_FINE, _words(rows, report, not self._has_agreed)),
            [MOST_SETTINGS, len(rows), len(report.dtypes)],
            dim=1,
        )
        for name, digests in zip(report.settings, digests_nD.T.tolist(), strict=False):
            refuse_others(digests, name)
        self._has_agreed = True
        seen_R = counts_nR.any(0).tolist()
        return (
            counts_nR,
            Agreement(
                frozenset(name for name, is_seen in zip(rows, seen_R, strict=True) if is_seen),
                [_widest(set(codes) - {0}) for codes in codes_nP.int().T.tolist()],
            ),
        )

    def fail(self, rows: Sequence[str], num_params: int) -> str:
        """In the place of `told`, so that the others do not wait for ever.

        Returns:
            Who cannot be told, in a sentence; empty where all have heard.
        """
        try:
            self._gathered(_FAILED, [0.0] * (MOST_SETTINGS + len(rows) + num_params))
        except LostRank as lost:
            return str(lost)
        except RuntimeError:
            # What the others raise as well.
            pass
        return ""

    def summed(self, part: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum of what some ranks have, one after the other: the same bits on every rank.

        Args:
            part: of one shape on all ranks.
            ranks: whose parts count.
        """
        parts = part.new_empty(self.num_ranks, *part.shape)
        with self.in_company():
            all_gather(parts.view(-1), part.flatten(), group=self.group)
        total = torch.zeros_like(part)
        for rank in ranks:
            total += parts[rank]
        return total

    def share(self, state_S: Tensor) -> None:
        """Overwrite the domain weights by those of rank 0: machines may round differently."""
        with self.in_company():
            dist.broadcast(state_S, group=self.group, group_src=0)

    @contextmanager
    def in_company(self) -> Iterator[None]:
        """Say who is missing if the others cannot be reached."""
        try:
            yield
        except RuntimeError as error:
            raise LostRank(
                f"{self._missing()} did not answer, so this step cannot be combined. See the "
                "output there, and resume the run from its last checkpoint. (torch: "
                f"{str(error).splitlines()[0]})"
            ) from error

    def _gathered(self, first: float, words: Sequence[float]) -> Tensor:
        """[n, words] what each rank has told, if all are fine.

        Raises:
            RuntimeError: one is not, or has another number of words.
        """
        if self._length is None:
            # Once: messages of different lengths must not meet.
            lengths = self._all_told([float(len(words))]).flatten().tolist()
            refuse_others(lengths, "the number of domains or of parameters")
            self._length = len(words)
        if len(words) == self._length:
            told = self._all_told([first, *words])
        else:
            told = self._all_told([_HAS_CHANGED] + [0.0] * self._length)
        states = told[:, 0].tolist()
        if _FAILED in states:
            ranks = [rank for rank, state in enumerate(states) if state == _FAILED]
            raise RuntimeError(
                f"this step was dropped on all ranks, since {_named(ranks)} raised an exception "
                "inside a domain or before combine(); see the output there. Call "
                "optimizer.zero_grad() on all ranks and run the domains of the step again."
            )
        if _HAS_CHANGED in states:
            refuse_others(states, "the number of domains or of parameters")
            self._length = None
            return self._gathered(first, words)
        return told[:, 1:]

    def _all_told(self, words: list[float]) -> Tensor:
        """[n, words] float64, what every rank says."""
        mine = torch.tensor(words, dtype=torch.float64)
        told = mine.new_empty(self.num_ranks * len(words))
        self._number += 1
        with self.in_company():
            if self._talk is None:
                self._talk = _on_cpus(self.group)
            # For those who miss a rank; nobody waits for it.
            self._store.set(self._key(self.rank), str(self._number))
            all_gather(told, mine, group=self._talk)
        return told.view(self.num_ranks, -1)

    def _missing(self) -> str:
        """The ranks that have not come as far as this one."""
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
        missing = [rank for rank, number in enumerate(numbers) if number < self._number]
        return _named(missing) if missing else "a rank"

    def _key(self, rank: int) -> str:
        return f"doge_fast/told/{self._place}/{rank}"


def group_of(ranks: Sequence[int], like: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    """A group of these ranks, all of which must be here, with the timeout of another one.

    torch's own default is 30 minutes, whatever that of the default group is.

    Args:
        ranks: of all processes.
        like: whose timeout it has.
        backend: None: that of the default group.
    """
    options = like._get_backend(like._device_types[0]).options
    found = dist.new_group(
        list(ranks),
        # torch's fake backend has no options.
        timeout=None if options is None else options._timeout,
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(found, ProcessGroup)
    return found


def _on_cpus(group: ProcessGroup) -> ProcessGroup:
    """The same ranks with a backend for tensors on CPUs, which cost a device no waiting."""
    config = str(dist.get_backend_config(group))
    if "cpu:" in config or config in ("gloo", "mpi"):
        return group
    return group_of(dist.get_process_group_ranks(group), group, "gloo")


def _words(rows: Sequence[str], report: Report, is_first: bool) -> list[float]:
    """What a rank tells: a digest of each setting, a count of each row, a code of each dtype."""
    values = report.settings.values()
    digests = [_digest(value(is_first) if callable(value) else value) for value in values]
    digests += [0.0] * (MOST_SETTINGS - len(digests))
    counts_R = [report.counts.get(name, 0.0) for name in rows]
    codes = [0.0 if dtype is None else 1.0 + STORAGE_DTYPES.index(dtype) for dtype in report.dtypes]
    return [*digests, *counts_R, *codes]


def _digest(value: object) -> float:
    """A number for a value: 48 bits, which a float holds exactly."""
    text = json.dumps(value, sort_keys=True, default=str)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _widest(codes: set[int]) -> torch.dtype | None:
    """The dtype that holds those of all ranks; None where there is none."""
    widest = None
    for code in codes:
        dtype = STORAGE_DTYPES[code - 1]
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return widest


def refuse_others(values: Sequence[float], what: str) -> None:
    """Raise RuntimeError, the same on all ranks, unless all say what rank 0 says."""
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        raise RuntimeError(
            f"the ranks differ in {what}: {_named(others)} from rank 0. Every rank must build the "
            "same model and the same DoGEOptimizer, from the same seed, and take equally many "
            "steps."
        )


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
