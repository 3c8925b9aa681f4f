"""The cursor: the position of the forward under way, in the context of its thread.

A recording and every run put a cursor into the context; marks move it. A stack of device scopes
(``with torch.device``) was no alternative: the operations behind a mark must stay on its stage,
also when the mark was made deep inside a module call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Mark:
    """One mark as written.

    Attributes:
        stage: its stage; ``None``: the next number.
        name: its name, for summaries and errors.
        where: its file and line.
        checkpoint: whether the modules called under it are recomputed; ``None``: as the pipeline
            says.
        yields: whether it counts only outside of every ``with Block``.
    """

    stage: int | None
    name: str | None
    where: str
    checkpoint: bool | None = None
    yields: bool = False


SKIPPED_MARKS = (
    "where the forward skips a marked layer (layerdrop), it skips the mark, and a sample may skip "
    "it too: take the mark off, and decide inside of a block that is always entered (with "
    "Block(stage=n): if torch.rand(()) > p: x = layer(x))"
)
"""For errors about another route than the recorded one, and about a gap in it."""


class Uses(Protocol):
    """Is told what a forward does with attributes of objects."""

    def sets(self, owner: object, key: str) -> Callable[[], None] | None:
        """Be told before one is set; returns what has to be called afterwards."""

    def reads(self, owner: object, key: str) -> None:
        """Be told when one is read."""


# Calls a function that is a block, given a text that identifies it and its arguments.
FunctionCall = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Cursor:
    """The position of one forward: the stage that it is on.

    Each run has a cursor of its own, and threads never share one.

    Args:
        follow_marks: whether marks move it; under a plan only the run does.

    Attributes:
        stage: the stage that the forward is on.
        mark: the mark in effect.
        passes: whether marks are passed over, as in a loss function.
        highest: the highest stage that a mark has named so far; -1: none has.
        checkpoint: whether the mark in effect asks for recomputation; ``None``: it says nothing.
        in_scope: whether the forward is inside of a ``with Block``.
        block_ended: whether the last event was the end of an outermost block.
        on_move: called with the new stage when the stage changes.
        on_call: called in the place of a function that is a block.
        uses: is told of attributes that the forward sets and reads. Copies have it, too.
        noted: what a numbering (:func:`numbered_by`) remembers of this forward.
        kept: what other libraries' functions keep for this forward; copies share it.
        keys: the objects by which the user's code tells this forward from others, by their ids;
            copies share them.
    """

    def __init__(self, *, follow_marks: bool = True) -> None:
        self.stage = 0
        self.mark: Mark | None = None
        self.follow_marks = follow_marks
        self.passes = False
        self.highest = -1
        self.checkpoint: bool | None = None
        self._scopes: list[tuple[int, bool | None, Mark | None]] = []
        self.in_scope = False
        self.on_move: Callable[[int], None] | None = None
        self.on_call: FunctionCall | None = None
        self.uses: Uses | None = None
        self.block_ended = False
        self.noted: dict[Any, Any] = {}
        self.kept: dict[str, Any] = {}
        self.keys: dict[int, object] = {}
        self._calls: dict[int, int] = {}

    def copy(self) -> "Cursor":
        """Return a cursor at the same position, without callbacks of moves and calls."""
        new = Cursor(follow_marks=self.follow_marks)
        new.stage, new.mark, new.highest = self.stage, self.mark, self.highest
        new.noted, new._calls = {**self.noted}, {**self._calls}
        new.kept, new.keys = self.kept, self.keys
        new.passes, new.uses = self.passes, self.uses
        new.checkpoint, new._scopes, new.in_scope = self.checkpoint, [*self._scopes], self.in_scope
        return new

    def tell_apart(self, key: object) -> None:
        """Note that the user's code is given a key, for state that it keeps for this forward."""
        self.keys[id(key)] = key

    def count_call(self, what: object) -> int:
        """Return how many times this forward has called it before, and count one more."""
        count = self._calls.get(id(what), 0)
        self._calls[id(what)] = count + 1
        return count

    def forget_calls(self) -> None:
        """Count calls from 0 again: the model's forward begins anew."""
        self._calls.clear()

    def begin(self, mark: Mark) -> None:
        """Move to a mark's stage."""
        if self.passes or (mark.yields and self.in_scope):
            return
        numbering = _numbering.get()
        if numbering is not None:
            stage = numbering(self, mark)
        else:
            stage = self.highest + 1 if mark.stage is None else mark.stage
        self.highest = max(self.highest, stage)
        self.block_ended = False
        self.checkpoint = mark.checkpoint
        if self.follow_marks:
            self.move(stage, mark)

    def enter(self, mark: Mark) -> None:
        """Move to the stage of a nested block's mark, and remember the outer one."""
        self._scopes.append((self.stage, self.checkpoint, self.mark))
        self.begin(mark)
        self.in_scope = True

    def leave(self) -> None:
        """Return to the outer block's stage; after the outermost block, stay."""
        outer, self.checkpoint, mark = self._scopes.pop()
        self.in_scope = bool(self._scopes)
        self.block_ended = not self._scopes
        if self._scopes and self.follow_marks:
            self.move(outer, mark)

    def move(self, stage: int, mark: Mark | None) -> None:
        """Set the stage, and report it to the run if it has changed."""
        moves = stage != self.stage
        self.stage = stage
        self.mark = mark
        if moves and self.on_move is not None:
            self.on_move(stage)


