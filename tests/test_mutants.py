"""The table of `make mutants` is of this tree, and its mutants are others than the source."""

from tests.mutants import MODULES, ROOT, mutants_of, path_of


def test_the_table_names_the_core_and_tests_that_are_there():
    for module, row in MODULES.items():
        assert path_of(module).is_file()
        assert row["tests"]
        for name in row["tests"]:
            assert (ROOT / "tests" / name).is_file(), name


def test_mutants_are_the_same_each_time_and_differ_from_the_source():
    number, first = mutants_of("weights/simplex", 12)
    assert (number, first) == mutants_of("weights/simplex", 12)
    assert number > 50
    source = path_of("weights/simplex").read_text("utf-8")
    assert len({source, *(mutant.source for mutant in first)}) == 1 + len(first)
    assert not any("Raises:" in mutant.change for mutant in first)
