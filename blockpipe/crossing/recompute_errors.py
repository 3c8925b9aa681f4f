"""What a user is told of a recomputation that does not do what the forward did."""

from ..errors import BlockpipeError, StateError

_CAUSES = "state of its own, a cache that it was given, a generator of its own"
_REMEDIES = (
    "leave a cache out that the forward fills (use_cache=False in transformers), ask "
    "blockpipe.is_recomputing() there, or mark it with checkpoint=False"
)


def differs(
    what: str, stage: int, microbatch: int, index: int, count: int, then: str, now: str
) -> StateError:
    """Return the error about a call that saved something else than in its forward.

    Args:
        what: the call.
        stage: where it runs.
        microbatch: the index of its micro-batch.
        index: the number of the tensor that it saved.
        count: how many it saved in its forward.
        then: what it saved there.
        now: what it has saved.
    """
    return StateError(
        f"{what} on stage {stage} saved {then} (number {index} of {count}) in its forward, and "
        f"{now} when it was recomputed for micro-batch {microbatch}: it depends on something that "
        f"has changed ({_CAUSES}); {_REMEDIES}"
    )


def note_that_it_ran_before(error: Exception, what: str, stage: int, microbatch: int) -> None:
    """Add to an error of a recomputation that the same call has gone through in the forward.

    The error stays the user's: a handler of it, or of memory that has run out, still finds it.
    """
    if not isinstance(error, BlockpipeError):
        error.add_note(
            f"{what} on stage {stage} raised this when it was recomputed for micro-batch "
            f"{microbatch}, and not in its forward: maybe it depends on something that has changed "
            f"({_CAUSES}); then {_REMEDIES}"
        )
