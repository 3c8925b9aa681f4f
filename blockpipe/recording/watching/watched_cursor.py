"""The cursor of a recorded forward, which reports marks and moves."""

from collections.abc import Callable

from ..._common.threads.thread_state import ours
from ...stages.cursor import Cursor, Mark


class WatchedCursor(Cursor):
    """A cursor that reports each mark, and each move, before it happens.

    Attributes:
        on_mark: called with each mark that begins.
        on_tell_apart: called when the forward keeps separate state for each micro-batch.
        on_leave: called with the stage that the cursor is about to move to.
        moves: the number of moves so far.
        is_marked: whether a mark, and not a plan, has placed the forward.
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
