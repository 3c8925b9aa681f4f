"""Whether the micro-batches of a step leave values of the same kind for other stages."""

from collections.abc import Hashable, Sequence

from torch import nn

from ..._common.callsite import users_line
from ..._common.threads.thread_state import ours
from ...crossing.tags import ParameterHome
from ...errors import StateError
from ...preparation.prepared import Prepared
from ...preparation.watched.seen import content_beside_tensors
from ...recording.entries import TurningValue
from ...recording.plain_values.kinds import in_words, value_at
from ...schedules.schedule import Schedule
from .backward_writes import late_actions


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


class LeftTrained:
    """Compares which parameters need a gradient, in one step, where backwards come late: these ask
    each parameter then, and find what a later forward has set.

    Args:
        prepared: the prepared model.
        schedule: of the step.
    """

    def __init__(self, prepared: Prepared, schedule: Schedule) -> None:
        late = {action.hop for action in late_actions(schedule)}
        self._by_hop: dict[int, list[ParameterHome]] = {}
        for home in prepared.homes.values():
            if home.hop in late and isinstance(home.tensor, nn.Parameter):
                self._by_hop.setdefault(home.hop, []).append(home)
        self._route = prepared.route
        self._latest: dict[int, tuple[int, list[bool]]] = {}  # by hop: a micro-batch, what it left

    def left(self, hop: int, m: int) -> None:
        """Compare them at the end of a micro-batch's forward on a hop.

        Raises:
            StateError: they are others than after the micro-batch before.
        """
        homes = self._by_hop.get(hop, [])
        with ours():
            now = [home.tensor.requires_grad for home in homes]
        earlier, then = self._latest.get(hop, (m, now))
        self._latest[hop] = m, now
        for home, before, after in zip(homes, then, now, strict=True):
            if before != after:
                raise StateError(
                    f"the forward leaves {home.name!r} on stage {self._route[hop]} with "
                    f"requires_grad={before} for micro-batch {earlier} and with {after} for "
                    f"micro-batch {m}, and backwards of earlier ones that come later find that "
                    f"({users_line()}): set it between steps, or use schedule='sequential'"
                )
