"""Weights as a product: what each verb says is what the numbers are, and nothing is lost."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doge_fast import cli
from doge_fast.pipeline import named, records
from doge_fast.pipeline.run import Run
from doge_fast.pipeline.weights import bounds, summary
from tests.pipeline.written_runs import write_proxy

NAMES = ("code", "prose", "verse")
WEIGHTS = (0.5, 0.3, 0.2)
TOKENS = {"code": 6_000_000, "prose": 3_000_000, "verse": 1_000_000}


def record(
    values: tuple[float, ...] = WEIGHTS,
    names: tuple[str, ...] = NAMES,
    tokens: Mapping[str, int] | None = TOKENS,
    **changes: Any,
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for name, value in zip(names, values, strict=True):
        entry: dict[str, Any] = {"name": name, "weight": value, "weight_last": value}
        if tokens is not None:
            entry["tokens"] = tokens[name]
            entry["prior"] = tokens[name] / sum(tokens.values())
        entries.append(entry)
    whole = {"method": "doge", "target": "universal", "steps": 300, "seed": 0}
    return {"schema_version": 1, **whole, "domains": entries} | changes


def write(path: Path, content: dict[str, Any] | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write_weights(path, record() if content is None else content)
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["weights", *map(str, words)]) == 0
    text = capsys.readouterr().out
    if "{" not in text:
        # A path is as long as it is, on a line of its own.
        lines = [line for line in text.splitlines() if not line.strip().startswith("/")]
        assert max(map(len, lines)) <= 100, text
    return text


def cells(text: str, name: str) -> list[str]:
    """The row of a domain."""
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [name]]
    return row[1:]


def test_tokens_that_there_really_are_decide_epochs_and_given_for_all_the_priors():
    one = summary.describe(record(), budget_tokens=1e7, tokens={"verse": 2e6})
    assert one.domains[2].epochs == pytest.approx(1.0)
    assert one.domains[2].prior == pytest.approx(0.1)
    every = summary.describe(record(), tokens=dict.fromkeys(NAMES, 5e9))
    assert [share.prior for share in every.domains] == pytest.approx([1 / 3] * 3)


def test_what_a_file_does_not_say_is_none():
    mixture = summary.describe(record(tokens=None), budget_tokens=1e9)
    assert [(s.prior, s.ratio, s.tokens, s.epochs) for s in mixture.domains] == [(None,) * 4] * 3
    tokens = dict.fromkeys(NAMES, 0) | {"code": 10}
    empty = summary.describe(record((0.5, 0.5, 0.0), tokens=tokens), budget_tokens=20)
    assert [share.epochs for share in empty.domains] == [1.0, math.inf, 0.0]


def test_a_notebook_shows_the_table_and_names_as_they_are():
    names = ("<b>code</b>", "prose", "verse")
    shown = summary.describe(record(names=names, tokens=None))._repr_html_()
    assert "&lt;b&gt;code&lt;/b&gt;  0.5000" in shown
    assert "prior" not in shown
    assert "2.80 of 3" in shown


def seeds(*values: tuple[float, ...], **changes: Any) -> dict[str, dict[str, Any]]:
    return {f"seed-{seed}": record(each, seed=seed, **changes) for seed, each in enumerate(values)}


def test_an_average_has_the_mean_and_the_spread_of_its_files(tmp_path, capsys):
    values = [(0.5, 0.3, 0.2), (0.4, 0.4, 0.2), (0.6, 0.2, 0.2)]
    mixtures = seeds(*values, colour="blue")
    # In another order: matched by name.
    mixtures["seed-1"]["domains"].reverse()
    files = [write(tmp_path / f"{name}.json", each) for name, each in mixtures.items()]
    assert "Nothing is written without --out" in said(capsys, "average", *files)
    out = tmp_path / "new" / "mean.json"
    text = said(capsys, "average", *files, "--out", out)
    assert cells(text, "code") == ["0.5000", "0.1000", "0.0577", "0.4000", "0.6000"]
    assert text.endswith(f"weights: {out}\n")
    found = records.read_weights(out)
    mean = dict(zip(NAMES, np.mean(values, 0), strict=True))
    assert records.weights_by_name(found) == pytest.approx(mean)
    deviations = [entry["weight_std"] for entry in found["domains"]]
    assert deviations == pytest.approx(np.std(values, 0, ddof=1).tolist(), abs=1e-15)
    assert found["domains"][0]["weight_last"] == pytest.approx(0.5)
    assert found["domains"][0]["tokens"] == TOKENS["code"]
    assert (found["colour"], found["target"]) == ("blue", "universal")
    # What differs is said once for each, not of all.
    assert "seed" not in found
    assert found["average"]["count"] == 3
    assert [each["seed"] for each in found["average"]["of"]] == [0, 1, 2]
    assert found["average"]["of"][1]["weights"] == {"verse": 0.2, "prose": 0.4, "code": 0.4}
    assert cells(said(capsys, "show", out), "code")[:2] == ["0.5000", "0.1000"]


def test_an_average_is_of_the_same_thing():
    targets = {"a": record(), "b": record(target={"ca": 1.0})}
    with pytest.raises(ValueError, match="target"):
        summary.average(targets)
    tokenizers = {"a": record(tokenizer_sha256="aa"), "b": record(tokenizer_sha256="bb")}
    with pytest.raises(ValueError, match="tokenizer_sha256"):
        summary.average(tokenizers)
    # One that does not say is not another.
    summary.average({"a": record(tokenizer_sha256="aa"), "b": record()})


def test_an_average_over_different_scores_says_so(tmp_path, capsys):
    scores = {"a": "aligned", "b": "paper", "c": "aligned"}
    files = [write(tmp_path / f"{name}.json", record(score=s)) for name, s in scores.items()]
    out = tmp_path / "mean.json"
    assert said(capsys, "average", *files, "--out", out).count("Warning:") == 1
    found = records.read_weights(out)
    assert "score" not in found
    (warning,) = found["warnings"]
    assert {"aligned", "paper"} <= set(warning.split())
    assert "Warning:" not in said(capsys, "average", files[0], files[2])


def test_bounds_hold_and_free_domains_keep_their_ratios():
    found = bounds.constrain(record(), floor={"verse": 0.3}, source="w.json")
    moved, about = records.weights_by_name(found), found["constraints"]
    assert moved == pytest.approx({"code": 0.7 * 5 / 8, "prose": 0.7 * 3 / 8, "verse": 0.3})
    assert moved["verse"] == 0.3
    assert about["bound"] == {"verse": "floor"}
    assert about["source"] == "w.json"
    assert (about["floor"], about["cap"], about["max_epochs"]) == ({"verse": 0.3}, {}, {})
    assert about["weights"] == records.weights_by_name(record())
    assert found["domains"][0]["weight_last"] == 0.5
    # All of it is no cap's doing.
    free = bounds.constrain(record((1.0, 0.0, 0.0)), floor={"verse": 0.0})
    assert free["constraints"]["bound"] == {}


@pytest.mark.parametrize(
    ("limits", "bound", "name", "weight"),
    [
        # verse: 3 epochs of 1 M in 20 M are 0.15; code at most 0.9.
        ({"max_epochs": 3}, {"verse": "max_epochs"}, "verse", 0.15),
        ({"max_epochs": {"code": 1}}, {"code": "max_epochs"}, "code", 0.3),
        ({"max_epochs": 3, "tokens": {"verse": 1e9}}, {}, "verse", 0.2),
        ({"max_epochs": 3, "cap": {"verse": 0.1}}, {"verse": "cap"}, "verse", 0.1),
    ],
)
def test_epochs_become_caps_by_the_tokens_there_are(limits, bound, name, weight):
    found = bounds.constrain(record(), budget_tokens=2e7, **limits)
    assert found["constraints"]["bound"] == bound
    assert found["constraints"]["budget_tokens"] == 2e7
    assert records.weights_by_name(found)[name] == pytest.approx(weight, rel=1e-12)


def test_what_was_true_of_other_weights_is_left_out():
    averaged = summary.average(seeds(WEIGHTS, (0.4, 0.4, 0.2)))
    averaged["stages"] = [{"first_step": 0, "weights": records.weights_by_name(averaged)}]
    found = bounds.constrain(averaged, cap=0.4)
    assert "stages" not in found
    assert all("weight_std" not in entry for entry in found["domains"])
    assert found["average"]["count"] == 2


def test_a_zero_is_lifted_by_a_floor_alone():
    content = record((0.5, 0.5, 0.0))
    found = records.weights_by_name(bounds.constrain(content, floor=0.1))
    assert found == pytest.approx({"code": 0.45, "prose": 0.45, "verse": 0.1})
    with pytest.raises(ValueError, match="verse"):
        bounds.constrain(content, cap=0.4)
    # What a floor lifts stays at the floor.
    with pytest.raises(ValueError, match="--cap"):
        bounds.constrain(content, cap={"code": 0.4, "prose": 0.4}, floor={"verse": 0.1})


def test_show_says_what_the_weights_mean(tmp_path, capsys):
    file = write(tmp_path / "w.json")
    text = said(capsys, "show", file, "--budget-tokens", "3e7")
    assert text.startswith(f"{file}: proxy, target universal, 300 steps, seed 0"[:40])
    assert cells(text, "verse") == ["0.2000", "0.2000", "0.1000", "2.00", "1", "M", "6.00"]
    assert "2.80 of 3" in text
    assert "More than 4 epochs in 30 M tokens" in text
    assert "is worth less: verse (6.00)." in " ".join(text.split())
    only = said(capsys, "show", write(tmp_path / "bare.json", record(tokens=None)))
    assert "prior" not in only
    assert "epochs" not in only


def test_show_tells_a_proxy_a_search_and_their_average_apart(tmp_path, capsys):
    proxy = record(corpus="/data/pile", date="2026-11-29", parameters=82_000_000, seed=1)
    proxy["tokens"] = 1_200_000
    measured = {"inverse_temperature": 4.0, "is_decided": False, "seeds": [0, 1]}
    search = record(**measured, warnings=["1/T = 4 is the farthest that was tried."])
    found = [proxy, search, summary.average({"a": proxy, "b": proxy | {"seed": 2}})]
    files = [write(tmp_path / f"{n}.json", each) for n, each in enumerate(found)]
    shown = [" ".join(said(capsys, "show", file).split()) for file in files]
    assert "0.json: proxy, target universal, 300 steps, seed 1 Corpus /data/pile, " in shown[0]
    assert "2026-11-29, 1.2 M tokens seen, 82 M parameters." in shown[0]
    assert (
        "1.json: search, 1/T = 4, undecided, target universal, 300 steps, seeds 0 and 1"
        in (shown[1])
    )
    assert shown[1].endswith("Warning: 1/T = 4 is the farthest that was tried.")
    assert "2.json: mean of 2 files, proxy, target universal, 300 steps, seeds 1 and 2" in shown[2]


def test_weights_are_a_file_a_run_a_plain_object_or_typed(tmp_path, capsys):
    write(tmp_path / "run" / "weights.json", record(tokens=None))
    plain = tmp_path / "plain.json"
    plain.write_text('{"code": 0.5, "prose": 0.3, "verse": 0.2}')
    typed = "code=0.5,prose=0.3,verse=0.2"
    loose = " prose = 30%, code=50 % ,verse=0.0002k, "
    sources = [tmp_path / "run", tmp_path / "run" / "weights.json", plain, typed, loose]
    tables = [cells(said(capsys, "show", source), "code")[0] for source in sources]
    assert tables == ["0.5000"] * 5
    # Where commas divide, names may have spaces and numbers; and there may be many.
    spaced = said(capsys, "show", "part 1 code=0.5,50% web=0.5")
    assert re.search(r"part 1 code +0\.5000", spaced)
    assert re.search(r"50% web +0\.5000", spaced)
    long = ",".join(f"a-domain-with-a-long-name-{number}=0.05" for number in range(20))
    assert cli.main(["weights", "show", long]) == 0
    assert cli.main(["weights", "show", "runs/seed=1"]) == 2
    assert "runs/seed=1 does not exist" in capsys.readouterr().err
    (tmp_path / "run" / "weights.json").rename(tmp_path / "run" / "config.json")
    assert cli.main(["weights", "show", str(tmp_path / "run")]) == 2
    assert "is not complete" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("16.1k", 16100), ("1.001M", 1001000), ("7%", 0.07)])
def test_numbers_with_a_factor_are_exact(text, number):
    assert named.number_as(type(number), text) == number


def test_constrain_writes_what_it_tells(tmp_path, capsys):
    file, out = write(tmp_path / "w.json"), tmp_path / "bound.json"
    words = ["--floor", "0.05", "verse=0.25", "--cap", "0.45", "--max-epochs", "9", "verse=12.5"]
    words += ["--budget-tokens", "4e7", "--out", out]
    text = said(capsys, "constrain", file, *words)
    assert cells(text, "code") == ["0.5000", "0.4500", "-0.0500", "0.900", "cap", "3.00"]
    assert cells(text, "verse") == ["0.2000", "0.2500", "+0.0500", "1.25", "floor", "10.0"]
    assert cells(text, "prose")[-1] == "4.00"
    assert "Moved: total variation 0.0500." in text
    assert records.weights_by_name(records.read_weights(out)) == pytest.approx(
        {"code": 0.45, "prose": 0.3, "verse": 0.25}
    )
    # What was measured of a temperature was of other weights.
    points = {"inverse_temperature": 2.0, "temperature": 0.5, "is_decided": True, "points": []}
    measured = records.read_weights(file) | points
    assert not bounds.constrain(measured, floor=0.01).keys() & points.keys()
    assert "is_decided" not in summary.average({"a": measured, "b": measured})
    free = said(capsys, "constrain", file)
    assert "No bound holds any domain" in free
    assert "Nothing is written" in free


def test_a_run_draws_its_weights_and_their_steps(tmp_path):
    bars, steps = Run(write_proxy(tmp_path / "run", domains=NAMES, tokens=TOKENS)).figures()
    for drawing in (bars, steps):
        assert all(f">{name}</text>" in drawing.svg for name in NAMES)
    assert all(f">{word}<" in bars.svg for word in ("natural", "uniform"))
