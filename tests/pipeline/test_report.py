"""The page says what the records say, whichever arm wins, and refuses what is not a run.

Records are written here by hand, so that every number on the page has a known cause.
"""

import html
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from doge_fast.pipeline import records, report, tables
from doge_fast.pipeline.config import ReportConfig
from doge_fast.pipeline.reporting.proxies import Movement, movement_of, remarks_on
from doge_fast.pipeline.reporting.statistics import change_text, paired_difference
from doge_fast.pipeline.wording import as_ascii
from tests.pipeline.written_runs import (
    DOMAINS,
    STEPS,
    TOKENS,
    UNIFORM_LOSS,
    by_name,
    without,
    write_base,
    write_experiment,
    write_proxy,
)

# How the text of a headline is named.
ON_ALL = "on held-out text of all 7 training domains"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proxy and three base models; learned wins on five of seven."""
    folder = tmp_path_factory.mktemp("study") / "runs"
    proxy = write_proxy(folder / "proxy")
    write_base(folder / "base-uniform")
    shift = by_name(DOMAINS, (-0.06, -0.02, -0.01, -0.11, -0.04, 0.07, 0.09))
    learned = {name: UNIFORM_LOSS[name] + shift[name] for name in DOMAINS}
    write_base(folder / "base-learned", weights=str(proxy), loss=learned)
    shift = by_name(DOMAINS, (-0.10, 0.21, -0.07, 0.03, -0.06, 0.18, 0.40))
    natural = {name: UNIFORM_LOSS[name] + shift[name] for name in DOMAINS}
    write_base(folder / "base-natural", weights="natural", loss=natural)
    return folder


class Page(HTMLParser):
    """Text, tags, ids and references of a page; refuses what is not well nested."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            self.attributes.setdefault(key, []).append(str(value))

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


def cells(source: str, title: str) -> dict[str, list[str]]:
    """Rows of the page's table of that title: {label: what stands in its cells, as HTML}."""
    table = source[source.index(f'aria-label="{title}"') :].split("</table>")[0]
    rows = table.split("<tbody>")[1].split("<tr")[1:]
    return {
        re.search(r'<th scope="row">(.*?)</th>', row)[1]: re.findall(r"<td[^>]*>(.*?)</td>", row)  # type: ignore[index]
        for row in rows
    }


def test_the_page_needs_nothing_from_anywhere(page):
    assert not {"script", "iframe", "img", "object"} & set(page.tags)
    references = [
        each for key in ("src", "href", "xlink:href") for each in page.attributes.get(key, [])
    ]
    assert [each for each in references if not each.startswith(("#", "data:,"))] == []
    css = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert "url(" not in css
    assert "@import" not in css
    ids = page.attributes["id"]
    assert len(set(ids)) == len(ids)
    inner = {each[1:] for each in references if each.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]+)\)", page.source))
    assert inner <= set(ids)
    # Every colour of a figure follows the page's, light or dark.
    assert not set(re.findall(r"#[0-9a-f]{6}", page.source.replace(css, "")))


def test_figures_have_words_and_what_scrolls_can_be_reached_by_tab(page):
    assert page.source.count('role="img" aria-label="') == page.tags.count("figure") == 2
    # The command and six tables.
    assert page.attributes["tabindex"] == ["0"] * 7
    assert "Diamonds: natural weights" in " ".join(page.attributes["aria-label"])


def test_the_weights_come_first_and_the_command_that_exports_them(runs, page):
    headings = re.findall(r"<h2>(.*?)</h2>", page.source)
    assert headings == [
        *("Domain weights", "Before you use them", "How the weights moved", "Base models"),
        *("Cost", "Where this comes from"),
    ]
    command = re.search(r"<pre[^>]*>(.*?)</pre>", page.source, re.DOTALL)
    assert command[1].split()[:2] == ["doge-fast", "export"]
    assert str(runs / "proxy") in command[1]
    table = cells(page.source, "Domain weights")
    learned = records.weights_by_name(records.read_weights(runs / "proxy"))
    for name in DOMAINS:
        natural = TOKENS[name] / sum(TOKENS.values())
        assert table[name] == [f"{weight:.3f}" for weight in (learned[name], 1 / 7, natural)]
    entropy = -sum(weight * math.log(weight) for weight in learned.values())
    assert table["effective domains"][:2] == [f"{math.exp(entropy):.1f} of 7", "7.0 of 7"]


