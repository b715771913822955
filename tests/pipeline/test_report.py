"""The page says what the records say, whichever arm wins, and refuses what is not a run.

Records are written here by hand, so that every number on the page has a known cause.
"""

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doge_fast.pipeline import records, report
from doge_fast.pipeline.config import (
    ProxyConfig,
    ReportConfig,
)
from doge_fast.pipeline.records.movement import Movement, movement_of
from doge_fast.pipeline.reporting import plotting
from doge_fast.pipeline.reporting.proxies import remarks_on
from doge_fast.pipeline.reporting.wording import Stat, perplexity_stat, weight_text
from tests.pipeline.written_runs import (
    BLOCK_SIZE,
    DOMAINS,
    STEPS,
    TOKENS,
    TRAINING,
    UNIFORM_LOSS,
    by_name,
    corpus,
    without,
    write_base,
    write_experiment,
    write_proxy,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two proxies and five base models, as the demo leaves them; learned wins on five of seven."""
    folder = tmp_path_factory.mktemp("study") / "runs"
    universal = write_proxy(folder / "proxy-universal")
    rest = without("reference")
    elsewhere = write_proxy(
        folder / "proxy-for-reference",
        domains=rest,
        target=("reference",),
        logits=(0.2, -0.8, 1.6, 0.1, -0.6, -1.0),
    )
    write_base(folder / "base-uniform")
    shift = by_name(DOMAINS, (-0.06, -0.02, -0.01, -0.11, -0.04, 0.07, 0.09))
    learned = {name: UNIFORM_LOSS[name] + shift[name] for name in DOMAINS}
    write_base(folder / "base-learned", weights=str(universal), loss=learned)
    shift = by_name(DOMAINS, (-0.10, 0.21, -0.07, 0.03, -0.06, 0.18, 0.40))
    natural = {name: UNIFORM_LOSS[name] + shift[name] for name in DOMAINS}
    write_base(folder / "base-natural", weights="natural", loss=natural)
    out = {"domains": rest, "targets": ("reference",)}
    write_base(folder / "base-uniform-without-reference", change=0.3, **out)  # type: ignore[arg-type]
    write_base(
        folder / "base-learned-for-reference",
        weights=str(elsewhere),
        change=0.25,
        **out,  # type: ignore[arg-type]
    )
    return folder


class Page(HTMLParser):
    """Text, tags, ids and references of a page; refuses what is not well nested."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._look(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._look(attrs)

    def _look(self, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id":
                self.ids.append(str(value))
            if key in ("src", "href", "xlink:href"):
                self.references.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(runs: Path) -> Page:
    """Their page, made once."""
    return page_of(runs, out=runs.parent / "out" / "page.html")


def page_of(*runs: Path, **options: Any) -> Page:
    return Page(report.write_report(ReportConfig(runs=runs, **options)))


def words_of(*runs: Path) -> str:
    """What a terminal is told, on one line; no figure is drawn for it."""
    return " ".join(report.terminal_table(runs).split())


def test_the_page_needs_nothing_from_anywhere(page: Page) -> None:
    assert not {"script", "iframe", "img", "object"} & set(page.tags)
    outside = [each for each in page.references if not each.startswith(("#", "data:,"))]
    assert outside == []
    css = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert "url(" not in css
    assert "@import" not in css
    assert len(set(page.ids)) == len(page.ids)
    inner = {each[1:] for each in page.references if each.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]+)\)", page.source))
    assert inner
    assert inner <= set(page.ids)
    # Every colour of a figure follows the page's, light or dark, but for the cells of heat maps.
    assert "#033fb2" not in page.source.replace(css, "")
    assert {f"var(--domain-{place})" for place in range(7)} <= set(
        re.findall(r"var\([a-z0-9-]+\)", page.source)
    )


@pytest.mark.usefixtures("page")
def test_the_figures_lie_beside_the_page(runs: Path) -> None:
    folder = runs.parent / "out" / "page-figures"
    names = {file.stem for file in folder.glob("*.svg")}
    assert names == {file.stem for file in folder.glob("*.png")}
    parts = ("weights-final", "weights", "drift", "affinity", "gain", "loss")
    expected = {
        f"proxy-proxy-{which}-{part}" for which in ("universal", "for-reference") for part in parts
    }
    assert names == expected | {"group-1-change", "group-2-change", "group-3-weights"}
    for file in folder.iterdir():
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            ElementTree.parse(file)
    weights = (folder / "proxy-proxy-universal-weights.svg").read_text(encoding="utf-8")
    for name in DOMAINS:
        assert f">{name}</text>" in weights


@pytest.mark.exhaustive
def test_the_same_records_give_the_same_page(runs: Path, page: Page) -> None:
    again = report.write_report(ReportConfig(runs=(runs,)))
    assert again.read_text(encoding="utf-8") == page.source
    for file in (runs.parent / "out" / "page-figures").iterdir():
        assert (runs / "report-figures" / file.name).read_bytes() == file.read_bytes()


