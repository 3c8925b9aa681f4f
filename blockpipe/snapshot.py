"""What a recording changes, put back: all state that can be reached from the model's modules.

A forward counts, caches and draws; a recording must leave no trace of that, nor fake tensors which
the next real call would read. What is kept is found by walking: attributes and slots of the user's
objects and of their classes, containers in containers, what functions hold in their closures and
read from their modules, generators, arrays. Only
what has changed is put back, and by the methods of the built-in classes, for a subclass may refuse
its own (a frozen dictionary) or do more in them.
"""

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

MOST_OBJECTS = 200_000  # a trainer may be in reach, and with it a data set
_NO_STATE = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
# Objects of these packages are no state of a forward's: locks, handlers, our own marks.
_FOREIGN = (
    *(f"{name}." for name in ("torch", "threading", "logging", "multiprocessing", "concurrent")),
    *(f"{name}." for name in ("asyncio", "_io", __name__.partition(".")[0])),
)
_UNSET = object()
# What puts one object back, and what to look at next.
Kept = tuple[Callable[[], object] | None, Iterable[Any]]


class ModelState:
    """What a model's modules hold, however deep, to be put back.

    Args:
        model: whose modules.
        values: the values of tensors too, but for those of parameters (:class:`WritesUndone`).
    """

    def __init__(self, model: nn.Module, *, values: bool) -> None:
        self._values = values
        self._restores: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # alive, so that no other object gets its id
        level: list[Any] = list(model.modules())
        while level:  # what is near comes first
            level = [found for value in level for found in self._look_at(value)]

    def objects(self) -> Iterable[Any]:
        """All that was found, what is near first."""
        return self._seen.values()

    def restore(self) -> None:
        """Put everything back, in place."""
        for restore in self._restores:
            restore()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *failure: object) -> None:
        self.restore()

    def _look_at(self, value: Any) -> Iterable[Any]:
        if isinstance(value, _NO_STATE) or id(value) in self._seen:
            return ()
        kind = type(value)
        if id(kind) not in self._seen and is_users(kind.__module__):
            self._seen[id(kind)] = kind
            restore, found = _kept_class(kind)
            if restore is not None:
                self._restores.append(restore)
            return (*found, *self._look_at(value))
        if len(self._seen) >= MOST_OBJECTS:
            return ()
        self._seen[id(value)] = value
        restore, found = self._kept(value)
        if restore is not None:
            self._restores.append(restore)
        return found

    def _kept(self, value: Any) -> Kept:
        if isinstance(value, Tensor):
            return self._kept_tensor(value), ()
        if isinstance(value, dict):
            return _kept_dict(value)
        if isinstance(value, list | deque):
            return _kept_sequence(value)
        if isinstance(value, set):
            return _kept_set(value)
        if isinstance(value, tuple | frozenset):
            return None, value
        if isinstance(value, torch.Generator):
            return functools.partial(value.set_state, value.get_state()), ()
        if isinstance(value, random.SystemRandom):
            return None, ()
        if isinstance(value, random.Random):
            return functools.partial(value.setstate, value.getstate()), ()
        if type(value).__module__.partition(".")[0] == "numpy":
            return _kept_of_numpy(value), ()
        if isinstance(value, types.FunctionType):
            return _kept_function(value)
        if isinstance(value, types.MethodType):
            return None, (value.__self__, value.__func__)
        if isinstance(value, functools.partial):
            return None, (value.func, value.args, value.keywords)
        return _kept_object(value)

    def _kept_tensor(self, tensor: Tensor) -> Callable[[], None] | None:
        if not self._values or isinstance(tensor, nn.Parameter) or tensor.is_meta:
            return None
        before = tensor.detach().clone()

        def restore() -> None:
            with torch.no_grad():
                tensor.detach().copy_(before)

        return restore


def _kept_dict(value: dict[Any, Any]) -> Kept:
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def items() -> list[tuple[Any, Any]]:
        return [(key, dict.__getitem__(value, key)) for key in base.__iter__(value)]

    before = items()

    def restore() -> None:
        if not _are_same(before, items()):
            base.clear(value)
            for key, member in before:
                base.__setitem__(value, key, member)

    return restore, (member for _, member in before)


def _are_same(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    return len(one) == len(other) and all(
        a[0] is b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True)
    )


def _kept_sequence(value: Any) -> Kept:
    base: Any = list if isinstance(value, list) else deque
    before = list(base.__iter__(value))

    def restore() -> None:
        now = list(base.__iter__(value))
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            base.clear(value)
            base.extend(value, before)

    return restore, before


def _kept_set(value: set[Any]) -> Kept:
    before = list(set.__iter__(value))

    def restore() -> None:
        if {id(member) for member in set.__iter__(value)} != {id(member) for member in before}:
            set.clear(value)
            set.update(value, before)

    return restore, before


