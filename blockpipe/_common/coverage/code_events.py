"""Have Python tell of the instructions that a thread reaches and that no recorded forward has run.

From 3.12 on ``sys.monitoring`` tells of single instructions, and no more of one that has nothing
new to tell: it costs nothing then. Before, a tracer does, which slows all code of its thread.
"""

from __future__ import annotations

import atexit
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ..libraries import is_users
from .autograd_threads import also_in_autograds, of_caller, trace_autograds
from .covered_code import Coverage

_monitoring: Any = getattr(sys, "monitoring", None)
IS_FREE = _monitoring is not None
"""Whether it slows nothing down."""
_NAME = __name__.partition(".")[0]
_Traced = tuple[types.CodeType, Any]
_NOTHING = nullcontext()
_TOOLS = (3, 4)  # the numbers that are for none in particular


class CodeListener(Protocol):
    """What is told."""

    def begins(self, frame: types.FrameType) -> None:
        """A function of the user's begins."""

    def reaches(self, code: types.CodeType, offset: int) -> None:
        """An instruction is about to run that has not run on each hop."""


class _Tracer:
    """A tracer. It is called for each function that begins, so that it has to be quick; and is
    in no cycle, for what its listener knows of has to go with it.

    Args:
        coverage: what is known.
        local: what it has found of functions by the id of their code, which threads share.
        listener: is told.
    """

    __slots__ = ("_begins", "_coverage", "_find", "_local", "_reaches")

    def __init__(
        self, coverage: Coverage, local: dict[int, _Traced], listener: CodeListener
    ) -> None:
        self._coverage, self._local, self._find = coverage, local, local.get
        self._begins, self._reaches = listener.begins, listener.reaches

    def called(self, frame: types.FrameType, event: str, argument: object) -> Any:
        """A function begins."""
        known = self._find(id(frame.f_code))
        if known is None or known[0] is not frame.f_code:
            known = self._local[id(frame.f_code)] = frame.f_code, _how(frame, self._coverage)
        if (how := known[1]) is None:
            return None
        self._begins(frame)
        if how is True:
            return None
        by_line = isinstance(how, dict)
        frame.f_trace_opcodes, frame.f_trace_lines = not by_line, by_line
        return self._goes_on

    def _goes_on(self, frame: types.FrameType, event: str, argument: object) -> Any:
        how, offset = self._local[id(frame.f_code)][1], frame.f_lasti
        if event == "line":
            if offset in how:
                self._reaches(frame.f_code, how[offset])
        elif event == "opcode" and offset in how:
            self._reaches(frame.f_code, offset)
        return self._goes_on


def _how(frame: types.FrameType, coverage: Coverage) -> Any:
    """Return how a function is traced: ``None``: not at all; ``True``: only that it begins; by a
    table of lines; or by a set of instructions."""
    if not is_users(frame.f_globals.get("__name__")):
        return None
    if (covered := coverage.found(frame.f_code)) is None:
        return True
    lines = covered.open_lines()
    return (covered.open() if lines is None else lines) or True


class _Here(threading.local):
    listener: CodeListener | None = None


class _Monitor:
    """Listens by ``sys.monitoring``, for all threads and coverages."""

    def __init__(self) -> None:
        self._here, self._lock = _Here(), threading.Lock()
        self._coverages = weakref.WeakSet[Coverage]()
        self._open: dict[int, tuple[types.CodeType, frozenset[int]]] = {}  # by the id of a code
        self._tool: int | None = None

    @contextmanager
    def told(self, listener: CodeListener) -> Iterator[None]:
        before, self._here.listener = self._here.listener, listener
        try:
            yield
        finally:
            self._here.listener = before

    def watch(self, coverage: Coverage) -> None:
        """Have the open instructions of a coverage told, besides those of others."""
        with self._lock:
            if self._tool is None and not self._begin():
                return
            self._coverages.add(coverage)
            opened = dict[int, tuple[types.CodeType, frozenset[int]]]()
            for one in self._coverages:
                for covered in one:
                    key = id(covered.code)
                    before = opened[key][1] if key in opened else frozenset()
                    opened[key] = covered.code, before | covered.open()
            before_all, self._open = self._open, opened
            for key, (code, offsets) in {**before_all, **opened}.items():
                is_on = key in opened and bool(offsets)
                events = _monitoring.events.INSTRUCTION if is_on else 0
                _monitoring.set_local_events(self._tool, code, events)
            _monitoring.restart_events()  # what was known may not be known to this one

    def _begin(self) -> bool:
        free = (number for number in _TOOLS if _monitoring.get_tool(number) is None)
        if (tool := next(free, None)) is None:
            return False
        _monitoring.use_tool_id(tool, _NAME)
        _monitoring.register_callback(tool, _monitoring.events.PY_START, self._begins)
        _monitoring.register_callback(tool, _monitoring.events.INSTRUCTION, self._reaches)
        _monitoring.set_events(tool, _monitoring.events.PY_START)
        atexit.register(self._end, tool)
        self._tool = tool
        return True

    @staticmethod
    def _end(tool: int) -> None:
        _monitoring.set_events(tool, 0)  # what the interpreter runs at its end finds nothing of us
        _monitoring.free_tool_id(tool)

    def _begins(self, code: types.CodeType, offset: int) -> Any:
        frame = sys._getframe(1)
        if not is_users(frame.f_globals.get("__name__")):
            return _monitoring.DISABLE
        if (listener := self._here.listener or of_caller()) is not None:
            listener.begins(frame)
        return None

    def _reaches(self, code: types.CodeType, offset: int) -> Any:
        known = self._open.get(id(code))
        if known is None or offset not in known[1]:
            return _monitoring.DISABLE
        if (listener := self._here.listener or of_caller()) is not None:
            listener.reaches(code, offset)
        return None


_monitor = _Monitor()
# By coverage: its version, and what tracers have found of functions.
_followed = weakref.WeakKeyDictionary[Coverage, tuple[int, dict[int, _Traced]]]()


@contextmanager
def told(
    coverage: Coverage, listener: CodeListener, device: torch.device | None = None
) -> Iterator[None]:
    """Tell a listener of this thread's code, while entered. Where somebody traces the thread, as a
    debugger does, a tracer of ours would end that, so that nobody is told.

    Args:
        coverage: of what recorded forwards have run.
        listener: is told of what this has not.
        device: an accelerator, whose part of a backward a thread of autograd's runs meanwhile.
    """
    version, local = _followed.get(coverage, (-1, {}))
    if version != coverage.version:
        version, local = _followed[coverage] = coverage.version, {}
        if IS_FREE:
            _monitor.watch(coverage)
    if IS_FREE:
        with _monitor.told(listener), _NOTHING if device is None else also_in_autograds(listener):
            yield
    elif sys.gettrace() is not None:
        yield
    else:
        ours = _Tracer(coverage, local, listener).called
        if device is not None:
            trace_autograds(device)
        sys.settrace(ours)
        try:
            with _NOTHING if device is None else also_in_autograds(ours):
                yield
        finally:
            if sys.gettrace() is ours:
                sys.settrace(None)
