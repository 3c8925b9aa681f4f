"""Whether the micro-batches of a step leave values of the same kind for other stages."""

from collections.abc import Hashable, Sequence

from ...errors import StateError
from ...preparation.watched.seen import content_beside_tensors
from ...recording.entries import TurningValue
from ...recording.plain_values.kinds import in_words, value_at


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
        self._first: dict[tuple[int, int], tuple[int, Hashable, str]] = {}  # by hop and index

    def left(self, hop: int, m: int) -> None:
        """Compare what a micro-batch's forward leaves at the end of a hop.

        Raises:
            StateError: it is of another kind than that of a micro-batch before.
        """
        for index, place in enumerate(self._by_hop.get(hop, ())):
            value = value_at(place)
            now, words = content_beside_tensors(value), in_words(value)
            earlier, then, before = self._first.setdefault((hop, index), (m, now, words))
            if now != then:
                other = "another one" if words == before else words
                raise StateError(
                    f"the forward leaves {place.name} on stage {self._route[hop]} as {before} for "
                    f"micro-batch {earlier} and as {other} for micro-batch {m}, and another stage "
                    f"reads it ({place.where}): which one it finds would depend on timing; pass it "
                    "along as an argument, or use schedule='sequential'"
                )
