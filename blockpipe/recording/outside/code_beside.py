"""Changes for a while by a loss, or by code that autograd calls, which other stages run under.

That code does not run in a recording, and takes no turns with the other lanes in a step: its source
tells what it calls.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.modules import module as hooks_of_all
from torch.nn.utils import stateless

from ..._torch.modules import within
from ...crossing.torch_patches import SETTERS, original_of
from ..entries import SharedChange
from ..plain_values.evaluation.expressions import Frame
from ..plain_values.still_code import frames_of
from ..plain_values.syntax.accesses import calls_of

_ON_MODULES = frozenset(
    name for name in vars(nn.Module) if name.startswith("register_") and name.endswith("_hook")
)
_WHILE = "others run under it"
_AROUND = "do it around the whole step, or on a copy of the module"


@cache
def _settings() -> tuple[Any, ...]:
    """The functions that change a setting of torch or of the process, for every thread."""
    of_all = [f for name, f in vars(hooks_of_all).items() if name.startswith("register_module_")]
    setters = ((vars(importlib.import_module(module)), name) for module, name in SETTERS)
    return (
        *(original_of(names[name]) for names, name in setters if name in names),
        *(contextlib.chdir, sys.setrecursionlimit, torch.autograd.anomaly_mode.detect_anomaly),
        *(torch.backends.mkldnn.flags, sdpa_kernel, *of_all),
    )


def changes_others(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what it calls, may change for a while what other stages use."""
    return any(True for _ in _changes(function, None))


def _changes(
    function: Callable[..., Any], given: object
) -> Iterator[tuple[str, nn.Module | None, str]]:
    """Yield what changes, the module that is changed, if it is one, and the line."""
    for still in frames_of(function, given):
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        for call in calls_of(still.f_code):
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                called: Any = original_of(frame.bound(call.func))
                where = f"{still.f_code.co_filename}:{call.lineno}"
                if any(called is one for one in _settings()):
                    yield called.__name__, None, where
                elif called in (torch.func.functional_call, stateless.functional_call):
                    module = frame.evaluated(call.args[0])
                    if isinstance(module, nn.Module):
                        yield "functional_call", module, where
                elif isinstance(called, types.MethodType) and called.__name__ in _ON_MODULES:
                    module = called.__self__
                    yield called.__name__, module if isinstance(module, nn.Module) else None, where
                elif _is_patch(called):
                    yield "unittest.mock.patch", None, where


def _is_patch(called: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    if mock is None:
        return False
    return called in (mock.patch, mock.patch.object, mock.patch.dict, mock.patch.multiple)


class CodeBeside:
    """Such changes in one recorded forward.

    Args:
        modules: the model's modules, by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._paths = {id(module): path for path, module in modules.items()}
        self._found: list[tuple[str, nn.Module | None, str, int]] = []

    def note(self, function: Callable[..., Any], given: object, hop: int) -> None:
        """Note what a function changes that runs on a hop, or in its backward."""
        self._found += [(*change, hop) for change in _changes(function, given)]

    def shared(self, hops: int, on: Mapping[str, Iterable[int]]) -> Iterator[SharedChange]:
        """Yield the changes that other hops see.

        Args:
            hops: how many there are.
            on: by the path of a module, the hops that call it.
        """
        for what, module, where, hop in self._found:
            seen = set(range(hops))
            if module is not None:
                paths = [self._paths[id(m)] for m in within(module) if id(m) in self._paths]
                seen = {one for path in paths for one in on.get(path, ())} | {hop}
            if seen - {hop}:
                name = f"what {what}() sets, in a loss or a hook"
                yield SharedChange(name, _WHILE, sorted(seen), where, _AROUND)
