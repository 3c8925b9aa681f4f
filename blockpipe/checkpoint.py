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

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .ambient import Surroundings
from .blocks import Cursor, recomputing, set_cursor
from .crossing import Box, enter_graph, version_of
from .errors import StateError
from .offload import Away, Offload
from .randomness import Source, States, current, replayed
from .recording import Recomputable
from .tree import map_leaves, map_tensors, tensors
from .where import users_line

Buffers = dict[str, Tensor | None]


@dataclass
class Again:
    """How to run a sealed call again.

    Attributes:
        what: for messages.
        about: what the recording saw.
        buffers: of its modules, and which of them it writes in place.
    """

    what: str
    about: Recomputable
    buffers: list[tuple[Buffers, frozenset[str]]]

    @classmethod
    def of(
        cls,
        what: str,
        about: Recomputable,
        modules: Iterable[nn.Module],
        written: Collection[int],
    ) -> Again:
        """From the modules that are called, and the ids of the buffers that the forward writes."""
        inner = {module: None for outer in modules for module in outer.modules()}
        buffers = [
            (names, frozenset(key for key, buffer in names.items() if id(buffer) in written))
            for names in (module._buffers for module in inner)
            if names
        ]
        return cls(what, about, buffers)


@dataclass(slots=True)
class _Slot:
    """What stands for a saved tensor until it is made again."""

    frame: Frame
    index: int
    shape: torch.Size
    dtype: torch.dtype


class _Enough(BaseException):
    """Ends a recomputation: all that was saved is there. No ``Exception``: it is no failure that a
    user's ``except Exception`` may handle."""


