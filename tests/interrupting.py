"""Interrupts at every bytecode at which Python may raise one."""

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import blockpipe as bp

PACKAGE = str(Path(bp.__file__).parent)


def traced(trace: Callable[..., Any], function: Callable[[], Any]) -> None:
    sys._getframe().f_trace_opcodes = True  # else 3.12.0 to 3.12.4 trace none at all
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@functools.cache
def looks_for_signals(code: CodeType) -> frozenset[int]:
    """Where Python looks whether it was interrupted: behind calls and resumptions, and where a loop
    begins again. It does not between the end of a ``with lock:`` and the lock's release.
    """
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME")):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction.opname
    return frozenset(found)


def _raise() -> None:
    raise KeyboardInterrupt("now")


def interrupting(
    bytecode: int, seen: list[int], interrupt: Callable[[], None] = _raise, *also: str
) -> Callable[..., Any]:
    """A trace function that interrupts where the package, contextlib or another file is at its n-th
    bytecode of those at which it may be interrupted."""
    files = PACKAGE, contextlib.__file__, *also

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in looks_for_signals(frame.f_code):
            seen[0] += 1
            if seen[0] == bytecode:
                interrupt()
        return trace

    return trace
