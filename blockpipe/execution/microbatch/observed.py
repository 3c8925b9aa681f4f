"""Reports where an observed forward is: at its borders, or at its marks in the plain loop."""

from collections.abc import Callable

from ...crossing.microbatch_run import MicrobatchRun
from ...devices.observer import Observer
from ...stages.cursor import Cursor


def observed_border(
    run: MicrobatchRun, cross: Callable[[int, int], None], observer: Observer
) -> Callable[[int, int], None]:
    """Return a run's border that reports its crossings to an observer."""
    m = run.microbatch

    def cross_observed(before: int, after: int) -> None:
        if before >= 0:
            observer.ends("F", before, m)
        observer.begins("wait", after, run.stage, m)
        cross(before, after)
        observer.ends("wait", after, m)
        observer.begins("F", after, run.stage, m)

    return cross_observed


class PlainLoopObserver:
    """One micro-batch in the plain loop, which has no borders: a hop begins where a mark moves
    the cursor to its stage. There is one backward, which counts as the last hop's.

    Args:
        observer: gets the events.
        route: the stages of the hops.
        cursor: the forward's.
        microbatch: its index.
    """

    def __init__(
        self, observer: Observer, route: list[int], cursor: Cursor, microbatch: int
    ) -> None:
        self.observer = observer
        self._route = route
        self._m = microbatch
        self._hop = 0
        if len(route) > 1:
            cursor.on_move = self._moved
        observer.begins("F", 0, route[0], microbatch)

    def _moved(self, stage: int) -> None:
        if stage == self._route[self._hop]:
            return
        rest = range(self._hop + 1, len(self._route))
        hop = next((hop for hop in rest if self._route[hop] == stage), None)
        if hop is None:
            return  # an inner block ends, and nothing is left to do on the outer block's stage
        self.observer.ends("F", self._hop, self._m)
        self._hop = hop
        self.observer.begins("F", hop, stage, self._m)

    def turn_back(self) -> None:
        """Report that the forward is over, and the backward begins."""
        self.observer.ends("F", self._hop, self._m)
        self.observer.begins("B", self._hop, self._route[self._hop], self._m)

    def finish(self) -> None:
        """Report that the backward is over."""
        self.observer.ends("B", self._hop, self._m)
