"""Recomputation: a sealed call's activations are dropped, and made again before its backward.

The call's graph stays: what autograd saves goes through hooks, which keep a slot in the place
of each tensor; running the call again fills the slots. So gradients come about in the plain
run's order, and hooks on parameters fire once, which they do not where the backward of a second
graph runs inside the first (torchgpipe's way, and reentrant checkpointing).

``torch.utils.checkpoint`` does the same, but only when the gradient has arrived: then a forward
stands on the critical path. Here it is an action of the schedule (R), which a lane does while it
waits for that gradient.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .._common.callsite import users_line
from .._common.nested import map_leaves, map_tensors, opened
from .._common.text import dtype_text
from .._common.threads.thread_state import (
    CallContext,
    call_under,
    ours,
    theirs,
    waiting_for_device,
)
from .._torch.modes import stash, stashed
from .._torch.tensors import version_of
from ..devices.digests import Comparisons
from ..devices.rng_streams import Source, current, moved, replayed
from ..errors import StateError
from ..stages.cursor import Cursor, checkpointing, recomputing, set_cursor
from .carried_values import CarriedValues, Part, tensors_left_alone
from .offload import Offload
from .tensors.saved_argument import SavedArgument

Buffers = dict[str, Tensor | None]


@dataclasses.dataclass
class Recomputable:
    """The requirements for running a sealed call again."""

    pays: bool = False  # it saves more than what it is given
    keeps_inputs: bool = False  # they are written in place: kept from before
    draws: bool = False
    buffers: set[str] = dataclasses.field(default_factory=set)  # that it reads or writes, by name
    refuses: str | None = None  # why it cannot be

    @property
    def is_recomputed(self) -> bool:
        """Whether the call is recomputed where that is asked for."""
        return self.pays and self.refuses is None


@dataclasses.dataclass
class RecomputeSpec:
    """The way in which a sealed call is run again.

    Attributes:
        what: for messages.
        about: what the recording saw.
        buffers: those that it reads or writes: where each stands, and whether the forward writes
            it in place.
        unseen: where those of its buffers stand that it did not use when it was recorded.
        left_alone: what it must not change once more, by name: its parameters, which parts its
            modules have, and tensors that no module registered.
        waits: whether it makes the host wait for the device.
        is_compiled: whether compiled code stands in for it.
    """

    what: str
    about: Recomputable
    buffers: list[tuple[Buffers, str, bool]]
    unseen: list[tuple[Buffers, str]]
    left_alone: Sequence[tuple[str, Callable[[], Iterable[Part]]]] = ()
    waits: bool = False
    is_compiled: bool = False


class _Placeholder:
    """A placeholder for a saved tensor until the tensor is made again."""

    __slots__ = ("index", "recomputed", "what")

    def __init__(self, recomputed: RecomputedCall, tensor: Tensor) -> None:
        self.recomputed = recomputed
        self.index = recomputed.count
        self.what = tensor.dtype, tensor.shape


class _AllRecomputed(BaseException):
    """The end of a recomputation, when all that was saved is there. It is no ``Exception``, as it
    is no failure that a user's ``except Exception`` may handle."""


