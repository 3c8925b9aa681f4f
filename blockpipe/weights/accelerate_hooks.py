"""The hooks by which Accelerate moves a model's tensors from device to device, and a placement
without them.

``from_pretrained(device_map=…)`` replaces the ``forward`` of each module by one that sends its
arguments to the module's device. A pipeline does that itself, and for a stage that has moved the
hooks would send them elsewhere. They are understood by their attributes, so that Accelerate need
not be there. Accelerate's own functions were no alternative: adding a hook once more looks up tied
tensors by addresses that the training has given to others.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

PREPARED = "_is_accelerate_prepared"
"""The attribute of a model that ``Accelerator.prepare`` has returned."""

_HOOK, _OLD_FORWARD = "_hf_hook", "_old_forward"
# `dispatch_model` also puts warnings in the place of the methods that move the model.
_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")
_ADDED = (_HOOK, _OLD_FORWARD, "forward", *_MOVES)


def offloaded_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules whose tensors Accelerate keeps in host memory or on disk."""
    return [
        path
        for path, module in model.named_modules()
        if any(getattr(hook, "offload", False) is True for hook in _hooks_of(module))
    ]


class AccelerateHooks:
    """Accelerate's device hooks on a model, to be taken off and put back.

    Hooks of other kinds, and forwards that somebody has wrapped since, are left alone.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._taken: list[tuple[nn.Module, dict[str, Any]]] = []

    def take_off(self) -> None:
        """Take off what is there."""
        for module in self._model.modules():
            own = vars(module)
            hooks = list(_hooks_of(module))
            if not hooks or not all(map(_aligns_devices, hooks)) or not _is_wrapper(own):
                continue
            old = own[_OLD_FORWARD]
            self._taken.append((module, {name: own.pop(name) for name in _ADDED if name in own}))
            if getattr(old, "__func__", None) is not type(module).forward:
                own["forward"] = old  # one that the module was given before

    def put_back(self) -> None:
        """Put back what was taken off, but for modules that have other hooks by now."""
        for module, added in self._taken:
            if _HOOK not in vars(module):
                vars(module).update(added)
        self._taken.clear()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While entered, the model has none; at the end it has those that it had before."""
        before = len(self._taken)
        self.take_off()
        try:
            yield
        finally:
            kept, self._taken = self._taken[:before], self._taken[before:]
            self.put_back()
            self._taken = kept


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """Accelerate's hooks on one module; several are in one that has them as ``hooks``."""
    hook = vars(module).get(_HOOK)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def _aligns_devices(hook: object) -> bool:
    return any(kind.__name__ == "AlignDevicesHook" for kind in type(hook).__mro__)


def _is_wrapper(own: dict[str, Any]) -> bool:
    """Whether a module's forward is the one that runs the hook, and nothing around that."""
    forward = own.get("forward")
    return (
        isinstance(forward, functools.partial)
        and _OLD_FORWARD in own
        and str(forward.func.__module__).partition(".")[0] == "accelerate"
    )
