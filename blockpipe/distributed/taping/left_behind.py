"""Refuse a forward that sets attributes of open modules, which a tape would not set again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._torch.modules import SLOTS, buffers_of
from ...errors import RecordingError
from ...recording.recording import Recording
from .tape import REMEDY


class StatesBefore:
    """The attributes of open modules before a forward, to compare with those after it."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        sealed = recording.sealed.keys()
        self._kept = [
            (path, module, _members(module))
            for path, module in model.named_modules()
            if not any(_is_in(path, outer) for outer in sealed)
        ]

    def check(self) -> None:
        """Raise :class:`RecordingError` if an attribute has changed."""
        for path, module, before in self._kept:
            after = _members(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                if old is not new and (isinstance(new, Tensor) or isinstance(old, Tensor)):
                    same = False
                else:
                    same = old is new or bool(old == new)
                if not same:
                    raise RecordingError(
                        "expected a forward that leaves nothing behind between modules, got one "
                        f"that sets {name!r} of {path or 'the model'!r} ({users_line()}), which a "
                        f"replayed stage would not do; return it, or {REMEDY}"
                    )


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _members(module: nn.Module) -> dict[str, Any]:
    own = {k: v for k, v in vars(module).items() if k not in (*SLOTS, "forward")}
    return {**own, **buffers_of(module)}
