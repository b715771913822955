"""Runs -> one page: what was asked, what came out, figures, tables, settings.

Reads run directories only, so a report can be made where the runs cannot: the records are
complete, and nothing here knows how they were computed. The page is one file that opens offline;
its figures also lie beside it as PNG and SVG.

Whichever arm wins is what the page says. A learned mixture is always set against the uniform one
at equal tokens, model and settings; arms that differ in anything else are never in one table.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from doge_fast.pipeline import records
from doge_fast.pipeline.config import ReportConfig
from doge_fast.pipeline.reporting.experiment import RUNS, open_experiment
from doge_fast.pipeline.reporting.figures import BASE_MODELS, Section, draw
from doge_fast.pipeline.reporting.findings import findings_of
from doge_fast.pipeline.reporting.plotting import VARIABLES, Drawing
from doge_fast.pipeline.reporting.study import Study, read_study
from doge_fast.pipeline.reporting.tables import (
    corpus_table,
    perplexity_table,
    runs_table,
    tables_of,
    weights_table,
)
from doge_fast.pipeline.reporting.verdicts import (
    asked_of,
    proxy_warnings,
    run_warnings,
    summary_of,
    verdict_on,
    warnings_about,
)
from doge_fast.pipeline.reporting.wording import as_ascii, plural, wrapped
from doge_fast.pipeline.tables import Cell, Row, Table, text


def write_report(config: ReportConfig) -> Path:
    """Write the page for a set of runs, or for an experiment, and its figures beside it.

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
    if _is_experiment(config.runs):
        return write_experiment_report(Path(config.runs[0]), config.out)
    study = read_study(config.runs)
    page = config.out or _default_page(config.runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    sections = draw(study)
    _save_figures(sections, page.with_name(f"{page.stem}-figures"))
    page.write_text(_render(study, sections, config.token_budget), encoding="utf-8")
    return page


def write_experiment_report(out: Path, page: Path | None = None) -> Path:
    """Write the page of an experiment, and its figures beside it.

    Reads records only, so it can be made of what there is while runs are still missing.

    Args:
        out: the experiment's directory.
        page: None: report.html in that directory.

    Returns:
        The page.

    Raises:
        ValueError: it is no experiment's directory, no run has begun, or a record is not what it
            should be; nothing has been written.
    """
    experiment = open_experiment(out)
    findings = findings_of(experiment)
    study = read_study(_told_runs(out))
    sections = [*findings.sections, *(each for each in draw(study) if each.title != BASE_MODELS)]
    page = page or out / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    _save_figures(sections, page.with_name(f"{page.stem}-figures"))
    settings = experiment.record["settings"]
    rows = [Row(name, [Cell(_setting_text(value))]) for name, value in settings.items()]
    chosen = Table(f"Preset {experiment.record['preset']}", "", "setting", [("value", "")], rows)
    html = _template().render(
        **_common(study),
        title=findings.title,
        lead=findings.question,
        verdicts=findings.verdicts,
        summaries=[summary_of(proxy) for proxy in study.proxies],
        warnings=[*findings.warnings, *run_warnings(study)],
        asked=[
            f"doge-fast experiment {experiment.record['name']}, preset "
            f"{experiment.record['preset']}: {plural(len(study.runs), 'run')}.",
            *findings.told,
        ],
        sections=sections,
        tables=findings.tables,
        settings=[chosen, runs_table(study), corpus_table(study)],
    )
    page.write_text(html, encoding="utf-8")
    return page


def experiment_table(out: Path) -> str:
    """The tables and the answer of an experiment as aligned plain text, for a terminal.

    Raises:
        ValueError: as `write_experiment_report`.
    """
    findings = findings_of(open_experiment(out))
    blocks = [f"{findings.title}\n{wrapped(findings.question)}"]
    blocks += [f"{table.title}\n\n{text(table)}" for table in findings.tables]
    blocks += [
        "\n".join(map(wrapped, (f"{verdict.title}: {verdict.headline}.", *verdict.sentences)))
        for verdict in findings.verdicts
    ]
    proxies = read_study(_told_runs(out)).proxies
    warnings = [*findings.warnings, *(each for proxy in proxies for each in proxy_warnings(proxy))]
    blocks.append("\n".join(wrapped(f"Warning: {each}") for each in warnings))
    return as_ascii("\n\n".join(block for block in blocks if block))


def _is_experiment(runs: Sequence[Path]) -> bool:
    return len(runs) == 1 and (Path(runs[0]) / records.EXPERIMENT).exists()


def _told_runs(out: Path) -> list[Path]:
    """The runs of an experiment that learn weights or train at them."""
    told = [
        path.parent
        for path in sorted((out / RUNS).glob("*/config.json"))
        if records.read_config(path.parent)["stage"] != "select"
    ]
    if not told:
        raise ValueError(f"No run of the experiment in {out} has begun.")
    return told


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "all"
    return "none" if value is None else str(value)


def terminal_table(runs: Sequence[Path]) -> str:
    """The answer of a set of runs as aligned plain text, for a terminal.

    Args:
        runs: run directories, or one directory that holds them or is an experiment's.

    Returns:
        Per comparison a table of perplexities (* where better than uniform) and the verdict; the
        learned weights; the warnings. ASCII but for the names.

    Raises:
        ValueError: as `write_report`.
    """
    if _is_experiment(runs):
        return experiment_table(Path(runs[0]))
    study = read_study(runs)
    blocks = []
    for comparison in study.comparisons:
        verdict = verdict_on(comparison, study)
        title = f"{comparison.title}: perplexity on held-out text, {comparison.settings}"
        blocks.append(f"{wrapped(title)}\n\n{text(perplexity_table(comparison))}")
        blocks.append(wrapped(" ".join((f"{verdict.headline}.", *verdict.sentences))))
    if study.proxies:
        table = weights_table(study)
        blocks.append(f"{table.title}\n\n{text(table)}")
        blocks += [wrapped(summary_of(proxy)) for proxy in study.proxies]
    blocks.append("\n".join(wrapped(f"Warning: {each}") for each in warnings_about(study, None)))
    return as_ascii("\n\n".join(block for block in blocks if block))


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
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = Markup.escape(f"{drawing.title}. {drawing.caption}")
    # Every name in it has been escaped by matplotlib.
    return Markup(f'{head} role="img" aria-label="{label}">{body}')


def _render(study: Study, sections: Sequence[Section], token_budget: int | None) -> str:
    return _template().render(
        **_common(study),
        title="Domain weights",
        lead=f"{plural(sum(len(proxy.runs) for proxy in study.proxies), 'proxy run')}, "
        f"{plural(len(study.bases), 'base model')}",
        verdicts=[verdict_on(comparison, study) for comparison in study.comparisons],
        summaries=[summary_of(proxy) for proxy in study.proxies],
        warnings=warnings_about(study, token_budget),
        asked=asked_of(study),
        sections=sections,
        tables=tables_of(study, token_budget),
        settings=[runs_table(study), corpus_table(study)],
    )


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    return environment.get_template("report.html")


def _common(study: Study) -> dict[str, Any]:
    """What every page holds."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return {
        "css": Markup(css),
        "configurations": [
            (run.name, json.dumps(run.config, indent=2, ensure_ascii=False)) for run in study.runs
        ],
        "versions": _versions(study),
    }


def _versions(study: Study) -> list[str]:
    """Every set of versions that runs were made with."""
    lines = [
        ", ".join(f"{name} {version}" for name, version in run.versions.items())
        for run in study.runs
    ]
    return list(dict.fromkeys(line for line in lines if line))
