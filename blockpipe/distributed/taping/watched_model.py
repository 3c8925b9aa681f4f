"""Notice, before a step, that the code between modules would do something else than was recorded.

A stage replays that code from a tape, in which the plain values that it has read are constants. The
inside of a module that stays on one stage runs each time, and may read what it likes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from ..._common.callsite import users_line, warn
from ..._common.modules import is_within
from ..._torch.modules import buffers_of
from ...errors import UsageError
from ...recording.recording import Recording
from ...weights.placement import Fingerprint
from .asked_values import asked_outside, value_of
from .read_values import ReadValues
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
        self._values = ReadValues(model)
        self._fingerprint: Fingerprint | None = None
        self._first: Hashable = None  # the state of the recording that was made first
        self._names: frozenset[str] | None = frozenset()  # that it mentions; None: any
        self._buffers: dict[str, tuple[Any, str, Tensor | None]] = {}  # that it reads, by name
        self._states = set[Hashable]()  # the first ones
        self._asked: dict[int, tuple[Tensor, Hashable]] = {}  # whose values it has asked for

    def recorded(self, tape: Tape, recording: Recording) -> None:
        """Note what a forward's code between modules mentions and reads."""
        if tape.names is None or self._names is None:
            self._names = None
        else:
            self._names |= tape.names
        around = [
            module
            for path, module in self._model.named_modules()
            if not any(path != outer and is_within(path, outer) for outer in recording.sealed)
        ]
        self._values.look_around(self._names, around)
        read = (r for entry in tape.entries for r in references((entry.args, entry.kwargs)))
        for name in {r.name for r in (*read, *references(tape.output)) if isinstance(r, Held)}:
            path, _, key = name.rpartition(".")
            buffers = buffers_of(self._model.get_submodule(path))
            if key in buffers:
                self._buffers[name] = buffers, key, buffers[key]
        for tensor in asked_outside(tape):
            self._asked.setdefault(id(tensor), (tensor, value_of(tensor)))

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
        self._values.step_begins()
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

    def _note_buffers(self) -> None:
        for name, (buffers, key, _) in self._buffers.items():
            self._buffers[name] = buffers, key, buffers.get(key)

    def _state(self, fingerprint: Fingerprint) -> Hashable:
        now = [(key, value_of(t), first) for key, (t, first) in self._asked.items()]
        changed = tuple([(key, value) for key, value, first in now if value != first])
        return self._values.state(), changed, fingerprint.modes(), fingerprint.asked()

    def _caution(self) -> None:
        what = ", ".join(self._values.turned())
        warn(
            f"the model has been recorded for {_MOST} states that code between modules may read "
            f"(here {what or 'modes, hooks or settings'}), and is recorded once more now, "
            f"which makes this step slow; register what changes as a buffer, or {REMEDY} "
            f"({users_line()})"
        )
