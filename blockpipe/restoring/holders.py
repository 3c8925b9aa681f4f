"""What holds other objects by name or place: containers, classes, functions, modules, slots; and
what can be changed without holding any.

Each is put back in place, only where it has changed, and by the methods of the built-in classes: a
subclass may refuse its own (a frozen dictionary) or do more in them.
"""

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from .iterators import StandIns

_UNSET = object()
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # of a function


class Holder:
    """What an object held when this was made.

    Args:
        owner: the object, as the user's code knows it.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.before = self.now()

    def now(self) -> list[tuple[Any, Any]]:
        """What it holds: keys and values."""
        raise NotImplementedError

    def namespace(self) -> Any:
        """What its keys can be looked up in at once; ``None``: in nothing."""
        return None

    def put(self, key: Any, value: Any) -> None:
        """Make it hold another value under a key, or nothing any more (``_UNSET``)."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make it hold what it did."""
        now = dict(self.now())
        for key in now.keys() - dict(self.before).keys():
            self.put(key, _UNSET)
        for key, value in self.before:
            if now.get(key, _UNSET) is not value:
                self.put(key, value)

    def lend(self, stand_ins: StandIns) -> None:
        """Put copies in the place of iterators, until it is restored."""
        for key, value in self.before:
            stand_in = stand_ins.of(value)
            if stand_in is not value:
                self.put(key, stand_in)


class DictHolder(Holder):
    """A dictionary: also its keys and their order.

    Args:
        value: the dictionary.
        owner: the object whose attributes are in it, if it is such a one.
    """

    def __init__(self, value: dict[Any, Any], owner: Any = None) -> None:
        self._value = value
        self._base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        super().__init__(value if owner is None else owner)

    def namespace(self) -> Mapping[Any, Any]:
        return self._value

    def now(self) -> list[tuple[Any, Any]]:
        value = self._value
        return [(key, dict.__getitem__(value, key)) for key in self._base.__iter__(value)]

    def put(self, key: Any, value: Any) -> None:
        self._base.__setitem__(self._value, key, value)

    def restore(self) -> None:
        now, before = self.now(), self.before
        if len(now) != len(before) or any(
            a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, before, strict=True)
        ):
            self._base.clear(self._value)
            for key, member in before:
                self.put(key, member)


class SequenceHolder(Holder):
    """A list or a deque."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._base: Any = list if isinstance(value, list) else deque
        super().__init__(value)

    def namespace(self) -> Any:
        return self._value

    def now(self) -> list[tuple[Any, Any]]:
        return list(enumerate(self._base.__iter__(self._value)))

    def put(self, key: Any, value: Any) -> None:
        self._base.__setitem__(self._value, key, value)

    def restore(self) -> None:
        now, before = self.now(), self.before
        if len(now) != len(before) or any(
            a is not b for (_, a), (_, b) in zip(now, before, strict=True)
        ):
            self._base.clear(self._value)
            self._base.extend(self._value, [member for _, member in before])


class SetHolder(Holder):
    """A set."""

    def __init__(self, value: set[Any]) -> None:
        self._value = value
        super().__init__(value)

    def now(self) -> list[tuple[Any, Any]]:
        return [(id(member), member) for member in set.__iter__(self._value)]

    def restore(self) -> None:
        if dict(self.now()).keys() != dict(self.before).keys():
            set.clear(self._value)
            set.update(self._value, [member for _, member in self.before])

    def lend(self, stand_ins: StandIns) -> None:
        """Nobody advances what he has no name for."""


class CacheHolder(Holder):
    """The results that a ``functools.lru_cache`` keeps: the user's code may change one of them. The
    cache itself stays as it is."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        super().__init__(cache)

    def now(self) -> list[tuple[Any, Any]]:
        is_unbounded = self._cache.cache_parameters()["maxsize"] is None
        found: list[Any] = []
        for held in gc.get_referents(self._cache):
            if type(held) is not dict or held is self._cache.__dict__:
                found.append(held)  # a result, or an argument
            elif is_unbounded:  # the cache's own dictionary, of all results
                found += held.values()
            elif held and "_lru_list_elem" not in {type(value).__name__ for value in held.values()}:
                found.append(held)
        return list(enumerate(found))

    def restore(self) -> None:
        """Only time would be lost, or gained."""

    def lend(self, stand_ins: StandIns) -> None:
        """A copy of an iterator would stay in the cache."""


