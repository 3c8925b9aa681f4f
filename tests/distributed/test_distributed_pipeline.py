"""Pipelines over processes, against the plain model; cases.py, handed_cases.py and
refused_cases.py have what each process runs."""

import inspect
from types import ModuleType

import pytest

from . import cases, handed_cases, ranks, refused_cases

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


NAMES, REFUSED = cases_of(cases), cases_of(refused_cases)
HANDED = cases_of(handed_cases)

# What depends on how many processes there are, and not on what else is asked of them.
WITH_FOUR = [name for name in NAMES if name.endswith("frozen_1")]
WITH_FOUR += ["unet", "integers", "tied_gpt", "rotary_llama", "encoder_decoder"]
WITH_FOUR += ["clipped", "replicas_of_a_pipeline", "values_of_one_process_count"]
WITH_FOUR += ["other_processes_share_in_the_next_model", "classes_weigh_as_in_the_whole_batch"]
SHORT = ["schedule_1f1b_frozen_1", "schedule_zb_v_frozen_0", "weighed"]
SHORT += ["replicas_of_a_pipeline", "state_goes_both_ways", "outputs_where_they_are_asked_for"]
SHORT += ["what_one_process_alone_changes_leaves_no_process_waiting"]
REFUSED_WITH_FOUR = [
    "a_replica_that_fails_before_a_step_ends_it_for_all",
    "what_differs_is_named_at_the_start",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "module", "names"),
    [
        pytest.param(2, cases, NAMES, id="2"),
        pytest.param(4, cases, WITH_FOUR, id="4"),
        pytest.param(2, handed_cases, HANDED, id="2, handed"),
        pytest.param(2, refused_cases, REFUSED, id="2, refused"),
        pytest.param(4, refused_cases, REFUSED_WITH_FOUR, id="4, refused"),
    ],
)
def test_processes_give_the_plain_numbers_or_an_error(
    processes: int, module: ModuleType, names: list[str]
) -> None:
    """On every rank. One test for each launch: parallel workers would each start their own."""
    ranks.check(ranks.run_cases(module.__name__, names, processes, seconds=800, patience=120))


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("processes", "names"), [(2, SHORT), (4, SHORT)], ids=["2", "4"])
def test_a_few_cases_run_with_each_commit(processes: int, names: list[str]) -> None:
    """The others take turns: these go through schedules, replicas and state in seconds."""
    ranks.check(ranks.run_cases(cases.__name__, names, processes))


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) > 25
    assert len(REFUSED) > 4
    assert {*SHORT} < {*NAMES}
