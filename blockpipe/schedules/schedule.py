"""A schedule as data: for each lane, the order of its actions.

A schedule is a plain value, so that a test can write one out, a person can print one, and a user
can pass one, as a value or as CSV. The actions of a lane are packed into an array of numbers: as
tuples, those of 1000 stages and 10 000 micro-batches would not fit in memory.

``builders.py`` makes schedules, and ``simulation.py`` plays them out.
"""

import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, cast, overload

from .._common.checks import expected, is_integer
from ..errors import ScheduleError

Kind = Literal["F", "B", "W", "R"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "R")
F, B, W, R = range(4)

# A packed action: kind in the lowest 2 bits, then 20 bits of hop, then the micro-batch.
HOP_SHIFT, MICROBATCH_SHIFT, HOP_MASK = 2, 22, (1 << 20) - 1
MOST_HOPS = 1 << 20
MOST_MICROBATCHES = 1 << 40

_CELL = re.compile(r"([0-9]{1,7})([FBIWR])([0-9]{1,13})")  # no longer than the largest numbers
_LIMITS = f"a hop below {MOST_HOPS:,} and a micro-batch below {MOST_MICROBATCHES:,}"


class Action(NamedTuple):
    """One entry of a schedule: one micro-batch's forward or backward on one hop, or a part of it.

    ``"F"`` is a forward and ``"B"`` a backward. Where a ``"W"`` of the same hop and micro-batch
    follows, ``"B"`` computes only the gradients of the hop's inputs, and ``"W"`` those of the
    parameters. ``"R"`` recomputes the activations that the forward has dropped, or fetches them
    from host memory: before its ``"B"``, while the gradient is still on its way.

    Attributes:
        kind: ``"F"``, ``"B"``, ``"W"`` or ``"R"``.
        hop: the index of the hop, from 0.
        microbatch: the index of the micro-batch, from 0.

    Example:
        >>> from blockpipe.schedules import Action
        >>> str(Action("F", hop=1, microbatch=0))
        'F1.0'
    """

    kind: Kind
    hop: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.hop}.{self.microbatch}"


def pack(kind: int, hop: int, microbatch: int) -> int:
    """Return an action as one number."""
    return microbatch << MICROBATCH_SHIFT | hop << HOP_SHIFT | kind


def unpack(code: int) -> Action:
    """Return the action that a number stands for."""
    return Action(KINDS[code & 3], code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT)


