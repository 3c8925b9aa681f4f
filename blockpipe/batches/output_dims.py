"""How the outputs of micro-batches are joined: by a dim, by elements, or not at all.

An output may be a list of samples, or a list of outputs that have all samples each. What may be
both is refused.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.nested import are_of_one_kind, containers, leaves, present, tensors
from ..errors import MicrobatchError
from .batch_dims import BatchDims, PartlyWhole, Role, has_batch, has_dim, output_of


def output_dim(
    dims: BatchDims, results: Sequence[Any] = (), sizes: Sequence[int] = ()
) -> int | Literal["list"] | None:
    """Return the dim on which outputs are joined, ``"list"``, or ``None`` for not at all.

    ``batch_dims`` decides it. If it does not name the output, lists with one element a sample are
    joined as such where the arguments are such lists. Where the arguments are tensors, two tensors
    of a micro-batch of two are far more often two outputs (of two heads, of two scales) than two
    samples: there is no telling by their shapes, and such a list is joined tensor by tensor.

    Raises:
        MicrobatchError: the results may be lists of samples, or hold tensors that have all samples.
    """
    if not isinstance(dims, Mapping):
        return dims or 0
    if {"output", Role.OUTPUT} & dims.keys() or "list" not in dims.values():
        how = output_of(dims)
        if isinstance(how, int):
            _check_for_dim(results, how)
        assert not isinstance(how, PartlyWhole)
        return how
    each = list(zip(results, sizes, strict=True))
    if not all(_may_be_samples(result, size) for result, size in each):
        _check_for_lists_inside(results, sizes)
        return 0
    if each and all(_has_all_samples(result, size) for result, size in each):
        raise MicrobatchError(_doubt(*each[0], has_rows=True))
    is_one_size = len(each) > 1 and len({*sizes}) == 1 and sizes[0] > 1
    if is_one_size and all(_may_be_outputs(result, size) for result, size in each):
        raise MicrobatchError(_doubt(*each[0], has_rows=isinstance(results[0][0], Mapping)))
    return "list"


_AS_THEY_ARE = "'output': None (each micro-batch's outputs, not joined)"


def _doubt(result: Sequence[Any], size: int, *, has_rows: bool) -> str:
    """Return the text of the error about an output that is a list of samples or not.

    Args:
        result: of a micro-batch.
        size: its number of samples.
        has_rows: whether its tensors may have all samples.
    """
    otherwise = "hold tensors that have all of them" if has_rows else f"be {size} outputs"
    way = "'output': 0 (tensors with all samples)" if has_rows else _AS_THEY_ARE
    return (
        f"the output of a micro-batch, a {type(result).__name__} of {size}, may have one "
        f"element for each of its {size} samples, or {otherwise} ({users_line()}); name it in "
        f"batch_dims: 'output': 'list' (one element a sample) or {way}"
    )


def _check_for_dim(results: Sequence[Any], dim: int) -> None:
    """Refuse a dim that no tensor of the results has: none would be joined."""
    shapes = [tuple(t.shape) for result in results for t in tensors(result) if t.dim()]
    if shapes and not any(has_dim(shape, dim) for shape in shapes):
        contract = f"an output with the samples on dim {dim}, as batch_dims says,"
        fix = "name the dim that has the samples, or None for each micro-batch's outputs"
        raise MicrobatchError(expected(contract, shapes[0], fix=fix))


def _check_for_lists_inside(results: Sequence[Any], sizes: Sequence[int]) -> None:
    """Refuse lists of samples inside of results: they would be joined as if each element had all
    samples."""
    names = lists_of_samples(results, sizes)
    if names:
        raise MicrobatchError(
            f"{names[0]} of a micro-batch may have one element for each of its {sizes[0]} samples, "
            f"or hold tensors that have all of them ({users_line()}); name the output in "
            f"batch_dims: 'output': 0 (tensors with all samples) or {_AS_THEY_ARE}"
        )


def lists_of_samples(results: Sequence[Any], sizes: Sequence[int]) -> list[str]:
    """Return the names of the lists in the results that have an element for each sample, by their
    lengths in every micro-batch. A tuple without tensors is a size."""
    found = [
        [
            name
            for name, inner in containers(result)
            if _may_be_samples(inner, size)
            and (type(inner) is list or any(True for _ in tensors(inner)))
        ]
        for result, size in zip(results, sizes, strict=True)
    ]
    return [name for name in found[0] if all(name in names for names in found[1:])]


def _may_be_samples(result: Any, size: int) -> bool:
    """Return whether a result is a sequence with as many elements as there are samples, all of one
    kind: a loss beside outputs is none."""
    if type(result) not in (list, tuple) or len(result) != size:
        return False
    return are_of_one_kind(present(result))


def _has_all_samples(result: Sequence[Any], size: int) -> bool:
    """Return whether each element of a result may just as well hold all samples, or be a loss. A
    mapping is a sample: a detection's number of boxes is the number of samples by chance."""
    if isinstance(result[0], Mapping):
        return False
    found = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
    return bool(found) and all(
        has_batch(tensor.shape, size, 0) or is_weighed(tensor.shape, tensor.dtype)
        for tensor in found
    )


def _may_be_outputs(result: Sequence[Any], size: int) -> bool:
    """Return whether the elements of a result with one for each sample may just as well be several
    outputs: lists with one element for each sample, or in a tuple mappings of tensors that have all
    samples, or plain values. Micro-batches of several sizes would tell. A list of plain values is
    one of samples: of pairs, of words."""
    if isinstance(result, tuple) and all(isinstance(item, Mapping) for item in result):
        found = list(tensors(result))
        rows = [has_batch(tensor.shape, size, 0) for tensor in found]
        weighed = [is_weighed(tensor.shape, tensor.dtype) for tensor in found]
        return any(rows) and all(map(operator.or_, rows, weighed))
    has_tensors = any(True for _ in tensors(result))
    if (has_tensors or type(result) is tuple) and all(type(i) in (list, tuple) for i in result):
        # What a sample has beside each other, such as boxes and scores, is not of one kind.
        return all(len(item) == size and are_of_one_kind(present(item)) for item in result)
    return type(result) is tuple and not has_tensors


def is_weighed(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a tensor that has no entry for each sample is summed by weight."""
    return len(shape) == 0 and (dtype.is_floating_point or dtype.is_complex)
