"""Write down the tensors that a forward shares with code which a recording does not run: hooks, the
loss, and branches that were not taken."""

from __future__ import annotations

from ...entries import TensorInfo
from ...recording import Recording
from .missed_tensors import MissedTensors
from .tensor_uses import ForwardsTensors, TensorUses
from .untaken_branches import UntakenBranches


def note_shared_tensors(
    result: Recording,
    forward: ForwardsTensors,
    beside: TensorUses,
    missed: MissedTensors,
    untaken: UntakenBranches,
) -> None:
    """Write down in a recording which tensors are shared.

    Args:
        result: the recording.
        forward: tells what the forward does with tensors.
        beside: what hooks and the loss do.
        missed: what branches do that other data lead to.
        untaken: what branches do that were not taken, whatever leads to them.
    """
    in_branches = missed.uses(forward)
    result.read_by_loss |= dict.fromkeys(beside.read_by_loss(forward))
    result.late_backwards += beside.written_late(forward, in_branches)
    result.shared_changes += beside.shared(forward, in_branches)
    result.shared_changes += (found := [*missed.shared(forward)])
    result.may_write, result.may_rerun = forward.by_name(untaken.writes()), untaken.reruns
    result.written_beside = forward.by_name(beside.writes())
    for used in in_branches.values():
        info = forward.told(used.owner)[1]
        if isinstance(info, TensorInfo):
            result.may_use.setdefault(info.name, set()).update(used.read_on | used.set_on)
    if not found:
        by_size = missed.shared_by_size(forward)
        result.turns_by_size = result.turns_by_size or by_size
