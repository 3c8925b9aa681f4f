"""Reports on a pipeline over processes; report_cases.py has what each process runs."""

import pytest

from .. import ranks, report_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

NAMES = cases_of(report_cases)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reports_are_the_same_in_every_process() -> None:
    """Summary, timeline and verification."""
    ranks.check(ranks.run_cases(report_cases.__name__, NAMES, 2))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) == 10
