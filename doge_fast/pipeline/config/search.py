"""The demo, and the search for the temperature: verbs that make several runs."""

from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge
from pydantic.dataclasses import dataclass
from tyro.conf import Positional, arg

from doge_fast.pipeline.config.ranges import EXACT, Count, Device, Place, Positive, Seed
from doge_fast.pipeline.config.stages import check_is_run, check_place
from doge_fast.pipeline.failures import UserError
from doge_fast.pipeline.sizes import SIZES


@dataclass(frozen=True, config=EXACT)
class DemoConfig:
    """The whole method on text found on this machine, in minutes.

    A proxy learns weights for a domain that it is not trained on. Base models at several distances
    from uniform weights towards these measure how far to follow them. A page shows both. The same
    command resumes.
    """

    examples: ClassVar = ("", "--data corpus --target wiki")

    out: Path = Path("demo")
    """Directory of the runs and the report."""
    data: Place = "installed"
    """A directory (one folder or file per domain), a file or Hub id, or "installed": text found in
    this Python environment."""
    target: str = "reference"
    """The domain that the weights are learned for; it is measured, not trained on. universal: all
    domains."""
    steps: Count = 150
    """Optimizer steps of the proxy and of each base model; there are at most four base models."""
    seed: Seed = 0
    """Seed of the model initialisation and of the order of the data."""
    device: Device = "auto"
    """auto: a GPU if there is one."""
    cache_dir: Path | None = None
    """Where packed blocks are kept; None: $DOGE_FAST_CACHE, else doge_fast in the user's cache
    directory."""

    def _check(self) -> None:
        check_place("data", self.data, ("installed",))


@dataclass(frozen=True, config=EXACT)
class TemperatureConfig:
    """Measure how far to follow a proxy's weights: base models at alpha^(1/T) for a few T."""

    examples: ClassVar = ("runs/proxy", "runs/proxy --out runs/far --seeds 0 1 2 --dry-run")

    proxy: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run directory of a proxy, whose weights are followed. The base models use its corpus,
    model and settings."""
    out: Path | None = None
    """The directory of the base models, the chosen weights.json and the report; None: beside the
    proxy, PROXY-temperature."""
    model: Place | None = None
    """A size or configuration for the base models, as for `base`; None: the proxy's."""
    steps: Count | None = None
    """Optimizer steps of each base model; None: the proxy's, at least 200."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Each temperature is measured with every seed. Models of one seed have the same initialisation
    and the same order of the data."""
    most_runs: Annotated[Count, Ge(3)] = 6
    """Largest number of base models for each seed."""
    budget_tokens: Positive | None = None
    """Number of tokens in the training that the weights are for; each domain's epochs are computed
    from it. None: the tokens of one base model here."""
    eval_blocks: Count | None = 256
    """Held-out blocks per domain; None: all."""
    plan: bool = False
    """Only print the next runs, as commands that can run in parallel. When these are complete, use
    --plan again: the next temperatures depend on their results."""
    only: tuple[str, ...] = ()
    """Make only these runs, by the names that --plan printed."""
    dry_run: bool = False
    """Time a few steps of one base model. Print the largest number of base models, the text that
    they would read, and how long all would take. Writes nothing."""
    device: Device = "auto"
    """auto: a GPU if there is one."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            told = ", ".join(map(str, self.seeds)) or "none"
            raise UserError(f"seeds must be distinct, and at least one; got {told}.")
        if self.plan and self.only:
            raise UserError("--plan prints the commands of all runs; leave out --only.")

    def _check(self) -> None:
        check_is_run("proxy", self.proxy)
        if self.model is not None:
            check_place("model", self.model, SIZES)