class ContentHolder(Holder):
    """What holds no other objects: bytes, a file in memory, an array, the level of a logger.

    Args:
        owner: the object.
        get: gives what is in it.
        put: puts that back.
    """

    def __init__(self, owner: Any, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put
        super().__init__(owner)

    def now(self) -> list[tuple[Any, Any]]:
        return [(None, self._get())]

    def restore(self) -> None:
        ((_, before),) = self.before
        if self._get() != before:
            self._put(before)

    def lend(self, stand_ins: StandIns) -> None:
        """There is no iterator in it."""


class ClassHolder(Holder):
    """A class's own attributes, whatever its metaclass makes of ``__setattr__``."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        super().__init__(kind)

    def namespace(self) -> Mapping[str, Any]:
        return vars(self._kind)

    def now(self) -> list[tuple[Any, Any]]:
        return [(n, value) for n, value in vars(self._kind).items() if not n.startswith("__")]

    def put(self, key: str, value: Any) -> None:
        if value is _UNSET:
            type.__delattr__(self._kind, key)
        else:
            type.__setattr__(self._kind, key, value)


class NamesHolder(Holder):
    """Names of a module that a function reads. A module that was imported in the meantime stays."""

    def __init__(
        self, names: dict[str, Any], read: frozenset[str], function: types.FunctionType
    ) -> None:
        self._names, self._read = names, read
        super().__init__(function)

    def namespace(self) -> Mapping[str, Any]:
        return self._names

    def now(self) -> list[tuple[Any, Any]]:
        return [(name, self._names[name]) for name in self._read if name in self._names]

    def put(self, key: str, value: Any) -> None:
        if value is not _UNSET:
            self._names[key] = value
        elif not isinstance(self._names[key], types.ModuleType):
            del self._names[key]


class FunctionHolder(Holder):
    """A function's default arguments, and what is in its closure."""

    def __init__(self, function: types.FunctionType) -> None:
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._function, self._cells = function, dict(zip(names, cells, strict=True))
        super().__init__(function)

    def now(self) -> list[tuple[Any, Any]]:
        contents = [(name, content_of_cell(cell)) for name, cell in self._cells.items()]
        held = [(name, content) for name, content in contents if content is not _UNSET]
        return [*((name, getattr(self._function, name)) for name in _DEFAULTS), *held]

    def put(self, key: str, value: Any) -> None:
        if key in _DEFAULTS:
            setattr(self._function, key, value)
        elif value is _UNSET:
            del self._cells[key].cell_contents
        else:
            self._cells[key].cell_contents = value


def content_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET


class SlotsHolder(Holder):
    """An object's slots, whatever its class makes of ``__setattr__``."""

    def __init__(self, value: Any, slots: tuple[types.MemberDescriptorType, ...]) -> None:
        self._value, self._slots = value, slots
        super().__init__(value)

    def now(self) -> list[tuple[Any, Any]]:
        contents = [(slot, _slot(slot, self._value)) for slot in self._slots]
        return [(slot, content) for slot, content in contents if content is not _UNSET]

    def put(self, key: Any, value: Any) -> None:
        if value is _UNSET:
            key.__delete__(self._value)
        else:
            key.__set__(self._value, value)


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


def container_of(value: Any) -> Holder | None:
    """What keeps the members of a container; ``None`` for other objects."""
    if isinstance(value, dict):
        return DictHolder(value)
    if isinstance(value, list | deque):
        return SequenceHolder(value)
    return SetHolder(value) if isinstance(value, set) else None
