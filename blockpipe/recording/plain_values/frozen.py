"""Snapshots of values, to be compared later."""

import enum
from typing import Any

from .expressions import UNKNOWN

_MOST_MEMBERS = 256  # of a container; larger ones are compared by identity
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


class _Identity:
    """An object that is the same only as itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any) -> Any:
    """Return a snapshot of a value, to be compared later."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (list, tuple) and len(value) <= _MOST_MEMBERS:
        return type(value), [*map(frozen, value)]
    if type(value) is dict and len(value) <= _MOST_MEMBERS:
        return dict, [(frozen(key), frozen(member)) for key, member in value.items()]
    return value if value is UNKNOWN else _Identity(value)
