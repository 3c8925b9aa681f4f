"""Find the values that the code of libraries' modules reads, which nobody traces.

Such a module reads its attributes, those of its configuration and those of the modules that only a
plain list or dictionary holds, wherever its code names them.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .._common.callsite import users_line
from .._common.libraries import has_users_code, is_users
from .._torch.modules import within
from ..restoring.holders import Holder
from .calls import Call
from .plain_values.evaluation.members import ALL, own_attributes
from .plain_values.values import SharedValue
from .reads import libraries_code_reads, mentioned, reads_by_computed_names

_UNDO = ("__exit__", "remove")  # a context manager's end, and a hook's
_PLAIN = (bool, int, float, str, type(None))

_LOOKS_UP = ("__getattribute__", "__getattr__")
_MOST_CALLS = 4  # of methods in methods: a guess

_INSIDE = ("torch", "contextlib", __name__.partition(".")[0])


class LibraryReads:
    """The calls of libraries' modules in one forward.

    Args:
        holders: the holders of all objects that can be reached from the model.
        modules: the model's modules, by path.
    """

    def __init__(self, holders: Iterable[Holder], modules: Mapping[str, nn.Module]) -> None:
        self._modules, registered = modules, {*map(id, modules.values())}
        owners = {id(holder.owner): holder.owner for holder in holders}
        # They have no path, so that no call tells of them.
        self._hidden = {
            key: owner
            for key, owner in owners.items()
            if isinstance(owner, nn.Module) and key not in registered
        }
        self._ran: dict[tuple[int, int], str] = {}  # by the id of such a module and the hop
        self._codes: dict[tuple[type, Any], types.CodeType | None] = {}
        # Of libraries' methods that the user's code calls: by the object's id, code and hop.
        self._asked: dict[int, tuple[Any, dict[tuple[types.CodeType, int], str]]] = {}
        self.before_undone: Callable[[], None] = lambda: None  # called when a change may end

    def asks(self, code: types.CodeType) -> bool:
        """Return whether :meth:`runs` is to be told of a library's function: most are run often."""
        return code.co_name in _UNDO or (bool(self._hidden) and _is_method(code))

    def runs(self, frame: types.FrameType, hop: Callable[[], int]) -> Any:
        """Note that such a function begins to run."""
        code = frame.f_code
        if code.co_name in _UNDO and not _is_called_inside(frame):
            self.before_undone()
        if self._hidden and _is_method(code):
            itself = id(frame.f_locals.get("self"))
            if itself in self._hidden:
                self._ran.setdefault((itself, hop()), users_line())

    def asked(self, owner: Any, name: Any, hop: int, where: str) -> None:
        """Note that the user's code takes a member of an object on a hop: a method, or a property,
        of a library's reads what it names."""
        if (kind := (type(owner), name)) not in self._codes:
            self._codes[kind] = _librarys_code(*kind) if isinstance(name, str) else None
        if (code := self._codes[kind]) is not None and _is_methods(own_attributes(owner), name):
            self._asked.setdefault(id(owner), (owner, {}))[1].setdefault((code, hop), where)

    def asked_for(self, owner: Any, key: Any) -> Iterator[tuple[int, str]]:
        """Yield the hops on which such a member may read an attribute, each with a line. What a
        module is asked for, the modules inside of it may be asked for."""
        for asked, found in [*self._asked.values()]:
            if asked is owner or _is_inside(owner, asked):
                for (code, hop), where in found.items():
                    if _may_read(type(asked), code, key):
                        yield hop, where

    def note(self, values: Iterable[SharedValue], calls: Iterable[Call]) -> None:
        """Add to each value that was set the hops on which a library's code reads it.

        Args:
            values: the values of the forward.
            calls: its calls.
        """
        read_by: dict[int, list[SharedValue]] = defaultdict(list)  # by the id of a module
        for known in values:
            for module in self._readers_of(known) if known.set_on else ():
                read_by[id(module)].append(known)
        called = [
            (id(self._modules[call.path]), call.hop, call.where)
            for call in calls
            if call.hop is not None and call.path in self._modules
        ]
        for key, hop, where in (*called, *((*ran, where) for ran, where in self._ran.items())):
            for known in read_by.get(key, ()):
                known.read_on.add(hop)
                known.first_read = known.first_read or where
        for known in values:
            for hop, where in self.asked_for(known.owner, known.key) if known.set_on else ():
                known.read_on.add(hop)
                known.is_unnamed, known.first_read = True, known.first_read or where

    def _readers_of(self, known: SharedValue) -> Iterable[nn.Module]:
        """Return the modules whose libraries' code reads a value where they are called."""
        owner, is_all = known.owner, known.key is ALL
        if isinstance(owner, nn.Module):
            return [owner] if is_all or libraries_code_reads(type(owner), known.key) else []
        if not isinstance(known.key, str) or isinstance(owner, dict):
            return []
        holding = self._holding.get(id(owner), ())
        return [m for m in holding if libraries_code_reads(type(m), known.key)]

    @functools.cached_property
    def _holding(self) -> dict[int, list[nn.Module]]:
        """The modules that have an object as an attribute, by its id."""
        found: dict[int, list[nn.Module]] = defaultdict(list)
        for module in (*self._modules.values(), *self._hidden.values()):
            for value in vars(module).values():
                if not isinstance(value, _PLAIN):
                    found[id(value)].append(module)
        return found


