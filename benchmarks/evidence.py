"""An experiment's records in one file, small enough to keep, and back again.

    python -m benchmarks.evidence pack experiments/ood benchmarks/results/evidence-ood.json
    python -m benchmarks.evidence unpack benchmarks/results/evidence-ood.json experiments/ood-again
    doge-fast report experiments/ood-again
    python -m benchmarks.evidence compare experiments/universal
    python -m benchmarks.evidence compare benchmarks/results/evidence-ood.json

`compare FILE` prints all tables of a record. What `doge-fast experiment` (last at commit aefe8daf)
printed and drew can be made anew from such a file, without the corpus and without the models: it
holds every record of every finished run as it is, but of the lines of a training only some, evenly
spread, with the first and the last, to six digits.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import aligned, temperature
from doge_fast.pipeline import records
from doge_fast.pipeline.records.schema import ArmRecord, PerplexityGroup
from doge_fast.pipeline.report import terminal_table
from doge_fast.pipeline.reporting.statistics import Line, change_text, perplexity_text
from doge_fast.pipeline.reporting.study import Study, open_study
from doge_fast.pipeline.tables import Cell, table_of, text

# Of the lines of one run's training.
KEPT_LINES = 40
DIGITS = 6
# {benchmark: the table of its record}
TABLES = {"temperature": temperature.table, "aligned": aligned.table}
_WHOLE = (records.CONFIG, records.WEIGHTS, records.EVALUATION, records.FEWSHOT)

Record = dict[str, Any]


def packed(experiment: Path) -> Record:
    """Everything that a report of the experiment reads.

    Returns:
        {"experiment": ..., "runs": {name: {"config.json": ..., "metrics.jsonl": [...], ...}}}.

    Raises:
        ValueError: the directory is no experiment's.
    """
    record = records.read_json(experiment / records.EXPERIMENT)
    # Those of the plan in its order, then what lies beside them.
    beside = sorted(path.name for path in (experiment / "runs").iterdir())
    folders = (experiment / "runs" / name for name in dict.fromkeys((*record["runs"], *beside)))
    runs = {path.name: _files_of(path) for path in folders if (path / records.CONFIG).exists()}
    return {"benchmark": "evidence", "experiment": record, "runs": runs}


def unpack(record: Record, out: Path) -> Path:
    """Write what `packed` returned as an experiment's directory.

    Raises:
        ValueError: `out` exists, or it is a record of something else.
    """
    if "experiment" not in record:
        raise ValueError(f"A record of benchmarks.{record['benchmark']} is no experiment: compare.")
    if out.exists():
        raise ValueError(f"{out} exists; name a directory that does not.")
    out.mkdir(parents=True)
    experiment = dict(record["experiment"])
    # Tables of regret, that commit a3f4879 was the last one to make; `_target_tables` makes those
    # of targets.
    left_out = ("regret", "targets")
    experiment["groups"] = [each for each in experiment["groups"] if each["kind"] not in left_out]
    records.write_json(out / records.EXPERIMENT, experiment)
    for name, files in record["runs"].items():
        run = out / "runs" / name
        run.mkdir(parents=True)
        for file, content in files.items():
            if file == records.METRICS:
                lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in content)
                (run / file).write_text("".join(lines), encoding="utf-8")
            else:
                records.write_json(run / file, content)
    return out


def thinned(lines: Sequence[Record], kept: int = KEPT_LINES) -> list[Record]:
    """All evaluations, and of the training lines about `kept`: evenly spread ones, ends included,
    and that of the largest gradient, which may have decided the weights."""
    train = [index for index, line in enumerate(lines) if line["kind"] == "train"]
    last = len(train) - 1
    chosen = set(train)
    if last >= kept:
        chosen = {train[round(i * last / (kept - 1))] for i in range(kept)}
        chosen.add(max(train, key=lambda index: _largest_gradient(lines[index])))
    return [line for i, line in enumerate(lines) if i in chosen or line["kind"] != "train"]


def _largest_gradient(line: Record) -> float:
    norms = line.get("grad_norm", {}).values()
    return max((norm for norm in norms if norm is not None), default=0.0)


def _files_of(run: Path) -> Record:
    files = {name: records.read_json(run / name) for name in _WHOLE if (run / name).exists()}
    if (run / records.METRICS).exists():
        files[records.METRICS] = [_rounded(line) for line in thinned(records.read_metrics(run))]
    return files


def _rounded(value: Any) -> Any:
    """Floats to `DIGITS`, in whatever a line holds."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def tables_of(record: Record, folder: Path) -> str:
    """All tables of a record of `packed`, which is unpacked into `folder`."""
    report = terminal_table([unpack(record, folder)])
    study = open_study([folder])
    groups = (each for each in record["experiment"]["groups"] if each["kind"] == "targets")
    return "\n\n".join([report, *(_target_tables(study, group["rows"]) for group in groups)])


