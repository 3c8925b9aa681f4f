"""Whose storage: the stage sanitizer's book, kept on the storages themselves, so that an entry
lives exactly as long as what it speaks of."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_OWNER = "_blockpipe_owner"


@dataclass(frozen=True, slots=True)
class Owner:
    """A stage of one pipeline."""

    pipeline: int
    stage: int


def owner_of(tensor: Tensor) -> Owner | None:
    """Who owns a tensor's storage, if anybody does."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _OWNER, None)


def set_owner(tensor: Tensor, owner: Owner) -> None:
    """Give a tensor's storage to a stage."""
    if tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), _OWNER, owner)


class _Carrying(threading.local):
    active = False


_carrying = _Carrying()


@contextmanager
def copying() -> Iterator[None]:
    """While entered, this thread may touch any stage's tensors: it copies."""
    before, _carrying.active = _carrying.active, True
    try:
        yield
    finally:
        _carrying.active = before


def is_carrying() -> bool:
    """Whether this thread is copying between stages, which alone may touch two stages' tensors."""
    return _carrying.active
