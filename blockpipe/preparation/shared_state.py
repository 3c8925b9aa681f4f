"""State that micro-batches under way at once must not share: what a forward changes, generators."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._torch.tensors import FakeTensor, extent_of, overlapping
from ..batches.losses import kind_of
from ..errors import StateError
from ..recording.calls import Call
from ..recording.entries import OutsideTensor, SharedChange, TensorInfo
from ..recording.outside.code_beside import changes_others
from ..recording.plain_values.still_code import uses_state
from ..recording.recording import Recording
from ..recording.sealing import MAY_READ
from ..schedules.builders import ScheduleOption
from .watched.sorts import sort_of


def check_shared_state(recording: Recording, schedule: ScheduleOption) -> None:
    """Raise :class:`StateError` for state, or a generator, that the hops would not read, write or
    draw from in the plain loop's order."""
    for drawn in recording.shared_generators:
        if schedule not in ("uncut", "sequential"):
            raise StateError(
                f"a torch.Generator is {drawn.how} on hops {drawn.hops} ({drawn.where}): which "
                "micro-batch gets which numbers would depend on timing; give each stage a "
                "generator of its own, draw from torch's global one, or use "
                "schedule='sequential'"
            )
    for held in recording.shared_state:
        on = [held.stage, *held.also_read_on]
        if schedule == "uncut" or (schedule == "sequential" and len(on) == 1):
            continue
        schedules = "'sequential'" if len(on) == 1 else "'uncut'"
        what = "buffer" if held.is_buffer else "parameter"
        stages = sorted({*on, *(recording.route[hop] for hop in held.hops)})
        view, remedy = "", "read and write it on one hop"
        if held.view_read:
            view = f", a view of it at {held.view_read}"
            remedy = f"let view.clone() cross, {remedy}"
        raise StateError(
            f"{what} {held.name!r} is written by the forward and read on hops {held.hops} "
            f"(stages {stages}; {held.where}{view}): micro-batches under way at once would mix in "
            f"it; {remedy}, or use schedule={schedules}"
        )
    if schedule not in ("uncut", "sequential"):
        check_changes(recording.shared_changes)


def check_changes(shared_changes: Iterable[SharedChange]) -> None:
    """Raise :class:`StateError` for changes that hops see of each other, if there are any."""
    for shared in shared_changes:
        raise StateError(
            f"the forward changes {shared.what}, and {shared.seen} on hops {shared.hops} "
            f"({shared.where}): micro-batches 0 and 1, under way at once, would change it for "
            f"each other; {shared.remedy}, or use schedule={shared.schedule!r}"
        )


def check_shared_memory(model: nn.Module, recording: Recording, schedule: ScheduleOption) -> None:
    """Raise :class:`StateError` for tensors of one memory, which are several objects, if the
    forward writes to one and they are read on several hops."""
    if schedule in ("uncut", "sequential"):
        return
    for together in of_one_memory(model, recording):
        hops = sorted({hop for info in together for hop in info.hops})
        written = next((info for info in together if info.written), None)
        if written is None or len(hops) < 2:
            continue
        other = next(info for info in together if info is not written)
        raise StateError(
            f"{named(written)} and {named(other)} have the same memory, which the forward writes "
            f"to, and which hops {hops} use ({written.where}): micro-batches 0 and 1, under way at "
            "once, would change it for each other; give one of them a memory of its own "
            "(tensor.clone()), or use schedule='sequential'"
        )


_MOST_SORTS = 16  # of one function's code

Info = TensorInfo | OutsideTensor
_Place = tuple[int, int, Info]  # its first address, the one after its last, and what is there


def of_one_memory(model: nn.Module, recording: Recording) -> Iterator[list[Info]]:
    """Yield the groups of tensors that hops use and that lie in each other's memory."""
    by_device = defaultdict[str, list[_Place]](list)
    for device, place in _places_of(model, recording):
        by_device[device].append(place)
    return itertools.chain.from_iterable(map(overlapping, by_device.values()))


def named(info: Info) -> str:
    """Return a tensor's name, or a description of it."""
    return info.name if isinstance(info, OutsideTensor) else repr(info.name)


