"""Forwards that go several ways: micro-batches of one step may go one each, so that what a stage of
one changes and another stage uses, which goes another way, is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ...recording.entries import GeneratorUse, OutsideTensor, SharedChange, TensorInfo
from ...recording.recording import Recording
from ...schedules.builders import ScheduleOption
from ..shared_state import check_shared_state

_Info = TypeVar("_Info", TensorInfo, OutsideTensor)
_REMEDY = "read and write it on one hop"


def check_ways(known: Recording, found: Recording, schedule: ScheduleOption) -> None:
    """Check a forward that goes another way than recorded ones, together with each of these:
    micro-batches of one step may go all ways. From then on it is one of them.

    Args:
        known: the recording that steps run by.
        found: of the other way.
        schedule: by which they run.

    Raises:
        StateError: one way's hop changes, or draws from, what another way's hop uses.
    """
    check_shared_state(found, schedule)
    if known.way is not None and found.way is not None:
        for one in (known, *known.way.others):
            check_shared_state(_together(one, found), schedule)
        found.way.let_go()
        known.way.others.append(found)


def _together(one: Recording, other: Recording) -> Recording:
    """Return a recording with what two ways share."""
    tensors = {id(o.tensor()): o for o in one.outside if o.tensor is not None}
    outside = [
        _joined(o, tensors[id(o.tensor())])
        for o in other.outside
        if o.tensor is not None and id(o.tensor()) in tensors
    ]
    changes = [
        *one.way.shared_with(other.way, replace(other, left_for_loss=[])),
        *(
            SharedChange(o.name, "reads it", o.hops, o.where, _REMEDY)
            for o in outside
            if o.written and len(o.hops) > 1
        ),
    ]
    return replace(
        other,
        parameters=[*_joined_by_name(one.parameters, other.parameters)],
        buffers=[*_joined_by_name(one.buffers, other.buffers)],
        shared_changes=changes,
        shared_generators=[*_drawn_by_both(one.way.generators, other.way.generators)],
    )


def _joined(one: _Info, other: _Info) -> _Info:
    hops = sorted({*one.hops, *other.hops})
    return replace(one, hops=hops, written=one.written or other.written)


def _joined_by_name(one: Iterable[TensorInfo], other: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    by_name = {info.name: info for info in one}
    return (_joined(info, by_name.get(info.name, info)) for info in other)


def _drawn_by_both(
    one: Mapping[int, GeneratorUse], other: Mapping[int, GeneratorUse]
) -> Iterator[GeneratorUse]:
    for key in one.keys() & other.keys():
        hops = sorted({*one[key].hops, *other[key].hops})
        if len(hops) > 1:
            yield replace(other[key], hops=hops)
