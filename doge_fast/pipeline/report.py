"""Writes the report of runs: their weights, the course of these, their effect and their origin.

Reads records only, so it needs none of the hardware that trained the runs. The page is one file
that opens offline; `Run.figures()` gives its figures in Python.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from doge_fast import atomic_file
from doge_fast.pipeline import failures
from doge_fast.pipeline.config import ReportConfig
from doge_fast.pipeline.named import visible
from doge_fast.pipeline.records import check_out
from doge_fast.pipeline.reporting.figures import VARIABLES, Drawing
from doge_fast.pipeline.reporting.sections import page_of
from doge_fast.pipeline.tables import text
from doge_fast.pipeline.wording import as_ascii, wrapped


def write_report(config: ReportConfig) -> Path:
    """Write the page for a set of runs, or for an experiment; return its path.

    Runs may still be missing. Runs that differ only in their seed are one arm. An experiment's plan
    says which base models are compared; other base models may differ only in weights and seed.

    Raises:
        UserError: as `open_study`; nothing has been written.

    Source: DoGE (Fan, Pagliardini, Jaggi; ICML 2024), tab:universal_ppl, tab:dw and tab:ood-dw.
    """
    content = page_of(config.runs)
    page = config.out or _default_page(config.runs)
    check_out(page, config.runs)
    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined)
    environment.filters["inline"] = _inline
    html = environment.get_template("report.html").render(page=content)
    with failures.writing(page):
        # Names in records of runs made elsewhere may hold anything.
        atomic_file.write(page, visible(html))
    return page


def terminal_table(runs: Sequence[Path]) -> str:
    """The same page as aligned plain text, without drawings: ASCII except for names.

    Raises:
        UserError: as `write_report`.
    """
    page = page_of(runs)
    blocks = [f"{page.title}\n{wrapped(page.question)}", wrapped(page.headline)]
    for section in page.sections:
        for table in section.tables:
            blocks += [f"{table.title}\n\n{text(table)}", wrapped(table.note)]
        lines = [*(f"  {command}" for command in section.commands), *map(wrapped, section.remarks)]
        blocks.append("\n".join([*([] if section.tables else [section.title]), *lines]))
    return as_ascii("\n\n".join(block for block in blocks if block))


def _default_page(runs: Sequence[Path]) -> Path:
    """report.html in the one directory of `runs`, or beside several."""
    if len(runs) == 1:
        return Path(runs[0]) / "report.html"
    return Path(os.path.commonpath([Path(run).resolve().parent for run in runs])) / "report.html"


def _inline(drawing: Drawing, name: str) -> Markup:
    """The figure as inline SVG with the page's colours and font; its ids begin with `name`."""
    svg = drawing.svg[drawing.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    # Several figures on one page must not share ids.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = Markup.escape(f"{drawing.title}. {drawing.caption}")
    # Every name in it has been escaped by matplotlib.
    return Markup(f'{head} role="img" aria-label="{label}">{body}')
