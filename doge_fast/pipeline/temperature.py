"""Search for the best mixture on a line: train base models at alpha^(1/T), keep the best weights.

A proxy learns which domains to raise. How far it raises them depends on mu, on its learning rate
and on an average that starts uniform; none of these depends on the base model. So the distance is
measured with base models, along one line of mixtures:

    w_j(T)  =  alpha_j^(1/T) / sum_i alpha_i^(1/T)

1/T = 0 gives uniform weights, 1/T = 1 the proxy's weights, and a larger 1/T sharper ones. The word
"temperature" comes from multilingual training, where alpha are the shares of the text.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

from doge_fast.pipeline import failures, named, ranks, records, stage
from doge_fast.pipeline.base import train_base
from doge_fast.pipeline.baselines import MAX_EPOCHS, epochs
from doge_fast.pipeline.config import (
    MIX,
    BaseConfig,
    EvaluateConfig,
    ModelConfig,
    ProxyConfig,
    ReportConfig,
    TemperatureConfig,
)
from doge_fast.pipeline.config.ranges import check_paths
from doge_fast.pipeline.evaluation import evaluate, own_blocks
from doge_fast.pipeline.failures import Diverged, UserError
from doge_fast.pipeline.model import check_model
from doge_fast.pipeline.records import ConfigRecord, Json
from doge_fast.pipeline.report import write_report
from doge_fast.pipeline.reporting.statistics import PairedDifference, paired_difference
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.trainer import device_of, wait_for_ranks
from doge_fast.pipeline.wording import (
    as_ascii,
    count_text,
    first_few,
    held_out_text,
    listed,
    plural,
    wrapped,
)

_LEAST_STEPS = 200
_FIRST = (0.0, 1.0, 2.0)
# 1/T to try between uniform weights and the proxy's.
_INWARDS = (0.5, 0.25)
_OUTWARDS = 2.0
# Fields of the proxy's weights.json that hold at every temperature.
_COPIED = ("target", "score", "mu", "corpus", "tokenizer_sha256", "block_size", "versions")
_OF_PROXY = ("model", "parameters", "learning_rate", "steps", "seed", "tokens", "date", "sha256")
_OF_DOMAIN = ("prior", "tokens", "documents", "mean_doc_tokens")

_log = logging.getLogger("doge_fast")


def temperature(config: TemperatureConfig) -> Run:
    """Measure base models along the line from uniform weights through a proxy's; keep the best.

    The search begins with 1/T = 0, 1 and 2. While the largest 1/T is the best, it tries larger ones
    (4, 6, ...). While uniform weights are the best, it tries 0.5, then 0.25. Last it tries the
    midpoint of the best and its better neighbour. Mixtures are compared by the proxy's objective:
    the mean held-out loss of the training domains, or of the targets, weighted as in the target.
    All models of a seed share initialisation, order of the data and evaluation.

    The same call resumes a killed search and keeps the complete models.

    Args:
        config: the proxy run; size, steps and seeds of the base models.

    Returns:
        The run: `config.out`, with weights.json (the weights with the lowest mean loss, their
        temperature, and all measurements), runs/, mixtures/ and report.html.

    Raises:
        UserError: the run is not a complete proxy, has one domain or equal weights, its text has
            changed, or `config.only` names a run that is not planned; nothing has been trained.
        Diverged: every base model diverged, or one that `config.only` names.
    """
    if config.dry_run:
        raise UserError("A dry run trains nothing: call rehearsal.rehearse, or leave out dry_run.")
    search = _Search.of(config)
    # Raises if the proxy's text has changed: all base models must be measured on the same text.
    own_blocks(config.proxy)
    found = search.next_jobs()
    if config.only:
        # A run that --plan has printed may be complete by now.
        begun = sorted({*found, *search.begun})
        known = {job.name: job for each in begun for job in search.jobs_at(each).values()}
        for name in (name for name in config.only if name not in known):
            near = named.nearest(name, known, f"The first is {next(iter(known))}.")
            raise UserError(
                f"only must name runs of the plan, which --plan lists; {name} is none. {near}"
            )
        jobs = [job for job in known.values() if job.name in config.only]
        if left := [job for job in jobs if not job.is_made()]:
            search.begin(found)
            search.make(left)
            search.check_made(left)
        return Run(search.out)
    if found:
        _log.info("%s", search.cost())
    while found:
        search.begin(found)
        search.make([job for each in found.values() for job in each])
        found = search.next_jobs()
    search.write()
    return Run(search.out)


def plan_lines(config: TemperatureConfig, command: str) -> list[str]:
    """The next runs to make, as commands that begin with `command`; writes nothing."""
    lines = [
        f"{command} --only {job.name}  # 1/T = {inverse:g}"
        for inverse, jobs in _Search.of(config).next_jobs().items()
        for job in jobs
    ]
    next_step = "then --plan again: what follows depends on these" if lines else "weights, report"
    return [*lines, f"{command}  # {next_step}"]


def example(config: TemperatureConfig) -> tuple[BaseConfig, Path, int, list[tuple[str, str]]]:
    """A base model for a dry run, at uniform weights: every mixture costs the same.

    Returns:
        (the base model, directory of the search, its largest number of models, lines on it).
    """
    search = _Search.of(replace(config, dry_run=False))
    base = search.base(1.0, config.seeds[0])
    own = replace(base, out=base.out.with_name("dry-run"), weights="uniform")
    told = [
        ("models", search.number_text),
        ("weights", f"{config.proxy} at up to {plural(config.most_runs, 'temperature')}"),
        ("target", held_out_text(search.aim, search.alpha)),
    ]
    return own, search.out, search.most_runs, told


def sharpened(weights: Mapping[str, float], inverse: float) -> dict[str, float]:
    """w_j = alpha_j^inverse / sum_i alpha_i^inverse; a weight of zero stays zero, even at 1/T = 0.

    Args:
        weights: {domain: alpha_j}, >= 0, with a positive sum.
        inverse: 1/T, >= 0.
    """
    logs = {name: inverse * math.log(value) for name, value in weights.items() if value > 0}
    most = max(logs.values())
    shares = {name: math.exp(logs[name] - most) if name in logs else 0.0 for name in weights}
    total = math.fsum(shares.values())
    return {name: value / total for name, value in shares.items()}


def next_inverses(losses: Mapping[float, float], most: int) -> tuple[float, ...]:
    """Values of 1/T to measure next; empty: the search has ended.

    Args:
        losses: {1/T: mean loss} of the temperatures measured; infinity where a model diverged.
        most: largest number of temperatures in a search.
    """
    if missing := tuple(each for each in _FIRST if each not in losses):
        return missing
    # Replay the search: the measured losses determine every step of it.
    tried: list[float] = []
    for inverse in _turns(losses, tried):
        if inverse not in losses:
            return (inverse,) if len(tried) < most else ()
        tried.append(inverse)
    return ()


def _turns(losses: Mapping[float, float], tried: Sequence[float]) -> Iterator[float]:
    """Values of 1/T in search order; the caller appends a value to `tried` before the next."""
    yield from _FIRST
    while _best(losses, tried) == max(tried):
        yield max(tried) + _OUTWARDS
    for inverse in _INWARDS:
        if _best(losses, tried) == 0:
            yield inverse
    best, places = _best(losses, tried), sorted(tried)
    at = places.index(best)
    beside = places[max(at - 1, 0) : at] + places[at + 1 : at + 2]
    yield (best + _best(losses, beside)) / 2


def _best(losses: Mapping[float, float], places: Sequence[float]) -> float:
    """The 1/T with the lowest loss; of equal losses the one nearer to uniform."""
    return min(sorted(places), key=lambda place: losses[place])


@dataclass(frozen=True)
class Point:
    """A measured temperature."""

    inverse: float
    """1/T."""
    weights: Mapping[str, float]
    runs: tuple[str, ...]
    losses: Mapping[int, float]
    """{seed: the objective}; infinity where the model diverged."""

    @property
    def mean(self) -> float:
        """Mean of the objective over seeds."""
        return fmean(self.losses.values())

    @property
    def arm(self) -> records.ArmRecord:
        """The point as a row of a table."""
        about = f"1/T = {self.inverse:g}"
        label = {0.0: "uniform", 1.0: "DoGE"}.get(self.inverse, about)
        return records.ArmRecord(label, about, self.runs, is_baseline=self.inverse == 0)

    def against(self, other: "Point") -> PairedDifference:
        """Loss of this point minus the other's, paired over the seeds where neither diverged."""
        own, their = (
            {seed: loss for seed, loss in point.losses.items() if math.isfinite(loss)}
            for point in (self, other)
        )
        return paired_difference(own, their)


