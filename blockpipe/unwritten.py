"""What several hops read and no forward may write: whether one did after all.

A recording sees one micro-batch. A forward that writes every fifth time, or where the data says so,
is found by the step in which it does.
"""

from collections.abc import Sequence

from torch import Tensor

from .crossing import version_of
from .errors import StateError
from .recording import Held


class Unwritten:
    """Parameters and buffers as they were when this was made.

    Args:
        found: what several hops read, and none wrote when the model was recorded.
    """

    def __init__(self, found: Sequence[tuple[Held, Tensor]]) -> None:
        self._states = [(held, tensor, _state_of(tensor)) for held, tensor in found]

    def check(self) -> None:
        """Raise :class:`StateError` for what was written since."""
        for held, tensor, then in self._states:
            if _state_of(tensor) != then:
                what = "buffer" if held.is_buffer else "parameter"
                raise StateError(
                    f"{what} {held.name!r} was written during the step, which it was not when it "
                    f"was recorded, and is read on hops {held.hops} ({held.where}): micro-batches "
                    "under way at once have mixed in it, and this step's gradients are not the "
                    "plain loop's; write it between steps, read and write it on one hop, or use "
                    "schedule='uncut'"
                )


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor was written to, and where its values are."""
    return version_of(tensor), tensor.data_ptr()
