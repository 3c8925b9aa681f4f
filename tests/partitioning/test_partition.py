"""Rows of weights into parts: never worse than the best that there is."""

from itertools import accumulate, combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.errors import PlanError
from blockpipe.partitioning.optimum import best_bounds

weights_of = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def _partitions(count: int, stages: int) -> list[list[int]]:
    return [[0, *inner, count] for inner in combinations(range(1, count), stages - 1)]


@given(data=st.data(), weights=weights_of)
def test_balanced_is_never_worse_than_brute_force(data: st.DataObject, weights: list[int]) -> None:
    """With speeds, limits, and what the first and last stage have besides; where nothing fits, both say so."""
    stages = data.draw(st.integers(1, len(weights)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=stages, max_size=stages))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)))
    limits = data.draw(st.lists(st.integers(5, 40), min_size=stages, max_size=stages))
    first, last = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))

    def worst(bounds: list[int]) -> float:
        costs = []
        for stage, (a, b) in enumerate(pairwise(bounds)):
            if sum(sizes[a:b]) > limits[stage]:
                return inf
            extra = first * (stage == 0) + last * (stage == stages - 1)
            costs.append((sum(weights[a:b]) + extra) / speeds[stage])
        return max(costs)

    best = min(map(worst, _partitions(len(weights), stages)))
    options = {"speeds": speeds, "sizes": sizes, "limits": limits, "first": first, "last": last}
    if best == inf:
        with pytest.raises(PlanError, match="no partition of .* keeps to"):
            bp.partition_balanced(weights, stages, **options)
        return
    found = bp.partition_balanced(weights, stages, **options)
    assert len(found) == stages
    assert sum(found) == len(weights)
    assert min(found) >= 1
    assert worst([0, *accumulate(found)]) == pytest.approx(best, rel=1e-9)


@given(data=st.data(), count=st.integers(1, 8))
def test_bounds_are_the_best_and_then_those_with_the_least_crossing(
    data: st.DataObject, count: int
) -> None:
    """Costs may differ from stage to stage in any way; infinite ones are never taken."""
    stages = data.draw(st.integers(1, count))
    size = count + 1
    number = st.one_of(st.integers(0, 5), st.just(inf))
    grids = st.lists(number, min_size=size * size, max_size=size * size)
    costs = [
        torch.tensor(data.draw(grids), dtype=torch.double).view(size, size) for _ in range(stages)
    ]
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=size * size, max_size=size * size))
    crossings = torch.tensor(crossing, dtype=torch.double).view(size, size)

    def of(bounds: list[int]) -> tuple[float, float]:
        spans = list(pairwise(bounds))
        costly = max(float(costs[s][a, b]) for s, (a, b) in enumerate(spans))
        return costly, sum(float(crossings[a, b]) for a, b in spans)

    best = min(map(of, _partitions(count, stages)))
    found = best_bounds(costs, crossings)
    assert (found is None) == (best[0] == inf)
    if found is not None:
        assert of(found) == best


def test_slack_takes_fewer_bytes_for_a_little_time() -> None:
    until = torch.tensor([0.0, 10.0, 11.0, 20.0])
    cost = until[None, :] - until[:, None]
    crossing = torch.zeros(4, 4)
    crossing[1], crossing[2] = 100.0, 1.0
    assert best_bounds([cost, cost], crossing) == [0, 1, 3]
    assert best_bounds([cost, cost], crossing, slack=0.1) == [0, 2, 3]


@given(count=st.integers(1, 40), stages=st.integers(1, 10))
def test_uniform_parts_differ_by_one_at_most(count: int, stages: int) -> None:
    if stages > count:
        with pytest.raises(PlanError, match="at least one item for each of"):
            bp.partition_uniform(count, stages)
        return
    found = bp.partition_uniform(count, stages)
    assert (len(found), sum(found)) == (stages, count)
    assert max(found) - min(found) <= 1


