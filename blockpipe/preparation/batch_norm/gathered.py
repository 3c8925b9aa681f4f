"""The updates of running statistics that a step gathers, where torch computes them.

They are taken from what ``torch.batch_norm`` is given, and belong to the module whose buffers it is
given: a subclass may hand on something else than its argument (another dim, the rows of a mask),
and a forward may call the function without the module. To look at the modules' arguments alone was
no alternative. A subclass that updates its statistics by itself is compared with what its
argument's would be.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._common.threads.thread_state import ours
from ..._torch.modes import untraced
from ..._torch.modules import BatchNorm, buffers_of
from ..._torch.tensors import memory_of, version_of
from ...crossing.interception import active_mode
from ...crossing.torch_patches import Replacement
from ...errors import StateError
from ...stages.cursor import current_microbatch, is_recomputing
from .statistics import BatchStatistics, moved, statistics

RUNNING = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
BUFFERS = (*RUNNING, COUNT)

Versions = dict[str, tuple[Tensor | None, int]]


class Update(NamedTuple):
    """One update of the buffers of a batch norm.

    Attributes:
        seen: the statistics that it is about.
        factor: how far the running ones move; ``None``: they are the average of all updates.
        names: the buffers that it changes.
        fits: whether the module's own update was this one; ``None``: it is torch's.
    """

    seen: BatchStatistics
    factor: float | None
    names: frozenset[str]
    fits: Tensor | None = None


class StepUpdates:
    """The updates that a step has gathered so far. Meanwhile the modules have clones of their
    buffers, which say whose they are.

    Args:
        modules: the batch norms.

    Attributes:
        seen: by module, then by micro-batch: of each of its calls. One thread runs a micro-batch.
        called: modules of which a call counts.
        uncounted: modules of which a call does not count, such as a recomputation.
    """

    def __init__(self, modules: Iterable[BatchNorm]) -> None:
        self.called: set[BatchNorm] = set()
        self.uncounted: set[BatchNorm] = set()
        self.seen: dict[BatchNorm, dict[int, list[Update]]] = {}
        self._own = {module: dict(buffers_of(module)) for module in modules}
        self._of_memory: dict[int, tuple[BatchNorm, Tensor]] = {}
        self._last: dict[BatchNorm, Versions] = {}

    def put_clones(self) -> None:
        """Give the modules clones of their buffers. The same ones serve for the whole step: some
        subclasses read what earlier micro-batches have left there, and a recomputation puts back
        the earlier values, as for every buffer."""
        for module, own in self._own.items():
            there = {n: b for n in BUFFERS if (b := own.get(n)) is not None}
            with torch.inference_mode(False):  # its tensors count no writes
                clones = {name: buffer.detach().clone() for name, buffer in there.items()}
            buffers_of(module).update(clones)
            self._last[module] = versions(module)
            for name in RUNNING:
                if name in clones:
                    self._of_memory[memory_of(clones[name])] = module, clones[name]

    def put_back(self) -> list[BatchNorm]:
        """Give the modules their own buffers again; return those with changes that nothing has
        seen."""
        known = self.seen.keys() | (self.uncounted - self.called)
        unseen = [m for m in self._last if m not in known and self._is_written(m)]
        for module, buffers in self._own.items():
            buffers_of(module).update(buffers)
        return unseen

    def _is_written(self, module: BatchNorm) -> bool:
        """Return whether a module that nothing has seen has other running statistics than before.
        Torch's other functions and compiled ones count no write, so that values are compared; in
        training mode few modules are left out by a forward."""
        if self.changed(module).intersection(RUNNING):
            return True
        pairs = [(buffers_of(module).get(name), self._own[module].get(name)) for name in RUNNING]
        return module.training and any(
            now is not None and before is not None and not torch.equal(now, before)
            for now, before in pairs
        )

    def changed(self, module: BatchNorm) -> frozenset[str]:
        """Return which of a module's buffers have changed since its last update."""
        last = self._last[module]
        return frozenset(
            name
            for name, (buffer, version) in versions(module).items()
            if buffer is not last[name][0] or version != last[name][1]
        )

    def add(self, module: BatchNorm, microbatch: int, update: Update) -> None:
        """Add an update of a module, which has been done to the clones."""
        self._last[module] = versions(module)
        self.seen.setdefault(module, {}).setdefault(microbatch, []).append(update)

    def count(self, module: BatchNorm, microbatch: int) -> int:
        """Return how many updates of a module a micro-batch has made."""
        return len(self.seen.get(module, {}).get(microbatch, ()))

    def owner(self, *running: Tensor | None) -> BatchNorm | None:
        """Return the module whose running statistics these are; ``None``: they are no clones of
        this step, or a part of one."""
        for buffer in running:
            if buffer is not None and (found := self._of_memory.get(memory_of(buffer))):
                return found[0] if found[1].shape == buffer.shape else None
        return None


