"""Tensors that belong to no micro-batch: tables that a forward makes of constants, and keeps.

A causal mask in a ``functools.lru_cache``, rotary tables that a module makes at its first call: the
micro-batch that makes one is not the only one that reads it. It is computed from no input, so that
any micro-batch may read it on any hop, provided that it is made once. One that every micro-batch
makes anew and leaves on ``self`` may differ with a number of Python's that it is made of, and then
it matters whose is read. Both are made by the same operation at the same place in the code, so what
is made there meanwhile tells them apart: in the plain loop a micro-batch reads what was made last,
unless tables for several sizes are kept. So nothing else may be made between the one that is read
and its reader, in the order of micro-batches.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._torch.tensors import shape_of, strides_of, version_of
from ..devices.copies import carry
from ..devices.ownership import copying
from ..errors import StateError

_CPU = torch.device("cpu")
_WRITTEN = "_blockpipe_written"
# What shares memory with an object that no torch operation writes to.
_BORROWED = frozenset(
    getattr(torch, name)
    for name in ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")
)


def makes_constants(function: Callable[..., Any]) -> bool:
    """Return whether a torch function makes a constant where nothing of a micro-batch's is given to
    it."""
    return function not in _BORROWED


def writes(function: Callable[..., Any]) -> bool:
    """Return whether a torch function's name says that it writes to its first argument."""
    name = function.__name__
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def note_write(tensor: Tensor) -> None:
    """Note a write to a tensor of inference mode, which counts none itself, on its memory."""
    if tensor.is_inference() and tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), _WRITTEN, True)


def is_written(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor of inference mode was written to, through any view."""
    return tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), _WRITTEN)


class Maker(Protocol):
    """A micro-batch of a step."""

    @property
    def step(self) -> int:
        """The number of the step."""

    @property
    def microbatch(self) -> int:
        """Its index."""


@dataclass
class _Shared:
    """A constant that others than its maker have read."""

    tensor: Tensor
    maker: Maker
    version: int
    reader: Maker  # the last one


@dataclass(frozen=True)
class _Asked:
    """What others than the maker of a constant have asked about it, such as its size."""

    about: Hashable
    maker: Maker
    reader: Maker


class Constants:
    """The constants that one step makes, and those that several micro-batches of it read.

    What makes a constant is its *site*; who makes it, its *maker*, is a micro-batch of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, list[tuple[weakref.ref[Tensor], Maker, Hashable]]] = {}
        self._shared: dict[Hashable, list[_Shared]] = {}
        self._asked: dict[Hashable, set[_Asked]] = {}

    def made(self, tensor: Tensor, site: Hashable, maker: Maker) -> None:
        """Note that a micro-batch has made a constant.

        Raises:
            StateError: another one's was read in its place, and is not the same.
        """
        about = _about(tensor)
        with self._lock:
            self._made.setdefault(site, []).append((weakref.ref(tensor), maker, about))
            shared, asked = list(self._shared.get(site, ())), list(self._asked.get(site, ()))
        for one in asked:
            if one.about != about and _is_between(one.maker, maker, one.reader):
                raise _error(tensor)
        for other in shared:
            comes_between = _is_between(other.maker, maker, other.reader)
            if comes_between and not _is_same(other.tensor, tensor):
                raise _error(tensor)

    def read(self, tensor: Tensor, site: Hashable, maker: Maker, reader: Maker) -> bool:
        """Return whether a micro-batch that did not make a constant may read it, because nothing
        else has been made at the same place since."""
        with self._lock:
            made = list(self._made.get(site, ()))
            shared = self._shared.setdefault(site, [])
            known = next((other for other in shared if other.tensor is tensor), None)
            if known is None:
                shared.append(_Shared(tensor, maker, version_of(tensor), reader))
            else:
                known.reader = max(known.reader, reader, key=_order)
        makers = [other for _, other, _ in made]
        if _order(maker) > _order(reader) and not any(_order(m) <= _order(reader) for m in makers):
            return False  # one from before the step should be there
        between = (ref for ref, other, _ in made if _is_between(maker, other, reader))
        return all(_is_one(ref, tensor) for ref in between)

    def asks(self, tensor: Tensor, site: Hashable, maker: Maker, reader: Maker) -> bool:
        """Return whether a micro-batch that did not make a constant may ask for its size or type,
        because all that was made at the same place since has the same."""
        about = _about(tensor)
        with self._lock:
            made = list(self._made.get(site, ()))
            self._asked.setdefault(site, set()).add(_Asked(about, maker, reader))
        if _order(maker) > _order(reader) and not any(other is reader for _, other, _ in made):
            return False  # its own was made elsewhere
        return all(its == about for _, other, its in made if _is_between(maker, other, reader))

    def check(self) -> None:
        """Raise :class:`StateError` if a constant was written in place after others had read it."""
        for shared in self._shared.values():
            for other in shared:
                if version_of(other.tensor) != other.version:
                    raise _error(other.tensor)


def _error(tensor: Tensor) -> StateError:
    return StateError(
        "expected a table that is made once and read by all micro-batches, got one of shape "
        f"{shape_of(tensor)} that a micro-batch made anew with other values, or wrote to, while "
        f"others read it ({users_line()}): which values they read would depend on timing; pass "
        "it along, or keep it in a local variable"
    )


def _order(maker: Maker) -> tuple[int, int]:
    return maker.step, maker.microbatch


def _is_between(maker: Maker, other: Maker, reader: Maker) -> bool:
    """Whether another micro-batch comes after a maker, and not after the reader. If the reader is
    before the maker, all others do."""
    if _order(maker) > _order(reader):
        return other is not maker
    return _order(maker) < _order(other) <= _order(reader)


def _about(tensor: Tensor) -> Hashable:
    return shape_of(tensor), strides_of(tensor), tensor.dtype, tensor.layout


def _is_one(ref: weakref.ref[Tensor], tensor: Tensor) -> bool:
    other = ref()
    return other is not None and _is_same(other, tensor)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.requires_grad or other.requires_grad:
        return False  # each gets its own gradient
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with copying(), torch.no_grad():
        return torch.equal(carry(one, _CPU), carry(other, _CPU))
