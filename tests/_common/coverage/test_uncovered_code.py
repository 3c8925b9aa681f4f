"""What a step's forwards reach that no recording has run there."""

import gc
import weakref
from typing import Any

from blockpipe._common.coverage.covered_code import Coverage
from blockpipe._common.coverage.uncovered_code import Reached, UncoveredCode


class Owner:
    def turns(self, x: int) -> int:
        if x > 1:
            x = self.other(x)
        return x

    def other(self, x: int) -> int:
        return x


class Ends:
    def __del__(self) -> None:
        _work()


def _work(*_: object) -> None:
    pass


def _reached(coverage: Coverage, hop: int, function: Any, *args: Any) -> list[Reached]:
    uncovered = UncoveredCode(coverage)
    with uncovered.noting(3, lambda: hop):
        function(*args)
    assert [*uncovered.found] == [3]
    return [*uncovered.found[3]]


def _covered(owner: Owner, hop: int, *args: Any) -> Coverage:
    coverage = Coverage([owner])
    for one in _reached(coverage, hop, owner.turns, *args):
        one.add_to(coverage)
    return coverage


def test_a_function_that_has_not_begun_is_reached_once():
    owner = Owner()
    found = _reached(Coverage([owner]), 1, lambda: [owner.turns(1) for _ in range(3)])
    names = [(one.code.co_name, one.hop, one.offset, one.given) for one in found]
    assert names.count(("turns", 1, None, (id(owner),))) == 1


def test_what_has_run_counts_for_its_hop_and_module():
    owner = Owner()
    coverage = _covered(owner, 0, 1)
    assert _reached(coverage, 0, owner.turns, 1) == []
    [on_another] = _reached(coverage, 1, owner.turns, 1)
    assert not on_another.is_in(coverage)
    assert (on_another.hop, on_another.offset) == (1, None)
    other = Coverage([owner, sibling := Owner()])
    other.add(coverage)
    [of_another] = _reached(other, 0, sibling.turns, 1)
    assert of_another.given == (id(sibling),)


def test_what_comes_behind_a_condition_is_reached():
    owner, coverage = Owner(), Coverage([])
    covered = coverage.of(Owner.turns.__code__)
    covered.begun.add((0, ()))
    names = [one.code.co_name for one in _reached(coverage, 0, owner.turns, 2)]
    assert names[:1] == ["turns"]
    assert names[-1] == "other"


def test_a_place_is_known_once_it_is_added():
    owner = Owner()
    coverage = Coverage([owner])
    found = _reached(coverage, 0, owner.turns, 2)
    assert not any(one.is_in(coverage) for one in found)
    for one in found:
        one.add_to(coverage)
    assert all(one.is_in(coverage) for one in found)
    assert found[0].where == f"{__file__}:{Owner.turns.__code__.co_firstlineno}"


def test_the_end_of_an_object_does_not_count():
    """When it comes may be chance."""

    def ends() -> None:
        one = Ends()
        two = Owner()
        reference = weakref.ref(two, _work)
        weakref.finalize(two, _work)
        del one, two
        assert reference() is None

    gc.disable()
    try:
        found = {one.code.co_name for one in _reached(Coverage([]), 0, ends)}
    finally:
        gc.enable()
    assert found <= {"ends", "_work"}
    assert "__del__" not in found
