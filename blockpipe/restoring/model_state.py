"""Save and restore all state that can be reached from a model's modules.

A forward counts, caches and draws. A recording must leave no trace of that, and no fake tensor that
the next real call would read. The state is found by a walk over attributes and slots of the user's
objects, of their classes and of tensors, nested containers, closures of functions and the globals
that they read, context variables, random generators, and arrays. Only changed values are written
back, and by the methods of the built-in classes, because a subclass may refuse its own (a frozen
dictionary) or do more in them. Iterators and contexts cannot be set back, so the forward gets
copies of them.
"""

import dis
import functools
import gc
import itertools
import logging
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context, ContextVar
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn

from .._common.imports import imported_in
from .._common.libraries import (
    FOREIGN,
    given_by_name,
    given_to_libraries,
    has_users_code,
    is_mock,
    is_users,
)
from .._common.nested import tensors
from .._torch.modules import hooks_of_all_modules
from .._torch.patched_functions import in_place_of_torchs
from .contents import content_of, kept_hooks, kept_otherwise, kept_registry, kept_tensor, objects_in
from .holders import (
    AttributesHolder,
    CacheHolder,
    ClassHolder,
    FunctionHolder,
    Holder,
    NamesHolder,
    SlotsHolder,
    container_of,
    environment,
)
from .iterators import BOUND, StandIns, is_iterator, is_of_loader
from .module_holders import ScriptHolder
from .process_state import kept_interpreter

_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
MOST_OBJECTS = 200_000
# Of a data set's container: a longer one is put back as it was, but not its items, each a sample.
MOST_ITEMS = 1_000
_NO_STATE = frozenset([str, bytes, int, float, complex, bool, type(None)])
# But of these, data sets, distributions and optimizers, which may hold the user's own.
_WHOLE = ("vars", "__dict__")  # lead to all variables of a module
_OPEN = ("torch.utils.data.", "torch.distributions.", "torch.optim.")
# These have no attributes that user code sets; an object of a subclass may.
_PLAIN = (
    *(dict, OrderedDict, list, deque, set, frozenset, tuple, bytearray, array),
    *(types.FunctionType, types.MethodType, functools.partial),
)


_NOTHING: dict[str, object] = {}
_SHOWS = (
    types.MappingProxyType,
    *(type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items())),
)
_SIZED = (dict, list, deque, set, tuple, frozenset)


