"""Notice, before a step, that the code between modules would do something else than was recorded.

A stage replays that code from a tape, in which the plain values that it has read are constants. The
inside of a module that stays on one stage runs each time, and may read what it likes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from ..._common.callsite import users_line, warn
from ..._torch.modules import buffers_of
from ...errors import UsageError
from ...preparation.watched_values import WatchedValues
from ...restoring.holders import FunctionHolder, Holder
from ...restoring.model_state import ModelState
from ...weights.placement import Fingerprint
from .tape import REMEDY, Held, Tape, references

_MOST = 8  # recordings for values that change before it is told what they cost; a guess


class WatchedModel:
    """What the code between a model's modules may read, beside the arguments.

    Args:
        model: the user's model.

    Attributes:
        state: what the model's recordings depend on, in the present step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state: Hashable = ()
        self._model = model
        self._values = WatchedValues(model)
        self._fingerprint: Fingerprint | None = None
        self._first: Hashable = None  # the state of the recording that was made first
        self._names: set[str] | None = set()  # that code between modules mentions; None: any
        self._tensors: list[tuple[Holder, Any, Tensor]] = []  # that no module registered
        self._replaced = 0  # how often one of them was replaced
        self._buffers: dict[str, tuple[Any, str, Tensor | None]] = {}  # that it reads, by name
        self._states = set[Hashable]()  # the first ones

    def look_around(self) -> None:
        """Find what a forward may read; called before a recording."""
        self._values.look_around()
        holders = ModelState(self._model, values=False, contents=False).holders
        held = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        self._tensors = [
            (holder, key, value)
            for holder in holders
            if holder.namespace() is not None
            for key, value in holder.now()
            if isinstance(value, Tensor) and id(value) not in held
        ]
        for holder in holders:
            holder.forget()

    def recorded(self, tape: Tape) -> None:
        """Note what a forward's code between modules mentions and reads."""
        if tape.names is None or self._names is None:
            self._names = None
        else:
            self._names |= tape.names
        read = (r for entry in tape.entries for r in references((entry.args, entry.kwargs)))
        for name in {r.name for r in (*read, *references(tape.output)) if isinstance(r, Held)}:
            path, _, key = name.rpartition(".")
            buffers = buffers_of(self._model.get_submodule(path))
            if key in buffers:
                self._buffers[name] = buffers, key, buffers[key]

    def placed(self) -> None:
        """Note how the model is, now that its tensors are where they stay."""
        self._fingerprint = Fingerprint(self._model)
        self._note_buffers()
        self._first = self._state(self._fingerprint)

    def step_begins(self) -> None:
        """Find the state that recordings of this step depend on.

        Raises:
            UsageError: modules, parameters, buffers or marks are not what they were.
        """
        if self._fingerprint is None:
            return
        if self._fingerprint.is_replanned() or not self._fingerprint.fits():
            raise UsageError(
                "expected the modules, parameters and marks that the model had when its "
                "DistributedPipeline was made, on their devices, got others, or another forward "
                f"({users_line()}); make a new pipeline after such a change"
            )
        for name, (buffers, key, before) in self._buffers.items():
            if buffers.get(key) is not before:
                raise UsageError(
                    f"expected buffer {name!r} that code between modules reads, got another tensor "
                    f"in its place ({users_line()}); write to it: {name}.copy_(…)"
                )
        self._values.has_turned()
        state = self._state(self._fingerprint)
        self.state = () if state == self._first else state
        if len(self._states) <= _MOST and self.state not in self._states:
            self._states.add(self.state)
            if len(self._states) > _MOST:
                self._caution()

    def step_is_over(self) -> None:
        """Note what the forward itself has set."""
        self._values.step_is_over()
        self._note_buffers()
        self._tensors = [(h, k, _member(h, k, tensor)) for h, k, tensor in self._tensors]

    def _note_buffers(self) -> None:
        for name, (buffers, key, _) in self._buffers.items():
            self._buffers[name] = buffers, key, buffers.get(key)

    def _state(self, fingerprint: Fingerprint) -> Hashable:
        for holder, key, tensor in self._tensors:
            if self._is_read(holder, key) and _member(holder, key, None) is not tensor:
                self._replaced += 1
                break
        values = [
            (index, value)
            for index, (holder, key, value) in enumerate(self._values.turned())
            if self._is_read(holder, key)
        ]
        return self._replaced, (*values,), fingerprint.modes(), fingerprint.asked()

    def _is_read(self, holder: Holder, key: Any) -> bool:
        """Return whether code between modules may read a member. What is in a container may be read
        without its name."""
        if self._names is None or not isinstance(key, str):
            return True
        is_container = isinstance(holder.owner, Mapping | Sequence | Set)
        return is_container or isinstance(holder, FunctionHolder) or key in self._names

    def _caution(self) -> None:
        turned = self._values.turned()
        read = [(holder, key) for holder, key, _ in turned if self._is_read(holder, key)]
        what = ", ".join(f"{key!r} of {type(holder.owner).__name__}" for holder, key in read)
        warn(
            f"the model has been recorded for {_MOST} states that code between modules may read "
            f"(here {what or 'tensors that no module registered'}), and is recorded once more now, "
            f"which makes this step slow; register what changes as a buffer, or {REMEDY} "
            f"({users_line()})"
        )


def _member(holder: Holder, key: Any, default: Any) -> Any:
    try:
        return holder.namespace()[key]
    except LookupError:
        return default
