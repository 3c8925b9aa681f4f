"""A model recorded, placed and prepared: everything that comes before a step.

Reads as the flow does: record → plan → place.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import users_line, warn
from .._common.nested import leaves
from .._common.text import bytes_text
from .._common.threads.model_turns import alone_recording
from .._torch.graph import saved_tensor_hooks
from ..batches.microbatch import Microbatch
from ..crossing.tags import ParameterHome
from ..devices.devices import Devices, checked_devices, default_devices, named_devices
from ..devices.ownership import Owner, own_all
from ..errors import UsageError
from ..recording.plan_resolution import planned_by
from ..recording.record import record_planned
from ..recording.recording import Recording
from ..recording.sample import RecordRequest
from ..restoring.restored_thread import users_modes
from ..stages.plan import StagePlan
from ..weights.accelerate_hooks import AccelerateHooks
from ..weights.materialize import PendingValues
from ..weights.placement import Fingerprint, Placement
from .after_steps.second_looks import SecondLooks, changes_of_modes
from .after_steps.step_notes import StepNotes
from .batch_norm.deferred import DeferredBatchNorm
from .offloaded import offloaded_stages
from .options import PipelineOptions, check_plan
from .prepared import Prepared
from .schedule_choice import lanes_of
from .sealed_forwards import SealedForwards
from .shared_state import CodeKinds, check_shared_memory, check_shared_state
from .step_sizes import StepSizes, asks_sizes, is_plain, sizes_of
from .watched.watched_values import WatchedValues

MOST_RECORDINGS = 16  # kept of one pipeline: modes, grad modes, several kinds of calls; a guess
LossFn = Callable[..., Any] | None

_numbers = itertools.count()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileOptions:
    """The way in which modules are compiled."""

    options: dict[str, Any] | None  # for torch.compile; None: they are captured only
    cuda_graphs: bool


class Preparer:
    """The part of a pipeline that records, plans and places its model, and remembers the results.

    Args:
        model: the user's.
        devices: as they were given.
        plan: stages that override the marks.
        values: of a model on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        devices: Devices,
        plan: StagePlan | None,
        values: PendingValues,
    ) -> None:
        check_plan(plan)
        self.model = model
        self.given_plan = plan
        named = named_devices(devices)
        self.given_devices = given = checked_devices(named)
        self._given_lanes = None if given is None else lanes_of(given, named or ())
        self._values, self._number = values, next(_numbers)
        self.known: OrderedDict[Any, Prepared] = OrderedDict()  # the latest used is the last
        self.compiles: CompileOptions | None = None
        self._placement: Placement | None = None
        self._fingerprint: Fingerprint | None = None
        self._hooks = AccelerateHooks(model)
        self.watched_values = WatchedValues(model)
        self._second_looks = SecondLooks(model)
        self._unread = frozenset[str]()  # attributes that look like switches, and are none
        self._written = frozenset[str]()  # by steps that had not written it when recorded
        self._has_warned_of_recordings = self._has_cautioned = False
        self._beside, self._step_sizes = CodeKinds(), StepSizes()

    # --- what is known

    @property
    def recording(self) -> Recording | None:
        """The latest call's recording; ``None`` before the first call under its plan."""
        last = None
        for prepared in () if self.is_replanned() else self.known.values():
            last = prepared.recording
        return last

    @property
    def plan(self) -> StagePlan | None:
        """The stage of each module call; before the recording the given plan, or ``None``."""
        recording = self.recording
        if recording is not None or self.given_plan is not None:
            return self.given_plan if recording is None else recording.plan
        planned = planned_by(self.model, None)
        return None if planned is None else planned.plan

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage.

        Raises:
            UsageError: no devices were given, and nothing is recorded yet.
        """
        if self._placement is not None:
            return list(self._placement.devices)
        if self.given_devices is None:
            raise UsageError(
                "the stages are not known before the recording; pass devices=…, or sample=…, or "
                "call the pipeline first"
            )
        return list(self.given_devices)

    @property
    def expected_devices(self) -> list[torch.device]:
        """The devices that stages are on, or will be; all of the machine's if none were given."""
        if self._placement is not None:
            return self._placement.devices
        return self.given_devices or default_devices() or [torch.device("cpu")]

    def placed(self) -> list[torch.device] | None:
        """Return each stage's device, where the model is placed and nobody has disturbed that."""
        placement = self._placement
        if placement is None or self.is_replanned() or not placement.holds():
            return None
        return placement.devices

    def is_replanned(self) -> bool:
        """Return whether a plan was set or taken off since the model was placed."""
        known = self._fingerprint
        return self.given_plan is None and known is not None and known.is_replanned()

    # --- record → plan → place

    def prepare(
        self, batch: Microbatch, options: PipelineOptions, loss_fn: LossFn = None
    ) -> Prepared:
        """Return the recording that fits a micro-batch, with the model placed by it.

        Args:
            batch: the micro-batch.
            options: how steps are run.
            loss_fn: what the step calls with the output, if it is a function.
        """
        key = self._key_now(batch, loss_fn)
        prepared = self.known.get(key)
        if prepared is None:
            if self.known:
                _log.info("recording once more: other modes, grad mode or arguments than before")
            recording = self._record(batch, options, loss_fn)
            devices = self.placed() or self._choose_devices(recording)
            recording.check(len(devices), in_order=self._placement is None)
            check_shared_state(recording, options.shares_by)
            check_shared_memory(self.model, recording, options.shares_by)
            is_filled = self._placement is None and self._values.fill(recording, devices)
            if is_filled and self.watched_values.has_turned():  # by set_extra_state()
                return self.prepare(batch, options, loss_fn)
            prepared = self._place(recording, devices, options)
            self._compile(prepared)
            self._forget_oldest(batch)
            self._unread = frozenset(recording.unread)
            self._fingerprint = Fingerprint(self.model, self._unread)
            key = self._key(batch, self._fingerprint, loss_fn)
            self.known[key] = prepared
            self._caution_once(prepared, options)
        self.known.move_to_end(key)
        prepared.recording.written_late = self._second_looks.written_late
        return prepared

    def found(self, batch: Microbatch, loss_fn: LossFn = None) -> Prepared | None:
        """Return what :meth:`prepare` would; ``None`` where it would record."""
        return self.known.get(self._key_now(batch, loss_fn))

    def _key_now(self, batch: Microbatch, loss_fn: LossFn) -> Any:
        """Return the key of a recording that fits, after forgetting those that fit no more."""
        if self.is_replanned():
            self.unplace()
            self._fingerprint = None
        if self._fingerprint is None or not self._fingerprint.fits():
            if self._fingerprint is not None:
                _log.info("recording anew: modules or parameters were changed, or moved")
            self._forget_if_moved()
            self.known.clear()  # the model was changed: record anew
            self._fingerprint = Fingerprint(self.model, self._unread)
        if self.watched_values.has_turned():
            _log.info("recording anew: a value was set, by which a forward may turn")
            self.known.clear()
        return self._key(batch, self._fingerprint, loss_fn)

    def _caution_once(self, prepared: Prepared, options: PipelineOptions) -> None:
        """Warn, at the first step of a pipeline, of options and marks that were hardly meant so."""
        if not self._has_cautioned:
            self._has_cautioned = True
            for text in (*prepared.recording.unreached, *prepared.cautions(options.schedule)):
                warn(f"{text} ({users_line()})")

    def _forget_oldest(self, batch: Microbatch) -> None:
        """Forget the recordings that were not used for longest, where there are too many."""
        while len(self.known) >= MOST_RECORDINGS:
            self.known.popitem(last=False)
            if self._has_warned_of_recordings:
                continue
            self._has_warned_of_recordings = True
            plain = [leaf for leaf in leaves((batch.args, batch.kwargs)) if is_plain(leaf)]
            warn(
                f"the model has been recorded for {MOST_RECORDINGS} different kinds of calls, and "
                "once more now, which makes this step slow; each value of the arguments that are "
                f"no tensors (here {plain}) or of a number that the forward uses as a text or a "
                "key has a recording of its own, for it may lead the forward another way: pass "
                f"what changes as a tensor or compare the number ({users_line()})"
            )

    def _forget_if_moved(self) -> None:
        if self._placement is not None and self._placement.is_disturbed():
            self._placement = None
            warn(
                "the model was moved since this pipeline had placed it, and is placed anew "
                f"({users_line()}); call unplace() before it is used elsewhere: of two pipelines "
                "over one model on different devices each moves it at each call"
            )

    def _record(
        self, batch: Microbatch, options: PipelineOptions, loss_fn: LossFn = None, **others: Any
    ) -> Recording:
        self.watched_values.look_around()
        turn, absent = alone_recording(self.model), self._hooks.absent()
        with turn, absent, self.watched_values.asked() as (on_index,):
            planned = planned_by(self.model, self.given_plan)
            given = self.model, batch.args, batch.kwargs, planned, self.placed(), options.cuts
            recording = record_planned(
                RecordRequest(*given, loss_fn=loss_fn, on_index=on_index, **others),
                intended=self.given_devices or default_devices(),
                share=batch.share,
            )
        recording.samples, recording.sizes = batch.size, sizes_of(batch)
        recording.given_at = self.watched_values.is_recorded(recording.unread)
        return recording

    def _choose_devices(self, recording: Recording) -> list[torch.device]:
        devices = self.given_devices or default_devices()
        return devices or [torch.device("cpu")] * recording.num_stages

    def _place(
        self, recording: Recording, devices: list[torch.device], options: PipelineOptions
    ) -> Prepared:
        if self._placement is None:
            self._placement = Placement(self.model, devices)
        self._hooks.take_off()
        homes = self._placement.place(recording)
        for key, earlier in list(self.known.items()):
            if any(h.tensor.device != earlier.devices[h.stage] for h in earlier.homes.values()):
                _log.info("another kind of call reads a parameter on another stage first")
                del self.known[key]
        prepared = self._make(recording, homes, devices, options)
        if _log.isEnabledFor(logging.INFO):
            self._tell(prepared)
        return prepared

    def _tell(self, prepared: Prepared) -> None:
        recording = prepared.recording
        for stage in range(recording.num_stages):
            own = [h for h in (*recording.parameters, *recording.buffers) if h.stage == stage]
            size = bytes_text(sum(h.bytes for h in own))
            _log.info(
                "stage %d on %s: %d tensors, %s", stage, prepared.devices[stage], len(own), size
            )
        for note in prepared.notes():
            _log.info("%s", note)
        if prepared.offloaded:
            _log.info("offloaded hops: %s", sorted(prepared.offloaded))

    def _make(
        self,
        recording: Recording,
        homes: Mapping[int, tuple[Tensor, int, int, str, bool]],
        devices: list[torch.device],
        options: PipelineOptions,
    ) -> Prepared:
        planned = planned_by(self.model, self.given_plan)
        batch_norm = DeferredBatchNorm(self.model) if options.deferred_batch_norm else None
        stand_ins = None if batch_norm is None else batch_norm.stand_ins()
        return Prepared(
            self.model,
            recording,
            recording.route,
            {key: ParameterHome(*where) for key, where in homes.items()},
            devices,
            self._given_lanes or lanes_of(devices, devices),
            SealedForwards(self.model, recording, planned.stages if planned else None, stand_ins),
            planned=planned is not None,
            in_flight=options.in_flight,
            checkpoint=options.checkpoint,
            offload=offloaded_stages(recording, options.offload),
            batch_norm=batch_norm,
            written=self._written,
            step_sizes=self._step_sizes,
        )

    def _key(self, batch: Microbatch, fingerprint: Fingerprint, loss_fn: LossFn) -> Any:
        """Return what a recording depends on: modes, grad mode, structure, a loss or a mode of the
        user's that may share values with the forward, and the values of arguments that are no
        tensors. These may lead to another module on the same route, which nothing would notice.
        Sizes are not in it: a micro-batch whose size leads elsewhere is noticed by its route. Where
        plain values follow from them, a size that has come twice has a recording of its own.
        Comparisons of numbers that change between steps are, with their answers: those of the
        recording that fits."""
        shape = tuple(
            (leaf.dtype, leaf.layout, leaf.dim(), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf if is_plain(leaf) else None)
            for leaf in leaves((batch.args, batch.kwargs))
        )
        names = tuple(batch.kwargs)
        steered = self.watched_values.known_by()
        modes = fingerprint.modes(), fingerprint.asked()
        around = saved_tensor_hooks() or (None, None)  # what saved tensors go through
        beside = self._beside.known(loss_fn, *around), self._beside.sorts(users_modes())
        found = steered, modes, beside, torch.is_grad_enabled(), len(batch.args), names, shape
        holds = self.watched_values.holds
        fits = [known for known in reversed(self.known) if known[0] == found and holds(known[1])]
        answers = self.watched_values.answered
        if not fits:
            return found, answers(), None
        if not any(asks_sizes(self.known[key].recording) for key in fits):
            return fits[0]
        sizes = sizes_of(batch)
        best = next((k for k in fits if self.known[k].recording.sizes == sizes), fits[0])
        is_new = self._step_sizes.is_new(sizes, self.known[best].recording, self.known)
        return (found, answers(), sizes) if is_new and not self.known[best].has_one_lane else best

    def step_is_over(
        self,
        prepared: Prepared,
        batches: list[Microbatch],
        options: PipelineOptions,
        loss_fn: LossFn,
        notes: StepNotes,
    ) -> None:
        """Record again after a step that did what it did not when recorded; check who uses that.

        Raises:
            StateError: several hops share it, what is recomputed reads it, or what ran sealed
                reads other stages' tensors.
        """
        known, schedule, looks = prepared.recording, options.shares_by, self._second_looks
        record = partial(self._record, options=options, loss_fn=loss_fn)
        changed = [*self.watched_values.step_is_over(), *changes_of_modes(self._fingerprint)]
        looks.at_values(known, changed, batches if notes.mixes else (), schedule, record)
        if notes.written:
            self._written |= frozenset(notes.written)
            self._fingerprint = None  # the next step records anew; until then, this is known
            batch = batches[next((m for m, code in sorted(notes.reached.items()) if code), 0)]
            looks.at_tensors(record(batch), known, schedule, notes.written)
        looks.at_code(prepared, notes.reached, batches, changed, schedule, record)
        if prepared.does_recompute and not notes.compares:
            looks.at_recomputed(known, changed)

    def own_storages(self, prepared: Prepared) -> int:
        """Note for the stage sanitizer whose the parameters and buffers are; return the number by
        which it knows them."""
        homes = prepared.homes.values()
        own_all((home.tensor, Owner(self._number, home.stage)) for home in homes)
        return self._number

    def sketch(self, batch: Microbatch, options: PipelineOptions) -> Prepared:
        """Do what :meth:`prepare` does, but place nothing."""
        recording = self._record(batch, options)
        devices = self.placed() or self._choose_devices(recording)
        recording.check(len(devices))
        return self._make(recording, {}, devices, options)

    def unplace(self) -> nn.Module:
        """Move the model's parameters and buffers back to where they were; return the model.

        What was on the meta device stays on its stage's device: it may be larger than any other.
        """
        if self._placement is not None:
            self._placement.unplace()
            self._placement = None
        self._hooks.put_back()
        self.known.clear()
        return self.model

    def compile(self, compiling: CompileOptions) -> None:
        """Compile what stays on one stage, in what is prepared and in what will be."""
        self.compiles = compiling
        for prepared in self.known.values():
            self._compile(prepared)

    def _compile(self, prepared: Prepared) -> None:
        if self.compiles is not None:
            prepared.compile(self.compiles.options, cuda_graphs=self.compiles.cuda_graphs)

    @contextmanager
    def apart(
        self, known: OrderedDict[Any, Prepared] | None = None, *, compiles: bool = True
    ) -> Iterator[None]:
        """Prepare steps anew while entered, for other options or another mode of the model.

        Args:
            known: what is prepared there already, and will be.
            compiles: whether modules are compiled.
        """
        before = self.known, self.compiles
        self.known = OrderedDict() if known is None else known
        self.compiles = self.compiles if compiles else None
        try:
            yield
        finally:
            self.known, self.compiles = before

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is prepared: copies and pickles take the model and the options along, and
        record anew."""
        state = dict(self.__dict__)
        state.update(known=OrderedDict(), _placement=None, _fingerprint=None, _beside=CodeKinds())
        del state["watched_values"], state["_second_looks"], state["_hooks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hooks = AccelerateHooks(self.model)
        self.watched_values = WatchedValues(self.model)
        self._second_looks = SecondLooks(self.model)
