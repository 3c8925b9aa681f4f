"""The user's file and line: the innermost frame that is neither torch's nor ours.

``traceback.extract_stack`` would read source files for every frame; errors and recordings need
only a name and a number, so the frames are walked by hand.
"""

import functools
import sys
import sysconfig
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_OURS = str(Path(__file__).parents[1]) + "/"  # the package's
_TORCH = str(Path(torch.__file__).parent) + "/"
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_PACKAGES = sysconfig.get_paths()["purelib"] + "/"
_SKIPPED = (_OURS, _TORCH, "<frozen", "<string>")

# Where the user called the pipeline: for a thread of ours, whose own frames do not go back there.
_call_line: ContextVar[str] = ContextVar("blockpipe_call_line", default="<unknown>")


def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_SKIPPED):
        return False
    return not name.startswith(_STDLIB) or name.startswith(_PACKAGES)


def remembers_caller(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users call: what has no line of theirs is then said to be at that call's."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _call_line.set(users_line())
        try:
            return method(*args, **kwargs)
        finally:
            _call_line.reset(token)

    return call


def say_caller(what: str) -> None:
    """Where no line of the user's led here: this did."""
    _call_line.set(what)


def users_line() -> str:
    """``file.py:41`` of the innermost frame of the user's, or of the call that led here."""
    return _line_from(sys._getframe(1))


def users_place() -> tuple[CodeType, int] | None:
    """The instruction of the user's, or of another package's, that led here, as a value."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def line_of_thread(thread: int) -> str:
    """``file.py:41`` of where another thread is, by its identifier."""
    return _line_from(sys._current_frames().get(thread))


def _line_from(frame: FrameType | None) -> str:
    while frame is not None:
        if _is_users(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return _call_line.get()


def warn(text: str) -> None:
    """Warn at the innermost line of the user's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not _is_users(frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def failing_line(traceback: TracebackType | None) -> str:
    """``file.py:41`` of the innermost frame of the user's in a traceback."""
    line = _call_line.get()
    while traceback is not None:
        if _is_users(traceback.tb_frame.f_code):
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