class ModelState:
    """The state of modules, however deep. The end of a block restores it; the block may be entered
    several times.

    Args:
        modules: the modules; those inside of them are included.
        others: other objects to begin at.
        values: whether to save the values of tensors too, except those of the modules' parameters
            (for ``WritesUndone``): a teacher may be kept in a list.
        contents: whether to save the content of bytes, arrays and generators too; without it,
            nothing is restored.
    """

    def __init__(
        self,
        *modules: nn.Module,
        values: bool,
        contents: bool = True,
        others: Iterable[object] = (),
    ) -> None:
        self._values, self._contents = values, contents
        self._registered = {id(p) for module in modules for p in module.parameters()}
        self.holders: list[Holder] = []  # of all objects found, the nearest first
        self._restores: list[Callable[[], object]] = []  # for objects that hold no others
        self._seen: dict[int, Any] = {}  # alive, so that no other object gets its id
        self._slots: dict[type, tuple[Any, ...]] = {}
        self._long: set[int] = set()  # data sets' containers
        self._has_iterators = self._lends = False
        self.caches: list[object] = []  # each functools.lru_cache in reach
        if contents:
            self._restores.append(kept_interpreter())
        level: list[Any] = [inner for module in modules for inner in module.modules()]
        if modules:
            classes = {base for kind in set(map(type, level)) for base in kind.__mro__}
            level += [*in_place_of_torchs(), *given_to_libraries(classes)]
        level += [hook for hooks in hooks_of_all_modules() for hook in hooks.values()]
        level += others
        while level:  # breadth first, so that the nearest objects come first
            level = [found for value in level for found in self._look_at(value)]
        self._count = len(self.holders)

    def objects(self) -> list[Any]:
        """Return all objects that were found, the nearest first."""
        return [*self._seen.values()]

    def tensors_beside(self) -> Iterator[Tensor]:
        """Yield the tensors whose values are not saved, as they may be as large as the model: those
        that tensors, data sets, distributions and optimizers have as attributes."""
        for holder in self.holders:
            if isinstance(holder, AttributesHolder) and _is_open(holder.owner):
                yield from tensors([value for _, value in holder.before])

    def restore(self) -> None:
        """Put everything back, in place. Of one place, what was kept first counts: holders may
        have been added while the forward ran."""
        for holder in reversed(self.holders):
            holder.restore()
        for restore in self._restores:
            restore()
        self._lends = False

    def restore_again(self) -> None:
        """Put everything back once more, when nothing is left of what ran. Finalizers (``__del__``)
        of what it had made have run since, also of what only the holders kept that were added."""
        self.restore()
        if len(self.holders) > self._count:
            del self.holders[self._count :]
            self.restore()

    def __enter__(self) -> None:
        if not self._has_iterators or self._lends:
            return
        self._lends, stand_ins = True, StandIns()
        try:
            for holder in self.holders:
                holder.lend(stand_ins)
        except BaseException:  # an interrupt
            self.restore()
            raise

    def __exit__(self, *failure: object) -> None:
        self.restore()

    def _look_at(self, value: Any) -> Iterable[Any]:
        """Save one object's members, and return the objects to look at next."""
        if type(value) in _NO_STATE or id(value) in self._seen:
            return ()
        if isinstance(value, types.ModuleType) and not is_users(value.__name__):
            return ()
        if len(self._seen) >= MOST_OBJECTS:
            return ()
        self._seen[id(value)] = value
        if type(value) in weakref.ProxyTypes:
            with suppress(ReferenceError):  # its object is gone
                return (value.__repr__.__self__,)
            return ()
        if isinstance(value, types.ModuleType):  # that an attribute or an entry is
            return [one for one in vars(value).values() if _is_defined_in(one, value)]
        if is_mock(value):
            return self._hold(AttributesHolder(vars(value), value))
        if isinstance(value, type):
            return self._look_at_class(value)
        found, kind = self._look_into(value), type(value)
        if kind not in _PLAIN:
            found = (*found, *self._look_at_attributes(value))
        if id(kind) not in self._seen and is_users(kind.__module__):
            found = (kind, *found)
        return found

    def _look_into(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Tensor):
            if self._contents:
                self._keep(kept_hooks(value))
                is_hidden = id(value) not in self._registered
                self._keep(kept_tensor(value, values=self._values and is_hidden))
                if is_hidden and value.is_leaf:
                    return (value.grad,)
            return ()
        if (container := container_of(value)) is not None:
            keys = dict.keys(value) if isinstance(value, dict) else ()
            if id(value) in self._long:
                container.is_data = True
                return self._hold(container)[:0]
            return [*self._hold(container), *(k for k in keys if type(k) not in _NO_STATE)]
        if isinstance(value, tuple | frozenset):
            return () if id(value) in self._long else value
        if isinstance(value, types.FunctionType):
            return self._look_at_function(value)
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            its_own = is_users(getattr(value, "__module__", None))
            return self._hold(CacheHolder(value, restores=its_own))
        if isinstance(value, Context) or is_iterator(value):
            self._has_iterators = True  # what is lent
            # A generator is not advanced, so the objects that it holds do not change.
            is_refused = isinstance(value, types.GeneratorType) or is_of_loader(value)
            return () if is_refused else _behind(value)
        if (shown := _shown_by(value)) is not None:
            return shown
        if not self._contents:
            return objects_in(value)
        content = content_of(value)
        if content is not None:
            self.holders.append(content)
            return objects_in(value)
        return self._keep(kept_otherwise(value)) or objects_in(value)

    def _hold(self, holder: Holder) -> list[Any]:
        self.holders.append(holder)
        return [value for _, value in holder.before]

    def _keep(self, restore: Callable[[], object] | None) -> tuple[()]:
        if restore is not None:
            self._restores.append(restore)
        return ()

    def _look_at_class(self, kind: type) -> Iterable[Any]:
        """Save a user class's own attributes, and the values that its functions read."""
        if not is_users(kind.__module__):
            return ()
        self._keep(kept_registry(kind) if self._contents else None)
        members = [*self._hold(ClassHolder(kind)), *filter(_is_code, vars(kind).values())]
        held = [inner for member in members for inner in _unwrapped(member)]
        return [type(kind), *kind.__bases__, *held]

    def _look_at_function(self, function: types.FunctionType) -> Iterable[Any]:
        """Save a function's closure, its attributes, and the globals that it reads from the user's
        modules."""
        found = self._hold(FunctionHolder(function))
        if has_users_code(function):
            imported = imported_in(function)
            spaces = [function.__globals__, *_spaces_of((*found, *imported))]
            found += filterfalse(_is_module, imported)
            read, seen = frozenset(names_in(function.__code__)), set[int]()
            found += _loggers_named(function) if logging.getLogger.__name__ in read else []
            while spaces:
                names = spaces.pop()
                if id(names) not in seen:
                    seen.add(id(names))
                    is_whole = names is not function.__globals__ and not read.isdisjoint(_WHOLE)
                    own = read.union(_variables_in(names)) if is_whole else read
                    values = self._hold(NamesHolder(names, own, function))
                    spaces += _spaces_of(values)
                    found += filterfalse(_is_module, values)  # of these, the names that are read
                    for module in filter(_is_module, values):
                        found += given_by_name(module, read)
        attributes = function.__dict__
        self._seen[id(attributes)] = attributes
        return [*found, *self._hold(AttributesHolder(attributes, function))]

    def _look_at_attributes(self, value: Any) -> Iterable[Any]:
        kind, package = type(value), f"{type(value).__module__}."
        is_known = isinstance(value, nn.Module) or _is_open(value)
        if package.startswith(FOREIGN) and (not is_known or is_iterator(value)):
            return ()
        if kind not in self._slots:
            self._slots[kind] = slot_members(kind)
        slots = self._slots[kind]
        held = self._hold(SlotsHolder(value, slots)) if slots else []
        if isinstance(value, torch.jit.ScriptModule):
            held += self._hold(ScriptHolder(value))
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return held
        if not isinstance(attributes, dict) or id(attributes) in self._seen:
            return held
        self._seen[id(attributes)] = attributes
        found = [*self._hold(AttributesHolder(attributes, value)), *held]
        if isinstance(value, torch.utils.data.Dataset | torch.utils.data.DataLoader):
            many = (m for m in found if isinstance(m, _SIZED) and len(m) > MOST_ITEMS)
            self._long.update(map(id, many))
        if not _is_open(value):
            return found
        # Tensors on a tensor may be as large as the model (main_grad, a subclass's inner ones),
        # and those of a data set larger.
        return [m for m in found if not isinstance(m[0] if type(m) is tuple and m else m, Tensor)]


