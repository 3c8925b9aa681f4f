"""A Pipeline in each process; replica_cases.py has what each process runs."""

import pytest

from .. import ranks, replica_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

NAMES = cases_of(replica_cases)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_share_a_batch() -> None:
    """Gradients are those of the whole batch, and are summed stage by stage."""
    ranks.check(ranks.run_cases(replica_cases.__name__, NAMES, 2))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) == 11
