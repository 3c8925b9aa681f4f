"""Watch which hops read and write tensors that no module registered and no forward made.

An example is a running mean in a user's object, in a list or in a global. Sealed modules read such
tensors too, and in a step nothing would notice there that another micro-batch has written to one in
the meantime. So the recording, which sees every operation, has to find them.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..._common.callsite import users_line
from ..._torch.tensors import overlap, shape_of, version_of
from ...crossing.constants import writes
from ..entries import OutsideTensor, SharedChange

_REMEDY = "register it as a buffer of the module that writes to it, and pass others its value"


class OutsideTensors:
    """Watch such tensors during one forward."""

    def __init__(self) -> None:
        self._known: dict[int, OutsideTensor] = {}  # by id
        self._versions: dict[int, int] = {}
        self._latest: list[int] = []  # the arguments of the operation under way

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the tensor was read before."""
        known = self._known.get(id(tensor))
        return known is not None and known.tensor is not None and known.tensor() is tensor

    def read(self, tensor: Tensor, hop: int) -> None:
        """Note that an operation on a hop takes such a tensor."""
        key = id(tensor)
        if not self.knows(tensor):
            shape, where = shape_of(tensor), users_line()
            self._known[key] = OutsideTensor(shape, where, weakref.ref(tensor))
            self._versions[key] = version_of(tensor)
        if hop not in self._known[key].hops:
            self._known[key].hops.append(hop)
        self._latest.append(key)

    def wrote(self, tensor: Tensor) -> None:
        """Note that an operation wrote to such a tensor without a new version."""
        if self.knows(tensor):
            self._known[id(tensor)].written = True

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether it is such a tensor, to which an operation wrote."""
        return self.knows(tensor) and self._known[id(tensor)].written

    def look(self) -> None:
        """Note the tensors that an operation has written to, at its end. Views of one tensor share
        a version, but only those count that overlap with the operation's arguments."""
        changed = {}
        for key, known in self._known.items():
            tensor = None if known.tensor is None else known.tensor()
            if tensor is not None and version_of(tensor) != self._versions[key]:
                changed[key] = tensor
                self._versions[key] = version_of(tensor)
        given = [changed[key] for key in self._latest if key in changed]
        self._latest.clear()
        for key, tensor in changed.items():
            if not given or any(overlap(tensor, other) for other in given):
                self._known[key].written = True

    def written_by(
        self, func: Callable[..., Any], first: object, before: list[tuple[Tensor, int]]
    ) -> bool:
        """Return whether an operation, which is over, has written to a tensor.

        Args:
            func: the operation.
            first: its first argument.
            before: the tensors that it may have written to, with their versions before it.
        """
        self.look()
        # A tensor that is no fake one is not written in a fake run: then the operation's name
        # decides.
        found = [
            tensor
            for tensor, version in before
            if version_of(tensor) != version or (tensor is first and writes(func))
        ]
        for tensor in found:
            self.wrote(tensor)
        return bool(found)

    def hops_of(self, tensor: Tensor) -> list[int]:
        """Return the hops that read a tensor, if it is such a one."""
        return self._known[id(tensor)].hops if self.knows(tensor) else []

    def found(self) -> list[OutsideTensor]:
        """Return all of them in the order in which they were first read."""
        return list(self._known.values())

    def shared(self) -> Iterator[SharedChange]:
        """Yield those that the forward writes to and that several hops use."""
        for found in self.found():
            if found.written and len(found.hops) > 1:
                yield SharedChange(found.name, "reads it", found.hops, found.where, _REMEDY)
