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
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from doge_fast.kernels.reweight.packing import LastStep
from doge_fast.weights.objective import Objective
from doge_fast.weights.simplex import is_integer


class Products(NamedTuple):
    """Inner products of the gradients of all domains and targets; zeros for those not there."""

    gram_RR: Tensor
    """[R, R] float64 over the columns that enter W."""
    full_RR: Tensor
    """The same over all columns."""


class Subset:
    """The domains of a step and the rows of the buffer that they have.

    Args:
        objective: all domains.
        num_domains: S, training domains of a step; None: all.
        seed: of the draws.
    """

    def __init__(self, objective: Objective, num_domains: int | None, seed: int) -> None:
        self._objective = objective
        self._num_domains = num_domains
        self._seed = seed
        self.draws = 0
        self._cached: tuple[tuple[object, ...], _OnDevice] | None = None
        self.draw(0)

    @classmethod
    def of(cls, objective: Objective, num_domains: int | None, seed: int) -> "Subset":
        """Check the arguments and draw the first subset.

        Raises:
            ValueError: S is not in [2, K], nor is it 1 where training domains are no targets;
                or the seed is negative; or either is no integer.
        """
        if not is_integer(seed) or seed < 0:
            raise ValueError(f"seed must be an integer, at least 0; got {seed!r}.")
        tau_K = objective.tau[: len(objective.domains)]
        if num_domains is None or num_domains == len(objective.domains):
            return cls(objective, None, seed)
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
        return cls(objective, num_domains, seed)

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
        """Names of the buffer's rows."""
        self._slots = {name: slot for slot, name in enumerate(self.rows)}

    @property
    def all_rows(self) -> tuple[str, ...]:
        """Names of all rows, those of other steps too."""
        return self._objective.rows

    @property
    def num_rows(self) -> int:
        """Rows of the buffer that a step needs: S + M."""
        return len(self.rows)

    @property
    def share(self) -> float:
        """S / K."""
        return len(self.domains) / len(self._objective.domains)

    def holds(self, name: str) -> bool:
        """Whether a row of the step is `name`'s."""
        return name in self._slots

    def slot_of(self, name: str) -> int:
        """The row of the buffer with that name, one of `rows`."""
        return self._slots[name]

    def spread(self, gram_BB: Tensor, full_BB: Tensor) -> Products:
        """The step's Gram matrices among zeros for the rows that it lacks.

        Args:
            gram_BB: [B, B] of the rows of the buffer, over the columns that enter W.
            full_BB: the same over all columns; may be the same tensor.

        Returns:
            Those of the R rows; the first has the products of two training domains times
            (K - 1) / (S - 1).
        """
        if self._num_domains is None:
            return Products(gram_BB, full_BB)
        on = self._on(gram_BB.device)
        num_rows = len(self._objective.rows)

        def spread(matrix_BB: Tensor) -> Tensor:
            among_zeros = matrix_BB.new_zeros(num_rows * num_rows)
            return among_zeros.index_copy_(0, on.entries, matrix_BB.flatten()).view(num_rows, -1)

        return Products(spread(gram_BB * on.factors_BB), spread(full_BB))

    def gathered(self, step: LastStep) -> LastStep:
        """Its coefficients by row of the buffer, and the norm that they give; plain products."""
        if self._num_domains is None:
            return step
        on = self._on(step.gram.device)
        gram_RR = step.gram.flatten()
        plain = gram_RR.index_select(0, on.entries) / on.factors_BB.flatten()
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
        factors_BB = torch.ones(len(rows), len(rows), dtype=torch.float64)
        if num_drawn > 1:
            square = factors_BB[:num_drawn, :num_drawn]
            square.fill_((num_domains - 1) / (num_drawn - 1)).fill_diagonal_(1)
        made = _OnDevice(rows, entries, factors_BB)
        if device.type == "cuda":
            # Pinned, or the copy would make the host wait for the device.
            made = _OnDevice(*(tensor.pin_memory() for tensor in made))
        return _OnDevice(*(tensor.to(device, non_blocking=True) for tensor in made))


class _OnDevice(NamedTuple):
    """What a step's subset is on a device."""

    rows: Tensor
    """[B] int64: where the step's domains and targets stand among all."""
    entries: Tensor
    """[B^2] int64: the same of the products of two, in the flat [R, R]."""
    factors_BB: Tensor
    """[B, B] float64: 1 / probability that the pair is there, given the row's domain."""