def test_a_page_goes_inside_or_beside_the_runs(tmp_path: Path) -> None:
    named = (write_base(tmp_path / "a" / "x"), write_base(tmp_path / "b" / "x"))
    assert report.write_report(ReportConfig(runs=(tmp_path / "a",))) == tmp_path / "a/report.html"
    assert report.write_report(ReportConfig(runs=named)) == tmp_path / "report.html"
    assert report.write_report(ReportConfig(runs=named[:1])) == named[0] / "report.html"


def test_the_answer_of_one_seed_is_undecided(page: Page) -> None:
    text = page.text.replace("\N{NO-BREAK SPACE}", " ")
    uniform = math.exp(sum(UNIFORM_LOSS.values()) / 7)
    learned = uniform * math.exp(-0.08 / 7)
    change = f"−{100 * (1 - learned / uniform):.1f}"
    size = change.removeprefix("−")
    assert f"Undecided: proxy-universal comes out {size} % below uniform in the one seed." in text
    assert "proxy-universal: lower on 5 of 7 domains than uniform" in text
    assert f"average {learned:.2f} against {uniform:.2f}, {change} % over 1 paired seed" in text
    assert "natural: lower on 3 of 7 domains than uniform" in text
    # exp(0.25 - 0.30) - 1.
    assert "on reference, which is not trained on, 73.70 against 77.48, −4.9 % over" in text
    assert "For scale: uniform weights with reference among the domains reach 57.40." in text


def losing(folder: Path, changes: Mapping[str, float]) -> list[Path]:
    proxy = write_proxy(folder / "proxy")
    made = [proxy, write_base(folder / "uniform")]
    for weights, change in changes.items():
        source = str(proxy) if weights == "learned" else weights
        made.append(write_base(folder / weights, weights=source, change=change))
    return made


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"learned": 0.1}, "Undecided: proxy comes out 10.5 % above uniform in the one seed."),
        ({"learned": 0.0}, "Undecided: proxy and uniform come out the same in the one seed."),
        ({"learned": -0.1}, "Undecided: proxy comes out 9.5 % below uniform in the one seed."),
        (
            {"learned": -0.1, "natural": -0.2},
            "Undecided: proxy comes out 9.5 % below uniform in the one seed.",
        ),
        ({"natural": -0.2}, "Undecided: natural comes out 18.1 % below uniform in the one seed."),
        ({}, "only uniform weights have been tried."),
        ({"learned": math.nan}, "proxy or uniform diverged."),
    ],
    ids=str,
)
def test_one_seed_decides_nothing(tmp_path: Path, changes: dict[str, float], headline: str) -> None:
    assert headline in words_of(*losing(tmp_path / "runs", changes))


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ((-0.1, -0.11, -0.105), "proxy beats uniform."),
        ((0.1, 0.11, 0.105), "proxy loses to uniform."),
        ((-0.1, 0.11, -0.105), "Undecided: proxy comes out 3.1 % below uniform over 3 seeds."),
    ],
)
def test_several_seeds_decide_by_their_interval(
    tmp_path: Path, changes: Sequence[float], headline: str
) -> None:
    for seed, change in enumerate(changes):
        proxy = write_proxy(tmp_path / f"proxy-seed{seed}", seed=seed, steps=12)
        write_base(tmp_path / f"uniform-seed{seed}", seed=seed, change=0.3 * seed)
        change += 0.3 * seed
        write_base(tmp_path / f"base-seed{seed}", seed=seed, change=change, weights=str(proxy))
    assert headline in words_of(tmp_path)