def test_of_equal_partitions_it_is_the_most_even_one() -> None:
    """Though the heaviest part would bear that another one is nearly empty."""
    assert bp.partition_balanced([9, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]


def test_uniform_takes_a_list_or_a_sequential() -> None:
    assert bp.partition_uniform(nn.Sequential(*map(nn.Identity, range(5))), 2) == [3, 2]
    assert bp.partition_uniform("abcd", 2) == [2, 2]


def test_weights_may_be_a_tensor() -> None:
    assert bp.partition_balanced(torch.tensor([1.0, 1.0, 2.0]), 2) == [2, 1]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bp.partition_balanced([], 1), "got 0 items"),
        (lambda: bp.partition_balanced([1, 2], 0), "a positive integer for stages, got 0"),
        (lambda: bp.partition_balanced([1, 2], True), "a positive integer for stages, got True"),
        (lambda: bp.partition_balanced([1, -2], 1), r"from 0 up for weights\[1\], got -2"),
        (lambda: bp.partition_balanced([1, float("nan")], 1), r"weights\[1\], got nan"),
        (lambda: bp.partition_balanced([1, "2"], 1), r"weights\[1\], got '2'"),
        (lambda: bp.partition_balanced("12", 1), "a list of numbers for weights, got '12'"),
        (lambda: bp.partition_balanced([1, 2], 2, speeds=[1]), "2 numbers for speeds, got 1"),
        (
            lambda: bp.partition_balanced([1, 2], 2, speeds=[1, 0]),
            r"a positive number for speeds\[1\], got 0",
        ),
        (lambda: bp.partition_balanced([1, 2], 2, limits=[1]), "2 numbers for limits, got 1"),
        (lambda: bp.partition_balanced([1, 2], 2, sizes=[1]), "2 numbers for sizes, got 1"),
        (
            lambda: bp.partition_balanced([1, 2], 2, first=-1),
            "a finite number from 0 up for first, got -1",
        ),
        (
            lambda: bp.partition_balanced([1, 2], 10**30),
            "an integer up to 1048576 for stages, got 1000",
        ),
        (
            lambda: bp.partition_balanced([1, 10**400], 1),
            r"a number from 1e-100 to 1e\+100 for weights\[1\]",
        ),
        (
            lambda: bp.partition_balanced([1, 2], 2, speeds=[1, 5e-324]),
            r"1e-100 to 1e\+100 for speeds",
        ),
        (lambda: bp.partition_balanced([1, 2], 2, limits=10**400), r"1e-100 to 1e\+100 for limits"),
        (
            lambda: bp.partition_uniform(2.5, 1),
            "an nn.Sequential or a number of items for items, got 2.5",
        ),
        (lambda: bp.partition_uniform(3, 4), "each of 4 parts, got 3 items"),
    ],
)
def test_wrong_arguments_are_refused(call: object, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        call()


def test_a_marked_sequential_has_the_parts_as_stages() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert bp.mark_sequential(net, [2, 1, 2]) is net
    plan = bp.record(net, torch.zeros(2, 4)).plan
    assert [a.stage for a in plan.assignments] == [0, 0, 1, 2, 2]


def test_a_sequential_keeps_the_names_of_its_children() -> None:
    net = nn.Sequential()
    for name in ("a", "b"):
        net.add_module(name, nn.Linear(4, 4))
    bp.mark_sequential(net, [1, 1])
    assert bp.record(net, torch.zeros(2, 4)).route == [0, 1]


def test_weights_whose_squares_no_float_holds() -> None:
    assert bp.partition_balanced([1e100, 1e100, 2e99, 1e-100], 2, speeds=[1e-100, 1e-100]) == [1, 3]
    assert sum(bp.partition_balanced([0, 0, 0, 0], 2)) == 4


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ([2, 2], r"sizes that add up to 3, the number of children, got \[2, 2\]"),
        ([3, 0], "a list of positive integers for sizes"),
        ([1.0, 2.0], "a list of positive integers for sizes"),
        (3, "a list of positive integers for sizes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: object, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        bp.mark_sequential(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), sizes)


def test_a_child_that_is_there_twice_begins_no_stage() -> None:
    relu = nn.ReLU()
    with pytest.raises(PlanError, match="'1', a module that the net has several times"):
        bp.mark_sequential(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu), [1, 3])


def test_what_is_no_sequential_is_for_balance() -> None:
    with pytest.raises(PlanError, match="expected an nn.Sequential for net, got Linear"):
        bp.mark_sequential(nn.Linear(4, 4), [1])
