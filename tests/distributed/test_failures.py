"""Failures in the middle of a step: all processes end, and say why."""

import time

import pytest

from . import failing_cases, ranks


def _run(name: str, patience: int = 60) -> tuple[dict[int, str], float]:
    began = time.monotonic()
    found = ranks.run_cases(failing_cases.__name__, [name], 2, patience=patience, seconds=90)
    return found[name], time.monotonic() - began


def test_a_process_that_raises_is_quoted_by_the_others():
    """With its traceback, stage and micro-batch."""
    found, _ = _run("raises")
    if found:
        pytest.fail(str(found))


def test_a_process_that_is_killed_ends_the_others():
    """Within a minute, the start included."""
    found, seconds = _run("dies")
    assert found == {1: "it did not end"}
    assert seconds < 60


def test_a_process_that_hangs_is_waited_for_as_long_as_the_group_says():
    """The others end then."""
    found, _ = _run("hangs", patience=4)
    assert 0 not in found, found[0]