def test_arms_without_a_common_seed_are_shown_and_not_compared(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform", seed=0)
    write_base(tmp_path / "natural", weights="natural", change=-0.1, seed=1)
    text = words_of(tmp_path)
    assert "Undecided: natural and uniform have no seed in common." in text
    assert "24.78 22.42" in text
    # Also where one of them has more.
    write_base(tmp_path / "uniform-too", seed=2)
    assert "Undecided: natural and uniform have no seed in common." in words_of(tmp_path)


def cells(source: str, title: str) -> dict[str, list[str]]:
    """Rows of the page's table of that title: {label: what stands in its cells, as HTML}."""
    table = source[source.index(f"<h3>{title}</h3>") :].split("</table>")[0]
    rows = table.split("<tbody>")[1].split("<tr")[1:]
    return {
        re.search(r'<th scope="row">(.*?)</th>', row)[1]: re.findall(r"<td[^>]*>(.*?)</td>", row)  # type: ignore[index]
        for row in rows
    }


def test_nothing_is_bold_of_one_seed(page: Page) -> None:
    source = page.source
    table = cells(source, "Perplexity per domain: All domains")
    # uniform, natural, learned.
    assert table["stdlib"] == ["24.78", "22.42", "23.34"]
    assert table["metadata"] == ["6.488", "9.679", "7.099"]
    assert table["lower than uniform"] == ["–", "3 of 7", "5 of 7"]
    assert table["worst case"] == ["57.40", "70.81", "56.26"]
    assert table["average"][0] == f"{math.exp(sum(UNIFORM_LOSS.values()) / 7):.2f}"
    target = cells(source, "Perplexity per domain: Out of domain, reference")
    assert next(iter(target)) == "reference (target)"
    assert target["reference (target)"] == ["77.48", "73.70"]
    assert set(target) >= {"average, training domains", *without("reference")}
    assert "One seed has no interval, so that nothing is bold." in page.text


def test_weights_stand_beside_each_other(runs: Path, page: Page) -> None:
    table = cells(page.source, "Domain weights")
    learned = records.weights_by_name(records.read_weights(runs / "proxy-universal"))
    for name in DOMAINS:
        assert re.sub("</?b>", "", table[name][1]) == f"{learned[name]:.3f}"
        assert ("<b>" in table[name][1]) == (learned[name] > 1 / 7)
        # By tokens.
        assert re.sub("</?b>", "", table[name][0]) == f"{TOKENS[name] / sum(TOKENS.values()):.3f}"
    assert table["reference"][2] == "target"
    entropy = -sum(weight * math.log(weight) for weight in learned.values())
    assert table["effective domains"][1] == f"{math.exp(entropy):.1f} of 7"
    assert table["uniform would be"] == ["0.143", "0.143", "0.167"]


def test_epochs_follow_the_budget_and_warn_above_four(runs: Path, page: Page) -> None:
    proxy = runs / "proxy-universal"
    long = page_of(proxy, token_budget=2_000_000)
    table = cells(long.source, "Implied epochs")
    # Tokens, uniform, natural, learned.
    assert table["metadata"][0] == "48\N{NO-BREAK SPACE}k"
    assert table["metadata"][1] == f"{2e6 / 7 / 48_000:.2f}"
    natural = 2e6 / sum(TOKENS.values())
    assert [row[2] for row in table.values()] == [f"{natural:.2f}"] * 7
    assert f'<td class="warning">{2e6 / 7 / 48_000:.2f}</td>' in long.source
    few = page_of(proxy, token_budget=1000)
    assert 'class="warning"' not in few.source
    assert "at these weights repeat" not in few.text
    # As long as the longest base run where no budget is given.
    default = cells(page.source, "Implied epochs")
    assert default["metadata"][1] == f"{STEPS * 28 * BLOCK_SIZE / 7 / 48_000:.2f}"


def test_a_repeated_domain_is_warned_of(tmp_path: Path) -> None:
    proxy = write_proxy(tmp_path / "proxy", logits=(0, 0, 0, 0, 0, 0, 2.0))
    weight = records.weights_by_name(records.read_weights(proxy))["metadata"]
    seen = STEPS * 4 * 7 * BLOCK_SIZE
    assert f"repeat metadata {weight * seen / 48_000:.1f} times" in words_of(proxy)


def test_what_runs_were_told_of_their_corpus_is_said_once(tmp_path: Path) -> None:
    told = "stdlib: 96% of its tokens are held out, where 5% were asked for."
    runs = [write_proxy(tmp_path / "runs" / f"proxy-{seed}", seed=seed) for seed in (0, 1)]
    for run in runs:
        config = records.read_config(run)
        records.write_json(run / records.CONFIG, config | {"warnings": [told]})
    assert words_of(*runs).count(told) == 1
    assert f"Warning: {told}" in " ".join(" ".join(remarks_on(runs[0])).split())


def test_drift_is_that_of_the_weights_file(runs: Path, page: Page) -> None:
    """sum_j |alpha_bar(T) - alpha_bar(0.8 T)|, from the records themselves."""
    lines = records.read_metrics(runs / "proxy-universal", kind="train")
    by_step = {line["step"]: line["alpha_mean"] for line in lines}
    last, before = by_step[STEPS], by_step[int(0.8 * STEPS)]
    drift = sum(abs(last[name] - before[name]) for name in DOMAINS)
    distance = sum(abs(last[name] - 1 / 7) for name in DOMAINS)
    settled = "has settled" if drift <= 0.05 * distance else "is still moving"
    assert (
        f"The running average {settled}: the last fifth of the 200 steps moved "
        f"{50 * drift:.1f} % of the tokens between domains; "
        f"the average lies {50 * distance:.1f} % from uniform weights."
    ) in page.text.replace("\N{NO-BREAK SPACE}", " ")


def averages(alpha_STK: np.ndarray) -> np.ndarray:
    """Running averages of the weights after steps 0 (uniform), 1, ..., T - 1."""
    counts = np.arange(1, alpha_STK.shape[1])[:, None]
    later = alpha_STK[:, 1:].cumsum(1) / counts
    return np.concatenate([alpha_STK[:, :1], later], axis=1)


def moved(path_T: np.ndarray, seeds: Sequence[float] = (1.0,)) -> Movement:
    """Of two domains; the first goes from a half up by `path_T`, in each seed so much as much."""
    first = 0.5 + np.outer(seeds, path_T)
    alpha = np.stack([first, 1 - first], axis=-1)
    return movement_of(np.arange(len(path_T), dtype=float), averages(alpha), 0.0)


def test_an_average_that_keeps_its_pace_has_not_settled() -> None:
    """After 31 steps as little as after 3000, however small the pace."""
    for steps in (31, 300, 3000):
        found = moved(np.linspace(0, 0.01, steps + 1))
        # The mean over t steps is (t + 1) / 2 paces from uniform. Of the step that a fifth before
        # the end lies in, the sum grows along a chord, above the parabola by r (1 - r) / 2 paces.
        before = 0.8 * steps
        chord = before % 1 * (1 - before % 1) / before
        expected = (0.2 * steps - chord) / (steps + 1)
        assert found.drift[-1] / found.distance[-1] == pytest.approx(expected)
        assert not found.is_settled


@pytest.mark.parametrize(("taus", "is_settled"), [(3, False), (5, False), (8, True), (20, True)])
def test_an_average_settles_long_after_the_weights(taus: int, is_settled: bool) -> None:
    path = 0.3 * (1 - np.exp(-np.linspace(0, taus, 1001)))
    assert moved(path).is_settled is is_settled


def test_what_moves_more_than_seeds_differ_has_not_settled() -> None:
    path = 0.3 * (1 - np.exp(-np.linspace(0, 10, 1001)))
    assert moved(path, (0.8, 1.0, 1.2)).is_settled
    assert not moved(path, (0.999, 1.0, 1.001)).is_settled


def test_the_drift_of_a_steady_pace_has_no_teeth() -> None:
    """Four fifths of most steps lie between two of them."""
    pace, steps = 0.001, np.arange(10, 101)
    drift = moved(pace * np.arange(101)).drift[steps]
    # Two domains move; the chord of `test_an_average_that_keeps_its_pace_has_not_settled` takes
    # r (1 - r) / 2 <= 1/8 paces from a sum over 0.8 t steps. Rounded, they would miss by 0.2 paces.
    assert (np.abs(drift - 2 * 0.1 * pace * steps) <= 2 * pace / 8 / (0.8 * steps)).all()


@pytest.mark.parametrize(
    ("stat", "text"),
    [
        (Stat(0.276), "0.276"),
        (Stat(0.27604, 0.00021), "0.2760 ± 0.0002"),
        (Stat(0.0554, 3.5e-05), "0.0554 ± 0.0001"),
        (Stat(0.182, 0.0184), "0.182 ± 0.018"),
        (Stat(0.25, 0.0), "0.2500 ± 0.0000"),
    ],
)
def test_a_weight_and_its_error_end_at_the_same_place(stat: Stat, text: str) -> None:
    assert weight_text(stat) == text


@pytest.mark.parametrize(
    ("stat", "text"),
    [
        (Stat(235.553, 10.4), "236 ± 10"),
        (Stat(71.224, 0.402), "71.22 ± 0.40"),
        (Stat(8.1054, 0.00042), "8.105 ± 0.001"),
        (Stat(1002.79, 137.2), "1003 ± 137"),
        (Stat(math.inf, math.nan), "not finite"),
    ],
)
def test_a_perplexity_and_its_error_end_at_the_same_place(stat: Stat, text: str) -> None:
    assert perplexity_stat(stat) == text


def test_starved_domains_are_warned_of_where_all_are_to_get_better(tmp_path: Path) -> None:
    logits = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.5)
    starved = words_of(write_proxy(tmp_path / "starved", logits=logits))
    assert "starved: metadata would be read less than a third as often as at uniform" in starved
    assert "a larger mu or --target mix" in starved
    names = DOMAINS[1:]
    aimed = write_proxy(
        tmp_path / "aimed", domains=names, target=("stdlib",), logits=(*logits[2:], -2.5)
    )
    assert "less than a third" not in words_of(aimed)
    even = write_proxy(tmp_path / "even", logits=(0.5, 0, 0, 0, 0, 0, -0.5))
    assert "less than a third" not in words_of(even)


