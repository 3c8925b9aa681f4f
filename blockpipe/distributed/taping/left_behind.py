"""The attributes of open modules that a forward sets, and the hooks that it adds or removes.

A tensor that is only kept there, in the place of an earlier one, is set again in each run. Anything
else is refused: a later forward could read it, or ask whether it is there, and a hook that has
removed itself would be replayed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..._torch.modules import SLOTS, buffers_of, forward_hooks_of, forward_pre_hooks_of
from ...errors import RecordingError
from ...recording.recording import Recording
from .code_seen import CodeSeen
from .mode import TapingMode
from .tape import REMEDY


class StatesBefore:
    """The attributes of open modules, and the hooks around calls, before a forward, to compare with
    those after it."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        sealed = recording.sealed.keys()
        self._kept = [
            (path, module, _members(module))
            for path, module in model.named_modules()
            if not any(_is_in(path, outer) for outer in sealed)
        ]
        self._hooks = [
            (path, hooks, dict(hooks))
            for path, module in model.named_modules()
            if not any(_is_in(path, outer) and path != outer for outer in sealed)  # as it is called
            for hooks in (forward_pre_hooks_of(module), forward_hooks_of(module))
        ]

    def settle(self, mode: TapingMode, seen: CodeSeen) -> None:
        """Write down what keeps tensors in attributes.

        Args:
            mode: has watched the forward.
            seen: the code that has run.

        Raises:
            RecordingError: an attribute has changed in a way that a tape cannot hold, or a hook was
                added or removed.
        """
        for path, hooks, known in self._hooks:
            for key in known.keys() ^ hooks.keys():
                _refuse_hook(
                    path, known[key] if key in known else hooks[key], is_removed=key in known
                )
        for path, module, before in self._kept:
            after = _members(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                if old is new:
                    continue
                if isinstance(new, Tensor) or isinstance(old, Tensor):
                    where = f"{path or 'the model'}.{name}"
                    keep = partial(setattr, module, name)
                    is_attribute = name not in buffers_of(module)
                    if not (is_attribute and mode.note_kept(keep, old, new, where)):
                        self._refuse(path, name, new, seen.line_that_sets(name))
                elif not bool(old == new):
                    self._refuse(path, name, new, seen.line_that_sets(name))

    def _refuse(self, path: str, name: str, new: object, line: str) -> None:
        warm_up = (
            "call the model once before if it only keeps it there"
            if isinstance(new, Tensor)
            else "call the model once before if only its first forward does so"
        )
        raise RecordingError(
            "expected a forward that leaves nothing behind between modules, got one "
            f"that sets {name!r} of {path or 'the model'!r} ({line}), which a "
            f"replayed stage would not do; return it, {warm_up}, or {REMEDY}"
        )


def _refuse_hook(path: str, hook: Any, *, is_removed: bool) -> None:
    code = getattr(hook, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    raise RecordingError(
        "expected a forward that leaves nothing behind between modules, got one that "
        f"{'removes' if is_removed else 'adds'} a hook of {path or 'the model'!r}{where}, which a "
        "replayed stage would not do; call the model once before if only its first forward does "
        f"so, or {REMEDY}"
    )


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _members(module: nn.Module) -> dict[str, Any]:
    own = {k: v for k, v in vars(module).items() if k not in (*SLOTS, "forward")}
    return {**own, **buffers_of(module)}
