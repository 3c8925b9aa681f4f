"""One wording for arguments that are not what was expected."""

import pytest
import torch

from blockpipe._common.checks import did_you_mean, expected, is_integer


def test_expected_names_the_contract_the_value_and_the_line():
    text = expected("a positive integer", 0, for_="chunks", fix="pass chunks=4")
    start, _, end = text.partition("test_checks.py:")
    assert start.startswith("expected a positive integer for chunks, got 0 (")
    assert end.endswith("); pass chunks=4")


def test_expected_has_one_comma_after_a_clause():
    """With the argument's name after it, and without."""
    contract = "sizes that add up to 5, the number of children,"
    assert expected(contract, [2]).startswith(f"expected {contract} got [2] (")
    assert expected(contract, [2], for_="a").startswith(f"expected {contract} for a, got [2] (")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(torch.ones(3, 3), "got Tensor ("), ([1, "a"], "got [1, 'a'] ("), ("x" * 500, "xxx… (")],
    ids=["tensor", "list", "long"],
)
def test_expected_shows_plain_values_and_the_types_of_others(value: object, shown: str):
    assert shown in expected("a path", value)
    assert len(expected("a path", value)) < 400


@pytest.mark.parametrize(
    ("value", "is_one"), [(2, True), (1, False), (True, False), (2.0, False), ("2", False)]
)
def test_is_integer_takes_no_bool_and_nothing_below_the_least(value: object, is_one: bool):
    assert is_integer(value, 2) == is_one


def test_did_you_mean_names_the_nearest_words_or_the_first_known():
    assert did_you_mean("laer1", ["layer1", "head"]) == "did you mean 'layer1'?"
    assert did_you_mean("zzz", ["layer1", "head"]) == "known: 'layer1', 'head'"
    assert did_you_mean("zzz", ["layer1"], "make the plan anew") == "make the plan anew"
    assert did_you_mean("h.1", ["net.h.0", "net.h.1"]) == "did you mean 'net.h.1'?"
    assert did_you_mean("zzz", "abcdefghi").endswith("'h', …")
