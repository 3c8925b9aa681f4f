"""Find what a forward does to memory that the backward of an earlier micro-batch still needs.

The plain loop runs a micro-batch's backward before the next one's forward; most schedules do not.
If a forward writes to a tensor that autograd has saved, autograd itself notices that by the
tensor's version. A write through ``.data`` counts no version, and a forward that reads ``.grad``
writes nothing at all. So both are written down here, and a step whose schedule runs such a backward
later than the plain loop does is refused. To refuse them in the recording was no alternative,
because the last stage of 1F1B has the plain loop's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._common.callsite import users_line
from ..._common.garbage import collect_until
from ..._common.nested import tensors
from ..._torch.modes import without_torch_functions
from ..._torch.tensors import extent_of, version_of
from ...crossing.tags import TAG, Tag
from ..entries import LateBackward, TensorInfo
from .saved_tensors import Packed, key_of

_CLONE = "clone() it before it is used, write it between steps"
_INITIALIZE = (
    "if the first forward alone writes it, as an initialization, write it under torch.no_grad() "
    "(p.copy_(…), not p.data.copy_(…)) or run the plain model once before the pipeline"
)
_READ = "read it between steps"


@dataclass
class _Saved:
    """A tensor that autograd saves, of memory that outlives the forward."""

    packed: weakref.ref[Packed]  # gone with the part of the graph that has saved it
    key: int
    extent: tuple[int, int]
    leaf: int | None  # autograd saves a leaf itself, whatever its memory is later
    hop: int
    where: str


@dataclass
class _Write:
    """A write of the forward that the saved tensors' versions do not count.

    Attributes:
        key: of the memory, if it was written to.
        extent: which part of it.
        leaf: the tensor that was given other memory instead.
        depends: whether what is written was computed from the micro-batch.
    """

    key: int | None
    extent: tuple[int, int]
    leaf: Tensor | None
    hop: int
    where: str
    depends: bool = False

    def changes(self, saved: _Saved) -> bool:
        """Return whether a backward that reads a saved tensor reads what is written here."""
        if self.key is None:
            return saved.leaf == id(self.leaf)
        (begin, end), (begins, ends) = self.extent, saved.extent
        return self.key == saved.key and begin < ends and begins < end


class LateBackwards:
    """Watch one forward for such writes and reads.

    Args:
        held: the parameters and buffers by id.
        lasting: their tensors.
        hop: returns the hop that the forward is on.
        wrote: is told of each tensor whose memory was written to without a new version.
    """

    def __init__(
        self,
        held: Mapping[int, TensorInfo],
        lasting: Iterable[Tensor],
        hop: Callable[[], int],
        wrote: Callable[[Tensor], None],
    ) -> None:
        self._held, self._hop, self._wrote = held, hop, wrote
        self._lasting: dict[int, dict[int, Tensor]] = {}  # by memory and id
        self._seen: dict[int, int] = {}  # by the memory of what operations see, the tensor's
        self._alive: list[Tensor] = []  # so that no other memory gets their keys
        self._versions: dict[int, int] = {}  # by id
        self._saved: list[_Saved] = []
        self._pending: list[_Write] = []
        self._writes: list[_Write] = []
        self._gradients: dict[int, tuple[TensorInfo, int, str]] = {}  # by id
        for tensor in lasting:
            self.lasts(tensor)

    def lasts(self, tensor: Tensor) -> None:
        """Note a tensor that the forward has not made: its memory outlives the micro-batch."""
        key = key_of(tensor)
        if key is None or id(tensor) in self._lasting.get(key, ()):
            return
        self._lasting.setdefault(key, {})[id(tensor)] = tensor
        self._versions[id(tensor)] = version_of(tensor)
        with without_torch_functions():
            seen = tensor.detach()  # as operations see it: a fake one, in a fake run
        if (other := key_of(seen)) is not None and other != key:
            self._seen[other] = key
            self._alive.append(seen)

    def saved(self, packed: Packed, hop: int) -> None:
        """Note that autograd saves a tensor on a hop."""
        tensor = packed.tensor
        key = self._memory(tensor)
        if key in self._lasting:
            leaf = id(tensor) if tensor.is_leaf else None
            found = weakref.ref(packed), key, extent_of(tensor), leaf
            self._saved.append(_Saved(*found, hop, users_line()))

    def writing(self, written: Iterable[Tensor]) -> None:
        """Note, before an operation below autograd, the tensors that it will write to."""
        for tensor in written:
            key = self._memory(tensor)
            if key in self._lasting:
                write = _Write(key, extent_of(tensor), None, max(self._hop(), 0), users_line())
                self._pending.append(write)

    def operated(self, given: Any = ()) -> None:
        """Look at the end of a torch function which of its writes no version has counted.

        Args:
            given: its arguments.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        depends = any(map(_is_of_microbatch, tensors(given)))
        for write in pending:
            assert write.key is not None
            for tensor in self._lasting[write.key].values():
                version = version_of(tensor)
                if version == self._versions[id(tensor)]:
                    write.depends = depends
                    self._writes.append(write)
                    self._wrote(tensor)
                self._versions[id(tensor)] = version

    def assigned(self, tensor: Tensor, value: object) -> None:
        """Note that the forward gives a tensor other memory."""
        if id(tensor) not in self._versions:
            return  # the micro-batch's own
        self._wrote(tensor)
        depends = isinstance(value, Tensor) and _is_of_microbatch(value)
        where = max(self._hop(), 0), users_line()
        self._writes.append(_Write(None, (0, 0), tensor, *where, depends))
        self.lasts(tensor)

    def reads_gradient(self, tensor: Tensor) -> None:
        """Note that the forward reads the ``.grad`` of a tensor."""
        held = self._held.get(id(tensor))
        if held is not None and held.trainable:
            self._gradients.setdefault(id(tensor), (held, max(self._hop(), 0), users_line()))

    def found(self) -> Iterator[LateBackward]:
        """Yield what was noted, at the end of the forward, while its graph is there."""
        self.operated()
        if self._is_any_changed():
            collect_until(lambda: not self._is_any_changed())  # a graph that a cycle alone holds
        yield from self._unnoticed_writes()
        for held, hop, where in self._gradients.values():
            yield LateBackward(
                f"the forward reads the .grad of parameter {held.name!r} on hop {hop} ({where})",
                "has its gradient in the plain loop",
                hop,
                [*held.hops] or [hop],
                _READ,
            )

    def _is_any_changed(self) -> bool:
        """Whether a tensor that a graph has saved was written to."""
        self._saved = [saved for saved in self._saved if saved.packed() is not None]
        return any(write.changes(saved) for write in self._writes for saved in self._saved)

    def _unnoticed_writes(self) -> Iterator[LateBackward]:
        known: dict[str, LateBackward] = {}
        for write in self._writes:
            saved = [s for s in self._saved if s.packed() is not None and write.changes(s)]
            if not saved:
                continue
            name, compared = self._named(write)
            remedy = _CLONE if compared is None else f"{_CLONE}, {_INITIALIZE}"
            where = f"on hop {write.hop} ({write.where})"
            late = LateBackward(
                f"the forward writes to {name} {where}, by .data or in another way that counts no "
                "version",
                f"reads what autograd has saved of it ({saved[0].where})",
                write.hop,
                sorted({s.hop for s in saved}),
                remedy,
                None if write.depends else compared,
            )
            if name not in known or (known[name].compared and not late.compared):
                known[name] = late
        yield from known.values()

    def _named(self, write: _Write) -> tuple[str, str | None]:
        """Return the words for what is written, and the name of it in the model."""
        found = [write.leaf] if write.key is None else [*self._lasting[write.key].values()]
        for tensor in found:
            held = self._held.get(id(tensor))
            if held is not None:
                return f"{'buffer' if held.is_buffer else 'parameter'} {held.name!r}", held.name
        shape = () if found[0] is None else tuple(found[0].shape)
        return f"a tensor of shape {shape} that no module registered", None

    def _memory(self, tensor: Tensor) -> int:
        key = key_of(tensor)
        return -1 if key is None else self._seen.get(key, key)

    def forget(self) -> None:
        """Release all tensors, and end the cycle with what is told of writes."""
        self._hop, self._wrote = int, _nothing
        self._alive.clear()
        self._lasting.clear()
        self._writes.clear()
        self._saved.clear()


def _nothing(_: Tensor) -> None:
    """Be told no more."""


def _is_of_microbatch(tensor: Tensor) -> bool:
    with without_torch_functions():
        tag: Tag | None = getattr(tensor, TAG, None)
        return tag is not None and not tag.is_constant(tensor)
