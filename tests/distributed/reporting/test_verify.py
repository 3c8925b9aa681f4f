"""Verification of replicas over processes; verify_cases.py has what each process runs."""

import pytest

from .. import ranks, verify_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

NAMES = cases_of(verify_cases)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("processes", [2, 4])
def test_replicas_are_verified_as_one_process(processes: int) -> None:
    """With one stage in each, and with two; one launch for all cases."""
    ranks.check(ranks.run_cases(verify_cases.__name__, NAMES, processes, seconds=360))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) == 5