def _is_methods(own: Mapping[str, Any], name: str) -> bool:
    """Whether a name stands for the method of the class, or for what a library has put around it
    in the object itself (``functools.wraps``)."""
    return name not in own or (
        isinstance(own[name], types.FunctionType)
        and hasattr(own[name], "__wrapped__")
        and not has_users_code(own[name])
    )


def _is_inside(owner: Any, module: Any) -> bool:
    are_modules = isinstance(owner, nn.Module) and isinstance(module, nn.Module)
    return are_modules and any(inner is owner for inner in within(module))


def _librarys_code(kind: type, name: str) -> types.CodeType | None:
    """Return the code of a method or a property that a class has from a library's; of a name that
    no class has, the code that looks attributes up, if the library has its own."""
    bases = (base for base in kind.__mro__ if base not in (nn.Module, object))
    base = next((base for base in kind.__mro__ if name in vars(base)), None)
    if base is None:
        name, base = next(((n, b) for b in bases for n in _LOOKS_UP if n in vars(b)), ("", None))
    if base in (None, nn.Module) or is_users(base.__module__):
        return None
    member = vars(base)[name]
    function = member.fget if isinstance(member, property) else member
    return getattr(function, "__code__", None)


def _may_read(kind: type, code: types.CodeType, key: object) -> bool:
    """Return whether a method, or another one of its class that it names, may read an attribute."""
    if code.co_name in _LOOKS_UP:
        return True
    level, seen = [code], {code}
    for _ in range(_MOST_CALLS):
        names = frozenset[str]().union(*map(mentioned, level))
        if key is ALL or key in names or any(map(reads_by_computed_names, level)):
            return True
        called = {found for name in names if (found := _librarys_code(kind, name)) is not None}
        level = [*(called - seen)]
        seen |= called
    return False


def _is_method(code: types.CodeType) -> bool:
    """Return whether a function may read its object; to set an attribute is not to read it."""
    return code.co_varnames[:1] == ("self",) and not code.co_name.startswith("__")


def _is_called_inside(frame: types.FrameType) -> bool:
    """Whether torch, Blockpipe, or a context manager around it calls a function, as they do at each
    operation, and not code that has entered something for a while."""
    caller = frame.f_back
    name = str(caller.f_globals.get("__name__")) if caller is not None else ""
    return name.partition(".")[0] in _INSIDE
