"""The table of `make mutants` is of this tree, and its mutants are others than the source."""

from tests.mutants import MODULES, ROOT, mutants_of, place_of, source_of


def test_mutants_differ_from_the_source_and_have_tests():
    for module, row in MODULES.items():
        assert (ROOT / place_of(module)).is_file()
        assert all((ROOT / "tests" / name).is_file() for name in row["tests"]), module
    number, mutants = mutants_of("weights/scores", 12)
    assert number > 50
    sources = {source_of("weights/scores"), *(mutant.source for mutant in mutants)}
    assert len(sources) == 1 + len(mutants)
