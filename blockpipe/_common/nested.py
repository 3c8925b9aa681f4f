"""Tensors inside nested values: tuples, lists, mappings, named tuples, dataclasses.

``torch.utils._pytree`` knows only registered classes, so a user's dataclass or a Hugging Face
output would be a leaf; and it rebuilds containers whose tensors stay the same, while a module that
is handed a list may append to it. Here a container comes back *itself* if nothing in it changed.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

# What is a leaf at first sight: checks against abstract classes are slow, and these are common.
_PLAIN = frozenset([int, float, bool, str, type(None), complex, bytes])


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in a nested value that is not a container, in order."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            if isinstance(item, Tensor):  # as nearly always, and on every step's way
                yield item
            else:
                yield from leaves(item)
    elif type(value) is dict or isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None))
    else:
        yield value


def leaf_names(value: Any, name: str = "output") -> list[str]:
    """Return the names in the nested value of everything that :func:`leaves` yields.

    Example:
        >>> leaf_names({"logits": 1, "states": (2, 3)})
        ["output['logits']", "output['states'][0]", "output['states'][1]"]
    """
    members = _members(value)
    if members is None:
        return [name]
    return [found for at, item in members for found in leaf_names(item, name + at)]


def containers(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the containers in a nested value with their names, the outer ones first.

    Example:
        >>> list(containers({"states": (2, 3)}))
        [('output', {'states': (2, 3)}), ("output['states']", (2, 3))]
    """
    members = _members(value)
    if members is not None:
        yield name, value
        for at, item in members:
            yield from containers(item, name + at)


def are_of_one_kind(values: Iterable[Any]) -> bool:
    """Return whether values are of one class, tensors of one dtype with as many dims, too.

    Example:
        >>> import torch
        >>> are_of_one_kind([torch.zeros(2, 3), torch.zeros(4, 3)])
        True
    """
    kinds = {(type(v), v.dtype, v.dim()) if isinstance(v, Tensor) else type(v) for v in values}
    return len(kinds) == 1


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a container has, with how it is asked for; ``None``: the value is a leaf."""
    if isinstance(value, tuple | list):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(f".{field}", getattr(value, field, None)) for field in names]
    return None


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
        return _changed_mapping(value, changed) if changed else value
    if _is_dataclass(value):
        changed = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            new = map_leaves(function, item)
            if new is not item:
                changed[field.name] = new
        return _changed_object(value, changed) if changed else value
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
    return kind(items)


def _changed_mapping(value: Any, changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    new = copy.copy(value)
    for key, item in changed.items():
        new[key] = item
    return new


def _changed_object(value: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # frozen ones too
    return new
