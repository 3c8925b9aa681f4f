"""The cursor of the forward that is recorded: it reports what marks do to it."""

from collections.abc import Callable

from ..._common.thread_state import ours
from ...stages.cursor import Cursor, Mark


class WatchedCursor(Cursor):
    """A cursor that reports each mark, and each move, before it happens.

    Attributes:
        on_mark: is called with a mark that begins.
        on_tell_apart: is called where the forward keeps state of its own for each micro-batch.
        on_leave: is called with the stage that the cursor is about to move to.
        moves: the number of moves so far.
        is_marked: whether a mark has placed the forward; a plan does so without one.
    """

    on_mark: Callable[[Mark], None] | None = None
    on_tell_apart: Callable[[], None] | None = None
    on_leave: Callable[[int], None] | None = None
    moves = 0
    is_marked = False

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
            self.moves += 1
            with ours():
                self.on_leave(stage)
        super().move(stage, mark)
        self.is_marked = self.is_marked or mark is not None
