"""Runs -> one page: what was asked, what came out, figures, tables, settings.

Reads run directories only, so a report can be made where the runs cannot: the records are
complete, and nothing here knows how they were computed. The page is one file that opens offline;
its figures also lie beside it as PNG and SVG.

Whichever arm wins is what the page says. A learned mixture is always set against the uniform one
at equal tokens, model and settings; arms that differ in anything else are never in one table.
"""

import io
import json
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from doge_fast.pipeline import records
from doge_fast.pipeline.config import ReportConfig
from doge_fast.pipeline.records import Json

Floats = npt.NDArray[np.float64]

# More than four epochs of a domain are worth clearly less than fresh text
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
MAX_EPOCHS = 4.0
# The running average has settled where its last fifth moved less than this, in L1: half of it is
# the share of the tokens that would go elsewhere, so 0.05 is one token in forty.
MAX_DRIFT = 0.05
DRIFT_FROM = 0.8
_DRIFT_SHOWN_FROM = 0.05
# Nearly everything on one domain; the paper's most extreme weight is 0.72.
COLLAPSED = 0.8
# Hardly moved: no domain is further than this from uniform, as a share of uniform.
UNMOVED = 0.02
# Single-seed differences below this are called small; the paper's seeds differ by about as much.
SMALL_CHANGE = 0.01

UNIVERSAL, MIX = "universal", "mix"

# Do not change what a run computes, or are what arms and seeds are allowed to differ in.
_FREE_TRAINING = ("seed", "eval_every", "eval_blocks", "save_every", "device", "compile")
_FREE = ("out", "corpus", "weights", "log_every", "training")