def test_collapsed_and_unmoved_weights_are_warned_of(tmp_path: Path) -> None:
    collapsed = write_proxy(tmp_path / "collapsed", logits=(9.0, 0, 0, 0, 0, 0, 0), steps=60)
    text = words_of(collapsed)
    assert "collapsed: the weights collapsed onto stdlib" in text
    assert "A larger mu, smoothing or domain_max_grad_norm keeps them apart" in text
    assert "score as in the paper, domain gradients cut to norm 1" in page_of(collapsed).text
    unmoved = tmp_path / "unmoved"
    write_proxy(unmoved, logits=(0.0,) * 7)
    record = records.read_weights(unmoved)
    for each in record["domains"]:
        each["weight"] = 1 / 7
    records.write_weights(unmoved, record)
    assert "unmoved: the weights hardly left uniform" in words_of(unmoved)
    assert "hardly left uniform" not in text


def test_skipped_steps_and_null_gains_are_told_not_drawn(tmp_path: Path) -> None:
    proxy = write_proxy(tmp_path / "proxy", skipped=(3, 4))
    page = page_of(proxy)
    assert "proxy: 2 logged steps skipped for a gradient that was not finite." in page.text
    assert "nan" not in page.text.lower().split()


def test_several_seeds_are_one_arm(tmp_path: Path) -> None:
    proxies = [write_proxy(tmp_path / f"proxy-seed{seed}", seed=seed) for seed in range(3)]
    uniform = [write_base(tmp_path / f"uniform-{s}", seed=s, change=0.01 * s) for s in range(3)]
    learned = [
        write_base(tmp_path / f"learned-{s}", seed=s, change=-0.2 + 0.01 * s, weights=str(proxy))
        for s, proxy in enumerate(proxies)
    ]
    page = page_of(*proxies, *uniform, *learned)
    perplexity = cells(page.source, "Perplexity per domain: All domains")
    values = np.exp([UNIFORM_LOSS["stdlib"] + 0.01 * s for s in range(3)])
    error = values.std(ddof=1) / math.sqrt(3)
    assert perplexity["stdlib"][0] == f"{values.mean():.2f} ± {error:.2f}"
    # The difference is the same in each seed, and that is what the interval is of.
    assert perplexity["stdlib"][1].startswith("<b>20.")
    assert len(perplexity["stdlib"]) == 2
    assert "proxy beats uniform." in page.text
    against = cells(page.source, "Against uniform, seed by seed: All domains")
    assert against["average"] == ["<b>−18.1\N{NO-BREAK SPACE}% [−18.1, −18.1]</b>"]
    assert "standard errors" not in page.text
    weights = [records.weights_by_name(records.read_weights(proxy)) for proxy in proxies]
    found = np.array([each["stdlib"] for each in weights])
    told = cells(page.source, "Domain weights")["stdlib"]
    assert f"{found.mean():.4f} ± {found.std(ddof=1) / math.sqrt(3):.4f}" in told[1]
    assert "one seed" not in page.text
    assert page.source.count("<figure") == 8


