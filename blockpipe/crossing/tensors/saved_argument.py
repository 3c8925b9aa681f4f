"""An argument of a call that will be run again, as the call had it."""

from __future__ import annotations

from torch import Tensor

from ..._torch.tensors import version_of
from ..offload import Offload, OffloadedTensor
from ..tags import GradientSlot, enter_graph


class SavedArgument:
    """An argument, kept from the call without its graph."""

    __slots__ = ("_enters", "_value", "_version")

    def __init__(self, tensor: Tensor, offload: Offload | None, *, copies: bool) -> None:
        is_leaf = tensor.is_leaf and tensor.requires_grad
        self._enters = tensor.requires_grad and not is_leaf
        self._value: Tensor | OffloadedTensor | None = None
        if offload is not None and not copies:
            self._value = offload.away(tensor)
        if self._value is None:
            self._value = tensor if is_leaf else tensor.detach()
            if copies and not is_leaf:
                self._value = self._value.clone()
        self.note_version()

    def fetch(self) -> None:
        """Begin to bring it back if it is in host memory, without waiting."""
        if isinstance(self._value, OffloadedTensor):
            self._value.fetch()

    def note_version(self) -> None:
        """Note its version: it has to be the same when the call is run again."""
        self._version = version_of(self._value) if isinstance(self._value, Tensor) else -1

    def was_written(self) -> tuple[int, ...] | None:
        """Return its shape if it was written in place since, or else ``None``."""
        if isinstance(self._value, Tensor) and version_of(self._value) != self._version:
            return tuple(self._value.shape)
        return None

    def entered(self, *, copies: bool) -> Tensor:
        """Return it as the call had it. It is no leaf where it was none, as the call may write to
        it in place."""
        assert self._value is not None
        value = self._value.tensor() if isinstance(self._value, OffloadedTensor) else self._value
        if value.is_leaf and value.requires_grad:
            return value
        value = value.clone() if copies else value
        return enter_graph(GradientSlot(), value) if self._enters else value.detach()
