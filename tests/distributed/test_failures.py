"""Failures in the middle of a step: all processes end, and say why."""

import pytest

from . import failing_cases, ranks

pytestmark = [pytest.mark.slow, pytest.mark.cpu("the processes have no simulated accelerator")]


def test_a_process_that_raises_is_quoted_by_the_others():
    """With its traceback, stage and micro-batch."""
    ranks.check(ranks.run_cases(failing_cases.__name__, ["raises"], 2))


def test_a_process_that_is_killed_ends_the_others():
    """Within a minute, which failing_cases.py looks at, and long before their patience ends."""
    found = ranks.run_cases(failing_cases.__name__, ["dies"], 2, patience=200)
    assert found == {"dies": {1: "it did not end"}}


def test_a_process_that_hangs_is_waited_for_as_long_as_the_group_says():
    """The others end then."""
    found = ranks.run_cases(failing_cases.__name__, ["hangs"], 2, patience=20)
    assert 0 not in found["hangs"], found["hangs"][0]