def test_arms_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    proxy = write_proxy(tmp_path / "proxy")
    write_base(tmp_path / "uniform", learning_rate=1e-3)
    write_base(tmp_path / "learned", weights=str(proxy), change=-0.1)
    text = words_of(tmp_path)
    assert "Nothing to compare with: no base model at uniform weights." in text
    assert "beat" not in text


def test_moved_runs_still_know_their_proxy(runs: Path, tmp_path: Path) -> None:
    names = ("proxy-universal", "base-uniform", "base-learned")
    moved = [shutil.copytree(runs / name, tmp_path / name) for name in names]
    assert "proxy-universal: lower on 5 of 7 domains" in words_of(*moved)


def test_weights_from_a_file_are_an_arm_of_their_own(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "mine", weights="somewhere/mine.json", change=-0.1)
    page = page_of(tmp_path)
    assert "Undecided: mine.json comes out 9.5 % below uniform" in page.text.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert "mine.json: lower on 7 of 7 domains" in page.text
    assert "Given weights" not in page.text
    assert cells(page.source, "Domain weights")["stdlib"] == ["0.143"]


def test_targets_that_nobody_goes_on_with_have_one_change(tmp_path: Path) -> None:
    write_experiment(tmp_path, (-0.02, -0.021, -0.019))
    record = records.read_experiment(tmp_path)
    rows = [{"target": "tests", "domains": [], "arms": record["groups"][0]["arms"]}]
    group = {"kind": "targets", "title": "Target", "paper": None, "rows": rows}
    records.write_json(tmp_path / records.EXPERIMENT, record | {"groups": [group]})
    page = page_of(tmp_path)
    table = cells(page.source, "Perplexity on the target")
    assert len(table["tests"]) == 3
    assert table["tests"][2].startswith("<b>−2.0")
    assert "DoGE beats uniform on tests." in page.text
    assert "fine-tuned" not in page.text


