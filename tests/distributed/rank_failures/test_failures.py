"""Failures in the middle of a step: all processes end, and say why."""

import signal

import pytest

from .. import ranks
from . import failing_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu("the processes have no simulated accelerator"),
    ranks.NEEDS_SCHEDULES,
]

NEVER = 1800  # seconds: the patience of torch's own connections, which nobody should need


@pytest.mark.parametrize(
    "case", ["raises", "raises_in_a_backward", "reads_what_another_process_has"]
)
def test_a_process_that_raises_is_quoted_by_the_others(case: str) -> None:
    """With its traceback, stage and micro-batch."""
    ranks.check(ranks.run_cases(failing_cases.__name__, [case], 2, patience=NEVER))


@pytest.mark.parametrize(("case", "processes"), [("dies", 3), ("a_replica_dies", 2)])
def test_a_process_that_is_killed_is_named_by_all_others(case: str, processes: int) -> None:
    """Within a minute, which failing_cases.py looks at."""
    codes: dict[int, int] = {}
    module, last = failing_cases.__name__, processes - 1
    found = ranks.run_cases(module, [case], processes, patience=NEVER, exit_codes=codes)
    assert found == {case: {last: "it did not end"}}
    assert codes[last] == -signal.SIGKILL


@pytest.mark.parametrize("case", ["first_dies", "first_dies_with_the_store"])
def test_the_first_process_is_looked_after_by_the_others(case: str) -> None:
    """Also where it has torch's store, as it has without torchrun."""
    codes: dict[int, int] = {}
    has_store = case.endswith("store")
    found = ranks.run_cases(
        *(failing_cases.__name__, [case], 2),
        patience=NEVER,
        exit_codes=codes,
        has_store=has_store,
    )
    assert found == {case: {0: "it did not end"}}
    assert codes == {0: -signal.SIGKILL, 1: 0}


@pytest.mark.parametrize("case", ["hangs", "a_replica_hangs"])
def test_a_process_that_hangs_is_ended_and_its_stack_is_shown(case: str) -> None:
    """None is left over."""
    codes: dict[int, int] = {}
    found = ranks.run_cases(failing_cases.__name__, [case], 2, patience=NEVER, exit_codes=codes)
    assert found == {case: {1: "it did not end"}}
    assert codes == {0: 0, 1: ranks.ENDED_BY_ITSELF}


def test_those_that_wait_for_a_stopped_process_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Their connections are whole, so that nothing wakes them."""
    codes: dict[int, int] = {}
    ranks.run_cases(failing_cases.__name__, ["stops"], 2, patience=NEVER, exit_codes=codes)
    assert codes == {0: ranks.ENDED_BY_ITSELF, 1: -signal.SIGKILL}
    said = capfd.readouterr().err
    assert "rank 1 has ended in a step without a word, or does not run" in said
    assert "blockpipe: rank 0 waits after" in said


def test_a_process_that_ends_early_is_named() -> None:
    """Where its script does fewer steps than those of others."""
    ranks.check(ranks.run_cases(failing_cases.__name__, ["leaves"], 2, patience=NEVER))


def test_a_process_that_is_slow_is_waited_for() -> None:
    """A step takes as long as it takes."""
    ranks.check(ranks.run_cases(failing_cases.__name__, ["is_slow"], 2, patience=NEVER))