def _kept_of_numpy(value: Any) -> Callable[[], object] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
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


def _kept_function(function: types.FunctionType) -> Kept:
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]

    around = function.__globals__
    read = read_globally(function.__code__) if is_users(function.__module__) else ()
    before = [(name, around[name]) for name in read if name in around]

    def restore() -> None:
        for cell, content in cells:
            if content is not _UNSET and _content(cell) is not content:
                cell.cell_contents = content
        for name, value in before:
            if around.get(name, _UNSET) is not value:
                around[name] = value

    held = [content for _, content in cells if content is not _UNSET]
    more = (function.__dict__, function.__defaults__, function.__kwdefaults__)
    return restore, [*held, *more, *(value for _, value in before)]


def read_globally(code: types.CodeType) -> Iterator[str]:
    """Names that a function may read from its module, or set there."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from read_globally(inner)


@functools.cache
def is_users(module: str | None) -> bool:
    """Whether a module is the user's own: what installed packages keep there is theirs."""
    package = (module or "").partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return not is_installed and not f"{module}.".startswith(_FOREIGN)


def _kept_class(kind: type) -> Kept:
    """What a class holds for all of its objects, and what its functions read."""
    kinds = [base for base in kind.__mro__ if is_users(base.__module__)]
    before = [
        (base, name, member)
        for base in kinds
        for name, member in vars(base).items()
        if not name.startswith("__")
    ]

    def restore() -> None:
        for base, name, member in before:
            if vars(base).get(name, _UNSET) is not member:
                type.__setattr__(base, name, member)

    unwrapped = (
        member.__func__ if isinstance(member, staticmethod | classmethod) else member
        for _, _, member in before
    )
    plain = (dict, list, set, deque, Tensor, types.FunctionType)
    return restore, [member for member in unwrapped if isinstance(member, plain)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET


def _kept_object(value: Any) -> Kept:
    """Of the user's own class, or a module."""
    if f"{type(value).__module__}.".startswith(_FOREIGN) and not isinstance(value, nn.Module):
        return None, ()
    slots = [(slot, _slot(slot, value)) for slot in _slots_of(type(value))]

    def restore() -> None:
        for slot, before in slots:
            if _slot(slot, value) is not before:
                if before is _UNSET:
                    slot.__delete__(value)
                else:
                    slot.__set__(value, before)

    held = [content for _, content in slots if content is not _UNSET]
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    found = [attributes, *held] if isinstance(attributes, dict) else held
    return (restore if slots else None), found


def _slots_of(kind: type) -> tuple[Any, ...]:
    """What sets each slot, whatever the class makes of ``__setattr__``."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return tuple(m for m in members if isinstance(m, types.MemberDescriptorType))


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


class _Undone(TorchDispatchMode):
    """While entered, the watched tensors may be written to; then they are as before.

    A copy is made of what is written, before it is: a forward that writes to none of them needs no
    memory for it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def watched(self, tensor: Tensor) -> Tensor | None:
        """What to make a copy of before a tensor is written to."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                self._keep(argument, value)
            for argument in func._schema.arguments[len(args) :]:
                self._keep(argument, kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _keep(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            watched = self.watched(tensor)
            if watched is not None:
                with unset_fake_temporarily():
                    self._copies.append((watched, watched.detach().clone()))

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        with unset_fake_temporarily(), torch.no_grad():
            for tensor, value in reversed(self._copies):
                tensor.detach().copy_(value)


class RealWritesUndone(_Undone):
    """Undoes the writes to real tensors of a forward on fake ones: torch computes some operations
    on them in place even then (``self.count += 1``, where ``count`` is a plain attribute)."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[Any, ...]] = set()

    def watched(self, tensor: Tensor) -> Tensor | None:
        """A tensor that is not fake, once."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return None
        key = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        if key in self._seen:
            return None
        self._seen.add(key)
        return tensor


class WritesUndone(_Undone):
    """Undoes the writes to parameters and to their gradients.

    Args:
        model: whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = [(p, p.data, p.grad) for p in model.parameters()]
        self._watched = {
            _storage(tensor): tensor
            for tensor in self._tensors()
            if tensor.layout is torch.strided and not tensor.is_meta
        }

    def _tensors(self) -> Iterator[Tensor]:
        for parameter, data, gradient in self._parameters:
            if not parameter.is_inference():
                yield data
            if gradient is not None:
                yield gradient

    def watched(self, tensor: Tensor) -> Tensor | None:
        """The parameter, or the gradient, that a tensor is a view of; once."""
        return self._watched.pop(_storage(tensor), None)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for parameter, data, gradient in self._parameters:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            parameter.grad = gradient


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