def _places_of(model: nn.Module, recording: Recording) -> Iterator[tuple[str, _Place]]:
    """Yield the device and the place of each tensor that hops use, as far as they are known."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held.update(model.named_buffers(remove_duplicate=False))
    for info in (*recording.parameters, *recording.buffers):
        if info.hops and (tensor := held.get(info.name)) is not None:
            yield from _place_of(tensor, info)
    for outside in recording.outside:
        if outside.tensor is not None and (tensor := outside.tensor()) is not None:
            yield from _place_of(tensor, outside)


def _place_of(tensor: Tensor, info: Info) -> list[tuple[str, _Place]]:
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    if not is_plain or isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return []
    (begin, end), first = extent_of(tensor), tensor.data_ptr()
    return [(str(tensor.device), (first, first + end - begin, info))]


class CodeKinds:
    """Tells apart the functions beside a forward, such as losses, that may share values with it."""

    def __init__(self) -> None:
        self._uses_state: dict[Any, bool] = {}  # by kind
        self._sorts: dict[Any, set[Any]] = {}  # by the kind of its code

    def known(self, *functions: Callable[..., Any] | None) -> tuple[Any, ...]:
        """Return what each function is known by; ``None`` for one that shares nothing."""
        return tuple(
            None if function is None else self._known_by(function) for function in functions
        )

    def sorts(self, objects: Iterable[Any]) -> tuple[Any, ...]:
        """Return the sorts of objects whose code runs in the forward, such as the user's modes."""
        return tuple(map(self._sort_of, objects))

    def _known_by(self, function: Callable[..., Any]) -> Any:
        kind = kind_of(function), self._sort_of(function)
        if kind not in self._uses_state:
            self._uses_state[kind] = uses_state(function) or changes_others(function)
        return kind if self._uses_state[kind] else None

    def _sort_of(self, held: Any) -> Any:
        """Return the sort of an object; one that has something else in each step has none any
        more."""
        sorts = self._sorts.setdefault(kind_of(held), set())
        if len(sorts) >= _MOST_SORTS:
            return None
        sorts.add(sort := sort_of(held))
        return sort


def shared_by_copies(recordings: Sequence[Recording]) -> str | None:
    """Return a state, in words, that the forwards of a model's copies change and have in common;
    ``None``: there is none.

    Args:
        recordings: of each copy. An object that is in two of them was not copied.
    """
    first, *others = recordings
    if first.switches:
        return "switches of torch or of the process"
    if first.writes_inputs:
        return "arguments of the call"
    for key, what in first.sets.items():
        if all(key in other.sets for other in others):
            return what
    # A tensor that a step has written to may be none of the outside in a later recording.
    written = (o for recording in recordings for o in recording.outside if o.written)
    return next((f"{outside.name} ({outside.where})" for outside in written), None)


def check_loss_of_copies(recording: Recording, has_own: Callable[[int], bool]) -> None:
    """Check that a loss does not read what the forward leaves on the model: each copy's forward
    leaves it on the copy, of which the loss knows nothing.

    Args:
        recording: of the model.
        has_own: whether each copy has an object for itself, by the id of the model's.

    Raises:
        StateError: it reads that.
    """
    read = recording.read_by_loss.items()
    found = [what for what, owner in read if owner is None or has_own(owner)]
    if found:
        raise StateError(
            "expected a loss that reads its arguments, got one that reads what the forward sets: "
            f"{', '.join(found)}; each copy has its own, and the loss would read the first one's "
            f"({users_line()}); return it with the output, set the gradients to None, and repeat "
            "the step"
        )


def opened_since(before: Recording, now: Recording) -> Call | None:
    """Return a call that a later recording of the model has found to read more of other stages than
    its arguments, where a step by the earlier one has let it run sealed; ``None``: there is none.

    What the two take in their forwards may differ, because data or random numbers choose it: a step
    notices by itself what crosses in code that is not sealed, and another route.
    """
    for call in now.calls:
        if call.opened == MAY_READ or call.is_left_on_its_stage:  # in another forward
            continue
        known = before.sealed_functions if call.is_function else before.sealed
        # On other hops it may have been open before: a router that two stages share.
        if not call.sealed and not known.get(call.path, frozenset()).isdisjoint(call.hops):
            return call
    return None