@dataclasses.dataclass(frozen=True)
class SealedCall:
    """A sealed call, as the forward makes it.

    Attributes:
        function: the module's forward, or the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        modes: the function modes that the user's code has entered.
        stage: where it runs.
        microbatch: the index of its micro-batch.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Sequence[TorchFunctionMode] = ()
    stage: int = 0
    microbatch: int = 0


class RecomputedCall:
    """One sealed call of one micro-batch, which can be run again.

    Args:
        recompute_spec: how it is recomputed.
        call: the call; its arguments are kept without their graphs.
        sources: the generators that it draws random numbers from, if it draws any.
        offload: where to keep the arguments; ``None``: where they are.
        comparisons: where what is made again is compared with what was saved (a digest of each
            tensor): in a first step, for a module may depend on what nobody can see.
        carried: the values that it must leave alone when it is run again, in a first step.
    """

    def __init__(
        self,
        recompute_spec: RecomputeSpec,
        call: SealedCall,
        sources: list[Source],
        *,
        offload: Offload | None = None,
        comparisons: Comparisons | None = None,
        carried: CarriedValues | None = None,
    ) -> None:
        self.recompute_spec = recompute_spec
        self.stage = call.stage
        self.microbatch = call.microbatch
        self.function = call.function
        self.comparisons = comparisons
        self._carried = carried
        self.keeps = False  # what was made again, after it was read: it may be read once more
        self.count = 0
        self._modes = call.modes
        self._surroundings = CallContext(call.modes)
        # By id: modules ask whether two arguments are one.
        self._arguments: dict[int, SavedArgument] = {}

        def keep(tensor: Tensor) -> Any:
            kept = self._arguments.get(id(tensor))
            if kept is None:
                kept = SavedArgument(tensor, offload, copies=recompute_spec.about.keeps_inputs)
                self._arguments[id(tensor)] = kept
            return kept

        self._call = map_tensors(keep, opened((call.args, call.kwargs)))
        self._buffers = [
            _copy_of(names.get(key)) if written else names.get(key)
            for names, key, written in recompute_spec.buffers
        ]
        self._random = current(sources)
        self._values: dict[int, Tensor] = {}
        self._digests: list[tuple[torch.Size, Tensor | None]] = []
        self._is_there = False
        self._lock = threading.RLock()

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the call, and drop what it saves."""
        outer, before = checkpointing.set(True), self._unseen()
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                result = call_under(self._modes, self.function, args, kwargs)
        finally:
            checkpointing.reset(outer)
            self._forget()  # of a gradient that the call itself has asked for
        self._check_unseen(before)
        if not self.recompute_spec.about.keeps_inputs:
            self._check_arguments("is written in place by")
        if not self.recompute_spec.about.draws:
            self.recompute_spec.about.draws = bool(moved(self._random))
            self._random = self._random if self.recompute_spec.about.draws else {}
        return result

    def _pack(self, tensor: Tensor) -> _Placeholder:
        with ours():
            slot = _Placeholder(self, tensor)
            self.count += 1
            if self.comparisons is not None:
                self._digests.append((tensor.shape, self.comparisons.digest(tensor)))
            return slot

    def _unseen(self) -> list[int]:
        """Return the versions of the buffers that the call did not use when it was recorded."""
        slots = self.recompute_spec.unseen
        return [-1 if (b := names.get(key)) is None else version_of(b) for names, key in slots]

    def _check_unseen(self, before: list[int]) -> None:
        for (_, key), one, other in zip(
            self.recompute_spec.unseen, before, self._unseen(), strict=True
        ):
            if one != other:
                raise StateError(
                    f"{self.recompute_spec.what}, which is to be recomputed, writes to its buffer "
                    f"{key!r}, which it did not use when it was recorded, and would do so twice "
                    f"({users_line()}); set what it branches on between steps, or mark it with "
                    "checkpoint=False"
                )

    def _check_arguments(self, how: str) -> None:
        for kept in self._arguments.values():
            shape = kept.was_written()
            if shape is not None:
                raise StateError(
                    f"an input of shape {shape} {how} {self.recompute_spec.what}, which is to be "
                    f"recomputed, and was not when recorded ({users_line()}); write it after "
                    "the backward, give a sample that writes it, or mark it with checkpoint=False"
                )

    # --- again

    def recompute(self) -> None:
        """Make what was saved again, if it is not there."""
        with self._lock:
            if self.count and not self._is_there:
                with waiting_for_device() if self.recompute_spec.waits else nullcontext():
                    self._surroundings.run(self._run_recomputation)
                self._is_there = True

    def fetch(self) -> None:
        """Begin to bring back the arguments of the call, without waiting."""
        for kept in self._arguments.values():
            kept.fetch()

    def value(self, slot: _Placeholder) -> Tensor:
        """Return the tensor that a placeholder stands for; it is made now if nobody has done so
        before."""
        with self._lock:
            if slot.index not in self._values:
                # Read for a second time, by a function that asks twice: it may ask again.
                self.keeps = self.keeps or self._is_there
                self._forget()
                self.recompute()
            found = self._values.get(slot.index)
            if found is None or (found.dtype, found.shape) != slot.what:
                now = "nothing" if found is None else _shown(found.dtype, found.shape)
                raise self._difference(slot.index, _shown(*slot.what), now)()
            if not self.keeps:
                del self._values[slot.index]
            return found

    def _forget(self) -> None:
        self._values.clear()
        self._is_there = False

    def _run_recomputation(self) -> None:
        copies = self.recompute_spec.about.keeps_inputs
        if not copies:
            self._check_arguments("was written in place after the call of")
        args, kwargs = map_leaves(self._argument(copies), opened(self._call))
        what, tensors = self.recompute_spec.what, self.recompute_spec.left_alone
        with ExitStack() as stack:
            stack.enter_context(tensors_left_alone(tensors, self.stage, what, self.microbatch))
            if self._carried is not None:
                stack.enter_context(self._carried.left_alone(self.stage, what, self.microbatch))
            stack.callback(set_cursor, set_cursor(self._cursor()))
            stack.callback(recomputing.reset, recomputing.set(True))
            stack.callback(checkpointing.reset, checkpointing.set(False))
            for (names, key, written), kept in zip(
                self.recompute_spec.buffers, self._buffers, strict=True
            ):
                stack.callback(names.__setitem__, key, names.get(key))
                names[key] = _copy_of(kept) if written else kept
            for names, key in self.recompute_spec.unseen:  # it may assign them without a look
                stack.callback(names.__setitem__, key, names.get(key))
            if self._random:
                stack.enter_context(replayed(self._random))
            stack.enter_context(torch.enable_grad())
            stack.callback(stash, _RUNNING, _running())
            stash(_RUNNING, _Running(self))
            packs = torch.autograd.graph.saved_tensors_hooks(_pack_recomputed, _same)
            try:
                with packs, theirs():
                    self.function(*args, **kwargs)
            except _AllRecomputed:
                pass

    def _argument(self, copies: bool) -> Callable[[Any], Any]:
        entered: dict[int, Any] = {}

        def enter(leaf: Any) -> Any:
            if isinstance(leaf, SavedArgument) and id(leaf) not in entered:
                entered[id(leaf)] = leaf.entered(copies=copies)
            return entered.get(id(leaf), leaf)

        return enter

    def _cursor(self) -> Cursor:
        cursor = Cursor()
        cursor.stage = self.stage
        return cursor

    def collect(self, index: int, tensor: Tensor) -> None:
        """Take a tensor that was saved when the call ran again."""
        if index < self.count:
            self._values[index] = tensor
            if self.comparisons is not None:
                self._compare(index, tensor, self.comparisons)
        if index + 1 == self.count:
            raise _AllRecomputed

    def _compare(self, index: int, value: Tensor, comparisons: Comparisons) -> None:
        shape, seen = self._digests[index]
        if shape != value.shape or seen is None:
            return  # told when it is read
        what = _shown(value.dtype, value.shape)
        error = self._difference(index, what, f"{what} with other numbers")
        now = comparisons.digest(value)
        if now is None:
            raise error()
        comparisons.compare(seen, now, error)

    def _difference(self, index: int, then: str, now: str) -> Callable[[], StateError]:
        """Return an error to raise later. It does not hold the frame, which holds tensors."""
        return partial(
            _differs,
            self.recompute_spec,
            self.stage,
            self.microbatch,
            index,
            self.count,
            then,
            now,
        )