@dataclass(frozen=True)
class Job:
    """A base model of the search, to train and to measure on held-out text."""

    config: BaseConfig
    blocks: int | None
    """Held-out blocks to measure per domain; None: all."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.config.out.name

    def is_made(self) -> bool:
        """Whether the model is trained and measured."""
        return self._is_trained() and self._is_measured()

    def make(self) -> None:
        """Train and measure the model; skip what is done."""
        if not self._is_trained():
            self.train()
            failures.raise_late()
        if not self._is_measured():
            config = self.config
            evaluate(EvaluateConfig(config.out, blocks=self.blocks, device=config.training.device))
            failures.raise_late()

    def train(self) -> None:
        """Begin or resume the training."""
        train_base(self.config)

    def _is_trained(self) -> bool:
        out = self.config.out
        try:
            return stage.is_finished(self.config) and not (out / records.CHECKPOINTS).exists()
        except ValueError:
            # Training it raises the same error, with its message.
            return False

    def _is_measured(self) -> bool:
        return records.is_measured(self.config.out, self.blocks)


@dataclass
class _Search:
    config: TemperatureConfig
    proxy: ProxyConfig
    record: Json
    """The proxy's weights.json."""
    diverged: set[Path] = field(default_factory=set)

    @classmethod
    def of(cls, config: TemperatureConfig) -> "_Search":
        """Read and check the proxy run; raise UserError if its weights define no line."""
        check_paths(config)
        recorded, proxy = records.load_config(config.proxy)
        if recorded.stage != "proxy":
            raise UserError(
                f"{config.proxy} is a {recorded.stage} run; name the directory of a proxy."
            )
        records.check_finished(config.proxy)
        record = records.read_weights(config.proxy)
        weights = records.weights_by_name(record)
        if len(weights) == 1:
            raise UserError(f"{config.proxy} has one domain: every temperature gives it all.")
        positive = [value for value in weights.values() if value > 0]
        if math.log(max(positive) / min(positive)) < 1e-6:
            told = " ".join(f"Warning: {each}" for each in record.get("warnings") or ())
            raise UserError(
                f"The weights of {config.proxy} are equal: every temperature gives the same "
                f"mixture. {told or 'Train the proxy longer.'}"
            )
        search = cls(config, proxy, record)
        base = search.base(1.0, config.seeds[0])
        device_of(base.training.device)
        if base.batch_size % ranks.size():
            raise UserError(
                f"A step of the base models has as many blocks as one of {config.proxy}, "
                f"{base.batch_size}, which {ranks.size()} processes cannot share. Start another "
                "number of them."
            )
        check_model(base.model, block_size=base.corpus.block_size)
        records.check_experiment(search.out, search.experiment())
        for inverse in search.begun:
            kept = records.weights_by_name(records.read_weights(search._mixture(inverse)))
            if not records.is_same_mixture(kept, sharpened(weights, inverse)):
                raise UserError(
                    f"{search.out} has measured along other weights than {config.proxy} has now: "
                    "that was trained again. Name another --out."
                )
        return search

    @property
    def out(self) -> Path:
        own = self.config.proxy.resolve()
        return self.config.out or own.with_name(f"{own.name}-temperature")

    @property
    def alpha(self) -> dict[str, float]:
        return records.weights_by_name(self.record)

    @property
    def aim(self) -> dict[str, float]:
        """{domain: its weight in the objective}; they sum to 1."""
        target: Any = self.record.get("target")
        if not isinstance(target, Mapping):
            target = {MIX: 1.0}
        # The target "mix" weighs all domains equally.
        each = target.get(MIX, 0.0) / len(self.alpha)
        shares = dict.fromkeys(self.alpha, each) if each else {}
        # Keep the order of the targets: base models take it over.
        for name in (each for each in target if each != MIX):
            shares[name] = shares.get(name, 0.0) + target[name]
        total = math.fsum(shares.values())
        return {name: value / total for name, value in shares.items()}

    @property
    def begun(self) -> list[float]:
        """Every 1/T that has a mixture file."""
        return sorted(float(file.stem) for file in (self.out / records.MIXTURES).glob("*.json"))

    def jobs_at(self, inverse: float) -> dict[int, Job]:
        """{seed: base model at this 1/T}."""
        blocks = self.config.eval_blocks
        return {seed: Job(self.base(inverse, seed), blocks) for seed in self.config.seeds}

    def next_jobs(self) -> dict[float, list[Job]]:
        """{1/T: models still to make} for the next temperatures."""
        self.wait()
        found = {point.inverse: point.mean for point in self.points()}
        left = {
            inverse: [job for job in self.jobs_at(inverse).values() if not self._is_made(job)]
            for inverse in next_inverses(found, self.config.most_runs)
        }
        return {inverse: jobs for inverse, jobs in left.items() if jobs}

    def points(self) -> list[Point]:
        """Temperatures measured with all seeds, in order of 1/T."""
        found = []
        for inverse in self.begun:
            jobs = self.jobs_at(inverse)
            if all(map(self._is_made, jobs.values())):
                names = tuple(job.name for job in jobs.values())
                losses = {seed: self._objective(job.config.out) for seed, job in jobs.items()}
                found.append(Point(inverse, sharpened(self.alpha, inverse), names, losses))
        return found

    def begin(self, inverses: Collection[float]) -> None:
        """Write the mixtures to measure next; warn if they would repeat a domain's text often."""
        if ranks.is_first():
            records.write_experiment(self.out, self.experiment())
            (self.out / records.MIXTURES).mkdir(exist_ok=True)
        for warning in self._repeated(inverses):
            _log.warning("%s", wrapped(warning))
        for inverse in inverses:
            weights = sharpened(self.alpha, inverse)
            if ranks.is_first():
                record = {
                    "method": "doge",
                    "inverse_temperature": inverse,
                    "domains": [
                        {"name": name, "weight": weight} for name, weight in weights.items()
                    ],
                    **_known(self.record, ("target", "tokenizer_sha256")),
                }
                records.write_weights(self._mixture(inverse), record)

    @property
    def most_runs(self) -> int:
        """Largest number of base models, over all seeds."""
        return self.config.most_runs * len(self.config.seeds)

    @property
    def number_text(self) -> str:
        """`most_runs` in words."""
        temperatures, seeds = self.config.most_runs, len(self.config.seeds)
        told = f"{plural(temperatures, 'temperature')}, {plural(seeds, 'seed')}"
        return f"at most {self.most_runs} base models ({told})"

    def cost(self) -> str:
        """Upper bound on tokens and time of the whole search, as a sentence."""
        config, base = self.config, self.base(1.0, self.config.seeds[0])
        steps = base.training.steps
        tokens = self.most_runs * steps * base.batch_size * base.corpus.block_size
        text = f"{self.number_text} of {steps} steps: {count_text(tokens)} tokens"
        timed = [line.seconds for line in records.read_lines(config.proxy)]
        seconds = [each for each in timed if each is not None]
        if seconds and config.model is None:
            whole = timedelta(seconds=round(median(seconds) * steps * self.most_runs))
            text += f", {whole} at the time of the proxy's steps"
        return text

    def make(self, jobs: Sequence[Job]) -> None:
        """Train and measure models in order; remember those that diverged."""
        made = sum(self._is_made(job) for each in self.begun for job in self.jobs_at(each).values())
        for number, job in enumerate(jobs, start=made + 1):
            self.wait()
            _log.info("run %d of at most %d: %s", number, self.most_runs, job.name)
            try:
                job.make()
            except Diverged as error:
                _log.warning("%s diverged: its temperature is left out. %s", job.name, error)
                self.diverged.add(job.config.out)

    def check_made(self, jobs: Sequence[Job]) -> None:
        """Raise Diverged if one of these runs, named by `config.only`, diverged."""
        if lost := [job.name for job in jobs if job.config.out in self.diverged]:
            raise Diverged(
                f"{', '.join(lost)} diverged. The search leaves out its temperature once it makes "
                "the run itself: leave out --only."
            )

    def write(self) -> None:
        """Write weights.json, experiment.json and the report from the measurements."""
        points = self.points()
        best = min(points, key=lambda point: point.mean)
        if not math.isfinite(best.mean):
            raise Diverged(
                f"Every base model in {self.out} diverged. Train a proxy with a lower "
                "learning_rate (--learning-rate), or name another model."
            )
        if ranks.is_first():
            out = self.out
            records.write_weights(out / records.WEIGHTS, self._weights(points, best))
            records.write_experiment(out, self.experiment(self._groups(points, best)))
            write_report(ReportConfig(runs=(out,)))
        self.wait()

    def wait(self) -> None:
        """Synchronise the ranks, so that all see the files of the first one."""
        wait_for_ranks(device_of(self.config.device))

    def _is_made(self, job: Job) -> bool:
        return job.config.out in self.diverged or job.is_made()

    def _objective(self, out: Path) -> float:
        if out in self.diverged:
            return math.inf
        loss = records.load_evaluation(out).loss
        return math.fsum(weight * loss[name] for name, weight in self.aim.items())

    def base(self, inverse: float, seed: int) -> BaseConfig:
        """Settings of the base model for a 1/T and a seed."""
        config, proxy = self.config, self.proxy
        told = proxy.training
        steps = config.steps or max(told.steps, _LEAST_STEPS)
        names = tuple(self.alpha)
        warmup = told.warmup_steps
        if warmup is not None and warmup >= steps:
            # The warm-up was set for a proxy with more steps.
            warmup = steps // 10
        return BaseConfig(
            out=self.out / records.RUNS / f"base-{inverse:g}-seed{seed}",
            corpus=replace(proxy.corpus, domains=names),
            model=proxy.model if config.model is None else ModelConfig(model=config.model),
            training=replace(
                told,
                steps=steps,
                warmup_steps=warmup,
                seed=seed,
                device=config.device,
                eval_every=None,
            ),
            weights=str(self._mixture(inverse)),
            targets=tuple(name for name in self.aim if name not in names),
            batch_size=proxy.sequences_per_domain * len(names),
        )

    def _mixture(self, inverse: float) -> Path:
        return self.out / records.MIXTURES / f"{inverse:g}.json"

    @property
    def _tokens(self) -> int:
        """Training tokens of one base model."""
        base = self.base(1.0, self.config.seeds[0])
        return base.training.steps * base.batch_size * base.corpus.block_size

    def _epochs(self, weights: Mapping[str, float]) -> dict[str, float]:
        """{domain: epochs} in a training of `budget_tokens`, or of a base model without one."""
        budget = self.config.budget_tokens or self._tokens
        tokens = {entry["name"]: entry.get("tokens") for entry in self.record["domains"]}
        return {
            name: epochs(weight, tokens[name], budget)
            for name, weight in weights.items()
            if tokens[name] is not None
        }

    def _repeated(self, inverses: Iterable[float]) -> list[str]:
        """A warning if a training at one of these 1/T exceeds `MAX_EPOCHS` of a domain."""
        told = []
        for inverse in inverses:
            passes = self._epochs(sharpened(self.alpha, inverse))
            most = sorted(passes, key=passes.__getitem__, reverse=True)
            often = [f"{name} {passes[name]:.1f}" for name in most if passes[name] > MAX_EPOCHS]
            told += [f"1/T = {inverse:g}: {first_few(often, 3)}"] if often else []
        if not told:
            return []
        return [
            f"In the training that the weights are for some domains would be read more than "
            f"{MAX_EPOCHS:g} times, where text is worth less than fresh one: {'; '.join(told)}. "
            "doge-fast weights constrain --max-epochs bounds the weights."
        ]

    def _warnings(self, points: Sequence[Point], best: Point) -> list[str]:
        """Warnings about the search and about its proxy."""
        what, change = f"1/T = {best.inverse:g}", best.against(points[0])
        number, warnings = len(self.config.seeds), list[str]()
        if best.inverse and not change.is_decided:
            seeds = "one seed decides nothing" if number == 1 else f"{number} seeds do not decide"
            warnings.append(
                f"{what} cannot be told apart from uniform weights: {seeds}. More --seeds may."
            )
        if best.inverse and best is points[-1]:
            warnings.append(
                f"{what} is the farthest that was tried: a larger --most-runs may find a better "
                "one."
            )
        if best.inverse and (self.config.budget_tokens or math.inf) > self._tokens:
            warnings.append(
                f"The base models saw {count_text(self._tokens)} tokens each. Short trainings "
                "overstate the distance for longer ones: a smaller 1/T may be better there."
            )
        lost = [f"1/T = {point.inverse:g}" for point in points if not math.isfinite(point.mean)]
        warnings += [f"Diverged, so left out: {', '.join(lost)}."] if lost else []
        told = (f"The proxy: {each}" for each in self.record.get("warnings") or ())
        return [*warnings, *self._repeated([best.inverse]), *told]

    def _weights(self, points: Sequence[Point], best: Point) -> Json:
        """Contents of weights.json."""
        uniform = points[0]
        entries = {entry["name"]: entry for entry in self.record["domains"]}
        base = self.base(best.inverse, self.config.seeds[0])
        begun = [records.load(self.out / records.RUNS / run, ConfigRecord) for run in best.runs]
        runs = [run for point in points for run in point.runs]
        measured: list[dict[str, Any]] = []
        for point in points:
            change = point.against(uniform)
            measured.append(
                {
                    "inverse_temperature": point.inverse,
                    "weights": dict(point.weights),
                    "losses": {str(seed): loss for seed, loss in point.losses.items()},
                    "loss": point.mean,
                    "change": change.mean,
                    "interval": [change.low, change.high] if change.pairs > 1 else None,
                    "epochs": self._epochs(point.weights),
                }
            )
        return {
            "method": "doge",
            "source": str(self.config.proxy.resolve()),
            "temperature": 1 / best.inverse if best.inverse else None,
            "inverse_temperature": best.inverse,
            "is_decided": best.against(uniform).is_decided,
            "objective": self.aim,
            "date": max(run.created for run in begun)[:10],
            "model": base.model.model,
            "parameters": begun[0].parameters,
            "learning_rate": base.training.learning_rate,
            "steps": base.training.steps,
            "seeds": self.config.seeds,
            "batch_size": base.batch_size,
            "tokens": len(runs) * self._tokens + (self.record.get("tokens") or 0),
            "points": measured,
            "warnings": self._warnings(points, best),
            "proxy": _known(self.record, _OF_PROXY),
            **_known(self.record, _COPIED),
            "domains": [
                {"name": name, "weight": weight, **_known(entries[name], _OF_DOMAIN)}
                for name, weight in best.weights.items()
            ],
        }

    def experiment(self, groups: tuple[records.Group, ...] = ()) -> records.ExperimentRecord:
        """Contents of experiment.json, the report's input; no tables until the search ends."""
        config = self.config
        return records.ExperimentRecord(
            name="temperature",
            title="Direction learned, distance measured",
            question=f"Base models at alpha^(1/T), alpha the weights of {config.proxy}.",
            settings=records.ExperimentSettings(
                config.seeds, config.eval_blocks, str(config.proxy.resolve())
            ),
            data=self.proxy.corpus.data,
            runs=tuple(job.name for each in self.begun for job in self.jobs_at(each).values()),
            groups=groups,
            config=records.kept(config),
        )

    def _groups(self, points: Sequence[Point], best: Point) -> tuple[records.Group, ...]:
        """Tables of the report."""
        # A point that diverged with one seed would show the mean of its other seeds.
        shown = [point for point in points if not point.inverse or math.isfinite(point.mean)]
        measured = (
            records.TemperaturePoint(point.inverse, point.arm, dict(point.weights))
            for point in shown
        )
        title, arms = "How far to follow the proxy", tuple(point.arm for point in shown)
        focus = best.arm.label if best.inverse else None
        models, proxy = (
            [name for arm in arms for name in arm.runs],
            self.config.proxy.resolve().name,
        )
        methods = (
            records.Method(f"proxy and {plural(len(models), 'base model')}", ((proxy, *models),)),
            records.Method("proxy", ((proxy,),)),
            records.Method("a base model", tuple((name,) for name in points[0].runs)),
        )
        budget = self.config.budget_tokens
        return (
            records.TemperatureGroup(
                title,
                points=tuple(measured),
                aim=self.aim,
                chosen=best.inverse,
                epochs=self._epochs(best.weights),
                epochs_tokens=budget or self._tokens,
                has_budget=budget is not None,
            ),
            *self._perplexities(arms, focus),
            records.CostGroup("Cost", methods),
        )

    def _perplexities(
        self, arms: tuple[records.ArmRecord, ...], focus: str | None
    ) -> Iterator[records.PerplexityGroup]:
        """The table of what the search compares and, where that is targets, of the rest."""
        aims, title = tuple(self.aim), "Base models"
        if rest := tuple(name for name in self.alpha if name not in aims):
            yield records.PerplexityGroup(f"{title} on {listed(aims)}", arms, aims, focus=focus)
            aims, title = rest, f"{title} on the training domains"
        yield records.PerplexityGroup(title, arms, aims, focus=focus)


