"""Arguments that go whole to every micro-batch, and a forward that writes to one in place.

The plain loop hands the written tensor to the next micro-batch, and the caller keeps it. Here a
stage may have a copy, and micro-batches are under way at once. So either the write reaches the
caller's memory while no other micro-batch reads it, or it is an error.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import members, tensors
from ..._torch.tensors import version_of
from ...batches.microbatch import Microbatch
from ...crossing.tags import TAG, Tag
from ...errors import StateError
from .container_entries import Entries, EntriesSet


class Taken(NamedTuple):
    """What a micro-batch's forward has of the whole arguments.

    Attributes:
        tensors: each as it was given, as the forward has it, the version of that, and on how many
            hops more there are views of it.
        containers: the copies of containers, each with what it holds.
        entries: those of all containers.
    """

    tensors: list[tuple[Tensor, Tensor, int, int]]
    containers: list[tuple[Any, list[int]]]
    entries: list[tuple[str, Any, Entries]]


class WholeArguments:
    """The whole arguments of one step.

    Args:
        microbatches: the step's micro-batches.
        viewed: the positions of the arguments of which views cross to other hops.
        one_by_one: whether each is done before the next begins, and no copy is still being made.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], *, viewed: Container[int], one_by_one: bool
    ) -> None:
        self._given = {id(m): {id(t) for t in tensors((m.args, m.kwargs))} for m in microbatches}
        given = [*self._given.values()][:2]
        self._ids = given[0] & given[1] if len(given) > 1 else set()
        held = [{id(c) for c in _containers(_arguments(m))} for m in microbatches[:2]]
        self._containers = held[0] & held[1] if len(held) > 1 else set()
        self._one_by_one, self._viewed = one_by_one, viewed
        self.entries_set = EntriesSet()
        first = _arguments(microbatches[0])
        self._has_containers = any(members(given) is not None for given in first)

    def is_given(self, batch: Microbatch, tensor: Tensor) -> bool:
        """Return whether a tensor was among a micro-batch's arguments when the step began. Another
        forward may have put one into a list that all of them are given."""
        return id(tensor) in self._given[id(batch)]

    def taken(self, batch: Microbatch, args: Any, kwargs: Any) -> Taken:
        """Note a micro-batch's whole arguments, for :meth:`check` when its forward is over."""
        given = *args, *kwargs.values()
        entries = self.entries_set.before(given) if self._has_containers else []
        copies = list[tuple[Any, list[int]]]()
        if self._containers:
            found = _copied(_arguments(batch), given, self._containers)
            copies = [(held, _held_by(held)) for held in found]
        if not self._ids:
            return Taken([], copies, entries)
        pairs = zip(tensors((batch.args, batch.kwargs)), tensors((args, kwargs)), strict=True)
        of_whole = [
            (g, t, version_of(t), int(at in self._viewed))
            for at, (g, t) in enumerate(pairs)
            if id(g) in self._ids
        ]
        return Taken(of_whole, copies, entries)

    def check(self, taken: Taken) -> None:
        """Check what a micro-batch's forward, which is over, has written to.

        Raises:
            StateError: it wrote to an argument in a way that other micro-batches, or the caller,
                do not see.
        """
        self.entries_set.after(taken.entries)
        for copied, held in taken.containers:
            if _held_by(copied) != held:
                raise StateError(
                    f"an argument of type {type(copied).__name__} that holds tensors goes to every "
                    f"micro-batch, and the forward changes what it holds ({users_line()}): each "
                    "micro-batch has a copy, and neither the others nor the caller see it; keep it "
                    "on the model, or return the new value"
                )
        for given, value, version, viewed in taken.tensors:
            tag: Tag | None = getattr(value, TAG, None)
            newest, hops = value, 1 + viewed
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


def _arguments(batch: Microbatch) -> tuple[Any, ...]:
    """Return the arguments that a forward is called with: the mapping of those by name is unpacked
    for each call."""
    return *batch.args, *batch.kwargs.values()


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists and mappings in a nested value that a forward can change."""
    if isinstance(value, list | tuple | Mapping):
        if not isinstance(value, tuple):
            yield value
        for member in value.values() if isinstance(value, Mapping) else value:
            if not isinstance(member, Tensor):
                yield from _containers(member)


def _copied(given: Any, taken: Any, among: set[int]) -> Iterator[Any]:
    """Yield the copies that were taken in the place of some containers."""
    if given is taken or not isinstance(given, list | tuple | Mapping):
        return
    if id(given) in among:
        yield taken
    keys = given.keys() if isinstance(given, Mapping) else range(len(given))
    for key in keys:
        yield from _copied(given[key], taken[key], among)


def _held_by(container: Any) -> list[int]:
    members = container.values() if isinstance(container, Mapping) else container
    return [*map(id, members)]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.data_ptr() == other.data_ptr() and one.device == other.device