def _differs(
    spec: RecomputeSpec, stage: int, microbatch: int, index: int, count: int, then: str, now: str
) -> StateError:
    compiled = (
        "; or torch has stopped compiling it in between, because a value of its own was another "
        'one in each forward (TORCH_LOGS="recompiles" says which)'
    )
    return StateError(
        f"{spec.what} on stage {stage} saved {then} (number {index} of {count}) in its forward, "
        f"and {now} when it was recomputed for micro-batch {microbatch}: it depends on something "
        "that has changed (state of its own, a cache that it was given, a generator of its own); "
        "ask blockpipe.is_recomputing() there, or mark it with checkpoint=False"
        f"{compiled if spec.is_compiled else ''}"
    )


def _shown(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_text(dtype)}{list(shape)}"


@dataclasses.dataclass
class _Running:
    """A call that runs again, and the number of tensors that it has saved."""

    recomputed: RecomputedCall
    made: int = 0


_RUNNING = "blockpipe_running"


def _running() -> _Running | None:
    """Return the call that runs again in this thread, or in the one that an autograd device thread
    works for: a call may ask for a gradient, which saves tensors there."""
    return cast(_Running | None, stashed(_RUNNING))


def _pack_recomputed(tensor: Tensor) -> Tensor:
    # One function for all: a compiled module is compiled anew for hooks that it does not know.
    running = _running()
    assert running is not None
    index = running.made
    running.made += 1
    with ours():
        value = tensor.detach()
    running.recomputed.collect(index, value)
    return value


def _unpack(slot: _Placeholder) -> Tensor:
    with ours():
        return slot.recomputed.value(slot)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
