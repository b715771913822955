"""The figure of benchmarks/README.md shows the kept records."""

import json
import re

from benchmarks import figure
from tests.pages import ROOT


def test_the_kept_figure_shows_the_kept_records(tmp_path):
    kept = (ROOT / "docs" / "_static" / "benchmarks" / "steps.svg").read_text(encoding="utf-8")
    assert figure.main([str(tmp_path / "steps.svg")]) == 0
    drawn = (tmp_path / "steps.svg").read_text(encoding="utf-8")
    words = re.compile(r">([^<>\n]+)</text>")
    assert words.findall(drawn) == words.findall(kept)
    records = [json.loads(file.read_text("utf-8")) for file in figure.RESULTS.glob("peers-*.json")]
    for record in records:
        for row in record["rows"]:
            if row["peer"] in figure.LABELS:
                assert f"{row['ratio']:.2f}" in words.findall(kept)
