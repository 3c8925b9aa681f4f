"""Find the writes to lasting tensors where no torch function is seen: in the forward of a custom
function, and in a hook that packs what autograd saves.

The operations below autograd are seen there. They do not say which tensors last: those that none of
them has made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ...._common.nested import tensors
from ...._torch.tensors import FakeTensor
from ....crossing.tags import TAG
from ...entries import TensorInfo
from ...outside.outside_tensors import OutsideTensors
from .lasting_memory import LastingMemory


class WritesInside:
    """Watch one forward for such writes.

    Args:
        memory: which outlives the forward.
        held: the parameters and buffers by id.
        outside: the other tensors that outlive it.
        hop: returns the hop that the forward is on.
        is_inside: says whether such code is running.
        reads: notes that it uses a parameter or a buffer.
        stand_in: returns the tensor that stands for a parameter or a buffer in a fake run.
    """

    def __init__(
        self,
        memory: LastingMemory,
        held: Mapping[int, TensorInfo],
        outside: OutsideTensors,
        *,
        hop: Callable[[], int],
        is_inside: Callable[[], bool],
        reads: Callable[[Tensor, TensorInfo], None],
        stand_in: Callable[[Tensor], Tensor],
    ) -> None:
        self._memory, self._held, self._outside = memory, held, outside
        self._hop, self._is_inside, self._reads = hop, is_inside, reads
        self._stand_in = stand_in
        self._made: dict[int, weakref.ref[Tensor]] = {}  # by id

    def given(self, operands: Iterable[Tensor]) -> None:
        """Note what an operation is about to use."""
        for tensor in operands if self._is_inside() else ():
            if getattr(tensor, TAG, None) is None and not self._is_new(tensor):
                self._memory.add(tensor)

    def writing(self, written: Iterable[Tensor]) -> None:
        """Note what it is about to write to."""
        written = [*map(self._stand_in, written)] if self._is_inside() else []
        self.given(written)
        for tensor in written:
            for base in self._memory.behind(tensor):
                if (held := self._held.get(id(base))) is not None:
                    self._reads(base, held)
                    held.written = True
                else:
                    self._outside.read(base, self._hop())
                    self._outside.wrote(base)

    def made(self, result: Any, given: Any) -> None:
        """Note what it has made."""
        if self._is_inside():
            before = {id(tensor) for tensor in tensors(given)}
            new = (tensor for tensor in tensors(result) if id(tensor) not in before)
            self._made |= {id(tensor): weakref.ref(tensor) for tensor in new}

    def _is_new(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return isinstance(tensor, FakeTensor) or (made is not None and made() is tensor)

    def forget(self) -> None:
        """End the cycle with what is asked and told."""
        del self._hop, self._is_inside, self._reads, self._stand_in
        self._made.clear()