def test_files_of_one_name_are_arms_of_their_own(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "a", weights="a/weights.json", change=-0.1)
    write_base(tmp_path / "b", weights="b/weights.json", change=-0.2)
    write_base(tmp_path / "c", weights="a/mine.json", change=-0.3)
    write_base(tmp_path / "d", weights="b/mine.json", change=-0.4)
    table = cells(page_of(tmp_path).source, "Perplexity per domain: All domains")
    assert len(set(table["average"])) == 5
    words = words_of(tmp_path)
    for name in ("a/weights.json", "b/weights.json", "a/mine.json", "b/mine.json"):
        assert f"{name}: lower on 7 of 7 domains" in words


def test_weights_of_one_file_in_two_comparisons_are_one_column(tmp_path: Path) -> None:
    mine = "a/mine.json"
    for number, (rate, file) in enumerate([(1e-3, mine), (2e-3, mine), (3e-3, "b/mine.json")]):
        write_base(tmp_path / f"uniform-{number}", learning_rate=rate)
        write_base(tmp_path / f"mine-{number}", weights=file, change=-0.1, learning_rate=rate)
    page = page_of(tmp_path)
    assert page.text.count("mine.json: lower on 7 of 7 domains") == 3
    weights = page.source[page.source.index("<h3>Domain weights</h3>") :].split("</table>")[0]
    heads = re.findall(r'<th scope="col">(.*?)<', weights)
    assert heads == ["domain", mine, "b/mine.json"]
    assert cells(page.source, "Domain weights")["stdlib"] == ["0.143"] * 2
    assert "stdlib" in report.terminal_table([tmp_path])


def test_a_file_called_uniform_is_not_the_baseline(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "mine", weights="somewhere/uniform", change=-0.1)
    assert "somewhere/uniform: lower on 7 of 7 domains than uniform" in words_of(tmp_path)


def test_a_file_called_natural_has_a_column_of_its_own(tmp_path: Path) -> None:
    """Beside the shares by tokens, which stand there wherever a proxy does."""
    write_proxy(tmp_path / "proxy")
    write_base(tmp_path / "mine", weights="somewhere/natural")
    (heads,) = re.findall(r"domain +natural .*", report.terminal_table([tmp_path]))
    assert heads.split() == ["domain", "natural", "proxy", "somewhere/natural"]


def test_unmeasured_and_unfinished_runs_are_told(tmp_path: Path) -> None:
    proxy = write_proxy(tmp_path / "proxy", last_step=50, is_finished=False)
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "learned", weights=str(proxy), is_evaluated=False)
    text = words_of(tmp_path)
    assert "1 arm not measured yet, so left out." in text
    assert "proxy: not complete, its records end at step 50 of 200." in text


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    config = ProxyConfig(out=tmp_path / "proxy", training=TRAINING, mu=0.01)
    records.open_run(config.out, stage="proxy", config=config, corpus=corpus(DOMAINS))
    page = page_of(config.out)
    assert "proxy: has not logged a step yet." in page.text
    assert "figure" not in page.tags


def test_the_last_evaluation_of_the_run_stands_in(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform", is_evaluated=False, eval_steps=(50, 100, 200))
    write_base(
        tmp_path / "natural",
        weights="natural",
        change=-0.1,
        is_evaluated=False,
        eval_steps=(50, 100, 200),
    )
    page = page_of(tmp_path)
    assert "natural: lower on 7 of 7 domains" in page.text
    assert "Held-out loss during training" in page.text


def test_arms_measured_on_other_text_are_warned_of(tmp_path: Path) -> None:
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "natural", weights="natural", blocks=64)
    assert "measured on different numbers of held-out blocks" in words_of(tmp_path)


def test_a_target_that_was_not_measured_has_no_verdict(tmp_path: Path) -> None:
    out: dict[str, Any] = {"domains": without("tests"), "targets": ("tests",)}
    write_base(tmp_path / "uniform", **out)
    natural = write_base(tmp_path / "natural", weights="natural", change=-0.1, **out)
    measured = records.read_evaluation(natural)
    for key in ("blocks", "loss", "perplexity", "tokens"):
        del measured[key]["tests"]
    records.write_json(natural / records.EVALUATION, measured)
    words = words_of(tmp_path)
    assert "Perplexity per domain: Out of domain, tests" in words
    assert "No domain or target that this is about has been measured by every arm." in words
    assert "lower on" not in words


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [
        write_proxy(tmp_path / folder / "proxy", steps=steps)
        for folder, steps in (("short", 12), ("long", 16))
    ]
    page = page_of(*paths)
    assert "short/proxy, for all domains" in page.text
    assert "long/proxy, for all domains" in page.text
    assert page.text.count("Configuration of proxy") == 2
    assert len(set(page.ids)) == len(page.ids)


def test_no_run_is_lost_where_folders_have_one_name_too(tmp_path: Path) -> None:
    out = [tmp_path / top / "runs" / "base" for top in ("one", "two")]
    runs = [write_base(out[0]), write_base(out[1], weights="natural", change=-0.1)]
    assert "natural: lower on 7 of 7 domains" in words_of(*runs)


