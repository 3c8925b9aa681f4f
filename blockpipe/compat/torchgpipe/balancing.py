"""``torchgpipe_balancing`` of torchgpipe's first releases: other orders of arguments."""

from typing import Any

from torch import Tensor, nn

from ..._common.callsite import remembers_caller
from . import balance

__all__ = ["balance_by_size", "balance_by_time"]


@remembers_caller
def balance_by_time(
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    *,
    partitions: int = 1,
    **options: Any,
) -> list[int]:
    """Balance by time, as :func:`blockpipe.compat.torchgpipe.balance.balance_by_time` does.

    Args:
        module: the module to balance.
        sample: a micro-batch.
        partitions: the number of partitions.
        **options: that function's other options.

    Returns:
        The number of layers in each partition.

    Source: ``torchgpipe_balancing.balance_by_time``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.balancing import balance_by_time
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> sum(balance_by_time(net, torch.rand(8, 64), partitions=2))
        4
    """
    return balance.balance_by_time(partitions, module, sample, **options)


@remembers_caller
def balance_by_size(
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    *,
    partitions: int = 1,
    **options: Any,
) -> list[int]:
    """Balance by memory, as :func:`blockpipe.compat.torchgpipe.balance.balance_by_size` does.

    Args:
        module: the module to balance.
        sample: a batch.
        partitions: the number of partitions.
        **options: that function's other options.

    Returns:
        The number of layers in each partition.

    Source: ``torchgpipe_balancing.balance_by_size``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.balancing import balance_by_size
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> balance_by_size(net, torch.rand(8, 64), partitions=2)
        [2, 2]
    """
    return balance.balance_by_size(partitions, module, sample, **options)