def _target_tables(study: Study, rows: Sequence[Record]) -> str:
    """Perplexities on targets (tab:ppl-ood), also of fine-tuned models and of an oracle, and DoGE's
    against uniform's. Every target has the same arms."""
    arms = rows[0]["arms"]
    labels, own = [arm["label"] for arm in arms], "DoGE"
    baseline = next(arm["label"] for arm in arms if arm.get("is_baseline"))
    others = {arm["label"]: arm.get("baseline", baseline) for arm in arms}
    shown = [label for label in labels if label.startswith(own)]
    perplexities, changes = [], []
    for row in rows:
        losses = {
            arm["label"]: study.losses(ArmRecord(arm["label"], arm["about"], tuple(arm["runs"])))
            for arm in row["arms"]
        }
        line = Line(row["target"], losses, {row["target"]: 1})
        differences = {label: line.difference(label, others[label]) for label in labels}
        cells = (
            Cell(perplexity_text(line.perplexity(label)), differences[label].is_lower)
            if losses[label]
            else "–"
            for label in labels
        )
        perplexities.append([line.label, *cells])
        compared = (Cell(change_text(d), d.is_lower) for d in map(differences.get, shown))
        changes.append([line.label, *compared])
    heads = (
        label if others[label] == baseline else f"{label} against {others[label]}"
        for label in shown
    )
    both = table_of(["target", *labels], perplexities), table_of(["target", *heads], changes)
    return "\n\n".join(map(text, both))


def against_doge(experiment: Path) -> str:
    """Base models of one experiment against those at DoGE's weights, seed by seed.

    Args:
        experiment: its directory; its first table has a loss over several domains.

    Returns:
        A row for each arm: its average perplexity against DoGE's, with the interval of the paired
        differences.
    """
    study = open_study([experiment])
    tables = (study.lines(group) for group in study.of(PerplexityGroup))
    (*_, average) = next(lines for lines in tables if lines and "DoGE" in lines[-1].losses)
    labels = [label for label in average.losses if label != "DoGE"]
    rows = [[label, change_text(average.difference(label, "DoGE"))] for label in labels]
    return text(table_of(["weights", "average against DoGE"], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, unpack or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("pack", "unpack", "compare"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="of pack and unpack")
    args = parser.parse_args(arguments)
    if args.do == "compare":
        if args.source.is_dir():
            print(against_doge(args.source))
            return 0
        record = records.read_json(args.source)
        if table := TABLES.get(record["benchmark"]):
            print(table(record))
            return 0
        with tempfile.TemporaryDirectory() as folder:
            print(tables_of(record, Path(folder, args.source.stem)))
        return 0
    if args.out is None:
        parser.error(f"{args.do} needs the name of what it writes.")
    if args.do == "unpack":
        unpack(records.read_json(args.source), args.out)
    else:
        # One line a record: several thousand numbers, none of them for reading.
        text = json.dumps(packed(args.source), ensure_ascii=False, separators=(",", ":"))
        args.out.write_text(text + "\n", encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
