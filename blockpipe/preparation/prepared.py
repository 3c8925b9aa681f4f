"""Everything that is computed once for a recording and used by each step: homes of parameters,
stand-ins, lanes, schedules, and whether threads pay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .._common.text import bytes_text
from .._torch.tensors import storage_id
from ..costs.meter import ASKS_HOST
from ..costs.rates import Rates, together
from ..crossing.host_stores import AHEAD
from ..crossing.step_context import KnownForward
from ..crossing.tags import ParameterHome
from ..devices.devices import is_asynchronous
from ..devices.rng_streams import Source, host_sources, sources_of, torchs_of
from ..errors import ScheduleError
from ..recording.entries import ActivationBytes, Hop
from ..recording.recording import Recording
from ..schedules.builders import ScheduleChoice, ScheduleOption
from ..schedules.schedule import Schedule
from ..schedules.simulation import Costs, validate
from .batch_norm.deferred import DeferredBatchNorm
from .compiled import CompiledModules
from .hop_costs import hop_costs, rates_of_stages
from .offloaded import staying_bytes
from .options import recomputes
from .schedule_choice import ScheduleRequest
from .sealed_forwards import SealedForwards
from .step_sizes import StepSizes
from .unwritten import Unwritten
from .watched.told_attributes import KnownAttributes

_log = logging.getLogger(__name__)

# What threads on the CPU need to gain anything, in seconds by a roofline of round numbers. Below,
# the interpreter lock is handed over too often, or waking threads takes as long as the work itself.
# All were calibrated together on two cores by examples/benchmarks/small_operations.py; see
# docs/benchmarks.md. Measured rates have no part in it: how a step runs must not depend on what
# else the machine did while they were measured.
SMALL_OPERATION = 25e-6
SMALL_HOP = 1.2e-3
_FLOPS, _BYTES, _OPERATION = 4e10, 1e10, 4e-6  # a second; of one core; seconds of any operation


def is_small(
    recording: Recording, devices: Sequence[torch.device], hops: int | None = None
) -> bool:
    """Return whether operations, or hops, are too small for threads to pay: on the CPU alone.

    Args:
        recording: a recording of what runs.
        devices: the stages' devices.
        hops: the number of hops that it is to run in; ``None`` takes those that were recorded.
    """
    if any(map(is_asynchronous, devices)):
        return False
    seconds = sum(map(roofline, recording.hops))
    operations = sum(hop.kernels for hop in recording.hops)
    return seconds < max(SMALL_OPERATION * operations, SMALL_HOP * (hops or len(recording.hops)))


def has_one_lane(lanes: Iterable[Hashable], *, is_small: bool) -> bool:
    """Return whether nothing can overlap, or threads would cost more than that gains.

    Args:
        lanes: the lane of each hop or stage.
        is_small: whether threads would not pay, as :func:`is_small` says.
    """
    return is_small or len(set(lanes)) == 1


def runs_inline(schedule: ScheduleOption, microbatches: int, *, has_one_lane: bool) -> bool:
    """Return whether each micro-batch goes out and comes back before the next, in one thread.

    Args:
        schedule: the schedule that is asked for; the user's own is played as it is.
        microbatches: the number of micro-batches in a step.
        has_one_lane: whether nothing can overlap, or threads would cost more than that gains.
    """
    return isinstance(schedule, str) and (
        microbatches == 1 or schedule in ("sequential", "uncut") or has_one_lane
    )


def roofline(hop: Hop) -> float:
    """Return the seconds of a hop's forward on a core of round numbers: only to find small ones."""
    return sum(
        count * (_OPERATION + max(operation.flops / _FLOPS, operation.bytes / _BYTES))
        for operation, count in hop.work.forward.items()
    )


