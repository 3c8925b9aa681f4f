"""The places of a model that hold one object, or tensors of one memory.

Two stages that come to share an object between steps (``second.mean = first.mean``) are told by
that alone: neither its value nor any code has changed.
"""

import enum
import types
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


class SharedPlaces:
    """The buffers and attributes of modules that may hold something that changes.

    Args:
        modules: the user's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [
            (names, key)
            for module in modules
            for names in (buffers_of(module), vars(module))
            for key, value in names.items()
            if key not in _TORCHS and (value is None or not isinstance(value, _UNCHANGING))
        ]
        self._ids: list[int] = []
        self._pattern: tuple[tuple[int, int], ...] = ()

    def pattern(self) -> tuple[tuple[int, int], ...]:
        """Return for each place that holds what an earlier one does the numbers of both."""
        values = [names.get(key) for names, key in self._places]
        ids = [*map(id, values)]
        if ids != self._ids:
            self._ids, self._pattern = ids, _pattern_of(values)
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
