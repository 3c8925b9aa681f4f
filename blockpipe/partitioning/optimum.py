"""The dynamic program that finds where the parts of a row end, for :func:`balance` and for lists.

Bounds are indices of the row: part ``s`` has the items ``bounds[s]`` to ``bounds[s + 1] - 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# From a part's number to a matrix of what it costs from where (row) to where (column).
PartCosts = Callable[[int], Tensor]


def best_bounds(
    costs: Sequence[Tensor], crossing: Tensor, *, slack: float = 0.0
) -> list[int] | None:
    """Find the cuts whose costliest stage costs the least; of these, those with the least crossing.

    Args:
        costs: for each stage, a matrix of its cost from each begin (row) to each end (column); an
            infinite cost rules the stage out.
        crossing: a matrix of the same shape. Its sum over the stages decides between cuts that
            cost the same.
        slack: the share by which a stage may cost more for less crossing.

    Returns:
        ``stages + 1`` ascending indices, from the first to the last; ``None`` if every choice of
        cuts is ruled out.

    Example:
        >>> import torch
        >>> until = torch.tensor([0.0, 1.0, 2.0, 5.0])  # weights 1, 1, 3
        >>> cost = until[None, :] - until[:, None]
        >>> best_bounds([cost, cost], torch.zeros(4, 4))
        [0, 2, 3]
    """
    return _two_step_optimum(costs.__getitem__, len(costs), lambda cost, most: crossing, slack)


def most_even_bounds(costs: PartCosts, parts: int) -> list[int] | None:
    """Find the bounds whose costliest part costs the least; of these, the most even ones.

    Args:
        costs: makes the matrix of each part, as :func:`best_bounds` takes them. It is called anew
            for each use: all matrices at once would need the memory of as many as there are parts.
        parts: the number of parts.

    Returns:
        As :func:`best_bounds`.
    """
    # Squares of shares of the highest cost: squares of the costs themselves may overflow.
    return _two_step_optimum(costs, parts, lambda cost, most: (cost / (most or 1.0)) ** 2, 0.0)


def _two_step_optimum(
    costs: PartCosts, parts: int, preference: Callable[[Tensor, float], Tensor], slack: float
) -> list[int] | None:
    """Run two dynamic programs: the first for the costliest part, the second for the preference.

    One program with pairs of numbers would not be exact: the second best choice for some of the
    parts may be the best one for all.

    Args:
        costs: makes the matrix of each part.
        parts: the number of parts.
        preference: from a part's costs and the highest cost that is allowed to a matrix whose sum
            is minimized in the second program.
        slack: the share by which a part may cost more than the first program's optimum.
    """

    def possible(part: int) -> Tensor:
        cost = costs(part)
        return torch.where(torch.ones_like(cost, dtype=torch.bool).triu(1), cost, torch.inf)

    bounds = _least(possible, parts, torch.maximum, -torch.inf)
    if bounds is None:
        return None
    worst = max(float(costs(part)[span]) for part, span in enumerate(pairwise(bounds)))
    most = worst + abs(worst) * (slack + 1e-9)  # prefix sums are rounded

    def allowed(part: int) -> Tensor:
        cost = possible(part)
        return torch.where((cost < torch.inf) & (cost <= most), preference(cost, most), torch.inf)

    return _least(allowed, parts, torch.add, 0.0)


def _least(
    costs: PartCosts, parts: int, combine: Callable[[Tensor, Tensor], Tensor], begin: float
) -> list[int] | None:
    """Find the bounds for which the combined cost of all parts is the least.

    Args:
        costs: makes the matrix of each part.
        parts: the number of parts.
        combine: the maximum, or the sum.
        begin: the neutral element of ``combine``.
    """
    best = torch.empty(0)
    sources = []
    for part in range(parts):
        cost = costs(part)
        if part == 0:
            best = torch.full_like(cost[0], torch.inf)
            best[0] = begin
        best, source = combine(best[:, None].expand_as(cost), cost).min(0)
        sources.append(source)
    if best[-1] == torch.inf:
        return None
    bounds = [len(best) - 1]
    for source in reversed(sources):
        bounds.append(int(source[bounds[-1]]))
    return bounds[::-1]
