"""Pipelines over processes, against the plain model; cases.py has what each process runs."""

import inspect
from typing import Any

import pytest

from . import cases, ranks

NAMES = [
    name
    for name, case in vars(cases).items()
    if inspect.isfunction(case) and [*inspect.signature(case).parameters] == ["rank", "ranks"]
]

# What depends on how many processes there are, and not on what else is asked of them.
WITH_FOUR = [name for name in NAMES if name.endswith("frozen_1")]
WITH_FOUR += ["unet", "integers", "tied_gpt", "rotary_llama", "encoder_decoder"]
WITH_FOUR += ["clipped", "replicas_of_a_pipeline", "values_of_one_process_count"]


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """What each case came to in two processes."""
    return ranks.run_cases(cases.__name__, NAMES, 2)


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    """What some came to in four."""
    return ranks.run_cases(cases.__name__, WITH_FOUR, 4)


@pytest.mark.every
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_give_the_plain_numbers_or_an_error(two: dict[str, Any], name: str) -> None:
    """On both ranks."""
    ranks.check(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FOUR)
def test_four_processes_give_the_plain_numbers(four: dict[str, Any], name: str) -> None:
    """On every rank."""
    ranks.check(four, name)


def test_every_case_is_run():
    """A case that nobody finds proves nothing."""
    assert len(NAMES) > 25
