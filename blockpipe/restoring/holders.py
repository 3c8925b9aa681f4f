"""Save and restore the members of containers, classes, functions, modules and slots.

Each is restored in place, only where it has changed, and by the methods of the built-in classes,
because a subclass may refuse its own (a frozen dictionary) or do more in them.
"""

import gc
import os
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._common.threads.own_members import ABSENT, own_member
from .iterators import StandIns

_UNSET = object()
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # of a function


class Holder:
    """The members that an object had when the holder was made.

    Args:
        owner: the object, as the user's code knows it.

    Attributes:
        is_data: whether the members are the samples of a data set: too many to look at each.
    """

    is_data = False

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

    def space_id(self) -> int:
        """Return an id that a variable's holders have in common, whichever function reads it."""
        space = self.namespace()
        return id(self.owner if space is None else space)

    def put(self, key: Any, value: Any) -> None:
        """Store a value under a key, or remove the key (``_UNSET``)."""
        raise NotImplementedError

    def forget(self) -> None:
        """Keep the saved members alive no longer; the holder is not restored after that."""
        self.before = []

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
            stand_in = stand_ins.of(value, key, self.owner)
            if stand_in is not value:
                self.put(key, stand_in)


class DictHolder(Holder):
    """A dictionary, including the order of its keys.

    Args:
        value: the dictionary.
        owner: the object by which code reads what it holds, if it is another one.
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

    def remove(self, key: Any) -> None:
        """Remove a key."""
        self._base.__delitem__(self._value, key)

    def as_it_is(self) -> "DictHolder":
        """Return another one, which restores what the dictionary has now."""
        return DictHolder(self._value)

    def restore(self) -> None:
        now, before = self.now(), self.before
        if len(now) != len(before) or any(
            a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, before, strict=True)
        ):
            self._base.clear(self._value)
            for key, member in before:
                self.put(key, member)


class AttributesHolder(DictHolder):
    """An object's attributes, the dictionary that they are in, and the object's class: code may
    replace each of them.

    Args:
        attributes: the object's ``__dict__``.
        owner: the object.
    """

    def __init__(self, attributes: dict[str, Any], owner: Any) -> None:
        super().__init__(attributes, owner)
        self._kind = type(owner)
        self._is_steady = attributes_of(owner) is attributes  # a class may make one at each access

    def restore(self) -> None:
        _put_back_class(self.owner, self._kind)
        if self._is_steady and attributes_of(self.owner) is not self._value:
            object.__setattr__(self.owner, "__dict__", self._value)
        super().restore()


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
    """The results in a ``functools.lru_cache``, which the user's code may change, and which results
    it has.

    Args:
        cache: the function with the cache.
        restores: whether to remove the results that are new, because the other effects of the
            function are put back too. A library's own state is not.
    """

    def __init__(self, cache: Any, *, restores: bool) -> None:
        self._cache = cache
        self._is_unbounded = cache.cache_parameters()["maxsize"] is None
        self._entries = [*_entries_of(cache).items()] if restores else None
        super().__init__(cache)

    def now(self) -> list[tuple[Any, Any]]:
        found: list[Any] = []
        for held in gc.get_referents(self._cache):
            if type(held) is not dict or held is self._cache.__dict__:
                found.append(held)  # a result, or an argument
            elif self._is_unbounded:  # the cache's own dictionary, of all results
                found += held.values()
            elif held and "_lru_list_elem" not in {type(value).__name__ for value in held.values()}:
                found.append(held)
        return list(enumerate(found))

    def forget(self) -> None:
        self._entries = None
        super().forget()

    def restore(self) -> None:
        """Remove the results that are new, so that the next call has the function's other effects
        again. Those that a bounded cache has thrown out are not put back, so that it has none
        where some are missing: the others may be new."""
        entries, before = _entries_of(self._cache), self._entries
        if before is None or _ids(entries.items()) == _ids(before):
            return
        kept = {id(value) for value in entries.values()}
        was_cleared = not self._is_unbounded and any(id(value) not in kept for _, value in before)
        if not before or was_cleared:
            self._cache.cache_clear()
        elif self._is_unbounded:
            entries.clear()
            entries.update(before)
        else:
            known = {id(key) for key, _ in before}
            for key in [key for key in entries if id(key) not in known]:
                del entries[key]  # the cache takes that for a call that is still running

    def lend(self, stand_ins: StandIns) -> None:
        """Do nothing: a copy of an iterator would stay in the cache."""


def _ids(entries: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(id(key), id(value)) for key, value in entries]


def _entries_of(cache: Any) -> dict[Any, Any]:
    """Return the dictionary in which a ``functools.lru_cache`` finds its results. There is no other
    way to remove one of them."""
    attributes = vars(cache)
    held = [one for one in gc.get_referents(cache) if type(one) is dict and one is not attributes]
    return held[-1] if held else {}  # results that are dictionaries come before it


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


_METHODS = (types.FunctionType, staticmethod, classmethod, property)  # special ones, too
_LAZY = ("__annotate__", "__annotate_func__")  # Python makes them when they are asked for


class ClassHolder(Holder):
    """A class's own attributes. They are set even if its metaclass overrides ``__setattr__``."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        super().__init__(kind)

    def namespace(self) -> Mapping[str, Any]:
        return vars(self._kind)

    def space_id(self) -> int:
        return id(self._kind)  # each namespace() is another object

    def now(self) -> list[tuple[Any, Any]]:
        found = ((name, own_member(value)) for name, value in [*vars(self._kind).items()])
        return [
            (name, value)
            for name, value in found
            if not name.startswith("__") or (isinstance(value, _METHODS) and name not in _LAZY)
            if value is not ABSENT
        ]

    def put(self, key: str, value: Any) -> None:
        if value is _UNSET:
            type.__delattr__(self._kind, key)
        else:
            type.__setattr__(self._kind, key, value)