def fields_of(codes: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the kind (a number), the hop and the micro-batch of each packed action.

    Example:
        >>> list(fields_of([pack(B, 3, 5)])) == [(B, 3, 5)]
        True
    """
    for code in codes:
        yield code & 3, code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT


def most_kept(
    codes: Collection[int], size: Sequence[float], dropped: Sequence[float] | None = None
) -> float:
    """Return the most that a lane keeps at once for micro-batches whose backward is not over.

    Args:
        codes: the lane's actions, packed, in order.
        size: for each hop, the size of the part that it keeps of one micro-batch, from its F to
            the end of its backward.
        dropped: for each hop, the share of ``size`` that a micro-batch with an R does not keep
            from its F to its R; ``None``: nothing.

    Example:
        >>> most_kept([pack(F, 0, 0), pack(F, 0, 1), pack(B, 0, 0), pack(B, 0, 1)], [5.0])
        10.0
    """
    split = _pairs_with(W, codes)
    recomputed = _pairs_with(R, codes) if dropped is not None else set()
    kept = most = 0.0
    for kind, hop, m in fields_of(codes):
        if kind == F:
            kept += size[hop]
            if dropped is not None and (hop, m) in recomputed:
                kept -= dropped[hop]
        elif kind == R:
            kept += dropped[hop] if dropped is not None else 0.0
        elif kind == W or (hop, m) not in split:
            kept -= size[hop]
        most = max(most, kept)
    return most


def _pairs_with(kind: int, codes: Iterable[int]) -> set[tuple[int, int]]:
    """Return the (hop, micro-batch) pairs that have an action of a kind."""
    return {(hop, m) for found, hop, m in fields_of(codes) if found == kind}


class Actions(Sequence[Action]):
    """A lane's actions, in order: a sequence of :class:`Action`, stored as numbers."""

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
        """Return them as a list that is made once: for callers that read them many times."""
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
        contract = f"an Action('F', 'B', 'W' or 'R', hop, microbatch) with {_LIMITS}"
        raise ScheduleError(expected(contract, action, for_="an entry of lanes")) from error


@dataclass(frozen=True)
class Schedule:
    """The actions of every lane, in order.

    Args:
        name: a name for messages and tables.
        lane_of_hop: the lane of each hop of the route. A lane runs one action at a time.
        microbatches: the number of micro-batches.
        lanes: for each lane its actions; any sequences of :class:`Action`.

    Raises:
        ScheduleError: an entry of ``lanes`` is not an action, or a number is negative. Whether the
            schedule can run is checked by :func:`blockpipe.schedules.simulation.validate`, which a
            pipeline calls.

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
        if not all(is_integer(lane, 0) for lane in self.lane_of_hop):
            raise ScheduleError(
                expected("non-negative integers", self.lane_of_hop, for_="lane_of_hop")
            )
        if not is_integer(self.microbatches, 0):
            raise ScheduleError(
                expected("a non-negative integer", self.microbatches, for_="microbatches")
            )
        object.__setattr__(self, "lane_of_hop", tuple(self.lane_of_hop))
        lanes = (a if isinstance(a, Actions) else Actions(a) for a in self.lanes)
        object.__setattr__(self, "lanes", tuple(lanes))

    @property
    def codes(self) -> "list[array[int]]":
        """For each lane its actions as numbers, see :func:`unpack`."""
        return [lane.codes for lane in self.lanes if isinstance(lane, Actions)]

    def in_flight(self) -> int:
        """Return the most micro-batches that are under way at once: those that the first hop has
        begun, and whose backward there is not over."""
        return self._most_held(0)

    def held_at_once(self) -> list[int]:
        """Return for each hop the most micro-batches that are between their forward and the end
        of their backward there.

        Example:
            >>> from blockpipe.schedules import make_schedule
            >>> make_schedule("1f1b", [0, 1, 2], 8).held_at_once()
            [3, 2, 1]
        """
        return [self._most_held(hop) for hop in range(len(self.lane_of_hop))]

    def _most_held(self, hop: int) -> int:
        codes = self.codes[self.lane_of_hop[hop]]
        own = [code for code in codes if code >> HOP_SHIFT & HOP_MASK == hop]
        return int(most_kept(own, [1.0] * len(self.lane_of_hop)))

    def split(self) -> set[tuple[int, int]]:
        """Return the (hop, micro-batch) pairs whose backward is in two parts."""
        return {pair for lane in self.codes for pair in _pairs_with(W, lane)}

    def with_recomputed(self, needs: Callable[[int, int], bool]) -> "Schedule":
        """Return the schedule with an R right before each B that needs one; the lane runs it as
        soon as it is free.

        Args:
            needs: ``(hop, microbatch) -> bool``.
        """
        lanes = []
        for codes in self.codes:
            has, row = _pairs_with(R, codes), array("q")
            for kind, hop, m in fields_of(codes):
                if kind == B and (hop, m) not in has and needs(hop, m):
                    row.append(pack(R, hop, m))
                row.append(pack(kind, hop, m))
            lanes.append(Actions(row))
        return Schedule(self.name, self.lane_of_hop, self.microbatches, tuple(lanes))

    def __str__(self) -> str:
        return "\n".join(f"lane {lane}: {actions!r}" for lane, actions in enumerate(self.lanes))

    def to_csv(self) -> str:
        """Return the schedule as CSV in the form that ``torch.distributed.pipelining`` writes.

        It has a row for each lane (there, a rank) and a cell for each action, such as ``0F3``:
        hop, kind, micro-batch. A backward in two parts is ``I`` (inputs) and ``W`` (weights), a
        whole one ``B``; a recomputation, which torch's schedules do not have, is ``R``.
        """
        split = self.split()

        def cell(action: Action) -> str:
            kind, hop, m = action
            return f"{hop}{'I' if kind == 'B' and (hop, m) in split else kind}{m}"

        return "".join(",".join(map(cell, lane)) + "\n" for lane in self.lanes)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Make a schedule from CSV, see :meth:`to_csv`. Empty cells are bubbles and are skipped.

        Args:
            text: the CSV text.
            name: the schedule's name.

        Raises:
            ScheduleError: a cell is not an action (with its row and column), a hop is on two rows,
                or a hop or micro-batch has no action.
        """
        if not isinstance(text, str) or not text.strip(", \t\r\n"):
            contract, fix = "CSV text with a row of actions for each lane", "Path(...).read_text()"
            raise ScheduleError(expected(contract, text, fix=f"read a file with {fix}"))
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
                        f"row {lane + 1}, column {column + 1} of the CSV has hop {action.hop}, "
                        f"which is on row {lane_of[action.hop] + 1} too; keep all actions of a "
                        "hop on one row"
                    )
        microbatches = {action.microbatch for actions in lanes for action in actions}
        for noun, numbers in (("hops", lane_of.keys()), ("micro-batches", microbatches)):
            # Only the first ones: a short text may name a large number.
            missing = list(islice((n for n in range(max(numbers)) if n not in numbers), 8))
            if missing:
                raise ScheduleError(
                    f"the CSV has no action of the {noun} {missing}; number {noun} 0, 1, … "
                    "without gaps"
                )
        lane_of_hop = tuple(lane_of[hop] for hop in sorted(lane_of))
        return cls(name, lane_of_hop, len(microbatches), tuple(lanes))


def _from_cell(cell: str, row: int, column: int) -> Action:
    found = _CELL.fullmatch(cell)
    if found is not None:
        kind, hop, microbatch = found[2], int(found[1]), int(found[3])
        if hop < MOST_HOPS and microbatch < MOST_MICROBATCHES:
            return Action(cast(Kind, "B" if kind == "I" else kind), hop, microbatch)
    contract = (
        "a hop, one of F, B (whole), I (inputs), W (weights) or R (recompute), and a micro-batch, "
        f"such as 0F3, with {_LIMITS}"
    )
    place = f"row {row + 1}, column {column + 1} of the CSV"
    raise ScheduleError(expected(contract, cell[:100], for_=place))
