"""The one table printer: what fits stands side by side, what does not follows below."""

from doge_fast.pipeline.tables import table_of, text


def test_columns_are_two_blanks_apart_and_no_line_is_too_wide():
    header = ["domain", *(f"column {j}" for j in range(20))]
    rows = [[f"{'long/' * i}name", *(f"{i * j}" for j in range(20))] for i in range(20)]
    small = table_of(["a", "b", "c"], [["x", "1", "2"]])
    assert text(small, width=80) == "a  b  c\n-------\nx  1  2"
    for width in (40, 61, 100):
        printed = text(table_of(header, rows), width=width)
        assert max(map(len, printed.splitlines())) <= width
        assert printed.count("domain") > 1
