"""The note that a failure in a step gets: where in the step it was."""

import contextlib

from ..._common.callsite import failing_line
from ...errors import BlockpipeError


def note_failure(error: BaseException, phase: str, microbatch: int, stage: int | None) -> None:
    """Add a note to an error: the part of the step and the user's line where it was raised.

    Args:
        error: raised by the user's code, by torch, or by Blockpipe.
        phase: ``"forward"``, ``"backward"`` or ``"recomputation"``.
        microbatch: the micro-batch's index.
        stage: the stage; ``None`` if it is not known.
    """
    where = "" if stage is None else f" on stage {stage}"
    remedy = ""
    if phase == "recomputation" and not isinstance(error, BlockpipeError):
        remedy = (
            "; the same call succeeded in the forward, so its inputs or its Python state have "
            "changed since then (for a KV cache pass use_cache=False); exclude it from "
            "recomputation with checkpoint=False"
        )
    if phase == "backward" and "modified by an inplace operation" in str(error):
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
