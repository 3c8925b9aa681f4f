"""The micro-batches' results, joined into one: values forward, gradients back."""

import itertools
from collections.abc import Iterator, MappingView, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.nested import (
    containers,
    leaf_names,
    leaves,
    map_leaves,
)
from ..devices.copies import carry
from ..devices.devices import is_asynchronous
from ..errors import MicrobatchError
from .batch_dims import has_batch
from .output_dims import is_weighed, lists_of_samples


def join(
    results: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    device: torch.device | None,
    dim: int | Literal["list"] | None = 0,
    on_host: Sequence[Sequence[bool]] = (),
) -> tuple[Any, list["JoinedLeaf"]]:
    """Join the micro-batches' results into one, on a device.

    A tensor with a micro-batch's size on ``dim`` is concatenated; a 0-d floating-point tensor is
    summed by weight; one that is the same tensor for all (a weight) is kept, and so are a mask,
    positions, and values other than tensors, if all agree; anything else becomes a list, one entry
    a micro-batch. With ``"list"`` for ``dim`` the results are lists themselves, one element a
    sample, and become one list. With ``None`` the results are not
    joined: they are returned as a list. One result alone is returned as it is, unless ``dim`` is
    ``None``: a single sample's state can be passed on, as with the model.

    Args:
        results: the results, one for each micro-batch.
        sizes: the micro-batches' numbers of samples.
        weights: the weights of their losses.
        device: the device of the result; ``None``: leaves stay on their devices.
        dim: the dim that has the samples, ``"list"``, or ``None``.
        on_host: by micro-batch and leaf, whether the leaf stays on the host; empty: none does.

    Returns:
        The result, and for each of its leaves how it was joined.

    Raises:
        MicrobatchError: the results have different structures, or sizes on other dims, or are not
            lists of samples.

    Example:
        >>> join([torch.zeros(2, 3), torch.zeros(1, 3)], [2, 1], [2 / 3, 1 / 3], None)[0].shape
        torch.Size([3, 3])
    """
    columns = [list(leaves(result)) for result in results]
    hosts = on_host or [[False] * len(column) for column in columns]
    if dim is None:
        return _listed(list(results), sizes, columns, device, hosts)
    if len(results) > 1:
        _check_can_be_joined(results[0])
    if dim == "list":
        return _joined_lists(results, sizes, columns, device, hosts)
    if len({len(column) for column in columns}) > 1:
        counts = [len(column) for column in columns]
        contract = "as many members in the result of every micro-batch"
        raise MicrobatchError(expected(contract, counts, fix=_way_to_join(results, sizes)))
    orders = _orders(results)
    joints = [
        JoinedLeaf.of(
            [column[order[i]] for column, order in zip(columns, orders, strict=True)],
            sizes,
            weights,
            dim,
            [order[i] for order in orders],
        )
        for i in range(len(columns[0]))
    ]
    devices = [None if stays else device for stays in hosts[0]]
    values = iter([_joined(results[0], at, joint, devices[at]) for at, joint in enumerate(joints)])
    return map_leaves(lambda _: next(values), results[0]), joints


def _orders(results: Sequence[Any]) -> list[Sequence[int]]:
    """Return for each micro-batch the places of its leaves in the order of the first one's."""
    first, *others = map(leaf_names, results)
    orders: list[Sequence[int]] = [range(len(first))]
    for m, names in enumerate(others, 1):
        if names != first and set(names) != set(first):
            raise MicrobatchError(
                "expected the same members in the result of every micro-batch, got "
                f"{', '.join(first)} in micro-batch 0 and {', '.join(names)} in micro-batch {m} "
                f"({users_line()}); return the same members for every micro-batch, or pass "
                "batch_dims={'output': None} to get each micro-batch's outputs"
            )
        orders.append(orders[0] if names == first else [names.index(name) for name in first])
    return orders


def _check_can_be_joined(result: Any) -> None:
    """Refuse what would be joined to something that is no such value, or not at all."""
    packed = (name for name, inner in containers(result) if isinstance(inner, PackedSequence))
    names = zip(leaf_names(result), leaves(result), strict=True)
    used_up = (name for name, leaf in names if isinstance(leaf, Iterator | MappingView))
    for kind, fix, found in (
        ("a PackedSequence", "return pad_packed_sequence(…) of it", packed),
        ("an iterator or a view of a mapping", "return list(…) of it", used_up),
    ):
        for name in found:
            raise MicrobatchError(
                f"expected tensors, or containers of them, to join, got {kind} for {name} of a "
                f"micro-batch ({users_line()}); {fix}, or pass batch_dims={{'output': None}} to "
                "get each micro-batch's outputs"
            )


