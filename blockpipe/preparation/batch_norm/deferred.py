"""Deferred batch norm: running statistics of the whole mini-batch, committed once a step.

In a loop over micro-batches batch norm updates its running statistics once for each of them: they
move further than one batch would have them move, and follow the last micro-batches most. Deferred,
they are what the whole batch would have given. A forward still normalizes by the statistics of its
own micro-batch, as in the loop: those of the whole batch are not known yet.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn

from ..._common.modules import StandIn
from ..._common.threads.thread_state import ours
from ..._torch.modules import BatchNorm
from .gathered import (
    COUNT,
    RUNNING,
    ByHand,
    StepUpdates,
    Update,
    counted_microbatch,
    factor_of,
    gathering,
    not_gathered,
)
from .statistics import merged, moved

Forward = Callable[..., Any]


class DeferredBatchNorm:
    """Holds back the running statistics of a model's batch norms.

    The modules normalize by themselves: their classes may do so in their own way. SyncBatchNorm is
    left alone: its statistics are of several processes, and each takes part in every update.

    Args:
        model: the model. Its batch norms that have running statistics, and are in training mode
            when they are called, are deferred.
    """

    def __init__(self, model: nn.Module) -> None:
        self.under_way: StepUpdates | None = None
        self._turn = RLock()  # two threads' steps would take each other's clones for the buffers
        self.modules = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        }
        # Those whose last call called torch's function, as torch's own forward does.
        self._of_torch = {
            module
            for module in self.modules.values()
            if getattr(module.forward, "__func__", None) is BatchNorm.forward
        }
        self._paths = {module: path for path, module in self.modules.items()}
        self._synchronized = synchronized(model)

    def stand_ins(self) -> dict[str, Callable[[Forward], StandIn]]:
        """Return for each module's path a function from its forward to the stand-in, which outside
        of a step only calls the forward."""
        return {path: partial(self._stand_in, module) for path, module in self.modules.items()}

    def _stand_in(self, module: BatchNorm, forward: Forward) -> StandIn:
        return _StandIn(module, forward, partial(self._call, module, forward))

    def _call(self, module: BatchNorm, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call a batch norm's forward, and gather its update if it makes that by itself."""
        step, microbatch = self.under_way, counted_microbatch()
        if step is None or not _updates_statistics(module):
            return forward(*args, **kwargs)
        if microbatch is None:
            step.uncounted.add(module)
            return forward(*args, **kwargs)
        step.called.add(module)
        before, by_hand = step.count(module, microbatch), None
        if module not in self._of_torch:
            with ours(), torch.no_grad():
                by_hand = ByHand(module, (args, kwargs))
        result = forward(*args, **kwargs)
        if step.count(module, microbatch) > before:
            self._of_torch.add(module)
            if step.changed(module).intersection(RUNNING):  # once more, behind torch's function
                raise not_gathered(module, self._paths[module])
        elif changed := step.changed(module):
            with ours(), torch.no_grad():
                update = None if by_hand is None else by_hand.update(changed)
            if update is None:
                raise not_gathered(module, self._paths[module])
            step.add(module, microbatch, update)
        return result

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

        Meanwhile forwards write to clones of the buffers.

        Raises:
            StateError: something has updated running statistics in a way of its own.
        """
        with self._turn:
            yield from self._taken_step()

    def _taken_step(self) -> Iterator[None]:
        outer, step = self.under_way, StepUpdates(self.modules.values())
        self.under_way = step
        unseen: list[BatchNorm] = []
        try:
            step.put_clones()
            with gathering(step):
                yield
        finally:
            unseen = step.put_back()
            self.under_way = outer
        for module in unseen:
            raise not_gathered(module, self._paths[module])
        for module in _unfitting(step.seen):
            raise not_gathered(module, self._paths[module])
        _commit(step.seen)


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


def _unfitting(seen: Mapping[BatchNorm, dict[int, list[Update]]]) -> Iterator[BatchNorm]:
    """Yield the modules that have updated their statistics by themselves, and to others."""
    for module, of_microbatches in seen.items():
        updates = itertools.chain.from_iterable(of_microbatches.values())
        if not all(update.fits is None or bool(update.fits) for update in updates):
            yield module


@torch.no_grad()
def _commit(seen: Mapping[BatchNorm, dict[int, list[Update]]]) -> None:
    """Update running statistics as one forward of the whole batch does. Reads no values: on an
    accelerator the host does not wait."""
    for module, of_microbatches in seen.items():
        calls = itertools.zip_longest(*(of_microbatches[m] for m in sorted(of_microbatches)))
        for call in calls:
            parts = [part for part in call if part is not None]
            whole = merged([part.seen for part in parts])
            update_buffers(module, parts[0]._replace(seen=whole))


def update_buffers(module: BatchNorm, update: Update) -> None:
    """Do an update to a batch norm's buffers."""
    tracked, whole = module.num_batches_tracked, update.seen
    if tracked is not None and COUNT in update.names:
        tracked.add_(1)
    factor = factor_of(module, update.factor)
    for name, value in zip(RUNNING, (whole.mean, whole.variance), strict=True):
        running = getattr(module, name)
        if running is not None and name in update.names:
            running.copy_(moved(running, value, factor))
