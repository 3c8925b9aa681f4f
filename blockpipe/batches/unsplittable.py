"""Arguments that are refused before a batch is split: what has no dim of samples, and what may be
samples or not.

To split what looks like a tuple of tensors, or to hand all of it to every micro-batch, would be a
guess, and a wrong one computes something else without a word.
"""

import itertools
from collections import UserList, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.nested import are_of_one_kind, containers, leaves, members, tensors
from ..errors import MicrobatchError
from .batch_dims import Name, Role, has_batch, has_dim


def check_kind(name: Name, value: Any) -> None:
    """Refuse an argument that holds samples, but has no dim on which torch can split them."""
    if type(value) is Tensor and not value.is_nested:  # the common case, in every step
        return
    nested = itertools.chain((inner for _, inner in containers(value)), tensors(value))
    found = next(filter(None, map(_kind_and_remedy, nested)), None)
    if found is not None:
        kind, remedy = found
        where = f"argument {name!r}" if name is not Role.TARGET else "the target"
        raise MicrobatchError(
            f"expected tensors with a dim of samples to split into micro-batches for {where}, got "
            f"{kind} ({users_line()}); {remedy}, or pass batch_dims={{{name!r}: None}} to give "
            "every micro-batch the whole"
        )


def _kind_and_remedy(value: Any) -> tuple[str, str] | None:
    if isinstance(value, PackedSequence):
        remedy = (
            "pass the padded tensor and the lengths, and pack them in the forward (lengths.cpu())"
        )
        return "a PackedSequence, whose rows are time steps", remedy
    if isinstance(value, torch.masked.MaskedTensor):
        remedy = "pass its data and its mask, and put them together in the forward"
        return "a MaskedTensor", remedy
    if isinstance(value, Tensor) and value.is_nested:
        remedy = "pass the padded tensor and the lengths, and make it nested in the forward"
        return "a nested tensor", remedy
    return None


def check_for_samples(name: Name, value: Any, size: int | None, dim: Any) -> None:
    """Refuse a list that may hold samples and that the user has not named as one: each sample would
    be split, or every micro-batch would get all of them.

    Args:
        name: the argument's position or name.
        value: the argument.
        size: the batch's number of samples; ``None``: this argument would decide it.
        dim: the dim on which the argument is split.
    """
    if isinstance(value, Tensor):
        return
    first = next((tensor for tensor in tensors(value) if has_dim(tensor.shape, dim)), None)
    for found, around in _sequences(value):
        if size is None:  # it is that of the first tensor
            is_doubtful = _alike(found) and any(tensor is first for tensor in tensors(found))
        else:
            is_value = around is not None and not _may_be_column(found, around)
            may_be = len(found) == size > 1 and not is_value
            is_doubtful = may_be and _may_be_samples(found, size, dim)
        if is_doubtful:
            raise MicrobatchError(_doubt(name, found, is_inside=found is not value))
    if size is not None:
        for leaf in leaves(value):
            _check_rows(name, leaf, size, dim)


def _check_rows(name: Name, leaf: Any, size: int, dim: Any) -> None:
    """Refuse what has a row for each sample and is no tensor: every micro-batch would get all."""
    if isinstance(leaf, Tensor | nn.Module | type):
        return
    held = [(name, item) for name, inside in _held(leaf).items() for item in leaves(inside)]
    rows = [name for name, item in held if has_batch(_shape_of(item), size, dim)]
    if _shape_of(leaf)[:1] == (size,):
        contract, remedy = f"a tensor with the batch's {size} rows", "pass torch.as_tensor(…) of it"
    elif rows and size > 1:
        contract = f"tensors with the batch's {size} samples"
        remedy = (
            f"its {rows[0]!r} has that many and would not be split: pass the tensors themselves "
            "or in a dict or dataclass, and make the object of them where it is used"
        )
    else:
        return
    where = f"argument {name!r}" if name is not Role.TARGET else "the target"
    fix = f"{remedy}, or batch_dims={{{name!r}: None}} to give every micro-batch the whole"
    raise MicrobatchError(expected(contract, leaf, for_=where, fix=fix))


