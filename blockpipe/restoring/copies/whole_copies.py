"""Deep copies of a module that lead to nothing of the module itself.

``copy.deepcopy`` hands on functions and weak references as they are: a hook that reads ``self``, a
``forward`` that was replaced by a function of the original's, or a child's reference to its parent
would compute with the original's parameters.
"""

import copy
import functools
import operator
import types
import weakref
from collections import deque
from typing import Any

from torch import nn

from ..holders import AttributesHolder, DictHolder, Holder, SequenceHolder, SlotsHolder
from ..model_state import MOST_OBJECTS, ModelState

_CONTAINERS = (list, tuple, set, frozenset, deque)
_REFERENCES = (weakref.ref, weakref.WeakMethod)
_ATOMIC = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float)


def copied_whole(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a module, in which parameters have the attributes that were set on them
    as well: torch copies those of other tensors only.

    Args:
        module: the module.
        memo: as for ``copy.deepcopy``: by id, what stands for objects of its own in the copy.
    """
    copied = copy.deepcopy(module, memo)
    for tensor in (*module.parameters(), *module.buffers()):
        own = memo.get(id(tensor), tensor)  # a class may copy itself in its own way
        for name, value in vars(tensor).items() if own is not tensor else ():
            try:
                vars(own)[name] = copy.deepcopy(value, memo)
            except (TypeError, RuntimeError):  # a lock, a process group, a tensor with a graph
                vars(own)[name] = value
    _rebind(module, memo)
    return copied


def _rebind(module: nn.Module, memo: dict[int, Any]) -> None:
    """Give a copy functions and weak references that lead to the copy, wherever those of the
    original lead to the original."""
    rebound = _Rebound(memo)
    for holder in ModelState(module, values=False, contents=False).holders:
        copied = memo.get(id(holder.owner), holder.owner)
        if copied is holder.owner:
            continue
        for key, value in holder.now():
            if isinstance(value, _Rebound.KINDS) and rebound.leads(value):
                _put(holder, copied, key, rebound.of(value))


def _put(holder: Holder, copied: Any, key: Any, value: Any) -> None:
    """Set in a copied object what the holder has of the original."""
    if isinstance(holder, AttributesHolder):
        vars(copied)[key] = value
    elif isinstance(holder, DictHolder | SequenceHolder):
        copied[key] = value
    elif isinstance(holder, SlotsHolder):
        key.__set__(copied, value)


class _Rebound:
    """The functions and weak references of one copy.

    Args:
        memo: of the deep copy: by the id of an object, its copy.
    """

    KINDS = (
        *(types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
        *(weakref.ref, tuple),
    )

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, Any] = {}
        self._cells: dict[int, types.CellType] = {}

    def leads(self, value: Any) -> bool:
        """Return whether an object leads to one that was copied."""
        seen, level = dict[int, Any](), [value]
        while level and len(seen) < MOST_OBJECTS:
            one = level.pop()
            if self._memo.get(id(one), one) is not one:
                return True
            if id(one) not in seen and not isinstance(one, _ATOMIC):
                seen[id(one)] = one
                level += _held_by(one)
        return False

    def of(self, value: Any) -> Any:
        """Return what stands for an object in the copy."""
        if not self.leads(value):
            return value
        if not isinstance(value, _Rebound.KINDS):
            return copy.deepcopy(value, self._memo)
        if id(value) not in self._made:
            made = (
                self._function(value) if isinstance(value, types.FunctionType) else self._as(value)
            )
            self._made[id(value)] = made
        return self._made[id(value)]

    def _as(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            keywords = _mapped(self.of, value.keywords) or {}
            made = type(value)(self.of(value.func), *map(self.of, value.args), **keywords)
            vars(made).update(_mapped(self.of, vars(value)) or {})
            return made
        if isinstance(value, functools._lru_cache_wrapper):  # a cache is no state
            return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))
        if isinstance(value, tuple):
            return self._tuple(value)
        return type(value)(self.of(value())) if type(value) in _REFERENCES else value

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        members = [*map(self.of, value)]
        if all(map(operator.is_, members, value)):
            return self._memo.get(id(value), value)
        try:
            return tuple.__new__(type(value), members)
        except TypeError:  # a class of C, such as what max() of torch returns
            return type(value)(members)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__
        new_cells = cells and tuple(self._cell(cell) for cell in cells)
        names = function.__name__, None, new_cells
        made = types.FunctionType(function.__code__, function.__globals__, *names)
        self._made[id(function)] = made  # it may be one of its own variables
        for cell, new in zip(cells or (), new_cells or (), strict=True):
            if new is not cell and not _is_full(new):
                new.cell_contents = self.of(cell.cell_contents)
        made.__defaults__ = self.of(function.__defaults__)
        made.__kwdefaults__ = _mapped(self.of, function.__kwdefaults__)
        functools.update_wrapper(made, function, updated=())
        vars(made).pop("__wrapped__", None)
        vars(made).update(_mapped(self.of, vars(function)) or {})
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        """Return a variable of the copy's, which several functions may have; the original's, if it
        does not lead to the original: they have it in common, as copies always had."""
        if not _is_full(cell) or not self.leads(cell.cell_contents):
            return cell
        return self._cells.setdefault(id(cell), types.CellType())


def _mapped(function: Any, values: dict[str, Any] | None) -> dict[str, Any] | None:
    return values and {key: function(value) for key, value in values.items()}


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return False
    return True


def _held_by(value: Any) -> list[Any]:
    """Return what an object leads to, as code that has the object may."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, _CONTAINERS):
        return [*value]
    return [*getattr(value, "__dict__", {}).values()]
