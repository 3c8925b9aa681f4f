"""The exceptions Blockpipe raises, and how their messages are put together.

Every class is a :class:`BlockpipeError` and the builtin that it is a kind of, so that both
``except BlockpipeError`` and ``except ValueError`` do what their reader expects::

    BlockpipeError
    ├── MarkError (ValueError)         a mark on the wrong thing, or marked twice
    ├── PlanError (ValueError)         stages with gaps, unknown paths, too few devices
    ├── ScheduleError (ValueError)     a schedule that cannot run
    ├── MicrobatchError (ValueError)   a batch that cannot be split or put together
    ├── DeviceError (ValueError)       a device that is not there
    ├── WeightsError (ValueError)      a checkpoint that does not fit, or tensors without values
    ├── RecordingError (RuntimeError)  a forward that cannot be recorded, or is not pipelinable
    ├── RouteError (RuntimeError)      a micro-batch left the recorded route
    ├── CrossingError (RuntimeError)   a tensor crossed in a way that autograd cannot follow
    ├── StateError (RuntimeError)      a tensor of another micro-batch was read
    ├── IsolationError (RuntimeError)  an operation touched another stage's storage
    ├── VerificationError (AssertionError)  a pipelined run that is not what the plain one is
    └── UsageError (TypeError)         a call that a pipeline does not support

A message has four parts: what was expected, what came, where, and what to do.
"""

__all__ = [
    "BlockpipeError",
    "CrossingError",
    "DeviceError",
    "IsolationError",
    "MarkError",
    "MicrobatchError",
    "PlanError",
    "RecordingError",
    "RouteError",
    "ScheduleError",
    "StateError",
    "UsageError",
    "VerificationError",
    "WeightsError",
]


class BlockpipeError(Exception):
    """The base of every exception that Blockpipe itself raises."""


class MarkError(BlockpipeError, ValueError):
    """A mark was put on the wrong thing, with a wrong stage, or twice."""


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
    """A forward that cannot be recorded, or that does what no pipeline can do."""


class RouteError(BlockpipeError, RuntimeError):
    """A micro-batch went to a stage where the recorded route does not go."""


class CrossingError(BlockpipeError, RuntimeError):
    """A tensor crossed between stages in a way that autograd cannot follow."""


class StateError(BlockpipeError, RuntimeError):
    """A tensor that belongs to another micro-batch, or to another stage's state, was used."""


class IsolationError(BlockpipeError, RuntimeError):
    """Under ``isolate=True``: an operation touched a storage that another stage owns."""


class UsageError(BlockpipeError, TypeError):
    """A call that is not supported, with what to do instead."""


class VerificationError(BlockpipeError, AssertionError):
    """A pipelined run is not what the plain one is: :meth:`Pipeline.verify` says where."""
