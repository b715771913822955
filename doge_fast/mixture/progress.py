"""How far the passes over a mixture are, in one process."""

import itertools
from collections.abc import Iterable


class Progress:
    """Where the next pass begins, and which batches loaders have taken.

    Args:
        num_steps: batches of the whole run; None: endless.
    """

    def __init__(self, num_steps: int | None) -> None:
        self.num_steps = num_steps
        self.num_rewinds = 0
        self.rewind(0)

    def rewind(self, step: int) -> None:
        """Let the next pass begin at this step."""
        self.start = step
        # The first batch that no loader of this process has taken.
        self.end = step
        # Batches that samplers gave to loaders and that were not read in this process.
        self.num_ahead = 0
        # Tells a sampler that it may begin another pass.
        self.num_rewinds += 1

    def steps(self) -> Iterable[int]:
        """The steps of the next pass."""
        if self.num_steps is None:
            return itertools.count(self.start)
        return range(self.start, self.num_steps)

    def num_batches(self) -> int:
        """Batches of the next pass.

        Raises:
            TypeError: it is endless.
        """
        if self.num_steps is None:
            raise TypeError("a mixture without steps=... is endless and has no length.")
        return max(0, self.num_steps - self.start)

    def take(self, step: int) -> None:
        """A loader takes this batch: weights that are set from now on hold for later ones."""
        self.end = max(self.end, step + 1)
