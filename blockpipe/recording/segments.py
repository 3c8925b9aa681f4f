"""A forward in segments, and what flows between them: where it could be cut, and at what cost.

A stage can begin where a call begins, so a segment runs from the beginning of one call to that of
the next. Segments do not depend on the marks: the same ones serve to look for better marks.
"""

from __future__ import annotations

from collections.abc import Iterable

from .calls import Call, Flow, Segment
from .entries import TensorInfo


class Segments:
    """The segments and flows of a forward, collected while it is recorded.

    Args:
        segments: is filled.
        flows: is filled.
    """

    def __init__(self, segments: list[Segment], flows: list[Flow]) -> None:
        self.segments = segments
        self.flows = flows
        self._held: set[str] = set()

    @property
    def current(self) -> Segment:
        """The segment under way."""
        if not self.segments:
            self.segments.append(Segment(0))
        return self.segments[-1]

    def begin(self, index: int, closed_by: Iterable[str]) -> None:
        """Note that a call begins.

        Args:
            index: of the call.
            closed_by: why no stage can begin here; the first counts.
        """
        segment = self.current
        # Inside of a custom function kernels are all that there is to see.
        if segment.operations or segment.kernels or (self.segments[1:] and not segment.calls):
            segment = Segment(len(self.segments))
            self.segments.append(segment)
            self._held.clear()
        if not segment.calls:  # those that follow begin at the same place, mostly inside of it
            segment.why_not = next(iter(closed_by), None)
        segment.calls.append(index)

    def operation(self) -> None:
        """Note that an operation of the forward runs."""
        self.current.operations += 1

    def reads(self, held: TensorInfo) -> None:
        """Note that a parameter or buffer is read."""
        if held.name not in self._held:
            self._held.add(held.name)
            self.current.held.append(held.name)

    def flow(self, flow: Flow | None, made: int, size: int, *, needs_grad: bool) -> Flow | None:
        """Note that a tensor made in some segment is read in this one.

        Returns:
            Its flow, to be passed at the next read; ``None`` while it has not left its segment.
        """
        here = self.current.index
        if here == made:
            return flow
        if flow is None:
            flow = Flow(made, [], size, needs_grad)
            self.flows.append(flow)
        if not flow.read or flow.read[-1] != here:
            flow.read.append(here)
        return flow


def inbound(sources: Iterable[Iterable[Call]], call: Call) -> list[Call]:
    """Return the calls that made a call's arguments, each once, in order.

    Args:
        sources: of each argument.
        call: the one that was given them.
    """
    found: dict[int, Call] = {}
    for of_one in sources:
        for source in of_one:
            if not source.under_way and source is not call:
                found.setdefault(id(source), source)
    return list(found.values())
