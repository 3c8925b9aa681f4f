"""Whether the micro-batches of a step leave values of the same kind for other stages."""

from collections.abc import Hashable, Sequence

from ...errors import StateError
from ...recording.entries import TurningValue
from ...recording.plain_values.kinds import in_words, kind_of


class LeftKinds:
    """Compares them in one step, whose micro-batches are under way at once.

    Args:
        turning: the places that one hop writes to and another one reads.
        route: the stage of each hop.
    """

    def __init__(self, turning: Sequence[TurningValue], route: Sequence[int]) -> None:
        self._by_hop: dict[int, list[TurningValue]] = {}
        for value in turning:
            for hop in value.hops:
                self._by_hop.setdefault(hop, []).append(value)
        self._route = route
        self._first: dict[tuple[int, int], tuple[int, Hashable]] = {}  # by hop and index

    def left(self, hop: int, m: int) -> None:
        """Compare what a micro-batch's forward leaves at the end of a hop.

        Raises:
            StateError: it is of another kind than that of a micro-batch before.
        """
        for index, value in enumerate(self._by_hop.get(hop, ())):
            kind = kind_of(value)
            earlier, then = self._first.setdefault((hop, index), (m, kind))
            if kind != then:
                raise StateError(
                    f"the forward sets {value.name} on stage {self._route[hop]} to "
                    f"{in_words(then)} for micro-batch {earlier} and to {in_words(kind)} for "
                    f"micro-batch {m}, and another stage reads it ({value.where}): which one it "
                    "finds would depend on timing; pass it along as an argument, or use "
                    "schedule='sequential'"
                )
