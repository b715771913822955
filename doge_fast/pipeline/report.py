"""Runs -> one page: what was asked, what came out, figures, tables, settings.

Reads run directories only, so a report can be made where the runs cannot. The page is one file that
opens offline; its figures also lie beside it as PNG and SVG. Arms are compared at equal tokens,
model and settings; those that differ in anything else are never in one table.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from doge_fast import atomic_file
from doge_fast.pipeline.config import ReportConfig
from doge_fast.pipeline.config.ranges import check as check_ranges
from doge_fast.pipeline.named import visible
from doge_fast.pipeline.reporting.background import settings_tables, warnings_about
from doge_fast.pipeline.reporting.findings import parts_of, proxy_parts
from doge_fast.pipeline.reporting.parts import Part
from doge_fast.pipeline.reporting.plotting import VARIABLES, Drawing, style
from doge_fast.pipeline.reporting.study import Study, open_study
from doge_fast.pipeline.reporting.wording import as_ascii, count_text, listed, plural, wrapped
from doge_fast.pipeline.tables import Row, Table, text


def write_report(config: ReportConfig) -> Path:
    """Write the page for a set of runs, or for an experiment, and its figures beside it.

    Reads records only, so it can be made of what there is while runs are still missing. Runs that
    differ in nothing but their seed are one arm, compared with others seed by seed; base models are
    compared where they saw the same number of tokens of the same corpus with the same model and
    settings, or where an experiment's plan says so.

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
    check_ranges(config)
    study = open_study(config.runs)
    page = config.out or _default_page(config.runs)
    folder = page.with_name(f"{page.stem}-figures")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [(part, _drawn(part, folder)) for part in (*parts_of(study), *proxy_parts(study))]
    html = _template().render(
        css=Markup((Path(__file__).parent / "report.css").read_text(encoding="utf-8")),
        study=study,
        summaries=[proxy.summary() for proxy in study.proxies],
        warnings=warnings_about(study, config.token_budget),
        parts=parts,
        settings=settings_tables(study, config.token_budget),
        versions=_versions(study),
    )
    # Names in records of runs made elsewhere may hold anything.
    atomic_file.write(page, visible(html))
    return page


def terminal_table(runs: Sequence[Path]) -> str:
    """The tables and the answer of a set of runs as aligned plain text, for a terminal.

    Args:
        runs: run directories, or one directory that holds them or is an experiment's.

    Returns:
        The question; each group's tables (* where the interval says better, or a weight is above
        uniform) and its answer; what proxies learned; the warnings. ASCII but for the names.

    Raises:
        ValueError: as `write_report`.
    """
    study = open_study(runs)
    blocks = [f"{study.record['title']}\n{wrapped(study.record['question'])}"]
    for part in parts_of(study):
        blocks += [f"{table.title}\n\n{text(_plain(table))}" for table in part.tables]
        for verdict in part.verdicts:
            told = (f"{verdict.title}: {verdict.headline}.", *verdict.sentences)
            blocks.append("\n".join(map(wrapped, told)))
    blocks += [wrapped(proxy.summary()) for proxy in study.proxies]
    blocks.append("\n".join(wrapped(f"Warning: {each}") for each in warnings_about(study, None)))
    return as_ascii("\n\n".join(block for block in blocks if block))


def _plain(table: Table) -> Table:
    """As a terminal shows it, so that columns are as wide as what stands in them."""
    rows = [
        Row(as_ascii(label), [cell._replace(text=as_ascii(cell.text)) for cell in cells], is_total)
        for label, cells, is_total in table.rows
    ]
    return table._replace(rows=rows)


def _default_page(runs: Sequence[Path]) -> Path:
    """Inside the one directory that was named, or beside the runs."""
    if len(runs) == 1:
        return Path(runs[0]) / "report.html"
    return Path(os.path.commonpath([Path(run).resolve().parent for run in runs])) / "report.html"


def _drawn(part: Part, folder: Path) -> list[Drawing]:
    """The part's figures, which then lie in the folder too."""
    with style():
        drawings = [draw() for draw in part.sketches]
    for drawing in drawings:
        atomic_file.write(folder / f"{drawing.name}.svg", visible(drawing.svg))
        atomic_file.write(folder / f"{drawing.name}.png", drawing.png)
    return drawings


def _inline(drawing: Drawing) -> Markup:
    """The figure as a part of the page: its colours and font, its own names, any width."""
    svg = drawing.svg[drawing.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    # Several figures on one page must not share ids.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{drawing.name}-", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = Markup.escape(f"{drawing.title}. {drawing.caption}")
    # Every name in it has been escaped by matplotlib.
    return Markup(f'{head} role="img" aria-label="{label}">{body}')


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    environment.globals |= {"count_text": count_text, "listed": listed, "plural": plural}
    environment.globals["indented"] = partial(json.dumps, indent=2, ensure_ascii=False)
    return environment.get_template("report.html")


def _versions(study: Study) -> list[str]:
    """Every set of versions that runs were made with."""
    told = [run.record.get("versions", {}) for run in study.shown]
    lines = (", ".join(f"{name} {version}" for name, version in each.items()) for each in told)
    return list(dict.fromkeys(line for line in lines if line))
