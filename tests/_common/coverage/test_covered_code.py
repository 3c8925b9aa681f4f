"""The instructions that forwards have run."""

import dis
import sys
import types
from typing import Any

from blockpipe._common.coverage.covered_code import (
    Coverage,
    CoveredCode,
    effects_of,
    line_of,
)


class Owner:
    n = 0

    def turns(self, x: int) -> int:
        if x > 1:
            self.n += 1
        return x


TURNS = Owner.turns.__code__
FIRST = TURNS.co_firstlineno


def _lines(offsets: Any) -> set[int]:
    begun = dict(dis.findlinestarts(TURNS))
    return {
        line for first, line in begun.items() if any(effects_of(TURNS)[o] == first for o in offsets)
    }


def _frame(function: Any, *args: Any) -> types.FrameType:
    frames = []
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return frames[0]


def test_what_only_moves_a_functions_own_values_is_left_out():
    names = {i.opname for i in dis.get_instructions(TURNS) if i.offset in effects_of(TURNS)}
    assert {"STORE_ATTR", "LOAD_ATTR"} <= names
    assert not {"LOAD_FAST", "LOAD_CONST", "RETURN_VALUE"} & names
    assert FIRST + 2 in _lines(effects_of(TURNS))


def test_what_has_run_on_one_hop_is_open_on_another():
    covered = CoveredCode(TURNS)
    covered.begun |= {(0, ()), (1, ())}
    for offset in covered.effects:
        covered.runs(offset, 0)
    assert covered.open() == set(covered.effects)
    for offset in covered.effects:
        covered.runs(offset, 1)
    assert not covered.open()
    assert covered.open_lines() == {}


def test_lines_tell_what_is_open_if_none_of_them_has_run_in_part():
    covered = CoveredCode(TURNS)
    covered.begun.add((0, ()))
    inside = [o for o in covered.effects if _lines([o]) == {FIRST + 2}]
    for offset in covered.effects.keys() - {*inside}:
        covered.runs(offset, 0)
    assert covered.open() == {*inside}
    assert covered.open_lines() == {covered.effects[inside[0]]: inside[0]}
    covered.runs(inside[0], 0)
    assert covered.open_lines() is None


def test_what_is_compiled_anew_is_known():
    first, second = (compile("n = f()", "<string>", "exec") for _ in range(2))
    coverage = Coverage([])
    coverage.of(first).begun.add((0, ()))
    found = coverage.found(second)
    assert first is not second
    assert found is not None
    assert found.begun == {(0, ())}


def test_which_objects_a_function_is_given_counts_if_they_were_there_before():
    owner, other = Owner(), Owner()
    coverage = Coverage([owner])
    assert coverage.given_to(_frame(owner.turns, 1)) == (id(owner),)
    assert coverage.given_to(_frame(other.turns, 1)) == ()
    assert coverage.given_to(_frame(lambda x, y: None, 1, owner)) == (id(owner),)
    assert coverage.given_to(_frame(lambda: None)) == ()
    coverage.leave_out([owner])
    assert coverage.given_to(_frame(owner.turns, 1)) == ()


def test_coverages_add_up():
    one, other = Coverage([]), Coverage([])
    other.of(TURNS).begun.add((2, ()))
    other.of(TURNS).ran.add((2, 4))
    other.read.add(effects_of.__wrapped__.__code__)
    before = one.version
    one.add(other)
    assert one.version > before
    assert [(c.code, c.begun, c.ran) for c in one] == [(TURNS, {(2, ())}, {(2, 4)})]
    assert one.read == {effects_of.__wrapped__.__code__}


def test_a_line_is_told_by_its_file():
    last = max(effects_of(TURNS))
    assert line_of(TURNS, None) == f"{__file__}:{FIRST}"
    assert line_of(TURNS, last) == f"{__file__}:{FIRST + 2}"


def test_a_line_may_go_on_or_not():
    """Its first instruction does not tell whether the others run."""

    def asserts(x: int) -> int:
        assert x > 1, len(str(x))
        return x

    code = asserts.__code__
    covered = CoveredCode(code)
    covered.begun.add((0, ()))
    assert covered.open()
    assert covered.open_lines() is None