def test_the_terminal_gets_the_same_tables_as_aligned_ascii(runs, page):
    text = report.terminal_table([runs])
    assert text.isascii()
    lines = text.splitlines()
    assert max(map(len, [line for line in lines if not line.startswith("  doge")])) <= 100
    titles = re.findall(r'role="region" aria-label="(.*?)"', page.source)[1:]
    assert len(titles) == 6
    assert all(title in lines for title in titles)
    notes = re.findall(r'</div>\s*<p class="note">(.*?)</p>', page.source)
    assert len(notes) == 5
    told = " ".join(text.split())
    assert all(as_ascii(html.unescape(note)) in told for note in notes)
    stdlib = [line.split()[1:] for line in lines if line.startswith("stdlib")]
    assert ["24.78", "22.42", "23.34"] in stdlib
    assert ["-9.5", "%", "-5.8", "%"] in stdlib


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        (
            {"learned": 0.1},
            f"learned weights: perplexity 10.5 % higher than uniform {ON_ALL}, undecided, one",
        ),
        ({"learned": 0.0}, f"learned weights: perplexity the same as uniform {ON_ALL}, undecided"),
        ({"natural": -0.2}, f"natural: perplexity 18.1 % lower than uniform {ON_ALL}, undecided"),
        ({}, "nothing to compare"),
        ({"learned": math.nan}, "learned weights or uniform diverged"),
    ],
    ids=str,
)
def test_one_seed_decides_nothing(tmp_path, changes, headline):
    proxy = write_proxy(tmp_path / "proxy")
    write_base(tmp_path / "uniform")
    for weights, change in changes.items():
        source = str(proxy) if weights == "learned" else weights
        write_base(tmp_path / weights, weights=source, change=change)
    assert headline in words_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((-0.02, -0.021, -0.019), f"2.0 % lower than uniform {ON_ALL}, 95 % interval -2.2 to -1.7"),
        ((0.02, -0.03, 0.001), f"0.3 % lower than uniform {ON_ALL}, undecided, 3 seeds"),
    ],
)
def test_several_seeds_decide_by_their_interval(tmp_path, changes, told):
    """Of an experiment and of runs that nobody planned."""
    out = write_experiment(tmp_path / "e", changes)
    assert f"DoGE: perplexity {told}" in words_of(out)
    assert f"learned weights: perplexity {told}" in words_of(out / "runs")


def test_a_page_has_one_headline_and_it_is_on_the_target(tmp_path):
    """Those on the training domains are in a table that says so."""
    trained = without("tests")
    out: dict[str, Any] = {"domains": trained, "targets": ("tests",)}
    proxy = write_proxy(tmp_path / "proxy", domains=trained, target=("tests",))
    write_base(tmp_path / "uniform", **out)
    loss = {name: UNIFORM_LOSS[name] + 0.1 for name in trained} | {"tests": 2.75}
    # At weights that were made of the proxy's.
    sharper = tmp_path / "sharper.json"
    records.write_json(sharper, by_name(trained, (0.5, *[0.1] * 5)))
    learned = write_base(tmp_path / "learned", weights=str(sharper), loss=loss, **out)
    # Its target is the one that the weights brought; that of the other was typed.
    record = records.read_json(learned / records.CONFIG)
    assert record["config"].pop("targets") == ["tests"]
    records.write_json(learned / records.CONFIG, record)
    page = page_of(tmp_path)
    (headline,) = re.findall(r'<p class="headline">(.*?)</p>', page.source)
    told = "perplexity 18.1 % lower than uniform on held-out text of tests"
    assert told in headline
    # What is exported is what the headline is about.
    command = re.search(r"<pre[^>]*>(.*?)</pre>", page.source, re.DOTALL)
    assert command[1].split()[:3] == ["doge-fast", "export", str(tmp_path / "learned")]
    assert list(cells(page.source, "Perplexity per domain: Base models on tests")) == ["tests"]
    title = "Against uniform, seed by seed: Base models on the training domains"
    assert cells(page.source, title)["average"] == ["+10.5 %"]
    alone = page_of(proxy)
    assert len(re.findall(r'<p class="headline">', alone.source)) == 1
    assert f"doge-fast temperature {proxy}" in alone.text


