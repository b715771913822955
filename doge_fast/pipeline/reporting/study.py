"""Runs put in order: an experiment's record, or one of the same form made from loose runs."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from doge_fast.pipeline import baselines, records
from doge_fast.pipeline.failures import reading
from doge_fast.pipeline.records import Json
from doge_fast.pipeline.reporting.proxies import Proxy, known_weights, mean_weights
from doge_fast.pipeline.reporting.runs import Run, open_runs
from doge_fast.pipeline.reporting.statistics import Arm, Comparison, compared
from doge_fast.pipeline.reporting.wording import Stat, count_text, listed, plural

RUNS = "runs"


@dataclass(frozen=True)
class Study:
    """What a report is made of."""

    record: Json
    """`title`, `question`, `settings`, and the `groups` of runs behind each table."""
    runs: Mapping[str, Run] = field(repr=False)
    """By the name that the groups call them."""
    proxies: tuple[Proxy, ...]
    path: Path | None = None
    """The experiment's directory; None: loose runs."""

    @property
    def is_experiment(self) -> bool:
        """Whether somebody planned these runs, and knows which are missing."""
        return self.path is not None

    @property
    def groups(self) -> list[Json]:
        """What is set against what."""
        return list(self.record["groups"])

    @property
    def shown(self) -> list[Run]:
        """Runs that learn weights or train at them, in the order they were named."""
        return [run for run in self.runs.values() if run.stage != "select"]

    @property
    def domains(self) -> list[str]:
        """All, in order of first appearance, training domains before targets."""
        names = [name for run in self.shown for name in run.domains]
        names += [name for run in self.shown for name in run.targets]
        names += [name for proxy in self.proxies if proxy.has_steps for name in proxy.rows]
        return list(dict.fromkeys(names))

    @cached_property
    def unmeasured(self) -> list[str]:
        """Runs of the plan whose end, or whose perplexities, are not known."""
        if not self.is_experiment:
            return []
        needed = {
            name
            for group in self.groups
            if group["kind"] in ("perplexity", "targets", "regret")
            for name in _planned(group)
        }
        blocks = self.record["settings"].get("eval_blocks")
        return [
            name
            for name in self.record["runs"]
            if name not in self.runs
            or not self.runs[name].is_complete
            or (name in needed and not is_measured(self.runs[name].path, blocks))
        ]

    @cached_property
    def unscored(self) -> list[str]:
        """Runs of the plan that have not been scored on the tasks it names."""
        missing = {
            name
            for group in self.groups
            if group["kind"] == "tasks"
            for name in _planned(group)
            if name not in self.runs or not is_scored(self.runs[name].path, group)
        }
        return [name for name in self.record["runs"] if name in missing]

    def runs_of(self, arm: Json) -> list[Run]:
        """Those of an arm that are there."""
        return [self.runs[name] for name in arm["runs"] if name in self.runs]

    def arm(self, arm: Json, until: float = 1.0) -> Arm:
        """An arm with its losses at the end, or as measured last before a share of the steps."""
        runs, losses = {}, {}
        for run in self.runs_of(arm):
            is_known = until < 1 or run.name not in self.unmeasured
            found = run.losses(until) if is_known else None
            if found is not None:
                runs[run.seed], losses[run.seed] = run, found
        is_baseline, baseline = bool(arm.get("is_baseline")), arm.get("baseline")
        return Arm(arm["label"], arm["about"], runs, losses, is_baseline, baseline)

    def comparison(self, group: Json) -> Comparison:
        """The arms of a group over their common seeds."""
        until = group.get("until", 1.0)
        return compared(group, [self.arm(arm, until) for arm in group["arms"]])

    def scores(self, group: Json) -> dict[str, dict[int, Json]]:
        """{arm: {seed: fewshot.json}} of the runs that were scored as the group says."""
        return {
            arm["label"]: {
                run.seed: run.few_shot
                for run in self.runs_of(arm)
                if run.few_shot and ("tasks" not in group or is_scored(run.path, group))
            }
            for arm in group["arms"]
        }

    def share_saved(self, arm: Json) -> float | None:
        """Share of the parameters that an arm leaves out of W, mean over seeds; None: unknown."""
        shares = []
        for run in self.runs_of(arm):
            selection = run.config.get("selection")
            if selection is not None and self.path is not None:
                # Runs may have been moved since.
                source = self.path / RUNS / Path(selection).parent.name
                with reading(source, "Take the run of select away, or make it again."):
                    entries = records.read_json(source / "cancellation.json")["selections"]
                    chosen = {entry["file"]: entry["share"] for entry in entries}
                    shares.append(1.0 - chosen[Path(selection).name])
        return math.fsum(shares) / len(shares) if shares else None

    def weights(self, arm: Json) -> dict[str, Stat]:
        """{domain: weight} of an arm over its seeds; the group says those that no run learned."""
        return mean_weights(
            [arm["weights"]] if "weights" in arm else known_weights(self.runs_of(arm))
        )

    def mean_weights(self, arm: Json) -> dict[str, float]:
        """`weights` without their errors."""
        return {name: stat.mean for name, stat in self.weights(arm).items()}


