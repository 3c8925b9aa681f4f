"""Context managers that say so when they are used without ``with``."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OnlyEntered(AbstractContextManager[T], Generic[T]):
    """A context manager that is good for nothing else: an attribute of it was meant for the value
    that it yields.

    Args:
        manager: does the work.
        meant: how to write its use.
    """

    def __init__(self, manager: AbstractContextManager[T], meant: str) -> None:
        self._manager = manager
        self._meant = meant

    def __enter__(self) -> T:
        return self._manager.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._manager.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a context manager that was not entered has no attribute {name!r}; write "
            f"{self._meant}, and ask what that yields",
            name=name,
            obj=self,
        )

    def __repr__(self) -> str:
        return f"<a context manager: write {self._meant}>"


def only_entered(
    meant: str,
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, AbstractContextManager[T]]]:
    """Decorate a generator function as ``contextmanager`` does; a caller that forgets ``with`` is
    told so.

    Args:
        meant: how to write its use.
    """

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
        made = contextmanager(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
            return OnlyEntered(made(*args, **kwargs), meant)

        return call

    return decorate
