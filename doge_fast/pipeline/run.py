"""What a stage leaves, as something to look at in Python and in a notebook."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from doge_fast.pipeline import records
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.figures import Drawing
from doge_fast.pipeline.reporting.sections import page_of
from doge_fast.pipeline.weights.summary import WeightsSummary, describe, story


@dataclass(frozen=True)
class Run:
    """A run directory that has weights. A notebook shows them as a table and as figures.

    Everything is read from the files when it is asked for.
    """

    path: Path
    """The run directory; a path of it is `run.path / "model"`."""

    def __fspath__(self) -> str:
        """The run directory, for what opens files."""
        return str(self.path)

    @property
    def record(self) -> Json:
        """weights.json, checked; see docs/weights.md."""
        return records.read_weights(self.path)

    @property
    def weights(self) -> dict[str, float]:
        """{domain: weight}; they sum to 1. What was learned, or what was trained at."""
        return records.weights_by_name(self.record)

    def describe(self, budget_tokens: float | None = None) -> WeightsSummary:
        """What the weights mean: beside natural ones, and as epochs of a training.

        Args:
            budget_tokens: > 0, of the training that the weights are for; None: no epochs.

        Raises:
            UserError: the budget is not > 0.
        """
        return describe(self.record, budget_tokens=budget_tokens)

    def metrics(self, kind: Literal["train", "eval"] | None = None) -> list[Json]:
        """The lines of metrics.jsonl in order, of one kind or all."""
        return records.read_metrics(self.path, kind=kind)

    def figures(self) -> list[Drawing]:
        """Those of its page, as `svg`: learned weights, and their way over time."""
        return [each for section in page_of([self.path]).sections for each in section.drawings]

    def __repr__(self) -> str:
        """Run('runs/proxy': proxy, target universal, 300 steps, seed 0)."""
        return f"Run({str(self.path)!r}: {story(self.record)})"

    def _repr_html_(self) -> str:
        drawn = "".join(f"<div>{drawing.svg}</div>" for drawing in self.figures())
        return self.describe()._repr_html_() + drawn
