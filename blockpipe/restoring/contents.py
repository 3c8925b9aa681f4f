"""Save and restore the content of objects that hold no other objects: bytes, files in memory,
positions in others, arrays, memory of C, loggers' levels, states of random generators.

Events and semaphores are left alone: another thread may have set one in the meantime.
"""

import functools
import io
import logging
import mmap
import random
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .holders import ContentHolder

_MOST_MAPPED = 1 << 20  # bytes of a mapped file that are kept; a larger one is probably data


def content_of(value: Any) -> ContentHolder | None:
    """Return a holder of an object's content; ``None`` for objects of other classes."""
    if isinstance(value, bytearray | array):
        base: Any = bytearray if isinstance(value, bytearray) else array
        everything = slice(None)
        get = functools.partial(base.__getitem__, value, everything)
        return ContentHolder(value, get, functools.partial(base.__setitem__, value, everything))
    if isinstance(value, io.StringIO | io.BytesIO):
        return ContentHolder(value, lambda: _text(value), lambda before: _write(value, before))
    if isinstance(value, logging.Logger):
        return ContentHolder(value, lambda: (value.level, value.disabled), _set_level(value))
    if isinstance(value, io.IOBase):
        return ContentHolder(value, lambda: _position(value), lambda before: _seek(value, before))
    if isinstance(value, mmap.mmap):
        return _mapped(value)
    if is_of_c(value):
        return _memory_of_c(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return None

    def put(before: bytes) -> None:
        if value.flags.writeable:
            numpy.copyto(value, numpy.frombuffer(before, value.dtype).reshape(value.shape))

    return ContentHolder(value, value.tobytes, put)


def _text(file: io.StringIO | io.BytesIO) -> tuple[Any, int] | None:
    base: Any = io.StringIO if isinstance(file, io.StringIO) else io.BytesIO
    return None if file.closed else (base.getvalue(file), base.tell(file))


def _write(file: io.StringIO | io.BytesIO, before: tuple[Any, int] | None) -> None:
    base: Any = io.StringIO if isinstance(file, io.StringIO) else io.BytesIO
    if before is None or file.closed:
        return
    text, position = before
    if base.getvalue(file) != text:
        base.seek(file, 0)
        base.truncate(file)
        base.write(file, text)
    base.seek(file, position)


def _position(file: io.IOBase) -> tuple[str, int | None]:
    """Return where a file is read, as content that is empty."""
    try:
        return "", file.tell() if file.readable() else None
    except (OSError, ValueError):  # it has no positions, tells none while it is iterated, is closed
        return "", None


def _seek(file: io.IOBase, before: tuple[str, int | None]) -> None:
    if before[1] is not None and not file.closed:
        file.seek(before[1])


def _mapped(memory: mmap.mmap) -> ContentHolder | None:
    """Return a holder of mapped memory: its content if the forward may write to it, and where it is
    read."""
    if memory.closed:
        return None
    with memoryview(memory) as view:
        keeps = not view.readonly and len(view) <= _MOST_MAPPED

    def get() -> tuple[bytes, int]:
        return (memory[:] if keeps else b""), memory.tell()

    def put(before: tuple[bytes, int]) -> None:
        if keeps and memory[:] != before[0]:
            memory[:] = before[0]
        memory.seek(before[1])

    return ContentHolder(memory, get, put)


def is_of_c(value: Any) -> bool:
    """Return whether a value is a number of C, or an array of them."""
    ctypes: Any = sys.modules.get("ctypes")
    if ctypes is None or not isinstance(value, ctypes.Array | ctypes._SimpleCData):
        return False
    kind: Any = type(value)
    while issubclass(kind, ctypes.Array):
        kind = kind._type_
    return issubclass(kind, ctypes._SimpleCData) and kind._type_ not in "PzZO"  # no addresses


def _memory_of_c(value: Any) -> ContentHolder:
    ctypes: Any = sys.modules["ctypes"]
    where, size = ctypes.addressof(value), ctypes.sizeof(value)
    get = functools.partial(ctypes.string_at, where, size)
    return ContentHolder(value, get, lambda before: ctypes.memmove(where, before, size))


def _set_level(logger: logging.Logger) -> Callable[[tuple[int, bool]], None]:
    def put(before: tuple[int, bool]) -> None:
        logger.setLevel(before[0])
        logger.disabled = before[1]

    return put


def kept_otherwise(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator or an array of objects, or ``None``."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        before = value.copy()

        def restore() -> None:
            if value.flags.writeable:
                numpy.copyto(value, before)

        return restore
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        drawn = value.state
        return functools.partial(setattr, value, "state", drawn)
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    return None


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator of the user's own, of Python or numpy."""
    if isinstance(value, random.Random):
        is_global = value is getattr(random.random, "__self__", None)
        return not is_global and not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return False
    return value is not getattr(numpy.random.rand, "__self__", None)


def in_array(value: Any) -> Iterable[Any]:
    """Return the objects in a numpy array of objects; nothing for any other value."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype != object:
        return ()
    return [*value.flat]