def test_several_seeds_are_one_arm(tmp_path):
    runs = write_experiment(tmp_path, (-0.2,) * 3) / "runs"
    page = page_of(runs)
    perplexity = cells(page.source, "Perplexity per domain: Base models")["stdlib"]
    uniform = np.exp([UNIFORM_LOSS["stdlib"] + 0.3 * seed for seed in range(3)])
    error = uniform.std(ddof=1) / math.sqrt(3)
    assert perplexity[0] == f"{uniform.mean():.1f} ± {error:.1f}"
    part = math.exp(-0.2)
    assert perplexity[1] == f"<b>{part * uniform.mean():.1f} ± {part * error:.1f}</b>"
    # The difference is the same in each seed, and that is what the interval is of.
    against = cells(page.source, "Against uniform, seed by seed: Base models")
    assert against["average"] == ["<b>−18.1\N{NO-BREAK SPACE}% [−18.1, −18.1]</b>"]
    proxies = [records.read_weights(runs / f"proxy-seed{seed}") for seed in range(3)]
    found = [records.weights_by_name(proxy)["stdlib"] for proxy in proxies]
    told = cells(page.source, "Domain weights")["stdlib"][0]
    assert told == f"{np.mean(found):.4f} ± {np.std(found, ddof=1) / math.sqrt(3):.4f}"
    assert "weights average" in page.text


def test_arms_without_a_common_seed_are_shown_and_not_compared(tmp_path):
    write_base(tmp_path / "uniform", seed=0)
    write_base(tmp_path / "natural", weights="natural", change=-0.1, seed=1)
    text = words_of(tmp_path)
    assert "natural and uniform have no seed in common" in text
    assert "24.78 22.42" in text


def test_means_are_over_the_seeds_that_all_arms_have(tmp_path):
    """A seed that one arm lacks would move the other's mean by what seeds differ by."""
    two = write_experiment(tmp_path / "two", (-0.02, -0.03))
    three = write_experiment(tmp_path / "three", (-0.02, -0.03, -0.04))
    (three / "runs" / "doge-seed2" / records.EVALUATION).unlink()
    title = "Perplexity per domain: Base models"
    assert cells(page_of(three).source, title) == cells(page_of(two).source, title)


def test_perplexities_and_their_counts(page):
    table = cells(page.source, "Perplexity per domain: Base models")
    # uniform, natural, learned.
    assert table["metadata"] == ["6.488", "9.679", "7.099"]
    assert table["lower than uniform"] == ["–", "3 of 7", "5 of 7"]
    assert table["worst case"] == ["57.40", "70.81", "56.26"]
    assert table["average"][0] == f"{math.exp(sum(UNIFORM_LOSS.values()) / 7):.2f}"
    assert "One seed has no interval" in page.text


def test_base_models_that_differ_in_more_are_refused_by_name(tmp_path):
    write_base(tmp_path / "uniform", learning_rate=1e-3)
    write_base(tmp_path / "natural", weights="natural", change=-0.1)
    with pytest.raises(ValueError, match="natural"):
        page_of(tmp_path)
    apart = [write_base(tmp_path / folder / "base") for folder in ("one", "two")]
    with pytest.raises(ValueError, match="names"):
        page_of(*apart)


