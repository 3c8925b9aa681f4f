"""The micro-batches' results into one: values forward, gradients back."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.nested import leaf_names, leaves, map_leaves
from ..devices.copies import carry
from ..devices.devices import is_asynchronous
from ..errors import MicrobatchError
from .microbatch import BatchDims


def join(
    results: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    device: torch.device | None,
    dim: int | Literal["list"] | None = 0,
    on_host: Sequence[Sequence[bool]] = (),
) -> tuple[Any, list["JoinedLeaf"]]:
    """One result out of the micro-batches', on a device.

    A tensor with a micro-batch's size on ``dim`` is concatenated; a 0-d floating-point tensor is
    summed by weight; one that is the same tensor for all (a weight) is kept, and so are a mask or
    positions, and what is no tensor, if all agree; anything else becomes a list, one entry a
    micro-batch. With ``"list"`` for ``dim`` the results are lists themselves, one element a sample,
    and become one list. With ``None`` they are not put together: the result is a list of them. What
    is marked as ``on_host``, by micro-batch and leaf, is left where it is.

    Returns:
        The result, and for each of its leaves how it was joined.

    Raises:
        MicrobatchError: the results have different structures, or sizes on other dims, or are no
            lists of samples.

    Example:
        >>> join([torch.zeros(2, 3), torch.zeros(1, 3)], [2, 1], [2 / 3, 1 / 3], None)[0].shape
        torch.Size([3, 3])
    """
    columns = [list(leaves(result)) for result in results]
    hosts = on_host or [[False] * len(column) for column in columns]
    if dim is None:
        return _listed(list(results), sizes, columns, device, hosts)
    if dim == "list":
        return _joined_lists(results, sizes, columns, device, hosts)
    if len({len(column) for column in columns}) > 1:
        raise MicrobatchError(
            f"micro-batches give results of one structure, but they have "
            f"{[len(c) for c in columns]} members; return the same members each time"
        )
    joints = [
        JoinedLeaf.of([column[i] for column in columns], sizes, weights, dim, i)
        for i in range(len(columns[0]))
    ]
    devices = [None if stays else device for stays in hosts[0]]
    values = iter([_joined(results[0], at, joint, devices[at]) for at, joint in enumerate(joints)])
    return map_leaves(lambda _: next(values), results[0]), joints


def _joined(result: Any, at: int, joint: "JoinedLeaf", device: torch.device | None) -> Any:
    """The joined leaf number ``at`` of results such as this one."""
    try:
        return joint.value(device)
    except RuntimeError as error:
        shapes = [list(p.shape) for p in joint.parts] if joint.how == "cat" else []
        rest = [shape[: joint.dim] + shape[joint.dim + 1 :] for shape in shapes]
        other = next((m for m, sizes in enumerate(rest) if sizes != rest[0]), None)
        if other is None:
            raise
        raise MicrobatchError(
            f"micro-batches give outputs that differ on dim {joint.dim} alone, where they are put "
            f"together, but {leaf_names(result)[at]} has the shape {shapes[0]} in micro-batch 0 "
            f"and {shapes[other]} in micro-batch {other} ({users_line()}); pad it to one size in "
            "the forward, or name the dim that has the samples: batch_dims={'output': …}"
        ) from error


def _joined_lists(
    results: Sequence[Any],
    sizes: Sequence[int],
    columns: list[list[Any]],
    device: torch.device | None,
    on_host: Sequence[Sequence[bool]],
) -> tuple[Any, list["JoinedLeaf"]]:
    for result, size in zip(results, sizes, strict=True):
        if not isinstance(result, list | tuple) or len(result) != size:
            what = f"{len(result)} elements" if isinstance(result, list | tuple) else "no list"
            raise MicrobatchError(
                f"batch_dims joins outputs by elements, one a sample, but the model returned "
                f"{what} ({type(result).__name__}) for {size} samples; leave 'output' out of "
                "batch_dims, or return a list with one element a sample"
            )
    joined = type(results[0])(itertools.chain.from_iterable(results))
    return _listed(joined, sizes, columns, device, on_host)


def _listed(
    listed: Any,
    sizes: Sequence[int],
    columns: list[list[Any]],
    device: torch.device | None,
    on_host: Sequence[Sequence[bool]],
) -> tuple[Any, list["JoinedLeaf"]]:
    """Results that stand one behind the other: each leaf is one micro-batch's."""
    joints = []
    for m, column in enumerate(columns):
        joints += [
            JoinedLeaf("same", [leaf], [sizes[m]], [1.0], 0, [(m, i)])
            for i, leaf in enumerate(column)
        ]
    stays = itertools.chain.from_iterable(on_host)
    values = iter([j.value(None if s else device) for j, s in zip(joints, stays, strict=True)])
    return map_leaves(lambda _: next(values), listed), joints


def output_dim(
    dims: BatchDims, results: Sequence[Any] = (), sizes: Sequence[int] = ()
) -> int | Literal["list"] | None:
    """The dim on which outputs are joined, ``"list"``, or ``None`` for not at all: as
    ``batch_dims`` says; else lists with one element a sample, where the arguments are such lists.
    """
    if not isinstance(dims, Mapping):
        return dims or 0
    if "output" in dims or "list" not in dims.values():
        return dims.get("output", 0)
    are_lists = all(
        type(result) in (list, tuple) and len(result) == size
        for result, size in zip(results, sizes, strict=True)
    )
    return "list" if are_lists else 0


def has_batch(shape: Sequence[int], size: int, dim: int) -> bool:
    """Whether a result of a micro-batch has an entry for each of its samples."""
    return len(shape) > dim and shape[dim] == size


def is_weighed(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a result without them is summed by weight."""
    return len(shape) == 0 and (dtype.is_floating_point or dtype.is_complex)


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Of one tensor from each micro-batch, on one device."""
    # What has no weight counts for nothing, also where it is no number.
    counted = [(p, w) for p, w in zip(parts, weights, strict=True) if w]
    tensors, factors = [p for p, _ in counted], [w for _, w in counted]
    if is_asynchronous(tensors[0].device):  # in few launches, and so in any order
        row = carry(torch.tensor(factors, dtype=tensors[0].dtype), tensors[0].device)
        joined: Tensor = torch.tensordot(row, torch.stack(tensors), 1)
        return joined
    weighted = torch._foreach_mul(tensors, factors)  # each by its own, in one call
    total: Tensor = sum(weighted[1:], weighted[0])
    return total


@dataclass
class JoinedLeaf:
    """How leaves of the micro-batches' results become one: values forward, gradients back.

    Attributes:
        how: see :func:`join`.
        parts: the leaves.
        sizes: of the micro-batches.
        weights: of the micro-batches.
        dim: on which parts are put together.
        places: (micro-batch, leaf of its result) of each part.
    """

    how: Literal["cat", "sum", "same", "list"]
    parts: list[Any]
    sizes: Sequence[int]
    weights: Sequence[float]
    dim: int
    places: list[tuple[int, int]]

    @classmethod
    def of(
        cls,
        parts: list[Any],
        sizes: Sequence[int],
        weights: Sequence[float],
        dim: int,
        leaf: int = 0,
    ) -> "JoinedLeaf":
        """Choose how the same leaf of all micro-batches is joined."""
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
        places = [(m, leaf) for m in range(len(parts))]
        return cls(how, parts, sizes, weights, dim, places)

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
        return weighted_sum(parts, self.weights)

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
