"""`Run`: the result of a stage, for Python and notebooks."""

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
    """A run directory with weights. A notebook shows them as a table and as figures.

    Every property and method reads the files anew.
    """

    path: Path
    """The run directory; the model is in `run.path / "model"`."""

    def __fspath__(self) -> str:
        """The run directory, for `open` and `os.path`."""
        return str(self.path)

    @property
    def record(self) -> Json:
        """weights.json, checked; see docs/weights.md."""
        return records.read_weights(self.path)

    @property
    def weights(self) -> dict[str, float]:
        """{domain: weight}, learned or used for training; they sum to 1."""
        return records.weights_by_name(self.record)

    def describe(self, budget_tokens: float | None = None) -> WeightsSummary:
        """Compare the weights with natural ones, and convert them to epochs of a training.

        Args:
            budget_tokens: > 0; tokens of the training that will use the weights; None: no epochs.

        Raises:
            UserError: the budget is not > 0.
        """
        return describe(self.record, budget_tokens=budget_tokens)

    def metrics(self, kind: Literal["train", "eval"] | None = None) -> list[Json]:
        """Lines of metrics.jsonl in order; None: of both kinds."""
        return records.read_metrics(self.path, kind=kind)

    def figures(self) -> list[Drawing]:
        """Figures of the run's report page, with an attribute `svg`."""
        return [each for section in page_of([self.path]).sections for each in section.drawings]

    def __repr__(self) -> str:
        """Run('runs/proxy': proxy, target universal, 300 steps, seed 0)."""
        return f"Run({str(self.path)!r}: {story(self.record)})"

    def _repr_html_(self) -> str:
        drawn = "".join(f"<div>{drawing.svg}</div>" for drawing in self.figures())
        return self.describe()._repr_html_() + drawn
