"""Pipeline's words over processes; words_cases.py has what each process runs."""

import pytest

from .. import ranks, words_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

NAMES = cases_of(words_cases)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pipelines_words_mean_the_same_over_processes() -> None:
    """Random numbers, recomputation and deferred batch norm."""
    ranks.check(ranks.run_cases(words_cases.__name__, NAMES, 2, seconds=500, patience=120))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) == 8
