"""The strategies of PopTorch's options, which turn blocks into stages.

In PopTorch a block has two numbers, its stage and its IPU. A stage of Blockpipe is a number, and a
separate list has its device. So a strategy numbers the blocks when a forward reaches them, and
notes the IPU of each stage.
"""

import enum
from collections.abc import Sequence
from typing import ClassVar

from ..._common.callsite import users_line
from ...errors import PlanError
from ...stages.cursor import Cursor, Mark, current_cursor

_AUTO = "poptorch auto id"  # in what a cursor has noted: how many blocks without a name came


class AutoStage(enum.Enum):
    """The rule for the stage of a block that no :class:`Stage` names."""

    SameAsIpu = "as its IPU has it; a new one for each name where it has no IPU"
    AutoIncrement = "a new one for each name"


class Stage:
    """Blocks that are one stage, by their names.

    Args:
        *block_ids: the blocks' ``user_id``.

    Raises:
        PlanError: a name is not a string.

    Source: ``poptorch.Stage``.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> poptorch.Stage("A", "B").ipu(1).blocks
        ('A', 'B')
    """

    def __init__(self, *block_ids: str) -> None:
        wrong = [block for block in block_ids if not isinstance(block, str)]
        if wrong:
            raise PlanError(
                f"expected names of blocks, got {wrong} ({users_line()}); pass the user_id that "
                "the blocks have"
            )
        self.blocks = block_ids
        self.on_ipu: int | None = None

    def ipu(self, ipu: int) -> "Stage":
        """Set the stage's IPU to ``ipu``, whichever its blocks name, and return the stage."""
        self.on_ipu = ipu
        return self


class PipelinedExecution:
    """All stages at work at once, each on another micro-batch.

    Args:
        *stages: the stages in order, each a :class:`Stage`, the name of a block, or a list of
            names; or one :class:`AutoStage`. Without any it is ``AutoStage.SameAsIpu``.

    Raises:
        PlanError: a block is in two stages, or an argument is not a stage.

    Source: ``poptorch.PipelinedExecution``.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> strategy = poptorch.PipelinedExecution(poptorch.Stage("A", "B"), "C")
        >>> strategy.stage("B").blocks
        ('A', 'B')
    """

    schedule: ClassVar[str] = "1f1b"

    def __init__(self, *stages: AutoStage | Stage | str | Sequence[str]) -> None:
        self.auto = AutoStage.SameAsIpu
        self.stages: list[Stage] = []
        if len(stages) == 1 and isinstance(stages[0], AutoStage):
            self.auto = stages[0]
        else:
            self.stages = [_as_stage(stage) for stage in stages]
        self.number_of: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            for block in stage.blocks:
                if block in self.number_of:
                    raise PlanError(
                        f"expected each block in one stage, got {block!r} in stage "
                        f"{self.number_of[block]} and in stage {number} ({users_line()}); leave "
                        "it out of one of them"
                    )
                self.number_of[block] = number

    def stage(self, block_id: str) -> Stage:
        """Return the stage that the block ``block_id`` is listed in.

        Raises:
            PlanError: it is not listed.
        """
        if block_id not in self.number_of:
            raise PlanError(
                f"expected one of the blocks {sorted(self.number_of)}, got {block_id!r} "
                f"({users_line()}); add it to a stage of {type(self).__name__}"
            )
        return self.stages[self.number_of[block_id]]

    def __repr__(self) -> str:
        listed = ", ".join(map(repr, (stage.blocks for stage in self.stages)))
        return f"{type(self).__name__}({listed or self.auto})"


class ShardedExecution(PipelinedExecution):
    """One stage at work at a time, as for debugging: ``schedule="sequential"``.

    Args:
        *stages: as for :class:`PipelinedExecution`.

    Source: ``poptorch.ShardedExecution``.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution("A", "B"))
        Options(setExecutionStrategy=ShardedExecution(('A',), ('B',)))
    """

    schedule = "sequential"


class Numbering:
    """The stage of each mark that a forward reaches, for :func:`numbered_by`.

    Args:
        strategy: the strategy that decides.

    Attributes:
        ipus: the IPU of each stage, for the marks reached so far.
    """

    def __init__(self, strategy: PipelinedExecution) -> None:
        self.strategy = strategy
        self.ipus: dict[int, int] = {}
        self._by_ipu = not strategy.number_of and strategy.auto is AutoStage.SameAsIpu

    def __call__(self, cursor: Cursor, mark: Mark) -> int:
        ipu, name = mark.stage, mark.name
        if self._by_ipu and ipu is not None:  # no block's name matters
            if ipu not in self.ipus:
                self.ipus[ipu] = ipu
            return ipu
        if name is None:  # it is counted even where its IPU decides
            noted = cursor.noted.get(id(mark))
            name = _auto_id(cursor, mark) if noted is None else noted[0]
        if self.strategy.number_of:
            stage = self.strategy.stage(name)
            number = self.strategy.number_of[name]
            ipu = stage.on_ipu if stage.on_ipu is not None else ipu
        else:
            number = cursor.noted.setdefault(name, cursor.highest + 1)
        self.ipus.setdefault(number, number if ipu is None else ipu)
        return number


def restart_auto_ids() -> None:
    """Count blocks without a name from 0 again in the present forward, if there is one."""
    cursor = current_cursor()
    if cursor is not None:
        cursor.noted.pop(_AUTO, None)


def _auto_id(cursor: Cursor, mark: Mark) -> str:
    """Give a block without a ``user_id`` its number among such blocks.

    A module under BeginBlock has one mark and one number, however often it is called. A ``with
    Block()`` is another block each time. The mark is kept alive, so that no other gets its ``id``.
    """
    number = cursor.noted.get(_AUTO, 0)
    cursor.noted[_AUTO] = number + 1
    cursor.noted[id(mark)] = str(number), mark
    return str(number)


def _as_stage(stage: object) -> Stage:
    if isinstance(stage, Stage):
        return stage
    if isinstance(stage, str):
        return Stage(stage)
    if isinstance(stage, list | tuple):
        return Stage(*stage)
    raise PlanError(
        f"expected a Stage, a block's name, or a list of names, got {stage!r} ({users_line()}); "
        "write PipelinedExecution(Stage('A', 'B'), 'C')"
    )
