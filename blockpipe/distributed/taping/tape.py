"""A tape: what the glue of a forward does, as data that can be run again.

One entry is one call: of a torch function, or of a module as a whole, which the tape knows nothing
more of. Its arguments refer to values that earlier entries made, to the model's parameters and
buffers by name, or are plain Python values. A list of such calls was chosen over ``torch.fx``,
because a module's inside has no place on it: it stays Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._common.nested import leaves

REMEDY = "move it into a module that stays on one stage, whose inside is Python as ever"
"""What errors advise for code that a tape cannot hold."""


class Reference:
    """What stands in an argument for something that each run has anew. No dataclass: those are
    containers, and this is a leaf."""

    __slots__ = ()

    def __repr__(self) -> str:
        return type(self).__name__


class Value(Reference):
    """A tensor that the forward was given or made, by its number."""

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
        kwargs: its keyword arguments, the same.
        results: for each tensor in its result, the value that it is; ``None``: it was there before.
        hop: the hop that it runs on.
        where: the user's line.
        grad: whether gradients are on, where they are on around the forward.
        autocast: the state of autocast; ``None``: the same as around the forward.
        has_hooks: whether the user's hooks around the module's forward have entries of their own.
        writes: the values among its arguments that it writes to in place.
        shapes: of a module's results, where something inside of it has a size that depends on
            data: theirs must not, for the glue has seen them.
        checkpoint: whether a mark asks for recomputation; ``None``: it says nothing.
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
    checkpoint: bool | None = None

    @property
    def name(self) -> str:
        """What is called, in words."""
        if self.module is not None:
            return f"module {self.module or '(the model)'!r}"
        return getattr(self.function, "__qualname__", None) or repr(self.function)


@dataclass(frozen=True)
class Meta:
    """What the receiver of a tensor has to know of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """What a tensor is now."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def example(self, device: Any = "meta") -> Tensor:
        """A tensor like it, without values."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad
        )


@dataclass
class Tape:
    """What one forward does.

    Attributes:
        route: the stage of each hop.
        inputs: the forward's arguments, ``(args, kwargs)``, with references in the place of
            tensors.
        output: its result, the same.
        entries: its calls, in order.
        made: by value, the hop that made it; ``-1``: it is an argument.
        metas: by hop and value, what the value was when the hop began; the last one, beyond the
            hops: when the forward was over.
        storages: by value, which storage it has.
        unsized: values whose sizes depend on data.
        grad: whether gradients were on around the forward.
    """

    route: list[int]
    inputs: Any
    output: Any = None
    entries: list[Entry] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    metas: list[dict[int, Meta]] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    unsized: dict[int, str] = field(default_factory=dict)
    grad: bool = True


def references(value: Any) -> Iterator[Reference]:
    """Yield the references in an argument, in order."""
    for leaf in leaves(value):
        if isinstance(leaf, Slice):
            yield from references(leaf.parts)
        elif isinstance(leaf, Reference):
            yield leaf
