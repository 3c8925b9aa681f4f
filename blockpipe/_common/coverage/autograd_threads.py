"""Autograd's threads, which run an accelerator's part of a backward, tell what they run to the
thread that asks for it."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._torch.modes import stash, stashed

_KEY = "blockpipe_told_for"


class _Asks:
    """What a thread that asks for backwards has told: a listener, or a tracer."""

    told: Any = None


class _Asking(threading.local):
    asks: _Asks | None = None


_here = _Asking()


@contextmanager
def also_in_autograds(told: Any) -> Iterator[None]:
    """Have autograd's threads find something, while entered, as long as they run for this thread.

    Args:
        told: what :func:`of_caller` is to return there.
    """
    if (asks := _here.asks) is None:
        asks = _here.asks = _Asks()
        stash(_KEY, asks)
    before, asks.told = asks.told, told
    try:
        yield
    finally:
        asks.told = before


def of_caller() -> Any:
    """Return, in one of autograd's threads, what that for which it runs has told; else ``None``."""
    asks = stashed(_KEY)
    return None if asks is None or asks is _here.asks else asks.told


@functools.cache
def trace_autograds(device: torch.device) -> None:
    """Have the tracer of the thread that asks trace the one of autograd's for a device. From there
    on it is there, and does nothing where nobody has."""

    def begin(_: torch.Tensor) -> None:
        if sys.gettrace() is None:
            sys.settrace(_trace_for_caller)

    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device=device, requires_grad=True)
        output = leaf.view_as(leaf)
        output.register_hook(begin)
        torch.autograd.grad(output, leaf)


def _trace_for_caller(frame: types.FrameType, event: str, argument: object) -> Any:
    tracer = of_caller()
    return None if tracer is None else tracer(frame, event, argument)