class MemberHolder(Holder):
    """One variable of a module, or one attribute of a class, of which nothing else is kept.

    Args:
        owner: the module's namespace, or the class.
        key: the name.
    """

    def __init__(self, owner: dict[str, Any] | type, key: str) -> None:
        self._members = owner if isinstance(owner, dict) else vars(owner)
        self._key = key
        super().__init__(owner)

    def now(self) -> list[tuple[str, Any]]:
        if self._key == "__bases__" and isinstance(self.owner, type):
            return [(self._key, self.owner.__bases__)]  # in no dictionary
        return [(self._key, self._members[self._key])] if self._key in self._members else []

    def put(self, key: str, value: Any) -> None:
        if isinstance(self.owner, dict):
            _put_name(self.owner, key, value)
        elif value is _UNSET:
            type.__delattr__(self.owner, key)
        else:
            type.__setattr__(self.owner, key, value)


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
        _put_name(self._names, key, value)


def _put_name(names: dict[str, Any], key: str, value: Any) -> None:
    if value is not _UNSET:
        names[key] = value
    elif not isinstance(names[key], types.ModuleType):
        del names[key]


class FunctionHolder(Holder):
    """A function's default arguments, and the values in its closure."""

    def __init__(self, function: types.FunctionType) -> None:
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._function, self._cells = function, dict(zip(names, cells, strict=True))
        self._code = function.__code__
        super().__init__(function)

    def now(self) -> list[tuple[Any, Any]]:
        contents = [(name, content_of_cell(cell)) for name, cell in self._cells.items()]
        held = [(name, content) for name, content in contents if content is not _UNSET]
        return [*((name, getattr(self._function, name)) for name in _DEFAULTS), *held]

    def restore(self) -> None:
        if self._function.__code__ is not self._code:
            self._function.__code__ = self._code
        super().restore()

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
    """An object's slots, and its class. They are set even if the class overrides
    ``__setattr__``."""

    def __init__(self, value: Any, slots: tuple[types.MemberDescriptorType, ...]) -> None:
        self._value, self._slots, self._kind = value, slots, type(value)
        super().__init__(value)

    def restore(self) -> None:
        _put_back_class(self._value, self._kind)
        super().restore()

    def now(self) -> list[tuple[Any, Any]]:
        contents = [(slot, _slot(slot, self._value)) for slot in self._slots]
        return [(slot, content) for slot, content in contents if content is not _UNSET]

    def put(self, key: Any, value: Any) -> None:
        if value is _UNSET:
            key.__delete__(self._value)
        else:
            key.__set__(self._value, value)


def attributes_of(owner: Any) -> Any:
    """Return an object's ``__dict__``, whatever its class overrides; ``None`` if it has none."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _put_back_class(owner: Any, kind: type) -> None:
    if type(owner) is not kind:
        vars(object)["__class__"].__set__(owner, kind)


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


def environment() -> DictHolder:
    """Return the holder of the environment variables."""
    return DictHolder(os.environ._data, os.environ)  # type: ignore[attr-defined]
