"""The cursor of a recorded forward, which reports marks and moves, and the marks that it has not
met."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from ..._common.text import short
from ..._common.threads.thread_state import ours
from ...stages.cursor import Cursor, Mark
from ...stages.marks import mark_of
from ..entries import Hop
from ..recording import Recording


class WatchedCursor(Cursor):
    """A cursor that reports each mark, and each move, before it happens.

    Attributes:
        on_mark: called with each mark that begins.
        on_tell_apart: called when the forward keeps separate state for each micro-batch.
        on_leave: called with the stage that the cursor is about to move to.
        marks: how often each stage was moved to since the last hop began.
        is_marked: whether a mark, and not a plan, has placed the forward.
    """

    on_mark: Callable[[Mark], None] | None = None
    on_tell_apart: Callable[[], None] | None = None
    on_leave: Callable[[int], None] | None = None
    is_marked = False

    def __init__(self, *, follow_marks: bool = True) -> None:
        super().__init__(follow_marks=follow_marks)
        self.marks = Counter[int]()

    def begin(self, mark: Mark) -> None:
        assert self.on_mark is not None
        self.on_mark(mark)
        super().begin(mark)

    def tell_apart(self, key: object) -> None:
        super().tell_apart(key)
        assert self.on_tell_apart is not None
        self.on_tell_apart()

    def move(self, stage: int, mark: Mark | None) -> None:
        assert self.on_leave is not None
        if stage != self.stage:
            with ours():
                self.on_leave(stage)
            self.marks[stage] += 1
        super().move(stage, mark)
        self.is_marked = self.is_marked or mark is not None

    def take_marks(self) -> dict[int, int]:
        """Return those counts, and begin anew: a hop begins."""
        marks, self.marks = self.marks, Counter()
        return dict(marks)

    def passes_over(self, following: int, route: Sequence[int]) -> bool:
        """Return whether a mark has named the next stage, and the forward goes on to a higher one
        with nothing done there (``self.b(x) if self.use_b else x``).

        Such a stage has a hop all the same: without it the numbers would have a gap.

        Args:
            following: the stage that it goes on to.
            route: the stages of the hops so far.
        """
        is_marked = self.follow_marks and self.mark is not None
        return is_marked and max(route, default=-1) + 1 == self.stage < following


def unreached(model: nn.Module, result: Recording) -> Iterator[str]:
    """Yield the marks on modules that were not called, in words."""
    called = {call.path for call in result.calls}
    for path, module in model.named_modules():
        mark = mark_of(module)
        if mark is not None and path not in called:
            stage = "the next stage" if mark.stage is None else f"stage {mark.stage}"
            yield f"{path!r} is marked as {stage} ({short(mark.where)}), but never called"


def passed_over(hops: Sequence[Hop]) -> Iterator[str]:
    """Yield the stages that marks name and on which nothing runs, in words."""
    busy = {hop.stage for hop in hops if hop.operations or hop.kernels}
    for hop in hops:
        if hop.stage not in busy and len(hops) > 1:
            yield (
                f"nothing ran on stage {hop.stage}, which the mark at {short(hop.where)} begins, "
                "when the model was recorded; if that is so in each step, take the mark away, and "
                "number those behind it anew"
            )
