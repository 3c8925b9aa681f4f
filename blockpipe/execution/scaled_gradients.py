"""Gradients of a scaled loss: a loop divides it by the number of batches that it accumulates, or
multiplies it so that small gradients survive float16.

Each micro-batch's backward starts from a scaled gradient, and the loss itself stays as it is. To
put the factor into the loss function was no alternative: the loss would have to be divided by it
afterwards, and where it overflows there is nothing left to divide.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Scale = Callable[[Tensor], Tensor]

_scale: ContextVar[Scale | None] = ContextVar("blockpipe_scale", default=None)


@contextmanager
def scaled_gradients(scale: Scale) -> Iterator[None]:
    """While entered, steps of this thread add up gradients of the scaled loss.

    Args:
        scale: multiplies a tensor, as ``GradScaler.scale`` does.
    """
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def current_scale() -> Scale | None:
    """What scales the gradients of a step that begins now; ``None``: nothing."""
    return _scale.get()
