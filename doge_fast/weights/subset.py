"""Which domains a step has: all of them, or a few of many, drawn anew for each step.

With S of K training domains in a step, S drawn uniformly without replacement, each is there with
probability S / K and each pair with S (S - 1) / (K (K - 1)). What is estimated, without bias over
the draws at given parameters and weights, per-domain and global clipping aside:

    W_j   of a domain in the step:  tau_j ||g_j||^2
              + (K - 1) / (S - 1) sum over its other training domains i of  tau_i <g_j, g_i>
              + sum over the measured targets r of  tau_r <g_j, g_r>
    sum_j alpha_j g_j:              K / S  sum over the step's domains j of  alpha_j g_j

Domains outside the step keep the score they last had, and all K weights move; so they follow a
score that is up to some K / S steps old (the published code's partial update). The softmax of
unbiased scores is not unbiased itself; the variance of both estimates falls with S.

Where the score is to be free of the noise of a batch, the gradients a_j and b_j of the two halves
of domain j's batch are rows of their own, side by side. Then g_j = a_j + b_j, and 4 <a_j, b_j>
stands in the place of ||g_j||^2.
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.reweight.packing import LastStep
from doge_fast.weights.objective import Objective
from doge_fast.weights.scores import PAPER, Score
from doge_fast.weights.simplex import is_integer


def has_halves(objective: Objective, score: Score) -> bool:
    """Whether training domains have two rows: their own gradients count in an unbiased score."""
    return score.is_unbiased and any(objective.tau[: len(objective.domains)])


class Products(NamedTuple):
    """Inner products of the gradients of all domains and targets; zeros for those not there."""

    gram_RR: Tensor
    """[R, R] float64 over the columns that enter W."""
    full_RR: Tensor | None
    """The same over all columns; None: not known."""
    own_R: Tensor | None
    """[R] what stands for the diagonal of the first in W; None: the diagonal."""


class Subset:
    """The domains of a step and the rows of the buffer that they have.

    Args:
        objective: all domains.
        num_domains: S, training domains of a step; None: all.
        seed: of the draws.
        in_halves: whether each training domain has two rows, for the halves of its batch.
    """

    def __init__(
        self,
        objective: Objective,
        num_domains: int | None,
        seed: int,
        *,
        in_halves: bool = False,
    ) -> None:
        self._objective = objective
        self._num_domains = num_domains
        self._seed = seed
        self._in_halves = in_halves
        self.draws = 0
        self._cached: tuple[tuple[object, ...], _OnDevice] | None = None
        self.draw(0)

    @classmethod
    def of(
        cls,
        objective: Objective,
        num_domains: int | None,
        seed: int,
        score: Score = PAPER,
    ) -> "Subset":
        """Check the arguments and draw the first subset.

        Raises:
            ValueError: S is not in [2, K], nor is it 1 where training domains are no targets;
                or the seed is negative; or either is no integer.
        """
        if not is_integer(seed) or seed < 0:
            raise ValueError(f"seed must be an integer, at least 0; got {seed!r}.")
        tau_K = objective.tau[: len(objective.domains)]
        in_halves = has_halves(objective, score)
        seconds = map(_SECOND.format, objective.domains)
        if in_halves and (taken := [name for name in seconds if name in objective.rows]):
            raise ValueError(
                f"{taken} would name the second half of another domain's batch, which a score that "
                "is_unbiased keeps apart. Give these domains or targets another name."
            )
        if num_domains is None or num_domains == len(objective.domains):
            return cls(objective, None, seed, in_halves=in_halves)
        least = 2 if any(tau_K) else 1
        if not is_integer(num_domains) or not least <= num_domains <= len(objective.domains):
            raise ValueError(
                f"domains_per_step must be an integer between {least} and the "
                f"{len(objective.domains)} training domains; got {num_domains!r}."
                + (
                    " With one domain alone its effect on the others cannot be measured."
                    * (num_domains == 1)
                )
            )
        return cls(objective, num_domains, seed, in_halves=in_halves)

    def draw(self, number: int) -> None:
        """Take the subset of draw `number`, a function of it and of the seed."""
        self.draws = number
        names = self._objective.domains
        if self._num_domains is not None:
            # Keyed by both, so that draw t needs none of those before it.
            generator = random.Random(f"{self._seed} {number}")
            chosen = generator.sample(range(len(names)), self._num_domains)
            names = tuple(names[index] for index in sorted(chosen))
        self.domains: tuple[str, ...] = names
        self.rows: tuple[str, ...] = names + self._objective.measured
        halves = [half for name in names for half in self.halves_of(name)]
        self.slots: tuple[str, ...] = (*halves, *self._objective.measured)
        """Names of the buffer's rows."""
        self._slots = {name: slot for slot, name in enumerate(self.slots)}

    @property
    def all_rows(self) -> tuple[str, ...]:
        """Names of all rows, those of other steps too."""
        return self._objective.rows

    def halves_of(self, name: str) -> tuple[str, ...]:
        """Names of the rows of the buffer that a domain has."""
        if self._in_halves and name not in self._objective.measured:
            return name, _SECOND.format(name)
        return (name,)

    def refuse_odd(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if a domain's batch has no two halves."""
        odd = {n: size for n, size in sizes.items() if size % len(self.halves_of(n))}
        if odd:
            raise ValueError(
                "a score that is_unbiased compares the halves of each domain's batch, which needs "
                f"an even number of examples on every rank; got {odd}."
            )

    @property
    def num_rows(self) -> int:
        """Rows of the buffer that a step needs: S + M, or 2 S + M with halves."""
        return len(self.slots)

    @property
    def share(self) -> float:
        """S / K."""
        return len(self.domains) / len(self._objective.domains)

    def holds(self, name: str) -> bool:
        """Whether a row of the step is `name`'s."""
        return name in self._slots

    def slot_of(self, name: str) -> int:
        """The row of the buffer with that name, one of `slots`."""
        return self._slots[name]

    def spread(self, gram_FF: Tensor, full_FF: Tensor | None) -> Products:
        """The step's Gram matrices among zeros for the rows that it lacks.

        Args:
            gram_FF: [F, F] of the rows of the buffer, over the columns that enter W.
            full_FF: the same over all columns; may be the same tensor, or None.

        Returns:
            Those of the R rows; the first has the products of two training domains times
            (K - 1) / (S - 1).
        """
        gram_SS, own_S = self._joined(gram_FF)
        full_SS = None if full_FF is None else gram_SS
        if full_FF is not None and full_FF is not gram_FF:
            full_SS = self._joined(full_FF)[0]
        if self._num_domains is None:
            return Products(gram_SS, full_SS, own_S)
        on = self._on(gram_SS.device)
        num_rows = len(self._objective.rows)

        def spread(matrix_SS: Tensor) -> Tensor:
            among_zeros = matrix_SS.new_zeros(num_rows * num_rows)
            return among_zeros.index_copy_(0, on.entries, matrix_SS.flatten()).view(num_rows, -1)

        full_RR = None if full_SS is None else spread(full_SS)
        if own_S is not None:
            own_S = own_S.new_zeros(num_rows).index_copy_(0, on.rows, own_S)
        return Products(spread(gram_SS * on.factors_SS), full_RR, own_S)

    def _joined(self, gram_FF: Tensor) -> tuple[Tensor, Tensor | None]:
        """[S + M, S + M] of g_j = a_j + b_j, and [S + M] with 4 <a_j, b_j>, given that of rows."""
        if not self._in_halves:
            return gram_FF, None
        number = len(self.domains)

        def joined(rows_FC: Tensor) -> Tensor:
            halves = rows_FC[: 2 * number].view(number, 2, -1)
            return torch.cat([halves.sum(1), rows_FC[2 * number :]])

        gram_SS = joined(joined(gram_FF).T.contiguous()).contiguous()
        own_S = gram_SS.diagonal().clone()
        own_S[:number] = 4 * gram_FF[0 : 2 * number : 2, 1 : 2 * number : 2].diagonal()
        return gram_SS, own_S

    def gathered(self, step: LastStep) -> LastStep:
        """Its coefficients by row of the buffer, and the norm that they give; plain products."""
        step = self._gathered(step)
        if not self._in_halves:
            return step
        number = len(self.domains)
        of_domains, of_targets = step.coefficients.split([number, len(self.rows) - number])
        of_halves = of_domains[:, None].expand(-1, 2).flatten()
        return step._replace(coefficients=torch.cat([of_halves, of_targets]))

    def _gathered(self, step: LastStep) -> LastStep:
        if self._num_domains is None:
            return step
        on = self._on(step.gram.device)
        gram_RR = step.gram.flatten()
        plain = gram_RR.index_select(0, on.entries) / on.factors_SS.flatten()
        return step._replace(
            gram=gram_RR.index_copy(0, on.entries, plain).view_as(step.gram),
            coefficients=step.coefficients.index_select(0, on.rows) / self.share,
            combined_norm=step.combined_norm / self.share,
        )

    def _on(self, device: torch.device) -> "_OnDevice":
        """Indices and factors of this step, copied to the device once; always to one address."""
        known, key = self._cached, (device, self.draws)
        if known is None or known[0] != key:
            made = self._made(device)
            if known is not None and known[0][0] == device:
                for kept, new in zip(known[1], made, strict=True):
                    kept.copy_(new)
                made = known[1]
            self._cached = known = key, made
        return known[1]

    def _made(self, device: torch.device) -> "_OnDevice":
        place = {name: row for row, name in enumerate(self._objective.rows)}
        rows = torch.tensor([place[name] for name in self.rows])
        entries = (rows[:, None] * len(self._objective.rows) + rows).flatten()
        num_drawn, num_domains = len(self.domains), len(self._objective.domains)
        factors_SS = torch.ones(len(rows), len(rows), dtype=torch.float64)
        if num_drawn > 1:
            square = factors_SS[:num_drawn, :num_drawn]
            square.fill_((num_domains - 1) / (num_drawn - 1)).fill_diagonal_(1)
        made = _OnDevice(rows, entries, factors_SS)
        if device.type == "cuda":
            # Pinned, or the copy would make the host wait for the device.
            made = _OnDevice(*(tensor.pin_memory() for tensor in made))
        return _OnDevice(*(tensor.to(device, non_blocking=True) for tensor in made))


# Of a row.
_SECOND = "{}, second half"


class _OnDevice(NamedTuple):
    """What a step's subset is on a device."""

    rows: Tensor
    """[S + M] int64: where the step's domains and targets stand among all."""
    entries: Tensor
    """[(S + M)^2] int64: the same of the products of two, in the flat [R, R]."""
    factors_SS: Tensor
    """[S + M, S + M] float64: 1 / probability that the pair is there, given the row's domain."""
