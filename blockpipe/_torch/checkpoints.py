"""``torch.distributed.checkpoint`` beside tensors on several accelerators of one process.

It copies to the host without blocking, and then waits for the current device alone: what it saves
of another device may be what the memory held before. torch means one device for each process, and
a pipeline has several, so once a model is spread over them the two functions that copy are replaced
by ones that wait for all.

Source: ``_OverlappingCpuLoader`` in torch's ``distributed/checkpoint/filesystem.py``, by which
``save`` copies, and ``StateDictStager`` in ``_state_dict_stager.py``, by which ``async_save`` does.
"""

import functools
import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PACKAGE = "torch.distributed.checkpoint"


def _mend_loader(module: ModuleType) -> None:
    """Let what is not on the device whose stream it waits for be copied in the blocking way."""
    loader = getattr(module, "_OverlappingCpuLoader", None)
    if loader is None:  # other names, in a later torch
        return
    begin = loader.__init__

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        resolve, own = self.resolve_fun, self.stream.device

        def resolved(item: Any) -> Any:
            found = resolve(item)
            is_own = not isinstance(found, Tensor) or found.device in (own, torch.device("cpu"))
            return found if is_own else found.detach().cpu()

        self.resolve_fun = resolved

    loader.__init__ = begun


def _mend_stager(module: ModuleType) -> None:
    """Wait for every device that something was copied from."""
    stager = getattr(module, "StateDictStager", None)
    if stager is None:
        return
    stage = stager.stage

    @functools.wraps(stage)
    def staged(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        found = stage(self, state_dict, *args, **kwargs)
        for device in {leaf.device for leaf in tree_leaves(state_dict) if isinstance(leaf, Tensor)}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)
        return found

    stager.stage = staged


_MENDS: dict[str, Callable[[ModuleType], None]] = {
    f"{_PACKAGE}.filesystem": _mend_loader,
    f"{_PACKAGE}._state_dict_stager": _mend_stager,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Mends the modules that are imported later: to import them takes most of a second."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mend = _MENDS.get(name)
        if mend is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                mend(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


@functools.cache
def wait_for_all_devices() -> None:
    """From now on, checkpoints wait for the copies of every device that they save from."""
    for name, mend in _MENDS.items():
        if (module := sys.modules.get(name)) is not None:
            mend(module)
    sys.meta_path.insert(0, _Finder())
