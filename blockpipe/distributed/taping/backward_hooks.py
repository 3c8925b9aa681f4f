"""Hooks around the backwards of modules, while a tape is written.

To set them, torch looks at the graph of what a module is given. A replay calls a sealed module as
it is, and so with them; there the tape needs none. Around other modules there is nothing that could
call them.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from ..._common.callsite import users_line
from ..._torch.modules import (
    backward_hooks_of_all_modules,
    backward_pre_hooks_of,
    full_backward_hooks_of,
)
from ...errors import RecordingError
from .tape import REMEDY


class BackwardHooksAside:
    """While entered, the modules of a model have no such hooks.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        of = backward_pre_hooks_of, full_backward_hooks_of
        both = [(module, hooks_of(module)) for module in model.modules() for hooks_of in of]
        self._hooks = [(id(module), hooks, {**hooks}) for module, hooks in both if hooks]

    def __enter__(self) -> Self:
        for _, hooks, _ in self._hooks:
            hooks.clear()
        return self

    def __exit__(self, *failure: object) -> None:
        for _, hooks, theirs in self._hooks:
            later: dict[int, Any] = {**hooks}
            hooks.clear()
            hooks.update({**theirs, **later})

    def check_code_between(self, module: nn.Module, path: str) -> None:
        """Refuse such hooks around a module that is called in parts, or beside other hooks."""
        of_all = any(backward_hooks_of_all_modules())
        if of_all or any(key == id(module) for key, _, _ in self._hooks):
            called = f"module {path!r}" if path else "the model"
            whose = f"all modules, and so on {called}" if of_all else called
            raise RecordingError(
                "expected hooks of backwards on modules that each stage calls as a whole, and that "
                f"have no other hooks, got one on {whose} ({users_line()}), which is called in "
                "parts, or has other hooks; register it on the modules inside, on a tensor "
                f"(h.register_hook(…)), or {REMEDY}"
            )
