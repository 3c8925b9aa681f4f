"""The values that code between modules may read, compared from step to step.

A tape has them as constants, whatever they are: numbers, containers, settings in an object, what a
hook's closure holds. So they are compared by their contents, as far as that code mentions their
names. ``preparation/watched/`` was no alternative: it watches what a forward branches on,
which are the plain values that were there when it was recorded.
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..._common.libraries import has_users_code
from ..._common.modules import STATE, OwnHook
from ..._torch.modules import COMPILED_CALL, forward_hooks_of, forward_pre_hooks_of
from ...preparation.watched.contents import Contents, is_fixed
from ...preparation.watched.members import globals_in, is_torchs_variable
from ...preparation.watched.reading import plain_space
from ...restoring.holders import (
    AttributesHolder,
    ClassHolder,
    Holder,
    NamesHolder,
)
from ...restoring.model_state import holders_read

_TORCHS = frozenset([*vars(nn.Module()), "forward", STATE, COMPILED_CALL])
_DEFAULTS = frozenset(["__defaults__", "__kwdefaults__"])
_SWITCHES = {bool, type(None)}

Where = tuple[int, Hashable]


@dataclass
class _Source:
    """Some names of one namespace.

    Attributes:
        holders: those of the objects that read it: of a file's globals, the functions. They keep
            their objects alive, so that no other one gets its id.
        keys: the names.
        size: how many members it had, read or not.
    """

    holders: list[Holder]
    keys: tuple[Any, ...]
    size: int

    @property
    def holder(self) -> Holder:
        """The first one."""
        return self.holders[0]

    def members(self) -> dict[Any, Any]:
        """Return what any of the holders reads."""
        return dict(chain.from_iterable([holder.now() for holder in self.holders]))

    def read(self) -> tuple[Any, ...]:
        """Return the values.

        Raises:
            LookupError: there are more names, or fewer, than there were.
        """
        space = plain_space(self.holder)
        found = dict(self.holder.now()) if space is None else space
        if len(found) != self.size:
            raise LookupError
        return tuple(map(found.__getitem__, self.keys))


class ReadValues:
    """What the code between a model's modules may read, beside modules, parameters and buffers.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: frozenset[str] | None = frozenset()
        self._sources: list[_Source] = []
        self._hooks: list[tuple[nn.Module, dict[int, Any]]] = []
        self._tensors: dict[str, Tensor] = {}  # parameters and buffers: they may have attributes
        self._contents = Contents(self._names)
        self._values: list[Any] = []
        self._mutable: list[Any] = []  # those of the values whose content may change, each once
        self._content: list[Hashable] = []  # theirs, and those of the hooks and tensors
        self._noted: dict[Where, Any] = {}
        self._own: set[Where] = set()  # what the forward itself sets
        self._own_changed = 0  # how often it was changed between steps
        self._turned: dict[Where, str] = {}  # what was changed between steps, with its name

    def look_around(self, names: frozenset[str] | None, around: Iterable[nn.Module]) -> None:
        """Find what may be read; called after a recording.

        Args:
            names: that code between modules mentions; ``None``: it may read any.
            around: the modules whose hooks are code between modules.
        """
        self._names, self._own = names, set()
        self._contents = Contents(names)
        slots = forward_pre_hooks_of, forward_hooks_of
        self._hooks = [(module, hooks_of(module)) for module in around for hooks_of in slots]
        held = self._model.named_parameters(), self._model.named_buffers()
        self._tensors = dict(chain.from_iterable(held))
        by_space: dict[int, _Source] = {}
        for holder in filter(_has_names, holders_read(self._model)):
            by_space.setdefault(holder.space_id(), _Source([], (), 0)).holders.append(holder)
        for source in by_space.values():
            source.keys = self._keys(source)
        self._sources = [s for s in by_space.values() if s.keys or _may_get_names(s.holder)]
        self._note()

    def _keys(self, source: _Source) -> tuple[Any, ...]:
        return tuple(
            dict.fromkeys(
                key
                for holder in source.holders
                for key, _ in holder.now()
                if self._is_read(holder, key)
            )
        )

    def _is_read(self, holder: Holder, key: Any) -> bool:
        owner, names = holder.owner, self._names
        if owner is os.environ:
            asks = names is None or not names.isdisjoint(["environ", "getenv"])
            return asks and not is_torchs_variable(key)
        if isinstance(owner, nn.Module) and (key in _TORCHS or key.startswith("_blockpipe_")):
            return False
        if isinstance(holder, NamesHolder) and holder.namespace() is owner.__globals__:
            # Its other names are attributes, and may be some global's by chance.
            return key in globals_in(owner.__code__) and (names is None or key in names)
        return names is None or (owner.__name__ if key in _DEFAULTS else key) in names

    # --- steps

    def step_begins(self) -> None:
        """Note what has been changed since the last step, or since the recording."""
        self._compare(by_forward=False)

    def step_is_over(self) -> None:
        """Note what the forward itself has set: a counter, or the last of something. It does not
        count. A boolean does: it leads the next forward another way."""
        self._compare(by_forward=True)

    def state(self) -> tuple[Hashable, ...]:
        """Return what recordings depend on: the contents that have ever been changed."""
        return self._own_changed, *[self._noted.get(where) for where in self._turned]

    def turned(self) -> list[str]:
        """Return the places of these contents, in words."""
        return [*self._turned.values()]

    def _compare(self, *, by_forward: bool) -> None:
        if self._is_as_noted():
            return
        before, places = self._noted, self._places()
        for source in self._sources:
            source.keys = tuple(dict.fromkeys((*source.keys, *self._keys(source))))
        self._note()
        places.update(self._places())
        for where in [where for where in places if before.get(where) != self._noted.get(where)]:
            kinds = {_kind(before.get(where)), _kind(self._noted.get(where))}
            if by_forward and not kinds <= _SWITCHES:
                self._own.add(where)
            elif where in self._own:  # its value is another one in each step
                self._own_changed += not by_forward
            else:
                self._turned.setdefault(where, places[where])

    def _is_as_noted(self) -> bool:
        # Most steps do no more than this: a loop over the names, and the contents of a few objects.
        try:
            values = self._read()
        except LookupError:
            return False
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            return False
        return self._content_now() == self._content

    def _read(self) -> list[Any]:
        return [*chain.from_iterable([source.read() for source in self._sources])]

    def _content_now(self) -> list[Hashable]:
        self._contents.forget()
        of = self._contents.of
        users = [
            tuple([of(hook) for hook in hooks.values() if not isinstance(hook, OwnHook)])
            if hooks
            else ()
            for _, hooks in self._hooks
        ]
        named = [of(t) if t.__dict__ else None for t in self._tensors.values()]  # few have any
        return [*map(of, self._mutable), *users, *named]

    def _places(self) -> dict[Where, str]:
        """Return all places, with their names."""
        found = {
            (source.holder.space_id(), key): f"{key!r} of {_name(source.holder.owner)}"
            for source in self._sources
            for key in source.keys
        }
        hooks = {(id(hooks), None): f"hooks of {_name(m)}" for m, hooks in self._hooks}
        tensors = {(id(t), None): f"attributes of {name!r}" for name, t in self._tensors.items()}
        return {**found, **hooks, **tensors}

    def _note(self) -> None:
        for source in self._sources:
            there, space = source.members(), source.holder.namespace()
            source.keys = tuple(key for key in source.keys if key in there)
            source.size = len(there if space is None else space)
        self._values = self._read()
        different = {id(value): value for value in self._values if not is_fixed(value)}
        self._mutable = [*different.values()]
        self._content = self._content_now()
        others = self._content[len(self._mutable) :]
        contents = [*map(self._contents.of, self._values), *others]
        self._noted = dict(zip(self._places(), contents, strict=True))


def _has_names(holder: Holder) -> bool:
    """Whether code reads what is there by its name, and not out of an object that it has by one."""
    owner = holder.owner
    if isinstance(owner, types.FunctionType):
        return has_users_code(owner)
    is_modules = isinstance(holder, AttributesHolder) and isinstance(owner, nn.Module)
    return is_modules or isinstance(holder, ClassHolder) or owner is os.environ


def _may_get_names(holder: Holder) -> bool:
    return not isinstance(holder.owner, types.FunctionType)


def _kind(content: Any) -> Any:
    return content[0] if isinstance(content, tuple) and content else content


def _name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", type(owner).__name__))
