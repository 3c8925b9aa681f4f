"""``torch.utils.checkpoint`` in the glue: its function runs again as one more run.

torch runs the function of a checkpoint again in the backward, when it comes to the first tensor
that was not kept: in autograd's thread of that device, if it is an accelerator's. Without
interception the function would read other stages' tensors there. So each checkpoint that begins in
the glue remembers where the forward stood, and what it runs again begins there: marks move it,
operations run on the stages where they ran, and what crossed comes from where it came from. Its
graph is thrown away, as torch does; only what it saves is used.

Interception around the whole of a backward was no alternative: a backward belongs to one hop, and a
checkpoint may span several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torchs

from .._common.threads.thread_state import in_thread, ours, theirs
from .._torch.graph import CHECKPOINT_HOOK, CheckpointHook, saved_tensor_hooks
from .._torch.modes import dispatch_modes
from ..devices.devices import current_stream, is_asynchronous
from ..devices.rng_streams import current, preserve_rng, restore
from ..devices.sanitizer import Sanitizer
from ..stages.cursor import Cursor, recomputing, set_cursor, set_microbatch
from .interception import CrossingMode, active_mode
from .microbatch_run import MicrobatchRun
from .step_context import StepContext
from .tags import TAG, GradientSlot, MicrobatchKey, Tag, enter_graph
from .tensors.place import Reads
from .tensors.tensor_import import TensorImport
from .torch_patches import (
    Backwards,
    CustomFunctions,
    FastPaths,
    Replacement,
    ScriptFunctions,
    UnseenOperations,
)
from .uncut_run import UncutRun


def is_in_checkpoint() -> bool:
    """Return whether the code that runs here is the function of a ``torch.utils.checkpoint`` that
    is not reentrant and keeps nothing of it."""
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == torchs.__name__


class _RecomputedImport(TensorImport):
    """An import that reads what the forward read, where the forward read it."""

    forward_key: MicrobatchKey

    def local(self, tensor: Tensor, reads: Reads) -> Tensor:
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None or tag.key is not self.forward_key:
            return super().local(tensor, reads)
        hop = self._place.hop
        while tag.newest is not None:
            newest: Tag = getattr(tag.newest, TAG)
            if newest.hop > hop:
                break  # written on a later hop than this is
            tensor, tag = tag.newest, newest
        if tag.hop == hop:
            return tensor
        found = (tag.imports or {}).get(hop)
        return self._brought(tensor, reads) if found is None else found.value

    def _local_untagged(self, tensor: Tensor, reads: Reads) -> Tensor:
        is_inner = tensor.requires_grad and tensor.grad_fn is not None
        return self._brought(tensor, reads) if is_inner else super()._local_untagged(tensor, reads)

    def _brought(self, tensor: Tensor, reads: Reads) -> Tensor:
        """Return a tensor of the forward that it had no import of here, or that torch kept for the
        checkpoint by hooks, which loses the tag."""
        value = self._constant(tensor, reads)
        if value is not tensor and tensor.requires_grad:
            value = enter_graph(GradientSlot(), value)
        return value


class RecomputedRun(MicrobatchRun):
    """The run of a checkpoint's function that runs again.

    Args:
        step: the step of the forward.
        microbatch: the index of its micro-batch.
        cursor: where the forward stood.
        forward_key: the run that was the forward.
    """

    importing = _RecomputedImport

    def __init__(
        self, step: StepContext, microbatch: int, cursor: Cursor, forward_key: MicrobatchKey
    ) -> None:
        super().__init__(step, microbatch, cursor)
        assert isinstance(self._imports, _RecomputedImport)
        self._imports.forward_key = forward_key

    def is_recomputing(self) -> bool:
        return False  # it is being run again


class UncutRecomputedRun(UncutRun):
    """The run of a checkpoint's function that runs again, in one ordinary graph."""

    def is_recomputing(self) -> bool:
        return False


class _Arrival:
    """The state of an accelerator when the forward came to it: its stream and its generator."""

    def __init__(self, device: torch.device | None, *, begins: bool = False) -> None:
        self.device = device if device is not None and is_asynchronous(device) else None
        self._stream = None if self.device is None else current_stream(self.device)
        # Where the checkpoint begins, torch itself sees to the generators.
        self.draws_from = [] if self.device is None or begins else [self.device]
        self._random = current(self.draws_from)

    def enter(self) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        restore(self._random)


