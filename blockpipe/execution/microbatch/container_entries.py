"""Entries that a forward sets in an argument that holds tensors, such as a state in a list.

Each micro-batch has a copy of the argument, with its own samples, so what the forward sets there is
not in the caller's. That is an error as soon as it matters: when the next call is given the same
container, which a plain run would have changed.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import containers, members
from ..._torch.tensors import version_of
from ...errors import StateError

Entries = dict[str, Any]


class EntriesSet:
    """What the forwards of one step set in containers among their arguments."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()
        self._given: set[int] = set()  # the containers that micro-batches had, by id

    def before(self, given: Any) -> list[tuple[str, Any, Entries]]:
        """Return what the containers among a micro-batch's arguments hold."""
        before = [(path, held, _entries(held)) for path, held in _containers(given)]
        self._given.update(id(held) for _, held, _ in before)
        return before

    def after(self, before: list[tuple[str, Any, Entries]]) -> None:
        """Note what its forward, which is over, has set to something else."""
        for path, held, then in before:
            now = _entries(held)
            self._found.update((path, key) for key in then if now.get(key) is not then[key])

    def of_the_callers(self, given: Any) -> list[tuple[Any, str, Any, int]]:
        """Return the caller's containers in which these entries are as before: not those of which
        no copy was made.

        Args:
            given: the caller's arguments.

        Returns:
            Each with the key of the entry, its value, and the version of that.
        """
        found = list[tuple[Any, str, Any, int]]()
        for path, held in _containers(given) if self._found else ():
            for key, value in _entries(held).items() if id(held) not in self._given else ():
                if (path, key) in self._found:
                    found.append((held, key, value, _version(value)))
        return found


class PassedContainers:
    """The containers of a pipeline's latest call in which the forward has set entries."""

    def __init__(self) -> None:
        self._latest: list[tuple[Any, str, Any, int]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return PassedContainers, ()  # a copy of a pipeline has had no call

    def check(self, given: Any) -> None:
        """Refuse arguments with a container in which the last call's forward has set an entry.

        Args:
            given: the arguments of a call that begins.

        Raises:
            StateError: that entry is what it was before.
        """
        latest, self._latest = self._latest, []
        ids = {id(held) for _, held in _containers(given)} if latest else ()
        for held, key, value, version in latest:
            now = _entries(held).get(key) if id(held) in ids else None
            if now is value and _version(value) == version:
                raise StateError(
                    f"the forward of the call before has set {key} of an argument of type "
                    f"{type(held).__name__}, and this call is given the same one, which is as it "
                    f"was ({users_line()}): each micro-batch has a copy with its own samples; "
                    "return the new value and put it there between calls, or pass a new container"
                )

    def note(self, given: Any, entries: EntriesSet) -> None:
        """Keep what :meth:`check` looks for in the next call."""
        self._latest = entries.of_the_callers(given)


def _containers(given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the containers in nested arguments that a forward can change, and their places."""
    return ((at, held) for at, held in containers(given, "") if not isinstance(held, tuple))


def _entries(held: Any) -> Entries:
    return dict(members(held) or ())


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0
