"""The stages whose activations are in host memory between forward and backward."""

from typing import Literal

from .._common.callsite import users_line
from ..errors import PlanError
from ..recording.recording import Recording


def offloaded_stages(
    recording: Recording, offload: frozenset[int] | Literal[True]
) -> frozenset[int]:
    """Return the stages that the option names.

    Raises:
        PlanError: one of them is beyond the last one, or the model does not allow it.
    """
    stages = frozenset(range(recording.num_stages)) if offload is True else offload
    if not stages:
        return stages
    beyond = sorted(stage for stage in stages if stage >= recording.num_stages)
    if beyond:
        raise PlanError(
            f"expected stages from 0 to {recording.num_stages - 1} for offload, got {beyond} "
            f"({users_line()}); name some of these, or pass offload=True"
        )
    if recording.unhookable:
        raise PlanError(
            "offload hooks into what autograd saves, which torch.func does not allow, and "
            f"{recording.unhookable} use it ({users_line()}); pass offload=False, or checkpoint= "
            "instead"
        )
    return stages
