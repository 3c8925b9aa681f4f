"""What classes have themselves, where something of ours stands in for it while steps run.

Another thread may look at a class meanwhile, for a step of a pipeline of its own.
"""

from typing import Any

ABSENT: Any = object()
"""Stands for a member that a class does not have itself."""

_standing_in: dict[int, Any] = {}  # by the id of what stands there, which is alive


def stand_in(ours: object, own: Any) -> None:
    """Note that something of ours is about to stand in a class.

    Args:
        ours: what will stand there.
        own: what the class has itself; ``ABSENT``: nothing.
    """
    _standing_in[id(ours)] = own


def stands_no_more(ours: object) -> None:
    """Note that it does not stand there any more."""
    _standing_in.pop(id(ours), None)


def own_member(found: Any) -> Any:
    """Return what a class has itself, given what it has now; ``ABSENT``: nothing."""
    return _standing_in.get(id(found), found)
