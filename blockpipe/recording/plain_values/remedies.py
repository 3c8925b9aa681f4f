"""What to do about a plain value that cannot be shared."""

from collections.abc import Collection

OF_FORWARD = "pass it along as an argument"
OF_LOSS = (
    "return it with the output, or keep one for each micro-batch, in a dictionary with "
    "current_microbatch() as its key"
)
OF_TENSOR = (
    "the next micro-batch begins before it is set: set it inside the block of the stage that reads "
    "it, in an attribute, or an entry of a dictionary, for each stage"
)
OF_OTHERS_TENSOR = (
    "the next micro-batch begins before it is set: read it on the stage that makes it, or pass it "
    "to the next step as an argument"
)
_OF_BACKWARDS = "keep one for each stage, set it between steps"
OF_VARIABLE = "count in an attribute of the model: each micro-batch has a context of its own"
OF_ORDER = (
    "other micro-batches come in between, so that these updates have another order than the plain "
    "loop's: keep a value for each call"
)
OF_UPDATE = (
    "another stage may come in between the read and the write, and its update is lost: compute "
    "first what is added, in a statement of its own, and keep the value in a dictionary or in an "
    "object of your own (a module's attributes are set by a function), or keep one for each stage"
)
OF_CHECKPOINT = (
    "torch.utils.checkpoint runs its function again in the backward: set the value outside of "
    "that function, and pass it to it as an argument"
)
OF_GENERATOR = "give each stage a generator of its own, or draw the numbers before the forward"
OF_ARRAY = "the tensor that is made of it shares its memory: make a copy (torch.tensor)"


def remedy_for(seen: Collection[int], *, again: bool, in_loss: bool) -> str:
    """Return the remedy for a value that one hop sets and another one reads.

    Args:
        seen: the hops that do so, of backwards as negative numbers.
        again: whether a checkpoint sets it again.
        in_loss: whether the loss reads it.
    """
    if again:
        return OF_CHECKPOINT
    if max(seen) < 0:
        return _OF_BACKWARDS
    if min(seen) < 0:
        return "set it between steps"
    return OF_LOSS if in_loss else OF_FORWARD