def _planned(group: Json) -> Iterator[str]:
    """Runs of a group's arms, whether these stand in rows or not."""
    for part in (group, *group.get("rows", ())):
        yield from (name for arm in part.get("arms", ()) for name in arm["runs"])
    yield from group.get("swarm", ())


def is_measured(run: Path, blocks: int | None) -> bool:
    """Whether evaluation.json holds every domain and target on so many blocks, or all there are."""
    if not (run / records.EVALUATION).exists():
        return False
    corpus = records.read_config(run)["corpus"]
    entries = {**corpus["domains"], **corpus["targets"]}
    most = math.inf if blocks is None else blocks
    wanted = {name: min(most, each["validation_blocks"]) for name, each in entries.items()}
    return bool(records.read_evaluation(run)["blocks"] == wanted)


def is_scored(run: Path, group: Json) -> bool:
    """Whether fewshot.json holds just the group's tasks, scored as it says."""
    if not (run / records.FEWSHOT).exists():
        return False
    record = records.read_few_shot(run)
    asked = ("shots", "task_limit", "task_data_sha256")
    return list(record["tasks"]) == group["tasks"] and all(
        record.get(key) == group[key] for key in asked if key in group
    )


def open_study(runs: Sequence[Path], weights: Sequence[str] = ()) -> Study:
    """Read an experiment's directory, or runs that lie anywhere; `weights` are NAME=FILE.

    Raises:
        ValueError: none is named, one is not a run and holds none, none learns weights or trains
            at them, a record is not what it should be, or there are weights and no swarm.
    """
    is_experiment = len(runs) == 1 and (Path(runs[0]) / records.EXPERIMENT).exists()
    path = Path(runs[0]) if is_experiment else None
    if path is not None and not any((path / RUNS).glob("*/config.json")):
        raise ValueError(f"No run of the experiment in {path} has begun.")
    found = open_runs(runs if path is None else [path / RUNS])
    # Directories of one name are told apart by the folder they lie in.
    names = _distinct([run.name for run in found], [[run] for run in found])
    opened = dict(zip(names, found, strict=True))
    told = {name: run for name, run in opened.items() if run.stage != "select"}
    if not told:
        raise ValueError(
            "A report needs a run that learns weights or trains at them; got runs of select alone."
        )
    proxies = _proxies_of(told.values())
    record = _record_of(told, proxies) if path is None else records.read_experiment(path)
    groups = [group for group in record["groups"] if group.get("swarm")]
    if weights and not groups:
        raise ValueError(
            "weights (--weights) are judged by a swarm of base models: name the directory of a "
            "doge-fast experiment regret."
        )
    # Weights that no run of the experiment has learned or used are arms without runs.
    for group in groups if weights else ():
        labels = [arm["label"] for arm in group["arms"]]
        named = records.read_named(weights, domains=group["aim"], taken=labels)
        for label, file in named.items():
            given = records.weights_by_name(records.read_weights(file, domains=group["aim"]))
            arm = {"label": label, "about": "given", "weights": given, "runs": []}
            group["arms"].append(arm)
    return Study(record, opened, proxies, path)


