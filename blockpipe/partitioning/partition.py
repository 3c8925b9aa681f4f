"""A row of weights into consecutive parts: for an ``nn.Sequential``, or any list of layers.

The heaviest part is as light as can be: found exactly, by a dynamic program over where a part ends.
The heuristic of torchgpipe's ``balance_by_time`` (block partitions, Bárány and Grinberg) only
promises that the heaviest part exceeds the lightest by no more than the largest weight.
"""

from collections.abc import Callable, Sequence, Sized
from itertools import accumulate, pairwise
from math import inf

from ..errors import PlanError

_MOST = 2**20  # of anything that is counted: lists of that many are made

# From a stage, and the first item and the one after the last of its part, to a number.
PartCost = Callable[[int, int, int], float]


def partition_uniform(items: int | Sized, stages: int) -> list[int]:
    """As many items in each part as in every other, or one more: the first parts have those.

    Args:
        items: a list, an ``nn.Sequential``, or how many there are.
        stages: how many parts.

    Returns:
        The number of items in each part, as torchgpipe's ``balance=`` takes them.

    Raises:
        PlanError: fewer items than parts, or no part.

    Source: ``partition_uniform`` of DeepSpeed and torchdistpackage.

    Example:
        >>> partition_uniform(10, 4)
        [3, 3, 2, 2]
    """
    count = items if isinstance(items, int) and not isinstance(items, bool) else _length(items)
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
    """The heaviest part is as light as can be; of such partitions, the most even one.

    Args:
        weights: of the items, from 0 on: times, numbers of parameters.
        stages: how many parts; each has an item at least.
        speeds: of the stages' devices: a part's weight is divided by it. ``None``: all alike.
        sizes: of the items, for ``limits``; ``None``: their weights.
        limits: the most that a part's sizes may add up to: one number, or one for each stage.
        first: weight that the first stage has besides.
        last: weight that the last stage has besides.

    Returns:
        The number of items in each part.

    Raises:
        PlanError: weights that are none, fewer items than parts, or limits that cannot be kept.

    Source: ``partition_balanced`` of DeepSpeed and torchdistpackage, ``balance_by_time`` of
    torchgpipe; these search, this one finds the best.

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
    until, size_until = [0.0, *accumulate(weights)], [0.0, *accumulate(size)]

    def cost(stage: int, begin: int, end: int) -> float:
        if size_until[end] - size_until[begin] > limit[stage] * (1 + 1e-12):
            return inf
        return (until[end] - until[begin] + extra[stage]) / speed[stage]

    ends = best_ends(count, stages, cost, max)
    if ends is None:
        raise PlanError(
            f"{count} items of sizes {_shown(size)} do not go into {stages} parts with limits "
            f"{_shown(limit)}; raise the limits, or take more parts"
        )
    bounds = [0, *ends]
    worst = max(cost(s, bounds[s], bounds[s + 1]) for s in range(stages)) * (1 + 1e-9)

    def unevenness(stage: int, begin: int, end: int) -> float:
        weight = cost(stage, begin, end)
        return (weight / (worst or 1.0)) ** 2 if weight <= worst else inf

    ends = best_ends(count, stages, unevenness, float.__add__)
    assert ends is not None  # the first one keeps to it
    bounds = [0, *ends]
    return [b - a for a, b in pairwise(bounds)]


def best_ends(
    count: int, stages: int, cost: PartCost, combine: Callable[[float, float], float]
) -> list[int] | None:
    """Where each part ends so that what the parts cost together is the least.

    Args:
        count: of items.
        stages: of parts.
        cost: of a part; infinite: it may not be.
        combine: ``max``, or a sum.

    Returns:
        For each part the item after its last one; ``None``: every partition costs infinitely much.
    """
    best = [0.0] + [inf] * count
    came_from: list[list[int]] = []
    for stage in range(stages):
        now, source = [inf] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - stages + stage + 2):
            for begin in range(stage, end):
                if best[begin] < inf:
                    total = combine(best[begin], cost(stage, begin, end))
                    if total < now[end]:
                        now[end], source[end] = total, begin
        best = now
        came_from.append(source)
    if best[count] == inf:
        return None
    ends = [count]
    for source in reversed(came_from[1:]):
        ends.append(source[ends[-1]])
    return ends[::-1]


def checked_numbers(
    name: str, values: object, count: int | None = None, *, positive: bool = True
) -> list[float]:
    """Numbers as they were given, or a :class:`PlanError` that says which is wrong.

    Args:
        name: of the argument.
        values: a sequence of numbers.
        count: how many there are to be; ``None``: any number of them.
        positive: whether 0 is wrong.
    """
    tolist = getattr(values, "tolist", None)  # a tensor's, an array's
    values = tolist() if callable(tolist) else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PlanError(f"{name} is a list of numbers, but {values!r} came")
    if count is not None and len(values) != count:
        raise PlanError(f"{name} has one number for each of {count}, but {len(values)} came")
    for index, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (value > 0 if positive else 0 <= value < inf):
            least = "above 0" if positive else "from 0 on"
            raise PlanError(f"{name} are numbers {least}, but entry {index} is {value!r}")
        if value not in (0, inf) and not 1e-100 <= value <= 1e100:
            raise PlanError(f"{name} are numbers from 1e-100 to 1e100, but entry {index} is not")
    return list(map(float, values))


def checked_number(name: str, value: object) -> float:
    """A number from 0 on, or a :class:`PlanError`."""
    return checked_numbers(name, [value], 1, positive=False)[0]


def check_count(name: str, value: object) -> int:
    """A whole number from 1 on, or a :class:`PlanError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name} is a whole number from 1 on, but {value!r} came")
    if value > _MOST:
        raise PlanError(f"{name} is {_MOST} at most, but more came")
    return value


def _check_stages(count: int, stages: int) -> None:
    check_count("stages", stages)
    if count < stages:
        raise PlanError(
            f"each of {stages} parts has an item at least, but there are {count}; take {count} "
            "parts at most, or finer items"
        )


def _length(items: object) -> int:
    if isinstance(items, Sized):
        return len(items)
    raise PlanError(f"items is a list, an nn.Sequential or a number, but {items!r} came")


def _shown(numbers: Sequence[float]) -> str:
    more = ", …" if len(numbers) > 8 else ""
    return f"[{', '.join(f'{n:g}' for n in numbers[:8])}{more}]"