@dataclass
class Prepared:
    """A recording that steps can run by: the model is placed, and has its stand-ins."""

    model: nn.Module
    recording: Recording
    route: list[int]
    homes: dict[int, ParameterHome]
    devices: list[torch.device]
    lane_of_stage: Sequence[Hashable]
    sealed_forwards: SealedForwards
    planned: bool
    in_flight: int | None = None
    checkpoint: str = "never"
    offload: frozenset[int] = frozenset()  # stages
    compiled: CompiledModules | None = None
    batch_norm: DeferredBatchNorm | None = None
    written: frozenset[str] = frozenset()  # names of tensors that later steps were seen to write
    steps: int = 0  # how many have run with it
    knows_backwards: bool = False  # whether lanes have run all of a step of several micro-batches
    has_compared: bool = False  # whether a whole step of several was compared as first ones are
    step_sizes: StepSizes = field(default_factory=StepSizes)  # of the pipeline
    microbatches: int = 0  # in the last of them
    choices: dict[int, ScheduleChoice] = field(default_factory=dict)  # of "auto", by micro-batches
    loss_draws: dict[Any, bool] = field(default_factory=dict)  # by loss function: whether it draws
    _schedules: dict[Any, Schedule] = field(default_factory=dict)
    _own_schedule: Any = None  # the last of the user's, which _schedules has as "own"

    @cached_property
    def lane_of_hop(self) -> tuple[int, ...]:
        """The number of each hop's lane."""
        lanes: dict[Hashable, int] = {}
        return tuple(lanes.setdefault(self.lane_of_stage[s], len(lanes)) for s in self.route)

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether any stage is on an accelerator."""
        return any(is_asynchronous(device) for device in self.devices)

    @cached_property
    def known_forward(self) -> KnownForward:
        """The recording's knowledge of the forward, by which steps run it."""
        hops = self.recording.hops
        return KnownForward(
            marks=[hop.marks for hop in hops],
            tracks_writes=self.recording.writes_across,
            sealed_functions=self.sealed_forwards.functions,
            sealed_forwards=self.sealed_forwards,
            waiting={*self.recording.waiting, *ASKS_HOST} if self.is_asynchronous else (),
            hops_rerunning_forward={hop.index for hop in hops if hop.reruns_forward},
            code_in_backward=self.recording.code_in_backward,
            written=[home for home in self.homes.values() if home.is_written],
            custom_functions=self.recording.custom_functions,
        )

    @cached_property
    def on_one_device(self) -> bool:
        """Whether all stages that the route visits are on one device."""
        return len({self.devices[stage] for stage in self.route}) == 1

    @cached_property
    def unwritten(self) -> Unwritten:
        """The tensors that no forward of this recording writes."""
        return Unwritten(self.model, self.recording, self.written)

    @cached_property
    def attributes(self) -> KnownAttributes:
        """The attributes that the forward sets or reads."""
        return KnownAttributes(self.recording.attributes)

    @property
    def runs_code_in_backwards(self) -> bool:
        """Whether backwards run code of the user's, as hooks and checkpoints do."""
        hops = self.recording.hops
        return bool(self.recording.code_in_backward) or any(hop.reruns_forward for hop in hops)

    @cached_property
    def is_one_hop(self) -> bool:
        """Whether nothing can cross: the recording saw no mark move the cursor."""
        return len(self.route) == 1 and not self.recording.moves

    @cached_property
    def sources(self) -> list[list[Source]]:
        """The generators that each hop draws from."""
        return [
            sources_of(sorted(hop.draws), self.devices[hop.stage]) for hop in self.recording.hops
        ]

    @cached_property
    def all_sources(self) -> list[list[Source]]:
        """The generators that each hop could draw from."""
        kinds = ["torch", *host_sources()]
        return [sources_of(kinds, self.devices[stage]) for stage in self.route]

    @cached_property
    def generators(self) -> list[Source]:
        """The generators of the process: Python's, numpy's, and torch's of the host and of the
        stages' devices."""
        of_torch = (source for device in self.devices for source in torchs_of(device))
        return list(dict.fromkeys([*host_sources(), *of_torch]))

    def mark_as_random(self, hop: int | None = None, kind: str = "torch") -> bool:
        """Mark a hop as drawing random numbers of a kind: from the next step on its forwards take
        turns. ``None``: which hop is not known. Return whether that is new."""
        marked = self.recording.hops if hop is None else [self.recording.hops[hop]]
        is_new = not all(kind in info.draws for info in marked)
        for info in marked:
            info.draws.add(kind)
        self.__dict__.pop("sources", None)
        return is_new

    def recomputes(self, microbatch: int, microbatches: int) -> bool:
        """Return whether a micro-batch is recomputed where no mark says otherwise."""
        return recomputes(self.checkpoint, microbatch, microbatches)

    @cached_property
    def does_recompute(self) -> bool:
        """Whether any hop recomputes activations, or brings them back, before its backward."""
        return any(self._is_recomputed(hop, 0, 2) for hop in range(len(self.route)))

    def _is_recomputed(self, hop: int, microbatch: int, microbatches: int) -> bool:
        calls = self.activation_bytes(hop, microbatch, microbatches).calls
        return bool(calls) or hop in self.offloaded

    def activation_bytes(self, hop: int, microbatch: int, microbatches: int) -> ActivationBytes:
        """Return the activations that a hop keeps of a micro-batch, as it is recomputed."""
        info = self.recording.hops[hop]
        found = info.always if self.recomputes(microbatch, microbatches) else info.asked
        return found if found.calls else info.never

    def kept(
        self, hop: int, microbatch: int, microbatches: int, *, is_split: bool = False
    ) -> tuple[int, int]:
        """Return the bytes that a hop holds per micro-batch: before recomputation, and after.

        Args:
            hop: the number of the hop.
            microbatch: the number of the micro-batch.
            microbatches: how many there are in a step.
            is_split: whether the hop's backward is in two parts.
        """
        kept = self.activation_bytes(hop, microbatch, microbatches)
        # A tensor that an earlier hop keeps as well counts once if it was not copied; on the CPU
        # the inputs are the caller's.
        there = kept.shared if self.on_one_device else 0
        there += 0 if is_asynchronous(self.devices[self.route[hop]]) else kept.inputs
        if hop in self.offloaded and is_asynchronous(self.devices[self.route[hop]]):
            stays = self._staying_bytes[hop]
            if kept.calls or is_split:
                return stays, max(stays, kept.full - there)
            # In its backward: the storage that is read, and those that are on their way.
            return stays, stays + sum(kept.largest[: 1 + AHEAD])
        return kept.bytes - there, kept.full - there

    @cached_property
    def _staying_bytes(self) -> Counter[int]:
        return staying_bytes(self.recording, self.devices)

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The hops whose activations are in host memory between forward and backward."""
        return frozenset(hop for hop, stage in enumerate(self.route) if stage in self.offload)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is a parameter's or a buffer's."""
        return storage_id(storage) in self._own_storages

    @cached_property
    def _own_storages(self) -> set[int]:
        return {
            storage_id(home.tensor.untyped_storage())
            for home in self.homes.values()
            if home.tensor.layout is torch.strided
        }

    @cached_property
    def is_small(self) -> bool:
        """Whether operations, or hops, on the CPU are too small for threads to pay."""
        return is_small(self.recording, self.devices)

    @cached_property
    def has_one_lane(self) -> bool:
        """Whether nothing can overlap, or threads would cost more than that gains."""
        return has_one_lane(self.lane_of_hop, is_small=self.is_small)

    def runs_inline(self, schedule: ScheduleOption, microbatches: int) -> bool:
        """Return whether micro-batches go out and come back one by one, in one thread."""
        takes_turns = bool(self.recording.given_at or self.recording.written_late)
        return takes_turns or runs_inline(schedule, microbatches, has_one_lane=self.has_one_lane)

    @property
    def rates(self) -> list[Rates]:
        """The rates of each stage's device, shared by the lanes that run at once."""
        lanes = 1 if self.has_one_lane else len(set(self.lane_of_hop))
        return rates_of_stages(self.devices, lanes)

    @property
    def costs(self) -> Costs:
        """The predicted costs of the hops. Rates that are not known yet are measured."""
        held = [self.activation_bytes(hop, 0, 2) for hop in range(len(self.route))]
        far = [hop for hop in self.offloaded if is_asynchronous(self.devices[self.route[hop]])]
        return hop_costs(self.recording, held, self.devices, self.rates, far)

    def compile(self, options: Mapping[str, Any] | None, *, cuda_graphs: bool) -> None:
        """Let compiled modules, or CUDA graphs, stand in for the sealed ones."""
        # A module's forward is Blockpipe's while it is recorded.
        changed = {owner for owner, key in self.recording.changed if key != "forward"}
        self.compiled = CompiledModules(
            self.sealed_forwards, options, cuda_graphs=cuda_graphs, changed=changed
        )
        _log.info("compiled: %s", ", ".join(self.compiled.paths) or "nothing")
        self.steps = 0
        self._schedules.clear()
        for call in self.recording.calls:
            if call.path in self.compiled.paths and call.hop is not None:
                whole = self.recording.hops[call.hop]
                whole.whole = whole.whole or f"compiled module {call.path or '(the model)'}"

    def cautions(self, option: ScheduleOption) -> Iterator[str]:
        """Yield what the user can hardly have meant, for a warning and the summary.

        Args:
            option: the schedule that is asked for.
        """
        used = {self.lane_of_stage[stage] for stage in self.route}
        named = dict.fromkeys(n for n in self.lane_of_stage if not isinstance(n, int))
        idle = [str(name) for name in named if name not in used]
        if idle:
            verb, count = "has" if len(idle) == 1 else "have", self.recording.num_stages
            yield (
                f"{', '.join(idle)} {verb} no stage: the forward has {count} "
                f"stage{'s' if count > 1 else ''}; mark more, or pass fewer devices"
            )
        elif len(self.lane_of_stage) > 1 and self.recording.is_unmarked:
            # Lanes of the CPU have no names, and a spare one is harmless: ["cpu"] * 4 is a habit.
            yield (
                f"nothing is marked, for {len(self.lane_of_stage)} devices; mark the model "
                "(begin_blocks), pass plan=balance(model, args, stages), or pass one device"
            )
        if option in ("interleaved", "zb-v") and self.is_chain_of_lanes and len(self.route) > 1:
            beside, twice = "zb-h1", "devices=[a, b, b, a]"
            if option == "interleaved":
                beside, twice = "1f1b", "devices=[…] * 2"
            yield (
                f"schedule={option!r} gains nothing over {beside!r} where each device has one "
                f"stage, and keeps more; mark twice as many stages and pass {twice}"
            )

    @cached_property
    def is_chain_of_lanes(self) -> bool:
        """Whether each lane has one hop."""
        return len(set(self.lane_of_hop)) == len(self.lane_of_hop)

    def notes(self) -> list[str]:
        """Return what was decided for it, for the summary."""
        notes = [f"auto ({m} micro-batches): {choice}" for m, choice in self.choices.items()]
        if notes:
            notes.append(f"auto: by rates {together(rates.source for rates in self.rates)}")
        if self.is_small and len(self.route) > 1:
            notes.append("operations are small: steps run in one thread, as the plain loop does")
        if self.does_recompute:
            notes += self._recomputation()
        if self.batch_norm is not None:
            notes += self.batch_norm.notes()
        if self.compiled is not None:
            notes += self.compiled.notes()
        return notes

    def _recomputation(self) -> Iterator[str]:
        glue: dict[int, int] = {}
        for hop in self.recording.hops:
            if self.activation_bytes(hop.index, 0, 2).calls:
                glue[hop.stage] = glue.get(hop.stage, 0) + hop.glue_bytes
        for stage, kept in glue.items():
            if kept:
                yield f"recomputation: glue keeps {bytes_text(kept)} a micro-batch on stage {stage}"
        for path, about in self.recording.recomputable.items():
            if about.refuses:
                yield f"{path or 'the model'} is not recomputed: {about.refuses}"

    def schedule(self, option: ScheduleOption, microbatches: int) -> Schedule:
        """Return the schedule that an option asks for, checked against the route.

        Raises:
            ScheduleError: the user's own schedule does not fit; the message names the first action
                that is wrong.
        """
        key = option if isinstance(option, str) else "own", microbatches
        if not isinstance(option, str) and option is not self._own_schedule:
            self._own_schedule = option
            self._schedules = {k: s for k, s in self._schedules.items() if k[0] != "own"}
        known = self._schedules.get(key)
        if known is None:
            known = self._make(option, microbatches)
            if self.does_recompute:
                known = known.with_recomputed(
                    partial(self._is_recomputed, microbatches=microbatches)
                )
            self._schedules[key] = known
            _log.info(
                "schedule %s for %d micro-batches: %d lanes, %d in flight%s",
                known.name,
                microbatches,
                len(known.lanes),
                known.in_flight(),
                f" (auto: {self.choices[microbatches]})" if option == "auto" else "",
            )
        return known

    def _make(self, option: ScheduleOption, microbatches: int) -> Schedule:
        # Where threads would not pay there are none that could idle.
        in_one_lane = option == "sequential" and self.is_small
        request = ScheduleRequest(
            (0,) * len(self.route) if in_one_lane else self.lane_of_hop,
            microbatches,
            self.in_flight,
            self.recording.splits_backward,
            partial(self._is_recomputed, microbatches=microbatches),
        )
        made, choice = request.resolve(option, lambda: self.costs)
        if choice is not None:
            self.choices[microbatches] = choice
        if not isinstance(option, str):
            self._check(made)
        return made

    def _check(self, schedule: Schedule) -> None:
        name = schedule.name
        validate(schedule)
        for a, lane_a in enumerate(schedule.lane_of_hop):
            for b, lane_b in enumerate(schedule.lane_of_hop[:a]):
                on = self.devices[self.route[a]]
                shares = self.route[a] == self.route[b] or (
                    is_asynchronous(on) and on == self.devices[self.route[b]]
                )
                if shares and lane_a != lane_b:
                    raise ScheduleError(
                        f"schedule {name!r} has hops {b} and {a} on lanes {lane_b} and {lane_a}, "
                        f"but both are on {on} (stages {self.route[b]} and {self.route[a]}): a "
                        "device, or a stage on the CPU, does one thing at a time"
                    )
        if self.in_flight is not None and schedule.in_flight() > self.in_flight:
            raise ScheduleError(
                f"schedule {name!r} has {schedule.in_flight()} micro-batches in flight, but "
                f"in_flight={self.in_flight}"
            )
