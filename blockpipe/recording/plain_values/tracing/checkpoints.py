"""Tell which code of a traced forward ``torch.utils.checkpoint`` will run again in the backward.

By then other micro-batches' forwards may have set what it reads. The stack tells it for both kinds
of checkpoints; torch's hooks on saved tensors would tell of one kind only, and a hook of the user's
hides them.
"""

from __future__ import annotations

import types

from torch.utils import checkpoint

from ..values import ApartRun

_TORCHS = checkpoint.__file__
_CALLERS = ("checkpoint", "forward")  # the functions there that call the user's


class CheckpointedFrames:
    """The frames of the user's code that run, and the checkpoints that they are in."""

    def __init__(self) -> None:
        self._runs: dict[int, ApartRun | None] = {}  # by the id of a frame of the user's
        self._latest: tuple[types.FrameType, ApartRun] | None = None

    def begins(self, frame: types.FrameType) -> None:
        """Note that a frame begins, or goes on."""
        self._runs[id(frame)] = self._around(frame)

    def ends(self, frame: types.FrameType) -> None:
        """Note that a frame ends, or stops for a while."""
        self._runs.pop(id(frame), None)

    def of(self, frame: object) -> ApartRun | None:
        """Return what the checkpoint around a frame does, the outermost one; ``None`` outside of
        any."""
        return self._runs.get(id(frame))

    def forget(self) -> None:
        """Release the frame of the latest checkpoint."""
        self._latest = None

    def _around(self, frame: types.FrameType) -> ApartRun | None:
        outer = frame.f_back
        while outer is not None:
            if id(outer) in self._runs and (found := self._runs[id(outer)]) is not None:
                return found
            if outer.f_code.co_filename == _TORCHS and outer.f_code.co_name in _CALLERS:
                return self._run_of(outer)
            if id(outer) in self._runs:
                return None
            outer = outer.f_back
        return None

    def _run_of(self, caller: types.FrameType) -> ApartRun:
        if self._latest is None or self._latest[0] is not caller:
            self._latest = caller, ApartRun()
        return self._latest[1]
