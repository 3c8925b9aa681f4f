"""A batch, split into micro-batches.

``torch.chunk`` on everything would drop or misalign rows where sizes differ (torchgpipe zips its
chunk lists and loses some). Here one size is *the batch's*, and a tensor either has it or is not
part of the batch. An ambiguous argument is refused: a list of samples looks like a list of tensors
that each have the batch's size.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.nested import map_tensors, tensors
from ..errors import MicrobatchError
from .batch_dims import WHOLE, ArgumentDims, BatchDims, Name, PartlyWhole, Role, has_batch, has_dim
from .shared_memory import unified
from .unsplittable import check_for_samples, check_kind

LossReduction = str | Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


@dataclass(frozen=True)
class BatchPart:
    """The first micro-batch's part of its batch, for messages.

    Attributes:
        count: the number of micro-batches.
        size: the micro-batch's number of samples.
        batch: the batch's number of samples.
        dims: the dim of each argument that was split, by its position or name.
    """

    count: int
    size: int
    batch: int
    dims: Mapping[int | str, int | Literal["list"]]


@dataclass
class Microbatch:
    """One micro-batch's arguments, its target, and its number of samples.

    Attributes:
        args: its positional arguments.
        kwargs: its keyword arguments.
        target: its part of the target.
        size: the number of its samples.
        share: a description of its part of the batch, for errors; only the first one has it.

    Example:
        >>> import torch
        >>> from blockpipe.testing import split
        >>> [microbatch.size for microbatch in split((torch.zeros(7, 4),), {}, None, 3)]
        [3, 2, 2]
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    share: BatchPart | None = None


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

    Their sizes differ by at most one, and the larger ones come first.

    Args:
        args: the positional arguments, nested or not.
        kwargs: the keyword arguments.
        target: the target of the loss, split like the inputs.
        chunks: the number of micro-batches. A batch of fewer samples gives fewer.
        dims: ``None``: every tensor whose dim 0 has the batch's size (that of the first tensor)
            is split there. A number: the same on that dim. A mapping from an argument's position
            or name (and ``"target"``) to its dim, to ``"list"`` for a list or tuple that has one
            element a sample, or to ``None`` if every micro-batch gets it whole; arguments that it
            does not name are treated as by ``None``.
        cut: whether the pieces are leaves of their own; otherwise autograd sees the split.

    Raises:
        MicrobatchError: the batch is empty, its tensors do not fit together, or it has a list that
            may hold samples and is not named in ``dims``.

    Example:
        >>> import torch
        >>> from blockpipe.testing import split
        >>> [m.size for m in split((torch.zeros(5, 2),), {}, None, 3)]
        [2, 2, 1]
    """
    args, kwargs, target = unified((args, kwargs, target))
    named: list[tuple[Name, Any]] = [*enumerate(args), *kwargs.items()]
    by = ArgumentDims(dims, kwargs)
    by.check_names([name for name, _ in named])
    for name, value in [*named, (Role.TARGET, target)]:
        if by.of(name) is not WHOLE and by.of(name) != "list":
            check_kind(name, value)
    size, of = _batch_size(named, by)
    if size is None:
        return [Microbatch(args, kwargs, target, 1)]
    if size == 0:
        contract, fix = "at least one sample", "skip empty batches"
        raise MicrobatchError(expected(contract, 0, for_="the batch's first tensor", fix=fix))
    for name, value in [*named, (Role.TARGET, target)]:
        if not by.names(name):
            check_for_samples(name, value, size, by.of(name))
    _check_target(target, size, by.of(Role.TARGET), of)
    splitter = _Splitter(by, size, min(chunks, size), cut)
    if splitter.count > 1:
        return splitter.microbatches(args, kwargs, target)
    for name, value in named:
        splitter.parts(name, value)  # for its checks
    return [Microbatch(args, kwargs, target, size)]


class _Splitter:
    """Splits the arguments of one batch.

    Args:
        by: the dims of the arguments.
        batch: the batch's samples.
        count: the number of micro-batches.
        cut: as for :func:`split`.
    """

    def __init__(self, by: ArgumentDims, batch: int, count: int, cut: bool) -> None:
        self.count = count
        self._by = by
        self._batch = batch
        self._cut = cut
        self._sizes = [batch // count + (i < batch % count) for i in range(count)]
        self._split_on: dict[Name, int | Literal["list"]] = {}
        self._pieces: dict[tuple[int, int], list[Tensor]] = {}  # of tensors without gradient

    def microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> list[Microbatch]:
        """Return the micro-batches; the first one knows its part of the batch."""
        positional = [self.parts(i, value) for i, value in enumerate(args)]
        by_name = [self.parts(name, value) for name, value in kwargs.items()]
        every_args = zip(*positional, strict=True) if args else [()] * self.count
        every_kwargs = (
            [dict(zip(kwargs, row, strict=True)) for row in zip(*by_name, strict=True)]
            if kwargs
            else [kwargs] * self.count
        )
        split_on = {name: dim for name, dim in self._split_on.items() if not isinstance(name, Role)}
        share = BatchPart(self.count, self._sizes[0], self._batch, split_on)
        targets = self.parts(Role.TARGET, target)
        rows = zip(every_args, every_kwargs, targets, self._sizes, strict=True)
        microbatches = list(itertools.starmap(Microbatch, rows))
        microbatches[0].share = share
        return microbatches

    def parts(self, name: Name, value: Any) -> list[Any]:
        """Return each micro-batch's part of an argument."""
        dim = self._by.of(name)
        if dim is WHOLE or value is None:  # an option that is left out, or no target
            return [value] * self.count
        if dim == "list":
            return self._elements(name, value)
        if isinstance(dim, PartlyWhole):
            return self._some_of(name, value, dim)
        if self._by.asks_for(name):
            _check_named(name, value, dim, self._batch)
        if isinstance(value, Tensor):  # the common case, in every step
            if not has_batch(value.shape, self._batch, dim):
                return [value] * self.count
            self._split_on[name] = dim
            return self._pieces_of(value, dim)
        found = (t for t in tensors(value) if has_batch(t.shape, self._batch, dim))
        return self._split_tensors(name, value, found, dim)

    def _some_of(self, name: Name, value: Any, by: PartlyWhole) -> list[Any]:
        found = (t for number, t in enumerate(tensors(value)) if number not in by.whole)
        return self._split_tensors(name, value, found, by.dim)

    def _split_tensors(
        self, name: Name, value: Any, found: Iterable[Tensor], dim: int
    ) -> list[Any]:
        """Return an argument's parts, where some of the tensors in it are split."""
        pieces: dict[int, Sequence[Tensor]] = {id(t): self._pieces_of(t, dim) for t in found}
        if pieces:
            self._split_on[name] = dim

        def part(i: int) -> Any:
            return map_tensors(lambda t: pieces[id(t)][i] if id(t) in pieces else t, value)

        return [part(i) for i in range(self.count)]

    def _pieces_of(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Return the pieces of a tensor; if it is there twice, they are the same objects."""
        if tensor.requires_grad:  # each place has a gradient of its own
            return _pieces(tensor, self._sizes, dim, self._cut)
        key = id(tensor), dim
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = _pieces(tensor, self._sizes, dim, self._cut)
        return found

    def _elements(self, name: Name, value: Any) -> list[Any]:
        _check_list(name, value, self._batch)
        self._split_on[name] = "list"
        own = map_tensors(_own_leaf, value) if self._cut else value
        ends = itertools.accumulate(self._sizes)
        return [own[end - n : end] for end, n in zip(ends, self._sizes, strict=True)]


def _check_named(name: Name, value: Any, dim: int, size: int | None) -> None:
    """Check that the tensors of an argument have the dim that the user has named, with the batch's
    size; ``None``: that is not known yet."""
    for tensor in tensors(value):
        if tensor.dim() and not (has_dim(tensor.shape, dim) and size in (None, tensor.shape[dim])):
            fix = (
                "name the dim that has the samples, or pass "
                f"batch_dims={{{name!r}: None}} to give every micro-batch the whole"
            )
            contract, argument = _samples_on(dim, size), f"argument {name!r}"
            shape = tuple(tensor.shape)
            raise MicrobatchError(expected(contract, shape, for_=argument, fix=fix))


def _samples_on(dim: int, size: int | None) -> str:
    samples = "samples" if size is None else f"the batch's {size} samples"
    return f"a shape with {samples} on dim {dim}"


def _pieces(tensor: Tensor, bounds: list[int], dim: int, cut: bool) -> list[Tensor]:
    if tensor.layout not in (torch.strided, torch.jagged):
        raise MicrobatchError(
            f"expected a dense tensor to split into micro-batches, got one of shape "
            f"{tuple(tensor.shape)} whose layout is {tensor.layout} ({users_line()}); pass it "
            "dense and convert it in the forward, or give every micro-batch the whole by "
            "batch_dims={its name or position: None}"
        )
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


def _batch_size(named: list[tuple[Any, Any]], by: ArgumentDims) -> tuple[int | None, Name]:
    """Return the number of samples of the first argument that is split, and its name; ``None``:
    none is."""
    for name, value in named:
        dim = by.of(name)
        if dim is WHOLE or value is None:
            continue
        if dim == "list":
            _check_list(name, value)
            return len(value), name
        if isinstance(dim, PartlyWhole):
            dim = dim.dim
        if not by.names(name):
            check_for_samples(name, value, None, dim)
        for tensor in tensors(value):
            if has_dim(tensor.shape, dim):
                return int(tensor.shape[dim]), name
            if tensor.dim() and not by.is_default:
                _check_named(name, tensor, dim, None)
    return None, -1


def _check_list(name: Name, value: Any, size: int | None = None) -> None:
    """Check that an argument that the user has named as a list is one, of the batch's size."""
    argument = f"argument {name!r}"
    if not isinstance(value, list | tuple):
        contract = "a list or tuple with one element a sample"
        fix = "pass one, or name a dim in batch_dims"
        raise MicrobatchError(expected(contract, value, for_=argument, fix=fix))
    if size is not None and len(value) != size:
        contract = f"as many elements as the batch has samples, {size},"
        raise MicrobatchError(expected(contract, len(value), for_=argument))


def _check_target(target: Any, size: int, dim: Any, of: Name) -> None:
    """Check that the target has the samples of the batch, whose size is that of an argument."""
    if dim is WHOLE or dim == "list" or isinstance(dim, PartlyWhole):
        return
    unfit = [t for t in tensors(target) if has_dim(t.shape, dim) and t.shape[dim] != size]
    if not unfit:
        return
    if any(has_batch(t.shape, size, dim) for t in tensors(target)):
        fix = (
            "the target has others that fit: leave this one out, and let loss_fn have it otherwise "
            "(as an attribute, or by functools.partial), or give it a row for each sample"
        )
    else:
        fix = (
            f"the batch has the size of argument {of!r}, its first tensor: pass batch_dims="
            f"{{{of!r}: None}} if that goes whole to every micro-batch, {{'target': None}} if the "
            "target does, or a target for each sample"
        )
    shape = tuple(unfit[0].shape)
    raise MicrobatchError(expected(_samples_on(dim, size), shape, for_="the target", fix=fix))


def weights_of(microbatches: Sequence[Microbatch], reduction: LossReduction) -> list[float]:
    """Return the weight of each micro-batch's loss in the batch's.

    Args:
        microbatches: the micro-batches of :func:`split`.
        reduction: ``"mean"``: its share of the samples; ``"sum"``: 1; a callable ``(args, kwargs,
            target) -> number``: its share of those numbers (tokens that count, say).

    Raises:
        MicrobatchError: a number of the callable is none, negative or not finite, or all are zero.
    """
    if reduction == "sum":
        return [1.0] * len(microbatches)
    if callable(reduction):
        given = [reduction(m.args, m.kwargs, m.target) for m in microbatches]
        try:
            counts = [-1.0 if isinstance(n, str | bytes | bool) else float(n) for n in given]
        except (TypeError, ValueError):
            counts = [-1.0]
        if not all(math.isfinite(n) and n >= 0 for n in counts) or sum(counts) <= 0:
            contract = "finite weights from 0 on, not all 0,"
            fix = "count the terms that the loss averages over"
            raise MicrobatchError(expected(contract, given, for_="loss_reduction", fix=fix))
    else:
        counts = [float(m.size) for m in microbatches]
    total = sum(counts)
    return [count / total for count in counts]


def weights_without_target(
    microbatches: Sequence[Microbatch], reduction: LossReduction
) -> tuple[list[float], Exception | None]:
    """Return the weight of each micro-batch's result where that is one number, and the error of a
    ``loss_reduction`` that fails without a target: it matters only if there is such a number. Of
    a batch that is only evaluated, nothing has to count: test sets have no labels."""
    try:
        return weights_of(microbatches, reduction), None
    except Exception as error:
        is_fine = not torch.is_grad_enabled() and _counts_nothing(microbatches, reduction, error)
        return weights_of(microbatches, "mean"), None if is_fine else error


def _counts_nothing(
    microbatches: Sequence[Microbatch], reduction: LossReduction, error: Exception
) -> bool:
    """Return whether a batch's weights are refused because all of them are 0."""
    if not callable(reduction) or not isinstance(error, MicrobatchError):
        return False
    counts = [reduction(m.args, m.kwargs, m.target) for m in microbatches]
    return all(not isinstance(n, str | bytes | bool) and n == 0 for n in counts)
