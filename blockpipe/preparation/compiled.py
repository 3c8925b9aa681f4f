"""Sealed modules compiled, and captured as CUDA graphs, for the time of a step.

The stand-in of a sealed module calls compiled code instead of its ``forward``; the module itself
stays as it was. So code outside of Blockpipe (``state_dict``, other callers of the model) never
meets a compiled module.

torch keeps no more than ``recompile_limit`` (8) compiled versions of a code object, and runs all
further ones uncompiled. ``torch.compile(module.forward)`` of ten modules of one class makes ten
versions of one code object. So each *kind* of module has a code object of its own here, and modules
of one kind share its compiled version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn

from .._torch.modules import has_hooks
from .captured import CapturedGraphs, Captures
from .sealed_forwards import SealedForwards


class CompiledModules:
    """The compiled code that stands in for the sealed modules of one recording.

    Args:
        sealed_forwards: the stand-ins of the recording, which call it.
        options: options of ``torch.compile``; ``None``: modules are captured, and not compiled.
        cuda_graphs: whether to capture the modules' calls.
        changed: the objects whose values a forward changes, by id.
    """

    def __init__(
        self,
        sealed_forwards: SealedForwards,
        options: Mapping[str, Any] | None,
        *,
        cuda_graphs: bool,
        changed: Set[int] = frozenset(),
    ) -> None:
        self.captures = Captures(changed)
        self._cuda_graphs = cuda_graphs
        self.graphs: dict[str, CapturedGraphs] = {}  # by the path of the module
        # Paths of modules with calls that ran uncompiled.
        self.uncompiled: set[str] = set()
        self._hooked: list[str] = []  # paths of modules with hooks inside
        self._options = options
        self._codes: dict[Any, CodeType] = {}  # by kind of module
        self._is_first = True
        # A capture has its activations in memory of its own.
        self.paths = sealed_forwards.stand_in(self._wrap, recomputes=not cuda_graphs)

    def _wrap(
        self, path: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        if not any(True for _ in module.parameters()):
            return None  # an activation, a dropout: checking a compiled call would cost as much
        if self._options is not None:
            if _has_hooks_inside(module):
                self._hooked.append(path)
                return None
            forward = self._compiled(path, module, forward)
        if self._cuda_graphs:
            forward = self.graphs[path] = CapturedGraphs(module, forward, self.captures)
        return forward

    def _compiled(
        self, path: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # traced, this is gone: torch gave up on the call
                self.uncompiled.add(path)
            return forward(*args, **kwargs)

        # The name is for torch's logs.
        own = call.__code__.replace(co_name=f"{type(module).__name__} {path}")
        call.__code__ = self._codes.setdefault(_kind(module, forward), own)
        return torch.compile(call, **self._options or {})

    def notes(self) -> Iterator[str]:
        """Yield what was compiled and captured, and what was not, for the summary."""
        if self._options is not None:
            compiled = [path for path in self.paths if path not in self.uncompiled]
            yield f"compiled: {', '.join(compiled) or 'nothing'}"
        if self.uncompiled:
            yield (
                f"run uncompiled: {', '.join(sorted(self.uncompiled))}, some calls or all (torch "
                'compiles a module a limited number of times; TORCH_LOGS="recompiles" says why it '
                "did so anew)"
            )
        if self._hooked:
            yield f"not compiled, for modules inside of them have hooks: {', '.join(self._hooked)}"
        if self.graphs:
            captured = [path for path, graphs in self.graphs.items() if not graphs.failure]
            yield f"captured as CUDA graphs: {', '.join(captured) or 'nothing'}"
        failures: dict[str, list[str]] = {}
        for path, graphs in self.graphs.items():
            if graphs.failure:
                failures.setdefault(graphs.failure, []).append(path)
        for why, paths in failures.items():
            yield f"not captured as CUDA graphs: {', '.join(paths)}: {why}"

    @contextmanager
    def step(self, in_flight: int, *, keeps_graphs: bool) -> Iterator[None]:
        """Stand around a step: captures are made in the first one, and replayed in later ones.

        Args:
            in_flight: the most micro-batches that are under way at once. If they are more than
                each call has captures, none is used.
            keeps_graphs: whether autograd graphs outlive the step, as those of ``pipe(x)`` do.
                Then it is not known when a capture's memory is free again, and none is used.
        """
        for graphs in self.graphs.values():
            graphs.new_step()
        captures = self.captures
        if self._is_first:
            captures.slots = in_flight
        if not keeps_graphs and in_flight <= captures.slots:
            captures.phase = "capture" if self._is_first else "replay"
        try:
            yield
            self._is_first = self._is_first and keeps_graphs
        finally:
            captures.phase = "off"


def _has_hooks_inside(module: nn.Module) -> bool:
    """Whether a module inside of one has hooks. torch compiles them in, and does not ask again
    whose they are: like modules, which share code, would run those of the first one."""
    return any(has_hooks(inner) for inner in module.modules() if inner is not module)


def _kind(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """Return what compiled code of a module is specialized to, as far as that can be seen."""
    parts: list[Any] = [getattr(forward, "__func__", forward)]
    for name, inner in module.named_modules():
        plain = [(key, value) for key, value in vars(inner).items() if isinstance(value, _PLAIN)]
        # A mark does not make it another kind.
        parts.append((name, type(inner), *(p for p in plain if not p[0].startswith("_blockpipe"))))
    for held in (module.named_parameters(), module.named_buffers()):
        parts += [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in held]
    return tuple(parts)


_PLAIN = (bool, int, float, str, type(None))
