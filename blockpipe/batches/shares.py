"""What of a batch is split, for pipelines that each get a share of it and split that further.

To look at the share alone is not enough: a table, which goes whole to every micro-batch, may happen
to have as many rows as a share has samples.
"""

from typing import Any

from torch import Tensor

from .._common.nested import tensors
from .batch_dims import (
    ArgumentDims,
    BatchDim,
    BatchDims,
    CallDims,
    Name,
    PartlyWhole,
    Role,
    has_batch,
)


def dims_of_shares(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, size: int, dims: BatchDims
) -> CallDims:
    """Return the ``batch_dims`` by which each share of a batch is split as the batch was. Outputs
    are left as each micro-batch's: they are joined once, by the sizes of all micro-batches.

    Args:
        args: the batch's positional arguments.
        kwargs: its keyword arguments.
        target: its target.
        size: its number of samples.
        dims: its ``batch_dims``, by the positions and names of this call.
    """
    by = ArgumentDims(dims, kwargs)
    found = CallDims({} if isinstance(dims, int) else dims or {})
    found[Role.OUTPUT] = None
    named: list[tuple[Name, Any]] = [*enumerate(args), *kwargs.items(), (Role.TARGET, target)]
    for name, value in named:
        if not by.names(name):
            found[name] = _dim_in_shares(value, size, by.of(name))
    return found


def _dim_in_shares(value: Any, size: int, dim: int) -> BatchDim:
    if isinstance(value, Tensor):
        return dim if has_batch(value.shape, size, dim) else None
    whole = (n for n, t in enumerate(tensors(value)) if not has_batch(t.shape, size, dim))
    return PartlyWhole(dim, frozenset(whole))
