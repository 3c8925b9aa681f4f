"""Select the micro-batches' results that a call returns, and combine them."""

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._common.nested import leaves, map_leaves, map_tensors

Part = tuple[int, Any]
"""A copy's number, and the model's result there for one micro-batch."""


class OutputMode(enum.Enum):
    """The results that a call returns; each has the rows of one micro-batch."""

    Final = "the last of each copy"
    EveryN = "every n-th of each copy"
    All = "all, in the order of the batch"
    Sum = "the sum over those of each copy"
    Default = "Final in training, All in inference"


def chosen(parts: Sequence[Part], mode: OutputMode, period: int) -> list[Any]:
    """Select the results that a mode returns.

    Args:
        parts: the results of all micro-batches, in the order of the batch.
        mode: any mode except ``Default``.
        period: n, for ``EveryN``.

    Example:
        >>> chosen([(0, "a"), (0, "b"), (1, "c"), (1, "d")], OutputMode.Final, 1)
        ['b', 'd']
    """
    if mode is OutputMode.All:
        return [result for _, result in parts]
    if mode is OutputMode.EveryN:
        seen = Counter[int]()
        kept = []
        for copy, result in parts:
            seen[copy] += 1
            if seen[copy] % period == 0:
                kept.append(result)
        return kept
    of_copy: dict[int, list[Any]] = {}
    for copy, result in parts:
        of_copy.setdefault(copy, []).append(result)
    if mode is OutputMode.Final:
        return [results[-1] for results in of_copy.values()]
    return [_combined(results, sum) for results in of_copy.values()]


def together(results: Sequence[Any]) -> Any:
    """Concatenate results on the host: rows on dim 0, and numbers as a row of numbers.

    Example:
        >>> together([torch.tensor(1.0), torch.tensor(2.0)])
        tensor([1., 2.])
    """
    return map_tensors(lambda tensor: tensor.detach().cpu(), _combined(results, _rows))


def _rows(tensors: list[Tensor]) -> Tensor:
    if len({tensor.device for tensor in tensors}) > 1:  # of copies on devices of their own
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)


def _combined(results: Sequence[Any], how: Any) -> Any:
    """Combine results leaf by leaf; a leaf that is not a tensor is taken from the last result."""
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Tensor):
        return how([*results])
    columns = zip(*(leaves(result) for result in results), strict=True)
    values = iter(
        [how(list(column)) if isinstance(column[0], Tensor) else column[-1] for column in columns]
    )
    return map_leaves(lambda _: next(values), results[-1])
