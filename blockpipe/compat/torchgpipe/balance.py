"""A balance found by profiling, in torchgpipe's words.

:func:`blockpipe.balance` finds it: it measures all layers in one run, and takes the best balance by
a dynamic program, which torchgpipe's heuristic often misses.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import remembers_caller
from ..._common.checks import expected
from ..._common.nested import map_tensors
from ...devices.devices import default_devices
from ...errors import UsageError
from ...partitioning.balance import balance

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str

_WITHOUT_OPTIMIZER = 2.0  # copies of a parameter that every step has: its value and its gradient


@remembers_caller
def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balance a sequential module by the time of its layers' forwards and backwards.

    Args:
        partitions: the number of partitions.
        module: the module; it is profiled in training mode, and left as it was.
        sample: a micro-batch, with the batch on dim 0.
        timeout: accepted without effect, because the medians of five runs count.
        device: the device to profile on; ``None`` takes the first accelerator, or the CPU.

    Returns:
        The number of layers in each partition.

    Raises:
        PlanError: there are fewer layers than partitions.
        UsageError: ``module`` is not an ``nn.Sequential``.

    Source: ``torchgpipe.balance.balance_by_time``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.balance import balance_by_time
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        >>> sum(balance_by_time(2, net, torch.rand(8, 64), device="cpu"))
        6
    """
    del timeout
    return _balanced(partitions, module, sample, device, by="time")


@remembers_caller
def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Tensor, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balance a sequential module by the memory that its layers need in a step.

    Args:
        partitions: the number of partitions.
        module: the module; it is left as it was.
        input: a whole batch, with the batch on dim 0.
        chunks: the number of micro-batches that the batch will be split into.
        param_scale: the copies of each parameter in training: its value, its gradient, and the
            optimizer's state (2 for SGD, 3 with momentum, 4 for Adam). Less than 2 counts as 2.
        device: the device that it will run on; ``None`` takes the first accelerator, or the CPU.
            Nothing is allocated there.

    Returns:
        The number of layers in each partition.

    Raises:
        PlanError: there are fewer layers than partitions.
        UsageError: ``module`` is not an ``nn.Sequential``.

    Source: ``torchgpipe.balance.balance_by_size``, which needs CUDA.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.balance import balance_by_size
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(n, n + 1) for n in range(1, 7)))
        >>> balance_by_size(2, net, torch.rand(7, 1), param_scale=100, device="cpu")
        [4, 2]
    """
    sample = map_tensors(lambda tensor: tensor[: -(-len(tensor) // chunks)], input)
    return _balanced(
        *(partitions, module, sample, device),
        by="memory",
        chunks=chunks,
        optimizer=max(param_scale - _WITHOUT_OPTIMIZER, 0.0),
        schedule="gpipe",  # pipe(x) holds all micro-batches until the loss is known
    )


def _balanced(
    partitions: int, module: nn.Sequential, sample: Any, device: Device | None, **how: Any
) -> list[int]:
    if not isinstance(module, nn.Sequential):
        fix = "cut any other model with blockpipe.balance(model, args, stages)"
        raise UsageError(expected("an nn.Sequential", module, for_="module", fix=fix))
    where = device if device is not None else next(iter(default_devices() or ()), "cpu")
    with _in_training(module):
        plan = balance(
            *(module, (sample,), partitions), devices=[where] * partitions, at="*", slack=0, **how
        )
    stages = Counter(call.stage for call in plan.assignments if "." not in call.path)
    return [stages[stage] for stage in range(partitions)]


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Put each module into training mode, and back into its own afterwards."""
    modes = {inner: inner.training for inner in module.modules()}
    module.train()
    try:
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode
