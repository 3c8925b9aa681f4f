"""A run whose graph is not cut: for ``schedule="uncut"``, and for ``pipe.run``.

It is one ordinary graph over all devices, so whether a tensor can be read here is a question of its
device alone. What is elsewhere is read through a *mirror*: a copy that autograd follows. A write to
a mirror goes to the tensor that it mirrors, by one more copy that autograd follows, and from there
to every other mirror of that memory; so views, aliases and later readers see it, as they do on one
device. Version counters tell what was written, and node for node whether autograd saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.callsite import users_line
from .._torch.modes import is_transformed
from .._torch.tensors import shape_of, storage_id, version_of
from ..devices.devices import current_stream
from ..devices.observer import Watch
from ..errors import CrossingError
from ..stages.cursor import Cursor
from .microbatch_run import Arguments, Keywords, MicrobatchRun, Reader
from .step_context import StepContext
from .tags import TAG, MicrobatchKey, Tag
from .tensors.place import Listener, Reads
from .tensors.tensor_attributes import class_attributes, share_attributes
from .tensors.tensor_import import from_outside


class Mirror:
    """A copy of a tensor on another device, and the versions of both when they were last the
    same."""

    __slots__ = ("besides", "node", "source_node", "source_version", "value", "version")

    def __init__(self, source: Tensor, value: Tensor) -> None:
        self.value = value
        self.besides = class_attributes(value)
        self.agree(source)

    def agree(self, source: Tensor) -> None:
        """Note that both are the same now; a difference from here on is a write."""
        self.version, self.node = version_of(self.value), _node_of(self.value)
        self.source_version, self.source_node = version_of(source), _node_of(source)

    def push(self, source: Tensor) -> bool:
        """Write to the source what was written to the mirror, if anything was."""
        if version_of(self.value) == self.version:
            return False
        _write(self.value, source, follows=_node_of(self.value) is not self.node)
        self.agree(source)
        return True

    def pull(self, source: Tensor) -> None:
        """Write to the mirror what was written to the source."""
        _write(source, self.value, follows=_node_of(source) is not self.source_node)
        self.agree(source)


def _node_of(tensor: Tensor) -> Node | None:
    return tensor.grad_fn  # kept, so that it stays the same object


def _write(source: Tensor, target: Tensor, *, follows: bool) -> None:
    """Copy in place. A write that autograd did not see when it happened, it does not see now
    either."""
    with torch.set_grad_enabled(follows):
        target.copy_(source)


class UncutRun(MicrobatchRun):
    """A run that may take any way, in one ordinary graph.

    Args:
        step: what it shares with the other runs of its step.
        microbatch: its index.
        cursor: moved by the marks of its forward.
        key: which run it is, if that does not follow from the step.
        listener: notices what it does; a recording does.
    """

    def __init__(
        self,
        step: StepContext,
        microbatch: int,
        cursor: Cursor,
        key: MicrobatchKey | None = None,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(step, microbatch, cursor, key, listener)
        # By tensor, then by device. Not kept by the tensors themselves: a leaf is held by the graph
        # of its mirror, which would be a cycle.
        self._mirrors: Any = WeakTensorKeyDictionary()
        self._has_aliases = False  # whether two mirrors on a device mirror the same memory

    # --- where the run is

    def next_hop(self, stage: int) -> int:
        return self.hop + 1

    def is_sealed(self, hops: frozenset[int]) -> bool:
        return self.cursor.stage in {self.step.route[hop] for hop in hops}

    def add_root(self, hop: int, edge: GradientEdge, gradient: Tensor | None) -> None:
        # The route may be longer than the recorded one, whose last hop's backward comes first.
        super().add_root(min(hop, len(self.step.route) - 1), edge, gradient)

    # --- what may be read here

    def reader(self) -> Reader:
        return self._read

    def _read(self, tensor: Tensor, reads: Reads) -> Tensor:
        step = self.step
        device = step.device_of(self.stage)
        if device is None or tensor.device == device or step.stays(tensor):
            if self._has_aliases:
                self.notice_writes()  # by way of one view; the operation may read another
            is_nobodys = not hasattr(tensor, TAG) and step.home_of(tensor) is None
            return from_outside(tensor, reads) if is_nobodys else tensor
        if is_transformed(tensor) or tensor.is_meta:
            return tensor
        mirror = self._mirror(tensor, device)
        share_attributes(tensor, mirror.value, mirror.besides)
        reads.append((tensor, mirror))
        return mirror.value

    def _mirror(self, tensor: Tensor, device: torch.device) -> Mirror:
        self.notice_writes()
        mirrors = self._mirrors.get(tensor)
        if mirrors is None:
            mirrors = self._mirrors[tensor] = {}
        found: Mirror | None = mirrors.get(device)
        if found is None or (tensor.requires_grad and not found.value.requires_grad):
            tag: Tag | None = getattr(tensor, TAG, None)
            from_hop = self.hop if tag is None else tag.hop
            watch = self.step.watch(tensor, from_hop, self.hop, self.microbatch)
            value = self._copied_to(device, tensor, watch)
            found = mirrors[device] = Mirror(tensor, value)
            setattr(value, TAG, self.place.tag(value))  # on the CPU it is not from outside
            self._has_aliases = self._has_aliases or any(
                other is not tensor and device in there and _same_memory(other, tensor)
                for other, there in self._mirrors.items()
            )
        return found

    def _copied_to(self, device: torch.device, tensor: Tensor, watch: Watch | None) -> Tensor:
        """Return a copy that is made by one more operation of the graph."""
        if watch is not None:
            watch("sends", current_stream(tensor.device))
        # With grad also under the user's no_grad: a later reader may need the gradient. An ordinary
        # tensor also in inference mode: others do not count what is written to them.
        with torch.inference_mode(False), torch.set_grad_enabled(self.step.graphs.differentiable):
            copied = tensor.to(device)
        if watch is not None:
            watch("arrives", current_stream(device))
        return copied

    # --- what was written to

    def check_written(self, reads: Iterable[tuple[Tensor, Any]]) -> None:
        mirrored = list(reads)
        for source, mirror in mirrored:
            share_attributes(mirror.value, source, mirror.besides)
        written = [source for source, mirror in mirrored if mirror.push(source)]
        for source in written if self.sealed else ():
            if any(other is not source and _same_memory(other, source) for other, _ in mirrored):
                raise CrossingError(
                    f"a module on stage {self.stage} writes in place to a tensor of shape "
                    f"{shape_of(source)} that lives on {source.device}, and is given another "
                    f"view of it ({users_line()}): it may have missed the write; clone() it first"
                )
        self._tell_others(written)

    def notice_writes(self) -> None:
        self._tell_others([source for source, mirror in self._all_mirrors() if mirror.push(source)])

    def _tell_others(self, written: list[Tensor]) -> None:
        """Update the other mirrors of a tensor that was written to, and of those that share its
        memory."""
        for source, mirror in self._all_mirrors() if written else ():
            if source.is_inference():  # it counts no writes
                is_old = any(_same_memory(source, other) for other in written)
            else:
                is_old = version_of(source) != mirror.source_version
            if is_old:
                mirror.pull(source)

    def _all_mirrors(self) -> Iterator[tuple[Tensor, Mirror]]:
        for source, mirrors in list(self._mirrors.items()):
            for mirror in mirrors.values():
                yield source, mirror

    def _cross(self, hop: int) -> None:
        self.notice_writes()  # by way of a view that was made there
        super()._cross(hop)
        device = self.step.device_of(self.stage)
        for source, mirror in self._all_mirrors():
            # What counts no writes may have been written at home.
            unknown = source.is_inference() and mirror.value.device == device
            if unknown or version_of(source) != mirror.source_version:
                mirror.pull(source)

    # --- what is done to tensors themselves, wherever they are

    def handed(
        self,
        func: Callable[..., Any],
        args: Arguments,
        kwargs: Keywords,
        read: Reader,
        given: Collection[int] = (),
    ) -> Reader:
        found = _BACKWARDS.get(func)
        if found is not None:
            roots_name, at, name = found
            roots = args[0] if args else kwargs.get(roots_name)
            gradients = args[at] if len(args) > at else kwargs.get(name)
            beside = {id(g): g.to(r.device) for r, g in _pairs(roots, gradients)}
            return lambda tensor, _: beside.get(id(tensor), tensor)
        tensor = args[0]
        if read(tensor, Reads()) is tensor:
            return read
        if getattr(func, "__self__", None) in (Tensor.grad, Tensor._grad):
            return lambda other, _: other.to(tensor.device)
        if func in _ASSIGNS:
            for device, mirror in self._mirrors[tensor].items():
                mirror.value.data = args[1].to(device)  # what was saved of it has other data, too
        else:
            del self._mirrors[tensor]
        return lambda other, _: other.to(tensor.device)

    def newest(self, tensor: Tensor) -> Tensor:
        return tensor

    # --- inputs

    def take_memory(self, tensor: Tensor) -> Tensor:
        value = tensor.view_as(tensor)
        device = self.step.device_of(self._where_inputs_are()[1])
        return value if device is None else value.to(device)

    def take_part(self, tensor: Tensor, value: Tensor, index: int = 0) -> Tensor:
        hop, stage = self._where_inputs_are()
        share_attributes(tensor, value, class_attributes(value))
        setattr(value, TAG, Tag(self.key, hop, stage))
        return value

    def finish_forward(self) -> None:
        super().finish_forward()
        self._mirrors.clear()


_ASSIGNS = frozenset([Tensor.data.__set__])  # type: ignore[attr-defined]


# What each calls its roots; where their gradients stand among the arguments, and their name.
_BACKWARDS: dict[Any, tuple[str, int, str]] = {
    Tensor.backward: ("self", 1, "gradient"),
    torch.autograd.backward: ("tensors", 1, "grad_tensors"),
    torch.autograd.grad: ("outputs", 2, "grad_outputs"),
}


def _pairs(roots: Any, gradients: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Return what a backward begins with: a tensor and its gradient, or several of both."""
    one, other = ([v] if isinstance(v, Tensor) else v or () for v in (roots, gradients))
    for root, gradient in zip(one, other, strict=False):
        if isinstance(root, Tensor) and isinstance(gradient, Tensor):
            yield root, gradient


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())
