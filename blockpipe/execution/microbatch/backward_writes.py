"""State of the forward that a backward writes: in a hook, or in a function that
``torch.utils.checkpoint`` runs again; and parameters that such code, or the loss, writes unseen.

In the plain loop the next micro-batch's forward comes after it. Where several are under way, that
one may be over already, so that a running mean would take another course, without a word.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.modules import all_slots
from ..._common.threads.thread_state import ours
from ..._torch.modules import buffers_of, parameters_of
from ..._torch.tensors import memory_of, version_of
from ...costs.meter import Meter
from ...errors import StateError
from ...preparation.prepared import Prepared
from ...schedules.schedule import Action, Schedule

_Look = Callable[[], Tensor | None]


class BackwardWrites:
    """Looks at the backwards of one step.

    Only at what one lane reads: the forwards of other lanes may be writing meanwhile.

    Args:
        prepared: the prepared model, whose recording says what forwards read.
        schedule: of the step.
        is_first: whether to look at writes that no version counts, too, which takes longer.
    """

    def __init__(self, prepared: Prepared, schedule: Schedule, *, is_first: bool = True) -> None:
        self._parameters = ParameterWrites(prepared, schedule)
        self._code_on = prepared.recording.code_in_backward if is_first else set[int]()
        self._lane_of_hop = prepared.lane_of_hop
        self._read: dict[int, list[tuple[str, str, _Look]]] = {}  # by lane: name, line, tensor
        reads: list[tuple[list[int], str, str, _Look]] = []
        recording = prepared.recording
        held = {name: found for found in recording.buffers for name in found.names}
        deferred = {} if prepared.batch_norm is None else prepared.batch_norm.modules
        for name, slots, key, _ in all_slots(prepared.model, buffers_of):
            if name in held and name.rpartition(".")[0] not in deferred:
                look, info = _in_slot(slots, key), held[name]
                hops = info.hops or [*recording.may_use.get(info.name, ())]
                reads.append((hops, f"buffer {name!r}", info.where, look))
        for outside in recording.outside:
            if outside.tensor is not None:
                reads.append((outside.hops, outside.name, outside.where, outside.tensor))
        held = {name: found for found in recording.parameters for name in found.names}
        for name, slots, key, _ in all_slots(prepared.model, parameters_of):
            if name in held and held[name].hops:
                look = _in_slot(slots, key)
                reads.append((held[name].hops, f"parameter {name!r}", held[name].where, look))
        lanes_of: dict[object, set[int]] = {}  # views of one memory have one version
        for hops, _, _, look in reads:
            lanes = {self._lane_of_hop[hop] for hop in hops}
            lanes_of.setdefault(_memory(look()), set()).update(lanes)
        for _, what, where, look in reads:
            lanes = lanes_of[_memory(look())]
            if len(lanes) == 1:
                self._read.setdefault(min(lanes), []).append((what, where, look))

    @contextmanager
    def checked(self, action: Action) -> Iterator[None]:
        """Check what the backward that runs while entered has written.

        Raises:
            StateError: it wrote to what forwards read, and comes later than in the plain loop.
        """
        is_late = action in self._parameters.late
        read = self._read.get(self._lane_of_hop[action.hop], []) if is_late else []
        before = [_version(look()) for _, _, look in read]
        if action.hop in self._code_on:
            with self._parameters.checked("a backward", action.hop, is_late=is_late):
                yield
        else:
            yield
        for (what, where, look), version in zip(read, before, strict=True):
            now = _version(look())
            is_gone = now is None and isinstance(look, weakref.ref)  # the graph alone had it
            if now != version and not is_gone:
                raise StateError(
                    f"{what}, which the forward reads ({where}), is written in a backward, by a "
                    "hook or by torch.utils.checkpoint, which runs its function again; a later "
                    "micro-batch has read it before that, and would have read it after that in the "
                    "plain loop; pass checkpoint= to Pipeline instead of using "
                    "torch.utils.checkpoint, write it between steps, or use schedule='sequential'"
                )


class _Read(NamedTuple):
    """A tensor that forwards read, with the lanes of those."""

    name: str
    tensor: Tensor
    lanes: set[int]


class ParameterWrites:
    """Looks at code beside the forward that may write to what forwards read: a loss, when it is
    computed for the first time, and hooks and custom functions in the first backwards.

    Autograd notices where it has saved the parameter, and not if it is written by ``.data``. In the
    plain loop the backwards of earlier micro-batches have read the parameter by then, and the
    forwards of later ones have not.

    Args:
        prepared: the prepared model.
        schedule: of the step; ``None``: micro-batches run one by one.
    """

    def __init__(self, prepared: Prepared, schedule: Schedule | None) -> None:
        self._lane_of_hop = prepared.lane_of_hop
        reads = [] if schedule is None else [*self._reads(prepared)]
        self._read = {memory_of(read.tensor): read for read in reads}
        self.late = set[Action]() if schedule is None else late_actions(schedule)
        self._late_hops = {action.hop for action in self.late}

    def _reads(self, prepared: Prepared) -> Iterator[_Read]:
        for outside in prepared.recording.outside:
            tensor = None if outside.tensor is None else outside.tensor()
            if tensor is not None:
                lanes = {self._lane_of_hop[hop] for hop in outside.hops}
                yield _Read(outside.name, tensor, lanes)
        for home in prepared.homes.values():
            yield _Read(repr(home.name), home.tensor, {self._lane_of_hop[home.hop]})

    @contextmanager
    def checked(self, what: str, hop: int, *, is_late: bool | None = None) -> Iterator[Meter]:
        """Check what the code writes that runs while entered; the meter may be told more.

        Args:
            what: the code, in words.
            hop: the hop that it runs on.
            is_late: whether a later micro-batch's forward has run on its lane; ``None``: as far as
                any has in the step.

        Raises:
            StateError: it wrote to a parameter, or to another tensor unseen, and others read that.
        """
        is_late = hop in self._late_hops if is_late is None else is_late
        lane, written = self._lane_of_hop[hop], list[tuple[_Read, int, str]]()

        def writing(tensors: Iterable[Tensor]) -> None:
            for tensor in tensors:
                read = self._read.get(memory_of(tensor))
                if read is not None and (is_late or read.lanes != {lane}):
                    written.append((read, version_of(read.tensor), users_line()))

        with Meter(None, writing=writing) as meter:
            yield meter
        with ours():
            for read, version, where in written:
                # Of counted writes to others than parameters the versions tell.
                is_seen = version_of(read.tensor) != version
                if not is_seen or isinstance(read.tensor, nn.Parameter):
                    raise StateError(
                        f"{what} writes to {read.name} ({where}), and others read it: "
                        "backwards of earlier micro-batches, or forwards of later ones, which "
                        "come in another order in the plain loop; write it between steps, or use "
                        "schedule='sequential'"
                    )


def late_actions(schedule: Schedule) -> set[Action]:
    """Return the actions that a later micro-batch's comes before, on their lanes."""
    return {action for lane in schedule.lanes for action in _late(lane)}


def _late(lane: Iterable[Action]) -> Iterator[Action]:
    latest = -1
    for action in lane:
        if action.microbatch < latest:
            yield action
        latest = max(latest, action.microbatch)


def _in_slot(slots: Mapping[str, Tensor | None], key: str) -> _Look:
    return lambda: slots[key] if key in slots else None  # noqa: SIM401 - TorchScript's has no other


def _memory(tensor: Tensor | None) -> int | None:
    return None if tensor is None else memory_of(tensor)


def _version(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (id(tensor), version_of(tensor))