class Frame:
    """One sealed call of one micro-batch, which can be run again.

    Args:
        again: how.
        stage: where it runs.
        sources: what it draws random numbers from.
        function: what is called.
        args: with what; kept, without their graphs.
        kwargs: with what.
        offload: where to keep the arguments; ``None``: where they are.
    """

    def __init__(
        self,
        again: Again,
        stage: int,
        sources: list[Source],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        offload: Offload | None = None,
    ) -> None:
        self.again = again
        self.stage = stage
        self.function = function
        self.keeps = False  # what was recomputed, after it was read: the backward has two parts
        self.count = 0
        self._surroundings = Surroundings()
        self._offload = offload
        self._given = list(tensors((args, kwargs)))
        self._versions = [version_of(t) for t in self._given]
        copies = again.about.keeps_inputs
        self._needs_graph: set[int] = set()
        kept: dict[int, Any] = {}  # modules ask whether two arguments are one (attention does)

        def keep(tensor: Tensor) -> Any:
            if id(tensor) not in kept:
                kept[id(tensor)] = self._kept(tensor, copies)
            return kept[id(tensor)]

        self._call = map_tensors(keep, _opened((args, kwargs)))
        self._buffers = [
            (names, {k: _copy_of(t) if k in written else t for k, t in names.items()})
            for names, written in again.buffers
        ]
        self._random: States = current(sources) if again.about.draws else {}
        self._values: dict[int, Tensor] = {}
        self._lock = threading.RLock()

    def _kept(self, tensor: Tensor, copies: bool) -> Tensor | Away:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        kept: Tensor | Away | None = None
        if self._offload is not None:
            kept = self._offload.away(tensor)
        if kept is None:
            kept = tensor.detach().clone() if copies else tensor.detach()
        if tensor.requires_grad:
            self._needs_graph.add(id(kept))
        return kept

    def run(self, args: Any, kwargs: Any) -> Any:
        """The call itself; what it saves is dropped."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _unpack)
        try:
            result = self.function(*args, **kwargs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if not self.again.about.keeps_inputs:
            self._check_inputs("is written in place by")
            self._versions = [version_of(t) for t in self._inputs()]
        self._given = []
        return result

    def _inputs(self) -> list[Tensor]:
        return list(tensors(self._call))

    def _check_inputs(self, how: str) -> None:
        given = self._given or self._inputs()
        for tensor, version in zip(given, self._versions, strict=True):
            if version_of(tensor) != version:
                raise StateError(
                    f"an input of shape {tuple(tensor.shape)} {how} {self.again.what}, which is to "
                    "be recomputed, but was not when the model was recorded "
                    f"({users_line()}); give Pipeline a sample that takes this way, or mark it "
                    "with checkpoint=False"
                )

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, self.count, tensor.shape, tensor.dtype)
        self.count += 1
        return slot

    # --- again

    def recompute(self) -> None:
        """Make what was saved again, if it is not there."""
        with self._lock:
            if self.count and not self._values:
                self._surroundings.run(self._run_again)

    def value(self, slot: _Slot) -> Tensor:
        """What a slot stands for; recomputed now if nobody has seen to it before."""
        with self._lock:
            if slot.index not in self._values:
                self._values.clear()
                self.recompute()
            found = self._values.get(slot.index)
            if found is None or found.shape != slot.shape or found.dtype != slot.dtype:
                raise self._differs(slot, found)
            if not self.keeps:
                del self._values[slot.index]
            return found

    def _run_again(self) -> None:
        if not self.again.about.keeps_inputs:
            self._check_inputs("was written in place after the call of")
        before = [(names, dict(names)) for names, _ in self._buffers]
        outer = set_cursor(self._cursor())
        token = recomputing.set(True)
        with ExitStack() as stack:
            stack.callback(set_cursor, outer)
            stack.callback(recomputing.reset, token)
            for names, values in before:
                stack.callback(names.update, values)
            if self._random:
                stack.enter_context(replayed(self._random))
            stack.enter_context(torch.enable_grad())
            for (names, kept), (_, written) in zip(self._buffers, self.again.buffers, strict=True):
                names.update({k: _copy_of(t) if k in written else t for k, t in kept.items()})
            entered: dict[int, Any] = {}

            def enter(leaf: Any) -> Any:
                if id(leaf) not in entered:
                    entered[id(leaf)] = self._entered(leaf)
                return entered[id(leaf)]

            args, kwargs = map_leaves(enter, _opened(self._call))
            packs = torch.autograd.graph.saved_tensors_hooks(self._collect(), _same)
            try:
                with packs:
                    self.function(*args, **kwargs)
            except _Enough:
                pass

    def _cursor(self) -> Cursor:
        cursor = Cursor()
        cursor.stage = self.stage
        return cursor

    def _entered(self, kept: Any) -> Any:
        if isinstance(kept, Away):
            value = kept.tensor()
        elif not isinstance(kept, Tensor) or (kept.is_leaf and kept.requires_grad):
            return kept
        else:
            value = kept
        value = value.clone() if self.again.about.keeps_inputs else value
        # No leaf: the call may write to it in place.
        return enter_graph(Box(), value) if id(kept) in self._needs_graph else value.detach()

    def _collect(self) -> Callable[[Tensor], Tensor]:
        made = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal made
            value = tensor.detach()
            if made < self.count:
                self._values[made] = value
            made += 1
            if made == self.count:
                raise _Enough
            return value

        return pack

    def _differs(self, slot: _Slot, found: Tensor | None) -> StateError:
        then = f"{str(slot.dtype).removeprefix('torch.')}{list(slot.shape)}"
        now = (
            "nothing"
            if found is None
            else f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
        )
        return StateError(
            f"{self.again.what} on stage {self.stage} saved {then} (number {slot.index} of "
            f"{self.count}) in its forward, and {now} when it was recomputed: it depends on "
            "something that has changed (a cache that it was given, a counter, a generator of its "
            "own); ask blockpipe.is_recomputing() there, or mark it with checkpoint=False"
        )


def _unpack(slot: _Slot) -> Tensor:
    return slot.frame.value(slot)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _opened(value: Any) -> Any:
    """Lists and dicts copied: the call may add to them."""
    if type(value) is tuple:
        return tuple(_opened(item) for item in value)
    if type(value) is list:
        return [_opened(item) for item in value]
    if type(value) is dict:
        return {key: _opened(item) for key, item in value.items()}
    return value
