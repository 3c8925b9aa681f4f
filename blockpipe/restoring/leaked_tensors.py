"""Find tensors of a recording that are still alive after it, and the objects that hold them.

A recording restores all state that it can find (:mod:`blockpipe.restoring.model_state`). This check
finds the rest: the next step would read a fake tensor that was left behind, and compute nothing,
without an error. Caches are not state: a ``functools.lru_cache`` with such a tensor is emptied, and
fills again.
"""

import functools
import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

from torch import Tensor, nn

from .._common.garbage import collect_until
from .._common.nested import tensors
from .._torch.tensors import ASK_FOR_VALUES, FakeTensor, FakeTensorMode
from ..errors import RecordingError

_DEPTH = 4
_TABLE = "hamt"  # the class of a context's table, and of its nodes
_OURS = __name__.partition(".")[0] + "."
# These values of a function lead on to all other objects.
_NO_VALUES = (type, types.ModuleType, types.FunctionType, nn.Module, Tensor)


class TrackedFakes(FakeTensorMode):
    """Remembers the tensors that it makes, without holding them.

    Attributes:
        failed: gets the errors of operations whose results follow from values.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.failed = list[Exception]()
        self._made: list[weakref.ref[FakeTensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except ASK_FOR_VALUES as error:
            self.failed.append(error)
            raise
        self._made += [weakref.ref(t) for t in tensors(result) if isinstance(t, FakeTensor)]
        return result

    def check_nothing_is_left(self) -> None:
        """Raise :class:`RecordingError` for a tensor that an object still holds."""
        if not self._is_any_left() or collect_until(lambda: not self._is_any_left()):
            return
        with _emptied(gc.get_objects()) as everything:
            self.empty_caches(everything)
        for made in self._made:
            tensor = made()
            # A tensor that no object holds is torch's own (autocast's cache of casts).
            if tensor is None or _is_in_graphs_alone(tensor):
                continue
            if holder := _holder(tensor):
                raise RecordingError(
                    f"the forward left a tensor of shape {tuple(tensor.shape)} of the recording in "
                    f"{holder}, where Blockpipe cannot restore the value of before, and a later "
                    "step would compute with the tensor; keep state on a module of the model, "
                    "or in a global of the module that defines it"
                )

    def empty_caches(self, among: Iterable[object]) -> None:
        """Empty each ``functools.lru_cache`` that keeps one of the tensors, which only costs time.

        Args:
            among: the caches to look into.
        """
        for found in among:
            if type(found) is functools._lru_cache_wrapper and self._is_in(found):
                found.cache_clear()

    def _is_any_left(self) -> bool:
        return any(made() is not None for made in self._made)

    def _is_in(self, cache: object) -> bool:
        """Whether a tensor is among the values that a function returned, or among its arguments."""
        level = gc.get_referents(cache)
        for _ in range(_DEPTH):
            if any(isinstance(held, FakeTensor) and held.fake_mode is self for held in level):
                return True
            level = gc.get_referents(*(held for held in level if not isinstance(held, _NO_VALUES)))
        return False


def _is_in_graphs_alone(
    value: object, depth: int = 2 * _DEPTH, ours: frozenset[int] = frozenset()
) -> bool:
    """Return whether nothing leads to an object but functions that no object of Python's holds.

    They are what packs saved tensors. A graph keeps it, and keeps itself if it is given back the
    result of an operation as it is, until a backward: a recording runs none.

    Args:
        value: the object.
        depth: how many objects may be on the way.
        ours: ids of the lists of objects that hold it here.
    """
    is_held = False
    with _emptied(gc.get_referrers(value)) as holders:
        ours |= {id(holders)}
        for holder in holders:
            if isinstance(holder, types.FrameType) or id(holder) in ours:
                continue
            is_held = True
            if not depth or not _is_in_graphs_alone(holder, depth - 1, ours):
                return False
    return is_held or isinstance(value, types.FunctionType | types.MethodType)


@contextmanager
def _emptied(found: list[Any]) -> Iterator[list[Any]]:
    """Empty a list at the end of a block: a thread that looks at the frames of others (a sampling
    profiler, our own watch over processes) may keep ours alive, and what is in their variables."""
    try:
        yield found
    finally:
        found.clear()


def _holder(value: object) -> str:
    """Describe the chain of objects that hold it; empty if it begins at variables of calls."""
    steps: list[str] = []
    for _ in range(_DEPTH):
        found = _holding(value)
        if found is None:
            return ""
        if isinstance(found, dict):
            key = _key_of(found, value)
            owner = _holding(found)
            if _is_ours(owner) or isinstance(owner, FakeTensor):
                # By another thread's call that waits for the recording's end; or by another tensor,
                # which is looked at itself, and may be kept by the first one's graph alone.
                return ""
            if isinstance(owner, types.ModuleType):
                return ", in ".join([*steps, f"{owner.__name__}.{key}"])
            if getattr(owner, "__dict__", None) is found:
                return ", in ".join([*steps, f"{type(owner).__name__}.{key}"])
            steps.append(f"a dict under {key!r}")
        elif isinstance(found, tuple) and not steps:
            return ""  # the arguments of a running call, maybe in another thread
        elif (variable := _variable_of(found, value)) is not None:
            return ", in ".join([*steps, f"the context variable {variable.name!r}"])
        elif _is_ours(found):
            return ""
        else:
            steps.append(f"a {type(found).__name__}")
        value = found
    return ", in ".join(steps)


def _variable_of(found: object, value: object) -> ContextVar[Any] | None:
    """Return the context variable with a value that a node of a context's table holds."""
    if not type(found).__name__.startswith(_TABLE):
        return None
    return next((variable for variable, held in copy_context().items() if held is value), None)


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith(_OURS)


def _holding(value: object) -> Any:
    """Return one of the objects that hold another; frames of running calls do not count."""
    with _emptied(gc.get_referrers(value)) as holders:
        return next((one for one in holders if not isinstance(one, types.FrameType)), None)


def _key_of(found: dict[Any, Any], value: object) -> Any:
    for key, member in found.items():
        if member is value:
            return key
    return None