class Checkpoint:
    """One ``torch.utils.checkpoint`` of a run, which can be run again.

    Args:
        run: of the forward. It is not kept, for its graph keeps this.
        function: what torch calls to run the checkpoint's function again.
    """

    def __init__(self, run: MicrobatchRun, function: Callable[..., Any]) -> None:
        self._function = function
        self._step = run.step
        self._microbatch = run.microbatch
        self._key = run.key
        self._standing = run.position()
        begins_on = run.step.device_of(max(run.stage, 0))
        self._arrivals = [_Arrival(begins_on, begins=True)]

    def note_arrival(self, stage: int) -> None:
        """Note that the forward came to another hop."""
        self._arrivals.append(_Arrival(self._step.device_of(stage)))

    def __call__(self, *args: Any) -> Any:
        """Run the function again; called by torch in the backward."""
        cursor = self._standing.cursor.copy()
        run: MicrobatchRun
        if self._step.graphs.cut:
            run = RecomputedRun(self._step, self._microbatch, cursor, self._key)
        else:
            run = UncutRecomputedRun(self._step, self._microbatch, cursor)
        run.resume_at(self._standing)
        arrivals = iter(self._arrivals)

        def arrive(*_: int) -> None:
            next(arrivals, self._arrivals[0]).enter()
            for sanitizer in _sanitizers():
                sanitizer.stage = run.stage

        with ExitStack() as stack:
            stack.enter_context(ours())
            in_thread.modes = [
                mode for mode in in_thread.modes if not isinstance(mode, CrossingMode)
            ]
            stack.enter_context(_put_back(self._arrivals))
            stack.callback(set_cursor, set_cursor(cursor))
            stack.callback(set_microbatch, set_microbatch(self._microbatch))
            stack.callback(recomputing.reset, recomputing.set(True))
            stack.callback(run.abandon)
            stack.enter_context(self._step.known.sealed_forwards)
            stack.enter_context(intercepting())
            arrive()
            run.on_border = arrive
            stack.enter_context(theirs())
            stack.enter_context(CrossingMode(run))
            return self._function(*args)


def _sanitizers() -> list[Sanitizer]:
    return [mode for mode in dispatch_modes() if isinstance(mode, Sanitizer)]


@contextmanager
def _put_back(arrivals: list[_Arrival]) -> Iterator[None]:
    """Put the thread back, at the end, on the device and the streams that it was on."""
    devices = {arrival.device for arrival in arrivals if arrival.device is not None}
    stages = [(sanitizer, sanitizer.stage) for sanitizer in _sanitizers()]
    index = torch.accelerator.current_device_index() if devices else 0
    streams = [torch.accelerator.current_stream(device) for device in devices]
    try:
        with preserve_rng({source for arrival in arrivals for source in arrival.draws_from}):
            yield
    finally:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        if devices:
            torch.accelerator.set_device_index(index)
        for sanitizer, stage in stages:
            sanitizer.stage = stage


@contextmanager
def intercepting() -> Iterator[None]:
    """Replace all that the glue may need, for a forward of which nothing is known."""
    with (
        Backwards(),
        CustomFunctions(),
        ScriptFunctions(),
        UnseenOperations(),
        FastPaths(),
        Checkpoints(),
    ):
        yield


class Checkpoints(Replacement):
    """A replacement of what torch puts around the function of a checkpoint, so that a checkpoint in
    the glue is seen. There is no hook for it: the function that it gets is torch's own."""

    owner, name = torchs, CHECKPOINT_HOOK

    def replacement(self) -> Any:
        return _WatchedHook


class _WatchedHook(CheckpointHook):  # type: ignore[misc]
    def __init__(self, recomputed: Any) -> None:
        self._under_way: tuple[MicrobatchRun, Callable[[int], None]] | None = None
        mode = active_mode()
        if mode is not None:
            mode.run.step.on_checkpoint(recomputed, max(mode.run.place.hop, 0))
        if mode is not None and not mode.inside:
            mode.saw_checkpoint(recomputed.recompute_fn)
            recomputed.recompute_fn = recompute_spec = Checkpoint(mode.run, recomputed.recompute_fn)
            self._under_way = mode.run, recompute_spec.note_arrival
        super().__init__(recomputed)

    def __enter__(self) -> Any:
        if self._under_way is not None:
            run, note = self._under_way
            run.on_arrival.append(note)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> Any:
        if self._under_way is not None:
            run, note = self._under_way
            if note in run.on_arrival:
                run.on_arrival.remove(note)
        if saved_tensor_hooks() != (self.pack_hook, self.unpack_hook):
            # Up to torch 2.11, a checkpoint whose function raises ends when its generator is
            # collected: its hooks are off already, and others may be on.
            return None
        return super().__exit__(*failure)
