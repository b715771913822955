"""The table of `make mutants` is of this tree; its driver tells what is noticed from the rest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import TABLE, mutants_of, path_of

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_names_the_core_and_tests_that_are_there() -> None:
    assert TABLE["modules"]
    for module, row in TABLE["modules"].items():
        assert path_of(module).is_file()
        assert row["tests"]
        for name in row["tests"]:
            assert (ROOT / "tests" / name).is_file(), name


def test_equivalents_have_a_reason_and_stand_in_the_source() -> None:
    for each in TABLE["equivalent"]:
        assert each["module"] in TABLE["modules"]
        assert len(each["reason"].split()) > 3
        assert each["old"] != each["new"]
        lines = " ".join(path_of(each["module"]).read_text("utf-8").split())
        assert " ".join(each["old"].split()) in lines, each


def test_mutants_are_the_same_each_time_and_differ_from_the_source() -> None:
    number, first = mutants_of("weights/simplex", 12)
    assert (number, first) == mutants_of("weights/simplex", 12)
    assert number > 100
    source = path_of("weights/simplex").read_text("utf-8")
    assert all(mutant.source != source and mutant.line > 1 for mutant in first)
    assert len({mutant.source for mutant in first}) == len(first)
    assert not any("Raises:" in mutant.old for mutant in first)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changed", "found"), [("1 / num_domains", "killed: "), ("Coefficient", "")], ids=str
)
def test_a_change_that_matters_is_killed(changed: str, found: str) -> None:
    """And where nothing is changed, nothing is."""
    words = ["-m", "tests.mutants", "weights/simplex", "--only", changed, "--show", "--jobs", "1"]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("killed: " in ended.stdout) == bool(found), ended.stdout + ended.stderr
    # The same lines have a device, whose absence means the CPU that the tests run on.
    assert found or "survived: " not in ended.stdout
    assert re.search(r"^weights/simplex +\d+", ended.stdout, re.MULTILINE)
