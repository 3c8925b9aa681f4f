"""What the user's code has set on a tensor (``h.scale = 2.``), for its copies to have as well.

In the glue the user's own tensor is at hand, whatever an operation is given in its place. A sealed
module is given the copy itself, and asks that.
"""

from collections.abc import Collection

from torch import Tensor

_OURS = "_blockpipe_"
_NONE: frozenset[str] = frozenset()


def class_attributes(tensor: Tensor) -> Collection[str]:
    """Return the names that a new tensor of this class has; a subclass keeps its own state
    there."""
    return _NONE if type(tensor) is Tensor else frozenset(tensor.__dict__)


def share_attributes(source: Tensor, target: Tensor, besides: Collection[str] = ()) -> None:
    """Set on one tensor what the user's code has set on another.

    Args:
        source: has them.
        target: gets them.
        besides: names that are the class's.
    """
    found = source.__dict__
    if not found or (len(found) == 1 and next(iter(found)).startswith(_OURS)):
        return  # as nearly always: this is on the way of every crossing
    own = target.__dict__
    for name, value in found.items():
        if name not in besides and not name.startswith(_OURS):
            own[name] = value