def test_several_targets_and_mix(tmp_path: Path) -> None:
    rest = without("reference", "tests")
    write_proxy(tmp_path / "both", domains=rest, target=("reference=0.7", "tests=0.3"))
    write_proxy(tmp_path / "mix", target=("mix",))
    out: dict[str, Any] = {"domains": rest, "targets": ("reference", "tests")}
    write_base(tmp_path / "uniform", **out)
    write_base(tmp_path / "learned", weights=str(tmp_path / "both"), change=-0.1, **out)
    page = page_of(tmp_path)
    assert "both, for reference (0.7) and tests (0.3)" in page.text
    assert "mix, for a held-out mixture of all domains" in page.text
    assert "9.5 % below uniform on reference and tests in the one seed." in page.text.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    table = cells(page.source, "Perplexity per domain: Out of domain, reference and tests")
    both = math.exp((UNIFORM_LOSS["reference"] + UNIFORM_LOSS["tests"]) / 2)
    assert table["average of targets"][0] == f"{both:.2f}"


def test_the_papers_weights_stand_beside_those_of_its_domains(tmp_path: Path) -> None:
    names = ("arxiv", "book", "c4", "cc", "github", "stackexchange", "wikipedia")
    tokens = dict.fromkeys(names, 500_000)
    proxy = write_proxy(tmp_path / "proxy", domains=names, tokens=tokens)
    rest = tuple(name for name in names if name != "github")
    other = write_proxy(tmp_path / "code", domains=rest, target=("github",), tokens=tokens)
    table = cells(page_of(proxy, other).source, "Domain weights")
    # Natural, two proxies, and the paper's weights for each.
    assert re.sub("</?b>", "", table["cc"][3]) == "0.214"
    assert re.sub("</?b>", "", table["stackexchange"][4]) == "0.691"
    assert (table["github"][2], table["github"][4]) == ("target", "")


def scores(acc: float, chance: float, cut: int = 0) -> dict[str, Any]:
    return {"acc": acc, "acc_stderr": 0.02, "chance": chance, "truncated_requests": cut}


def test_accuracies_stand_beside_chance_and_the_papers(tmp_path: Path) -> None:
    accuracies = {"uniform": (0.5, 0.6), "natural": (0.55, 0.4)}
    for name, (copa, piqa) in accuracies.items():
        run = write_base(tmp_path / name, weights=name)
        tasks = {"copa": scores(copa, 0.5), "piqa": scores(piqa, 0.5, cut=3)}
        setting = {"shots": 5, "fewshot_seed": 0, "positions": 128}
        record = records.few_shot(step=STEPS, tasks=tasks, setting=setting)
        records.write_json(run / records.FEWSHOT, record)
    page = page_of(tmp_path)
    table = cells(page.source, "Tasks: all domains")
    assert table["copa"] == [
        *("50.0 ± 2.0", "55.0 ± 2.0", "50.0"),
        *("58.0", "62.0", "59.0", "61.0"),
    ]
    # Of two tasks; the paper's is of six.
    assert table["average"] == ["55.0 ± 1.4", "47.5 ± 1.4", "50.0", "", "", "", ""]
    assert "Prompts were cut" in page.source


def test_awkward_names_stay_text(tmp_path: Path) -> None:
    names = ("<b>x</b> & y", "$a_1$", "_hidden", "a very long name of a domain", "文書", "f g")
    tokens = dict.fromkeys(names, 500_000)
    loss = dict.fromkeys(names, 3.0)
    write_proxy(tmp_path / "proxy <1>", domains=names, tokens=tokens)
    out: dict[str, Any] = {"domains": names, "tokens": tokens}
    write_base(tmp_path / "uniform", loss=loss, **out)
    write_base(tmp_path / "natural", weights="natural", loss=loss, **out)
    page = page_of(tmp_path)
    assert "<b>x</b> & y" not in page.source
    for name in names:
        assert name in page.text
    assert "a very long name of…" in page.text
    assert "$a_1$" in report.terminal_table([tmp_path])


@pytest.mark.parametrize("num_domains", [1, 2, pytest.param(24, marks=pytest.mark.exhaustive)])
def test_any_number_of_domains(tmp_path: Path, num_domains: int) -> None:
    names = tuple(f"domain {j}" for j in range(num_domains))
    tokens = dict.fromkeys(names, 500_000)
    logits = tuple(np.linspace(-1, 1, num_domains))
    write_proxy(tmp_path / "proxy", domains=names, tokens=tokens, logits=logits, steps=20)
    page = page_of(tmp_path)
    assert page.source.count("<figure") == 7
    assert f"of {num_domains} domain" in page.text
    assert (f"least to {names[0]} " in page.text) is (num_domains > 1)
    most = page.text.split("most goes to ")[1].split("; effectively")[0]
    assert most.count("uniform") == max(1, min(2, num_domains - 1))


