"""When the sizes of a step's micro-batches are those that lanes may rely on."""

from __future__ import annotations

import torch

from blockpipe.batches.microbatch import Microbatch
from blockpipe.preparation.step_sizes import MOST_SIZES, StepSizes, sizes_of
from blockpipe.recording.recording import Recording


def _sizes(*sizes: int) -> list[Microbatch]:
    return [Microbatch((torch.zeros(size, 4),), {}, None, size) for size in sizes]


def _recording(*, settles: bool = False, turns: str = "") -> Recording:
    sizes = sizes_of(_sizes(3)[0])
    return Recording("Net", True, settles=settles, turns_by_size=turns, sizes=sizes)


def _after(known: StepSizes, recording: Recording, *sizes: int) -> bool:
    """Return whether a step runs one by one, and let it end."""
    unsettled = known.unsettled(recording, _sizes(*sizes))
    known.latest = known.latest if unsettled is None else unsettled
    return unsettled is not None


def test_sizes_do_not_matter_to_other_recordings() -> None:
    """A model whose code sets no plain values is never asked."""
    assert not _after(StepSizes(), _recording(), 3, 2)


def test_the_recorded_size_may_come_first() -> None:
    """The recording has run it; where something settles, the first step makes that."""
    assert not _after(StepSizes(), _recording(turns="a.py:1"), 3, 3)
    assert _after(StepSizes(), _recording(settles=True), 3, 3)


def test_what_turns_is_settled_at_the_recorded_size_alone() -> None:
    """What settles is so at any size that the step before had."""
    for turns in ("", "a.py:1"):
        known, recording = StepSizes(), _recording(settles=True, turns=turns)
        order = [_after(known, recording, *sizes) for sizes in ((3, 3), (3, 3), (2, 2), (2, 2))]
        assert order == [True, False, True, bool(turns)]
        assert _after(known, recording, 3, 3), "sizes are not those of the step before"
        assert _after(known, recording, 3, 2)
        assert _after(known, recording, 3, 2), "several sizes never settle"


def test_a_size_is_new_after_a_step_of_its_own() -> None:
    """So many sizes have a recording, and those behind them run one by one."""
    known, recording = StepSizes(), _recording(turns="a.py:1")
    (two,) = map(sizes_of, _sizes(2))
    assert not known.is_new(two, recording, [])
    assert _after(known, recording, 2, 2)
    assert known.is_new(two, recording, [("found", "answers", None)] * 9)
    assert not known.is_new(two, recording, [("found", "answers", two)] * MOST_SIZES)
    assert not known.is_new(two, _recording(settles=True), [])
    assert not known.is_new(recording.sizes, recording, [])


def test_plain_arguments_are_sizes() -> None:
    """Lists of one length may have other members, and members may be nested otherwise."""

    class Info:
        pass

    info, x = Info(), torch.zeros(3)
    all_of_them = [
        *([1, 2], [2, 1], [1, [2]], [[1], 2], [[1, 2]], [1, 2, []], [1.0, 2], [True, 2], ["1", 2]),
        *({"a": 1}, {"b": 1}, {"a": x}, {"b": x}, [x], x, info, Info()),
    ]
    found = [sizes_of(Microbatch((one,), {}, None, 1)) for one in all_of_them]
    assert len(set(found)) == len(found)
    assert sizes_of(Microbatch((info,), {}, None, 1)) in found
    assert sizes_of(Microbatch(([1, 2],), {}, None, 1)) in found
