"""Arguments that go whole to every micro-batch, and a forward that writes to one in place.

The plain loop hands the written tensor to the next micro-batch, and the caller keeps it. Here a
stage may have a copy, and micro-batches are under way at once. So either the write reaches the
caller's memory while no other micro-batch reads it, or it is an error.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._torch.tensors import version_of
from ...batches.microbatch import Microbatch
from ...crossing.tags import TAG, Tag
from ...errors import StateError

# Of each argument: as it was given, as the forward has it, and the version of that.
ReadCopies = list[tuple[Tensor, Tensor, int]]


class WholeArguments:
    """The whole arguments of one step.

    Args:
        microbatches: the step's micro-batches.
        one_by_one: whether each is done before the next begins, and no copy is still being made.
    """

    def __init__(self, microbatches: Sequence[Microbatch], *, one_by_one: bool) -> None:
        given = [{id(t) for t in tensors((m.args, m.kwargs))} for m in microbatches[:2]]
        self._ids = given[0] & given[1] if len(given) > 1 else set()
        self._one_by_one = one_by_one

    def taken(self, batch: Microbatch, args: Any, kwargs: Any) -> ReadCopies:
        """Note a micro-batch's whole arguments, for :meth:`check` when its forward is over."""
        if not self._ids:
            return []
        pairs = zip(tensors((batch.args, batch.kwargs)), tensors((args, kwargs)), strict=True)
        return [(g, t, version_of(t)) for g, t in pairs if id(g) in self._ids]

    def check(self, taken: ReadCopies) -> None:
        """Check what a micro-batch's forward, which is over, has written to.

        Raises:
            StateError: it wrote to an argument in a way that other micro-batches, or the caller,
                do not see.
        """
        for given, value, version in taken:
            tag: Tag | None = getattr(value, TAG, None)
            newest, hops = value, 1
            if tag is not None:
                hops += len(tag.imports or ())
                newest = tag.newest if tag.newest is not None else value
            if newest is value and version_of(value) == version:
                continue
            is_the_callers = _same_memory(newest, given)
            if is_the_callers and (self._one_by_one or hops == 1):
                continue
            why = (
                f"{hops} hops have it, and micro-batches under way at once would mix in it"
                if is_the_callers
                else f"this one wrote to a copy on {newest.device}, which no other one sees"
            )
            raise StateError(
                f"an argument of shape {tuple(given.shape)} goes whole to every micro-batch, and "
                f"the forward writes to it in place: {why} ({users_line()}); make it a buffer of "
                f"the stage that writes it, or return the new value"
            )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.data_ptr() == other.data_ptr() and one.device == other.device
