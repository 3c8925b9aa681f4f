"""Save and restore the content of objects that hold no other objects: bytes, files in memory,
positions in others, arrays, memory of C, loggers' settings, states of random generators, the hooks
of tensors, and the classes that an abstract one knows.

Events and semaphores are left alone: another thread may have set one in the meantime.
"""

import abc
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
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.quasirandom import SobolEngine

from .._torch.graph import gradient_hooks, stepping_hooks
from .._torch.modes import without_torch_functions
from .._torch.tensors import FakeTensor, is_ragged, put_back, storage_of, version_of
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
        return ContentHolder(value, lambda: _settings(value), _set_up(value))
    if isinstance(value, io.IOBase):
        return ContentHolder(value, lambda: _position(value), lambda before: _seek(value, before))
    if isinstance(value, mmap.mmap):
        return _mapped(value)
    if isinstance(value, memoryview):
        return _viewed(value)
    if is_of_c(value) or _is_structure(value):
        return _memory_of_c(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    objects = value.copy() if value.dtype.hasobject else None  # whose addresses the bytes have

    def put(before: tuple[bytes, tuple[int, ...]]) -> None:
        content, shape = before
        if value.shape != shape:
            value.resize(shape, refcheck=False)
        kept = objects
        if kept is None:
            kept = numpy.frombuffer(content, value.dtype).reshape(shape)
        if value.flags.writeable:
            numpy.copyto(value, kept)

    return ContentHolder(value, lambda: (value.tobytes(), value.shape), put)


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


def _viewed(view: memoryview) -> ContentHolder | None:
    """Return a holder of the memory that a view shows, where it can be written."""
    try:
        if view.readonly or not view.c_contiguous or view.nbytes > _MOST_MAPPED:
            return None
    except ValueError:  # it was released
        return None
    shown = view.cast("B")
    return ContentHolder(view, shown.tobytes, functools.partial(shown.__setitem__, slice(None)))


def is_of_c(value: Any) -> bool:
    """Return whether a value is a number of C, or an array of them."""
    ctypes: Any = sys.modules.get("ctypes")
    if ctypes is None or not isinstance(value, ctypes.Array | ctypes._SimpleCData):
        return False
    return _has_numbers(type(value), ctypes)


def _is_structure(value: Any) -> bool:
    """Return whether a value is a structure of C that has numbers alone."""
    ctypes: Any = sys.modules.get("ctypes")
    if ctypes is None or not isinstance(value, ctypes.Structure | ctypes.Union):
        return False
    return _has_numbers(type(value), ctypes)


def _has_numbers(kind: Any, ctypes: Any) -> bool:
    """Return whether a class of ``ctypes`` has numbers alone, and no addresses."""
    if issubclass(kind, ctypes.Array):
        return _has_numbers(kind._type_, ctypes)
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return all(_has_numbers(field[1], ctypes) for field in fields)
    return issubclass(kind, ctypes._SimpleCData) and kind._type_ not in "PzZO"


def _memory_of_c(value: Any) -> ContentHolder:
    ctypes: Any = sys.modules["ctypes"]
    where, size = ctypes.addressof(value), ctypes.sizeof(value)
    get = functools.partial(ctypes.string_at, where, size)
    return ContentHolder(value, get, lambda before: ctypes.memmove(where, before, size))


def _settings(logger: logging.Logger) -> tuple[Any, ...]:
    switches = logger.level, logger.disabled, logger.propagate
    return *switches, [*logger.handlers], [*logger.filters]


def _set_up(logger: logging.Logger) -> Callable[[tuple[Any, ...]], None]:
    def put(before: tuple[Any, ...]) -> None:
        level, logger.disabled, logger.propagate, handlers, filters = before
        if logger.level != level:
            logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters

    return put


def kept_otherwise(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator, or ``None``."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, SobolEngine):
        return _kept_sequence(value)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        drawn = value.state
        return functools.partial(setattr, value, "state", drawn)
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, numpy.random.SeedSequence):
        return functools.partial(value.__setstate__, value.__reduce__()[2])  # how many it spawned
    return None


def _kept_sequence(engine: SobolEngine) -> Callable[[], None]:
    """Return a function that restores where a quasirandom sequence is."""
    before = dict(vars(engine))
    tensors = [one for one in before.values() if isinstance(one, Tensor)]
    values = [(one, one.detach().clone(), version_of(one)) for one in tensors]

    def restore() -> None:
        for value in values:
            put_back(*value)
        vars(engine).update(before)

    return restore


def kept_tensor(tensor: Tensor, *, values: bool) -> Callable[[], None] | None:
    """Return a function that gives a tensor its memory, shape and gradient of now again, which
    ``tensor.data = …``, ``tensor.unsqueeze_(0)`` and a backward change; ``None`` for one that has
    no memory.

    Args:
        tensor: the tensor.
        values: whether to save the values in its memory too.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    with without_torch_functions():
        kept = [
            _kept_memory(tensor),
            _kept_gradient(tensor) if tensor.is_leaf else None,
            _kept_value(tensor) if values else None,
        ]

    def restore() -> None:
        with without_torch_functions():
            for put in filter(None, kept):
                put()

    return restore


def _kept_memory(tensor: Tensor) -> Callable[[], None] | None:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_lazy(tensor):
        return None
    if tensor.layout is not torch.strided or is_ragged(tensor):
        return None
    before = tensor.detach()

    def restore() -> None:
        if not _is_view_alike(tensor, before):
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = before

    return restore


def _is_view_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same part of one memory."""
    if one.layout is not torch.strided or is_ragged(one) or storage_of(one) != storage_of(other):
        return False
    parts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return parts[0] == parts[1]


def _kept_value(tensor: Tensor) -> Callable[[], None]:
    return functools.partial(put_back, tensor, tensor.detach().clone(), version_of(tensor))


def _kept_gradient(leaf: Tensor) -> Callable[[], None]:
    is_trained, before = leaf.requires_grad, leaf.grad

    def restore() -> None:
        if leaf.grad is not before:
            leaf.grad = before
        if leaf.requires_grad != is_trained and leaf.is_leaf:
            leaf.requires_grad_(is_trained)

    return restore


def kept_hooks(tensor: Tensor) -> Callable[[], None] | None:
    """Return a function that removes the hooks which have come to a leaf, or ``None`` for other
    tensors: the graph of a recording has gone by then, and their hooks with it."""
    with without_torch_functions():
        if not (tensor.is_leaf and tensor.requires_grad):
            return None
        before = [(kind, dict(kind(tensor) or ())) for kind in (gradient_hooks, stepping_hooks)]

    def restore() -> None:
        with without_torch_functions():
            for kind, then in before:
                now: Any = kind(tensor)
                if now is not None and [*now] != [*then]:
                    now.clear()
                    now.update(then)

    return restore


def kept_registry(kind: Any) -> Callable[[], None] | None:
    """Return a function that restores which classes are registered with an abstract one; ``None``
    for other classes."""
    if not issubclass(type(kind), abc.ABCMeta):
        return None
    before = _registered_with(kind)

    def restore() -> None:
        if _registered_with(kind) != before:
            kind._abc_registry_clear()
            kind._abc_caches_clear()
            for other in before:
                kind.register(other)

    return restore


def _registered_with(kind: Any) -> list[type]:
    return [known for one in abc._get_dump(kind)[0] if (known := one()) is not None]  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator of the user's own, of Python or numpy, or one of
    torch's quasirandom sequences."""
    if isinstance(value, SobolEngine):
        return True
    if isinstance(value, random.Random):
        is_global = value is getattr(random.random, "__self__", None)
        return not is_global and not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    kinds = ("Generator", "RandomState", "BitGenerator")
    if numpy is None or not isinstance(value, tuple(getattr(numpy.random, k) for k in kinds)):
        return False
    return value is not getattr(numpy.random.rand, "__self__", None)


def is_seeds(value: Any) -> bool:
    """Return whether a value is a sequence of seeds of numpy's, which counts those that it has
    given."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.SeedSequence)


def behind_generator(value: Any, method: str) -> Any:
    """Return what a method of a random generator advances: the source of bits, which several
    generators may have; of a sequence of seeds itself only where it spawns; else ``None``."""
    if is_seeds(value):
        return value if method == "spawn" else None
    bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
    return value if bits is None else bits


def objects_in(value: Any) -> Iterable[Any]:
    """Return the objects in a numpy array of objects, the memory that an array is a view of, the
    seeds behind a numpy generator, which it spawns from, or the memory in an object of
    :mod:`multiprocessing`; nothing for other values."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    if shared is not None and isinstance(value, shared.SynchronizedBase):
        return [value.get_obj()]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    if isinstance(value, numpy.random.Generator | numpy.random.BitGenerator):
        source = getattr(value, "bit_generator", value)
        return [getattr(source, "seed_seq", None)]
    if not isinstance(value, numpy.ndarray):
        return ()
    members = [*value.flat] if value.dtype.hasobject else []
    base = value.base.obj if isinstance(value.base, memoryview) else value.base
    behind = [base] if isinstance(base, numpy.ndarray | bytearray | array) else []
    return [*behind, *(one.item() if isinstance(one, numpy.void) else one for one in members)]
