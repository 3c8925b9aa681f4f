"""A schedule as data: for each lane, the order of its actions.

A schedule is a plain value, so that a test can write one out, a person can print one, and a user
can bring one along, as a value or as CSV. The actions of a lane are packed into an array of
numbers: as tuples, those of 1000 stages and 10 000 micro-batches would not fit in memory.

What makes schedules is in ``builders.py``, what plays them out in ``simulation.py``.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, cast, overload

from ..errors import ScheduleError

Kind = Literal["F", "B", "W", "R"]
KINDS = ("F", "B", "W", "R")
F, B, W, R = range(4)

# A packed action: kind in the lowest 2 bits, then 20 bits of hop, then the micro-batch.
HOP_SHIFT, MICROBATCH_SHIFT, HOP_MASK = 2, 22, (1 << 20) - 1
MOST_HOPS = 1 << 20
MOST_MICROBATCHES = 1 << 40

_CELL = re.compile(r"([0-9]{1,7})([FBIWR])([0-9]{1,13})")  # no longer than the largest numbers


class Action(NamedTuple):
    """One entry of a schedule: what one micro-batch does on one hop.

    ``"F"`` is a forward and ``"B"`` a backward. Where a ``"W"`` of the same hop and micro-batch
    follows, ``"B"`` computes the gradients of what came in only, and ``"W"`` those of the
    parameters. ``"R"`` makes again what the forward has dropped, or brings it back from host
    memory: before its ``"B"``, while the gradient is still on its way.
    """

    kind: Kind
    hop: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.hop}.{self.microbatch}"


def pack(kind: int, hop: int, microbatch: int) -> int:
    """An action as one number."""
    return microbatch << MICROBATCH_SHIFT | hop << HOP_SHIFT | kind


def unpack(code: int) -> Action:
    """The action that a number stands for."""
    return Action(
        cast(Kind, KINDS[code & 3]), code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT
    )


class Actions(Sequence[Action]):
    """A lane's actions, in order: reads as a sequence of :class:`Action`, kept as numbers."""

    __slots__ = ("_unpacked", "codes")

    def __init__(self, actions: "Iterable[Action] | array[int]" = ()) -> None:
        self._unpacked: list[Action] | None = None
        if isinstance(actions, array):
            self.codes: array[int] = actions
        else:
            self.codes = array("q", (_packed(action) for action in actions))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> "Actions": ...
    def __getitem__(self, index: int | slice) -> "Action | Actions":
        if isinstance(index, slice):
            return Actions(self.codes[index])
        return unpack(self.codes[index])

    def __iter__(self) -> Iterator[Action]:
        return map(unpack, self.codes)

    def unpacked(self) -> list[Action]:
        """As a list, made once: for who reads them many times."""
        if self._unpacked is None:
            self._unpacked = list(self)
        return self._unpacked

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Actions):
            return self.codes == other.codes
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    def __repr__(self) -> str:
        return " ".join(map(str, self))


def _packed(action: Any) -> int:
    try:
        kind, hop, microbatch = action
        if not (0 <= hop <= HOP_MASK and 0 <= microbatch < MOST_MICROBATCHES):
            raise ValueError
        return pack(KINDS.index(kind), hop, microbatch)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            "an action is Action('F', 'B', 'W' or 'R', hop, microbatch), with a hop below "
            f"{MOST_HOPS:,} and a micro-batch below {MOST_MICROBATCHES:,}, but {action!r} came"
        ) from error


