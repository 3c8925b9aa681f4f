"""A model recorded, placed and prepared: everything that comes before a step.

Reads as the flow does: record → plan → place.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batchnorm import DeferredBatchNorm
from .capture import record_planned
from .crossing import Home
from .doors import Doors
from .errors import PlanError, StateError, UsageError
from .materialize import Init, check_init, load_in_place
from .microbatch import Microbatch
from .options import (
    check_plan,
    checked_devices,
    checked_offload,
)
from .placement import Fingerprint, Placement
from .plan import StagePlan
from .planned import planned_by
from .prepared import Prepared, ScheduleOption, lanes_of
from .recording import Recording
from .steering import Steering
from .table import bytes_text
from .transfer import Owner, default_devices, is_on_meta, set_owner
from .tree import leaves
from .weights import Weights, open_weights
from .where import users_line, warn
from .wrapped import WrappedModel

MOST_RECORDINGS = 16  # kept of one pipeline: modes, grad modes, several kinds of calls; a guess

_numbers = itertools.count()
_log = logging.getLogger(__name__)


class PlacedModel(WrappedModel):
    """A module that stands for the user's model, on the devices of its stages.

    Args:
        model: the user's.
        devices: as they were given.
        schedule: of the steps.
        in_flight: at most so many micro-batches.
        checkpoint: which of them are recomputed.
        offload: stages whose activations are in host memory meanwhile.
        deferred_batch_norm: whether running statistics are those of the whole batch.
        plan: stages that override the marks.
        weights: where the values of a model on the meta device come from.
        init: what gives values to those of its tensors that have none.
        isolate: whether the stage sanitizer is on.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        devices: Sequence[Any] | None,
        schedule: ScheduleOption,
        in_flight: int | None,
        checkpoint: str,
        offload: bool | Iterable[int],
        deferred_batch_norm: bool,
        plan: StagePlan | None,
        weights: Weights | None,
        init: Init | None,
        isolate: bool,
    ) -> None:
        super().__init__()
        check_plan(plan)
        check_init(model, weights, init)
        self.module = model
        if weights is not None and is_on_meta(model):
            open_weights(weights)
        elif weights is not None:
            # At once: values that come at the first call could come over what was trained by then.
            load_in_place(model, weights, None)
            weights = init = None
        self.schedule: ScheduleOption = schedule
        self.in_flight = in_flight
        self.checkpoint = checkpoint
        self.offload = checked_offload(offload)
        self.deferred_batch_norm = deferred_batch_norm
        self.isolate = isolate
        self._weights, self._init = weights, init
        self._plan = plan
        self._given_devices = given = checked_devices(devices)
        self._given_lanes = None if given is None else lanes_of(given, devices or ())
        self._number = next(_numbers)
        self._prepared: OrderedDict[Any, Prepared] = OrderedDict()  # the latest used is the last
        self._compile: tuple[dict[str, Any] | None, bool] | None = None
        self._placement: Placement | None = None
        self._fingerprint: Fingerprint | None = None
        self._steering = Steering(model)
        self._has_warned_of_recordings = False
        self._has_cautioned = False

    # --- what it is

    @property
    def recording(self) -> Recording | None:
        """The latest call's recording; ``None`` before the first call under its plan."""
        last = None
        for prepared in () if self._is_replanned() else self._prepared.values():
            last = prepared.recording
        return last

    @property
    def plan(self) -> StagePlan | None:
        """Which module call is on which stage; before the recording what was given, or ``None``."""
        recording = self.recording
        if recording is not None or self._plan is not None:
            return self._plan if recording is None else recording.plan
        planned = planned_by(self.module, None)
        return None if planned is None else planned.plan

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage.

        Raises:
            UsageError: no devices were given, and nothing is recorded yet.
        """
        if self._placement is not None:
            return list(self._placement.devices)
        if self._given_devices is None:
            raise UsageError(
                "the stages are not known before the recording; pass devices=…, or sample=…, or "
                "call the pipeline first"
            )
        return list(self._given_devices)

    @property
    def input_device(self) -> torch.device:
        """Where the first stage is. Inputs may be anywhere: they are moved."""
        return self.devices[0]

    @property
    def output_device(self) -> torch.device:
        """Where joined outputs and the loss are: the last stage's device."""
        recording = self.recording
        return self.devices[-1 if recording is None else recording.route[-1]]

    def _placed(self) -> list[torch.device] | None:
        placement = self._placement
        if placement is None or self._is_replanned() or placement.is_disturbed():
            return None
        return placement.devices

    def _is_replanned(self) -> bool:
        """Whether a plan was set or taken off since the model was placed."""
        known = self._fingerprint
        return self._plan is None and known is not None and known.is_replanned()

    # --- record → plan → place

    def _prepare(self, batch: Microbatch) -> Prepared:
        """The recording that fits a micro-batch, and the model placed by it."""
        if self._is_replanned():
            self.unplace()
            self._fingerprint = None
        if self._fingerprint is None or not self._fingerprint.fits():
            if self._fingerprint is not None:
                _log.info("recording anew: modules or parameters were changed, or moved")
            self._forget_if_moved()
            self._prepared.clear()  # the model was changed: record anew
            self._fingerprint, self._steering = Fingerprint(self.module), Steering(self.module)
        if self._steering.has_turned(self._changing()):
            _log.info("recording anew: a number on a module was set, by which a forward may turn")
            self._prepared.clear()
        key = self._key(batch, self._fingerprint)
        prepared = self._prepared.get(key)
        if prepared is None:
            if self._prepared:
                _log.info("recording once more: other modes, grad mode or arguments than before")
            recording = self._record(batch)
            devices = self._placed() or self._choose_devices(recording)
            recording.check(len(devices), in_order=self._placement is None)
            self._check_state(recording)
            prepared = self._place(recording, devices)
            self._compile_modules(prepared)
            self._forget_oldest(batch)
            key = self._key(batch, self._fingerprint)  # the recording may have more questions
            self._prepared[key] = prepared
            self._fingerprint = Fingerprint(self.module)
            self._caution_once(prepared)
        self._prepared.move_to_end(key)
        return prepared

    def _changing(self) -> set[str]:
        """Attributes that forwards set themselves, by name."""
        return set[str]().union(*(p.recording.changing for p in self._prepared.values()))

    def _caution_once(self, prepared: Prepared) -> None:
        """Say what was hardly meant so, at the first step of a pipeline."""
        if not self._has_cautioned:
            self._has_cautioned = True
            for text in (*prepared.recording.unreached, *prepared.cautions(self.schedule)):
                warn(f"{text} ({users_line()})")

    def _forget_oldest(self, batch: Microbatch) -> None:
        """Before another one comes: no more than so many are kept, the latest used."""
        while len(self._prepared) >= MOST_RECORDINGS:
            self._prepared.popitem(last=False)
            if self._has_warned_of_recordings:
                continue
            self._has_warned_of_recordings = True
            plain = [leaf for leaf in leaves((batch.args, batch.kwargs)) if _is_plain(leaf)]
            warn(
                f"the model has been recorded for {MOST_RECORDINGS} different kinds of calls, and "
                "once more now, which makes this step slow; each value of the arguments that are "
                f"no tensors (here {plain}) has a recording of its own, for it may lead the "
                "forward another way: pass what changes from call to call as a tensor "
                f"({users_line()})"
            )

    def _forget_if_moved(self) -> None:
        if self._placement is not None and self._placement.is_disturbed():
            self._placement = None
            warn(
                "the model was moved since this pipeline had placed it, and is placed anew "
                f"({users_line()}); call unplace() before it is used elsewhere: of two pipelines "
                "over one model on different devices each moves it at each call"
            )

    def _record(self, batch: Microbatch) -> Recording:
        with self._steering.asked():
            recording = record_planned(
                self.module,
                batch.args,
                batch.kwargs,
                planned_by(self.module, self._plan),
                devices=self._placed(),
                intended=self._given_devices or default_devices(),
                cut=self.schedule != "uncut",
                share=batch.share,
            )
        recording.samples = batch.size
        return recording

    def _check_state(self, recording: Recording) -> None:
        """Buffers that the forward writes are read in the plain loop's order, and generators of the
        user's are drawn from in it, or it is an error."""
        for drawn in recording.shared_generators:
            if self.schedule not in ("uncut", "sequential"):
                raise StateError(
                    f"a torch.Generator is drawn from on hops {drawn.hops} ({drawn.where}): which "
                    "micro-batch gets which numbers would depend on timing; give each stage a "
                    "generator of its own, draw from torch's global one, or use "
                    "schedule='sequential'"
                )
        for held in recording.shared_state:
            on = [held.stage, *held.also_read_on]
            if self.schedule == "uncut" or (self.schedule == "sequential" and len(on) == 1):
                continue
            remedy = "'sequential'" if len(on) == 1 else "'uncut'"
            what = "buffer" if held.is_buffer else "parameter"
            raise StateError(
                f"{what} {held.name!r} is written by the forward and read on hops {held.hops} "
                f"(stages {on}; {held.where}): micro-batches under way at once would mix in it; "
                f"read and write it on one hop, or use schedule={remedy}"
            )
        for shared in recording.shared_changes:
            if self.schedule not in ("uncut", "sequential"):
                raise StateError(
                    f"the forward changes {shared.what}, and {shared.seen} on hops {shared.hops} "
                    f"({shared.where}): micro-batches under way at once would change it for each "
                    f"other; {shared.remedy}, or use schedule='sequential'"
                )

    def _choose_devices(self, recording: Recording) -> list[torch.device]:
        devices = self._given_devices or default_devices()
        return devices or [torch.device("cpu")] * recording.num_stages

    def _place(self, recording: Recording, devices: list[torch.device]) -> Prepared:
        if self._placement is None:
            self._materialize(recording, devices)
            self._placement = Placement(self.module, devices)
        homes = self._placement.place(recording)
        for key, earlier in list(self._prepared.items()):
            if any(h.tensor.device != earlier.devices[h.stage] for h in earlier.homes.values()):
                _log.info("another kind of call reads a parameter on another stage first")
                del self._prepared[key]
        prepared = self._prepared_by(recording, homes, devices)
        if _log.isEnabledFor(logging.INFO):
            self._tell(prepared)
        return prepared

    def _tell(self, prepared: Prepared) -> None:
        recording = prepared.recording
        held = (*recording.parameters, *recording.buffers)
        for stage in range(recording.num_stages):
            own = [h for h in held if h.stage == stage]
            size = bytes_text(sum(h.bytes for h in own))
            _log.info(
                "stage %d on %s: %d tensors, %s", stage, prepared.devices[stage], len(own), size
            )
        for note in prepared.notes():
            _log.info("%s", note)
        if prepared.offloaded:
            _log.info("offloaded hops: %s", sorted(prepared.offloaded))

    def _prepared_by(
        self,
        recording: Recording,
        homes: Mapping[int, tuple[Tensor, int, int, str]],
        devices: list[torch.device],
    ) -> Prepared:
        planned = planned_by(self.module, self._plan)
        batch_norm = DeferredBatchNorm(self.module) if self.deferred_batch_norm else None
        stand_ins = None if batch_norm is None else batch_norm.stand_ins()
        return Prepared(
            self.module,
            recording,
            recording.route,
            {key: Home(*where) for key, where in homes.items()},
            devices,
            self._given_lanes or lanes_of(devices, devices),
            Doors(self.module, recording, planned.stages if planned else None, stand_ins),
            planned=planned is not None,
            in_flight=self.in_flight,
            checkpoint=self.checkpoint,
            offload=self._offloaded(recording),
            batch_norm=batch_norm,
        )

    def _offloaded(self, recording: Recording) -> frozenset[int]:
        stages = frozenset(range(recording.num_stages)) if self.offload is True else self.offload
        if not stages:
            return stages
        beyond = sorted(stage for stage in stages if stage >= recording.num_stages)
        if beyond:
            raise PlanError(
                f"offload names stages {beyond}, but the model has stages 0.."
                f"{recording.num_stages - 1}; name some of these, or pass offload=True"
            )
        if recording.unhookable:
            raise PlanError(
                "offload hooks into what autograd saves, which torch.func does not bear, and "
                f"{recording.unhookable} use it; pass offload=False, or checkpoint= instead"
            )
        return stages

    def _key(self, batch: Microbatch, fingerprint: Fingerprint) -> Any:
        """What a recording depends on: modes, grad mode, structure, and the values of what is no
        tensor: they may lead to another module on the same route, which nothing would notice.
        Sizes are not in it: a micro-batch whose size leads elsewhere is noticed by its route."""
        shape = tuple(
            (leaf.dtype, leaf.dim(), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf if _is_plain(leaf) else None)
            for leaf in leaves((batch.args, batch.kwargs))
        )
        names = tuple(batch.kwargs)
        answers = self._steering.answers()
        modes = fingerprint.modes()
        return answers, modes, torch.is_grad_enabled(), len(batch.args), names, shape

    def _look_again(self, prepared: Prepared, batch: Microbatch, written: list[str]) -> None:
        """After a step that wrote what it did not write when it was recorded: is that of one hop?

        Raises:
            StateError: several hops share it, or other things cross than those that the step knew.
        """
        if not written:
            return
        _log.info("recording anew: %s", f"{', '.join(written)} is written by now")
        for key in [key for key, known in self._prepared.items() if known is prepared]:
            del self._prepared[key]
        recording = self._record(batch)
        try:
            self._check_state(recording)
            if _crossings(recording) != _crossings(prepared.recording):
                raise StateError("other tensors cross between the stages by now")
        except StateError as error:
            raise StateError(
                f"{', '.join(written)} was written during the step, which it was not when the "
                f"model was recorded, and this step's gradients may not be the plain loop's: "
                f"{error} ({users_line()})"
            ) from None

    def _own_storages(self, prepared: Prepared) -> int | None:
        if not self.isolate:
            return None
        for home in prepared.homes.values():
            set_owner(home.tensor, Owner(self._number, home.stage))
        return self._number

    def _sketched(self, batch: Microbatch) -> Prepared:
        """As :meth:`_prepare`, but nothing is placed."""
        recording = self._record(batch)
        devices = self._placed() or self._choose_devices(recording)
        recording.check(len(devices))
        return self._prepared_by(recording, {}, devices)

    def unplace(self) -> nn.Module:
        """Move the model's parameters and buffers back to where they were; returns the model.

        What was on the meta device stays on its stage's device: it may be larger than any other.
        """
        if self._placement is not None:
            self._placement.unplace()
            self._placement = None
        self._prepared.clear()
        return self.module

    def _compile_modules(self, prepared: Prepared) -> None:
        if self._compile is not None:
            options, cuda_graphs = self._compile
            prepared.compile(options, cuda_graphs=cuda_graphs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles take the model and the options along, and record anew."""
        state = dict(self.__dict__)
        state.update(_prepared=OrderedDict(), _placement=None, _fingerprint=None)
        del state["_steering"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._steering = Steering(self.module)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _crossings(recording: Recording) -> tuple[Any, ...]:
    """What a step goes by: where the forward goes, what is sealed, and what crosses."""
    crossings = [(c.from_hop, c.to_hop, c.dtype, len(c.shape)) for c in recording.crossings]
    return recording.route, recording.sealed, recording.sealed_functions, crossings
