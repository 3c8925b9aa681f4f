"""What copies of a model have in common, and whether a step has changed it.

``copy.deepcopy`` leaves functions, classes and globals as they are, and with them what a closure
holds; and copies have one loss function. To trace the code is not enough: neither a loss nor a
backward runs in a recording, and a library's objects count without the user's code. So the objects
themselves are compared, before and after a copy has run alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.tensors import version_of
from ..contents import is_generator
from ..holders import CacheHolder, ContentHolder, Holder
from ..iterators import is_iterator
from ..model_state import ModelState

_PLAIN = frozenset([bool, int, float, complex, str, bytes, tuple, type(None)])


class SharedObjects:
    """The objects in reach of a model and of other code, as they are now.

    Args:
        model: the model.
        beside: other code, such as a loss.
        is_copied: whether each copy of the model has an object for itself.
    """

    def __init__(
        self, model: nn.Module, beside: object, is_copied: Callable[[object], bool]
    ) -> None:
        self._state = ModelState(model, values=False, others=[beside])  # keeps all of them alive
        self._holders = [
            holder
            for holder in self._state.holders
            if not isinstance(holder, CacheHolder)
            and not isinstance(holder.owner, Tensor)
            and not is_copied(holder.owner)
        ]
        others = [each for each in self._state.objects() if not is_copied(each)]
        self._versions = [(t, version_of(t)) for t in others if isinstance(t, Tensor)]
        self._drawn = [(g, _state_of(g)) for g in others if _draws(g)]
        self._has_iterators = any(map(is_iterator, others))

    def changed(self) -> bool:
        """Return whether one of them is another now, or may be: iterators cannot be compared."""
        if self._has_iterators or any(version_of(t) != then for t, then in self._versions):
            return True
        if any(_state_of(generator) != then for generator, then in self._drawn):
            return True
        return not all(map(_is_same, self._holders))


def _draws(value: Any) -> bool:
    return isinstance(value, torch.Generator) or is_generator(value)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return _frozen(bits.state)
    state = getattr(generator, "getstate", None) or generator.get_state
    return _frozen(state())


def _frozen(state: Any) -> Any:
    """Return a state in which arrays are bytes, to compare it by ``==``."""
    if isinstance(state, dict):
        return {key: _frozen(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_frozen, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def _is_same(holder: Holder) -> bool:
    before, now = holder.before, holder.now()
    if isinstance(holder, ContentHolder):  # each time another copy of it
        return before == now
    if len(before) != len(now):
        return False
    for (key, then), (other, value) in zip(before, now, strict=True):
        if key is not other and key != other:
            return False
        if then is not value and not (
            type(then) is type(value) and type(then) in _PLAIN and then == value
        ):
            return False
    return True
