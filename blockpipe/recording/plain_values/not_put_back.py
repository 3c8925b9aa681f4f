"""Calls whose effect a recording can neither put back nor let a copy have. It refuses them.

Such an object is refused when the forward uses it, and not when it is found: that a model holds one
is no reason to refuse the model.
"""

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ...errors import RecordingError
from ...restoring.holders import Holder
from .evaluation.expressions import Frame
from .evaluation.members import ALL
from .syntax.accesses import Access
from .values import SharedValue

_METHODS = frozenset(["cache_info", "pop", "get", "get_nowait", "update"])
_TAKES = ("get", "get_nowait")
_HASHES = frozenset(
    ["_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512"]
)


class Effect(NamedTuple):
    """What a forward does that stays behind.

    Attributes:
        what: what it does, as the verb of a sentence that goes on with "cannot be put back".
        remedy: what the forward can do instead.
        line: the line that does it.
    """

    what: str
    remedy: str
    line: str

    def refuse(self) -> None:
        """Raise :class:`RecordingError`."""
        raise RecordingError(
            "a recording runs the forward once more and leaves no trace, but this forward "
            f"{self.what} cannot be put back, at {self.line}; {self.remedy}"
        )


def found_among(holders: Iterable[Holder]) -> set[int]:
    """Return the ids of the objects of C among the members of objects that are refused when they
    are used."""
    modules = _HASHES | {"_queue"}
    members = (value for holder in holders for _, value in holder.before)
    return {id(value) for value in members if type(value).__module__ in modules}


def effect_of(access: Access, frame: Frame, *known: Collection[int]) -> Effect | None:
    """Return the effect of an access to a method that cannot be put back; ``None``: it can.

    Args:
        access: what the instruction reads.
        frame: the frame that is about to run it.
        known: the ids of objects that were there before the forward.
    """
    node = access.node
    if not isinstance(node, ast.Attribute) or node.attr not in _METHODS:
        return None
    owner, name = frame.evaluated(node.value), node.attr
    if not any(id(owner) in ids for ids in known):
        return None
    if isinstance(owner, set) and name == "pop" and len(owner) > 1:
        what = "calls pop() of a set, whose order"
        return Effect(what, "take min() or max() of it, or use a dictionary", frame.line)
    return _of_object_of_c(owner, name, frame.line)


def _of_object_of_c(owner: Any, name: str, line: str) -> Effect | None:
    module = type(owner).__module__
    if module == "_queue" and name in _TAKES:
        what = "takes an item out of a queue.SimpleQueue, which"
        return Effect(what, "use a queue.Queue or a collections.deque", line)
    if module in _HASHES and name == "update":
        return Effect("updates a hash, which", "update a copy() of it, and keep the copy", line)
    return None


class ClassesKept:
    """The classes that modules have before a forward.

    Args:
        modules: the modules, by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._kinds = [(path, module, type(module)) for path, module in modules.items()]

    def check(self, found_at: Callable[[Any, Any], SharedValue | None]) -> None:
        """Raise :class:`RecordingError` if the forward has given a module a class with another
        forward: steps call the one of before.

        Args:
            found_at: returns what is known of a place.
        """
        for path, module, kind in self._kinds:
            if type(module) is not kind and type(module).forward is not kind.forward:
                known = found_at(module, ALL)
                raise RecordingError(
                    f"expected modules that keep their classes, got {path!r}, which the forward "
                    f"makes {type(module).__qualname__} "
                    f"({known.first_write if known else 'unseen'}): a step calls the forward of "
                    "the class that it had before; hold a module of each class, and call one of "
                    "them"
                )


def asks_cache(access: Access, frame: Frame) -> Effect | None:
    """Return the effect of a question to a ``functools.lru_cache`` how often it was used."""
    node = access.node
    if not isinstance(node, ast.Attribute) or node.attr != "cache_info" or access.is_said:
        return None
    if not isinstance(frame.evaluated(node.value), functools._lru_cache_wrapper):
        return None
    what = "asks a functools.lru_cache how often it was used, which"
    return Effect(what, "count in an attribute of the model", frame.line)
