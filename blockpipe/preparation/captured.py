"""Calls of sealed modules as CUDA graphs, one capture for each micro-batch in flight.

``torch.compile(mode="reduce-overhead")`` has CUDA graphs too, but of one micro-batch: its graphs
share memory in the order in which they were recorded, and a pipeline interleaves several forwards
before the first backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._common.nested import leaves, map_leaves, tensors
from .._torch.graph import gradient_hooks, leaves_of_graph
from .._torch.modules import buffers_of
from .._torch.tensors import version_of
from ..stages.cursor import current_microbatch


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


@dataclass
class Captures:
    """What the captures of one recording share.

    Args:
        changed: the objects whose values a forward changes, by id: a replay has no Python that
            would change them.
    """

    changed: Set[int]
    phase: Literal["off", "capture", "replay"] = "off"
    slots: int = 0
    """The most micro-batches in flight: as in the first step."""


class CapturedGraphs:
    """A sealed module's calls as CUDA graphs: one capture for each signature and micro-batch in
    flight.

    Captures are made in the first step, which runs in one thread; a call of another signature
    after that (a smaller last batch) runs as it was written.

    Args:
        module: the module whose parameters the calls read.
        forward: the function to capture.
        shared: the step's phase: whether calls may be captured, or replayed.

    Attributes:
        failure: why it is not captured.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        shared: Captures,
    ) -> None:
        self.module = module
        self.forward = forward
        self.shared = shared
        self.failure = _why_not(module, shared.changed)
        self._captured: dict[Any, Callable[..., Any]] = {}
        self._calls: dict[tuple[int, Any], int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = current_microbatch()
        if self.failure or self.shared.phase == "off" or microbatch is None:
            return self.forward(*args, **kwargs)
        signature = _signature(self.module, args, kwargs)
        given = list(tensors((args, kwargs)))
        if signature is None or not all(map(_can_be_captured, given)):
            return self.forward(*args, **kwargs)
        count = self._calls.get((microbatch, signature), 0)  # of this micro-batch's calls
        self._calls[microbatch, signature] = count + 1
        key = signature, count, microbatch % self.shared.slots
        graphed = self._captured.get(key)
        if graphed is None:
            full = len(self._captured) >= 4 * self.shared.slots
            if self.shared.phase != "capture" or full:
                return self.forward(*args, **kwargs)
            try:
                graphed = self._captured[key] = _capture(self.module, self.forward, args, kwargs)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                return self.forward(*args, **kwargs)
        inputs = (*given, *self.module.parameters())
        return graphed(*_Own.apply(*inputs))

    def new_step(self) -> None:
        """Begin to count calls anew."""
        self._calls.clear()


def _can_be_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _why_not(module: nn.Module, changed: Set[int]) -> str | None:
    """Return the reason for which a module is not captured, if the recording knows one."""
    for path, inner in module.named_modules():
        held = [inner, *vars(inner).values()]
        for value in vars(inner).values():
            if isinstance(value, dict | list | tuple | set):
                held += value.values() if isinstance(value, dict) else value
        if not changed.isdisjoint(map(id, held)):
            name = f"{type(inner).__name__} {path!r}" if path else type(inner).__name__
            return f"{name} changes values of its own, for which a replay has no Python"
    return None


class _Call(nn.Module):
    """A function that reads a module's parameters, with the module in it: ``functional_call`` puts
    others in their places meanwhile."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _capture(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Capture a call.

    Returns:
        A function of the call's tensors and the module's parameters.

    Raises:
        RuntimeError: torch cannot capture it, or a replay would leave out a part of what it does.
    """
    call = _Call(module, forward)
    # Leaves of the capture's own, in the same memory. The nodes that add up the gradients of the
    # parameters themselves may be alive from calls before, and they belong to the streams of those:
    # autograd would wait for one that is not captured.
    parameters: dict[str, Tensor] = {
        name: nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for name, p in call.named_parameters()
    }
    samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors((args, kwargs))]
    written = [version_of(t) for t in samples]
    outputs: list[Any] = []  # of the newest run, with leaves that are no tensors

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        new_args, new_kwargs = map_leaves(
            lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        outputs.clear()
        outputs.append(functional_call(call, parameters, new_args, new_kwargs))
        return tuple(tensors(outputs[0]))

    with _as_before(module), _without_autocast_cache():
        graphed = _graphed(run, (*samples, *parameters.values()))
    if [version_of(t) for t in samples] != written:
        raise RuntimeError("it writes to what it is given")
    known = {id(leaf) for leaf in (*samples, *parameters.values())}
    if not all(id(leaf) in known for leaf in leaves_of_graph(tensors(outputs[0]))):
        raise RuntimeError("it reads a weight that is none of its parameters")
    structure = map_leaves(lambda leaf: _HERE if isinstance(leaf, Tensor) else leaf, outputs[0])
    outputs.clear()

    def replay(*inputs: Tensor) -> Any:
        made = iter([made.clone() for made in graphed(*inputs)])
        return map_leaves(lambda leaf: next(made) if leaf is _HERE else leaf, structure)

    return replay


def _graphed(
    run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """Return what replays a function of tensors, forward and backward."""
    device = next(t.device for t in inputs if t.is_cuda)
    before, stream = torch.cuda.graph.default_capture_stream, _capture_stream(device)
    with torch.cuda.device(device), warnings.catch_warnings():
        # Work on another device is not captured, and not replayed.
        warnings.filterwarnings("error", "The CUDA Graph is empty")
        torch.cuda.graph.default_capture_stream = stream  # torch 2.11 has one for all devices
        try:
            _warm_up(run, inputs, stream)
            made: Callable[..., Any] = torch.cuda.make_graphed_callables(
                run, inputs, num_warmup_iters=0, allow_unused_input=True
            )
        finally:
            torch.cuda.graph.default_capture_stream = before
    return made


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS has memory of its own for each."""
    return torch.cuda.Stream(device)


def _warm_up(
    run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], stream: torch.cuda.Stream
) -> None:
    """Run a function some times, so that libraries have set themselves up before it is captured.

    torch's own warming up is on another stream and holds its last graph while torch captures: the
    nodes in it that add up gradients are those of the capture too, and belong to that stream.
    """
    needed = [t for t in inputs if t.requires_grad]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            roots = [out for out in run(*inputs) if out.requires_grad]
            if roots:
                given = [torch.zeros_like(out) for out in roots]
                torch.autograd.grad(roots, needed, given, allow_unused=True)
            del roots


_WARM_UPS = 3  # as torch's own
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
def _as_before(module: nn.Module) -> Iterator[None]:
    """Put back what runs of a module change: its buffers, and the generators of its devices.

    Raises:
        RuntimeError: a buffer is another tensor now.
    """
    before = [(held, dict(held)) for held in map(buffers_of, module.modules())]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {t.device.index for t in (*module.parameters(), *module.buffers()) if t.is_cuda}
    try:
        with torch.random.fork_rng(sorted(devices), device_type="cuda"):
            yield
    finally:
        is_another = any(held.get(name) is not own[name] for held, own in before for name in own)
        for held, own in before:
            held.update(own)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    if is_another:
        raise RuntimeError("it puts another tensor in the place of a buffer")


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Casts of weights are part of the capture: in torch's cache they would be another's memory."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
