"""One step: runs out and back, inline in the caller's thread or on lanes.

Inline where threads cannot pay (one lane, one micro-batch, ``"sequential"``): each micro-batch
goes out and comes back before the next, which needs the least memory of all orders.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._common.callsite import failing_line, users_line
from .._common.nested import leaves, map_leaves, map_tensors, tensors
from .._common.thread_state import CallerState, intra_operation_threads, theirs
from ..batches.losses import check_differentiable, checked_loss, computed_loss, kind_of
from ..batches.microbatch import Microbatch
from ..costs.meter import Meter
from ..crossing.hop_backward import run_engine
from ..crossing.host_stores import HostLinks
from ..crossing.interception import CrossingMode
from ..crossing.microbatch_run import MicrobatchRun, detached
from ..crossing.offload import Offload
from ..crossing.tags import TAG, StepContext, Tag, edge_of
from ..crossing.torch_patches import Backwards, CustomFunctions, ScriptFunctions, TensorHooks
from ..crossing.uncut_run import UncutRun
from ..crossing.user_checkpoints import Checkpoints
from ..devices.copies import PendingCopy
from ..devices.devices import is_asynchronous
from ..devices.observer import Observer, Watch
from ..devices.rng_streams import RngStreams, Source, current, moved, own_turn, sources_of
from ..devices.sanitizer import Sanitizer
from ..errors import BlockpipeError, RouteError
from ..preparation.prepared import Prepared
from ..restoring.process_state import kept_process_state
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Action, Schedule
from ..stages.marks import Cursor, Mark, set_cursor, set_microbatch
from .lanes import Abandoned, Turns
from .observed import PlainLoopObserver, observed_border
from .whole_arguments import WholeArguments

_NOTHING = nullcontext()
_log = logging.getLogger(__name__)


@dataclass
class MicrobatchResult:
    """What one micro-batch's forward came to: values cut off, and places in the graph."""

    loss: Tensor | None = None
    outputs: Any = None
    edges: list[tuple[int, GradientEdge] | None] = field(default_factory=list)
    on_host: list[bool] = field(default_factory=list)  # by output: the user's code wants it there


