"""Save and restore the members of containers, classes, functions, modules and slots.

Each is restored in place, only where it has changed, and by the methods of the built-in classes,
because a subclass may refuse its own (a frozen dictionary) or do more in them.
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
    """The members that an object had when the holder was made.

    Args:
        owner: the object, as the user's code knows it.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.before = self.now()

    def now(self) -> list[tuple[Any, Any]]:
        """Return the members that the object has now, as keys and values."""
        raise NotImplementedError

    def namespace(self) -> Any:
        """Return the object in which a key can be looked up directly, or ``None`` if there is
        none."""
        return None

    def put(self, key: Any, value: Any) -> None:
        """Store a value under a key, or remove the key (``_UNSET``)."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the object its members of before."""
        now = dict(self.now())
        for key in now.keys() - dict(self.before).keys():
            self.put(key, _UNSET)
        for key, value in self.before:
            if now.get(key, _UNSET) is not value:
                self.put(key, value)

    def lend(self, stand_ins: StandIns) -> None:
        """Replace iterators by copies until the holder is restored."""
        for key, value in self.before:
            stand_in = stand_ins.of(value)
            if stand_in is not value:
                self.put(key, stand_in)


class DictHolder(Holder):
    """A dictionary, including the order of its keys.

    Args:
        value: the dictionary.
        owner: the object whose attributes it holds, if it is an object's ``__dict__``.
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
        """Do nothing: code cannot advance an iterator in a set without a name for it."""


class CacheHolder(Holder):
    """The results in a ``functools.lru_cache``, which the user's code may change. The cache itself
    is not restored."""

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
        """Do nothing: an entry more or less in a cache only costs or saves time."""

    def lend(self, stand_ins: StandIns) -> None:
        """Do nothing: a copy of an iterator would stay in the cache."""


class ContentHolder(Holder):
    """The content of an object that holds no others: bytes, a file in memory, a logger's level.

    Args:
        owner: the object.
        get: returns its content.
        put: writes such a content back.
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
        """Do nothing: there is no iterator in it."""


class ClassHolder(Holder):
    """A class's own attributes. They are set even if its metaclass overrides ``__setattr__``."""

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
    """The globals that a function reads. A module that was imported in the meantime stays."""

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
    """A function's default arguments, and the values in its closure."""

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
    """An object's slots. They are set even if its class overrides ``__setattr__``."""

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
    """Return a holder of a container's members; ``None`` for other objects."""
    if isinstance(value, dict):
        return DictHolder(value)
    if isinstance(value, list | deque):
        return SequenceHolder(value)
    return SetHolder(value) if isinstance(value, set) else None