def _known(record: Mapping[str, Any], fields: Sequence[str]) -> Json:
    return {key: record[key] for key in fields if record.get(key) is not None}


def lines_of(run: Path) -> list[str]:
    """Result of a search, as lines for a terminal."""
    record = records.read_weights(run)
    inverse, points = record["inverse_temperature"], record["points"]
    best = next(point for point in points if point["inverse_temperature"] == inverse)
    what = f"1/T = {inverse:g}"
    trained = [entry["name"] for entry in record["domains"]]
    lines = [f"loss on {held_out_text(record['objective'], trained)}:"]
    for point in points:
        mark = " *" if point is best else ""
        loss = "diverged" if point["loss"] is None else f"{point['loss']:.4f}"
        lines.append(f"  1/T = {point['inverse_temperature']:<6g} {loss}{mark}")
    if not inverse:
        told = "No temperature tried is better than uniform weights, which are written."
    elif record["is_decided"]:
        told = f"{what} has the lowest loss, and the 95 % interval leaves out uniform weights."
    else:
        told = f"{what} has the lowest loss and is written."
    warnings = (as_ascii(wrapped(f"Warning: {each}")) for each in record["warnings"])
    written = (f"weights: {run / records.WEIGHTS}", f"report: {run / 'report.html'}")
    return [*lines, told, *warnings, *written]
