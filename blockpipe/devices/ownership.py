"""The owners of storages, for the stage sanitizer.

Each is kept on the storage itself, so that the entry lives exactly as long as the storage.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch.tensors import storage_of

_OWNER = "_blockpipe_owner"


@dataclass(frozen=True, slots=True)
class Owner:
    """A stage of one pipeline, as the owner of storages."""

    pipeline: int
    stage: int


def owner_of(tensor: Tensor) -> Owner | None:
    """Return the owner of a tensor's storage; ``None``: it has none."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _OWNER, None)


def set_owner(tensor: Tensor, owner: Owner) -> None:
    """Set the owner of a tensor's storage."""
    if tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), _OWNER, owner)


NOBODY = Owner(-1, -1)
"""Of storages that the operations of every stage may read."""


def own_all(held: Iterable[tuple[Tensor, Owner]]) -> None:
    """Set the owners of parameters and buffers. A storage in which several stages have some is
    nobody's: on two devices, each has a copy of its own."""
    owners = dict[int, Owner]()
    for tensor, owner in held:
        if tensor.layout is torch.strided:
            storage = storage_of(tensor)
            owners[storage] = owner if owners.get(storage, owner) == owner else NOBODY
            set_owner(tensor, owners[storage])


def disown_offsets(tensor: Tensor) -> None:
    """Let operations of every stage read where the members of a jagged tensor begin: between two
    devices a copy brings that along, and on one device copies share it."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        if name != "_values":
            set_owner(getattr(tensor, name), NOBODY)


class _Copying(threading.local):
    active = False


_copying = _Copying()


class copying:  # noqa: N801 - a context manager that reads as a participle
    """Enter to copy between stages: this thread may touch the tensors of any stage meanwhile."""

    def __enter__(self) -> None:
        self._before, _copying.active = _copying.active, True

    def __exit__(self, *failure: object) -> None:
        _copying.active = self._before


def is_copying() -> bool:
    """Return whether this thread is copying between stages, the only work on tensors of two."""
    return _copying.active