@pytest.mark.parametrize(
    ("others", "label", "shares"),
    [
        ((), "weighted average", (0.75, 0.25)),
        # Learned for all domains, it has no say; with other weights it has.
        (("universal",), "weighted average", (0.75, 0.25)),
        (("tests=1", "reference=2"), "average", (0.5, 0.5)),
    ],
)
def test_targets_count_as_the_weights_were_learned_for_them(tmp_path, others, label, shares):
    targets = ("tests", "reference")
    out: dict[str, Any] = {"domains": without(*targets), "targets": targets}
    for name, target in {"proxy": ("tests=3", "reference=1"), "other": others}.items():
        if target:
            write_proxy(tmp_path / name, domains=without(*targets), target=target)
    write_base(tmp_path / "uniform", **out)
    loss = {name: UNIFORM_LOSS[name] for name in DOMAINS} | {"tests": 2.75}
    write_base(tmp_path / "learned", weights=str(tmp_path / "proxy"), loss=loss, **out)
    table = cells(
        page_of(tmp_path).source, "Perplexity per domain: Base models on tests and reference"
    )
    mean = sum(share * loss[name] for name, share in zip(targets, shares, strict=True))
    assert table[label][1] == f"{math.exp(mean):.2f}"
    told = f"{100 * (1 - math.exp(-0.2 * shares[0])):.1f} % lower than uniform on held-out text of"
    words = words_of(tmp_path)
    assert told in words
    assert ("tests (0.75) and reference (0.25)" in words.split("undecided")[0]) == (not others[1:])


def test_two_runs_of_one_arm_and_seed_are_refused(tmp_path):
    """One of them would stand for both."""
    write_base(tmp_path / "uniform")
    write_base(tmp_path / "again", change=-0.1)
    with pytest.raises(ValueError, match="again and uniform"):
        page_of(tmp_path)
    write_base(tmp_path / "again", change=-0.1, seed=1)
    proxies = [write_proxy(tmp_path / "copies" / name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="one and two"):
        page_of(*proxies)


def test_base_models_are_joined_by_the_weights_that_they_used(tmp_path):
    """Not by a name alone: a file is written anew, and another project has a `proxy` too."""
    proxy = write_proxy(tmp_path / "b" / "proxy")
    other = write_proxy(tmp_path / "a" / "proxy", logits=(-1.0, 0.5, 0.2, 0.1, 0.3, 0.4, 0.5))
    write_base(tmp_path / "learned", weights=str(proxy))
    write_base(tmp_path / "of-another", weights=str(other), change=-0.1)
    for seed in range(2):
        mine = tmp_path / "mine.json"
        entries = by_name(DOMAINS, np.roll([0.4, *[0.1] * 6], seed))
        records.write_json(mine, entries)
        run = write_base(tmp_path / f"mine-seed{seed}", weights=str(mine), seed=seed)
        record = records.read_weights(run)
        told = [{"name": name, "weight": weight} for name, weight in entries.items()]
        records.write_weights(run, {"method": record["method"], "domains": told})
    page = page_of(proxy, *tmp_path.glob("learned"), *tmp_path.glob("*-*"))
    heads = re.findall(r'<th scope="col">(.*?)<', page.source)
    assert {"learned weights", "weights of mine-seed0", "weights of mine-seed1"} <= set(heads)
    assert any(str(other) in head for head in heads)


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        (("a/mine.json", "b/mine.json", "somewhere/uniform"), "a/mine.json"),
        (("stdlib=0.5,tests=0.5", "stdlib=0.2,tests=0.8"), "weights of run-1"),
    ],
)
def test_weights_of_files_and_typed_ones_are_arms_of_their_own(tmp_path, weights, label):
    write_base(tmp_path / "uniform")
    for place, given in enumerate(weights, start=1):
        write_base(tmp_path / f"run-{place}", weights=given, change=-0.1 * place)
    page = page_of(tmp_path)
    average = cells(page.source, "Perplexity per domain: Base models")["average"]
    assert len(set(average)) == 1 + len(weights)
    assert f"{label}: perplexity 9.5\N{NO-BREAK SPACE}% lower than uniform" in page.source