def _is_open(value: Any) -> bool:
    return isinstance(value, Tensor) or f"{type(value).__module__}.".startswith(_OPEN)


def _shown_by(value: Any) -> Iterable[Any] | None:
    """Return what leads through an object that holds nothing itself; ``None`` for others."""
    if isinstance(value, ContextVar):
        with suppress(LookupError):  # else it has no value
            return (value.get(),)
        return ()
    if isinstance(value, _SHOWS):
        return gc.get_referents(value)  # the dictionary
    if isinstance(value, BOUND):
        return (value.__self__,)
    return (value(),) if isinstance(value, weakref.ref) else None


def _behind(iterator: Any) -> list[Any]:
    """Return the objects that an iterator, or a context, holds."""
    if isinstance(iterator, Context):
        return [*iterator.values()]
    found = gc.get_referents(iterator)
    if isinstance(iterator, itertools.cycle):  # it adds to a list of its own
        found = [one for held in found for one in (held if type(held) is list else (held,))]
    if not isinstance(iterator, itertools.zip_longest):
        return found
    # Where one of its iterators has ended, its tuple holds nothing there: to read that is a crash.
    return gc.get_referents(*(one for one in found if isinstance(one, tuple)))


def _is_defined_in(value: Any, module: types.ModuleType) -> bool:
    """Whether a module's function or class is its own, and not one that it has imported; of other
    objects, whether they may be."""
    if isinstance(value, types.FunctionType | type):
        return value.__module__ == module.__name__
    return is_users(type(value).__module__) or type(value) in (dict, list, set, deque)


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _spaces_of(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the namespaces of the user's own modules among some values."""
    modules = (value for value in values if isinstance(value, types.ModuleType))
    return [vars(module) for module in modules if is_users(module.__name__)]


def _variables_in(names: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a module's variables, other than functions, classes and modules."""
    for name, value in names.items():
        if not name.startswith("__") and not isinstance(value, type | types.ModuleType):
            yield from () if _is_code(value) else (name,)


def _loggers_named(function: types.FunctionType) -> list[logging.Logger]:
    """Return the loggers that a function may ask for by name: its module's, and those of the texts
    in it."""
    known, texts = logging.root.manager.loggerDict, [*_texts_in(function.__code__)]
    named = map(known.get, [*texts, function.__globals__.get("__name__", "")])
    return [one for one in named if isinstance(one, logging.Logger)]


def _texts_in(code: types.CodeType) -> Iterator[str]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _texts_in(one)
        elif isinstance(one, str):
            yield one


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function may read from its module, or set there, and those of the
    attributes that it reads."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)
    if _MATCH_CLASS in code.co_code[::2]:
        before: Any = ()
        for instruction in dis.get_instructions(code):
            if instruction.opcode == _MATCH_CLASS:  # ``case Config(scale=2.0)``
                yield from before if isinstance(before, tuple) else ()
            before = instruction.argval


def holders_read(model: nn.Module) -> Iterator[Holder]:
    """Yield holders of what a model's code may read, the nearest first: they restore nothing."""
    for holder in (environment(), *ModelState(model, values=False, contents=False).holders):
        holder.forget()  # the saved members may be as large as the model
        yield holder


def _is_code(member: Any) -> bool:
    return isinstance(member, types.FunctionType | staticmethod | classmethod | property)


def _unwrapped(member: Any) -> tuple[Any, ...]:
    """Return the functions behind a member of a class."""
    if isinstance(member, staticmethod | classmethod):
        return (member.__func__,)
    return (member.fget, member.fset) if isinstance(member, property) else (member,)


_MEMBERS_OF_C: tuple[tuple[type, Any], ...] = (
    (BaseException, BaseException.args),
    (defaultdict, vars(defaultdict)["default_factory"]),
)


def slot_members(kind: type) -> tuple[Any, ...]:
    """Return the descriptors that set each slot even if its class overrides ``__setattr__``. Those
    written in C have no ``__slots__``, but some have members that user code sets."""
    bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    members = (member for base in bases for member in base.values())
    slots = tuple(m for m in members if isinstance(m, types.MemberDescriptorType))
    of_c = [m for base, m in _MEMBERS_OF_C if issubclass(kind, base)]
    return (*slots, *of_c)
