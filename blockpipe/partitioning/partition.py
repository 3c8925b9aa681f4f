"""A row of weights in consecutive parts: for an ``nn.Sequential``, or any list of layers.

The heaviest part is as light as possible, found exactly by a dynamic program over where a part
ends. The heuristic of torchgpipe's ``balance_by_time`` (block partitions, Bárány and Grinberg) only
promises that the heaviest part exceeds the lightest by no more than the largest weight.
"""

from collections.abc import Sequence, Sized
from itertools import accumulate, pairwise
from math import inf

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.checks import expected, is_integer
from ..errors import PlanError
from .checked_numbers import check_count, checked_number, checked_numbers
from .optimum import most_even_bounds


def partition_uniform(items: int | Sized, stages: int) -> list[int]:
    """Split items into parts of equal size; the first parts have one more where it does not divide.

    Args:
        items: a list, an ``nn.Sequential``, or the number of items.
        stages: the number of parts.

    Returns:
        The number of items in each part, as torchgpipe's ``balance=`` takes them.

    Raises:
        PlanError: there are fewer items than parts, or no part.

    Source: ``partition_uniform`` of DeepSpeed and torchdistpackage.

    Example:
        >>> partition_uniform(10, 4)
        [3, 3, 2, 2]
    """
    count = items if is_integer(items) else _length(items)
    _check_stages(count, stages)
    least, more = divmod(count, stages)
    return [least + (stage < more) for stage in range(stages)]


def partition_balanced(
    weights: Sequence[float],
    stages: int,
    *,
    speeds: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    limits: Sequence[float] | float | None = None,
    first: float = 0.0,
    last: float = 0.0,
) -> list[int]:
    """Split weights so that the heaviest part is as light as possible; of such, the most evenly.

    Args:
        weights: a number from 0 up for each item, such as its time or its number of parameters.
        stages: the number of parts; each has at least one item.
        speeds: the speeds of the stages' devices, by which the parts' weights are divided. ``None``
            takes all to be equal.
        sizes: a number for each item that counts for ``limits``; ``None`` takes the weights.
        limits: the most that a part's sizes may add up to: one number, or one for each stage.
        first: a weight that is added to the first stage's.
        last: a weight that is added to the last stage's.

    Returns:
        The number of items in each part.

    Raises:
        PlanError: a weight is not a number, there are fewer items than parts, or no partition keeps
            to the limits.

    Source: ``partition_balanced`` of DeepSpeed and torchdistpackage, ``balance_by_time`` of
    torchgpipe. Those search; this one finds the optimum.

    Example:
        >>> partition_balanced([1, 1, 1, 6, 1, 1], 3)
        [3, 1, 2]
    """
    weights = checked_numbers("weights", weights, positive=False)
    count = len(weights)
    _check_stages(count, stages)
    speed = checked_numbers("speeds", speeds or [1.0] * stages, stages)
    size = checked_numbers("sizes", weights if sizes is None else sizes, count, positive=False)
    given = [inf] * stages if limits is None else limits
    given = [given] * stages if isinstance(given, int | float) else given
    limit = checked_numbers("limits", given, stages)
    extra = [0.0] * stages
    extra[0] += checked_number("first", first)
    extra[-1] += checked_number("last", last)
    weight_of, size_of = _sums_of_parts(weights), _sums_of_parts(size)

    def costs(stage: int) -> Tensor:
        cost = (weight_of + extra[stage]) / speed[stage]
        return torch.where(size_of <= limit[stage] * (1 + 1e-12), cost, inf)

    bounds = most_even_bounds(costs, stages)
    if bounds is None:
        raise PlanError(
            f"no partition of {count} items of sizes {_shown(size)} into {stages} parts keeps to "
            f"the limits {_shown(limit)} ({users_line()}); raise the limits, or take more parts"
        )
    return [end - begin for begin, end in pairwise(bounds)]


def _sums_of_parts(numbers: Sequence[float]) -> Tensor:
    """Return a matrix of the sums from each item (row) to the one before another (column)."""
    # The device is named: models are built under `torch.device("meta")`, their partition too.
    until = torch.tensor([0.0, *accumulate(numbers)], dtype=torch.double, device="cpu")
    return until[None, :] - until[:, None]


def _check_stages(count: int, stages: int) -> None:
    check_count("stages", stages)
    if count < stages:
        raise PlanError(
            f"expected at least one item for each of {stages} parts, got {count} items "
            f"({users_line()}); take at most {count} parts, or finer items"
        )


def _length(items: object) -> int:
    if isinstance(items, Sized):
        return len(items)
    raise PlanError(expected("a list, an nn.Sequential or a number of items", items, for_="items"))


def _shown(numbers: Sequence[float]) -> str:
    more = ", …" if len(numbers) > 8 else ""
    return f"[{', '.join(f'{n:g}' for n in numbers[:8])}{more}]"