_cursor: ContextVar[Cursor | None] = ContextVar("blockpipe_cursor", default=None)


# Returns the stage of a mark that a forward has come to, from its cursor and the mark.
Numbering = Callable[[Cursor, Mark], int]
_numbering: ContextVar[Numbering | None] = ContextVar("blockpipe_numbering", default=None)


@contextmanager
def numbered_by(numbering: Numbering) -> Iterator[None]:
    """While entered, ask a function for each mark's stage, in recordings and in steps.

    The number at a mark cannot say which stages the blocks of a name are put together in: that is
    decided where the pipeline is made. The function keeps what it remembers of a forward in
    ``cursor.noted``, because several forwards run at once.
    """
    token = _numbering.set(numbering)
    try:
        yield
    finally:
        _numbering.reset(token)


def set_cursor(cursor: Cursor | None) -> Cursor | None:
    """Put a cursor into this context; returns the one that it replaces."""
    before = _cursor.get()
    _cursor.set(cursor)
    return before


@contextmanager
def passing_marks() -> Iterator[None]:
    """While entered, pass over marks: what runs is no part of the forward, such as a marked teacher
    in a loss function."""
    cursor = _cursor.get()
    if cursor is None or cursor.passes:
        yield
        return
    cursor.passes, checkpoint = True, cursor.checkpoint
    cursor.checkpoint = None
    try:
        yield
    finally:
        cursor.passes, cursor.checkpoint = False, checkpoint


def current_cursor() -> Cursor | None:
    """Return the cursor of the forward under way; ``None``: no forward is."""
    return _cursor.get()


def is_of_microbatch(key: object) -> bool:
    """Return whether a key is one that tells this micro-batch from the others."""
    cursor = current_cursor()
    return cursor is not None and id(key) in cursor.keys


def active_cursor() -> Cursor | None:
    """Return the cursor that marks move now; ``None`` also while torch.compile traces."""
    # Not is_compiling(): it is true while any thread of the process compiles.
    return None if torch.compiler.is_dynamo_compiling() else _cursor.get()


def current_stage() -> int | None:
    """Return the stage that the forward under way is on; ``None`` outside of a recording or step.

    Example:
        >>> import blockpipe as bp
        >>> print(bp.current_stage())
        None
    """
    cursor = _cursor.get()
    return None if cursor is None else cursor.stage


_microbatch: ContextVar[int | None] = ContextVar("blockpipe_microbatch", default=None)


def current_microbatch() -> int | None:
    """Return the index of the micro-batch whose forward is under way; ``None`` outside of one.

    A forward that keeps state on ``self`` can keep one for each micro-batch, in a dictionary with
    this as its key. It is ``None`` in a recording, too.

    Source: ``torchgpipe``'s function of this name, which returns a tensor to compare.

    Example:
        >>> import blockpipe as bp
        >>> print(bp.current_microbatch())
        None
    """
    index = _microbatch.get()
    if index is None and (cursor := _cursor.get()) is not None:
        cursor.keys[id(None)] = None  # in a recording, which is of one micro-batch
    return index


def set_microbatch(index: int | None) -> int | None:
    """Set the index of the micro-batch whose forward is under way here; returns the earlier one."""
    before = _microbatch.get()
    _microbatch.set(index)
    return before


recomputing: ContextVar[bool] = ContextVar("blockpipe_recomputing", default=False)


def is_recomputing() -> bool:
    """Return whether a module runs again only to recompute activations that were dropped.

    The pipeline's ``checkpoint=`` recomputes, and so does a ``torch.utils.checkpoint`` in the
    forward's own code. Ask before side effects that should happen once: count, log, append to a
    list. Random states and buffers need no care: Blockpipe restores them as if the module had run
    once.

    Source: ``torchgpipe.is_recomputing``.

    Example:
        >>> import blockpipe as bp
        >>> bp.is_recomputing()
        False
    """
    return recomputing.get()


checkpointing: ContextVar[bool] = ContextVar("blockpipe_checkpointing", default=False)


def is_checkpointing() -> bool:
    """Return whether the module call under way drops its activations, and will be recomputed.

    It is false in a call that is not recomputed because that would save nothing. It is also false
    while a call runs again; :func:`is_recomputing` is true then.

    Source: ``torchgpipe.is_checkpointing``.

    Example:
        >>> from blockpipe.stages.cursor import is_checkpointing
        >>> is_checkpointing()
        False
    """
    return checkpointing.get()