def _way_to_join(results: Sequence[Any], sizes: Sequence[int]) -> str:
    """Return what to do about results that have different numbers of members."""
    names = lists_of_samples(results, sizes)
    if "output" in names:
        return (
            "if the output has one element a sample, as its length says, pass "
            "batch_dims={'output': 'list'}; otherwise return the same members for every micro-batch"
        )
    if names:
        return (
            f"if {', '.join(names)} has one element a sample, as its length says, return a tensor "
            "with a row for each sample instead, or pass batch_dims={'output': None} to get each "
            "micro-batch's outputs"
        )
    return "return the same members for every micro-batch"


def _joined(result: Any, at: int, joint: "JoinedLeaf", device: torch.device | None) -> Any:
    """Return the joined leaf number ``at`` of results of this structure."""
    try:
        return joint.value(device)
    except RuntimeError as error:
        shapes = [list(p.shape) for p in joint.parts] if joint.how == "cat" else []
        rest = [[n for d, n in enumerate(s) if d != joint.dim % len(s)] for s in shapes]
        other = next((m for m, sizes in enumerate(rest) if sizes != rest[0]), None)
        if other is None:
            raise
        raise MicrobatchError(
            f"expected outputs that differ only on dim {joint.dim}, on which they are joined, got "
            f"{leaf_names(result)[at]} with the shape {shapes[0]} in micro-batch 0 and "
            f"{shapes[other]} in micro-batch {other} ({users_line()}); pad it to one size in the "
            "forward, or name the dim that has the samples: batch_dims={'output': …}"
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
            is_list = isinstance(result, list | tuple)
            got = f"one of {len(result)}" if is_list else type(result).__name__
            raise MicrobatchError(
                f"expected a list of {size} elements, one a sample, for the output, got {got} "
                f"({users_line()}); leave 'output' out of batch_dims, or return such a list"
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


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of one tensor from each micro-batch, all on one device."""
    # A tensor without weight is left out: 0 times NaN would be NaN.
    counted = [(p, w) for p, w in zip(parts, weights, strict=True) if w]
    tensors, factors = [p for p, _ in counted], [w for _, w in counted]
    if is_asynchronous(tensors[0].device):  # few launches; the order of the sum is free
        row = carry(torch.tensor(factors, dtype=tensors[0].dtype), tensors[0].device)
        joined: Tensor = torch.tensordot(row, torch.stack(tensors), 1)
        return joined
    weighted = [tensor * factor for tensor, factor in zip(tensors, factors, strict=True)]
    total: Tensor = sum(weighted[1:], weighted[0])
    return total


@dataclass
class JoinedLeaf:
    """The way in which leaves of the micro-batches' results become one: values forward, gradients
    back.

    Attributes:
        how: the rule, see :func:`join`.
        parts: the leaves.
        sizes: the micro-batches' numbers of samples.
        weights: the weights of their losses.
        dim: the dim on which parts are concatenated.
        places: the micro-batch and the index of the leaf in its result, for each part.
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
        places: Sequence[int],
    ) -> "JoinedLeaf":
        """Choose the rule by which a leaf of all micro-batches is joined.

        Args:
            parts: the leaves.
            sizes: the micro-batches' numbers of samples.
            weights: the weights of their losses.
            dim: the dim that has the samples.
            places: the index of the leaf in each result.
        """
        first = parts[0]
        how: Literal["cat", "sum", "same", "list"]
        if not all(isinstance(part, Tensor) for part in parts):
            how = "same" if all(_equal(part, first) for part in parts[1:]) else "list"
        elif all(has_batch(p.shape, n, dim) for p, n in zip(parts, sizes, strict=True)):
            how = "same" if len(parts) > 1 and _is_one_whole(parts) else "cat"
        elif is_weighed(first.shape, first.dtype):
            how = "sum"
        elif first.is_floating_point() or first.is_complex() or first.dim() == 0:
            # Their values do not decide: they may be equal in one step and differ in the next, and
            # then only one of them would have got its gradient.
            how = "same" if all(_is_same_memory(p, first) for p in parts[1:]) else "list"
        else:  # a mask, or positions
            how = "same" if all(_same(p, first) for p in parts[1:]) else "list"
        return cls(how, parts, sizes, weights, dim, [*enumerate(places)])

    def value(self, device: torch.device | None) -> Any:
        """Return the joined leaf."""
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
        """Return each part's share of the joined leaf's gradient."""
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
    """Return whether both are one tensor: a weight, or an argument that was not split."""
    if a is b:
        return True
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (a.data_ptr(), a.device, a.dtype, a.shape, a.stride()) == (
        *(b.data_ptr(), b.device, b.dtype, b.shape, b.stride()),
    ) and a.numel() > 0


def _is_one_whole(parts: Sequence[Tensor]) -> bool:
    """Return whether all are one tensor, and no view of a part of it: it has as many entries as a
    micro-batch has samples by chance."""
    first = parts[0]
    if not all(_is_same_memory(part, first) for part in parts[1:]):
        return False
    return first.numel() * first.element_size() == first.untyped_storage().nbytes()


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False
