"""The table of `make mutants` is of this tree; its driver tells what is noticed from the rest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MODULES, mutants_of, path_of

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_names_the_core_and_tests_that_are_there():
    for module, row in MODULES.items():
        assert path_of(module).is_file()
        assert row["tests"]
        for name in row["tests"]:
            assert (ROOT / "tests" / name).is_file(), name


def test_mutants_are_the_same_each_time_and_differ_from_the_source():
    number, first = mutants_of("weights/simplex", 12)
    assert (number, first) == mutants_of("weights/simplex", 12)
    assert number > 100
    source = path_of("weights/simplex").read_text("utf-8")
    assert all(mutant.source != source and mutant.line > 1 for mutant in first)
    assert len({mutant.source for mutant in first}) == len(first)
    assert not any("Raises:" in mutant.old for mutant in first)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changed", "number"), [("1 / num_domains", r"[1-9]\d*"), ("Coefficient", "0")]
)
def test_a_change_that_matters_is_killed(changed, number):
    """And where nothing is changed, nothing is."""
    words = ["-m", "tests.mutants", "weights/simplex", "--only", changed, "--jobs", "1"]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    pattern = rf"^weights/simplex +{number} of \d+ killed"
    assert re.search(pattern, ended.stdout, re.MULTILINE), ended.stdout + ended.stderr
