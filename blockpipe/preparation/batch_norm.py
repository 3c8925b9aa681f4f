"""Deferred batch norm: running statistics of the whole mini-batch, committed once a step.

In a loop over micro-batches batch norm updates its running statistics once for each of them: they
move further than one batch would have them move, and follow the last micro-batches most. Deferred,
they are what the whole batch would have given. A forward still normalizes by the statistics of its
own micro-batch, as in the loop: those of the whole batch are not known yet.

The obvious way adds up sums and sums of squares. Their difference, the variance, cancels where the
mean is large: at a mean of 1e4 and a variance of 1 nothing of it is left in float32. Here each
micro-batch is centered before it is squared, and micro-batches are merged by their means and
squared distances.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._common.modules import StandIn
from .._common.nested import tensors
from .._common.threads.thread_state import ours
from .._torch.modules import BatchNorm, buffers_of
from ..crossing.interception import active_mode
from ..stages.cursor import current_microbatch, is_recomputing

Forward = Callable[..., Any]
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class BatchStatistics(NamedTuple):
    """Statistics of some samples, for each channel, that can be merged with those of others.

    ``mean`` and ``squares`` (the sum of squared distances from the mean) have shape
    ``[channels]``, in double precision where the device has it.
    """

    samples: int
    mean: Tensor
    squares: Tensor


def statistics(x: Tensor) -> BatchStatistics:
    """Compute the statistics of a tensor of shape ``[batch, channels, ...]``.

    Nothing of the tensor's size is made in double precision: after the rounded mean was subtracted
    the rest is small, so that single precision holds it well.
    """
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    double = torch.float32 if x.device.type == "mps" else torch.float64
    dims = [dim for dim in range(x.dim()) if dim != 1]
    samples = x.numel() // x.shape[1]
    mean = x.mean(dims, keepdim=True, dtype=wide)
    centered = x - mean
    rest = centered.mean(dims).to(double)
    squares = centered.square_().sum(dims).to(double)
    return BatchStatistics(
        samples, mean.flatten().to(double) + rest, squares - samples * rest.square()
    )


def merged(parts: list[BatchStatistics]) -> BatchStatistics:
    """Merge the statistics of parts into those of all their samples.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979).
    """
    samples, mean, squares = parts[0]
    for more in parts[1:]:
        total = samples + more.samples
        distance = more.mean - mean
        mean = mean + distance * (more.samples / total)
        squares = squares + more.squares + distance.square() * (samples * more.samples / total)
        samples = total
    return BatchStatistics(samples, mean, squares)


class _StepStatistics:
    """The statistics that a step has gathered so far."""

    def __init__(self) -> None:
        # By module, then by micro-batch: of each of its calls. One thread runs a micro-batch.
        self.seen: dict[BatchNorm, dict[int, list[BatchStatistics]]] = {}


class DeferredBatchNorm:
    """Holds back the running statistics of a model's batch norms.

    The modules normalize by themselves: their classes may do so in their own way. SyncBatchNorm is
    left alone: its statistics are of several processes, and each takes part in every update.

    Args:
        model: the model. Its batch norms that have running statistics, and are in training mode
            when they are called, are deferred.
    """

    def __init__(self, model: nn.Module) -> None:
        self.under_way: _StepStatistics | None = None
        self._turn = RLock()  # two threads' steps would take each other's clones for the buffers
        self.modules = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        }
        self._synchronized = synchronized(model)

    def stand_ins(self) -> dict[str, Callable[[Forward], StandIn]]:
        """Return for each module's path a function from its forward to the stand-in, which outside
        of a step only calls the forward."""
        return {path: partial(self._stand_in, module) for path, module in self.modules.items()}

    def _stand_in(self, module: BatchNorm, forward: Forward) -> StandIn:
        return _StandIn(module, forward, partial(self._call, module, forward))

    def _call(self, module: BatchNorm, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Gather the statistics of a batch norm's input, and call its forward."""
        step, microbatch = self.under_way, _counted_microbatch()
        if step is not None and microbatch is not None and _updates_statistics(module):
            with ours(), torch.no_grad():
                given, mode = next(tensors((args, kwargs))), active_mode()
                seen = statistics((given if mode is None else mode.read(given)).detach())
            step.seen.setdefault(module, {}).setdefault(microbatch, []).append(seen)
        return forward(*args, **kwargs)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Stand around a step that no pipeline runs, in place of the modules' forwards."""
        with ExitStack() as stack:
            for path, make in self.stand_ins().items():
                module = self.modules[path]
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = make(module.forward)
                stack.callback(_put_back, module, own)
            stack.enter_context(self.step())
            yield

    def notes(self) -> list[str]:
        """Return what is deferred and what is not, for the summary."""
        notes = [f"batch norm deferred: {len(self.modules)} modules"]
        if self._synchronized:
            notes.append(f"not deferred, SyncBatchNorm: {', '.join(self._synchronized)}")
        return notes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Stand around a step; at its end commit the statistics, if nothing failed. Reentrant.

        Meanwhile forwards write to clones of the buffers. The same clones serve for the whole step:
        some subclasses read what earlier micro-batches have left there, and a recomputation puts
        back the earlier values, as for every buffer.
        """
        with self._turn:
            yield from self._taken_step()

    def _taken_step(self) -> Iterator[None]:
        outer, step = self.under_way, _StepStatistics()
        self.under_way = step
        own = {module: dict(buffers_of(module)) for module in self.modules.values()}
        try:
            for module, buffers in own.items():
                there = {n: b for n in _BUFFERS if (b := buffers.get(n)) is not None}
                buffers_of(module).update({n: b.detach().clone() for n, b in there.items()})
            yield
        finally:
            for module, buffers in own.items():
                buffers_of(module).update(buffers)
            self.under_way = outer
        _commit(step)


def _put_back(module: nn.Module, own: Any) -> None:
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own


def _updates_statistics(module: BatchNorm) -> bool:
    """Whether a forward of a batch norm updates its running statistics."""
    return module.training and module.track_running_stats and module.running_mean is not None


class _StandIn(StandIn):
    """Stands in for a module's forward. A copy of the module has the module's own again."""

    def __init__(self, module: BatchNorm, forward: Forward, call: Forward) -> None:
        self.module = module
        self.forward = forward
        # The graph of a compiled module around this one breaks here: this Python runs each time.
        self._call: Forward = torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (self.module,)


def _forward_of(module: nn.Module) -> Forward:
    forward: Forward = type(module).forward.__get__(module)
    return forward


def synchronized(model: nn.Module) -> list[str]:
    """Return the paths of a model's SyncBatchNorms, which are not deferred."""
    return [path for path, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]


def _counted_microbatch() -> int | None:
    """Return the micro-batch whose forward is under way; ``None`` in a recomputation."""
    return None if is_recomputing() else current_microbatch()


@torch.no_grad()
def _commit(step: _StepStatistics) -> None:
    """Update running statistics as one forward of the whole batch does. Reads no values: on an
    accelerator the host does not wait."""
    for module, seen in step.seen.items():
        calls = itertools.zip_longest(*(seen[microbatch] for microbatch in sorted(seen)))
        for parts in calls:
            _update(module, merged([part for part in parts if part is not None]))


def _update(module: BatchNorm, whole: BatchStatistics) -> None:
    factor: float | Tensor | None = module.momentum
    tracked = module.num_batches_tracked
    if tracked is not None:
        tracked.add_(1)
    if factor is None:  # the average over all steps
        factor = 0.0 if tracked is None else 1 / tracked.to(whole.mean)
    variance = whole.squares / max(whole.samples - 1, 1)
    for running, value in ((module.running_mean, whole.mean), (module.running_var, variance)):
        if running is not None:
            running.copy_(running.to(value).lerp_(value, factor))
