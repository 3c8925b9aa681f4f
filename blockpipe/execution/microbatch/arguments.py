"""A micro-batch's arguments and target, on their way to the stages that read them."""

from typing import Any

from torch import Tensor

from ..._common.nested import leaves, map_leaves, map_tensors
from ...batches.microbatch import Microbatch
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import TAG, Tag
from ...devices.copies import PendingCopy
from ..step_state import StepState


class MicrobatchArguments:
    """Hands the arguments of one step's micro-batches to their runs.

    Args:
        state: of the step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._route = state.request.prepared.route

    def take(self, run: MicrobatchRun, batch: Microbatch) -> tuple[Any, Any, Any]:
        """Return the arguments and keyword arguments as the run has them, and the target, whose
        copies to the last hop have begun (:meth:`received`)."""
        needs_grad = self._state.inputs_need_grad
        given: Any = (batch.args, batch.kwargs)
        positions = _positions_of_grad(given) if needs_grad else {}
        memo = self._state.shared_arguments.taken(run, batch, positions)

        shared, whole = set(memo), self._state.whole_arguments

        def taken(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                if not whole.is_given(batch, tensor):
                    return tensor
                memo[id(tensor)] = run.take_input(tensor, positions.get(id(tensor), 0))
            return memo[id(tensor)]

        args = map_tensors(taken, batch.args)
        kwargs = map_tensors(taken, batch.kwargs) if batch.kwargs else batch.kwargs
        last = len(self._route) - 1

        def sent(tensor: Tensor) -> Tensor | PendingCopy:
            if id(tensor) in shared:
                return memo[id(tensor)]
            if needs_grad and tensor.requires_grad:
                return tensor  # its gradient leaves from the hop that the loss is on
            watch = self._state.watch(tensor, last, run.microbatch)
            return self._state.context.lend(tensor, self._route[last], watch)

        return args, kwargs, map_tensors(sent, batch.target)

    def received(self, run: MicrobatchRun, batch: Microbatch, target: Any) -> Any:
        """Return the target on the last hop, which waits for it no earlier than it is read."""
        last = len(self._route) - 1
        positions: dict[int, int] = {}
        if self._state.inputs_need_grad:
            first = len(list(leaves((batch.args, batch.kwargs))))
            positions = _positions_of_grad(target, first)
        memo: dict[int, Tensor] = {}

        def received(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if run.has_made(leaf):
                    return leaf  # taken with the arguments, whose memory it shares
                if id(leaf) not in memo:
                    memo[id(leaf)] = run.take_input(leaf, positions[id(leaf)])
                return memo[id(leaf)]
            if not isinstance(leaf, PendingCopy):
                return leaf
            value = run.receive(last, leaf)
            value = run.slices.take(value, value, watches=False)  # a loss may write to it
            setattr(value, TAG, Tag(run.key, last, self._route[last]))
            return value

        return map_leaves(received, target)


def _positions_of_grad(given: Any, first: int = 0) -> dict[int, int]:
    """From the ``id`` of each input that needs grad to its place among the leaves.

    Args:
        given: the inputs.
        first: the number of the first leaf.
    """
    found: dict[int, int] = {}
    for index, leaf in enumerate(leaves(given), first):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            found.setdefault(id(leaf), index)
    return found
