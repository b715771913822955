"""The paper's numbers beside ours are those that the paper prints."""

import math
import re
from pathlib import Path

import pytest

from doge_fast.pipeline.reporting.paper import TABLES, canonical, columns_beside

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper" / "doge.tex"
# Where the two halves of one printed table are two of ours.
LABELS = {"tab:210M_ppl": "tab:124M_ppl"}


def tabular(label: str) -> str:
    """The body of the last table of that label: the earlier ones are commented out."""
    text = PAPER.read_text(encoding="utf-8")
    places = [match.end() for match in re.finditer(re.escape(f"\\label{{{label}}}"), text)]
    bodies = [text[place : text.index("\\end{tabular}", place)] for place in places]
    return "\n".join(bodies)


def numbers(text: str) -> list[float]:
    without_errors = re.sub(r"\\small\s*±[\d.]*", "", text)
    return [float(each) for each in re.findall(r"(?<![\w.])\d+\.\d+(?!\s*\\?%)", without_errors)]


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")
@pytest.mark.parametrize("label", sorted(TABLES))
def test_every_number_is_printed_in_the_papers_table(label: str) -> None:
    printed = numbers(tabular(LABELS.get(label, label)))
    ours = [value for column in TABLES[label].values() for value in column.values()]
    assert ours
    missing = [value for value in ours if value not in printed]
    assert not missing


@pytest.mark.parametrize(
    "label", ["tab:dw", "tab:ood-dw", "tab:ood-wiki-dw", "tab:robust", "tab:cc-dw"]
)
def test_weights_sum_to_one_as_far_as_they_are_printed(label: str) -> None:
    for column, weights in TABLES[label].items():
        # One column of the paper does not.
        total = 0.910 if (label, column) == ("tab:ood-dw", "for arxiv") else 1.0
        digits = 3 if label in ("tab:dw", "tab:ood-dw", "tab:ood-wiki-dw") else 4
        assert sum(weights.values()) == pytest.approx(total, abs=len(weights) * 10**-digits)


@pytest.mark.parametrize(
    "label", ["tab:universal_ppl", "tab:124M_ppl", "tab:210M_ppl", "tab:cc-ppl"]
)
def test_averages_are_exponentials_of_mean_logarithms(label: str) -> None:
    """And so a check of every digit above them, as far as the paper's own sums go."""
    for column, values in TABLES[label].items():
        domains = {
            name: value for name, value in values.items() if name not in ("average", "worst")
        }
        mean = math.exp(sum(map(math.log, domains.values())) / len(domains))
        assert mean == pytest.approx(values["average"], rel=0.002), column
        if "worst" in values:
            assert max(domains.values()) == values["worst"]


def test_names_of_one_domain_are_one() -> None:
    names = ("RedPajamaCommonCrawl", "cc", "common_crawl", "CommonCrawl")
    assert {canonical(name) for name in names} == {"commoncrawl"}


def test_columns_come_under_our_names() -> None:
    assert columns_beside("tab:dw", {"cc": "commoncrawl", "my-arxiv": "arxiv"}, 3) == {
        ("DoGE", "tab:dw"): {"cc": "0.214", "my-arxiv": "0.088"}
    }
    assert columns_beside("tab:dw", {"stdlib": "stdlib"}, 3) == {}
    assert columns_beside(None, {"cc": "commoncrawl"}, 3) == {}
