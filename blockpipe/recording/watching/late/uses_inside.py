"""Find the uses of lasting tensors where no torch function is seen: in the forward of a custom
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
from ...entries import TensorInfo
from ...outside.outside_tensors import OutsideTensors
from .lasting_memory import LastingMemory


class UsesInside:
    """Watch one forward for such uses.

    Args:
        memory: which outlives the forward.
        held: the parameters and buffers by id.
        outside: the other tensors that outlive it.
        hop: returns the hop that the forward is on.
        is_in_function: says whether the forward of a custom function is running.
        is_packing: says whether such a hook is.
        reads: notes that it uses a parameter or a buffer.
        is_own: says whether a tensor is this forward's own.
    """

    def __init__(
        self,
        memory: LastingMemory,
        held: Mapping[int, TensorInfo],
        outside: OutsideTensors,
        *,
        hop: Callable[[], int],
        is_in_function: Callable[[], bool],
        is_packing: Callable[[], bool],
        reads: Callable[[Tensor, TensorInfo], None],
        is_own: Callable[[Tensor], bool],
    ) -> None:
        self._memory, self._held, self._outside = memory, held, outside
        self._hop, self._reads, self._is_own = hop, reads, is_own
        self._is_in_function, self._is_packing = is_in_function, is_packing
        self._made: dict[int, weakref.ref[Tensor]] = {}  # by id

    def given(self, operands: Iterable[Tensor]) -> None:
        """Note what an operation is about to use. What a hook packs is another object than the
        micro-batch's own: so only what is known to last counts there."""
        is_known = not self._is_in_function()
        for tensor in operands if not is_known or self._is_packing() else ():
            self._uses(tensor, writes=False, is_known=is_known)

    def writing(self, written: Iterable[Tensor]) -> None:
        """Note what it is about to write to."""
        for tensor in written if self._is_in_function() or self._is_packing() else ():
            self._uses(tensor, writes=True)

    def _uses(self, tensor: Tensor, *, writes: bool, is_known: bool = False) -> None:
        if self._is_own(tensor):
            return
        if not (is_known or self._is_new(tensor)):
            self._memory.add(tensor)
        for base in self._memory.behind(tensor):
            if (held := self._held.get(id(base))) is not None:
                self._reads(base, held)
                held.written = held.written or writes
            else:
                self._outside.read(base, self._hop())
                if writes:
                    self._outside.wrote(base)

    def made(self, result: Any, given: Any) -> None:
        """Note what it has made."""
        if self._is_in_function() or self._is_packing():
            before = {id(tensor) for tensor in tensors(given)}
            new = (tensor for tensor in tensors(result) if id(tensor) not in before)
            self._made |= {id(tensor): weakref.ref(tensor) for tensor in new}

    def _is_new(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def forget(self) -> list[weakref.ref[Tensor]]:
        """End the cycle with what is asked and told; return what was made, which may stay."""
        del self._hop, self._is_in_function, self._is_packing, self._reads, self._is_own
        made = [*self._made.values()]
        self._made.clear()
        return made