def test_what_is_missing_is_told(tmp_path):
    proxy = write_proxy(tmp_path / "proxy", last_step=50, is_finished=False)
    write_base(tmp_path / "uniform", blocks=64)
    write_base(tmp_path / "natural", weights="natural")
    write_base(tmp_path / "learned", weights=str(proxy), is_evaluated=False)
    (tmp_path / "uniform" / records.METRICS).write_text("")
    (tmp_path / "uniform" / records.MODEL).mkdir()
    text = words_of(tmp_path)
    assert "uniform: complete, and its records end at step 0 of 200" in text
    assert "learned: not measured, so left out" in text
    assert "proxy: not complete, its records end at step 50 of 200." in text
    # Its weights are not there to be exported.
    assert "doge-fast export" not in text
    assert "different numbers of held-out blocks" in text
    # Of one that was measured during its training alone, and of one on a part of the domains.
    line = {"step": STEPS, "kind": "eval", "loss": UNIFORM_LOSS}
    records.append_metrics(tmp_path / "learned", line)
    text = words_of(*(tmp_path / name for name in ("natural", "learned")))
    assert "different numbers of held-out blocks" in text
    evaluation = records.read_json(tmp_path / "natural" / records.EVALUATION)
    for key in ("blocks", "loss", "perplexity"):
        evaluation[key] = {"tests": evaluation[key]["tests"]}
    records.write_json(tmp_path / "natural" / records.EVALUATION, evaluation)
    text = words_of(*(tmp_path / name for name in ("natural", "uniform")))
    assert "not measured on docstrings, headers, licences, metadata, reference and stdlib" in text
    out = write_experiment(tmp_path / "e", (-0.02, -0.03))
    record = records.read_json(out / records.EXPERIMENT)
    records.write_json(out / records.EXPERIMENT, record | {"runs": [*record["runs"], "doge-seed2"]})
    assert "1 run not complete yet, so left out: doge-seed2" in words_of(out)


def test_several_proxies_are_told_apart(tmp_path):
    rest = without("reference", "tests")
    write_proxy(tmp_path / "both", domains=rest, target=("reference=0.7", "tests=0.3"))
    write_proxy(tmp_path / "mix", target=("mix=1",), score="published")
    page = page_of(tmp_path)
    assert "both, for reference (0.7) and tests (0.3)" in page.text
    assert "mix, for a held-out mixture of all domains" in page.text
    assert "score published" in page.text
    table = cells(page.source, "Domain weights")
    assert table["reference"][1] == "target"
    assert table["uniform would be"] == ["0.143", "0.200"]
    assert page.text.count("doge-fast export /") == 2
    # Seven rows and the mixture; five rows and two targets.
    tokens = [cell.split("k")[0] for cell in cells(page.source, "Cost")["tokens"]]
    assert tokens == ["819\N{NO-BREAK SPACE}", "717\N{NO-BREAK SPACE}"]
    runs = cells(page.source, "Runs")
    assert [runs[name][4].split("k")[0] for name in ("mix", "both")] == tokens


def test_cost_counts_the_gram_matrix_and_the_reference(tmp_path):
    runs = [write_proxy(tmp_path / "proxy"), write_base(tmp_path / "uniform")]
    for run in runs:
        config = records.read_json(run / records.CONFIG)
        records.write_json(run / records.CONFIG, config | {"parameters": 1000})
    tokens = STEPS * 4 * 7 * 128
    flops = 6 * 1000 * tokens + 7 * 8 * 1000 * STEPS
    table = cells(page_of(*runs).source, "Cost")
    assert table["tokens"][0] == "717\N{NO-BREAK SPACE}k  (1.00 ×)"
    assert table["FLOPs"][1] == f"4.3\N{NO-BREAK SPACE}B  ({6000 * tokens / flops:.2f} ×)"
    assert table["hours"][0] == f"{200 * 0.21 / 3600:.3g}  (1.00 ×)"


