"""torch's context managers that several threads enter at once, as one object.

``torch.no_grad``, ``torch.autocast`` and others keep what they found on themselves: a thread that
leaves one would set what another thread had. A module-level object is one for all stages, and so is
a function under ``@torch.autocast(...)``, whose calls all enter the decorator. Here each thread has
its own value of such an attribute. To enter a copy of the object in each thread was no alternative:
a subclass that calls ``super().__enter__()`` would have its own state in the one and torch's in the
other.
"""

import threading
from typing import Any, ClassVar, Self, cast

from ..._torch.modes import KEPT_BY_CONTEXTS
from .process_changes import ProcessChange
from .thread_state import in_thread


class _OfEachThread:
    """An attribute with a value for each thread.

    The object has it too, as without this, for who leaves it before or after the step; but not
    that of a thread of ours, for the caller may be in the middle of the object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: dict[tuple[int, int], Any] = {}

    def __get__(self, context: Any, owner: type | None = None) -> Any:
        if context is None:
            return self
        key = id(context), threading.get_ident()
        if key in self._values:
            return self._values[key]
        try:
            return vars(context)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, context: Any, value: Any) -> None:
        self._values[id(context), threading.get_ident()] = value
        if not in_thread.is_ours:
            vars(context)[self._name] = value


class SharedContexts(ProcessChange):
    """While entered, any number of threads may have one context manager of torch's entered."""

    _only: ClassVar[Any] = None

    def __new__(cls) -> Self:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cast(Self, cls._only)

    def put_on(self) -> None:
        """Give each thread its values."""
        for owner, names in KEPT_BY_CONTEXTS.items():
            for name in names:
                setattr(owner, name, _OfEachThread(name))

    def take_off(self) -> None:
        """Leave one value for all threads."""
        for owner, names in KEPT_BY_CONTEXTS.items():
            for name in names:
                if isinstance(vars(owner).get(name), _OfEachThread):
                    delattr(owner, name)
