"""The note that a failure in a step gets: where in the step it was."""

import contextlib
from collections.abc import Sequence

from torch import Tensor

from ..._common.callsite import failing_line
from ..._common.nested import tensors
from ...batches.microbatch import Microbatch
from ...errors import BlockpipeError


def note_failure(
    error: BaseException, phase: str, microbatch: int, stage: int | None, overwritten: str = ""
) -> None:
    """Add a note to an error: the part of the step and the user's line where it was raised.

    Args:
        error: raised by the user's code, by torch, or by Blockpipe.
        phase: ``"forward"``, ``"backward"`` or ``"recomputation"``.
        microbatch: the micro-batch's index.
        stage: the stage; ``None`` if it is not known.
        overwritten: the arguments that the caller has written to since the forward.
    """
    where = "" if stage is None else f" on stage {stage}"
    remedy = ""
    if overwritten:
        remedy = (
            f"; {overwritten} was written to in place between the forward and this backward, which "
            "may need the values: run the backward before, or pass a copy (x.clone())"
        )
    elif phase == "recomputation" and not isinstance(error, BlockpipeError):
        remedy = (
            "; the same call succeeded in the forward, so its inputs or its Python state have "
            "changed since then (for a KV cache pass use_cache=False); exclude it from "
            "recomputation with checkpoint=False"
        )
    elif phase == "backward" and "modified by an inplace operation" in str(error):
        remedy = (
            "; forwards of other micro-batches run before this backward: if one of them writes in "
            "place to a value that it needs (a buffer), clone() the value before it is used, or "
            'pass schedule="sequential"'
        )
    with contextlib.suppress(Exception):  # an error of the user's own class may refuse notes
        error.add_note(
            f"blockpipe: in the {phase} of micro-batch {microbatch}{where}, "
            f"at {failing_line(error.__traceback__)}{remedy}"
        )


def named_arguments(batch: Microbatch, given: Sequence[Tensor]) -> str:
    """Return the names of the arguments of a micro-batch that have some tensors.

    Args:
        batch: the micro-batch.
        given: tensors among its arguments, or memory that several of those share.
    """
    ids = set(map(id, given))
    named = (*enumerate(batch.args), *batch.kwargs.items())
    names = [repr(name) for name, value in named if ids & set(map(id, tensors(value)))]
    return f"argument {', '.join(names) or 'memory'}" if ids else ""
