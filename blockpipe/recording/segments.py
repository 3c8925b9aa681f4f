"""A forward in pieces, and what flows between them: where it could be cut, and at what cost.

A stage can begin where a call begins, so a piece runs from the beginning of one call to that of
the next. They are collected whatever the marks say: the same pieces serve to look for better ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from .recording import Call, Flow, Held, Piece


class Pieces:
    """Collects pieces and flows while a forward is recorded.

    Args:
        pieces: is filled.
        flows: is filled.
    """

    def __init__(self, pieces: list[Piece], flows: list[Flow]) -> None:
        self.pieces = pieces
        self.flows = flows
        self._held: set[str] = set()

    @property
    def current(self) -> Piece:
        """The piece under way."""
        if not self.pieces:
            self.pieces.append(Piece(0))
        return self.pieces[-1]

    def begin(self, index: int, closed_by: Iterable[str]) -> None:
        """A call begins.

        Args:
            index: of the call.
            closed_by: why no stage can begin here; the first counts.
        """
        piece = self.current
        # Inside of a custom function kernels are all that there is to see.
        if piece.operations or piece.kernels or (self.pieces[1:] and not piece.calls):
            piece = Piece(len(self.pieces))
            self.pieces.append(piece)
            self._held.clear()
        if not piece.calls:  # those that follow begin at the same place, mostly inside of it
            piece.why_not = next(iter(closed_by), None)
        piece.calls.append(index)

    def operation(self) -> None:
        """An operation of the forward runs."""
        self.current.operations += 1

    def reads(self, held: Held) -> None:
        """A parameter or buffer is read."""
        if held.name not in self._held:
            self._held.add(held.name)
            self.current.held.append(held.name)

    def flow(self, flow: Flow | None, made: int, size: int, *, needs_grad: bool) -> Flow | None:
        """A tensor made in some piece is read in this one.

        Returns:
            Its flow, to be given again at the next read; ``None`` while it has not left its piece.
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
    """The calls that made a call's arguments, each once, in order.

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
