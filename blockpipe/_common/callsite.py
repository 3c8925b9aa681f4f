"""The user's file and line: the innermost frame that belongs neither to torch nor to Blockpipe, nor
to a library's training loop.

``traceback.extract_stack`` would read source files for every frame; errors and recordings need
only a name and a number, so the frames are walked by hand. torch is located and not imported: the
folders that do without it raise errors too.
"""

import functools
import sys
import sysconfig
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _package_directory(name: str) -> str:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent) + "/"


_OURS = str(Path(__file__).parents[1]) + "/"  # the package's
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_PACKAGES = sysconfig.get_paths()["purelib"] + "/"
# They hold no models: what they call was asked for by the line that called them.
_LOOPS = (
    *("accelerate/", "lightning/", "lightning_fabric/", "pytorch_lightning/"),
    *("transformers/trainer", "trl/trainer/"),
    *(
        "peft/mapping",
        "peft/mixed_model",
        "peft/peft_model",
        "peft/tuners/mixed/",
        "peft/tuners/tuners_utils",
    ),
)
_OTHERS = tuple(_PACKAGES + name for name in _LOOPS)
_SKIPPED = (_OURS, _package_directory("torch"), "<frozen", "<string>", *_OTHERS)

# The line at which the user called the pipeline. Threads of ours need it: their own frames do not
# lead back there.
_call_line: ContextVar[str] = ContextVar("blockpipe_call_line", default="<unknown>")


def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_SKIPPED):
        return False
    return not name.startswith(_STDLIB) or name.startswith(_PACKAGES)


def remembers_caller(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public method: errors below it that find no frame of the user's name its call."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _call_line.set(users_line())
        try:
            return method(*args, **kwargs)
        finally:
            _call_line.reset(token)

    return call


def say_caller(what: str) -> None:
    """Set the text that errors show where no frame of the user's is on the stack."""
    _call_line.set(what)


def users_line() -> str:
    """Return ``file.py:41`` of the user's innermost frame, or of the call that led here."""
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
    """Return ``file.py:41`` of the place where another thread is, by its identifier."""
    return _line_from(sys._current_frames().get(thread))


def _line_from(frame: FrameType | None) -> str:
    while frame is not None:
        if _is_users(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return _call_line.get()


def warn(text: str) -> None:
    """Warn at the user's innermost line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not _is_users(frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def failing_line(traceback: TracebackType | None) -> str:
    """Return ``file.py:41`` of the user's innermost frame in a traceback."""
    line = _call_line.get()
    while traceback is not None:
        if _is_users(traceback.tb_frame.f_code):
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
