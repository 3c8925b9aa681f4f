"""The exceptions Blockpipe raises, and how their messages are put together.

Every class is a :class:`BlockpipeError` and the builtin that it is a kind of, so that both
``except BlockpipeError`` and ``except ValueError`` do what their reader expects::

    BlockpipeError
    ├── MarkError (ValueError)         a mark on the wrong object, or a second mark
    ├── PlanError (ValueError)         stages with gaps, unknown paths, too few devices
    ├── ScheduleError (ValueError)     a schedule that cannot run
    ├── MicrobatchError (ValueError)   a batch that cannot be split or put together
    ├── DeviceError (ValueError)       a device that does not exist
    ├── WeightsError (ValueError)      a checkpoint that does not fit, or tensors without values
    ├── RecordingError (RuntimeError)  a forward that cannot be recorded, or is not pipelinable
    ├── RouteError (RuntimeError)      a micro-batch left the recorded route
    ├── CrossingError (RuntimeError)   a tensor crossed in a way that autograd cannot follow
    ├── StateError (RuntimeError)      a tensor of another micro-batch was read
    ├── IsolationError (RuntimeError)  an operation touched another stage's storage
    ├── RankError (RuntimeError)       another process of a distributed pipeline failed, or differs
    ├── VerificationError (AssertionError)  a pipelined run that differs from the plain one
    └── UsageError (TypeError)         a call that a pipeline does not support

A message has four parts: what was expected, what was given, where, and how to fix it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BlockpipeError",
    "CrossingError",
    "DeviceError",
    "IsolationError",
    "MarkError",
    "MicrobatchError",
    "PlanError",
    "RankError",
    "RecordingError",
    "RouteError",
    "ScheduleError",
    "StateError",
    "UsageError",
    "VerificationError",
    "WeightsError",
]


class _InThread(threading.local):
    ended: "list[BlockpipeError] | None" = None  # by those that were made in a forward


_in_thread = _InThread()


class BlockpipeError(Exception):
    """The base of every exception that Blockpipe itself raises."""


class _OfForwardError(BlockpipeError):
    """The base of those that an operation in a forward may raise."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if _in_thread.ended is not None:
            _in_thread.ended.append(self)


@contextmanager
def not_caught() -> Iterator[None]:
    """Raise at the end of a block the first error that ended an operation in it, if the user's code
    has caught it (``except RuntimeError``): what came after that is not the plain run's."""
    before, _in_thread.ended = _in_thread.ended, []
    try:
        yield
        if _in_thread.ended:
            raise _in_thread.ended[0]
    finally:
        _in_thread.ended = before


class MarkError(BlockpipeError, ValueError):
    """A mark on the wrong object, with a wrong stage, or on a marked one."""


class PlanError(BlockpipeError, ValueError):
    """A plan that cannot be carried out: gaps, unknown paths, too few devices."""


class ScheduleError(BlockpipeError, ValueError):
    """A schedule that names an unknown kind or cannot be run in its order."""


class MicrobatchError(BlockpipeError, ValueError):
    """A batch that cannot be split into micro-batches, or results that do not join."""


class DeviceError(BlockpipeError, ValueError):
    """A device that does not exist on this machine."""


class WeightsError(BlockpipeError, ValueError):
    """A checkpoint that cannot be read or does not fit the model; tensors left without values."""


class RecordingError(BlockpipeError, RuntimeError):
    """A forward that cannot be recorded, or that cannot be pipelined."""


class RouteError(_OfForwardError, RuntimeError):
    """A micro-batch that left the recorded route.

    Args:
        args: the message.
    """


class CrossingError(_OfForwardError, RuntimeError):
    """A tensor that crossed between stages in a way that autograd cannot follow.

    Args:
        args: the message.
    """


class StateError(_OfForwardError, RuntimeError):
    """The use of a tensor of another micro-batch, or of another stage's state.

    Args:
        args: the message.
    """


class IsolationError(_OfForwardError, RuntimeError):
    """An operation that touched the storage of another stage, under ``isolate=True``.

    Args:
        args: the message.
    """


class RankError(BlockpipeError, RuntimeError):
    """A process of a distributed pipeline that failed, or that does something else than others."""


class UsageError(BlockpipeError, TypeError):
    """A call that is not supported; the message has the alternative."""


class VerificationError(BlockpipeError, AssertionError):
    """A pipelined run that differs from the plain one: :meth:`Pipeline.verify` locates it."""
