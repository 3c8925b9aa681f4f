"""A batch into micro-batches.

``torch.chunk`` on everything would drop or misalign rows where sizes differ (torchgpipe zips its
chunk lists and loses some). Here one size is *the batch's*, and a tensor either has it or is no
part of the batch. What could be meant in two ways is refused: a list of samples looks like a list
of tensors that each have the batch's size.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._common.nested import leaves, map_tensors, tensors
from ..errors import MicrobatchError

BatchDim = int | Literal["list"] | None
BatchDims = int | Mapping[int | str, BatchDim] | None
LossReduction = str | Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


@dataclass(frozen=True)
class BatchPart:
    """What the first micro-batch is of its batch, for messages.

    Attributes:
        count: of micro-batches.
        size: its samples.
        batch: the batch's.
        dims: what was split on which dim, by position or name of the argument.
    """

    count: int
    size: int
    batch: int
    dims: Mapping[int | str, int | Literal["list"]]


@dataclass
class Microbatch:
    """One micro-batch's arguments, its target, and how many samples it has."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    share: BatchPart | None = None  # of the first one


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    chunks: int,
    dims: BatchDims = None,
    *,
    cut: bool = True,
) -> list[Microbatch]:
    """Split a batch into at most ``chunks`` micro-batches.

    Their sizes differ by one at the most; the larger ones come first.

    Args:
        args: positional arguments; nested values are fine.
        kwargs: keyword arguments.
        target: what the loss compares with; split like the inputs.
        chunks: how many micro-batches are wanted. A batch of fewer samples gives fewer.
        dims: ``None``: every tensor whose dim 0 has the batch's size (that of the first tensor)
            is split there. A number: the same on that dim. A mapping from an argument's position
            or name (and ``"target"``) to its dim, to ``"list"`` for a list or tuple that has one
            element a sample, or to ``None`` for "goes whole"; what it does not name is treated as
            by ``None``.
        cut: the pieces are leaves of their own; otherwise autograd sees the split.

    Raises:
        MicrobatchError: an empty batch, tensors that do not fit together, or a list that may hold
            samples and is not named in ``dims``.

    Example:
        >>> import torch
        >>> from blockpipe.testing import split
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
    for name, value in [*named, ("target", target)]:
        if not (isinstance(dims, Mapping) and name in dims):
            _check_for_samples(name, value, size, _dim_of(name, dims))
    _check_target(target, size, _dim_of("target", dims))
    count = min(chunks, size)
    bounds = [size // count + (i < size % count) for i in range(count)]
    split_on: dict[int | str, int | Literal["list"]] = {}

    def parts(name: int | str, value: Any) -> list[Any]:
        dim = _dim_of(name, dims)
        if dim is _WHOLE:
            return [value] * count
        if dim == "list":
            _check_list(name, value, size)
            ends = itertools.accumulate(bounds)
            own = map_tensors(_own_leaf, value) if cut else value
            split_on[name] = "list"
            return [own[end - n : end] for end, n in zip(ends, bounds, strict=True)]
        if isinstance(dims, int) or (isinstance(dims, Mapping) and name in dims):
            _check_named(name, value, dim, size)
        if isinstance(value, Tensor):  # the common case, and this is on every step's way
            is_split = value.dim() > dim and value.shape[dim] == size
            if is_split:
                split_on[name] = dim
            return _pieces(value, bounds, dim, cut) if is_split else [value] * count
        pieces: dict[int, Sequence[Tensor]] = {
            id(t): _pieces(t, bounds, dim, cut)
            for t in tensors(value)
            if t.dim() > dim and t.shape[dim] == size
        }
        if pieces:
            split_on[name] = dim

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
    microbatches = list(itertools.starmap(Microbatch, rows))
    split_on.pop("target", None)
    microbatches[0].share = BatchPart(count, bounds[0], size, split_on)
    return microbatches


def dims_of_call(
    dims: BatchDims, parameters: Mapping[str, inspect.Parameter], args: Sequence[Any], given: Any
) -> BatchDims:
    """``batch_dims`` for one call: an argument has its dim by position or by name, however it is
    passed, and a parameter that this call leaves out is no mistake.

    Args:
        dims: as the user gave it.
        parameters: of the model's forward, in order.
        args: positional arguments of the call.
        given: names of the keyword arguments.
    """
    if not isinstance(dims, Mapping):
        return dims
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in parameters.items() if p.kind in by_position]
    found: dict[int | str, BatchDim] = {}
    for name, dim in dims.items():
        position = names.index(name) if name in names else name
        passed_as = position if isinstance(position, int) and position < len(args) else name
        if isinstance(name, int) and len(args) <= name < len(names):
            passed_as = names[name]
        if passed_as in given or passed_as not in parameters:
            found[passed_as] = dim
    return found


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
    return [_own_leaf(piece, tensor.requires_grad) for piece in tensor.detach().split(bounds, dim)]


def _own_leaf(tensor: Tensor, requires_grad: bool | None = None) -> Tensor:
    needs = tensor.requires_grad if requires_grad is None else requires_grad
    leaf = tensor.detach()
    return leaf.requires_grad_() if needs and torch.is_grad_enabled() else leaf


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
        if dim == "list":
            _check_list(name, value)
            return len(value)
        if not (isinstance(dims, Mapping) and name in dims):
            _check_for_samples(name, value, None, dim)
        for tensor in tensors(value):
            if tensor.dim() > dim:
                return int(tensor.shape[dim])
            if tensor.dim() and dims is not None:
                _check_named(name, tensor, dim, 0)
    return None


def _check_list(name: int | str, value: Any, size: int | None = None) -> None:
    """A list of samples that was asked for is there, and has the batch's size."""
    if not isinstance(value, list | tuple):
        raise MicrobatchError(
            f"batch_dims splits argument {name!r} by elements, but {type(value).__name__} came; "
            "pass a list or tuple with one element a sample, or name a dim instead"
        )
    if size is not None and len(value) != size:
        raise MicrobatchError(
            f"batch_dims splits argument {name!r} by elements, but it has {len(value)} of them "
            f"where the batch has {size} samples; pass one element a sample"
        )


