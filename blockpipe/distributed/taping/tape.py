"""The data of a tape: the calls of a forward's glue, which can be replayed.

One entry is one call, either of a torch function or of a whole module, whose inside the tape does
not know. Its arguments are references to values that earlier entries made, references to the
model's parameters and buffers by name, or plain Python values. A list of such calls was chosen over
``torch.fx``, because the inside of a module stays Python.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.nested import leaves
from ..._torch.tensors import memory_of
from ...errors import RecordingError, RouteError

REMEDY = "move it into a module that stays on one stage, whose inside is Python as ever"
"""The remedy in errors about code that a tape cannot hold."""

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])


class Reference:
    """A placeholder in an argument for a value that each run makes anew. It is no dataclass,
    because dataclasses count as containers and this is a leaf."""

    __slots__ = ()

    def __repr__(self) -> str:
        return type(self).__name__


class Value(Reference):
    """A tensor that is an argument of the forward or was made by it, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


class Held(Reference):
    """A parameter or buffer, by its first name in the model."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Outside(Reference):
    """A tensor of the user's that no module registered: the object itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class StageDevice(Reference):
    """The device that a stage is on, where the glue asked a tensor for its own."""

    __slots__ = ()


class Slice(Reference):
    """A slice with references in it."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Any, Any, Any]) -> None:
        self.parts = parts


Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: its name, whether autocast is on there, and to which dtype."""


@dataclass
class Entry:
    """One call.

    Attributes:
        function: the function; ``None``: a module is called.
        module: the path of the module that is called.
        args: its positional arguments, with references in the place of tensors.
        kwargs: its keyword arguments, likewise.
        results: for each tensor in its result, its value; ``None`` if it existed before.
        hop: the hop that it runs on.
        where: the user's line.
        grad: whether gradients are on, if they are on around the forward.
        autocast: the state of autocast; ``None`` if it is the same as around the forward.
        has_hooks: whether the user's hooks around the module's forward have entries of their own.
        writes: the values among its arguments that it writes to in place.
        shapes: the shapes of a module's results, if a size inside of it depends on data. Those of
            the results must not, because the glue has seen them.
        answer: the answer that the forward got when it asked for a bool of its arguments, or for a
            size that follows from them.
        checkpoint: whether a mark asks for recomputation; ``None``: it says nothing.
        plain: the plain values that a module has returned beside tensors. Code between modules has
            them as constants.
    """

    function: Callable[..., Any] | None
    module: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    hop: int
    where: str
    grad: bool = True
    autocast: Autocast | None = None
    has_hooks: bool = False
    writes: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] | None = None
    answer: bool | int | torch.Size | None = None
    checkpoint: bool | None = None
    plain: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the function or module that is called."""
        if self.module is not None:
            return f"module {self.module or '(the model)'!r}"
        return getattr(self.function, "__qualname__", None) or repr(self.function)


def size_question(value: int, answer: int | torch.Size, hop: int, where: str, *dim: int) -> Entry:
    """Return an entry that asks for a value's size again, or for that of one dim."""
    return Entry(Tensor.size, None, (Value(value), *dim), {}, [], hop, where, answer=answer)


@dataclass(frozen=True)
class Meta:
    """The shape, dtype and gradient flag of a tensor, for its receiver.

    Attributes:
        order: its dims as they are in memory, if they are in another order there, as with
            ``channels_last``; ``None``: as in its shape, or with gaps.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return a tensor's present metadata."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _order_of(tensor))

    def sent(self) -> Meta:
        """Return the metadata of the tensor as it is sent, whose dims are in memory's order."""
        order = self.order or range(len(self.shape))
        return Meta(tuple(self.shape[dim] for dim in order), self.dtype, self.requires_grad)

    def example(self, device: Any = "meta") -> Tensor:
        """Return a tensor like it, without values."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad
        )


def _order_of(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    strides, size = tensor.stride(), 1
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != size:
            return None
        size *= tensor.shape[dim]
    return tuple(order)


View = tuple[int, tuple[int, ...], tuple[int, ...]]


def view_of(tensor: Tensor) -> View | None:
    """Return where in its storage a tensor is."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def place_of(tensor: Tensor) -> Hashable:
    """Return what two tensors have in common that are the same elements of the same memory."""
    view = view_of(tensor)
    return id(tensor) if view is None else (memory_of(tensor), tensor.dtype, view)


def check_is_one(first: Tensor, second: Tensor) -> None:
    """Refuse two arguments that were one tensor when the tape was made, and are two now."""
    if first is not second and place_of(first) != place_of(second):
        raise RouteError(
            "expected one tensor for two arguments, as when the stage was built, got two "
            f"({users_line()}); build it from a sample whose arguments are different tensors"
        )


def plain_values(result: Any) -> list[Any]:
    """Return the numbers and texts that a module returns beside tensors, and where it has none."""
    if isinstance(result, Tensor):
        return []
    return [leaf for leaf in leaves(result) if type(leaf) in _PLAIN]


def no_argument(value: Any) -> RecordingError:
    """Return the error for an argument that is neither a tensor nor a plain value."""
    kind = type(value).__name__
    fix = "pass tensors and plain values"
    if isinstance(value, nn.Module):
        fix = "call it there, and recompute it by the pipeline's checkpoint="
    elif "cache" in kind.lower():
        fix = "leave it out (use_cache=False, for a cache of keys and values)"
    elif kind == "ndarray":
        fix = "register it as a buffer"
    return RecordingError(
        f"expected tensors and plain values as arguments between modules, got {kind} "
        f"({users_line()}), which would be the same object for every micro-batch; {fix}, or "
        f"{REMEDY}"
    )


def no_result(maker: str | None) -> RecordingError:
    """Return the error for a tensor that no call of code between modules has returned."""
    by, fix = f"that {maker!r} made", "return it"
    if maker is None:
        by = "that no operation returned (as what torch.vmap and torch.func.grad return)"
        fix = f"return it, or {REMEDY}"
    return RecordingError(
        f"expected tensors that calls return, got one {by} ({users_line()}), read as a state of "
        f"something else; {fix}"
    )


@dataclass
class Tape:
    """The calls of one forward.

    Attributes:
        route: the stage of each hop.
        inputs: the forward's arguments, ``(args, kwargs)``, with references in the place of
            tensors.
        output: its result, the same.
        entries: its calls, in order.
        made: the hop that made each value; ``-1`` for an argument.
        metas: for each hop, the metadata of all values at its beginning; the entry after the last
            hop has them at the end of the forward.
        storages: the storage of each value.
        views: where in it each one is: its offset, shape and strides; ``None``: unknown.
        unsized: values whose sizes depend on data, with the line that made each.
        sized: values whose sizes depend on the data of the forward's arguments alone, likewise.
        grad: whether gradients were on around the forward.
        names: the names that the glue's code mentions; ``None``: it may read any.
    """

    route: list[int]
    inputs: Any
    output: Any = None
    entries: list[Entry] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    metas: list[dict[int, Meta]] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    views: list[View | None] = field(default_factory=list)
    unsized: dict[int, str] = field(default_factory=dict)
    sized: dict[int, str] = field(default_factory=dict)
    grad: bool = True
    names: frozenset[str] | None = None


def references(value: Any) -> Iterator[Reference]:
    """Yield the references in an argument, in order."""
    for leaf in leaves(value):
        if isinstance(leaf, Slice):
            yield from references(leaf.parts)
        elif isinstance(leaf, Reference):
            yield leaf


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, those in slices too."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from tensors_in((leaf.start, leaf.stop, leaf.step))
