"""The user's file and line: the innermost frame that is neither torch's nor ours.

``traceback.extract_stack`` would read source files for every frame; errors and recordings need
only a name and a number, so the frames are walked by hand.
"""

import sys
from pathlib import Path
from types import CodeType, TracebackType

import torch

_OURS = str(Path(__file__).parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_SKIPPED = (_OURS, _TORCH, "<frozen", "<string>")


def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith(_SKIPPED) and not name.endswith(("contextlib.py", "functools.py"))


def users_line() -> str:
    """``file.py:41`` of the innermost frame of the user's, or ``<unknown>``."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>"


def failing_line(traceback: TracebackType | None) -> str:
    """``file.py:41`` of the innermost frame of the user's in a traceback."""
    line = "<unknown>"
    while traceback is not None:
        if _is_users(traceback.tb_frame.f_code):
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
