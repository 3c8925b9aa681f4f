"""Tensors inside nested values: tuples, lists, mappings, named tuples, dataclasses.

``torch.utils._pytree`` knows only registered classes, so a user's dataclass or a Hugging Face
output would be a leaf; and it rebuilds containers whose tensors stay the same, while a module that
is handed a list may append to it. Here a container comes back *itself* if nothing in it changed.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from types import SimpleNamespace
from typing import Any

from torch import Size, Tensor

_DEEP = 32  # containers in each other, from which on it is asked whether one holds itself
# What is a leaf at first sight: checks against abstract classes are slow, and these are common.
_PLAIN = frozenset([int, float, bool, str, type(None), complex, bytes])


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def leaves(value: Any, depth: int = 0, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield everything in a nested value that is not a container, in order.

    Args:
        value: the value.
        depth: the number of containers around it.
        around: those far from the outermost, by id: one that holds itself ends there.
    """
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        yield value
        return
    if (depth := depth + 1) > _DEEP:
        if id(value) in around:
            return
        around |= {id(value)}
    if isinstance(value, tuple | list):
        for item in value:
            if isinstance(item, Tensor):  # as nearly always, and on every step's way
                yield item
            else:
                yield from leaves(item, depth, around)
    elif type(value) is dict or isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item, depth, around)
        for _, item in _beside(value, value):
            yield from leaves(item, depth, around)
    elif _is_dataclass(value):
        for _, item in _fields_and_beside(value):
            yield from leaves(item, depth, around)
    else:
        yield value


def leaf_names(value: Any, name: str = "output") -> list[str]:
    """Return the names in the nested value of everything that :func:`leaves` yields.

    Example:
        >>> leaf_names({"logits": 1, "states": (2, 3)})
        ["output['logits']", "output['states'][0]", "output['states'][1]"]
    """
    found = members(value)
    if found is None:
        return [name]
    return [leaf for at, item in found for leaf in leaf_names(item, name + at)]


def containers(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the containers in a nested value with their names, the outer ones first.

    Example:
        >>> list(containers({"states": (2, 3)}))
        [('output', {'states': (2, 3)}), ("output['states']", (2, 3))]
    """
    found = members(value)
    if found is not None:
        yield name, value
        for at, item in found:
            yield from containers(item, name + at)


def present(sequence: Sequence[Any]) -> Sequence[Any]:
    """Return what a list has beside ``None``, by which it says that a sample has nothing; all of
    another sequence."""
    return [item for item in sequence if item is not None] if type(sequence) is list else sequence


def are_of_one_kind(values: Iterable[Any]) -> bool:
    """Return whether values are of one class, tensors of one dtype with as many dims, too.

    Example:
        >>> import torch
        >>> are_of_one_kind([torch.zeros(2, 3), torch.zeros(4, 3)])
        True
    """
    kinds = {(type(v), v.dtype, v.dim()) if isinstance(v, Tensor) else type(v) for v in values}
    return len(kinds) == 1


def members(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a container has, with how it is asked for; ``None``: the value is a leaf."""
    if isinstance(value, tuple | list):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        beside = [(f".{name}", item) for name, item in _beside(value, value)]
        return [(f"[{key!r}]", item) for key, item in value.items()] + beside
    if _is_dataclass(value):
        return [(f".{name}", item) for name, item in _fields_and_beside(value)]
    return None


def _fields_and_beside(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass, and what has tensors beside them."""
    fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return [*fields, *_beside(value, [name for name, _ in fields])]


def _beside(value: Any, known: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the attributes with tensors that are no fields or keys: of a ``cached_property``, or
    set in ``__post_init__``. They are of the same samples."""
    own = getattr(value, "__dict__", None)
    if not own or own is value:
        return []
    found = [(name, item) for name, item in own.items() if _has_tensors(item)]
    if not found:
        return []
    names = {key for key in known if isinstance(key, str)}  # a mapping may refuse to be asked
    return [(name, item) for name, item in found if name not in names]


def _has_tensors(item: Any) -> bool:
    if type(item) in (tuple, list):
        return bool(item) and all(isinstance(member, Tensor) for member in item)
    return isinstance(item, Tensor)


def tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors in a nested value, in order."""
    if isinstance(value, Tensor):  # the common case, and on every step's way
        return iter((value,))
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with every leaf replaced; unchanged containers stay themselves."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_leaves(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _rebuilt_sequence(value, items)
    if isinstance(value, Mapping):
        changed = {}
        for key, item in value.items():
            new = map_leaves(function, item)
            if new is not item:
                changed[key] = new
        beside = _changed(function, _beside(value, value))
        mapping = _changed_mapping(value, changed) if changed or beside else value
        return _with_attributes(mapping, beside)
    if _is_dataclass(value):
        changed = _changed(function, _fields_and_beside(value))
        return _with_attributes(copy.copy(value), changed) if changed else value
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a nested value with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in _PLAIN or (kind in (tuple, list, dict) and not value):
        return value
    if kind is tuple and len(value) == 1 and isinstance(value[0], Tensor):  # the common arguments
        new = function(value[0])
        return value if new is value[0] else (new,)
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _rebuilt_sequence(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(items)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(items)
    if kind is Size and not all(isinstance(item, int) for item in items):
        return tuple(items)
    return kind(items)


def _changed(
    function: Callable[[Any], Any], attributes: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """Return the attributes for which the function returns something else."""
    mapped = [(name, item, map_leaves(function, item)) for name, item in attributes]
    return {name: new for name, item, new in mapped if new is not item}


def _changed_mapping(value: Any, changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # its keys are its attributes
        new.__dict__ = new  # type: ignore[assignment]
    for key, item in changed.items():
        new[key] = item
    return new


def _with_attributes(new: Any, changed: dict[str, Any]) -> Any:
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # of frozen ones too
    return new


def opened(value: Any) -> Any:
    """Return a value with its containers copied at all depths, as the call may change them."""
    new: Any
    if type(value) is tuple:
        return tuple([opened(item) for item in value])
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = [opened(item) for item in value]
        return new
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = opened(item)
        return new
    if isinstance(value, set | deque):
        return copy.copy(value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{key: opened(item) for key, item in vars(value).items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(new, field.name, opened(getattr(value, field.name)))
        return new
    return value