# Loose runs are put into the groups that an experiment's record has. Base models are one comparison
# where they share corpus, model, settings and number of tokens; uniform weights are its baseline.


def _proxies_of(runs: Iterable[Run]) -> tuple[Proxy, ...]:
    """Runs that learned weights, the seeds of each together."""
    groups = _grouped(run for run in runs if run.stage in ("proxy", "doremi"))
    # What is asked of all domains comes before what is asked of one, the baseline after both.
    groups.sort(key=lambda group: (group[0].stage == "doremi", bool(group[0].targets)))
    labels = _distinct([_common_name(group) for group in groups], groups)
    return tuple(Proxy(label, tuple(group)) for label, group in zip(labels, groups, strict=True))


def _grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Such as differ in nothing but their seed, or in their weights."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.settings(), []).append(run)
    return list(groups.values())


def _common_name(runs: Sequence[Run]) -> str:
    """ca-seed0, ca-seed1 -> ca."""
    if len(runs) == 1:
        return runs[0].name
    prefix = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071
    stem = re.sub(r"[-_. ]*(seed|s)?[-_. ]*\d*$", "", prefix)
    return stem or runs[0].name


def _distinct(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> list[str]:
    """The labels; of those that several have, as much of the path as tells them apart."""
    told, depth = list(labels), 1
    while len(set(told)) < len(told):
        depth += 1
        told = [
            label if labels.count(label) == 1 else "/".join(group[0].path.parts[-depth:])
            for label, group in zip(labels, groups, strict=True)
        ]
    return told


# Columns of a table that are of weights that somebody learned or gave.
_LEARNED = 2
_FROM_FILE = "from a file"


def _record_of(runs: Mapping[str, Run], proxies: Sequence[Proxy]) -> Json:
    """What experiment.json would say of these runs.

    A group of base models has three more keys: `others`, domains that are measured and not aimed
    at; `about`, what its arms share; `oracle`, an arm that was trained on the targets too.
    """
    names = {run.path: name for name, run in runs.items()}
    bases = [run for run in runs.values() if run.stage == "base"]
    alike = sorted(_grouped(bases), key=lambda group: bool(group[0].targets))
    groups = [_comparison(group, proxies, names) for group in alike]
    uniforms = [arm for group in groups for arm in group["arms"] if arm["is_baseline"]]
    for group, (run, *_) in zip(groups, alike, strict=True):
        oracles = (arm for arm in uniforms if _is_oracle(runs[arm["runs"][0]], run))
        group["oracle"] = next(oracles, None)
    tasks = [
        {"kind": "tasks", "title": f"Tasks: {group['title'].lower()}", "arms": group["arms"]}
        for group in groups
        if any(runs[name].few_shot for arm in group["arms"] for name in arm["runs"])
    ]
    learned = _weights_group(runs, proxies, names, groups)
    num_proxies = sum(len(proxy.runs) for proxy in proxies)
    return {
        "title": "Domain weights",
        "question": f"{plural(num_proxies, 'proxy run')}, {plural(len(bases), 'base model')}",
        "settings": {},
        "runs": list(runs),
        "groups": [*groups, *tasks, *([learned] if learned["arms"] else [])],
    }


def _comparison(runs: Sequence[Run], proxies: Sequence[Proxy], names: Mapping[Path, str]) -> Json:
    by_source: dict[tuple[int, str, str, str], list[str]] = {}
    for run in runs:
        by_source.setdefault(_source(run, proxies), []).append(names[run.path])
    sources = sorted(by_source, key=lambda source: source[0])
    labels = [label for _, label, _, _ in sources]
    arms = [
        {
            "label": label if labels.count(label) == 1 else path or label,
            "about": about,
            "runs": by_source[place, label, about, path],
            "is_baseline": place == 0,
        }
        for place, label, about, path in sources
    ]
    first = runs[0]
    return {
        "kind": "perplexity",
        "title": f"Out of domain, {listed(first.targets)}" if first.targets else "All domains",
        "about": f"{first.model} models, {count_text(first.tokens)} tokens each",
        "paper": None,
        "aim": list(first.targets or first.domains),
        "others": list(first.domains if first.targets else ()),
        # What was learned for all domains by DoGE comes first; the baselines before it.
        "focus": next((label for place, label, _, _ in sources if place >= _LEARNED), "natural"),
        "arms": arms,
    }


def _source(run: Run, proxies: Sequence[Proxy]) -> tuple[int, str, str, str]:
    """(place among the columns, label, about, path of a file) of the weights of a base run.

    They are a baseline's name, or the path of a file or of a proxy run; files of one name are not
    one source.
    """
    weights = str(run.config["weights"])
    if weights == "uniform":
        return 0, weights, "baseline", ""
    if weights == "natural":
        return 1, weights, "by tokens", ""
    path = Path(weights)
    proxy = _proxy_of(path.parent if path.name == records.WEIGHTS else path, proxies)
    if proxy is not None:
        return _LEARNED + proxies.index(proxy), proxy.label, proxy.about, ""
    label = f"{path.parent.name}/{path.name}" if path.name == records.WEIGHTS else path.name
    return _LEARNED + len(proxies), label, _FROM_FILE, weights


def _proxy_of(folder: Path, proxies: Sequence[Proxy]) -> Proxy | None:
    """The proxy that lies there, or, where runs have been moved, the only one of that name."""
    for proxy in proxies:
        if any(run.path == folder.resolve() for run in proxy.runs):
            return proxy
    found = [proxy for proxy in proxies if any(run.name == folder.name for run in proxy.runs)]
    return found[0] if len(found) == 1 else None


def _is_oracle(other: Run, run: Run) -> bool:
    """Whether `other` is trained on the targets of `run` too, at equal tokens and model."""
    return bool(run.targets) and (
        set(run.targets) <= set(other.domains)
        and other.tokens == run.tokens
        and other.config["model"] == run.config["model"]
        and other.corpus["tokenizer_sha256"] == run.corpus["tokenizer_sha256"]
    )


def _weights_group(
    runs: Mapping[str, Run],
    proxies: Sequence[Proxy],
    names: Mapping[Path, str],
    comparisons: Sequence[Json],
) -> Json:
    """Every set of weights: natural ones, of each proxy, and those that came from elsewhere."""
    arms: list[Json] = []
    tokens = proxies[0].first.train_tokens if proxies else {}
    if proxies and all(proxy.first.train_tokens.items() <= tokens.items() for proxy in proxies):
        natural = baselines.natural(tokens)
        arms.append({"label": "natural", "about": "by tokens", "runs": [], "weights": natural})
    for proxy in proxies:
        if proxy.weights:
            of_seeds = [names[run.path] for run in proxy.runs]
            arms.append({"label": proxy.label, "about": proxy.about, "runs": of_seeds})
    # Base models of several comparisons may have had the weights of one file.
    given: dict[str, Json] = {}
    for arm in (arm for group in comparisons for arm in group["arms"]):
        first = runs[arm["runs"][0]]
        if arm["about"] == _FROM_FILE and first.weights is not None:
            given.setdefault(str(first.config["weights"]), arm | {"runs": arm["runs"][:1]})
    labels = [arm["label"] for arm in (*arms, *given.values())]
    arms += [
        arm if labels.count(arm["label"]) == 1 else arm | {"label": path}
        for path, arm in given.items()
    ]
    return {
        "kind": "weights",
        "title": "Domain weights",
        "paper": ["tab:dw", "tab:ood-dw", "tab:ood-wiki-dw"],
        "has_uniform": True,
        "arms": arms,
    }