class Execution:
    """One step over some micro-batches.

    Args:
        prepared: of the recording that fits them.
        microbatches: in order.
        weights: of their losses.
        schedule: a name, "auto", "uncut", or the user's own.
        ambient: the caller's thread state.
        isolate_as: the pipeline's number for the sanitizer; ``None``: not isolated.
        loss_fn: called with outputs and target; ``None``: the model's own loss.
        want: "loss", "outputs", or both.
        observer: told of what runs when.
    """

    def __init__(
        self,
        prepared: Prepared,
        microbatches: list[Microbatch],
        weights: list[float],
        schedule: ScheduleOption,
        ambient: CallerState,
        *,
        isolate_as: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        want: frozenset[str],
        observer: Observer | None = None,
    ) -> None:
        self.prepared = prepared
        self.microbatches = microbatches
        self.weights = weights
        self.schedule = schedule
        self.ambient = ambient
        self.isolate_as = isolate_as
        self.loss_fn = loss_fn
        self.want = want
        self.observer = observer
        self.cut = schedule != "uncut"
        differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._loss_kind = kind_of(loss_fn)
        self.step = StepContext(
            prepared.route,
            prepared.homes,
            prepared.devices,
            differentiable=differentiable,
            isolate_as=isolate_as,
            cut=self.cut,
            begins=prepared.begins,
            splits=not isinstance(schedule, str) or schedule.startswith(("zb", "auto")),
            tracks_writes=prepared.recording.writes_across,
            sealed_functions=prepared.sealed_forwards.functions,
            sealed_forwards=prepared.sealed_forwards,
            sources=self._sources(),
            waiting=prepared.waiting,
            hops_rerunning_forward=prepared.hops_rerunning_forward,
            is_first=prepared.steps == 0,
            observer=observer,
        )
        self.step.begin()
        self._streams: RngStreams | None = None
        if any(self.step.sources):
            all_of_them = [source for sources in self.step.sources for source in sources]
            self._streams = RngStreams(all_of_them, len(microbatches))
        self._links = HostLinks()  # to host memory
        self.results: list[MicrobatchResult | None] = [None] * len(microbatches)
        self.runs: dict[int, MicrobatchRun] = {}
        prepared.microbatches = len(microbatches)
        self._one_by_one = prepared.runs_inline(schedule, len(microbatches))
        # Compiling and capturing are done in one thread: the first step's.
        is_cold = prepared.compiled is not None and prepared.steps == 0
        self.inline = is_cold or self._one_by_one
        self._whole = WholeArguments(
            microbatches, one_by_one=self.inline and not self.step.has_copies
        )
        if not self.inline:
            ambient.for_threads()
        if prepared.steps == 0:
            _log.info("%d micro-batches %s", len(microbatches), self._why_so(is_cold=is_cold))
        self.written: list[str] = []  # that was not when the model was recorded
        self._split: set[tuple[int, int]] = set()
        self._turns: Turns | None = None
        self._roots: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self.inputs_need_grad = differentiable and any(
            t.requires_grad for m in microbatches for t in tensors((m.args, m.kwargs, m.target))
        )

    def _why_so(self, *, is_cold: bool) -> str:
        """Whether threads run the step, and why, for the log."""
        if not self.inline:
            return f"on {len(set(self.prepared.lane_of_hop))} lanes, a thread each"
        if is_cold:
            return "in one thread: the first step compiles"
        if len(self.microbatches) == 1:
            return "in one thread: there is nothing to overlap"
        if self.schedule in ("sequential", "uncut"):
            return f"in one thread: schedule={self.schedule!r}"
        if self.prepared.is_small:
            return "in one thread: operations are so small that threads would not pay"
        return "in one thread: all stages are on one lane"

    # --- what draws random numbers

    def _sources(self) -> list[list[Source]]:
        if self.prepared.steps == 0:
            return self.prepared.all_sources  # the recording may have gone another way
        sources = self.prepared.sources
        known = self.prepared.loss_draws.get(self._loss_kind, self.loss_fn is not None)
        if not known:
            return sources
        last = self.prepared.route[-1]
        own = sources_of(["torch"], self.prepared.devices[last])
        return [*sources[:-1], list(dict.fromkeys([*sources[-1], *own]))]

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Around the forwards: where they succeed, the generators go on from them."""
        streams = self._streams
        before = {} if streams is not None else current(self.prepared.generators)
        try:
            yield
        except BaseException:
            if streams is not None:
                streams.abandon()
            raise
        if streams is not None:
            streams.finish()
        elif moved(before):
            self.prepared.mark_as_random()

    def _enter_stream(self, m: int, sources: list[Source]) -> None:
        if self._streams is not None:
            self._streams.enter(m, sources)

    def _leave_stream(self, m: int, hop: int) -> None:
        if self._streams is None:
            return
        drew = self._streams.leave(m, tell=self.step.is_first)
        if not self.step.is_first:
            return
        kinds = {source if isinstance(source, str) else "torch" for source in drew}
        if hop == len(self.prepared.route) - 1 and self.prepared.loss_draws.get(self._loss_kind):
            kinds.discard("torch")  # it was the loss
        for kind in kinds - self.prepared.recording.hops[hop].draws:
            self.prepared.mark_as_random(hop, kind)

    # --- the three ways through

    def run(self) -> None:
        """All forwards and backwards."""
        if self._is_plain():
            needs_sealed_forwards = (
                self.prepared.compiled is not None or self.prepared.batch_norm is not None
            )
            with (
                self._sealed_forwards() if needs_sealed_forwards else self._current_device_kept(),
                self._drawing(),
            ):
                try:
                    for m in range(len(self.microbatches)):
                        self._run_plain(m)
                finally:
                    self.step.settle()
            self.prepared.steps += 1
            return
        with self._sealed_forwards(), self._cleaned_up(), self._drawing():
            if not self.inline:
                self._run_lanes(self.prepared.schedule(self.schedule, len(self.microbatches)), None)
            else:
                with self._threads_of_lanes(self.schedule):
                    for m in range(len(self.microbatches)):
                        self._forward_inline(m)
                        self._backward_inline(m)
            self._conclude()
        self.prepared.steps += 1

    def run_forward(self) -> None:
        """All forwards; their graphs stay, for a backward that the caller starts."""
        with self._sealed_forwards(), self._cleaned_up(only_on_failure=True), self._drawing():
            if not self.inline:
                self._run_lanes(self.prepared.schedule("gpipe", len(self.microbatches)), "F")
            else:
                with self._threads_of_lanes("gpipe"):
                    for m in range(len(self.microbatches)):
                        self._forward_inline(m)
        self.prepared.steps += 1

    def run_backward(self) -> None:
        """All backwards, after roots were added to the runs."""
        with self._sealed_forwards(), self._cleaned_up():
            if not self.inline:
                self._run_lanes(self.prepared.schedule("gpipe", len(self.microbatches)), "B")
            else:
                with self._threads_of_lanes("gpipe"), torch.enable_grad():
                    for m in range(len(self.microbatches)):
                        self._backward_inline(m)
            self._conclude()

    def _conclude(self) -> None:
        """In a first step: what was recomputed is what was saved, or this is an error."""
        if self.step.comparisons is not None:
            self.step.comparisons.conclude()

    def _is_plain(self) -> bool:
        """Whether the step is the plain loop: one thread and one device, so that cutting the graph
        would gain nothing. The first step is cut all the same: it finds what a cut would not bear
        on the machine that the model is meant for."""
        return (
            self.inline
            and self.cut
            and not self.prepared.planned
            and self.isolate_as is None
            and not self.inputs_need_grad
            and not self.prepared.does_recompute
            and (
                self.prepared.is_one_hop
                or (
                    self.schedule != "sequential"
                    and self.prepared.has_one_lane
                    and self.prepared.on_one_device
                    and self.prepared.steps > 0
                )
            )
        )

    def _run_plain(self, m: int) -> None:
        """A micro-batch forward and back, as the plain loop has it."""
        batch, first = self.microbatches[m], self.prepared.route[0]
        cursor = _FixedCursor(first, m) if self.prepared.is_one_hop else Cursor()
        before, outer = set_cursor(cursor), set_microbatch(m)
        seen = None
        if self.observer is not None:
            seen = PlainLoopObserver(self.observer, self.prepared.route, cursor, m)
        phase = "forward"
        autocasts = self.ambient.autocasts
        try:
            self._enter_stream(m, self._all_sources)
            self._be_on(first)
            args, kwargs, target = batch.args, batch.kwargs, batch.target
            if not self._inputs_are_there:
                args, kwargs, target = map_tensors(
                    lambda tensor: self.step.carried(tensor, first, self._watch(tensor, 0, m)),
                    (args, kwargs, target),
                )
            taken = self._whole.taken(batch, args, kwargs)
            with self.ambient.uncached_autocast() if autocasts else _NOTHING, theirs():
                output = self.prepared.model(*args, **kwargs)
                loss = self._loss(output, target)
            loss = checked_loss(loss)
            self._whole.check(taken)
            self._leave_stream(m, 0)
            if seen is not None:
                seen.turn_back()
            check_differentiable(loss)
            result = self.results[m] = MicrobatchResult(loss.detach())
            if "outputs" in self.want:
                result.outputs = detached(output)
                stays = is_asynchronous(self.prepared.devices[first])
                result.on_host = [
                    stays and isinstance(leaf, Tensor) and leaf.device.type == "cpu"
                    for leaf in leaves(output)
                ]
            del output
            phase = "backward"
            set_microbatch(outer)  # its forward is over: what is computed again is not another one
            if self.weights[m]:  # as in _result
                with self.ambient.no_autocast() if autocasts else _NOTHING:
                    # As loss.backward(root) does, when it has looked at its arguments.
                    roots = (loss,), (self._root(m, loss),)
                    run_engine(*roots, False, False, (), True, True)
            if seen is not None:
                seen.finish()
        except BaseException as error:
            known = phase == "forward" or self.prepared.is_one_hop
            _note(error, phase, m, cursor.stage if known else None)
            raise
        finally:
            self._leave_stream(m, 0)
            set_cursor(before)
            set_microbatch(outer)

    @cached_property
    def _all_sources(self) -> list[Source]:
        return list(dict.fromkeys(source for hop in self.step.sources for source in hop))

    @cached_property
    def _inputs_are_there(self) -> bool:
        """Whether no input has to move to where the first stage is."""
        device = self.prepared.devices[self.prepared.route[0]]
        batch = self.microbatches[0]
        return all(t.device == device for t in tensors((batch.args, batch.kwargs, batch.target)))

    def _forward_inline(self, m: int) -> None:
        if not self.ambient.autocasts:
            self._forward(m)
            return
        with self.ambient.uncached_autocast():
            self._forward(m)

    def _backward_inline(self, m: int) -> None:
        with self.ambient.no_autocast() if self.ambient.autocasts else _NOTHING:
            for hop in reversed(range(len(self.prepared.route))):
                if self.prepared.does_recompute:
                    self._backward(Action("R", hop, m))
                self._backward(Action("B", hop, m))

    def _lane_threads(self, schedule: Schedule) -> int:
        """How many threads an operation has on a lane."""
        threads = torch.get_num_threads()
        if self.prepared.is_asynchronous:
            return threads
        return max(1, threads // len(schedule.lanes))

    def _threads_of_lanes(self, option: ScheduleOption) -> AbstractContextManager[None]:
        """In a step that is in one thread only because it compiles: what is compiled for one number
        of threads is compiled anew for another."""
        if self._one_by_one:
            return _NOTHING
        schedule = self.prepared.schedule(option, len(self.microbatches))
        return intra_operation_threads(self._lane_threads(schedule))

    def _run_lanes(self, schedule: Schedule, only: Literal["F", "B"] | None) -> None:
        # Hooks on what is saved would unpack it once for each part.
        packs = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self._split = schedule.split() if only is None and not packs else set()
        turns = Turns(
            schedule,
            self._forward,
            self._backward,
            self.ambient,
            queued=self._queued_lanes(schedule),
            threads=self._lane_threads(schedule),
            only=only,
        )
        self._turns = turns
        if self.observer is not None:
            self.observer.plays(schedule)
        before = None if only == "B" else self.prepared.unwritten.states()
        changes_process = self.prepared.recording.changes_process
        try:
            with kept_process_state() if changes_process else _NOTHING:
                turns.run()
        finally:
            self._turns = None
        if before is not None:
            self.written = self.prepared.unwritten.written(before)

    def _queued_lanes(self, schedule: Schedule) -> list[bool]:
        """For each lane, whether its device is asynchronous."""
        queued = [False] * len(schedule.lanes)
        for hop, lane in enumerate(schedule.lane_of_hop):
            queued[lane] |= is_asynchronous(self.prepared.devices[self.prepared.route[hop]])
        return queued

    @contextmanager
    def _sealed_forwards(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.prepared.sealed_forwards)
            if self.prepared.batch_norm is not None:
                stack.enter_context(self.prepared.batch_norm.step())
            if self.step.splits:
                stack.enter_context(TensorHooks())
            if self.prepared.compiled is not None:
                keeps_graphs = self.step.differentiable and "loss" not in self.want
                stack.enter_context(
                    self.prepared.compiled.step(self._in_flight(), keeps_graphs=keeps_graphs)
                )
            stack.enter_context(Backwards())
            if self.prepared.recording.custom_functions:
                stack.enter_context(CustomFunctions())
                stack.enter_context(ScriptFunctions())
            if self.prepared.recording.recomputes:
                stack.enter_context(Checkpoints())
            stack.enter_context(self._current_device_kept())
            yield

    def _in_flight(self) -> int:
        """How many micro-batches are under way at once in steps like this one, at the most."""
        if self._one_by_one:
            return 1
        return self.prepared.schedule(self.schedule, len(self.microbatches)).in_flight()

    @contextmanager
    def _current_device_kept(self) -> Iterator[None]:
        if not self.prepared.is_asynchronous:
            yield
            return
        before = torch.accelerator.current_device_index()
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    @contextmanager
    def _cleaned_up(self, *, only_on_failure: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException:
            only_on_failure = False
            raise
        finally:
            for run in self.runs.values():
                if only_on_failure:
                    run.settle()
                else:
                    run.abandon()
            self.step.settle()
            self._links.close()

    # --- one micro-batch's forward

    def _forward(self, m: int) -> None:
        cursor = Cursor(follow_marks=not self.prepared.planned)
        kind = MicrobatchRun if self.cut else UncutRun
        run = self.runs[m] = kind(self.step, m, cursor)
        run.recomputes = self.prepared.recomputes(m, len(self.microbatches))
        before, outer = set_cursor(cursor), set_microbatch(m)
        try:
            sanitizer = None
            if self.isolate_as is not None:
                sanitizer = Sanitizer(self.isolate_as, m, self.prepared.route[0], "forward")
            run.on_border = self._border(run, sanitizer)
            if self.observer is not None:
                run.on_border = observed_border(run, run.on_border, self.observer)
            with sanitizer if sanitizer is not None else _NOTHING:
                self.results[m] = self._travel(run, self.microbatches[m])
            if self.observer is not None:
                self.observer.ends("F", run.hop, m)
        except Abandoned:
            raise
        except BaseException as error:
            _note(error, "forward", m, max(run.stage, 0))
            raise
        finally:
            set_cursor(before)
            set_microbatch(outer)
            try:
                self._leave_stream(m, run.hop)
            finally:
                run.finish_forward()

    def _border(
        self, run: MicrobatchRun, sanitizer: Sanitizer | None
    ) -> Callable[[int, int], None]:
        turns, m = self._turns, run.microbatch

        def cross(before: int, after: int) -> None:
            self._leave_stream(m, before)
            if turns is not None:
                turns.cross(m, before, after)
            stage = run.stage
            self._be_on(stage)
            self._enter_stream(m, self.step.sources[min(after, len(self.step.sources) - 1)])
            if sanitizer is not None:
                sanitizer.stage = stage

        return cross

    def _be_on(self, stage: int) -> None:
        device = self.prepared.devices[stage]
        if is_asynchronous(device):
            torch.accelerator.set_device_index(device.index)

    def _travel(self, run: MicrobatchRun, batch: Microbatch) -> MicrobatchResult:
        args, kwargs, target = self._inputs(run, batch)
        taken = self._whole.taken(batch, args, kwargs)
        with self._offloaded(run):
            if self.step.sources and self.step.sources[0] and self.step.begins[:1] == [0]:
                # Before the first operation: what keeps the generator's state for later
                # (torch.utils.checkpoint) reads it before that.
                run.arrive()
            with theirs(), CrossingMode(run):
                output = self.prepared.model(*args, **kwargs)
            if run.hop < 0:
                run.arrive()
            # The loss is computed where the forward's last operation was: an inner block may have
            # ended since, and its end moved the cursor.
            run.cursor.stage = run.stage
            loss = None
            if "loss" in self.want:
                target = self._received(run, batch, target)
                with theirs(), CrossingMode(run):
                    loss = self._loss(output, target)
                loss = checked_loss(loss)
        result = self._result(run, output, loss)
        self._whole.check(taken)
        return result

    @contextmanager
    def _offloaded(self, run: MicrobatchRun) -> Iterator[None]:
        """What the forward saves on offloaded stages goes to the host."""
        hops = self.prepared.offloaded
        if not hops or not self.step.differentiable or not self.cut:
            yield
            return
        key = weakref.ref(run)  # the hooks stay in the graph, which the run holds

        def hop() -> int:
            found = key()
            return -1 if found is None else found.hop

        offload = run.offload = Offload(hop, hops, self._stays, self._links)
        offload.put_on()
        try:
            yield
        finally:
            offload.take_off()

    def _stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is on its device anyway: a parameter's, a buffer's, the caller's."""
        return self.prepared.stays(storage) or storage._cdata in self._callers

    @cached_property
    def _callers(self) -> set[int]:
        """The storages of the batch, which the caller holds; micro-batches are slices of it."""
        batches = [(b.args, b.kwargs, b.target) for b in self.microbatches]
        return {t.untyped_storage()._cdata for t in tensors(batches) if t.layout is torch.strided}

    def _inputs(self, run: MicrobatchRun, batch: Microbatch) -> tuple[Any, Any, Any]:
        memo: dict[int, Tensor] = {}
        given = batch.args, batch.kwargs
        positions = self._positions_of_grad(given) if self.inputs_need_grad else {}

        def taken(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = run.take_input(tensor, positions.get(id(tensor), 0))
            return memo[id(tensor)]

        args = map_tensors(taken, batch.args)
        kwargs = map_tensors(taken, batch.kwargs) if batch.kwargs else batch.kwargs
        last = len(self.prepared.route) - 1

        def sent(tensor: Tensor) -> Tensor | PendingCopy:
            if self.inputs_need_grad and tensor.requires_grad:
                return tensor  # its gradient leaves from the hop that the loss is on
            watch = self._watch(tensor, last, run.microbatch)
            return self.step.lend(tensor, self.prepared.route[last], watch)

        return args, kwargs, map_tensors(sent, batch.target)

    def _received(self, run: MicrobatchRun, batch: Microbatch, target: Any) -> Any:
        """The target, on the last hop, which waits for it no earlier than it is read."""
        last = len(self.prepared.route) - 1
        given = len(list(leaves((batch.args, batch.kwargs))))
        positions = self._positions_of_grad(target, given) if self.inputs_need_grad else {}
        memo: dict[int, Tensor] = {}

        def received(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) not in memo:
                    memo[id(leaf)] = run.take_input(leaf, positions[id(leaf)])
                return memo[id(leaf)]
            if not isinstance(leaf, PendingCopy):
                return leaf
            value = run.receive(last, leaf)
            setattr(value, TAG, Tag(run.key, last, self.prepared.route[last]))
            return value

        return map_leaves(received, target)

    def _watch(self, tensor: Tensor, hop: int, m: int) -> Watch | None:
        """What the observer has for a copy from the caller to a hop."""
        return None if self.observer is None else self.observer.watch(tensor, -1, hop, m)

    def _positions_of_grad(self, given: Any, start: int = 0) -> dict[int, int]:
        """Where the inputs that need grad are among the leaves, counted from ``start``."""
        found: dict[int, int] = {}
        for index, leaf in enumerate(leaves(given), start):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                found.setdefault(id(leaf), index)
        return found

    def _loss(self, output: Any, target: Any) -> Any:
        if self.loss_fn is None or self._loss_kind in self.prepared.loss_draws:
            return computed_loss(output, target, self.loss_fn)
        drew: list[object] = []
        with Meter(None, drew=drew.append):
            loss = computed_loss(output, target, self.loss_fn)
        self.prepared.loss_draws[self._loss_kind] = bool(drew)
        return loss

    def _result(self, run: MicrobatchRun, output: Any, loss: Tensor | None) -> MicrobatchResult:
        result = MicrobatchResult()
        m = run.microbatch
        run.notice_writes()
        if loss is not None:
            loss = run.newest(loss)
            check_differentiable(loss)
            result.loss = loss.detach()
            if self.weights[m]:  # else it contributes nothing: 0 times what is no number is none
                run.add_root(run.hop_of(loss), edge_of(loss), self._root(m, result.loss))
        if "outputs" in self.want:
            for leaf in leaves(output):
                if self.cut and "loss" not in self.want:
                    result.edges.append(self._edge(run, leaf))
                result.on_host.append(isinstance(leaf, Tensor) and run.stays(leaf))
            result.outputs = map_tensors(
                lambda t: run.newest(t).detach() if self.cut or "loss" in self.want else t,
                output,
            )
        return result

    def _root(self, m: int, loss: Tensor) -> Tensor:
        """The gradient that a micro-batch's loss starts from: its weight."""
        if self.isolate_as is not None:
            return torch.full_like(loss, self.weights[m])
        key = self.weights[m], loss.dtype, loss.device
        if key not in self._roots:
            self._roots[key] = torch.full_like(loss, self.weights[m])
        return self._roots[key].view(loss.shape)

    def _edge(self, run: MicrobatchRun, leaf: Any) -> tuple[int, GradientEdge] | None:
        if not isinstance(leaf, Tensor):
            return None
        leaf = run.newest(leaf)
        if not leaf.requires_grad:
            return None
        return run.hop_of(leaf), edge_of(leaf)

    # --- one backward action

    def _backward(self, action: Action) -> None:
        run = self.runs[action.microbatch]
        hop = self.prepared.recording.hops[action.hop]
        stage = hop.stage
        phase = "recomputation" if action.kind == "R" else "backward"
        cursor = Cursor()
        cursor.stage = stage
        outer = set_cursor(cursor)  # for hooks of the user's: which stage is this?
        try:
            self._be_on(stage)
            takes_turn = hop.reruns_forward and self._any_draws
            if self.isolate_as is None and not takes_turn:
                self._run_backward(run, action)
                return
            with ExitStack() as stack:
                if takes_turn:
                    stack.enter_context(own_turn())
                if self.isolate_as is not None:
                    stack.enter_context(Sanitizer(self.isolate_as, action.microbatch, stage, phase))
                self._run_backward(run, action)
        except Abandoned:
            raise
        except BaseException as error:
            _note(error, phase, action.microbatch, stage)
            raise
        finally:
            set_cursor(outer)

    @cached_property
    def _any_draws(self) -> bool:
        """Whether anything of the step draws numbers: torch.utils.checkpoint sets the generators
        before it runs a part again, and after, also where that part draws none."""
        return any(self.step.sources)

    def _run_backward(self, run: MicrobatchRun, action: Action) -> None:
        kind, hop, m = action
        if self.observer is not None:
            self.observer.begins(kind, hop, self.prepared.route[hop], m)
        if kind == "R":
            run.restore(hop)
        elif kind == "W":
            run.finish_backward(hop)
        elif not self._split:
            run.backward(hop)
        else:
            split = (hop, m) in self._split and self.prepared.recording.splits_backward[hop]
            run.backward(hop, split=split, before_whole=partial(self._finish_before, hop, m))
        if self.observer is not None:
            self.observer.ends(kind, hop, m)

    def _finish_before(self, hop: int, m: int) -> None:
        """The parameters' gradients of earlier micro-batches: ``.grad`` adds up in their order,
        also where only this one's backward cannot be split."""
        for earlier in range(m):
            self.runs[earlier].finish_backward(hop)


class _FixedCursor(Cursor):
    """The cursor where the recording saw no mark move it."""

    def __init__(self, stage: int, microbatch: int) -> None:
        super().__init__()
        self.stage = stage
        self.microbatch = microbatch

    def move(self, stage: int, mark: Mark | None) -> None:
        if stage != self.stage:
            raise RouteError(
                f"micro-batch {self.microbatch} goes to stage {stage}, but the recorded route is "
                f"[{self.stage}] ({users_line()}); give Pipeline a sample that takes this way"
            )


def _note(error: BaseException, phase: str, microbatch: int, stage: int | None) -> None:
    where = "" if stage is None else f" on stage {stage}"
    remedy = ""
    if phase == "recomputation" and not isinstance(error, BlockpipeError):
        remedy = (
            "; in the forward it ran, so something has changed since (a cache that it was given: "
            "use_cache=False; state of its own): mark it with checkpoint=False"
        )
    with contextlib.suppress(Exception):  # of the user's own class, it may refuse
        error.add_note(
            f"blockpipe: in the {phase} of micro-batch {microbatch}{where}, "
            f"at {failing_line(error.__traceback__)}{remedy}"
        )
