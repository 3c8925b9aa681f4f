"""The log switch: Blockpipe's decisions, logged by the standard ``logging``.

Each file has a logger of its own below ``"blockpipe"``, so that a program which sets up its own
logging needs nothing from here. For everybody else one line, or one environment variable, puts
messages on stderr. Messages are about decisions (a recording and why, placement, schedule, threads
or none), which are made once; a step that only repeats them logs nothing.
"""

import logging
import os
import sys
from typing import Any

from ..errors import UsageError
from .callsite import warn
from .checks import expected, is_integer

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_VARIABLE = "BLOCKPIPE_LOG"
_logger = logging.getLogger("blockpipe")


class _OnStderr(logging.StreamHandler[Any]):
    """Writes to what stderr is now; silent where the program has handlers of its own, which get
    the message as well: it would be there twice."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s", "%H:%M:%S")
        )

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)
            super().emit(record)


_handler = _OnStderr()


def set_log_level(level: str | int | None) -> None:
    """Set how many of Blockpipe's decisions are logged on stderr.

    The environment variable ``BLOCKPIPE_LOG`` does the same from outside. A program that has
    handlers on the root logger gets the messages there instead.

    Args:
        level: ``"debug"`` (each decision with its details), ``"info"`` (recordings, placement,
            schedules), ``"warning"``, ``"error"``, ``"off"`` (nothing, not even the progress of
            long tasks), or a level number of :mod:`logging`; ``None``: the initial state.

    Raises:
        UsageError: there is no such level.

    Example:
        >>> import blockpipe as bp
        >>> bp.set_log_level("info")
        >>> bp.set_log_level(None)
    """
    if level is None:
        _logger.removeHandler(_handler)
        _logger.setLevel(logging.NOTSET)
        return
    number = LEVELS.get(level.lower()) if isinstance(level, str) else level
    if not is_integer(number, 0):
        contract = f"one of {', '.join(map(repr, LEVELS))}, a level number of logging, or None"
        raise UsageError(expected(contract, level, for_="level"))
    _logger.setLevel(number)
    if _handler not in _logger.handlers:
        _logger.addHandler(_handler)


def is_silent() -> bool:
    """Return whether logging is off altogether."""
    return not _logger.isEnabledFor(logging.CRITICAL)


def _begin() -> None:
    """Set up logging at import: a library is silent unless the environment asks."""
    _logger.addHandler(logging.NullHandler())
    wanted = os.environ.get(_VARIABLE)
    if not wanted:
        return
    if wanted.lower() in LEVELS:
        set_log_level(wanted)
    else:
        warn(f"{_VARIABLE}={wanted!r} is ignored: expected one of {', '.join(LEVELS)}")


_begin()
