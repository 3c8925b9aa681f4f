"""Pipelines over processes, against the plain model; cases.py has what each process runs."""

import inspect
from types import ModuleType

import pytest

from . import cases, ranks

pytestmark = [
    pytest.mark.cpu("the processes have no simulated accelerator"),
    ranks.NEEDS_SCHEDULES,
]


def cases_of(module: ModuleType) -> list[str]:
    """Return the functions of a module that take a rank and the number of ranks."""
    return [
        name
        for name, case in vars(module).items()
        if inspect.isfunction(case) and [*inspect.signature(case).parameters] == ["rank", "ranks"]
    ]


NAMES = cases_of(cases)

# What depends on how many processes there are, and not on what else is asked of them.
WITH_FOUR = [name for name in NAMES if name.endswith("frozen_1")]
WITH_FOUR += ["unet", "integers", "tied_gpt", "rotary_llama", "encoder_decoder"]
WITH_FOUR += ["clipped", "replicas_of_a_pipeline", "values_of_one_process_count"]
WITH_FOUR += ["a_replica_that_fails_before_a_step_ends_it_for_all"]
WITH_FOUR += ["what_differs_is_named_at_the_start", "other_processes_share_in_the_next_model"]


def test_uneven_micro_batches_in_two_processes() -> None:
    """The one case that also runs where slow tests are left out."""
    ranks.check(ranks.run_cases(cases.__name__, ["uneven"], 2))


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "names"),
    [
        pytest.param(2, NAMES, id="2"),
        pytest.param(4, WITH_FOUR, id="4"),
    ],
)
def test_processes_give_the_plain_numbers_or_an_error(processes: int, names: list[str]) -> None:
    """On every rank. One test for each launch: parallel workers would each start their own."""
    ranks.check(ranks.run_cases(cases.__name__, names, processes, seconds=800, patience=120))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) > 25
