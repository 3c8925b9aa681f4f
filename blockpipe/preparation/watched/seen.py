"""Which part of a value is compared between steps.

A plain value is compared itself. A function counts by its code, and so does the class of a user's
object: ``net.activation = clipped`` and ``net.strategy = Distill()`` choose what runs. The values
of a tensor are data, but code may ask for its shape. Any other object is the same as long as it is
one object; another one is, if its content is.
"""

import contextvars
import enum
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.libraries import has_users_code, is_users
from ..._torch.tensors import strides_of
from ...restoring.holders import content_of_cell
from .contents import MOST_BYTES, Contents, is_data

MOST_IN_ORDER = 32  # of a list, a tuple or a set
UNSET = object()
_MOST_NESTED = 3  # functions in the closure of a function
_PLAIN = frozenset(
    [
        *(bool, int, float, complex, str, bytes, type(None), type(UNSET), range, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_BY_DATA = (contextvars.ContextVar, logging.Logger)
_LOOK = threading.local()


class Code(tuple[Any, ...]):
    """The code of a function, or of a user's object, or what else may be another one although the
    object is the same."""

    __slots__ = ()


class Described(Code):
    """What code may ask of a tensor or an array, beside its values.

    Attributes:
        one: the id of that which is described.
    """

    one: int


class Itself:
    """An object that is compared by what it is, and only then by its content."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Itself):
            return False
        return self.is_of(other) or self.content() == other.content()

    __hash__ = None  # type: ignore[assignment]

    def is_of(self, other: "Itself") -> bool:
        """Whether it is one object."""
        return other.value is self.value

    def content(self) -> Hashable:
        """Return its content."""
        return content(self.value)


class _ItselfWhileAlive(Itself):
    """The same of an object whose end runs code: it is not kept alive."""

    __slots__ = ("_content", "_object")

    def __init__(self, value: Any) -> None:
        self._object = weakref.ref(value)
        # Code under way is the same only as itself.
        self._content = object() if _is_of_code(type(value)) else content(value)

    @property
    def value(self) -> Any:
        return self._object()

    def is_of(self, other: Itself) -> bool:
        return self.value is not None and self.value is other.value

    def content(self) -> Hashable:
        return self._content


def _itself(value: Any) -> Itself:
    kind = type(value)
    is_of_code = _is_of_code(kind)
    ends = is_of_code or hasattr(kind, "__del__") or weakref.getweakrefcount(value) > 0
    can = is_of_code or (is_users(kind.__module__) and kind.__weakrefoffset__ != 0)
    return _ItselfWhileAlive(value) if ends and can else Itself(value)


def _is_of_code(kind: type) -> bool:
    """Whether such an object is code under way: a generator, or a context manager that has one."""
    return kind is types.GeneratorType or kind.__module__ == "contextlib"


def seen(value: Any, depth: int = 0) -> Any:
    """Return the part of a value that is compared."""
    if is_plain(value):
        return value
    kind = type(value)
    if is_data(value):
        return _described(value)
    if isinstance(value, nn.Module):
        return Itself(value)
    if kind in (staticmethod, classmethod):
        value, kind = value.__func__, type(value.__func__)
    if kind is property:
        return seen(value.fget, depth)
    if kind is types.MethodType:
        return Code((seen(value.__func__, depth), type(value.__self__), Itself(value.__self__)))
    if kind is functools.partial:
        return Code((kind, seen(value.func, depth), Itself(value)))
    if kind is types.FunctionType:
        return _function(value, depth)
    if kind is types.BuiltinFunctionType or isinstance(value, type):
        return Code((value,))
    if isinstance(value, contextvars.ContextVar):
        return Code((Itself(value), seen(value.get(UNSET), depth)))
    if isinstance(value, logging.Logger):
        return Code((Itself(value), value.level, value.disabled))
    if _is_of_code(kind) or is_users(kind.__module__):
        return Code((kind, _itself(value)))
    return Itself(value)


def _function(function: types.FunctionType, depth: int) -> Code:
    inner: Iterator[Any] = iter(())
    if function.__closure__ and depth < _MOST_NESTED:
        inner = (seen(content_of_cell(cell), depth + 1) for cell in function.__closure__)
    of_code = [code for code in inner if type(code) is Code]
    if not has_users_code(function):
        return Code((function.__code__, *of_code))
    given = [value for value in (function.__defaults__, function.__kwdefaults__) if value]
    held = [function, *given] if function.__closure__ else given
    return Code((function.__code__, *of_code, *map(Itself, held)))


def _described(data: Any) -> Described:
    if not isinstance(data, Tensor):
        described = Described((type(data), data.dtype.str, data.shape))
    else:
        shape = () if data.is_nested else (*data.shape,)
        how = strides_of(data), data.dtype, data.layout, data.requires_grad
        described = Described((type(data), shape, *how))
    described.one = id(data)
    return described


def is_tensors(one: Any) -> bool:
    """Return whether what is seen of a value is a tensor's."""
    return isinstance(one, Described) and issubclass(one[0], Tensor)


@contextmanager
def one_look() -> Iterator[None]:
    """Look into each object once while entered, in this thread: nothing changes meanwhile. The
    hooks of all parameters may lead to one object."""
    _LOOK.contents = dict[int, tuple[Any, Hashable]]()  # by the id of an object that is kept
    try:
        yield
    finally:
        del _LOOK.contents


def content(value: Any) -> Hashable:
    """Return the content of a container or an object, without the values of tensors."""
    known: dict[int, tuple[Any, Hashable]] = getattr(_LOOK, "contents", {})
    if id(value) not in known:
        known[id(value)] = value, Contents(None, data=_described).of(value)
    return known[id(value)][1]


def content_beside_tensors(value: Any) -> Hashable:
    """Return the content of a value, in which a tensor is a tensor, and an array its values."""
    return Contents(None, data=_alone).of(value)


def _alone(data: Any) -> Hashable:
    if isinstance(data, Tensor):
        return type(data), data.is_meta
    return str(data.dtype), data.shape, data.tobytes() if data.nbytes <= MOST_BYTES else id(data)


def is_plain(value: Any) -> bool:
    """Whether a value is compared itself: a number, a text, and the like, or a tuple of them."""
    if type(value) in _PLAIN or isinstance(value, enum.Enum) or _is_numpys(value):
        return True
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    is_in_order = type(value) in (tuple, frozenset) and len(value) <= MOST_IN_ORDER
    return is_in_order and all(map(is_plain, value))


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to code that reads them: 1 is no True."""
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is tuple:
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def is_object_of_before(one: Any, other: Any) -> bool:
    """Whether what two values are seen of is one object."""
    if isinstance(one, Itself) and isinstance(other, Itself):
        return one.is_of(other)
    if isinstance(one, Described) and isinstance(other, Described):
        return one.one == other.one
    return is_same(one, other)


def label(value: Any) -> Hashable:
    """Return the part of a key for what is seen of a value, without the content of objects. For a
    number that is its type: comparisons do the rest."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(label, value))
    if kind is slice:
        return kind, label(value.start), label(value.stop), label(value.step)
    if kind is Code:
        parts = (Itself if isinstance(part, Itself) else part for part in value)
        return kind, tuple(label(part) if type(part) is Code else part for part in parts)
    if isinstance(value, Itself):
        return (kind,)
    is_known = kind is Described or (kind not in (int, float) and is_plain(value))
    return (kind, value) if is_known else (kind,)
