"""A batch into micro-batches, and their results into one.

``torch.chunk`` on everything would drop or misalign rows where sizes differ (torchgpipe zips its
chunk lists and loses some). Here one size is *the batch's*, and a tensor either has it or is no
part of the batch.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import MicrobatchError
from .transfer import carry, is_asynchronous
from .tree import leaves, map_leaves, map_tensors, tensors

BatchDims = int | Mapping[int | str, int | None] | None
LossReduction = str | Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


@dataclass
class Microbatch:
    """One micro-batch's arguments, its target, and how many samples it has."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    chunks: int,
    dims: BatchDims = None,
    *,
    cut: bool = True,
) -> list[Microbatch]:
    """At most ``chunks`` micro-batches, their sizes at most one apart, the larger ones first.

    Args:
        args: positional arguments; nested values are fine.
        kwargs: keyword arguments.
        target: what the loss compares with; split like the inputs.
        chunks: how many micro-batches are wanted. A batch of fewer samples gives fewer.
        dims: ``None``: every tensor whose dim 0 has the batch's size (that of the first tensor)
            is split there. A number: the same on that dim. A mapping from an argument's position
            or name (and ``"target"``) to its dim, or to ``None`` for "goes whole"; what it does
            not name is treated as by ``None``.
        cut: the pieces are leaves of their own; otherwise autograd sees the split.

    Raises:
        MicrobatchError: an empty batch, or tensors that do not fit together.

    Example:
        >>> [m.size for m in split((torch.zeros(5, 2),), {}, None, 3)]
        [2, 2, 1]
    """
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if isinstance(dims, Mapping):
        known = {name for name, _ in named} | {"target", "output"}
        unknown = [name for name in dims if name not in known]
        if unknown:
            raise MicrobatchError(
                f"batch_dims names {unknown}, but the arguments are {[n for n, _ in named]}; use "
                "positions and names of this call's arguments, 'target' and 'output'"
            )
    size = _batch_size(named, dims)
    if size is None:
        return [Microbatch(args, kwargs, target, 1)]
    if size == 0:
        raise MicrobatchError("a batch has at least one sample, but the first tensor has 0 rows")
    _check_target(target, size, _dim_of("target", dims))
    count = min(chunks, size)
    bounds = [size // count + (i < size % count) for i in range(count)]

    def parts(name: int | str, value: Any) -> list[Any]:
        dim = _dim_of(name, dims)
        if dim is _WHOLE:
            return [value] * count
        if isinstance(dims, int) or (isinstance(dims, Mapping) and name in dims):
            _check_named(name, value, dim, size)
        if isinstance(value, Tensor):  # the common case, and this is on every step's way
            is_split = value.dim() > dim and value.shape[dim] == size
            return _pieces(value, bounds, dim, cut) if is_split else [value] * count
        pieces: dict[int, Sequence[Tensor]] = {
            id(t): _pieces(t, bounds, dim, cut)
            for t in tensors(value)
            if t.dim() > dim and t.shape[dim] == size
        }

        def part(i: int) -> Any:
            return map_tensors(lambda t: pieces[id(t)][i] if id(t) in pieces else t, value)

        return [part(i) for i in range(count)]

    if count == 1:
        for position, value in named:
            parts(position, value)  # for its checks
        return [Microbatch(args, kwargs, target, size)]
    positional = [parts(i, value) for i, value in enumerate(args)]
    by_name = [parts(name, value) for name, value in kwargs.items()]
    every_args = zip(*positional, strict=True) if args else [()] * count
    every_kwargs = (
        [dict(zip(kwargs, row, strict=True)) for row in zip(*by_name, strict=True)]
        if kwargs
        else [kwargs] * count
    )
    rows = zip(every_args, every_kwargs, parts("target", target), bounds, strict=True)
    return list(itertools.starmap(Microbatch, rows))


def _check_named(name: int | str, value: Any, dim: int, size: int) -> None:
    """A dim that was asked for is there, and has the batch's size."""
    for tensor in tensors(value):
        if tensor.dim() and (tensor.dim() <= dim or tensor.shape[dim] != size):
            raise MicrobatchError(
                f"batch_dims splits argument {name!r} on dim {dim}, where the batch has {size} "
                f"samples, but a tensor of shape {tuple(tensor.shape)} came; name the dim that "
                f"has them, or batch_dims={{{name!r}: None}} to give every micro-batch the whole"
            )


def _pieces(tensor: Tensor, bounds: list[int], dim: int, cut: bool) -> list[Tensor]:
    # Each on its own for autograd: it forbids writing to the views that one `split` returns, and
    # a write to one view would be in the graph of the next.
    if not cut:
        starts = [0, *itertools.accumulate(bounds)]
        return [tensor.narrow(dim, at, n) for at, n in zip(starts, bounds, strict=False)]
    pieces = [piece.detach() for piece in tensor.detach().split(bounds, dim)]
    if tensor.requires_grad and torch.is_grad_enabled():
        pieces = [piece.requires_grad_() for piece in pieces]
    return pieces


_WHOLE: Any = object()


def _dim_of(name: int | str, dims: BatchDims) -> Any:
    if dims is None:
        return 0
    if isinstance(dims, int):
        return dims
    dim = dims.get(name, 0)
    return _WHOLE if dim is None else dim


def _batch_size(named: list[tuple[Any, Any]], dims: BatchDims) -> int | None:
    for name, value in named:
        dim = _dim_of(name, dims)
        if dim is _WHOLE:
            continue
        for tensor in tensors(value):
            if tensor.dim() > dim:
                return int(tensor.shape[dim])
            if tensor.dim() and dims is not None:
                _check_named(name, tensor, dim, 0)
    return None


def _check_target(target: Any, size: int, dim: Any) -> None:
    if dim is _WHOLE:
        return
    for tensor in tensors(target):
        if tensor.dim() > dim and tensor.shape[dim] != size:
            raise MicrobatchError(
                f"a target splits like the inputs, whose batch has {size} samples, but a target "
                f"of shape {tuple(tensor.shape)} has {tensor.shape[dim]} on dim {dim}; pass a "
                "target for each sample, or batch_dims={'target': None} to give every micro-batch "
                "the whole of it"
            )


def weights_of(microbatches: Sequence[Microbatch], reduction: LossReduction) -> list[float]:
    """What each micro-batch's loss counts in the batch's.

    Args:
        microbatches: as split.
        reduction: ``"mean"``: its share of the samples; ``"sum"``: 1; a callable ``(args, kwargs,
            target) -> number``: its share of those numbers (tokens that count, say).

    Raises:
        MicrobatchError: the numbers of the callable are negative, or all zero.
    """
    if reduction == "sum":
        return [1.0] * len(microbatches)
    if callable(reduction):
        given = [reduction(m.args, m.kwargs, m.target) for m in microbatches]
        try:
            counts = [float(number) for number in given]
        except (TypeError, ValueError):
            counts = [-1.0]
        if not all(math.isfinite(n) and n >= 0 for n in counts) or sum(counts) <= 0:
            raise MicrobatchError(
                f"loss_reduction gives finite weights from 0 on, not all 0, but {given} came; "
                "count what the loss averages over"
            )
    else:
        counts = [float(m.size) for m in microbatches]
    total = sum(counts)
    return [count / total for count in counts]


def join(
    results: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    device: torch.device | None,
    dim: int = 0,
    on_host: Sequence[bool] = (),
) -> tuple[Any, list["Joint"]]:
    """One result out of the micro-batches', on a device.

    A tensor with a micro-batch's size on ``dim`` is concatenated; a 0-d floating-point tensor is
    summed by weight; one that is the same tensor for all (a weight) is kept, and so are a mask or
    positions, and what is no tensor, if all agree; anything else becomes a list, one entry a
    micro-batch. What is marked as ``on_host``, leaf by leaf, is left where it is.

    Returns:
        The result, and for each of its leaves how it was joined.

    Raises:
        MicrobatchError: the results have different structures.

    Example:
        >>> join([torch.zeros(2, 3), torch.zeros(1, 3)], [2, 1], [2 / 3, 1 / 3], None)[0].shape
        torch.Size([3, 3])
    """
    columns = [list(leaves(result)) for result in results]
    if len({len(column) for column in columns}) > 1:
        raise MicrobatchError(
            f"micro-batches give results of one structure, but they have "
            f"{[len(c) for c in columns]} members; return the same members each time"
        )
    joints = [
        Joint.of([column[i] for column in columns], sizes, weights, dim)
        for i in range(len(columns[0]))
    ]
    devices = [None if stays else device for stays in on_host or [False] * len(joints)]
    values = iter([joint.value(to) for joint, to in zip(joints, devices, strict=True)])
    return map_leaves(lambda _: next(values), results[0]), joints


def has_batch(shape: Sequence[int], size: int, dim: int) -> bool:
    """Whether a result of a micro-batch has an entry for each of its samples."""
    return len(shape) > dim and shape[dim] == size


def is_weighed(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a result without them is summed by weight."""
    return len(shape) == 0 and (dtype.is_floating_point or dtype.is_complex)


@dataclass
class Joint:
    """How one leaf of the micro-batches' results becomes one: values forward, gradients back."""

    how: Literal["cat", "sum", "same", "list"]
    parts: list[Any]
    sizes: Sequence[int]
    weights: Sequence[float]
    dim: int

    @classmethod
    def of(
        cls, parts: list[Any], sizes: Sequence[int], weights: Sequence[float], dim: int
    ) -> "Joint":
        """Choose how."""
        first = parts[0]
        how: Literal["cat", "sum", "same", "list"]
        if not all(isinstance(part, Tensor) for part in parts):
            how = "same" if all(_equal(part, first) for part in parts[1:]) else "list"
        elif all(has_batch(p.shape, n, dim) for p, n in zip(parts, sizes, strict=True)):
            how = "cat"
        elif is_weighed(first.shape, first.dtype):
            how = "sum"
        elif first.is_floating_point() or first.is_complex() or first.dim() == 0:
            # Not by their values, which may be alike in one step and differ in the next: then only
            # one of them had its gradient.
            how = "same" if all(_is_same_memory(p, first) for p in parts[1:]) else "list"
        else:  # a mask, or positions
            how = "same" if all(_same(p, first) for p in parts[1:]) else "list"
        return cls(how, parts, sizes, weights, dim)

    def value(self, device: torch.device | None) -> Any:
        """The joined leaf."""
        parts = self.parts
        if device is not None:
            parts = [p.to(device) if isinstance(p, Tensor) else p for p in parts]
        if self.how == "list":
            return list(parts)
        if len(parts) == 1 or self.how == "same":
            return parts[0]
        if self.how == "cat":
            return torch.cat(parts, self.dim)
        # What has no weight counts for nothing, also where it is no number.
        counted = [(p, w) for p, w in zip(parts, self.weights, strict=True) if w]
        parts, weights = [p for p, _ in counted], [w for _, w in counted]
        if is_asynchronous(parts[0].device):  # in few launches, and so in any order
            factors = torch.tensor(weights, dtype=parts[0].dtype)
            return torch.tensordot(carry(factors, parts[0].device), torch.stack(parts), 1)
        weighted = torch._foreach_mul(parts, weights)  # each by its own, in one call
        return sum(weighted[1:], weighted[0])

    def gradients(self, gradient: Tensor) -> list[Tensor | None]:
        """What each micro-batch's part gets of the joined leaf's gradient."""
        if len(self.parts) == 1:
            return [gradient]
        if self.how == "cat":
            return list(gradient.split(list(self.sizes), self.dim))
        if self.how == "sum":
            return [gradient * weight if weight else None for weight in self.weights]
        return [gradient, *[None] * (len(self.parts) - 1)]


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b.to(a.device))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are one tensor, a weight of the model's or an argument that goes whole."""
    if a is b:
        return True
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (a.data_ptr(), a.device, a.dtype, a.shape, a.stride()) == (
        *(b.data_ptr(), b.device, b.dtype, b.shape, b.stride()),
    ) and a.numel() > 0


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False
