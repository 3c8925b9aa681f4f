"""One tensor: its version, its storage, its class, and operators on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, _ops
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch

T = TypeVar("T")

FakeTensor = fake_tensor.FakeTensor
"""A tensor without memory that computes shapes, on any device. torch documents it, but has no
public module for it; a meta tensor knows no device."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The mode that makes them; as :data:`FakeTensor`."""
ASK_FOR_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""What it raises where a result follows from values, or nobody knows from what."""

unset_fake_temporarily = fake_tensor.unset_fake_temporarily
"""A context manager: operations on real tensors are real. The user's code has entered the mode, so
it is not ours to leave; and a mode that is no longer on is not found by ``with mode:`` either."""

MAKE_SUBCLASS = "_make_subclass"
"""The static method of ``Tensor`` that makes an ``nn.Parameter``. No mode sees it."""

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The name of the logger that tells of what fake tensors cannot do."""

OpOverload = _ops.OpOverload
"""The class of what a dispatch mode is given as ``func``, which has no public name."""

HigherOrderOperator = _ops.HigherOrderOperator
"""The class of operators that call functions, as ``torch.cond`` and ``flex_attention`` do."""

generator_id: Callable[[torch.Generator], int] = attrgetter("_cdata")
"""Which random generator it is. A dispatch mode is given another Python object in each call, whose
``id()`` the next one may have."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's schema: its arguments, and which of them it writes to. An operator shows it in
public only as text."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation below autograd writes to, by its schema."""
    if not isinstance(func, OpOverload) or not (schema := schema_of(func)).is_mutable:
        return []
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [given[name] for name in written if name in given]


def normalizes_batches(func: Any) -> bool:
    """Return whether an operation below autograd is a batch norm."""
    return "batch_norm" in getattr(func, "__name__", "")


def updated_statistics(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the running statistics that a batch norm writes to. No schema says so, and no version
    counts it."""
    given = arguments_by_name(func, args, kwargs)
    if not given.get("training", given.get("train", "update" in func.__name__)):
        return []
    found = (given.get(name) for name in ("running_mean", "running_var"))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def arguments_by_name(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of an operation below autograd, with those that it has by default."""
    arguments = schema_of(func).arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return given | dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)


def reads_memory(func: Any) -> bool:
    """Return whether an operation below autograd reads what it is given: it is no view, by its
    schema, and no question, such as a fake tensor asks for its device."""
    if not isinstance(func, OpOverload):
        return True
    returned = [one.alias_info for one in schema_of(func).returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return not is_view and func.namespace != "prim"


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to in place; always -1 for one of inference mode,
    which does not count. Autograd compares these numbers, and shows them nowhere in public."""
    return -1 if tensor.is_inference() else tensor._version


def put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    """Let a tensor have an earlier value again, and its version of then.

    The caller's graphs may have saved the tensor: for autograd, it has not been written to. Nor may
    its memory be written if nothing has changed there: it may be read-only, as that of a mapped
    file is, or that of an expanded tensor. No mode of the user's sees it.

    Args:
        tensor: where to write.
        value: what was there.
        version: what :func:`version_of` said then.
    """
    with torch.no_grad(), _python_dispatch._disable_current_modes():
        if not _has_bits_of(tensor.detach(), value):
            # What is detached of a sparse tensor would get indices and values of its own.
            (tensor.detach() if tensor.layout is torch.strided else tensor).copy_(value)
    if version >= 0:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _has_bits_of(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are known to have the same bits, those of NaN too."""
    if one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return False
    plain = (t.resolve_conj().resolve_neg().contiguous() for t in (one, other))
    return torch.equal(*map(bytes_of, plain))


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Which storage it is, as long as it lives. ``data_ptr()`` is 0 for all without memory (meta and
empty ones), and fails for fake ones; ``id()`` is that of a Python object, which may go earlier."""


def storage_of(tensor: Tensor) -> int:
    """Return which storage a tensor has: :data:`storage_id` of it."""
    return storage_id(tensor.untyped_storage())


def address_of(tensor: Tensor) -> int:
    """Return where a strided tensor's storage is; 0: nowhere, as of a fake tensor, a meta one, or
    one of a subclass that may wrap others (quantized weights).

    Raises:
        RuntimeError: it has no memory, as what another library has made of a fake tensor.
    """
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def is_ragged(tensor: Tensor) -> bool:
    """Return whether a tensor is a nested one of the strided layout, which has no shape to ask
    for."""
    return tensor.is_nested and tensor.layout is torch.strided


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of one that has none to ask for, how many members it has."""
    return (tensor.size(0),) if is_ragged(tensor) else tuple(tensor.shape)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides; ``()`` of one that has none to ask for."""
    has_strides = tensor.layout is torch.strided and not tensor.is_nested
    return tuple(tensor.stride()) if has_strides else ()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor: gloo sends no int16 and no float8, and torch
    compares no float8."""
    return tensor.reshape(-1).view(torch.uint8)


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets in its storage of a tensor's first byte and of the byte after its last: of
    a nested tensor of the strided layout, that of its storage."""
    if is_ragged(tensor):
        return 0, tensor.untyped_storage().nbytes()
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = begin + sum((int(length) - 1) * int(step) for length, step in steps)
    return begin * size, (last + 1) * size


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common."""
    if one is other or torch.strided not in (one.layout, other.layout):
        return one is other
    (begin, end), (begins, ends) = extent_of(one), extent_of(other)
    return begin < ends and begins < end


def overlapping(extents: Iterable[tuple[int, int, T]]) -> list[list[T]]:
    """Return the groups, of two or more, of what lies in each other, directly or by way of others.

    Args:
        extents: the first byte of each, the byte after its last, and what it is.
    """
    groups: list[list[T]] = []
    behind = -1
    for begin, end, found in sorted(extents, key=itemgetter(0)):
        if begin >= behind:
            groups.append([])
        groups[-1].append(found)
        behind = max(behind, end)
    return [group for group in groups if len(group) > 1]


def turning(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return what turns a tensor that is conjugated, or negated (``.imag`` of such a one is), where
    it is read into what its memory has, and back; ``None``: it is as in memory. Torch's negation
    without a copy has no public name."""
    if tensor.is_conj():
        return torch.conj
    return torch._neg_view if tensor.is_neg() else None


def memory_of(tensor: Tensor) -> int:
    """Return the same for tensors that share a storage; one without storage (sparse) is its own."""
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def holders_of(storage: torch.UntypedStorage) -> int:
    """How many have a storage in hand: tensors of it, and Python's own storage object. What is not
    Python's is in no public count."""
    return torch._C._storage_Use_Count(storage_id(storage))


def of_class_of(tensor: Tensor, data: Tensor) -> Tensor:
    """Data as a leaf of a tensor's class that needs grad if that one does.

    ``data.as_subclass`` makes a view: under ``no_grad`` one that cannot be written to in place
    where gradients are on.
    """
    made: Tensor = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    return made


swap_contents: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Swap the contents of two tensors, the objects staying who they are.

``torch.utils.swap_tensors`` is this and a refusal where there are weak references, for whoever keys
by them what was true of the old contents. An LSTM has some to its own parameters."""


def arguments_of_to(
    *args: Any, **kwargs: Any
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """The device, the dtype and the memory format among the arguments of ``Module.to``, which
    ``Module.to`` itself finds this way; ``None``: it is not there. To try them on a tensor would
    need the device, and would not tell a CPU that was asked for from none."""
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format


is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Whether autograd has a tensor as a view of another one, which cannot be detached in place."""
