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

from .._torch.modules import buffers_of

_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_UNCHANGING = (
    *(int, float, complex, str, bytes, tuple, frozenset, type(None), type, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
_MOST_MEMBERS = 256  # of a container: a guess; larger ones are data
_MOST_DEEP = 3


class SharedPlaces:
    """The buffers and attributes of modules that may hold something that changes, and what is in
    the dictionaries and lists among them.

    Args:
        modules: the user's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._entries: list[tuple[dict[Any, Any], Any]] = []
        self._elements: list[tuple[list[Any], int]] = []
        walked = set[int]()
        for module in modules:
            self._walk(buffers_of(module), walked)
            self._walk(vars(module), walked, without=_TORCHS)
        self._ids: list[int] = []
        self._tensors: list[Tensor] = []
        self._memory: list[int] = []
        self._pattern: tuple[tuple[int, int], ...] = ()

    def _walk(
        self, holder: Any, walked: set[int], depth: int = 0, without: frozenset[str] = frozenset()
    ) -> None:
        if id(holder) in walked or (depth and len(holder) > _MOST_MEMBERS):
            return
        walked.add(id(holder))
        is_list = isinstance(holder, list)
        for key, value in [*(enumerate(holder) if is_list else dict.items(holder))]:
            if key in without or (value is not None and isinstance(value, _UNCHANGING)):
                continue
            (self._elements if is_list else self._entries).append((holder, key))
            if type(value) in _CONTAINERS and depth < _MOST_DEEP:
                self._walk(value, walked, depth + 1)

    def pattern(self) -> tuple[tuple[int, int], ...]:
        """Return for each place that holds what an earlier one does the numbers of both."""
        values = [names.get(key) for names, key in self._entries]
        values += [held[at] if at < len(held) else None for held, at in self._elements]
        ids = [*map(id, values)]
        if ids != self._ids or [*map(Tensor.data_ptr, self._tensors)] != self._memory:
            self._ids, self._pattern = ids, _pattern_of(values)
            self._tensors = [v for v in values if type(v) is Tensor and v.layout is torch.strided]
            self._memory = [*map(Tensor.data_ptr, self._tensors)]  # ``.data = …`` changes it
        return self._pattern


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
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return id(value)
    memory = value.untyped_storage().data_ptr()  # an array's tensor has a storage of its own
    return ("memory", memory) if memory else id(value)
