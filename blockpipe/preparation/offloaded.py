"""The stages whose activations are in host memory between forward and backward, and what stays."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import torch

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


def staying_bytes(recording: Recording, devices: Sequence[torch.device]) -> Counter[int]:
    """Return, by hop, the bytes of a micro-batch that no offload takes away before its backward:
    its inputs, counted on the first hop, and what came from other devices or goes there, as no
    stream of a device waits for another device's copy.

    Args:
        recording: the recording.
        devices: the stages' devices.
    """
    found = Counter({0: recording.input_bytes})
    sent = defaultdict[int, Counter[int]](Counter)  # what several stages get is one tensor here
    for crossing in recording.crossings:
        if crossing.what is None and devices[crossing.from_stage] != devices[crossing.to_stage]:
            found[crossing.to_hop] += crossing.bytes
            sent[crossing.from_hop][crossing.to_stage] += crossing.bytes
    for hop, by_stage in sent.items():
        found[hop] += max(by_stage.values())
    return found
