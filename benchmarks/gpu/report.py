"""The record of a run for people: a line while it runs, and a page of tables."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import anchor
from benchmarks.gpu.session import Row

KEYS = ("operator", "implementation", "dtype", "rows", "shape", "problem")
STEP_HEADER = (
    "model",
    "K",
    "mode",
    "step / plain",
    "plain ms",
    "plain MFU",
    "peak GB",
    "host waits",
    "bar",
)
RANK_HEADER = ("model", "K", "mode", "step / plain DDP", "plain ms")
OPERATOR_HEADER = (
    *("operator", "dtype", "shape", "K", "N", "runs", "ms", "GB/s"),
    *("of the roof", "over plain torch", "bar"),
)
ANCHOR_HEADER = (
    *("model", "K", "stacked / plain", "one domain after another", "plain, ms", "plain MFU"),
    *("the plain one", "bar"),
)
KERNEL_HEADER = ("kernel", "ms a step", "launches a step")
JOB_HEADER = ("run", "ms a step", "tokens/s", "over plain", "held-out loss", "weights")
# What of a record says where it is from, in the order of the page.
ORIGIN = ("torch", "triton", "cuda", "driver", "python", "transformers", "architecture", "commit")


def markdown(record: Row) -> str:
    """The page."""
    origin = [f"{name} {record[name]}" for name in ORIGIN if record.get(name)]
    choices = [f"{operator} {name}" for operator, name in record["chosen"].items()]
    lines = [
        f"# {record['device']}",
        "",
        f"{', '.join(origin)}. Implementations: {', '.join(record['implementations'])}; chosen: "
        f"{', '.join(choices)}. Memory is read at {record['read_gb_per_s']} GB/s and copied at "
        f"{record['copy_gb_per_s']}.",
        "",
        *[f"Missing: {line}\n" for line in missing_lines(record)],
        f"Everything checked was {'right' if record['correct'] else 'NOT RIGHT'}.",
        "",
        *_table(
            ("bar", "value", "verdict"),
            [(each["bar"], text_of(each["value"]), each["verdict"]) for each in record["bars"]],
        ),
    ]
    for name, section in record["sections"].items():
        lines += ["", f"## {name}", "", how_it_went(section), ""]
        lines += _WRITERS.get(name, _check_table)(section["rows"])
    return "\n".join(lines) + "\n"


def missing_lines(record: Row) -> list[str]:
    """A line for each implementation that should run on the device and cannot."""
    return [
        f"{name} should run on this device and cannot. {reason}"
        for name, reason in record["missing"].items()
    ]


def how_it_went(section: Row) -> str:
    """Rows, time, the peak of memory on a GPU, and what ended it early."""
    text = f"{len(section['rows'])} rows in {section['seconds']:.0f} s"
    if "peak_bytes" in section:
        peak = section["peak_bytes"]
        text += ", memory not measured" if peak is None else f", at most {peak / 1e9:.1f} GB"
    text += ", CUT FOR TIME: what comes later is missing" if section["cut"] else ""
    return text + (f"; FAILED: {section['failure']}" if "failure" in section else "") + "."


def line_of(row: Row) -> str | None:
    """What is printed of a row at once: times of steps and jobs, and whatever is wrong."""
    if row.get("correct") is False:
        return "WRONG " + ", ".join(text_of(row[key]) for key in KEYS if row.get(key) is not None)
    if "skipped" in row:
        return f"skipped {' '.join(_title(row))}: {row['skipped']}".replace(" :", ":")
    if "kernels" in row:
        return f"{' '.join(_title(row))}: {_profile_summary(row)}"
    if "plain" in row and "stacked" in row:
        return anchor.line(row)
    if "model" in row:
        return f"{' '.join(_title(row))}: {_spread(row)} of {row['baseline_ms']:.1f} ms"
    if "step_ms" in row:
        name, step, rate, over, loss, _ = _job_cells(row)
        over = over and f"{over} of plain, "
        return f"{name}: {step} ms a step, {over}{rate} tokens/s, held-out loss {loss}"
    return None


def _title(row: Row) -> list[str]:
    return [str(row[key]) for key in ("operator", "model", "mode") if key in row] + (
        [f"K={row['domains']}"] if "domains" in row else []
    )


def _check_table(rows: Sequence[Row]) -> list[str]:
    """What was not right, or that all was."""
    wrong = [row for row in rows if row.get("correct") is False]
    right = sum(row.get("correct") is True for row in rows)
    skipped = sorted({row["skipped"] for row in rows if "skipped" in row})
    lines = [f"Skipped: {reason}." for reason in skipped]
    lines += [f"{right} checks held."] if right else []
    lines += [f"{row['implementation']}: {row['said']}." for row in rows if row.get("said")]
    if not wrong:
        return lines
    return [*lines, "", *_table(KEYS, [[text_of(row.get(key)) for key in KEYS] for row in wrong])]


def _step_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        start = [row["model"], row["domains"], row["mode"]]
        if "skipped" in row:
            body.append([*start, row["skipped"], *[""] * 5])
            continue
        mfu = f"{100 * row['plain_mfu']:.0f} %" if row["plain_mfu"] else ""
        waits = row.get("host_synchronisations", "")
        peak = f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else ""
        body.append([*start, *_times(row), mfu, peak, waits, row["verdict"] or ""])
    return _table(STEP_HEADER, body)


def _rank_table(rows: Sequence[Row]) -> list[str]:
    times = [row for row in rows if "ratio" in row]
    cells = [[row["model"], row["domains"], row["mode"], *_times(row)] for row in times]
    table = ["", *_table(RANK_HEADER, cells)] if times else []
    return [*_check_table(rows), *table]


def _times(row: Row) -> list[str]:
    return [_spread(row), f"{row['baseline_ms']:.1f}"]


def _spread(row: Row) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _operator_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        start = [
            f"{row['operator']} {row['label']}".strip(),
            row["dtype"],
            row["shape"],
            str(row["rows"]),
            f"{row['columns'] / 1e6:.3g}M",
            row["implementation"],
        ]
        if "ms" not in row:
            body.append([*start, f"WRONG: {row['problem']}", "", "", "", ""])
            continue
        fraction = f"{row['fraction'][0]:.2f} {row['roof']}" if "fraction" in row else row["roof"]
        over = f"{row['over_plain'][0]:.2f}" if "over_plain" in row else ""
        plain = row.get("plain", "none")
        rate = f"{row['gigabytes_per_s']:.0f}"
        body.append([*start, f"{row['ms']:.3f}", rate, fraction, f"{over} of {plain}", row["bar"]])
    return _table(OPERATOR_HEADER, body)


def _anchor_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        start = [row["model"], row["domains"]]
        if "skipped" in row:
            body.append([*start, row["skipped"], *[""] * 5])
            continue
        mfu = f"{100 * row['plain_mfu']:.0f} %" if row["plain_mfu"] else ""
        plain_ms = f"{row['stacked']['baseline_ms']:.1f}"
        ratios = [_spread(row["stacked"]), _spread(row["sequential"])]
        body.append([*start, *ratios, plain_ms, mfu, row["plain"], row.get("verdict", "")])
    return _table(ANCHOR_HEADER, body)


def _profile_text(rows: Sequence[Row]) -> list[str]:
    """A table of kernels for each step."""
    lines = _check_table([row for row in rows if "kernels" not in row])
    for row in rows:
        if "kernels" in row:
            body = [[each["kernel"], each["ms"], each["launches"]] for each in row["kernels"]]
            lines += ["", f"{row['problem']}: {_profile_summary(row)}", ""]
            lines += _table(KERNEL_HEADER, body)
    return lines


def _profile_summary(row: Row) -> str:
    return (
        f"{row['profiled_ms']:.1f} ms, of which {row['busy_ms']:.1f} in {row['launches']} launches"
    )


def _job_table(rows: Sequence[Row]) -> list[str]:
    done = [row for row in rows if "step_ms" in row]
    rest = [row for row in rows if "step_ms" not in row]
    table = _table(JOB_HEADER, [_job_cells(row) for row in done]) if done else []
    commands = [f"    {row['command']}" for row in rows if "command" in row]
    return [*_check_table(rest), *table, *([""] if commands else []), *commands]


def _job_cells(row: Row) -> list[str]:
    weights = ", ".join(f"{name} {value:.3f}" for name, value in row.get("weights", {}).items())
    over = f"{row['ratio']:.3f}" if "ratio" in row else ""
    loss = f"{row['held_out_loss']:.3f}"
    return [row["run"], f"{row['step_ms']:.1f}", str(row["tokens_per_s"]), over, loss, weights]


_WRITERS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "steps": _step_table,
    "sizes": _step_table,
    "operators": _operator_table,
    "anchor": _anchor_table,
    "profile": _profile_text,
    "job": _job_table,
    "ranks": _rank_table,
}


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *body]
    return ["| " + " | ".join(str(cell) for cell in cells) + " |" for cells in lines]


def text_of(value: Any) -> str:
    """Of a cell."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
