"""Numbers, names and tables as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpipe._common.text import bytes_text, milliseconds_text, one_line, stages_text, text_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 50, "1048576.0 GiB"),
    ],
)
def test_bytes_text_has_the_unit_that_people_read(count: int, text: str) -> None:
    """GiB is the largest."""
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (1.2345e-6, "0.00123"), (0.0994, "99.4"), (0.1, "100"), (60, "60,000")],
)
def test_milliseconds_text_has_three_digits_or_all_before_the_point(
    seconds: float, text: str
) -> None:
    assert milliseconds_text(seconds) == text


@pytest.mark.parametrize(
    ("stages", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([1, 2, 3], "1-3"), ([0, 1, 3], "0, 1, 3")],
)
def test_stages_text_is_a_range_from_three_on(stages: list[int], text: str) -> None:
    assert stages_text(stages) == text


@given(st.text())
def test_one_line_is_printable_and_says_the_same(text: str) -> None:
    """No line break and no escape character is left; a printable name stays as it is."""
    found = one_line(text)
    assert found.isprintable()
    assert (found == text) == text.isprintable()


names = st.text(st.characters(exclude_characters="│"), min_size=1, max_size=8)


@given(st.lists(st.tuples(names, st.integers(0, 10**6)), min_size=1, max_size=5))
def test_text_table_lines_up_whatever_is_in_it(rows: list[tuple[str, int]]) -> None:
    """A line for each row below the rule; numbers end where their heading ends."""
    cells = [[name, str(number)] for name, number in rows]
    head, rule, *lines = text_table(["Name", "Number"], cells, left=1).split("\n")
    assert set(rule) == {"─"}
    assert len(lines) == len(rows)
    assert {len(line) for line in (head, *lines)} == {len(rule)}
    assert [line.split()[-1] for line in lines] == [str(number) for _, number in rows]
