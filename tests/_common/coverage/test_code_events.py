"""What Python tells of the code that a thread runs."""

import dis
import gc
import itertools
import sys
import threading
import types
import weakref
from typing import Any

import pytest

from blockpipe._common.coverage.code_events import IS_FREE, told
from blockpipe._common.coverage.covered_code import Coverage, effects_of, line_of


class Told:
    def __init__(self) -> None:
        self.begun, self.lines = list[str](), list[str]()

    def begins(self, frame: types.FrameType) -> None:
        self.begun.append(frame.f_code.co_name)

    def reaches(self, code: types.CodeType, offset: int) -> None:
        self.lines.append(line_of(code, offset))


TABLE = {"n": 0}


def _both_on_one_line(x: int) -> int:
    return TABLE["n"] if x > 1 else len(TABLE)


def _apart(x: int) -> int:
    if x > 1:
        TABLE["n"] += 1
    return x


def _caller(x: int) -> int:
    return _apart(x)


def _line(function: Any, offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def _covered(function: Any, *lines: int) -> Coverage:
    """All of a function has run, but for some of its lines."""
    coverage, code = Coverage([]), function.__code__
    left = {_line(function, line) for line in lines}
    covered = coverage.of(code)
    covered.begun.add((0, ()))
    covered.ran |= {(0, o) for o in covered.effects if line_of(code, o) not in left}
    return coverage


def _told_of(coverage: Coverage, function: Any, *args: Any) -> Told:
    listener = Told()
    with told(coverage, listener):
        function(*args)
    return listener


def test_an_instruction_that_has_not_run_is_told():
    coverage = _covered(_apart, 2)
    assert _told_of(coverage, _apart, 1).lines == []
    assert {*_told_of(coverage, _apart, 2).lines} == {_line(_apart, 2)}
    assert {*_told_of(coverage, _apart, 2).lines} == {_line(_apart, 2)}, "not once alone"


def test_so_is_one_of_two_on_a_line():
    coverage, code = Coverage([]), _both_on_one_line.__code__
    covered = coverage.of(code)
    covered.begun.add((0, ()))
    covered.ran |= {(0, offset) for offset in covered.effects if offset not in _of_entry(code)}
    assert covered.open_lines() is None
    assert _told_of(coverage, _both_on_one_line, 1).lines == []
    assert _told_of(coverage, _both_on_one_line, 2).lines != []


def _of_entry(code: types.CodeType) -> set[int]:
    """The instructions of ``TABLE["n"]``."""
    instructions = itertools.dropwhile(lambda i: i.argval != "TABLE", dis.get_instructions(code))
    first = next(instructions)
    rest = itertools.takewhile(lambda i: not i.is_jump_target, instructions)
    return {i.offset for i in (first, *rest)} & effects_of(code).keys()


def test_what_a_coverage_learns_is_told_no_more():
    coverage = _covered(_apart, 2)
    assert _told_of(coverage, _apart, 2).lines
    coverage.add(_covered(_apart))
    assert _told_of(coverage, _apart, 2).lines == []
    assert _told_of(_covered(_apart, 2), _apart, 2).lines, "but to another one it is"


def test_functions_begin():
    assert _told_of(_covered(_caller), _caller, 2).begun == ["_caller", "_apart"]


def test_other_threads_are_not_told_of():
    listener = Told()
    with told(_covered(_caller), listener):
        thread = threading.Thread(target=_caller, args=(2,))
        thread.start()
        thread.join()
    assert "_caller" not in listener.begun


def test_what_libraries_run_is_not_told():
    coverage = Coverage([])
    assert _told_of(coverage, lambda: threading.Event().is_set()).begun == ["<lambda>"]


def test_it_is_over_at_the_end():
    listener = Told()
    with told(_covered(_apart, 2), listener):
        pass
    _apart(2)
    assert (listener.begun, listener.lines) == ([], [])
    assert sys.gettrace() is None


def test_nothing_of_it_is_left_for_the_collector():
    """What a listener knows of is a micro-batch's, with its tensors."""
    gc.disable()
    try:
        gone = weakref.ref(_told_of(_covered(_apart, 2), _apart, 2))
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_ends_it():
    with pytest.raises(KeyError), told(Coverage([]), Told()):
        raise KeyError
    assert sys.gettrace() is None


@pytest.mark.skipif(IS_FREE, reason="no tracer")
def test_somebody_elses_tracer_stays():
    seen = []

    def theirs(frame: types.FrameType, event: str, argument: object) -> None:
        seen.append(frame.f_code.co_name)

    sys.settrace(theirs)
    try:
        listener = _told_of(_covered(_apart, 2), _apart, 2)
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(None)
    assert "_apart" in seen
    assert listener.lines == []