def test_only_domains_above_uniform_get_the_most(tmp_path: Path) -> None:
    names = ("prose", "verse", "code", "notes")
    tokens = dict.fromkeys(names, 500_000)
    logits = (1.5, 0.0, -0.1, -0.2)
    write_proxy(tmp_path / "proxy", domains=names, tokens=tokens, logits=logits, steps=20)
    most = page_of(tmp_path).text.split("most goes to ")[1].split(", least to ")[0]
    assert "prose" in most
    assert "verse" not in most


def test_a_replaced_score_is_told(tmp_path: Path, page: Page) -> None:
    proxy = write_proxy(tmp_path / "proxy", score="published", steps=20)
    assert "published code's score" in page_of(proxy).text
    assert "published code's score" not in page.text


def test_the_terminal_gets_aligned_ascii(runs: Path) -> None:
    text = report.terminal_table([runs])
    assert text.isascii()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    head = next(i for i, line in enumerate(lines) if line.startswith("domain "))
    assert len({len(line) for line in lines[head + 2 : head + 9]}) == 1
    assert lines[head].split() == ["domain", "uniform", "natural", "proxy-universal"]
    stdlib = next(line for line in lines if line.startswith("stdlib"))
    assert stdlib.split() == ["stdlib", "24.78", "22.42", "23.34"]
    assert "lower on 5 of 7 domains than uniform" in " ".join(text.split())
    assert "Warning: proxy-universal: one seed" in text


def test_a_terminal_without_base_models_gets_the_weights(tmp_path: Path) -> None:
    text = report.terminal_table([write_proxy(tmp_path / "proxy")])
    assert text.startswith("Domain weights")
    assert "effective domains" in text


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run directory; none was named"):
        report.write_report(ReportConfig(runs=()))


def empty(folder: Path) -> Path:
    (folder / "notes").mkdir(parents=True)
    return folder


def a_file(folder: Path) -> Path:
    folder.write_text("not a run")
    return folder


def a_model(folder: Path) -> Path:
    """A saved model has a config.json of its own."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder, "does not exist"),
        (a_file, "is a file"),
        (empty, "is not a run directory and holds none"),
        (a_model, "is not a run directory and holds none"),
    ],
)
def test_what_is_not_a_run_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], sentence: str
) -> None:
    path = make(tmp_path / "runs")
    page = tmp_path / "report.html"
    with pytest.raises(ValueError, match=sentence) as raised:
        report.write_report(ReportConfig(runs=(path,), out=page))
    assert str(path) in str(raised.value)
    assert not page.exists()


@pytest.mark.parametrize("lost", ["rows", "cosine", "influence", "difficulty", "alpha_mean"])
def test_a_line_of_weights_that_lacks_what_moved_them_is_named(tmp_path: Path, lost: str) -> None:
    proxy = write_proxy(tmp_path / "proxy", steps=2, is_finished=False)
    *lines, last = records.read_metrics(proxy)
    del last[lost]
    text = "".join(f"{json.dumps(line)}\n" for line in (*lines, last))
    (proxy / records.METRICS).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 3 is not of the run .*: no {lost}"):
        report.write_report(ReportConfig(runs=(proxy,)))
    assert not (proxy / "report.html").exists()


def test_a_budget_below_one_is_refused(runs: Path) -> None:
    with pytest.raises(ValueError, match="token_budget must be at least 1; got 0"):
        report.write_report(ReportConfig(runs=(runs,), token_budget=0))


def test_labels_are_moved_apart_no_more_than_needed() -> None:
    wanted = np.array([0.1, 0.5, 0.51, 0.52, 0.9])
    places = plotting.spread_apart(wanted, gap=0.1)
    assert np.diff(places).min() >= 0.1 - 1e-12
    # Those with room stay; a crowd keeps its centre.
    assert places[[0, 4]] == pytest.approx([0.1, 0.9])
    assert places[1:4].mean() == pytest.approx(wanted[1:4].mean())
    crowded = plotting.spread_apart(np.full(10, 0.99), gap=0.1)
    assert crowded == pytest.approx(np.linspace(0.1, 1, 10))
    assert plotting.spread_apart(np.array([]), gap=0.1).size == 0


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.141, 0.02, -2.4e-5), ["0.141", "0.020", "0.000"]),
        ((12.34, -1.0, math.nan), ["12.3", "−1.0", ""]),
        ((4321.0, 0.4), ["4321", "0"]),
        ((2e-7, -3e-6), ["2.0e−07", "−3.0e−06"]),
        ((0.0, math.nan), ["0.00", ""]),
    ],
)
def test_a_column_has_as_many_decimals_in_every_line(
    values: Sequence[float], texts: list[str]
) -> None:
    assert plotting.column_texts(np.array(values)) == texts
