"""Pipeline's words over processes; words_cases.py has what each process runs."""

import pytest

from .. import ranks, words_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

NAMES = cases_of(words_cases)


WITH_FOUR = ["dropout_is_that_of_one_process", "dropout_of_an_encoder_and_a_decoder"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "names"), [(2, NAMES), (4, WITH_FOUR)], ids=["2", "4"])
def test_pipelines_words_mean_the_same_over_processes(processes: int, names: list[str]) -> None:
    """Random numbers, recomputation and deferred batch norm; numbers go through every process."""
    ranks.check(ranks.run_cases(words_cases.__name__, names, processes, seconds=500, patience=120))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) == 8
