"""Arguments of one micro-batch that share memory with each other, or with its target, and a forward
that writes to one in place.

Where the recorded forward writes to its arguments, those that overlap are taken to the first stage
as views of one copy, and so is a target that overlaps with them: it crosses from there to the loss
like any tensor, as the forward left it. Where it does not, each goes by itself to the stage that
reads it, and a write is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._torch.tensors import memory_of, version_of
from ...batches.microbatch import Microbatch
from ...batches.shared_memory import SharedMemory, shared_memories
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import was_written
from ...errors import StateError

# Of each argument that shares memory: as the forward has it, and the version of that.
Versions = list[tuple[Tensor, int]]


class SharedArguments:
    """The arguments of one step that share memory.

    Args:
        microbatches: the step's micro-batches.
        are_written: whether the recorded forward writes to its arguments.
    """

    def __init__(self, microbatches: Sequence[Microbatch], *, are_written: bool) -> None:
        first = microbatches[0]
        given = {id(t): memory_of(t) for t in tensors((first.args, first.kwargs))}
        targets = {id(t): memory_of(t) for t in tensors(first.target)}
        memories = [*given.values(), *targets.values()]
        self._are_some = len(set(memories)) < len(memories)
        self._are_written = are_written
        second = microbatches[1].target if len(microbatches) > 1 else None
        self._whole = targets.keys() & {id(t) for t in tensors(second)}

    def taken(
        self, run: MicrobatchRun, batch: Microbatch, positions: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Return arguments and targets that overlap, as the run has them, by their ids.

        Args:
            run: the micro-batch's run.
            batch: the micro-batch.
            positions: the places of arguments that need grad, by their ids.

        Raises:
            StateError: they overlap in a way in which no copy can be made of them together.
        """
        made: dict[int, Tensor] = {}
        if self._are_some and self._are_written:
            for shared in _shared(batch):
                self._check(shared)
                memory = run.take_memory(shared.span)
                for tensor in shared.members:
                    if id(tensor) not in made:
                        part = shared.view(memory, tensor)
                        made[id(tensor)] = run.take_part(tensor, part, positions.get(id(tensor), 0))
        return made

    def _check(self, shared: SharedMemory) -> None:
        if not shared.is_of_one_kind:
            raise _error(shared.members, "as other dtypes or kinds of tensors")
        if any(id(tensor) in self._whole for tensor in shared.members):
            raise _error(shared.members, "and every micro-batch gets the whole of the target")

    def versions(self, batch: Microbatch, args: object) -> Versions:
        """Note a micro-batch's arguments as its run has them, for :meth:`check` when its forward is
        over."""
        if not self._are_some or self._are_written or not _shared(batch):
            return []
        return [(tensor, version_of(tensor)) for tensor in tensors(args)]

    def check(self, batch: Microbatch, versions: Versions) -> None:
        """Check that a forward which did not write to its arguments when it was recorded has not
        done so now, where another argument or the target would miss it.

        Raises:
            StateError: it has.
        """
        if any(was_written(tensor, version) for tensor, version in versions):
            raise _error(
                _shared(batch)[0].members,
                "which the recorded forward did not: give Pipeline a sample that takes this way",
            )


def _shared(batch: Microbatch) -> list[SharedMemory]:
    """Return what overlaps in a micro-batch: an argument that is the target too does so with
    itself."""
    given = {id(t): t for t in tensors((batch.args, batch.kwargs))}
    targets = {id(t): t for t in tensors(batch.target)}
    return shared_memories(chain(given.values(), targets.values()))


def _error(members: list[Tensor], why: str) -> StateError:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in members)
    return StateError(
        f"arguments of the shapes {shapes} (the target counts as one) share memory, and the "
        f"forward writes to its arguments in place, {why} ({users_line()}); clone() one of them, "
        "or clone() the argument in the forward before it is written"
    )
