"""The places of a model that hold one object, or tensors of one memory.

Two stages that come to share an object between steps (``second.mean = first.mean``) are told by
that alone: neither its value nor any code has changed.
"""

import enum
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch.modules import buffers_of
from .._torch.tensors import address_of

_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_UNCHANGING = (
    *(int, float, complex, str, bytes, tuple, frozenset, type(None), type, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
_MOST_MEMBERS = 256  # of a container: a guess; larger ones are data
_MOST_DEEP = 3

Slots = dict[str, Any]


class SharedPlaces:
    """The buffers and attributes of modules that may hold something that changes, and what is in
    the dictionaries and lists among them.

    Args:
        modules: the user's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Places in a module's namespace, and the keys that lead from there to those in containers.
        # To hold these would keep a step's tensors alive when the forward has replaced them.
        self._attributes: list[tuple[Slots, Any]] = []
        self._within: list[tuple[Slots, tuple[Any, ...]]] = []
        walked = set[int]()
        for module in modules:
            for names in (buffers_of(module), vars(module)):
                self._walk(names, names, (), walked)
        self._seen: tuple[list[int], list[int]] = [], []
        self._pattern: tuple[tuple[int, int], ...] = ()

    def _walk(self, names: Slots, holder: Any, keys: tuple[Any, ...], walked: set[int]) -> None:
        if id(holder) in walked or (keys and len(holder) > _MOST_MEMBERS):
            return
        walked.add(id(holder))
        for key, value in [*(enumerate(holder) if type(holder) is list else dict.items(holder))]:
            is_torchs = not keys and key in _TORCHS
            if is_torchs or (value is not None and isinstance(value, _UNCHANGING)):
                continue
            if keys:
                self._within.append((names, (*keys, key)))
            else:
                self._attributes.append((names, key))
            if type(value) in _CONTAINERS and len(keys) < _MOST_DEEP:
                self._walk(names, value, (*keys, key), walked)

    def pattern(self) -> tuple[tuple[int, int], ...]:
        """Return for each place that holds what an earlier one does the numbers of both."""
        values = [names.get(key) for names, key in self._attributes]
        values += [_found(names, keys) for names, keys in self._within]
        plain = (v for v in values if type(v) is Tensor and v.layout is torch.strided)
        seen = (
            [*map(id, values)],
            [*map(Tensor.data_ptr, plain)],
        )  # ``.data = …`` changes the latter
        if seen != self._seen:
            self._seen, self._pattern = seen, _pattern_of(values)
        return self._pattern


def _found(names: Slots, keys: tuple[Any, ...]) -> Any:
    """Return what a path leads to; ``None``: it leads nowhere now."""
    found: Any = names.get(keys[0])
    for key in keys[1:]:
        if type(found) is list:
            found = found[key] if type(key) is int and key < len(found) else None
        else:
            found = dict.get(found, key) if isinstance(found, dict) else None
    return found


def _pattern_of(values: list[Any]) -> tuple[tuple[int, int], ...]:
    first = dict[object, int]()
    found = []
    for number, value in enumerate(values):
        if not isinstance(value, _UNCHANGING):
            earlier = first.setdefault(_identity(value), number)
            if earlier != number:
                found.append((number, earlier))
    return tuple(found)


def _identity(value: Any) -> object:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or is_lazy(value):
        return id(value)
    memory = address_of(value)  # an array's tensor has a storage of its own
    return ("memory", memory) if memory else id(value)