def _shape_of(leaf: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or of an array; empty for anything else."""
    shape = getattr(leaf, "shape", None) if hasattr(type(leaf), "__array__") else None
    return shape if isinstance(shape, tuple) else ()


def _held(leaf: Any) -> Mapping[Any, Any]:
    """Return what an object holds: the items of a deque or a set, or attributes and slots."""
    if isinstance(leaf, deque | UserList | Set):
        return dict(enumerate(leaf))
    try:
        found = object.__getstate__(leaf)
    except TypeError:  # an iterator, a lock
        return {}
    attributes, slots = found if isinstance(found, tuple) else (found, None)
    return {**(attributes or {}), **(slots or {})}


def _doubt(name: Name, found: Sequence[Any], *, is_inside: bool) -> str:
    """Return the text of the error about an argument that is or has a list of samples or not."""
    where = f"argument {name!r}" if name is not Role.TARGET else "the target"
    of_values = not any(True for _ in tensors(found))
    by_element = f"batch_dims={{{name!r}: 'list'}} (one element a sample)"
    by_tensor = f"{{{name!r}: 0}} (each tensor is split on dim 0)"
    if is_inside:
        where += f" has a {type(found).__name__} inside that"
        ways = (
            "one tensor with a row for each sample, the list as an argument of its own with "
            f"batch_dims={{its name: 'list'}}, batch_dims={by_tensor}"
        )
    else:
        ways = by_element if of_values else f"{by_element}, {by_tensor}"
    either = "" if of_values else ", or hold tensors that have all samples each"
    return (
        f"{where} may be a list of {len(found)} samples{either} ({users_line()}); pass {ways} or "
        f"{{{name!r}: None}} (every micro-batch gets the whole)"
    )


def _sequences(
    value: Any, around: Sequence[Any] | None = None
) -> Iterator[tuple[Sequence[Any], Sequence[Any] | None]]:
    """Yield the sequences in a nested value, the outer ones first, each with the one of plain
    values that it is in; a named tuple is a record, and a ``torch.Size`` a shape."""
    if type(value) is tuple or (isinstance(value, Sequence) and not isinstance(value, _NO_LISTS)):
        yield value, around
        around = value if around is not None or _of_plain_values(value) else None
    for _, item in members(value) or ():
        if not isinstance(item, _PLAIN):
            yield from _sequences(item, around)


def _may_be_column(sequence: Sequence[Any], around: Sequence[Any]) -> bool:
    """Return whether a sequence in one of plain values may be one of several columns, as torch's
    collate function makes them of records, and not a size, a box, a padding or a sample's words."""
    if len(sequence) <= _LONGEST_SHAPE and not _of_texts(sequence):
        return False
    return not any(  # lines of several lengths
        isinstance(item, list | tuple) and _of_texts(item) and len(item) != len(sequence)
        for item in around
    )


def _of_texts(sequence: Sequence[Any]) -> bool:
    return all(isinstance(item, str | bytes) for item in sequence)


def _may_be_samples(sequence: Sequence[Any], size: int, dim: Any) -> bool:
    """Return whether the items of a sequence with as many as the batch has samples may be these."""
    there = [item for item in sequence if not _is_nothing(item)]
    if not isinstance(sequence, tuple):
        there = there or list(sequence)
        return _of_plain_values(sequence) or _alike(there) or _of_objects(there)
    if len(there) == len(sequence):
        return _of_plain_values(sequence) or _alike(sequence) or _of_objects(sequence)
    # A record may leave out some of its parts as well.
    if len(there) < 2 or not are_of_one_kind(there):
        return False
    if _alike(there):
        return not _are_parts(there, size, dim)
    return _of_texts(there) or _of_objects(there)


def _are_parts(there: Sequence[Any], size: int, dim: Any) -> bool:
    """Return whether the tensors of a tuple with gaps are a record's, such as the layers' states
    and masks: with all samples on their own dim or, time first, on the next, or for all samples."""
    found = list(tensors(there))
    if all(tensor is found[0] for tensor in found):
        return True
    return all(
        has_batch(t.shape, size, dim) or t.shape[:1] == (1,) or t.shape[1:2] == (size,)
        for t in found
    )


def _is_nothing(item: Any) -> bool:
    """Return whether an item says that its sample has nothing: ``None``, or ``torch.tensor([])``
    beside tensors of more dims."""
    return item is None or (isinstance(item, Tensor) and item.shape == (0,))


def _alike(sequence: Sequence[Any]) -> bool:
    """Return whether the items look like one sample each, and not like the parts of one record."""
    if len(sequence) < 2 or not are_of_one_kind(sequence):
        return False
    return all(any(True for _ in tensors(item)) for item in sequence)


def _of_objects(sequence: Sequence[Any]) -> bool:
    """Return whether the items are neither tensors nor single values; those of a tuple, which may
    be a record, of one class."""
    if isinstance(sequence, tuple) and not are_of_one_kind(sequence):
        return False
    return not any(isinstance(item, (Tensor, *_PLAIN)) for item in sequence)


def _of_plain_values(sequence: Sequence[Any]) -> bool:
    """Return whether a sequence has texts, numbers, or tuples of them (lengths, sizes), or a tuple
    has texts: a tuple of numbers is one size."""
    if _of_texts(sequence):
        return True
    each = [list(leaves(item)) for item in sequence] if not isinstance(sequence, tuple) else []
    found = list(itertools.chain.from_iterable(each))
    is_plain = all(isinstance(leaf, _PLAIN) or _is_number(leaf) for leaf in found)
    is_of_values = any(leaf is not None and not isinstance(leaf, Tensor) for leaf in found)
    return is_plain and is_of_values and all(each)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


_LONGEST_SHAPE = 4
_NO_LISTS = (str, bytes, bytearray, memoryview, tuple)
_PLAIN = (str, bytes, int, float, complex, type(None))
