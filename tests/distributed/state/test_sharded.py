"""A pipeline's state over processes; state_cases.py has what each process runs."""

import pytest

from .. import ranks, state_cases
from ..test_distributed_pipeline import cases_of, pytestmark

__all__ = ["pytestmark"]

WITH_THREE = ["saved_with_two_stages_and_loaded_with_one_and_three"]
WITH_TWO = [name for name in cases_of(state_cases) if name not in WITH_THREE]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("processes", "names"), [(2, WITH_TWO), (3, WITH_THREE)], ids=["2", "3"])
def test_state_goes_between_numbers_of_stages(processes: int, names: list[str]) -> None:
    """The model's and the optimizer's, whole and sharded."""
    ranks.check(ranks.run_cases(state_cases.__name__, names, processes))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(WITH_TWO) == 5
