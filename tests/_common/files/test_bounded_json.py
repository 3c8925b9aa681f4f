"""JSON from elsewhere: what is read, what is refused, and by which bound."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpipe._common.files import bounded_json as bounded
from blockpipe._common.files.bounded_json import parse_json, read_text

from ...stage_devices import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
@settings(max_examples=examples(50), deadline=None)
def test_what_json_writes_is_read(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only)) == value


@given(VALUES, st.data())
@settings(max_examples=examples(50), deadline=None)
def test_a_changed_text_is_read_as_json_reads_it_or_is_a_value_error(value, data):
    text = list(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from('"\\[]{}:,0u') | st.characters())
    try:
        found = parse_json("".join(text))
    except ValueError:
        return
    assert found == json.loads("".join(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 201 + "]" * 201, "nested more than 200 deep"),
        ('{"a":' * 10**5, "nested more than 200 deep"),
        ("9" * 101, "a number has more than 100 digits"),
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "one object has the name 'c' twice"),
        ("NaN", "NaN is not JSON"),
        (r'["\ud800"]', "surrogates not allowed"),
        ('["\ud800"]', "surrogates not allowed"),
        (b"[]", "expected text"),
    ],
)
def test_json_beyond_a_bound_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_json(text)


def test_brackets_and_digits_in_strings_do_not_count():
    """Nor do a surrogate pair, and what only looks like half of one."""
    for value in ("[" * 999, "9" * 999, '\\"[' * 999, "😀", "\\ud800"):
        assert parse_json(json.dumps(value)) == value
    assert parse_json("[" * 200 + "]" * 200)


def test_a_text_without_an_end(monkeypatch):
    """A device is read up to the bound, as a file is."""
    monkeypatch.setattr(bounded, "LARGEST_TEXT", 10**6)
    with pytest.raises(ValueError, match="it is longer than 1,000,000 characters"):
        read_text("/dev/zero")
    with pytest.raises(ValueError, match="it is longer than 1,000,000 characters"):
        parse_json(" " * (10**6 + 1))