def test_a_model_of_another_run_goes_by_its_name(tmp_path):
    run = write_base(tmp_path / "tuned", weights="runs/proxy/weights.json")
    config = records.read_json(run / records.CONFIG)
    config["config"]["model"]["model"] = "runs/first/model"
    records.write_json(run / records.CONFIG, config)
    row = cells(page_of(run).source, "Runs")["tuned"]
    assert row[:4] == ["base", "weights proxy", "first", str(STEPS)]


def test_drift_is_that_of_the_weights_file(runs, page):
    """sum_j |alpha_bar(T) - alpha_bar(0.8 T)|, from the records themselves."""
    lines = records.read_metrics(runs / "proxy", kind="train")
    by_step = {line["step"]: line["alpha_mean"] for line in lines}
    last, before = by_step[STEPS], by_step[int(0.8 * STEPS)]
    drift = sum(abs(last[name] - before[name]) for name in DOMAINS)
    distance = sum(abs(last[name] - 1 / 7) for name in DOMAINS)
    assert (
        f"the last fifth of the 200 steps moved {50 * drift:.1f} % of the tokens between domains; "
        f"it lies {50 * distance:.1f} % from uniform weights."
    ) in page.text.replace("\N{NO-BREAK SPACE}", " ")


def moved(path_T: np.ndarray, seeds: Sequence[float] = (1.0,)) -> Movement:
    """Of two domains; the first goes from a half up by `path_T`, in each seed so much as much."""
    first = 0.5 + np.outer(seeds, path_T)
    alpha_STK = np.stack([first, 1 - first], axis=-1)
    counts = np.arange(1, len(path_T))[:, None]
    later = alpha_STK[:, 1:].cumsum(1) / counts
    mean_STK = np.concatenate([alpha_STK[:, :1], later], axis=1)
    return movement_of(np.arange(len(path_T), dtype=float), mean_STK)


def test_an_average_that_keeps_its_pace_has_not_settled():
    """After 31 steps as little as after 3000, however small the pace."""
    for steps in (31, 3000):
        assert not moved(np.linspace(0, 0.01, steps + 1)).is_settled


@pytest.mark.parametrize(("taus", "is_settled"), [(5, False), (8, True)])
def test_an_average_settles_long_after_the_weights(taus, is_settled):
    path = 0.3 * (1 - np.exp(-np.linspace(0, taus, 1001)))
    assert moved(path).is_settled is is_settled
    # What moves more than seeds differ has not.
    assert moved(path, (0.8, 1.0, 1.2)).is_settled is is_settled
    assert not moved(path, (0.999, 1.0, 1.001)).is_settled


@pytest.mark.parametrize(
    ("logits", "aim", "score", "word"),
    [
        (
            (0, 0, 0, 0, 0, 0, -2.5),
            "universal",
            "paper",
            "metadata would be read less than a third",
        ),
        ((0, 0, 0, 0, 0, -2.5), "stdlib", "paper", ""),
        ((9.0, 0, 0, 0, 0, 0, 0), "universal", "paper", "collapsed onto stdlib"),
        ((0.0,) * 7, "universal", "paper", "hardly left uniform. A smaller --mu or more steps"),
        # This rule has no mu.
        ((0.0,) * 6, "stdlib", "aligned", "hardly left uniform. More steps would"),
        # Gradients of norm 1 give both the same score.
        ((0.0,) * 2, "universal", "paper", "hardly left uniform: two domains"),
    ],
)
def test_weights_that_need_care_are_warned_of(tmp_path, logits, aim, score, word):
    told = {"domains": DOMAINS[-len(logits) :], "target": (aim,), "score": score}
    proxy = write_proxy(tmp_path / "proxy", logits=logits, **told)
    record = records.read_weights(proxy)
    if not any(logits):
        for each in record["domains"]:
            each["weight"] = 1 / len(logits)
        records.write_weights(proxy, record)
    told = " ".join(" ".join(remarks_on(proxy)).split())
    found = [each for each in ("less than a third", "collapsed", "hardly left") if each in told]
    assert len(found) == bool(word)
    assert word in told
    assert word in words_of(proxy)


