"""The sums of gradients over processes, begun while other stages still run.

A stage's gradients are complete when its last backward is over, and in a pipeline that is earlier
for later stages. All processes have to sum in one order: so one thread waits for the stages from
the last one on. ``DistributedDataParallel`` counts hooks on parameters instead; they run once for
each micro-batch here.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...devices.devices import is_asynchronous
from ...devices.observer import Watch
from ...errors import UsageError
from ...preparation.prepared import Prepared
from ...schedules.schedule import Kind, Schedule
from ..rank_failures.progress import ProcessProgress
from ..replicas import StageReplicas

_Group = tuple[tuple[int, ...], list[tuple[str, Tensor]]]  # hops, and parameters by name

_NAMES: dict[str, str] = {"F": "the forward", "B": "the backward", "R": "the recomputation"}


class StageSums:
    """Observes a step, and sums each stage's gradients when they are complete.

    Args:
        model: the user's.
        replicas: the processes that have a share of the batch each.
        prepared: what the step runs by.
        microbatches: how many there are.
        device: of the flags that are exchanged.
        progress: where it is noted what the step does.

    Attributes:
        order: for each sum that has begun, the hops that it waited for, and whether the step was
            over; for tests.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: StageReplicas,
        prepared: Prepared,
        microbatches: int,
        device: torch.device,
        progress: ProcessProgress,
    ) -> None:
        self._replicas = replicas
        self._device = device
        self._progress = progress
        self._devices = prepared.devices
        self._left = [microbatches] * len(prepared.route)
        self._split: set[tuple[int, int]] = set()
        self._groups = _groups(model, prepared)
        self._changed = threading.Condition()
        self._is_over = self._has_failed = False
        self._error: BaseException | None = None
        self.order: list[tuple[tuple[int, ...], bool]] = []
        self._thread = threading.Thread(target=self._work, name="blockpipe-sums", daemon=True)
        self._thread.start()

    # --- what it observes

    def plays(self, schedule: Schedule) -> None:
        """The step follows a schedule."""
        self._split = set(schedule.split())

    def begins(self, kind: Kind | Literal["wait"], hop: int, stage: int, microbatch: int) -> None:
        """An action begins."""
        if kind != "wait":
            named = f"{_NAMES.get(kind, kind)} of stage {stage}, micro-batch {microbatch}"
            self._progress.goes_on(named)

    def ends(self, kind: Kind | Literal["wait"], hop: int, microbatch: int) -> None:
        """An action is over; the last part of a backward completes gradients."""
        last = "W" if (hop, microbatch) in self._split else "B"
        if kind == last and hop < len(self._left):
            with self._changed:
                self._left[hop] -= 1
                self._changed.notify()

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch:
        """A copy is none of its business."""
        return lambda moment, stream: None

    # --- the sums

    def end(self, *, failed: bool) -> None:
        """The step is over in this process; the sums that are left go on."""
        with self._changed:
            self._is_over, self._has_failed = True, failed
            self._changed.notify()

    def finish(self) -> None:
        """Wait for the sums that are left.

        Raises:
            Exception: a process is gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            number, waiting = _number_of(self._groups), deque(self._groups)
            while waiting:
                hops, parameters = waiting.popleft()
                with self._changed:
                    self._changed.wait_for(partial(self._is_complete, hops))
                    failed, is_over = self._has_failed, self._is_over
                any_failed, are_same = self._replicas.agree(
                    number, failed=failed, device=self._device
                )
                if any_failed:
                    return  # in every process after the same sum
                if not are_same:
                    number, waiting = 0, deque(self._at_the_end())
                    continue
                self.order.append((hops, is_over))
                self._sum([parameter for _, parameter in parameters])
        except BaseException as error:
            self._error = error

    def _at_the_end(self) -> list[_Group]:
        """All parameters in groups that are summed when the step is over: in another process other
        hops read them, for what a module reads may depend on the data."""
        every = (named for _, parameters in self._groups for named in parameters)
        found = sorted(every, key=itemgetter(0))
        if len({parameter.device for _, parameter in found}) > 1:
            return [((), [named]) for named in found]
        return [((), found)]

    def _is_complete(self, hops: Sequence[int]) -> bool:
        return self._is_over or (bool(hops) and all(self._left[hop] <= 0 for hop in hops))

    def _sum(self, parameters: list[Tensor]) -> None:
        for device in dict.fromkeys(p.device for p in parameters):
            if is_asynchronous(device):
                torch.accelerator.synchronize(device)  # this thread's stream is another one
            own = [p for p in parameters if p.device == device]
            self._replicas.begin_sum(own, device).finish()
            if is_asynchronous(device):
                torch.accelerator.synchronize(device)


def _groups(model: nn.Module, prepared: Prepared) -> list[_Group]:
    """The parameters by the hops that read them; those that the last hops read come first."""
    _check_registered(prepared)
    found: dict[tuple[int, ...], list[Any]] = {}
    for held in prepared.recording.parameters:
        parameter = model.get_parameter(held.name)
        if parameter.requires_grad:
            found.setdefault(tuple(sorted(held.hops)), []).append((held.name, parameter))
    return sorted(found.items(), key=lambda item: (-min(item[0], default=-1), item[0]))


def _number_of(groups: list[_Group]) -> int:
    """Return a number that is the same for the same groups of the same names."""
    words = repr([(hops, [name for name, _ in named]) for hops, named in groups])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])


def _check_registered(prepared: Prepared) -> None:
    """Raise :class:`UsageError` for a leaf that is trained and that no module has registered: the
    processes began with values of their own, and nobody would sum its gradient."""
    for outside in prepared.recording.outside:
        tensor = None if outside.tensor is None else outside.tensor()
        if tensor is not None and tensor.requires_grad and tensor.is_leaf:
            raise UsageError(
                "expected parameters that are registered, so that processes have one value and one "
                f"gradient, got {outside.name} and that requires grad ({outside.where}); keep "
                "modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList"
            )
