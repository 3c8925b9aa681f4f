"""Objects that no walk over a forward's state comes by, so that a recording does not put them
back."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def hidden(value: T) -> Callable[[], T]:
    """Return a function that gives an object; what a library's own object holds is not looked
    at."""
    future = Future[T]()
    future.set_result(value)
    return future.result