def test_skipped_steps_and_remarks_on_the_corpus_are_told_once(tmp_path):
    told = "stdlib: 96% of its tokens are held out."
    for seed in (0, 1):
        run = write_proxy(tmp_path / f"proxy-seed{seed}", seed=seed, skipped=(3, 4)[: 2 - 2 * seed])
        config = records.read_json(run / records.CONFIG)
        records.write_json(run / records.CONFIG, config | {"warnings": [told]})
    words = words_of(tmp_path)
    assert words.count(told) == 1
    assert "proxy-seed0: 2 logged steps skipped" in words
    assert "nan" not in words.lower().split()


def test_awkward_names_stay_text(tmp_path):
    names = ("<b>x</b> & y", "$a_1$", "_hidden", "a very long name of a domain", "文書", "f g")
    out: dict[str, Any] = {"domains": names, "tokens": dict.fromkeys(names, 500_000)}
    write_proxy(tmp_path / "proxy <1>", **out)
    for weights in ("uniform", "natural"):
        write_base(tmp_path / weights, weights=weights, loss=dict.fromkeys(names, 3.0), **out)
    page = page_of(tmp_path)
    assert "<b>x</b> & y" not in page.source
    assert all(name in page.text for name in names)
    assert "a very long .. of a domain" in page.text
    assert "$a_1$" in report.terminal_table([tmp_path])


@pytest.mark.parametrize("num_domains", [1, pytest.param(24, marks=pytest.mark.exhaustive)])
def test_any_number_of_domains(tmp_path, num_domains):
    tokens = {f"domain {j}": 500_000 for j in range(num_domains)}
    logits = tuple(np.linspace(-1, 1, num_domains))
    write_proxy(tmp_path / "proxy", domains=(*tokens,), tokens=tokens, logits=logits, steps=20)
    page = page_of(tmp_path)
    assert page.tags.count("figure") == 2
    assert f"of {num_domains} domain" in page.text


def test_the_interval_is_students_for_paired_samples():
    draw = np.random.default_rng(0)
    own, other = draw.normal(3.0, 0.4, 5), draw.normal(3.2, 0.4, 5)
    found = paired_difference(dict(enumerate(own)), dict(enumerate(other)))
    expected = stats.ttest_rel(own, other).confidence_interval(0.95)
    assert found.mean == pytest.approx((own - other).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.pairs == 5


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        ([2.0], [2.1], "−9.5\N{NO-BREAK SPACE}%"),
        ([math.nan, 2.0], [2.1, 2.1], "not finite"),
        ([], [], "–"),
    ],
)
def test_one_pair_a_diverged_one_and_none_decide_nothing(own, other, told):
    found = paired_difference(dict(enumerate(own)), dict(enumerate(other)))
    assert not found.is_decided
    assert math.isfinite(found.mean) == (own == [2.0])
    assert change_text(found) == told


def test_columns_are_two_blanks_apart_and_no_line_is_too_wide():
    header = ["domain", *(f"column {j}" for j in range(20))]
    rows = [[f"{'long/' * i}name", *(f"{i * j}" for j in range(20))] for i in range(20)]
    small = tables.table_of(["a", "b", "c"], [["x", "1", "2"]])
    assert tables.text(small, width=80) == "a  b  c\n-------\nx  1  2"
    marked = tables.table_of(
        "ab", [["x", tables.Cell("1", True)], ["y", tables.Cell("2", False, True)]]
    )
    assert tables.text(marked, width=80) == "a  b\n------\nx  1 *\ny  2 !"
    for width in (40, 61, 100):
        printed = tables.text(tables.table_of(header, rows), width=width)
        assert max(map(len, printed.splitlines())) <= width
        assert printed.count("domain") > 1