@dataclass(frozen=True)
class Schedule:
    """What every lane does, in order.

    Args:
        name: for messages and tables.
        lane_of_hop: the lane of each hop of the route. A lane runs one action at a time.
        microbatches: how many there are.
        lanes: for each lane its actions; any sequences of :class:`Action`.

    Raises:
        ScheduleError: something in ``lanes`` is no action. Whether the whole can run is for
            :func:`blockpipe.schedules.validate` to say, which a pipeline asks.

    Example:
        >>> from blockpipe.schedules import Action, Schedule
        >>> schedule = Schedule("mine", (0,), 1, ([Action("F", 0, 0), Action("B", 0, 0)],))
        >>> print(schedule)
        lane 0: F0.0 B0.0
        >>> Schedule.from_csv(schedule.to_csv(), name="mine") == schedule
        True
    """

    name: str
    lane_of_hop: tuple[int, ...]
    microbatches: int
    lanes: tuple[Sequence[Action], ...]

    def __post_init__(self) -> None:
        numbers = (*self.lane_of_hop, self.microbatches)
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
            raise ScheduleError(
                "lane_of_hop and microbatches are whole numbers from 0 on, but "
                f"{self.lane_of_hop!r} and {self.microbatches!r} came"
            )
        object.__setattr__(self, "lane_of_hop", tuple(self.lane_of_hop))
        lanes = (a if isinstance(a, Actions) else Actions(a) for a in self.lanes)
        object.__setattr__(self, "lanes", tuple(lanes))

    @property
    def codes(self) -> "list[array[int]]":
        """For each lane its actions as numbers, see :func:`unpack`."""
        return [lane.codes for lane in self.lanes if isinstance(lane, Actions)]

    def in_flight(self) -> int:
        """The most micro-batches that are under way at once: begun, and not back at the start."""
        begun = most = 0
        first = self.codes[self.lane_of_hop[0]]
        splits = any(code & 3 == W and not code >> HOP_SHIFT & HOP_MASK for code in first)
        ends = W if splits else B
        for code in first:
            if not code >> HOP_SHIFT & HOP_MASK:
                kind = code & 3
                begun += (kind == F) - (kind == ends)
                most = max(most, begun)
        return most

    def split(self) -> set[tuple[int, int]]:
        """The (hop, micro-batch) pairs whose backward is in two parts."""
        return {
            (code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT)
            for lane in self.codes
            for code in lane
            if code & 3 == W
        }

    def with_recomputed(self, needs: Callable[[int, int], bool]) -> "Schedule":
        """With an R right before each B that needs one: the lane does it as soon as it is free.

        Args:
            needs: ``(hop, microbatch) -> bool``.
        """
        has = {(a.hop, a.microbatch) for lane in self.lanes for a in lane if a.kind == "R"}
        lanes = []
        for codes in self.codes:
            row = array("q")
            for code in codes:
                hop, m = code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT
                if code & 3 == B and (hop, m) not in has and needs(hop, m):
                    row.append(pack(R, hop, m))
                row.append(code)
            lanes.append(Actions(row))
        return Schedule(self.name, self.lane_of_hop, self.microbatches, tuple(lanes))

    def __str__(self) -> str:
        return "\n".join(f"lane {lane}: {actions!r}" for lane, actions in enumerate(self.lanes))

    def to_csv(self) -> str:
        """As CSV in the form that ``torch.distributed.pipelining`` writes: a row for each lane
        (there, a rank), a cell for each action, such as ``0F3``: hop, kind, micro-batch. A
        backward in two parts is ``I`` (inputs) and ``W`` (weights), a whole one ``B``; a
        recomputation, which torch's schedules do not have, is ``R``."""
        split = self.split()

        def cell(action: Action) -> str:
            kind, hop, m = action
            return f"{hop}{'I' if kind == 'B' and (hop, m) in split else kind}{m}"

        return "".join(",".join(map(cell, lane)) + "\n" for lane in self.lanes)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """A schedule from CSV, see :meth:`to_csv`. Empty cells are bubbles, and mean nothing.

        Raises:
            ScheduleError: a cell that is no action (with its row and column), a hop on two rows,
                or a hop or micro-batch without any action.
        """
        if not isinstance(text, str) or not text.strip(", \t\r\n"):
            raise ScheduleError(
                f"a CSV is text with a row of actions for each lane, but {text!r} came; read a "
                "file with Path(...).read_text()"
            )
        lanes: list[list[Action]] = []
        lane_of: dict[int, int] = {}
        rows = [row for row in text.splitlines() if row.strip()]
        for lane, row in enumerate(rows):
            lanes.append([])
            for column, cell in enumerate(row.split(",")):
                if not cell.strip():
                    continue
                action = _from_cell(cell.strip(), lane, column)
                lanes[lane].append(action)
                if lane_of.setdefault(action.hop, lane) != lane:
                    raise ScheduleError(
                        f"row {lane + 1}, column {column + 1}: hop {action.hop} is on row "
                        f"{lane_of[action.hop] + 1} too; a hop has one lane"
                    )
        microbatches = {action.microbatch for actions in lanes for action in actions}
        for noun, numbers in (("hops", lane_of.keys()), ("micro-batches", microbatches)):
            # Not all of them: a short text may name a large number.
            missing = list(islice((n for n in range(max(numbers)) if n not in numbers), 8))
            if missing:
                raise ScheduleError(
                    f"{noun} are numbered 0, 1, … without gaps, but {missing} have no action in "
                    "the CSV"
                )
        lane_of_hop = tuple(lane_of[hop] for hop in sorted(lane_of))
        return cls(name, lane_of_hop, len(microbatches), tuple(lanes))


def _from_cell(cell: str, row: int, column: int) -> Action:
    found = _CELL.fullmatch(cell)
    if found is not None:
        kind, hop, microbatch = found[2], int(found[1]), int(found[3])
        if hop < MOST_HOPS and microbatch < MOST_MICROBATCHES:
            return Action(cast(Kind, "B" if kind == "I" else kind), hop, microbatch)
    raise ScheduleError(
        f"row {row + 1}, column {column + 1}: a cell is a hop, one of F, B (whole), "
        "I (inputs), W (weights) or R (recompute), and a micro-batch, such as 0F3, the hop below "
        f"{MOST_HOPS:,} and the micro-batch below {MOST_MICROBATCHES:,}, but {cell[:100]!r} came"
    )
