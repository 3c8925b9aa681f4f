"""Values of parameters and buffers that backwards need as their own forward has left them.

A forward may write to a weight through ``.data``, which counts no version, and still leave the
same values: a constraint (``clamp_``, ``renorm``) changes them once after the optimizer's step. So
each step compares the values before each backward with those at the end of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor

from ..._common.modules import named_slots
from ..._torch.modules import buffers_of, parameters_of
from ...devices.digests import Comparisons
from ...errors import StateError
from ...preparation.prepared import Prepared
from ...recording.entries import LateBackward


class KeptValues:
    """Compares such values in one step.

    Args:
        prepared: the prepared model.
        late: what its recording tells of them; the schedule has such a backward too late.
        comparisons: of the step.
    """

    def __init__(
        self, prepared: Prepared, late: Collection[LateBackward], comparisons: Comparisons
    ) -> None:
        model = prepared.model
        held = dict((*named_slots(model, parameters_of), *named_slots(model, buffers_of)))
        self._late: dict[int, list[tuple[LateBackward, Tensor]]] = {}  # by hop
        for one in late:
            for hop in one.backwards:
                if one.compared in held:
                    self._late.setdefault(hop, []).append((one, held[one.compared]))
        self._comparisons = comparisons
        self._digests: dict[tuple[int, int, int], Tensor | None] = {}

    def left(self, hop: int, m: int) -> None:
        """Note the values at the end of a forward on a hop, where the next one has not begun."""
        for index, (_, tensor) in enumerate(self._late.get(hop, ())):
            self._digests[hop, m, index] = self._comparisons.digest(tensor.detach())

    def needed(self, hop: int, m: int) -> None:
        """Compare the values where a backward on a hop is about to begin.

        Raises:
            StateError: they are other ones.
        """
        for index, (late, tensor) in enumerate(self._late.get(hop, ())):
            then = self._digests.pop((hop, m, index), None)
            now = self._comparisons.digest(tensor.detach())
            error: Callable[[], StateError] = partial(_differs, late, m)
            if then is None or now is None:
                raise error()
            self._comparisons.compare(then, now, error)

    def conclude(self) -> None:
        """Read the comparisons that are pending at the end of the step.

        Raises:
            StateError: values of one of them differ.
        """
        self._comparisons.conclude()


def _differs(late: LateBackward, m: int) -> StateError:
    return StateError(
        f"{late.what}, and the backward of an earlier micro-batch {late.needs}: when the backward "
        f"of micro-batch {m} came, a later forward had written other values; {late.remedy}, or use "
        "schedule='sequential'"
    )
