"""Sealed modules compiled, and captured as CUDA graphs, for the time of a step.

The stand-in of a sealed module calls compiled code instead of its ``forward``; the module itself
stays as it was. So code outside of Blockpipe (``state_dict``, other callers of the model) never
meets a compiled module.

``torch.compile(mode="reduce-overhead")`` has CUDA graphs too, but of one micro-batch: its graphs
share memory in the order in which they were recorded, and a pipeline interleaves several forwards
before the first backward. Here each micro-batch in flight has captures of its own.

torch keeps no more than ``recompile_limit`` (8) compiled versions of a code object, and runs all
further ones uncompiled. ``torch.compile(module.forward)`` of ten modules of one class makes ten
versions of one code object. So each *kind* of module has a code object of its own here, and modules
of one kind share its compiled version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._common.nested import leaves, map_leaves, tensors
from .._torch.graph import gradient_hooks
from ..stages.cursor import current_microbatch
from .sealed_forwards import SealedForwards


class _Own(torch.autograd.Function):
    """Identity whose backward hands on copies: a replay writes into the same gradients again, and
    ``.grad`` would be one of them (autograd keeps the first gradient that comes, uncopied)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves = [t if t.is_leaf and t.requires_grad else None for t in inputs]
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(
            g if g is None or (leaf is not None and _adds_up(leaf)) else g.clone()
            for g, leaf in zip(gradients, ctx.leaves, strict=True)
        )


def _adds_up(leaf: Tensor) -> bool:
    """Whether a gradient is added to one that is there already, and no hook sees it."""
    return leaf.grad is not None and not gradient_hooks(leaf)


class CompiledModules:
    """The compiled code that stands in for the sealed modules of one recording.

    Args:
        sealed_forwards: the stand-ins of the recording, which call it.
        options: options of ``torch.compile``; ``None``: modules are captured, and not compiled.
        cuda_graphs: whether to capture the modules' calls.
    """

    def __init__(
        self,
        sealed_forwards: SealedForwards,
        options: Mapping[str, Any] | None,
        *,
        cuda_graphs: bool,
    ) -> None:
        self.slots = 0  # the most micro-batches in flight: as in the first step
        self._cuda_graphs = cuda_graphs
        self.phase: Literal["off", "capture", "replay"] = "off"
        self.graphs: list[CapturedGraphs] = []
        # Paths of modules with calls that ran uncompiled.
        self.uncompiled: set[str] = set()
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
            forward = self._compiled(path, module, forward)
        if self._cuda_graphs:
            forward = CapturedGraphs(module, forward, self)
            self.graphs.append(forward)
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
        compiled = [path for path in self.paths if path not in self.uncompiled]
        yield f"compiled: {', '.join(compiled) or 'nothing'}"
        if self.uncompiled:
            yield (
                f"run uncompiled: {', '.join(sorted(self.uncompiled))}, some calls or all (torch "
                'compiles a module a limited number of times; TORCH_LOGS="recompiles" says why it '
                "did so anew)"
            )
        failures = [graphs.failure for graphs in self.graphs if graphs.failure]
        for why in dict.fromkeys(failures):
            yield f"not captured as a CUDA graph: {why}"

    @contextmanager
    def step(self, in_flight: int, *, keeps_graphs: bool) -> Iterator[None]:
        """Stand around a step: captures are made in the first one, and replayed in later ones.

        Args:
            in_flight: the most micro-batches that are under way at once. If they are more than
                each call has captures, none is used.
            keeps_graphs: whether autograd graphs outlive the step, as those of ``pipe(x)`` do.
                Then it is not known when a capture's memory is free again, and none is used.
        """
        for graphs in self.graphs:
            graphs.new_step()
        if self._is_first:
            self.slots = in_flight
        if not keeps_graphs and in_flight <= self.slots:
            self.phase = "capture" if self._is_first else "replay"
        try:
            yield
            self._is_first = self._is_first and keeps_graphs
        finally:
            self.phase = "off"


class CapturedGraphs:
    """A sealed module's calls as CUDA graphs: one capture for each signature and micro-batch in
    flight.

    Captures are made in the first step, which runs in one thread; a call of another signature
    after that (a smaller last batch) runs as it was written.

    Args:
        module: the module whose parameters the calls read.
        forward: the function to capture.
        shared: the step's phase: whether calls may be captured, or replayed.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        shared: CompiledModules,
    ) -> None:
        self.module = module
        self.forward = forward
        self.shared = shared
        self.failure: str | None = None
        self._captured: dict[Any, Callable[..., Any]] = {}
        self._calls: dict[tuple[int, Any], int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = current_microbatch()
        signature = _signature(self.module, args, kwargs)
        given = list(tensors((args, kwargs)))
        usable = self.shared.phase != "off" and all(t.is_cuda for t in given)
        if microbatch is None or signature is None or not usable:
            return self.forward(*args, **kwargs)
        count = self._calls.get((microbatch, signature), 0)  # of this micro-batch's calls
        self._calls[microbatch, signature] = count + 1
        key = signature, count, microbatch % self.shared.slots
        graphed = self._captured.get(key)
        if graphed is None:
            full = len(self._captured) >= 4 * self.shared.slots
            if self.shared.phase != "capture" or self.failure or full:
                return self.forward(*args, **kwargs)
            try:
                graphed = self._captured[key] = self._capture(args, kwargs)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return self.forward(*args, **kwargs)
        inputs = (*given, *self.module.parameters())
        return graphed(*_Own.apply(*inputs))

    def new_step(self) -> None:
        """Begin to count calls anew."""
        self._calls.clear()

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        given = list(tensors((args, kwargs)))
        parameters = list(self.module.parameters())

        outputs: list[Any] = []  # of the newest run, with leaves that are no tensors

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            rest = iter(inputs)
            new_args, new_kwargs = map_leaves(
                lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            outputs[:] = [self.forward(*new_args, **new_kwargs)]
            return tuple(tensors(outputs[0]))

        samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        with _buffers_kept(self.module):  # warming up runs the module some times
            graphed: Callable[..., Any] = torch.cuda.make_graphed_callables(
                run, (*samples, *parameters), allow_unused_input=True
            )
        structure = map_leaves(lambda leaf: _HERE if isinstance(leaf, Tensor) else leaf, outputs[0])

        def replay(*inputs: Tensor) -> Any:
            made = iter([made.clone() for made in graphed(*inputs)])
            return map_leaves(lambda leaf: next(made) if leaf is _HERE else leaf, structure)

        return replay


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
_HERE = object()  # where an output has a tensor


def _signature(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a capture of a call depends on; ``None``: the call cannot be captured.

    A capture reads parameters and buffers at their addresses: other storage needs another capture.
    """
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    parts: list[Any] = [torch.is_grad_enabled(), module.training, autocast]
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, bool | int | float | str | None):
            parts.append((type(leaf), leaf))
        else:
            return None
    parts.append(repr(map_leaves(lambda leaf: 0, (args, kwargs))))  # how they are nested
    parts += [(p.data_ptr(), p.requires_grad) for p in module.parameters()]
    parts += [b.data_ptr() for b in module.buffers()]
    return tuple(parts)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
