"""Collect the storages that autograd saves in a forward, by hop and by call.

The recording sees them through saved-tensor hooks. Its tensors are fake, but they share storages as
the real ones do, so the count is that of the memory in use. To add up the results of all operations
was no alternative, because many of them are freed as soon as the next operation has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._torch.graph import pop_saved_tensor_hooks, push_saved_tensor_hooks, saved_tensor_hooks
from ..._torch.modes import is_transformed, without_torch_functions
from ..._torch.tensors import storage_id, version_of
from ...costs.work import size_of
from ...crossing.recompute import Recomputable
from ..calls import Call, Saved
from ..entries import ActivationBytes, Hop
from ..recording import Recording

_Key = int  # a storage's
_FEW = 8  # storages whose sizes are kept


class Packed:
    """What autograd keeps of a tensor that it saves in a recording; it goes with that part of the
    graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Not the tensor itself: a node that saves its own result would be a cycle.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()


class Activations:
    """The storages that autograd saves, collected while the hooks are on.

    Args:
        skipped: parameters and buffers, which are in memory anyway.

    Attributes:
        on_saved: is told of each tensor that is saved, with the hop.
        written: the calls, by id, that wrote to copies of their arguments.
    """

    def __init__(self, skipped: Iterable[Tensor]) -> None:
        self._skipped = {key for t in skipped if (key := key_of(t)) is not None}
        self._storages: dict[_Key, tuple[Any, int]] = {}  # kept alive, so that keys stay unique
        self._saved: list[tuple[int, Call | None, _Key, int]] = []
        self._given: dict[int, set[_Key]] = {}  # a call's arguments, by its id
        self._sharing: set[int] = set()  # ids of calls that were given views of one storage
        self._versions: list[tuple[Call, Tensor, int]] = []
        self._inputs: set[_Key] = set()
        self._hop = 0
        self._call: Call | None = None
        self._segment = 0
        self.on_saved: Callable[[Packed, int], None] | None = None
        self.written: set[int] = set()

    def put_on(self) -> None:
        """Hook into autograd's saving in this thread from here on."""
        push_saved_tensor_hooks(self._pack, _unpack)

    def take_off(self) -> None:
        """Remove the hooks, and those above them: up to torch 2.11, a checkpoint whose function
        raises leaves its own on."""
        own = self._pack, _unpack
        while (last := saved_tensor_hooks()) is not None:
            pop_saved_tensor_hooks()
            if last == own:
                break

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """Note the micro-batch's inputs, which are slices of the caller's batch."""
        for tensor in tensors:
            key = key_of(tensor)
            if key is not None and key not in self._skipped:
                size = size_of(tensor)
                self._storages[key] = tensor.untyped_storage(), size
                self._inputs.add(key)

    @property
    def input_bytes(self) -> int:
        """The bytes of the micro-batch's inputs."""
        return self._bytes(self._inputs)

    def at(self, hop: int, call: Call | None, segment: int) -> None:
        """Note the place at which the next tensors are saved."""
        self._hop, self._call, self._segment = max(hop, 0), call, segment

    def given(self, call: Call, tensors: Iterable[Tensor]) -> None:
        """Note the arguments of a call that begins."""
        keys = self._given.setdefault(id(call), set())
        with without_torch_functions():
            for tensor in {id(t): t for t in tensors}.values():
                key = self._noted(tensor)
                if key is not None:
                    if key in keys:
                        self._sharing.add(id(call))
                    keys.add(key)
                # A version is shared with what is detached, which keeps no graph alive.
                kept = tensor if tensor.grad_fn is None else tensor.detach()
                self._versions.append((call, kept, version_of(tensor)))

    def _pack(self, tensor: Tensor) -> Packed:
        with without_torch_functions():
            key = self._noted(tensor)
            if key is not None:
                self._saved.append((self._hop, self._call, key, self._segment))
            packed = Packed(tensor)
            if self.on_saved is not None:
                self.on_saved(packed, self._hop)
            return packed

    def _noted(self, tensor: Tensor) -> _Key | None:
        key = key_of(tensor)
        if key is None or key in self._skipped:
            return None
        if key not in self._storages:
            storage = tensor.untyped_storage()
            self._storages[key] = storage, storage.nbytes()
        return key

    def conclude(
        self, hops: list[Hop], sealed_call_of: Mapping[int, Call]
    ) -> dict[str, Recomputable]:
        """Fill in the bytes that hops keep; return by path the data to recompute sealed calls.

        Args:
            hops: the hops of the route.
            sealed_call_of: the sealed call that a call is, or is inside of, by the call's id.
        """
        sealed_forwards = list(
            {id(sealed_call): sealed_call for sealed_call in sealed_call_of.values()}.values()
        )
        about: dict[str, Recomputable] = {}
        written = {id(c) for c, tensor, version in self._versions if version_of(tensor) != version}
        written |= self.written
        for sealed_call in sealed_forwards:
            known = about.setdefault(sealed_call.path, Recomputable())
            known.keeps_inputs |= id(sealed_call) in written
            # Only the hop that drew from Python's or numpy's generator is known, and not the call.
            known.buffers |= sealed_call.buffers
            known.draws |= sealed_call.draws or bool(hops[sealed_call.hop or 0].draws - {"torch"})
            known.refuses = known.refuses or sealed_call.refuses
            if id(sealed_call) in written and id(sealed_call) in self._sharing:
                known.refuses = "it writes to arguments that share memory"
        for sealed_call, saved, freed in self._gains(sealed_forwards, sealed_call_of):
            # Recomputation must save memory: a convolution saves nothing but its input.
            about[sealed_call.path].pays |= 20 * freed > saved > 0
        for sealed_call in sealed_forwards:
            sealed_call.is_recomputed = about[sealed_call.path].is_recomputed
        self._fill_in(hops, sealed_forwards, sealed_call_of)
        return about

    def by_call(self) -> None:
        """Fill in the bytes that the calls save.

        A storage that several calls of a hop save counts once, for the first of them. So the bytes
        of a call are the sum of those of the calls inside of it and of its own.
        """
        first: dict[tuple[int, _Key], Call | None] = {}
        for hop, call, key, _ in self._saved:
            first.setdefault((hop, key), call)
        for (_, key), saver in first.items():
            for call in () if saver is None else (saver, *saver.ancestors()):
                call.saved_bytes += self._storages[key][1]

    def by_segments(self) -> list[Saved]:
        """Return the bytes that are saved, added up over tensors that the same segments save."""
        segments: dict[_Key, set[int]] = {}
        for _, _, key, segment in self._saved:
            segments.setdefault(key, set()).add(segment)
        found: dict[tuple[tuple[int, ...], bool], int] = {}
        for key, savers in segments.items():
            where = tuple(sorted(savers)), key in self._inputs
            found[where] = found.get(where, 0) + self._storages[key][1]
        return [Saved(at, size, is_input) for (at, is_input), size in found.items()]

    def forget(self) -> None:
        """Release all tensors. What autograd has saved keeps this object as long as its graph."""
        self.on_saved = None
        self._storages.clear()
        self._versions.clear()

    def _gains(
        self, sealed_forwards: list[Call], sealed_call_of: Mapping[int, Call]
    ) -> Iterable[tuple[Call, int, int]]:
        """Return for each sealed call the bytes that it saves, and those that only it keeps
        alive."""
        inside: dict[int, set[_Key]] = {id(sealed_call): set() for sealed_call in sealed_forwards}
        others: set[_Key] = set().union(
            *(self._given.get(id(sealed_call), set()) for sealed_call in sealed_forwards)
        )
        for _, call, key, _ in self._saved:
            sealed_call = sealed_call_of.get(id(call))
            (others if sealed_call is None else inside[id(sealed_call)]).add(key)
        for sealed_call in sealed_forwards:
            keys = inside[id(sealed_call)]
            yield sealed_call, self._bytes(keys), self._bytes(keys - others)

    def _fill_in(
        self, hops: list[Hop], sealed_forwards: list[Call], sealed_call_of: Mapping[int, Call]
    ) -> None:
        glue: list[set[_Key]] = [set() for _ in hops]
        never: list[set[_Key]] = [set() for _ in hops]
        always: list[set[_Key]] = [set() for _ in hops]
        asked: list[set[_Key]] = [set() for _ in hops]
        for at, call, key, _ in self._saved:
            hop = min(at, len(hops) - 1)
            sealed_call = sealed_call_of.get(id(call))
            never[hop].add(key)
            if sealed_call is None:
                glue[hop].add(key)
            if sealed_call is None or not sealed_call.recomputes(True):
                always[hop].add(key)
            if sealed_call is None or not sealed_call.recomputes(False):
                asked[hop].add(key)
        for sealed_call in sealed_forwards:
            hop = sealed_call.hop or 0
            for mode, keys, kept in (
                (True, always[hop], hops[hop].always),
                (False, asked[hop], hops[hop].asked),
            ):
                if sealed_call.recomputes(mode):
                    keys |= self._given.get(id(sealed_call), set())
                    kept.calls += 1
                    for work in sealed_call.work.values():
                        kept.recompute.add(work)
        for hop in range(len(hops)):
            hops[hop].glue_bytes = self._bytes(glue[hop])
        for activation_bytes, of_hops in (("never", never), ("always", always), ("asked", asked)):
            earlier: set[_Key] = set()
            for info, keys, all_keys in zip(hops, of_hops, never, strict=True):
                result: ActivationBytes = getattr(info, activation_bytes)
                result.bytes = self._bytes(keys)
                result.shared = self._bytes(keys & earlier)
                result.full = self._bytes(keys | all_keys)
                result.largest = tuple(sorted(self._storages[k][1] for k in keys)[: -_FEW - 1 : -1])
                result.inputs = self._bytes(keys & self._inputs - earlier)
                earlier |= keys

    def _bytes(self, keys: Iterable[_Key]) -> int:
        return sum(self._storages[key][1] for key in keys)


def key_of(tensor: Tensor) -> _Key | None:
    """Return which storage a tensor has; ``None`` if it has none to look at."""
    if tensor.layout is not torch.strided or is_transformed(tensor):  # it has none to look at
        return None
    return storage_id(tensor.untyped_storage())


def _unpack(packed: Packed) -> Tensor:
    return packed.tensor


class HooksRefusedError(Exception):
    """A module's forward, or a function, that cannot run under saved-tensor hooks."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def hooked(attempt: Callable[[frozenset[str]], Recording]) -> Recording:
    """Record, without saved-tensor hooks in those calls that turn out not to allow them."""
    unhookable: frozenset[str] = frozenset()
    while True:
        try:
            return attempt(unhookable)
        except HooksRefusedError as refused:
            unhookable |= {refused.path}
