"""Hooks that every module calls (``register_module_forward_hook``), while a tape is written.

A replay calls a sealed module as it is, and so its hooks of this kind. On the tape they would run
twice; and left out of a replay, one that keeps a log would keep none. So they are a part of the
sealed call. Around the other modules, and beside the user's hooks of one module, they are code
between modules as those are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import nn

from ..._torch.modules import hooks_around_all_modules, of_all_takes_kwargs


class HooksOfAllModules:
    """While entered, such hooks wait at some modules until :meth:`around` runs them.

    Args:
        wait: whether they do at a module that is called now.
    """

    def __init__(self, wait: Callable[[nn.Module], bool]) -> None:
        self._wait = wait
        self._theirs: list[dict[int, Any]] = []

    def __enter__(self) -> Self:
        for hooks in hooks_around_all_modules():
            self._theirs.append({**hooks})
            hooks.update({key: partial(self._call, hook) for key, hook in hooks.items()})
        return self

    def __exit__(self, *failure: object) -> None:
        for hooks, theirs in zip(hooks_around_all_modules(), self._theirs, strict=True):
            hooks.update({key: hook for key, hook in theirs.items() if key in hooks})
        self._theirs.clear()

    def _call(self, hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
        return None if self._wait(module) else hook(module, *given)

    def around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward with those that wait at it, as torch runs them."""
        if not any(self._theirs) or not self._wait(module):
            return forward
        before, after = self._theirs

        def call(*args: Any, **kwargs: Any) -> Any:
            for hook in before.values():
                found = hook(module, args)
                if found is not None:
                    args = found if isinstance(found, tuple) else (found,)
            result = forward(*args, **kwargs)
            for key, hook in after.items():
                named = (kwargs,) if of_all_takes_kwargs(key) else ()
                found = hook(module, args, *named, result)
                result = result if found is None else found
            return result

        return call