def versions(module: BatchNorm) -> Versions:
    """Return the buffers that a module has, and how often each was written to."""
    own = buffers_of(module)
    with ours():
        return {n: (b, -1 if b is None else version_of(b)) for n in BUFFERS for b in (own.get(n),)}


def counted_microbatch() -> int | None:
    """Return the micro-batch whose forward is under way; ``None`` in a recomputation."""
    return None if is_recomputing() else current_microbatch()


class ByHand:
    """A call of a batch norm that may update its statistics without ``torch.batch_norm``.

    Args:
        module: that is called.
        given: its arguments.
    """

    def __init__(self, module: BatchNorm, given: Any) -> None:
        self._module = module
        own = buffers_of(module)
        self._before = {n: b.clone() for n in RUNNING if (b := own.get(n)) is not None}
        self._seen: BatchStatistics | None = None
        x, mode = next(tensors(given), None), active_mode()
        if x is not None and x.dim() > 1 and x.shape[1] == module.num_features:
            self._seen = statistics((x if mode is None else mode.read(x)).detach())

    def update(self, names: frozenset[str]) -> Update | None:
        """Return the update that the call has made, if it is one of its argument's statistics."""
        module, seen, own = self._module, self._seen, buffers_of(self._module)
        if seen is None or (module.momentum is None and own.get(COUNT) is None):
            return None
        factor = factor_of(module, module.momentum)
        fits = []
        squared = seen.mean.square() + seen.variance  # of which a variance may be a difference
        scales = (seen.variance.sqrt(), seen.mean.abs()), (seen.variance, squared)
        values = seen.mean, seen.variance
        for name, value, (spread, size) in zip(RUNNING, values, scales, strict=True):
            now = own.get(name)
            if name in names and (now is None or now.shape != value.shape):
                return None
            if name in names and now is not None:
                expected = moved(self._before[name], value, factor)
                eps = torch.finfo(now.dtype).eps
                rounding = 32 * eps * (expected.abs() + size)
                off = (now.to(value) - expected).abs()
                fits.append((off <= eps**0.5 * spread + rounding).all())
        return Update(seen, module.momentum, names, torch.stack(fits).all())


def factor_of(module: BatchNorm, factor: float | None) -> float | Tensor:
    """Return how far running statistics move, after their count was increased."""
    if factor is not None:
        return factor
    tracked = module.num_batches_tracked  # the average over all steps
    return 0.0 if tracked is None else 1 / tracked.to(torch.float32)


def not_gathered(module: BatchNorm, path: str) -> StateError:
    """Return the error of a module whose running statistics follow something else."""
    return StateError(
        "expected running statistics that follow the mean and the unbiased variance of each "
        f"channel, for deferred_batch_norm=True, got others for {path!r}, a "
        f"{type(module).__name__}: it or the forward writes them without torch's batch_norm "
        f"({users_line()}); call super().forward(…) of the module or F.batch_norm(…) with its "
        "running_mean and running_var, or leave deferred_batch_norm out"
    )


_steps: list[StepUpdates] = []  # that are under way in any thread


class SeenBatchNorms(Replacement):
    """A replacement by which steps see what ``torch.batch_norm`` is given. ``F.batch_norm`` and
    modules call it, after function modes: what it gets is what it computes with."""

    owner, name = torch, "batch_norm"

    def replacement(self) -> Any:
        return _batch_norm


@contextmanager
def gathering(step: StepUpdates) -> Iterator[None]:
    """Let a step see every batch norm, while entered."""
    with SeenBatchNorms():
        _steps.append(step)
        try:
            yield
        finally:
            _steps.remove(step)


_ARGUMENTS = (
    *("input", "weight", "bias", "running_mean", "running_var"),
    *("training", "momentum", "eps", "cudnn_enabled"),
)
_original: Any = torch.batch_norm


@untraced
def _batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    running = given.get("running_mean"), given.get("running_var")
    owners = ((step, step.owner(*running)) for step in _steps if given.get("training"))
    step, module = next((found for found in owners if found[1] is not None), (None, None))
    if step is None or module is None:
        return _called(*args, **kwargs)
    microbatch, mode = counted_microbatch(), active_mode()
    if microbatch is None:
        step.uncounted.add(module)
        return _called(*args, **kwargs)
    x = given["input"]
    is_on = mode is not None and mode.is_on()
    with ours(), torch.no_grad():
        seen = statistics((mode.read(x) if mode is not None and is_on else x).detach())
    result = _called(*args, **kwargs)
    # Torch counts no write to the running statistics here.
    written = {name for name, buffer in zip(RUNNING, running, strict=True) if buffer is not None}
    names = step.changed(module).intersection([COUNT]).union(written)
    is_average = module.momentum is None and COUNT in names
    step.add(module, microbatch, Update(seen, None if is_average else given["momentum"], names))
    return result


def _called(*args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = _original(*args, **kwargs)
    return result