def _check_for_samples(name: int | str, value: Any, size: int | None, dim: Any) -> None:
    """Refuse a list of samples that nobody said is one: each of them would be split, or all go to
    every micro-batch. ``size`` is ``None`` where the batch's would be taken from this argument."""
    if isinstance(value, Tensor):
        return
    for found in _sequences(value):
        of_tensors = _alike(found)
        fit = all(t.dim() > dim and t.shape[dim] == size for t in tensors(found))
        if size is None:
            is_doubtful = of_tensors
        else:
            is_doubtful = len(found) == size and (_of_texts(found) or (of_tensors and not fit))
        if is_doubtful:
            where = f"argument {name!r}" if name != "target" else "the target"
            if found is not value:
                where += f" has a {type(found).__name__} inside that"
            raise MicrobatchError(
                f"{where} may be a list of {len(found)} samples, or hold tensors that have all "
                f"samples each; say which by batch_dims={{{name!r}: 'list'}} (one element a "
                f"sample), {{{name!r}: 0}} (each tensor is split on dim 0) or {{{name!r}: None}} "
                "(every micro-batch gets the whole)"
            )
    for leaf in leaves(value):
        shape = getattr(leaf, "shape", None)
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, Tensor)
        if size is not None and is_array and isinstance(shape, tuple) and shape[:1] == (size,):
            raise MicrobatchError(
                f"argument {name!r} has a {type(leaf).__name__} with the batch's {size} rows, but "
                "only tensors are split; pass torch.as_tensor(…) of it, or "
                f"batch_dims={{{name!r}: None}} to give every micro-batch the whole"
            )


def _sequences(value: Any) -> Iterator[list[Any] | tuple[Any, ...]]:
    """Lists and plain tuples in a nested value, from outside in; a named tuple is a record."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _sequences(item)
    elif type(value) in (list, tuple):
        yield value
        for item in value:
            yield from _sequences(item)


def _alike(sequence: Sequence[Any]) -> bool:
    """Whether these look like one sample each, not like the parts of one record."""
    if len(sequence) < 2 or len({type(item) for item in sequence}) > 1:
        return False
    if isinstance(sequence[0], Tensor):
        kinds = {(item.dtype, item.dim()) for item in sequence}
        return len(kinds) == 1 and sequence[0].dim() > 0
    return all(any(True for _ in tensors(item)) for item in sequence)


def _of_texts(sequence: Sequence[Any]) -> bool:
    return len(sequence) > 1 and all(isinstance(item, str | bytes) for item in sequence)


def _check_target(target: Any, size: int, dim: Any) -> None:
    if dim is _WHOLE or dim == "list":
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


@dataclass
class InputPlace:
    """Where one of the batch's tensors is in the micro-batches' arguments.

    Attributes:
        dim: on which it was split; ``None``: it went whole.
        leaves: by micro-batch, which leaf of the arguments it is, or has its piece.
    """

    dim: int | None
    leaves: dict[int, int]


def input_places(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    sizes: Sequence[int],
    dims: BatchDims,
) -> list[InputPlace]:
    """For each leaf of a batch's arguments and its target, in order: where it went.

    Args:
        args: as given to :func:`split`.
        kwargs: as given to :func:`split`.
        target: as given to :func:`split`.
        sizes: of the micro-batches that it made.
        dims: as given to :func:`split`.
    """
    size, count = sum(sizes), len(sizes)
    reached = [0] * count  # leaves of each micro-batch's arguments so far
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items(), ("target", target)]
    places = []
    for name, value in named:
        dim = _dim_of(name, dims)
        if dim == "list":
            owners = [m for m, n in enumerate(sizes) for _ in range(n)]
            parts = [([m], item) for m, item in zip(owners, value, strict=True)]
        else:
            parts = [(list(range(count)), value)]
        for members, part in parts:
            for leaf in leaves(part):
                is_split = (
                    isinstance(leaf, Tensor)
                    and len(members) > 1
                    and dim is not _WHOLE
                    and leaf.dim() > dim
                    and leaf.shape[dim] == size
                )
                places.append(
                    InputPlace(dim if is_split else None, {m: reached[m] for m in members})
                )
                for m in members:
                    reached[m] += 1
    return places