def write_report(config: ReportConfig) -> Path:
    """Write the page for a set of runs, and its figures beside it.

    Reads records only. Runs that differ in nothing but their seed are one arm, shown as mean and
    standard error; base models are compared where they saw the same number of tokens of the same
    corpus with the same model and settings.

    Args:
        config: which runs, where to, and for which token budget epochs are told.

    Returns:
        The page; `<its name>-figures/` beside it holds every figure as PNG and SVG.

    Raises:
        ValueError: no run is named, a directory is not a run and holds none, `token_budget` is
            below 1, or a record is not what it should be; nothing has been written.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), tab:universal_ppl for the table of
    perplexities, tab:dw and tab:ood-dw for those of domain weights.
    """
    if config.token_budget is not None and config.token_budget < 1:
        raise ValueError(f"token_budget must be at least 1; got {config.token_budget}.")
    study = _study(config.runs)
    page = config.out or _default_page(config.runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    sections = _draw(study)
    _save_figures(sections, page.with_name(f"{page.stem}-figures"))
    page.write_text(_render(study, sections, config.token_budget), encoding="utf-8")
    return page


def terminal_table(runs: Sequence[Path]) -> str:
    """The answer of a set of runs as aligned plain text, for a terminal.

    Args:
        runs: run directories, or one directory that holds them.

    Returns:
        Per comparison a table of perplexities (* where better than uniform) and the verdict; the
        learned weights; the warnings. ASCII but for the names.

    Raises:
        ValueError: as `write_report`.
    """
    study = _study(runs)
    blocks = []
    for comparison in study.comparisons:
        verdict = _judge(comparison, study)
        title = f"{comparison.title}: perplexity on held-out text, {comparison.settings}"
        blocks.append(f"{_wrap(title)}\n\n{_plain_table(_perplexity_table(comparison))}")
        blocks.append(_wrap(" ".join((f"{verdict.headline}.", *verdict.sentences))))
    if study.proxies:
        table = _weights_table(study)
        blocks.append(f"{table.title}\n\n{_plain_table(table)}")
        blocks += [_wrap(_summary(proxy)) for proxy in study.proxies]
    blocks.append("\n".join(_wrap(f"Warning: {each}") for each in _warnings(study, None)))
    return _ascii("\n\n".join(block for block in blocks if block))


# What was run.


@dataclass(frozen=True)
class Run:
    """One run directory, as its records tell it."""

    path: Path
    config: Json
    corpus: Json
    stage: str
    versions: Mapping[str, str]
    created: str
    train: Sequence[Json]
    evals: Sequence[Json]
    weights: Json | None
    evaluation: Json | None

    @property
    def name(self) -> str:
        """The directory's."""
        return self.path.name

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return tuple(self.corpus["domains"])

    @property
    def targets(self) -> tuple[str, ...]:
        """Domains that are measured and never trained on."""
        return tuple(self.corpus["targets"])

    @property
    def seed(self) -> int:
        """Of initialisation and data order."""
        return int(self.config["training"]["seed"])

    @property
    def steps(self) -> int:
        """Optimizer steps that were asked for."""
        return int(self.config["training"]["steps"])

    @property
    def last_step(self) -> int:
        """The last step that the records know of."""
        return max((line["step"] for line in (*self.train, *self.evals)), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of training domains that the whole run sees."""
        per_step = (
            self.config["batch_size"]
            if self.stage == "base"
            else self.config["sequences_per_domain"] * len(self.domains)
        )
        return self.steps * int(per_step) * int(self.corpus["block_size"])

    @property
    def train_tokens(self) -> dict[str, int]:
        """Tokens of each training domain that the corpus holds."""
        return {name: entry["train_tokens"] for name, entry in self.corpus["domains"].items()}

    @property
    def seconds_per_step(self) -> float:
        """Median over the logged steps; nan where none was logged."""
        seconds = [_float(line.get("seconds")) for line in self.train if "seconds" in line]
        return float(np.median(seconds)) if seconds else math.nan

    @property
    def skipped(self) -> int:
        """Logged steps that a non-finite gradient skipped."""
        return sum(bool(line.get("skipped")) for line in self.train)

    def settings(self) -> str:
        """Everything that two runs of one arm share, as a key."""
        free = {key: value for key, value in self.config.items() if key not in _FREE}
        training = {
            key: value
            for key, value in self.config["training"].items()
            if key not in _FREE_TRAINING
        }
        key = (self.stage, free, training, self.corpus)
        return json.dumps(key, sort_keys=True)

    def losses(self) -> dict[str, float] | None:
        """Held-out loss per domain at the end of the run; None where it was not measured."""
        if self.evaluation is not None:
            return _floats(self.evaluation["loss"])
        last = self.evals[-1] if self.evals else None
        return _floats(last["loss"]) if last and last["step"] == self.steps else None

    def measured_blocks(self) -> dict[str, int]:
        """Held-out blocks per domain behind `losses`."""
        if self.evaluation is not None:
            return dict(self.evaluation["blocks"])
        most = self.config["training"]["eval_blocks"]
        entries = {**self.corpus["domains"], **self.corpus["targets"]}
        return {name: min(most, entry["validation_blocks"]) for name, entry in entries.items()}


def _open(runs: Sequence[Path]) -> list[Run]:
    """Every run that `runs` names or holds, once, in order."""
    if not runs:
        raise ValueError("A report needs at least one run directory; none was named.")
    paths: dict[Path, Path] = {}
    for named in runs:
        for path in _run_directories(Path(named)):
            paths.setdefault(path.resolve(), path)
    return [_read_run(path) for path in paths.values()]


def _run_directories(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"A run is a directory; {path} {what}. Name directories that hold runs.")
    if (path / records.CONFIG).exists():
        return [path]
    found = sorted(file.parent for file in path.glob(f"*/{records.CONFIG}") if _is_run(file))
    if not found:
        raise ValueError(
            f"{path} is not a run directory and holds none: neither it nor a folder in it has a "
            f"{records.CONFIG} that a proxy or base run wrote."
        )
    return found


def _is_run(file: Path) -> bool:
    """Models are saved with a config.json too; one of ours names its stage."""
    return "stage" in records.read_json(file)


def _read_run(path: Path) -> Run:
    record = records.read_config(path)
    lines = records.read_metrics(path) if (path / records.METRICS).exists() else []
    has_weights = (path / records.WEIGHTS).exists()
    has_evaluation = (path / records.EVALUATION).exists()
    return Run(
        # A run named `.` has its name all the same.
        path=path.resolve(),
        config=record["config"],
        corpus=record["corpus"],
        stage=record["stage"],
        versions=record.get("versions", {}),
        created=record.get("created", ""),
        train=[line for line in lines if line["kind"] == "train"],
        evals=[line for line in lines if line["kind"] == "eval"],
        weights=records.read_weights(path) if has_weights else None,
        evaluation=records.read_evaluation(path) if has_evaluation else None,
    )


class Stat(NamedTuple):
    """A mean over seeds and its standard error; no error for one seed."""

    mean: float
    error: float | None = None


def _stat(values: Iterable[float]) -> Stat:
    array = np.asarray(list(values), dtype=np.float64)
    if len(array) == 1:
        return Stat(float(array[0]))
    return Stat(float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))))


@dataclass(frozen=True)
class Proxy:
    """Proxy runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Stands for all seeds in what they share."""
        return self.runs[0]

    @property
    def domains(self) -> tuple[str, ...]:
        """Training domains, in the order of the simplex."""
        return self.first.domains

    @property
    def target(self) -> str:
        """For whom the weights are, in words."""
        names = self.first.config["target"]
        if list(names) == [UNIVERSAL]:
            return "all domains"
        words = [_target_word(name, alone=len(names) == 1) for name in names]
        return _and(words)

    @cached_property
    def weights(self) -> dict[str, Stat]:
        """{domain: average domain weight}; empty where no run has a step."""
        found = [_average_weights(run) for run in self.runs]
        known = [weights for weights in found if weights]
        if not known:
            return {}
        return {name: _stat(weights[name] for weights in known) for name in self.domains}

    @property
    def has_steps(self) -> bool:
        """Whether there is something to draw: a step past the first line that all seeds logged."""
        return bool(self._common_steps("gain"))

    def series(self, key: str, names: Sequence[str]) -> tuple[Floats, Floats]:
        """(steps [T], values [S, T, len(names)]) of the steps that all S seeds have logged."""
        steps = self._common_steps(key)
        values = [
            [[_float(line[key].get(name)) for name in names] for line in self._lines(run, steps)]
            for run in self.runs
        ]
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @property
    def rows(self) -> tuple[str, ...]:
        """Domains and targets whose gradients were measured, in the order of the Gram matrix."""
        return tuple(next(line["rows"] for line in self.first.train if "rows" in line))

    def cosine(self) -> Floats:
        """[R, R]: cosines between the gradients of `rows`, mean over steps and seeds."""
        lines = [line for run in self.runs for line in run.train if "cosine" in line]
        stacked = np.array([line["cosine"] for line in lines], dtype=np.float64)
        return _nan_mean(stacked)

    def mean_over_steps(self, key: str) -> Floats:
        """[K]: mean of W or a part of it, every step weighing as much as its learning rate.

        The logarithm of a domain weight moves by lr * W / mu (eq. update_dw), so this is what
        moved the weights, up to the common factor.
        """
        _, values_STK = self.series(key, self.domains)
        lr_ST1 = self._rates()
        kept = np.isfinite(values_STK)
        weighted = np.where(kept, values_STK, 0.0) * lr_ST1
        total = (kept * lr_ST1).sum((0, 1))
        ratio: Floats = weighted.sum((0, 1)) / np.where(total > 0, total, math.nan)
        return ratio

    def _rates(self) -> Floats:
        """[S, T, 1]: learning rates of the steps that moved the weights."""
        steps = self._common_steps("gain")
        rates = [[[_float(line["lr"])] for line in self._lines(run, steps)] for run in self.runs]
        return np.asarray(rates, dtype=np.float64)

    def _common_steps(self, key: str) -> list[int]:
        steps = [{line["step"] for line in run.train if key in line} for run in self.runs]
        return sorted(set.intersection(*steps))

    @staticmethod
    def _lines(run: Run, steps: Sequence[int]) -> list[Json]:
        by_step = {line["step"]: line for line in run.train}
        return [by_step[step] for step in steps]

    def drift(self) -> tuple[Floats, Floats]:
        """(steps [T], L1 change [T] of the running average over the last fifth of the way there).

        drift(t)  =  sum_j | alpha_bar_j(t) - alpha_bar_j(0.8 t) |,     mean over seeds
        """
        steps_T, average_STK = self.series("alpha_mean", self.domains)
        before_T = np.searchsorted(steps_T, DRIFT_FROM * steps_T, side="right") - 1
        change_ST = np.abs(average_STK - average_STK[:, before_T]).sum(-1)
        return steps_T, change_ST.mean(0)

    @property
    def is_settled(self) -> bool:
        """Whether more steps would hardly change the result."""
        return bool(self.drift()[1][-1] <= MAX_DRIFT)


def _target_word(item: str, *, alone: bool) -> str:
    name, _, weight = item.partition("=")
    word = "a held-out mixture of all domains" if name == MIX else name
    return word if alone or not weight else f"{word} ({weight})"


def _average_weights(run: Run) -> dict[str, float]:
    """The result of a proxy run; of one that is not complete, its average so far."""
    if run.weights is not None:
        return records.weights_by_name(run.weights)
    for line in reversed(run.train):
        if "alpha_mean" in line:
            return _floats(line["alpha_mean"])
    return {}


@dataclass(frozen=True)
class Arm:
    """Base runs at the same weights that differ in nothing but their seed."""

    label: str
    kind: str
    """uniform, natural, learned (by a proxy of this report) or given (from a file)."""
    about: str
    runs: tuple[Run, ...]

    @cached_property
    def losses(self) -> list[dict[str, float]]:
        """Held-out losses per domain, a dictionary a seed."""
        return [losses for run in self.runs if (losses := run.losses()) is not None]

    def perplexity(self, names: Sequence[str]) -> Stat:
        """exp of the mean loss over `names`: the paper's average, and one domain's perplexity."""
        return _stat(_exp(_mean_loss(losses, names)) for losses in self.losses)

    def loss(self, names: Sequence[str]) -> Stat:
        """Mean loss over `names`."""
        return _stat(_mean_loss(losses, names) for losses in self.losses)

    def worst(self, names: Sequence[str]) -> tuple[str, Stat]:
        """The domain of `names` with the highest perplexity, and that perplexity."""
        stats = {name: self.perplexity([name]) for name in names}
        # A diverged model has no number; that is the worst there is.
        name = max(stats, key=lambda name: _or_inf(stats[name].mean))
        return name, stats[name]


def _mean_loss(losses: Mapping[str, float], names: Sequence[str]) -> float:
    return math.fsum(losses[name] for name in names) / len(names)


@dataclass(frozen=True)
class Comparison:
    """Base models that may be compared: same corpus, model, settings and number of tokens."""

    arms: tuple[Arm, ...]
    """Only such as have been measured; uniform first, then natural, then the others."""
    num_seen: int
    """Arms before the unmeasured were left out."""
    first: Run
    domains: tuple[str, ...]
    """Training domains that every arm was measured on."""
    targets: tuple[str, ...]
    """Domains that no arm was trained on and every arm was measured on."""

    @property
    def uniform(self) -> Arm | None:
        """The baseline."""
        return next((arm for arm in self.arms if arm.kind == "uniform"), None)

    @property
    def rivals(self) -> list[Arm]:
        """What is set against uniform, learned weights first."""
        others = [arm for arm in self.arms if arm.kind != "uniform"]
        return sorted(others, key=lambda arm: arm.kind == "natural")

    @property
    def aim(self) -> tuple[str, ...]:
        """The domains whose loss the weights are to lower."""
        return self.targets or self.domains

    @property
    def title(self) -> str:
        """What kind of generalization is asked for."""
        targets = self.first.targets
        return f"Out of domain, {_and(targets)}" if targets else "All domains"

    @property
    def settings(self) -> str:
        """What all arms share."""
        model = self.first.config["model"]["model"]
        return f"{model} models, {_count(self.first.tokens)} tokens each"


@dataclass(frozen=True)
class Study:
    """All runs of a report, put in order."""

    runs: tuple[Run, ...]
    proxies: tuple[Proxy, ...]
    comparisons: tuple[Comparison, ...]
    colors: Mapping[str, int] = field(repr=False)
    """Domain -> its place in the palette, the same in every figure."""

    @property
    def bases(self) -> list[Run]:
        """Base runs, in the order they were named."""
        return [run for run in self.runs if run.stage == "base"]


def _study(runs: Sequence[Path]) -> Study:
    opened = _open(runs)
    proxies = _proxies([run for run in opened if run.stage == "proxy"])
    bases = [run for run in opened if run.stage == "base"]
    comparisons = [_comparison(group, proxies) for group in _grouped(bases, Run.settings)]
    comparisons.sort(key=lambda comparison: bool(comparison.first.targets))
    return Study(tuple(opened), proxies, tuple(comparisons), _places(opened, proxies))


def _proxies(runs: Sequence[Run]) -> tuple[Proxy, ...]:
    groups = _grouped(runs, Run.settings)
    # What is asked of all domains comes before what is asked of one.
    groups.sort(key=lambda group: bool(group[0].targets))
    labels = _distinct([_common_name(group) for group in groups], groups)
    return tuple(Proxy(label, tuple(group)) for label, group in zip(labels, groups, strict=True))


def _grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _common_name(runs: Sequence[Run]) -> str:
    """ca-seed0, ca-seed1 -> ca."""
    if len(runs) == 1:
        return runs[0].name
    prefix = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071
    stem = re.sub(r"[-_. ]*(seed|s)?[-_. ]*\d*$", "", prefix)
    return stem or runs[0].name


def _distinct(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> list[str]:
    """Directories of one name are told apart by the folder they lie in."""
    return [
        label if labels.count(label) == 1 else f"{group[0].path.parent.name}/{group[0].name}"
        for label, group in zip(labels, groups, strict=True)
    ]


def _comparison(runs: Sequence[Run], proxies: Sequence[Proxy]) -> Comparison:
    sources = {run.path: _source(run, proxies) for run in runs}
    groups = _grouped(runs, lambda run: sources[run.path].key)
    arms = [sources[group[0].path].arm(tuple(group)) for group in groups]
    order = {"uniform": 0, "natural": 1, "learned": 2, "given": 3}
    arms.sort(key=lambda arm: order[arm.kind])
    measured = [arm for arm in arms if arm.losses]
    first = runs[0]
    return Comparison(
        arms=tuple(measured),
        num_seen=len(arms),
        first=first,
        domains=_measured_by_all(first.domains, measured),
        targets=_measured_by_all(first.targets, measured),
    )


def _measured_by_all(names: Sequence[str], arms: Sequence[Arm]) -> tuple[str, ...]:
    losses = [losses for arm in arms for losses in arm.losses]
    return tuple(name for name in names if all(name in measured for measured in losses))


class _Source(NamedTuple):
    """Where a base run's weights came from."""

    key: str
    label: str
    kind: str
    about: str

    def arm(self, runs: tuple[Run, ...]) -> Arm:
        return Arm(self.label, self.kind, self.about, runs)


def _source(run: Run, proxies: Sequence[Proxy]) -> _Source:
    """`weights` of a base run is a baseline's name, or the path of a file or of a proxy run."""
    weights = str(run.config["weights"])
    if weights in ("uniform", "natural"):
        about = {"uniform": "baseline", "natural": "by tokens"}[weights]
        return _Source(weights, weights, weights, about)
    path = Path(weights)
    folder = path.parent if path.name == records.WEIGHTS else path
    proxy = _proxy_of(folder, proxies)
    if proxy is not None:
        return _Source(proxy.label, proxy.label, "learned", f"learned for {proxy.target}")
    return _Source(weights, folder.stem or weights, "given", "from a file")


def _proxy_of(folder: Path, proxies: Sequence[Proxy]) -> Proxy | None:
    """The proxy that lies there, or, where runs have been moved, the only one of that name."""
    for proxy in proxies:
        if any(run.path == folder.resolve() for run in proxy.runs):
            return proxy
    named = [proxy for proxy in proxies if any(run.name == folder.name for run in proxy.runs)]
    return named[0] if len(named) == 1 else None


def _places(runs: Sequence[Run], proxies: Sequence[Proxy]) -> dict[str, int]:
    """Domains in order of first appearance, training domains before targets."""
    names = [name for run in runs for name in run.domains]
    names += [name for run in runs for name in run.targets]
    names += [name for proxy in proxies if proxy.has_steps for name in proxy.rows]
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


# What came out, in words.


class Verdict(NamedTuple):
    """The answer of a comparison."""

    title: str
    headline: str
    sentences: list[str]


def _judge(comparison: Comparison, study: Study) -> Verdict:
    """Whether weights other than uniform helped, whichever way it went."""
    title = comparison.title
    if not comparison.arms or not comparison.domains:
        return Verdict(title, "No base model here has been measured", [_EVALUATE])
    if comparison.first.targets and not comparison.targets:
        return Verdict(title, "The target has not been measured by every arm", [_EVALUATE])
    if comparison.uniform is None:
        return Verdict(title, "Nothing to compare with: no base model at uniform weights", [_TRAIN])
    if not comparison.rivals:
        return Verdict(title, "Only uniform weights have been tried", [])
    judge = _against_on_target if comparison.targets else _against
    sentences = [judge(arm, comparison.uniform, comparison) for arm in comparison.rivals]
    sentences += _for_scale(comparison, study)
    if not comparison.targets and _is_slimpajama(comparison.domains):
        sentences.append(_PAPER_VERDICT)
    return Verdict(title, _headline(comparison, comparison.uniform), sentences)


_EVALUATE = "Run doge-fast evaluate on each finished base run."
_TRAIN = (
    "Train one with doge-fast base --weights uniform and the settings of the others; without it "
    "nobody can tell whether learned weights help."
)


def _headline(comparison: Comparison, uniform: Arm) -> str:
    learned = [arm for arm in comparison.rivals if arm.kind != "natural"] or comparison.rivals
    arm = min(learned, key=lambda arm: _or_inf(arm.loss(comparison.aim).mean))
    what = "Natural" if arm.kind == "natural" else "Learned" if arm.kind == "learned" else "Given"
    where = f" on {_and(comparison.targets)}" if comparison.targets else ""
    own, base = (_or_inf(each.loss(comparison.aim).mean) for each in (arm, uniform))
    if own == base:
        return f"{what} weights and uniform ones come out the same{where}"
    if own > base:
        return f"{what} weights do not beat uniform ones{where}"
    best = min(comparison.arms, key=lambda other: _or_inf(other.loss(comparison.aim).mean))
    if best is not arm:
        return f"{what} weights beat uniform ones{where}; {best.label} weights are better still"
    if not comparison.targets and 2 * _num_better(arm, uniform, comparison) < len(
        comparison.domains
    ):
        return f"{what} weights beat uniform ones on average, but on fewer than half the domains"
    return f"{what} weights beat uniform ones{where}"


def _num_better(arm: Arm, uniform: Arm, comparison: Comparison) -> int:
    return sum(_is_better(arm, uniform, [name]) for name in comparison.domains)


def _is_better(arm: Arm, uniform: Arm, names: Sequence[str]) -> bool:
    return arm.loss(names).mean < _or_inf(uniform.loss(names).mean)


def _against(arm: Arm, uniform: Arm, comparison: Comparison) -> str:
    names = comparison.domains
    worst, worst_stat = arm.worst(names)
    other_worst, other_stat = uniform.worst(names)
    return (
        f"{arm.label}: better on {_num_better(arm, uniform, comparison)} of {len(names)} domains "
        f"than uniform; average perplexity {_versus(arm, uniform, names)}; worst domain {worst} "
        f"at {_perplexity(worst_stat.mean)}, with uniform {other_worst} at "
        f"{_perplexity(other_stat.mean)}.{_confidence(arm, uniform, names)}"
    )


def _against_on_target(arm: Arm, uniform: Arm, comparison: Comparison) -> str:
    names = comparison.targets
    return (
        f"{arm.label}: perplexity on {_and(names)}, which was never trained on, "
        f"{_versus(arm, uniform, names)}; average over the training domains "
        f"{_versus(arm, uniform, comparison.domains)}.{_confidence(arm, uniform, names)}"
    )


def _versus(arm: Arm, uniform: Arm, names: Sequence[str]) -> str:
    """15.81 against 16.53 (−4.4 %)."""
    own, other = arm.perplexity(names).mean, uniform.perplexity(names).mean
    return f"{_perplexity(own)} against {_perplexity(other)} ({_percent(_change(own, other))})"


def _confidence(arm: Arm, uniform: Arm, names: Sequence[str]) -> str:
    """What the seeds allow to say about a difference."""
    own, other = arm.loss(names), uniform.loss(names)
    if own.error is not None and other.error is not None:
        spread = math.hypot(own.error, other.error)
        ratio = abs(own.mean - other.mean) / spread if spread > 0 else math.inf
        seeds = f"{len(arm.losses)} and {len(uniform.losses)} seeds"
        return f" The difference is {ratio:.1f} standard errors ({seeds})."
    change = _change(arm.perplexity(names).mean, uniform.perplexity(names).mean)
    if abs(change) < SMALL_CHANGE:
        return " With one seed a difference this small may be chance."
    return ""


def _for_scale(comparison: Comparison, study: Study) -> list[str]:
    """What a uniform model reaches that was trained on the targets too, at equal tokens."""
    if not comparison.targets:
        return []
    for other in study.comparisons:
        uniform = other.uniform
        if uniform and _is_oracle(other, comparison):
            reached = _perplexity(uniform.perplexity(comparison.targets).mean)
            target = _and(comparison.targets)
            return [f"For scale: uniform weights with {target} among the domains reach {reached}."]
    return []


def _is_oracle(other: Comparison, comparison: Comparison) -> bool:
    own, its = comparison.first, other.first
    return (
        set(comparison.targets) <= set(other.domains)
        and its.tokens == own.tokens
        and its.config["model"] == own.config["model"]
        and its.corpus["tokenizer_sha256"] == own.corpus["tokenizer_sha256"]
    )


def _summary(proxy: Proxy) -> str:
    """What a proxy learned, and whether its average has settled."""
    if not proxy.has_steps:
        return f"{proxy.label}: has not logged a step yet."
    ranked = sorted(proxy.weights.items(), key=lambda item: -item[1].mean)
    top = _and(f"{name} {_weight(stat)} ({_times(stat.mean, proxy)})" for name, stat in ranked[:2])
    low, low_stat = ranked[-1]
    return (
        f"{proxy.label}, for {proxy.target}: most goes to {top}, least to {low} "
        f"{_weight(low_stat)}; effectively {_effective(proxy.weights):.1f} of "
        f"{len(proxy.domains)} domains. {_drift_sentence(proxy)}"
    )


def _times(weight: float, proxy: Proxy) -> str:
    return f"{weight * len(proxy.domains):.1f}\N{NO-BREAK SPACE}× uniform"


def _drift_sentence(proxy: Proxy) -> str:
    steps_T, drift_T = proxy.drift()
    share = f"{50 * drift_T[-1]:.1f}\N{NO-BREAK SPACE}%"
    moved = f"the last fifth of the {int(steps_T[-1])} steps reassigned {share} of the tokens"
    if drift_T[-1] <= MAX_DRIFT:
        return f"The running average has settled: {moved}."
    return f"The running average is still moving: {moved}."


def _effective(weights: Mapping[str, Stat] | Mapping[str, float]) -> float:
    """exp of the entropy: K at uniform weights, 1 where one domain gets everything."""
    means = [each.mean if isinstance(each, Stat) else each for each in weights.values()]
    return math.exp(-math.fsum(mean * math.log(mean) for mean in means if mean > 0))


def _asked(study: Study) -> list[str]:
    """What was asked and what was run, in sentences."""
    sentences = [
        f"{proxy.label} asks which mixture of {_and(proxy.domains)} lowers the loss on "
        f"{proxy.target}{'' if not proxy.first.targets else ', which is not trained on'} "
        f"({_many(len(proxy.runs), 'seed')}; {proxy.first.config['model']['model']} model, "
        f"{proxy.first.steps} steps, {_count(proxy.first.tokens)} tokens)."
        for proxy in study.proxies
    ]
    for comparison in study.comparisons:
        labels = [arm.label for arm in comparison.arms]
        names = f": {_and(labels)}" if labels else ""
        sentences.append(
            f"{comparison.title}: {_many(comparison.num_seen, 'arm')} of base models on "
            f"{_many(len(comparison.first.domains), 'domain')}, {comparison.settings}{names}."
        )
    return sentences


def _warnings(study: Study, token_budget: int | None) -> list[str]:
    """Everything that a reader should know before believing a number."""
    found = [warning for proxy in study.proxies for warning in _proxy_warnings(proxy)]
    found += [warning for each in study.comparisons for warning in _comparison_warnings(each)]
    found += [warning for run in study.runs for warning in _run_warnings(run)]
    budget = _budget(study, token_budget)
    for mixture in _mixtures(study):
        found += _epoch_warnings(mixture, budget)
    return found


def _proxy_warnings(proxy: Proxy) -> Iterator[str]:
    if not proxy.has_steps:
        return
    largest = max(proxy.weights, key=lambda name: proxy.weights[name].mean)
    weight, uniform = proxy.weights[largest].mean, 1 / len(proxy.domains)
    furthest = max(abs(stat.mean - uniform) for stat in proxy.weights.values())
    if weight > COLLAPSED and len(proxy.domains) > 1:
        yield (
            f"{proxy.label}: the weights collapsed onto {largest} ({weight:.2f}). A larger mu, "
            "smoothing or domain_max_grad_norm keeps them apart."
        )
    elif furthest < UNMOVED * uniform and len(proxy.domains) > 1:
        yield (
            f"{proxy.label}: the weights hardly left uniform. A smaller mu or more steps would "
            "move them."
        )
    if not proxy.is_settled:
        yield (
            f"{proxy.label}: the running average of the weights is still drifting; more steps "
            "would change the result."
        )
    if len(proxy.runs) == 1:
        yield f"{proxy.label}: one seed, so the spread of its weights is unknown."


def _comparison_warnings(comparison: Comparison) -> Iterator[str]:
    missing = comparison.num_seen - len(comparison.arms)
    if missing:
        yield f"{comparison.title}: {_many(missing, 'arm')} not measured yet, so left out."
    if not comparison.arms:
        return
    if comparison.uniform is None:
        yield f"{comparison.title}: no uniform baseline at these settings."
    if not comparison.first.targets and all(arm.kind != "natural" for arm in comparison.arms):
        yield f"{comparison.title}: no natural baseline at these settings."
    single = [arm.label for arm in comparison.arms if len(arm.losses) == 1]
    if single:
        yield (
            f"{comparison.title}: one seed of {_and(single)}, so small differences may be chance."
        )
    measured = [run.measured_blocks() for arm in comparison.arms for run in arm.runs]
    if any(blocks != measured[0] for blocks in measured):
        yield f"{comparison.title}: the arms were measured on different numbers of held-out blocks."


def _run_warnings(run: Run) -> Iterator[str]:
    if run.last_step < run.steps:
        yield (
            f"{run.name}: not complete, its records end at step {run.last_step} of {run.steps}. "
            "The command that began it resumes it."
        )
    if run.skipped:
        yield (
            f"{run.name}: {_many(run.skipped, 'logged step')} skipped for a gradient that was "
            "not finite."
        )
    losses = run.losses() or {}
    diverged = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if diverged:
        yield f"{run.name}: diverged; the held-out loss of {_and(diverged)} is not finite."


def _epoch_warnings(mixture: "Mixture", budget: int) -> Iterator[str]:
    epochs = mixture.epochs(budget)
    often = [name for name, count in epochs.items() if count > MAX_EPOCHS]
    if often and mixture.is_learned:
        told = _and(f"{name} {epochs[name]:.1f} times" for name in often)
        yield (
            f"{mixture.label}: {_count(budget)} tokens at these weights repeat {told}; beyond "
            f"{MAX_EPOCHS:.0f} epochs text is worth less. Use smoothing, or get more of it."
        )


# The weights, however they came about.


@dataclass(frozen=True)
class Mixture:
    """Domain weights together with the text there is."""

    label: str
    about: str
    weights: Mapping[str, Stat]
    train_tokens: Mapping[str, int]
    targets: tuple[str, ...]
    is_learned: bool

    def epochs(self, budget: int) -> dict[str, float]:
        """How often `budget` tokens at these weights go through each domain."""
        return {
            name: stat.mean * budget / self.train_tokens[name]
            if self.train_tokens[name]
            else math.inf
            for name, stat in self.weights.items()
        }


def _mixtures(study: Study) -> list[Mixture]:
    """Every set of weights: of each proxy, and those given to base runs from elsewhere."""
    found = [
        Mixture(
            proxy.label,
            f"learned for {proxy.target}",
            proxy.weights,
            proxy.first.train_tokens,
            proxy.first.targets,
            is_learned=True,
        )
        for proxy in study.proxies
        if proxy.weights
    ]
    for run, arm in _given(study):
        assert run.weights is not None
        weights = {name: Stat(w) for name, w in records.weights_by_name(run.weights).items()}
        found.append(
            Mixture(arm.label, arm.about, weights, run.train_tokens, run.targets, is_learned=True)
        )
    return found


def _given(study: Study) -> Iterator[tuple[Run, Arm]]:
    """The first run of every arm whose weights no proxy of this report learned."""
    for comparison in study.comparisons:
        for arm in comparison.arms:
            if arm.kind == "given" and arm.runs[0].weights is not None:
                yield arm.runs[0], arm


def _baselines(run: Run) -> list[Mixture]:
    """Uniform and natural weights on the domains of a run."""
    tokens = run.train_tokens
    total = sum(tokens.values())
    uniform = {name: Stat(1 / len(tokens)) for name in tokens}
    natural = {name: Stat(count / total) for name, count in tokens.items()} if total else uniform
    return [
        Mixture("uniform", "baseline", uniform, tokens, run.targets, is_learned=False),
        Mixture("natural", "by tokens", natural, tokens, run.targets, is_learned=False),
    ]


def _budget(study: Study, token_budget: int | None) -> int:
    """Asked for; else that of the longest base run; else that of the longest proxy."""
    if token_budget is not None:
        return token_budget
    return max(run.tokens for run in study.bases or study.runs)


# The tables.


class Cell(NamedTuple):
    """What stands in a place of a table, and whether it is to be seen."""

    text: str
    is_strong: bool = False
    is_warning: bool = False


class Row(NamedTuple):
    """A line of a table."""

    label: str
    cells: list[Cell]
    is_total: bool = False


class Table(NamedTuple):
    """A table before it is a page's or a terminal's."""

    title: str
    note: str
    corner: str
    columns: list[tuple[str, str]]
    """(label, what it is) of each column."""
    rows: list[Row]


def _perplexity_table(comparison: Comparison) -> Table:
    arms, names = comparison.arms, comparison.domains
    rows = [_perplexity_row(f"{name} (target)", [name], comparison) for name in comparison.targets]
    if len(comparison.targets) > 1:
        rows.append(_perplexity_row("average of targets", comparison.targets, comparison))
    rows = [row._replace(is_total=True) for row in rows]
    rows += [_perplexity_row(name, [name], comparison) for name in names]
    average = "average, training domains" if comparison.targets else "average"
    rows.append(_perplexity_row(average, names, comparison)._replace(is_total=True))
    rows.append(Row("worst case", [_worst_cell(arm, comparison) for arm in arms], True))
    better = [Cell(_better_count(arm, comparison)) for arm in arms]
    rows.append(Row("better than uniform", better, True))
    return Table(
        title=f"Perplexity per domain: {comparison.title.lower()}",
        note=(
            f"Held-out text; {comparison.settings}. Bold: better than uniform. The average is the "
            f"exponential of the mean loss.{_error_note(arm.losses for arm in arms)}"
        ),
        corner="domain",
        columns=[(arm.label, _column_about(arm.about, len(arm.losses))) for arm in arms],
        rows=rows,
    )


def _perplexity_row(label: str, names: Sequence[str], comparison: Comparison) -> Row:
    uniform = comparison.uniform
    cells = [
        Cell(
            _perplexity_stat(arm.perplexity(names)),
            uniform is not None and _is_better(arm, uniform, names),
        )
        for arm in comparison.arms
    ]
    return Row(label, cells)


def _worst_cell(arm: Arm, comparison: Comparison) -> Cell:
    _, own = arm.worst(comparison.domains)
    uniform = comparison.uniform
    is_better = uniform is not None and own.mean < uniform.worst(comparison.domains)[1].mean
    return Cell(_perplexity_stat(own), is_better)


def _better_count(arm: Arm, comparison: Comparison) -> str:
    uniform = comparison.uniform
    if uniform is None or arm is uniform:
        return "–"
    return f"{_num_better(arm, uniform, comparison)} of {len(comparison.domains)}"


def _column_about(about: str, num_seeds: int) -> str:
    return about if num_seeds == 1 else f"{about}, {num_seeds} seeds"


def _error_note(groups: Iterable[Sequence[object]]) -> str:
    return " ±: standard error over seeds." if any(len(group) > 1 for group in groups) else ""


def _weights_table(study: Study) -> Table:
    """Weights of all proxies side by side, as tab:ood-dw; the paper's where the domains match."""
    mixtures = _mixtures(study)
    if study.proxies and _is_for_all(study.proxies):
        mixtures = [_baselines(study.proxies[0].first)[1], *mixtures]
    paper = [column for mixture in mixtures if (column := _paper_mixture(mixture, study))]
    mixtures += paper
    names = [name for name in study.colors if any(name in each.weights for each in mixtures)]
    names += [name for name in study.colors if any(name in each.targets for each in mixtures)]
    rows = [
        Row(name, [_weight_cell(name, mixture) for mixture in mixtures])
        for name in dict.fromkeys(names)
    ]
    uniform = [Cell(f"{1 / len(mixture.weights):.3f}") for mixture in mixtures]
    effective = [
        Cell(f"{_effective(mixture.weights):.1f} of {len(mixture.weights)}") for mixture in mixtures
    ]
    rows += [Row("uniform would be", uniform, True), Row("effective domains", effective, True)]
    return Table(
        title="Domain weights",
        note=(
            "Averages over the proxies' steps. Bold: above uniform. Effective domains: exp of the "
            f"entropy of the weights.{_error_note(proxy.runs for proxy in study.proxies)}"
            f"{_PAPER_NOTE if paper else ''}"
        ),
        corner="domain",
        columns=[(mixture.label, mixture.about) for mixture in mixtures],
        rows=rows,
    )


def _is_for_all(proxies: Sequence[Proxy]) -> bool:
    """Whether the natural weights of the first proxy's domains are worth a column for all."""
    tokens = proxies[0].first.train_tokens
    return all(proxy.first.train_tokens.items() <= tokens.items() for proxy in proxies)


def _weight_cell(name: str, mixture: Mixture) -> Cell:
    if name in mixture.targets:
        return Cell("target")
    if name not in mixture.weights:
        return Cell("–")
    stat = mixture.weights[name]
    return Cell(_weight(stat), stat.mean > 1 / len(mixture.weights))


def _epoch_tables(study: Study, token_budget: int | None) -> list[Table]:
    """One for every set of domains that weights were made for."""
    budget = _budget(study, token_budget)
    runs: dict[tuple[tuple[str, int], ...], Run] = {}
    for run in sorted(study.runs, key=lambda run: bool(run.targets)):
        runs.setdefault(tuple(run.train_tokens.items()), run)
    tables = []
    for run in runs.values():
        mixtures = [
            mixture for mixture in _mixtures(study) if mixture.train_tokens == run.train_tokens
        ]
        tables.append(_epoch_table(run, [*_baselines(run), *mixtures], budget))
    return tables


def _epoch_table(run: Run, mixtures: Sequence[Mixture], budget: int) -> Table:
    epochs = [mixture.epochs(budget) for mixture in mixtures]
    rows = [
        Row(
            name,
            [
                Cell(_count(tokens)),
                *(Cell(f"{each[name]:.2f}", is_warning=each[name] > MAX_EPOCHS) for each in epochs),
            ],
        )
        for name, tokens in run.train_tokens.items()
    ]
    without = f", without {_and(run.targets)}" if run.targets else ""
    return Table(
        title=f"Implied epochs{without}",
        note=(
            f"How often {_count(budget)} tokens at these weights go through each domain. "
            f"Marked: above {MAX_EPOCHS:.0f}, where repeated text is worth less than fresh text."
        ),
        corner="domain",
        columns=[("tokens", "in all"), *((mixture.label, mixture.about) for mixture in mixtures)],
        rows=rows,
    )


def _runs_table(study: Study) -> Table:
    columns = ("stage", "what", "model", "steps", "tokens", "peak lr", "seed", "s per step", "date")
    rows = [
        Row(
            run.name,
            [
                Cell(run.stage),
                Cell(_what(run)),
                Cell(str(run.config["model"]["model"])),
                Cell(str(run.steps)),
                Cell(_count(run.tokens)),
                Cell(f"{run.config['training']['learning_rate']:g}"),
                Cell(str(run.seed)),
                Cell(_or_dash(run.seconds_per_step, ".2g")),
                Cell(run.created[:10]),
            ],
        )
        for run in study.runs
    ]
    return Table("Runs", "", "run", [(column, "") for column in columns], rows)


def _what(run: Run) -> str:
    if run.stage == "base":
        weights = Path(str(run.config["weights"]))
        return f"weights {weights.parent.name if weights.name == records.WEIGHTS else weights.name}"
    return f"target {' '.join(run.config['target'])}, mu {run.config['mu']:g}"


def _corpus_table(study: Study) -> Table:
    """What there is of every domain; of a domain of several corpora, what the first run saw."""
    entries: dict[str, Json] = {}
    for run in study.runs:
        for name, entry in {**run.corpus["domains"], **run.corpus["targets"]}.items():
            entries.setdefault(name, entry)
    keys = ("train_tokens", "documents", "train_blocks", "validation_blocks")
    rows = [
        Row(name, [Cell(f"{entry[key]:,}".replace(",", " ")) for key in keys])
        for name, entry in entries.items()
    ]
    block_size = study.runs[0].corpus["block_size"]
    columns = ["training tokens", "documents", "training blocks", "held-out blocks"]
    note = f"Blocks of {block_size} tokens; a vocabulary of {study.runs[0].corpus['vocab_size']}."
    return Table("Corpus", note, "domain", [(column, "") for column in columns], rows)


def _plain_table(table: Table) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    header = [table.corner, *(label for label, _ in table.columns)]
    body = [
        [row.label, *(f"{cell.text} {'*' if cell.is_strong else ' '}" for cell in row.cells)]
        for row in table.rows
    ]
    # Numbers end in a mark or its place; so do the headers.
    header = [header[0], *(f"{label}  " for label in header[1:])]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [_aligned(header, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    lines += [_aligned(line, widths) for line in body]
    return "\n".join(line.rstrip() for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        text.ljust(width) if i == 0 else text.rjust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join((first, *others))


def _wrap(text: str) -> str:
    return textwrap.fill(text, 88, break_long_words=False, break_on_hyphens=False)


def _ascii(text: str) -> str:
    """A terminal may know no more than ASCII; names stay as they are."""
    return (
        text.replace("−", "-")
        .replace("±", "+/-")
        .replace("–", "-")
        .replace("×", "x")
        .replace("\N{NO-BREAK SPACE}", " ")
    )


# What the paper reports for the same domains.

_SLIMPAJAMA = ("arxiv", "book", "c4", "commoncrawl", "github", "stackexchange", "wikipedia")
_WIKI40B = ("en", "de", "fr", "es", "ru")

# tab:dw; then tab:ood-dw, its columns by target; then tab:ood-wiki-dw, its rows by target. As
# printed: the column for arxiv sums to 0.910.
_PAPER_WEIGHTS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    UNIVERSAL: (_SLIMPAJAMA, (0.088, 0.045, 0.269, 0.214, 0.070, 0.166, 0.148)),
    "arxiv": (_SLIMPAJAMA, (0, 0.010, 0.125, 0.142, 0.161, 0.366, 0.106)),
    "book": (_SLIMPAJAMA, (0.063, 0, 0.341, 0.345, 0.055, 0.081, 0.113)),
    "c4": (_SLIMPAJAMA, (0.035, 0.117, 0, 0.721, 0.029, 0.063, 0.035)),
    "commoncrawl": (_SLIMPAJAMA, (0.045, 0.124, 0.674, 0, 0.035, 0.059, 0.063)),
    "github": (_SLIMPAJAMA, (0.084, 0.051, 0.058, 0.059, 0, 0.691, 0.057)),
    "stackexchange": (_SLIMPAJAMA, (0.095, 0.048, 0.099, 0.076, 0.637, 0, 0.045)),
    "wikipedia": (_SLIMPAJAMA, (0.091, 0.149, 0.201, 0.251, 0.103, 0.204, 0)),
    "ca": (_WIKI40B, (0.073, 0.043, 0.344, 0.516, 0.024)),
    "nl": (_WIKI40B, (0.259, 0.267, 0.176, 0.203, 0.095)),
}
_PAPER_NOTE = (
    " The paper's weights are those of an 82M proxy after 10k steps on the full corpora: compare "
    "the order of the domains, not the digits."
)
# tab:universal_ppl.
_PAPER_VERDICT = (
    "The paper, with 684M models on the full SlimPajama: better on 5 of 7 domains than uniform; "
    "average perplexity 15.81 against 16.53 (−4.4 %)."
)


def _canonical(name: str) -> str:
    """RedPajamaCommonCrawl, cc and common_crawl are one domain."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("redpajama")
    return {"cc": "commoncrawl", "books": "book", "wiki": "wikipedia"}.get(plain, plain)


def _is_slimpajama(names: Iterable[str]) -> bool:
    return {_canonical(name) for name in names} == set(_SLIMPAJAMA)


def _paper_mixture(mixture: Mixture, study: Study) -> Mixture | None:
    """The paper's weights for the same domains and target, as a further column."""
    proxy = next((proxy for proxy in study.proxies if proxy.label == mixture.label), None)
    if proxy is None or len(proxy.first.config["target"]) != 1:
        return None
    target = _canonical(str(proxy.first.config["target"][0]))
    domains, values = _PAPER_WEIGHTS.get(target, ((), ()))
    paper = dict(zip(domains, values, strict=True))
    paper.pop(target, None)
    if {_canonical(name) for name in mixture.weights} != set(paper):
        return None
    weights = {name: Stat(paper[_canonical(name)]) for name in mixture.weights}
    about = "universal" if target == UNIVERSAL else f"for {target}"
    return replace(mixture, label="paper", about=about, weights=weights, is_learned=False)


# Numbers as text.


def _float(value: Any) -> float:
    """JSON has no word for what is not finite; records hold null."""
    return math.nan if value is None else float(value)


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: _float(value) for name, value in values.items()}


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _or_inf(value: float) -> float:
    """What is no number is worse than any."""
    return math.inf if math.isnan(value) else value


def _change(own: float, other: float) -> float:
    return own / other - 1 if other > 0 else math.nan


def _perplexity(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 10_000 else f"{value:.2e}"


def _perplexity_stat(stat: Stat) -> str:
    if stat.error is None or not math.isfinite(stat.mean):
        return _perplexity(stat.mean)
    return f"{_perplexity(stat.mean)} ± {stat.error:.2g}"


def _weight(stat: Stat) -> str:
    return f"{stat.mean:.3f}" if stat.error is None else f"{stat.mean:.3f} ± {stat.error:.2g}"


def _percent(change: float) -> str:
    if not math.isfinite(change):
        return "not finite"
    return f"{100 * change:+.1f}".replace("-", "−") + "\N{NO-BREAK SPACE}%"


def _count(value: float) -> str:
    """1234567 -> 1.23 M."""
    for unit, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}\N{NO-BREAK SPACE}{word}"
    return f"{value:.0f}"


def _compact(value: float) -> str:
    """Three digits or so: 0.043, 0.98, 8.3, 120, 1.2e-05."""
    size = abs(value)
    form = (
        ".0f"
        if size >= 100 or size == 0
        else ".1f"
        if size >= 1
        else ".2f"
        if size >= 0.1
        else ".2g"
    )
    return format(value, form).replace("-", "−")


def _or_dash(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _and(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _nan_mean(values: Floats) -> Floats:
    """Mean over the first axis of what is a number; nan where nothing is."""
    kept = np.isfinite(values)
    count = kept.sum(0)
    mean: Floats = np.where(kept, values, 0.0).sum(0) / np.where(count > 0, count, math.nan)
    return mean


# The figures. Colours are written as hex and, within the page, become the page's own variables.

# Eight hues whose least distance, in OKLab, is 12 under normal sight, protanopia, deuteranopia and
# tritanopia; each has a lighter twin for dark pages in report.css. A ninth domain is dashed.
PALETTE = (
    "#033fb2",
    "#b66c18",
    "#66b79c",
    "#672a5c",
    "#1e8691",
    "#e49e22",
    "#a870f2",
    "#9e170c",
)
_DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
_INK, _MUTED, _GRID, _PAGE = "#1b1f24", "#5c6570", "#dfe3e8", "#ffffff"
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _PAGE: "var(--page)",
    **{color: f"var(--domain-{place})" for place, color in enumerate(PALETTE)},
}
# Widths such that a letter is nine to fourteen pixels high from a phone to a desktop.
_WIDTH = 4.6
_PNG_DPI = 200
_STYLE: Any = {
    # Text stays text: it can be searched, and takes the page's colour.
    "svg.fonttype": "none",
    "svg.hashsalt": "doge-fast",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    # A domain may be called $x$.
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "figure.facecolor": _PAGE,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}
_LONGEST_NAME = 20


class Drawing(NamedTuple):
    """A figure as files hold it, and the words around it."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


class Section(NamedTuple):
    """Figures that belong together."""

    title: str
    text: str
    drawings: list[Drawing]


def _draw(study: Study) -> list[Section]:
    with _style():
        sections = [_base_section(study)]
        drawn = [proxy for proxy in study.proxies if proxy.has_steps]
        sections += [
            _proxy_section(proxy, study, prefix)
            for proxy, prefix in zip(drawn, _prefixes(drawn), strict=True)
        ]
    return [section for section in sections if section.drawings]


def _told(comparisons: Iterable[Comparison]) -> Iterator[tuple[int, Comparison]]:
    """Comparisons in which something stands against uniform, numbered."""
    for number, comparison in enumerate(comparisons, start=1):
        if comparison.domains and comparison.uniform and comparison.rivals:
            yield number, comparison


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script that the layout font lacks: the page's own fonts will show it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _base_section(study: Study) -> Section:
    drawings = [
        drawing
        for number, comparison in _told(study.comparisons)
        for drawing in _comparison_drawings(comparison, f"comparison-{number}")
    ]
    return Section("Base models", "Against uniform weights, at equal tokens.", drawings)


def _comparison_drawings(comparison: Comparison, prefix: str) -> Iterator[Drawing]:
    yield _drawing(
        f"{prefix}-change",
        f"Perplexity against uniform: {comparison.title.lower()}",
        "Change of held-out perplexity. Left of the line is better than uniform. "
        f"{comparison.settings.capitalize()}.",
        _change_figure(comparison),
    )
    curves = _held_out_curves(comparison)
    if curves:
        what = _and(comparison.targets) if comparison.targets else "the mean of all domains"
        yield _drawing(
            f"{prefix}-held-out",
            f"Held-out loss during training: {comparison.title.lower()}",
            f"Loss on {what}, one line an arm (first seed).",
            _curves_figure(curves),
        )


def _prefixes(proxies: Sequence[Proxy]) -> list[str]:
    """Names for files and ids, of letters, digits and hyphens, no two alike."""
    slugs = [re.sub(r"[^A-Za-z0-9]+", "-", proxy.label).strip("-") for proxy in proxies]
    return [
        f"proxy-{slug}" if slug and slugs.count(slug) == 1 else f"proxy-{number}-{slug or 'run'}"
        for number, slug in enumerate(slugs, start=1)
    ]


def _proxy_section(proxy: Proxy, study: Study, prefix: str) -> Section:
    seeds = "" if len(proxy.runs) == 1 else f" Mean of {len(proxy.runs)} seeds"
    band = f"{seeds}; bands: ± one standard error." if seeds else ""
    steps = len(proxy.series("gain", proxy.domains)[0])
    chunk = _chunk_size(steps, _NOISY_POINTS)
    binned = f" Each point is the mean of {chunk} logged steps." if chunk > 1 else ""
    drawings = [
        _drawing(
            f"{prefix}-weights-final",
            "Learned weights",
            "Average domain weights, the result, against uniform weights and the natural ones, "
            f"which follow the tokens there are.{band.replace('bands', 'bars')}",
            _final_figure(proxy, study.colors),
        ),
        _drawing(
            f"{prefix}-weights-average",
            "Running average of the weights",
            f"Mean of the domain weights over all steps so far.{band}",
            _weights_figure(proxy, "alpha_mean", study.colors),
        ),
        _drawing(
            f"{prefix}-weights",
            "Weights at each step",
            f"The weights that the model was trained with, not averaged.{band}",
            _weights_figure(proxy, "alpha", study.colors),
        ),
        _drawing(
            f"{prefix}-drift",
            "Has the average settled?",
            f"{_drift_sentence(proxy)} The line shows this change up to every step, as the sum "
            f"of absolute differences; below {MAX_DRIFT:g} it counts as settled.",
            _drift_figure(proxy),
        ),
        _drawing(
            f"{prefix}-affinity",
            "How alike the domains' gradients are",
            "Cosine between the gradients of two domains, mean over the steps."
            f"{_affinity_note(proxy)}",
            _affinity_figure(proxy),
        ),
        _drawing(
            f"{prefix}-gain",
            "What moves the weights",
            f"Generalization estimation W, mean over the steps weighted by learning rate. "
            f"{_parts_note(proxy)}",
            _parts_figure(proxy, study.colors),
        ),
        _drawing(
            f"{prefix}-loss",
            "Training loss of each domain",
            f"Loss of the proxy on the batches of every domain.{binned}",
            _loss_figure(proxy, study.colors),
        ),
    ]
    return Section(f"{proxy.label}: weights for {proxy.target}", _settings(proxy), drawings)


def _settings(proxy: Proxy) -> str:
    config = proxy.first.config
    cut = config["domain_max_grad_norm"]
    return (
        f"{config['model']['model']} model, {proxy.first.steps} steps of "
        f"{_many(config['sequences_per_domain'], 'block')} of every domain, mu {config['mu']:g}, "
        f"score as in the {config['score']}{'' if config['score'] == 'paper' else ' code'}"
        f"{'' if cut is None else f', domain gradients cut to norm {cut:g}'}, "
        f"{_many(len(proxy.runs), 'seed')}."
    )


def _drawing(name: str, title: str, caption: str, figure: Figure) -> Drawing:
    """Render a figure, laid out once for both formats."""
    svg, png = io.StringIO(), io.BytesIO()
    # No date: the same records give the same bytes.
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue())


def _affinity_note(proxy: Proxy) -> str:
    targets = [name for name in proxy.rows if name not in proxy.domains]
    return f" {_and(targets)}: measured only, not trained on." if targets else ""


def _parts_note(proxy: Proxy) -> str:
    parts = (
        "It is the influence on the target alone, for no training domain is a target."
        if all(name not in (UNIVERSAL,) for name in proxy.first.config["target"])
        else "It is the domain's influence on the others plus its own difficulty, the squared "
        "norm of its gradient."
    )
    if proxy.first.config["score"] == "published":
        parts += (
            " The weights moved with the published code's score: W over the mean gradient norm, "
            "cut to [0, 5]; the parts are as before that."
        )
    return parts


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _height(num_labels: int) -> float:
    """Room for a label a line."""
    return max(2.9, 0.9 + 0.19 * num_labels)


def _color(name: str, colors: Mapping[str, int]) -> str:
    return PALETTE[colors[name] % len(PALETTE)]


def _dash(name: str, colors: Mapping[str, int]) -> Any:
    return _DASHES[colors[name] // len(PALETTE) % len(_DASHES)]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


_SMOOTH_POINTS, _NOISY_POINTS = 400, 100


def _chunk_size(num_steps: int, points: int) -> int:
    return max(1, -(-num_steps // points))


def _thinned(steps_T: Floats, values_TK: Floats, points: int) -> tuple[Floats, Floats]:
    """Every n-th step, the first and the last among them: what a line can show."""
    size = _chunk_size(len(steps_T), points)
    kept = np.unique([*range(0, len(steps_T), size), len(steps_T) - 1])
    return steps_T[kept], values_TK[kept]


def _binned(steps_T: Floats, values_TK: Floats, points: int) -> tuple[Floats, Floats]:
    """Means over runs of steps, for what is noisy."""
    size = _chunk_size(len(steps_T), points)
    starts = range(0, len(steps_T), size)
    steps = np.array([steps_T[start : start + size].mean() for start in starts])
    return steps, np.stack([_nan_mean(values_TK[start : start + size]) for start in starts])


def _plot_lines(
    axes: Axes,
    steps_T: Floats,
    values_TK: Floats,
    names: Sequence[str],
    colors: Mapping[str, int],
    *,
    width: float = 1.6,
) -> None:
    for j, name in enumerate(names):
        axes.plot(
            steps_T,
            values_TK[:, j],
            color=_color(name, colors),
            linestyle=_dash(name, colors),
            linewidth=width,
        )


def _ticks(*, integer: bool = False) -> MaxNLocator:
    return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer)


def _finish_steps(axes: Axes, ylabel: str, last_step: float) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(axis="y")
    axes.set_xlim(0, max(last_step, 1))
    axes.xaxis.set_major_locator(_ticks(integer=True))
    axes.yaxis.set_major_locator(_ticks())


def _label_ends(
    figure: Figure,
    axes: Axes,
    ends: Mapping[str, float],
    styles: Mapping[str, tuple[str, Any]],
) -> None:
    """Names at the right end of their lines, moved apart just enough to be read."""
    low, high = axes.get_ylim()
    finite = {name: value for name, value in ends.items() if math.isfinite(value)}
    names = sorted(finite, key=lambda name: finite[name])
    wanted = np.array([(finite[name] - low) / (high - low) for name in names])
    height = figure.get_figheight() - 0.75
    places = _spread(wanted, gap=0.175 / height)
    for name, end, place in zip(names, wanted, places, strict=True):
        color, dash = styles[name]
        axes.plot(
            [1.0, 1.025, 1.05],
            [end, place, place],
            color=color,
            linestyle=dash,
            linewidth=1.2,
            transform=axes.transAxes,
            clip_on=False,
        )
        axes.text(1.065, place, _short(name), va="center", transform=axes.transAxes, fontsize=9)


def _spread(wanted: Floats, *, gap: float) -> Floats:
    """The places nearest to `wanted`, in the least squares sense, that are `gap` apart.

    p_i = q_i + i * gap turns "gap apart" into "q does not fall": isotonic regression, by pooling
    neighbours that violate it.
    """
    pools: list[tuple[float, int]] = []
    for i, place in enumerate(wanted):
        total, count = float(place) - i * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    level = [total / count for total, count in pools for _ in range(count)]
    offsets = gap * np.arange(len(wanted))
    # Within the axes where they fit: the bounded problem's answer is the free one, clipped.
    room = max(0.0, 1.0 - gap * (len(wanted) - 1))
    places: Floats = np.clip(np.array(level), 0.0, room) + offsets
    return places


def _domain_styles(names: Iterable[str], colors: Mapping[str, int]) -> dict[str, tuple[str, Any]]:
    return {name: (_color(name, colors), _dash(name, colors)) for name in names}


def _weights_figure(proxy: Proxy, key: str, colors: Mapping[str, int]) -> Figure:
    names = proxy.domains
    steps_T, values_STK = proxy.series(key, names)
    mean_TK = _nan_mean(values_STK)
    figure, axes = _canvas(_height(len(names)))
    if len(values_STK) > 1:
        error_TK = values_STK.std(axis=0, ddof=1) / math.sqrt(len(values_STK))
        steps, low = _thinned(steps_T, mean_TK - error_TK, _SMOOTH_POINTS)
        _, high = _thinned(steps_T, mean_TK + error_TK, _SMOOTH_POINTS)
        for j, name in enumerate(names):
            axes.fill_between(
                steps, low[:, j], high[:, j], color=_color(name, colors), alpha=0.2, linewidth=0
            )
    width = 1.6 if key == "alpha_mean" else 1.0
    _plot_lines(axes, *_thinned(steps_T, mean_TK, _SMOOTH_POINTS), names, colors, width=width)
    axes.set_ylim(0, 1.06 * max(float(np.nanmax(mean_TK)), 1e-3))
    _finish_steps(axes, "domain weight", steps_T[-1])
    _mark_uniform(axes, len(names))
    _label_ends(
        figure, axes, dict(zip(names, mean_TK[-1], strict=True)), _domain_styles(names, colors)
    )
    return figure


def _mark_uniform(axes: Axes, num_domains: int) -> None:
    axes.axhline(1 / num_domains, color=_MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)


def _final_figure(proxy: Proxy, colors: Mapping[str, int]) -> Figure:
    """Bars, the heaviest domain on top."""
    natural = _baselines(proxy.first)[1].weights
    names = sorted(proxy.domains, key=lambda name: proxy.weights[name].mean)
    places = np.arange(len(names))
    figure, axes = _canvas(max(2.2, 0.95 + 0.27 * len(names)))
    widths = [proxy.weights[name].mean for name in names]
    bars = axes.barh(places, widths, height=0.62, color=[_color(name, colors) for name in names])
    errors = [proxy.weights[name].error or 0.0 for name in names]
    if any(errors):
        axes.errorbar(widths, places, xerr=errors, fmt="none", ecolor=_INK, elinewidth=1.1)
    axes.axvline(1 / len(names), color=_INK, linewidth=1.0, linestyle=(0, (2, 2)), label="uniform")
    axes.plot(
        [natural[name].mean for name in names],
        places,
        marker="D",
        markersize=5,
        linestyle="none",
        markerfacecolor=_PAGE,
        markeredgecolor=_INK,
        markeredgewidth=1.1,
        label="natural",
        zorder=4,
    )
    reach = max(*widths, *(natural[name].mean for name in names), 1 / len(names))
    axes.set_xlim(0, 1.02 * reach)
    for bar, name in zip(bars, names, strict=True):
        axes.text(
            1.02,
            bar.get_y() + bar.get_height() / 2,
            f"{proxy.weights[name].mean:.3f}",
            transform=axes.get_yaxis_transform(),
            va="center",
        )
    _name_places(axes, names)
    axes.set_xlabel("domain weight")
    axes.xaxis.set_major_locator(_ticks())
    figure.legend(loc="outside upper right", ncols=2, handlelength=1.6)
    return figure


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=_INK)
    axes.set_ylim(-0.6, len(names) - 0.4)


def _drift_figure(proxy: Proxy) -> Figure:
    steps_T, drift_T = proxy.drift()
    figure, axes = _canvas(2.9)
    # A mean over a handful of steps says nothing, and would set the scale.
    shown = steps_T >= _DRIFT_SHOWN_FROM * steps_T[-1]
    thin_T, thin_T1 = _thinned(steps_T[shown], drift_T[shown, None], _SMOOTH_POINTS)
    axes.plot(thin_T, thin_T1, color=_INK)
    axes.axhline(MAX_DRIFT, color=_MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(0, 1.15 * max(float(drift_T[shown].max()), MAX_DRIFT))
    _finish_steps(axes, "change over the last fifth", steps_T[-1])
    ends = {f"now {drift_T[-1]:.3f}": float(drift_T[-1]), f"settled {MAX_DRIFT:g}": MAX_DRIFT}
    plain = (0, (2, 2))
    _label_ends(figure, axes, ends, dict(zip(ends, ((_INK, "-"), (_MUTED, plain)), strict=True)))
    return figure


# More cells than these are too small for their numbers.
_MOST_NUMBERS = 12


def _affinity_figure(proxy: Proxy) -> Figure:
    """Heat map; the diagonal is one by definition and would only flatten the rest."""
    cosine_RR, names = proxy.cosine(), [_short(name) for name in proxy.rows]
    np.fill_diagonal(cosine_RR, math.nan)
    reach = _reach(cosine_RR)
    is_signed = bool(np.nanmin(cosine_RR, initial=0.0) < -0.05 * reach)
    is_small = len(names) <= _MOST_NUMBERS
    figure, axes = _canvas(max(3.4, 1.5 + (0.3 if is_small else 0.19) * len(names)))
    cells = axes.pcolormesh(
        cosine_RR,
        cmap="PuOr_r" if is_signed else "Blues",
        vmin=-reach if is_signed else 0.0,
        vmax=reach,
        edgecolors=_PAGE,
        linewidth=1.5 if is_small else 0.3,
    )
    centres = np.arange(len(names)) + 0.5
    axes.invert_yaxis()
    turned: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        if is_small
        else {"rotation": 90, "fontsize": 7.5}
    )
    axes.set_xticks(centres, names, **turned)
    axes.set_yticks(centres, names)
    axes.tick_params(length=0, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    if is_small:
        _write_cells(axes, cosine_RR, cells)
    else:
        bar = figure.colorbar(cells, ax=axes, label="cosine", location="top", aspect=40)
        bar.outline.set_visible(False)
    return figure


def _reach(cosine_RR: Floats) -> float:
    """Upper end of the colours: the largest entry, up to the next tenth."""
    largest = float(np.nanmax(np.abs(cosine_RR), initial=0.0))
    return max(0.1, math.ceil(largest * 10) / 10)


def _write_cells(axes: Axes, cosine_RR: Floats, cells: QuadMesh) -> None:
    """The number in every cell, light on dark cells and dark on light ones."""
    colors = cells.to_rgba(np.nan_to_num(cosine_RR))[..., :3]
    luminance = colors @ np.array([0.299, 0.587, 0.114])
    for (i, j), value in np.ndenumerate(cosine_RR):
        if i == j:
            axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center", color=_MUTED)
        elif math.isfinite(value):
            ink = "#fefefe" if luminance[i, j] < 0.55 else "#111111"
            # Adding zero takes the sign from minus zero.
            text = f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=ink, fontsize=8.5)


def _parts_figure(proxy: Proxy, colors: Mapping[str, int]) -> Figure:
    gain_K, influence_K, difficulty_K = (
        proxy.mean_over_steps(key) for key in ("gain", "influence", "difficulty")
    )
    names = proxy.domains
    has_difficulty = bool(np.nanmax(np.abs(difficulty_K), initial=0.0) > 0)
    # W is their sum only where no other score replaced it.
    is_sum = proxy.first.config["score"] == "paper"
    order = np.argsort(np.nan_to_num(influence_K + difficulty_K))
    places = np.arange(len(names))
    figure, axes = _canvas(max(2.2, 0.95 + (0.36 if has_difficulty else 0.27) * len(names)))
    shades = [_color(names[j], colors) for j in order]
    thick, shift = (0.36, 0.19) if has_difficulty else (0.62, 0.0)
    axes.barh(places + shift, influence_K[order], height=thick, color=shades)
    if has_difficulty:
        axes.barh(places - shift, difficulty_K[order], height=thick, color=shades, alpha=0.45)
    axes.axvline(0, color=_MUTED, linewidth=0.8)
    for place, j in zip(places, order, strict=True):
        if is_sum and math.isfinite(gain_K[j]):
            text = _compact(float(gain_K[j]))
            axes.text(1.02, float(place), text, transform=axes.get_yaxis_transform(), va="center")
    if is_sum:
        axes.text(1.02, 1.0, "W", transform=axes.transAxes, va="bottom", color=_MUTED)
    _name_places(axes, [names[j] for j in order])
    axes.set_xlabel("loss decrease per unit of learning rate")
    axes.xaxis.set_major_locator(_ticks())
    if has_difficulty:
        _parts_legend(figure)
    return figure


def _parts_legend(figure: Figure) -> None:
    """In grey, for the shade tells the part and the colour the domain."""
    handles = [Patch(color=_MUTED, alpha=alpha) for alpha in (1.0, 0.45)]
    figure.legend(
        handles,
        ["influence on the others", "own difficulty"],
        loc="outside upper right",
        ncols=2,
        handlelength=1.2,
    )


def _loss_figure(proxy: Proxy, colors: Mapping[str, int]) -> Figure:
    names = proxy.rows
    steps_T, values_STR = proxy.series("loss", names)
    steps, losses = _binned(steps_T, _nan_mean(values_STR), _NOISY_POINTS)
    figure, axes = _canvas(_height(len(names)))
    _plot_lines(axes, steps, losses, names, colors)
    _finish_steps(axes, "loss (nats per token)", steps_T[-1])
    _label_ends(
        figure, axes, dict(zip(names, losses[-1], strict=True)), _domain_styles(names, colors)
    )
    return figure


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _change_figure(comparison: Comparison) -> Figure:
    """A mark an arm on every domain's line: change of perplexity against uniform."""
    uniform = comparison.uniform
    assert uniform is not None
    rows = [*comparison.targets, *comparison.domains]
    groups = [("average", comparison.domains), *((name, (name,)) for name in reversed(rows))]
    figure, axes = _canvas(max(2.6, 1.2 + 0.27 * len(groups)))
    for i, arm in enumerate(comparison.rivals):
        changes = [
            _change(arm.perplexity(names).mean, uniform.perplexity(names).mean)
            for _, names in groups
        ]
        axes.plot(
            changes,
            range(len(groups)),
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="none",
            markersize=7,
            markerfacecolor=_PAGE if arm.kind == "natural" else _arm_color(i),
            markeredgecolor=_MUTED if arm.kind == "natural" else _PAGE,
            markeredgewidth=1.3 if arm.kind == "natural" else 0.8,
            label=arm.label,
            zorder=3 + (arm.kind != "natural"),
        )
    axes.axvline(0, color=_INK, linewidth=1.0)
    axes.axhline(0.5, color=_GRID, linewidth=0.8)
    labels = [f"{label} (target)" if label in comparison.targets else label for label, _ in groups]
    _name_places(axes, labels)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(_ticks())
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("change of perplexity against uniform")
    axes.margins(x=0.08)
    figure.legend(loc="outside upper center", ncols=2, handlelength=1.2)
    return figure


# Arms are not domains, and have no colour of theirs: ink, then shapes.
def _arm_color(number: int) -> str:
    return _INK if number == 0 else _MUTED


def _held_out_curves(comparison: Comparison) -> dict[str, tuple[list[int], list[float]]]:
    """{arm: (steps, loss)} where the runs were measured on their way at least three times."""
    curves = {}
    for arm in comparison.arms:
        lines = arm.runs[0].evals
        if len(lines) < 3:
            return {}
        losses = [_mean_loss(_floats(line["loss"]), comparison.aim) for line in lines]
        curves[arm.label] = ([line["step"] for line in lines], losses)
    return curves


def _curves_figure(curves: Mapping[str, tuple[list[int], list[float]]]) -> Figure:
    figure, axes = _canvas(_height(len(curves)))
    styles = {
        label: (_INK if i % 2 == 0 else _MUTED, _DASHES[i % len(_DASHES)])
        for i, label in enumerate(curves)
    }
    for label, (steps, losses) in curves.items():
        color, dash = styles[label]
        axes.plot(steps, losses, color=color, linestyle=dash)
    _finish_steps(axes, "loss (nats per token)", max(steps[-1] for steps, _ in curves.values()))
    _label_ends(figure, axes, {label: losses[-1] for label, (_, losses) in curves.items()}, styles)
    return figure


# The page.


def _default_page(runs: Sequence[Path]) -> Path:
    """Inside the one directory that was named, or beside the runs."""
    if len(runs) == 1:
        return Path(runs[0]) / "report.html"
    return Path(os.path.commonpath([Path(run).resolve().parent for run in runs])) / "report.html"


def _save_figures(sections: Sequence[Section], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for section in sections:
        for drawing in section.drawings:
            (folder / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
            (folder / f"{drawing.name}.png").write_bytes(drawing.png)


def _inline(drawing: Drawing) -> Markup:
    """The figure as a part of the page: its colours and font, its own names, any width."""
    svg = drawing.svg[drawing.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    # Several figures on one page must not share ids.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{drawing.name}-", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = Markup.escape(f"{drawing.title}. {drawing.caption}")
    # Every name in it has been escaped by matplotlib.
    return Markup(f'{head} role="img" aria-label="{label}">{body}')


def _render(study: Study, sections: Sequence[Section], token_budget: int | None) -> str:
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    return environment.get_template("report.html").render(
        css=Markup((folder / "report.css").read_text(encoding="utf-8")),
        verdicts=[_judge(comparison, study) for comparison in study.comparisons],
        summaries=[_summary(proxy) for proxy in study.proxies],
        warnings=_warnings(study, token_budget),
        asked=_asked(study),
        sections=sections,
        tables=_tables(study, token_budget),
        settings=[_runs_table(study), _corpus_table(study)],
        configurations=[
            (run.name, json.dumps(run.config, indent=2, ensure_ascii=False)) for run in study.runs
        ],
        versions=_versions(study),
        num_proxies=sum(len(proxy.runs) for proxy in study.proxies),
        num_bases=len(study.bases),
        many=_many,
    )


def _tables(study: Study, token_budget: int | None) -> list[Table]:
    tables = [_perplexity_table(each) for each in study.comparisons if each.domains and each.arms]
    if _mixtures(study):
        tables.append(_weights_table(study))
    return tables + _epoch_tables(study, token_budget)


def _versions(study: Study) -> list[str]:
    """Every set of versions that runs were made with."""
    lines = [
        ", ".join(f"{name} {version}" for name, version in run.versions.items())
        for run in study.runs
    ]
    return list(dict.fromkeys(line for line in lines if line))
