"""Data parallelism in which each rank steps its columns alone: the first stage of ZeRO.

After the weighted sum a rank has the combined gradient of its shard of the columns. It steps these
and the ranks gather parameters, where they would gather gradients: as many bytes, and the wrapped
optimizer's state exists once over all ranks. `p.grad` stays None.

While the wrapped optimizer steps, its groups hold pieces in the place of parameters: of each
parameter the columns that are this rank's, as a vector. So groups keep their settings, and all that
holds the groups sees parameters. Its state is that of pieces; where it is that of parameters, as
after a load, it is cut when the next step is taken. `whole` puts the pieces together again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from doge_fast.distributed.company import Company, all_gather
from doge_fast.distributed.data_parallel import DataParallel
from doge_fast.distributed.exchange import Agreement, Bucket, Columns, Report


class Piece(NamedTuple):
    """The columns of a parameter that a rank steps."""

    param: Tensor
    here: slice
    """Of the flat parameter."""
    bucket: int
    there: slice
    """Of the bucket's shard."""
    values: Tensor
    """What the wrapped optimizer steps: a view of the shard."""


class ShardedStep(DataParallel):
    """Ranks that each step their columns.

    Args:
        company: the processes.
    """

    gives_gradients = False

    def __init__(self, company: Company) -> None:
        super().__init__(company)
        # Ids of the parameters that have a gradient in the step under way.
        self._touched: frozenset[int] = frozenset()
        self._buckets: Sequence[Bucket] = ()
        # [columns of a shard] of each bucket.
        self._gradients: list[Tensor] = []
        # [n, columns of a shard] of each bucket, and its parameters.
        self._wholes: list[Tensor] = []
        self._params: list[list[Tensor]] = []
        # By the parameter's id.
        self._pieces_here: dict[int, Piece] = {}

    def agree(self, rows: Sequence[str], report: Report) -> Agreement:
        """As without shards, with the columns of all parameters: they stay where they are."""
        agreement = super().agree(rows, report)
        pairs = zip(report.params, agreement.dtypes, strict=True)
        self._touched = frozenset(id(param) for param, dtype in pairs if dtype is not None)
        return agreement._replace(dtypes=self.dtypes)

    def travelling(self, report: Report, dtypes: Sequence[torch.dtype | None]) -> list[Any]:
        """The dtypes of all rows; of those that no domain touches, their parameter's."""
        pairs = zip(dtypes, report.params, strict=True)
        return [param.dtype if dtype is None else dtype for dtype, param in pairs]

    def deliver(self, columns: Columns, coefficients_R: Tensor, state_S: Tensor) -> list[Tensor]:
        """The weighted sums of this rank's columns."""
        likes = [(bucket.num_columns, bucket.blocks[0].param) for bucket in columns.buckets]
        sums = [torch.empty(size, dtype=p.dtype, device=p.device) for size, p in likes]
        self.weigh(columns, coefficients_R, sums)
        self.company.share(state_S)
        return sums

    def give(self, columns: Columns, gradients: Sequence[Tensor]) -> None:
        """Keep them for the step."""
        self._buckets, self._gradients = columns.buckets, list(gradients)

    @contextmanager
    def stepping(self, inner: Optimizer) -> Iterator[None]:
        """Have the wrapped optimizer step pieces inside, and gather the parameters afterwards."""
        self._prepare(inner)
        groups = list(inner.param_groups)
        params = [group["params"] for group in groups]
        try:
            for group in groups:
                found = [self._pieces_here.get(id(param)) for param in group["params"]]
                group["params"] = [piece.values for piece in found if piece is not None]
            yield
        finally:
            for group, each in zip(groups, params, strict=True):
                group["params"] = each
            for piece in self._pieces_here.values():
                piece.values.grad = None
            self._gradients = []
        self._gather()

    @torch.no_grad()
    def _prepare(self, inner: Optimizer) -> None:
        """Give the pieces their values, gradients and state."""
        params = [[block.param for block in bucket.blocks] for bucket in self._buckets]
        if _ids(params) != _ids(self._params):
            inner.state = self._whole_state(inner)
            self._make_pieces(params)
        for param in (param for each in params for param in each):
            state, piece = inner.state.pop(param, None), self._pieces_here.get(id(param))
            # What steps whole parameters in between has a state of its own.
            if state and piece is not None and piece.values not in inner.state:
                inner.state[piece.values] = {
                    key: value.flatten()[piece.here].clone()
                    if _is_like(value, param) and value.dim()
                    else value
                    for key, value in state.items()
                }
        for param, here, bucket, there, values in self._pieces_here.values():
            values.copy_(param.flatten()[here].view_as(values))
            if id(param) in self._touched:
                values.grad = self._gradients[bucket][there].view_as(values)

    def _make_pieces(self, params: list[list[Tensor]]) -> None:
        """Cut the parameters as rows are."""
        self._params, self._pieces_here, self._wholes = params, {}, []
        for index, bucket in enumerate(self._buckets):
            whole_nC = self._gradients[index].new_zeros(self.num_ranks, bucket.num_columns)
            self._wholes.append(whole_nC)
            for rank, block, there, here in bucket.cuts(self.num_ranks):
                if rank == self.company.rank:
                    values = whole_nC[rank, there]
                    # A number stays one, as its optimizer's state does.
                    values = values if block.param.dim() else values.view(())
                    piece = Piece(block.param, here, index, there, values)
                    self._pieces_here[id(block.param)] = piece

    @torch.no_grad()
    def _gather(self) -> None:
        """Every rank gets the columns of all."""
        for each, whole_nC in zip(self._params, self._wholes, strict=True):
            with self.company.in_company():
                mine = whole_nC[self.company.rank]
                all_gather(whole_nC.view(-1), mine, group=self.company.group)
            sizes = [param.numel() for param in each]
            parts = torch.split(whole_nC.view(-1)[: sum(sizes)], sizes)
            for param, values_N in zip(each, parts, strict=True):
                param.copy_(values_N.view(param.shape))

    @contextmanager
    def whole(self, inner: Optimizer) -> Iterator[None]:
        """Have the wrapped optimizer's state be that of parameters inside; on all ranks at once."""
        before = inner.state
        if self._params:
            self.company.meet_to_save()
        inner.state = self._whole_state(inner)
        try:
            yield
        finally:
            inner.state = before

    def _whole_state(self, inner: Optimizer) -> "defaultdict[Tensor, Any]":
        """The wrapped optimizer's state by parameter, put together from the pieces of all ranks."""
        pieces = {piece.values: piece for piece in self._pieces_here.values()}
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        found |= {key: state for key, state in inner.state.items() if key not in pieces}
        params = [param for each in self._params for param in each]
        if not params:
            return found
        mine = [self._state_of(param, inner) for param in params]
        told: list[Any] = [None] * self.num_ranks
        with self.company.in_company():
            dist.all_gather_object(told, mine, group=self.company.group)
        for param, parts in zip(params, zip(*told, strict=True), strict=True):
            # Columns of a parameter lie on neighbouring ranks.
            parts_here = [part for part in parts if part]
            if parts_here:
                found[param] = {
                    key: torch.cat([part[key][0] for part in parts_here])
                    .view(param.shape)
                    .to(param.device)
                    if is_cut
                    else value
                    for key, (value, is_cut) in parts_here[0].items()
                }
        return found

    def _state_of(self, param: Tensor, inner: Optimizer) -> dict[str, tuple[Any, bool]]:
        """By key: what is kept of this rank's piece of a parameter, and whether it is a vector."""
        piece = self._pieces_here.get(id(param))
        if piece is None or piece.values not in inner.state:
            return {}
        return {
            key: (value.cpu() if isinstance(value, Tensor) else value, is_cut)
            for key, value in inner.state[piece.values].items()
            for is_cut in [_is_like(value, piece.values) and bool(value.dim())]
        }


def _ids(params: list[list[Tensor]]) -> list[list[int]]:
    return [list(map(id, each)) for each in params]


def _is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape
