"""The listener that writes down a recorded run as entries of a :class:`Recording`.

That run is one like every other, but operations are intercepted inside of modules too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._common.text import dtype_text
from ..._common.threads.thread_state import ours
from ..._torch.modes import inside_of_transforms
from ..._torch.scripted import read_by_script
from ..._torch.tensors import FakeTensor, shape_of, version_of
from ...costs.work import size_of
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.step_context import StepContext
from ...crossing.tags import RECORDING, TAG, MicrobatchKey, ParameterHome, Tag
from ...crossing.tensors.place import Reads
from ...crossing.uncut_run import UncutRun
from ...errors import CrossingError, PlanError
from ...stages.cursor import Mark
from ...stages.plan import too_few_devices
from ..calls import Call
from ..entries import CrossingInfo, Hop, TensorInfo, note_unmarked
from ..outside.outside_state import OutsideState
from ..outside.outside_tensors import OutsideTensors
from ..recording import Recording
from ..segments import Segments
from ..shared_changes import SharedChanges
from .backward_code import BackwardCode
from .calls import CallsUnderWay, RecordedTag, is_made_by
from .costs import RecordedWork
from .custom_functions import AppliedFunctions
from .draws import RandomDraws, line
from .late.late_backwards import LateBackwards
from .saved_tensors import Activations
from .watched_cursor import WatchedCursor

SCRIPTED = "it runs TorchScript, which saves other tensors once it has optimized itself"


class Recorder:
    """The listener of the recording's run, which writes down what the run does.

    Args:
        step: the recording's step; its route grows as the run goes on.
        cursor: the cursor, which the forward's marks move.
        result: the recording that all entries are added to.
        activations: the tensors that autograd saves.
        unhookable: paths of calls in which autograd allows no saved-tensor hooks.

    Attributes:
        run: the run that is watched.
    """

    def __init__(
        self,
        step: StepContext,
        cursor: WatchedCursor,
        result: Recording,
        activations: Activations,
        unhookable: Collection[str] = (),
    ) -> None:
        kind = MicrobatchRun if step.graphs.cut else UncutRun
        self.step, self.activations = step, activations
        self.key = MicrobatchKey(RECORDING, 0)
        self.run = kind(step, 0, cursor, self.key, listener=self)
        self._read = self.run.reader()
        self.segments = Segments(result.segments, result.flows)
        self.calls = CallsUnderWay(self.run, result, self.segments, activations, unhookable)
        self.custom = AppliedFunctions(self.run, self.calls)
        self.costs = RecordedWork(self.run, result, self.segments, self.calls)
        self.draws = RandomDraws(self.run, result, self.calls)
        cursor.on_mark, cursor.on_leave, cursor.on_move = self.met, self.moved, None
        cursor.on_tell_apart = self.told_apart
        self.cursor, self.result = cursor, result
        self.begun_by: str | None = None  # the call with which a plan moved the cursor last
        self.held: dict[int, TensorInfo] = {}
        self.stand_ins: Mapping[int, Tensor] = {}  # see RecordRequest
        self.reads: dict[int, set[int]] = {}  # id of a call → hops its parameters live on
        self.checkpointed_in, self.opens = list[Call | None](), dict[str, list[Call]]()
        self.sets: list[tuple[str, Call | None, str]] = []
        self.carries: list[tuple[str, Call | None, str]] = []  # reads of what the last one has set
        self.backward_code = BackwardCode()
        self.outsiders: list[tuple[Tensor, int]] = []  # what an operation may write to
        self.outside_tensors = OutsideTensors()
        self.late: LateBackwards
        self.check_interrupts: Callable[[], None]
        self.changes: SharedChanges
        self.outside: OutsideState
        self.users, self.failed = set[str](), list[Exception]()  # paths of the user's own modules
        self._sources: dict[int, Call] = {}  # calls that made what the operation under way reads

    @property
    def hop(self) -> int:
        """The hop that the run is on; -1 before the first."""
        return self.run.hop

    @property
    def stage(self) -> int:
        """The stage that the run is on."""
        return self.run.stage

    def begin(self) -> None:
        """Begin to watch: the forward is about to run."""
        self.backward_code.begin(self.activations.put_on)
        self.draws.begin()

    def end(self) -> None:
        """Look for the last time, and stop watching."""
        self.draws.look()
        self.activations.take_off()

    # --- the route

    def departs(self, stage: int) -> None:
        """Write down the hop that the run is about to begin."""
        self._check_device(stage)
        self.backward_code.begins_hop()
        hop = self.hop + 1
        self.step.route.append(stage)
        mark = self.cursor.mark
        name = mark.name if mark else None
        where = mark.where if mark else users_line() if hop else "the start"
        marks = self.cursor.take_marks()
        self.result.hops.append(Hop(hop, stage, name, where, self.begun_by, marks))

    def arrived(self) -> None:
        """Look at the generators: the run is on the new hop."""
        self.draws.look()  # since the mark: the forward waits for its turn there

    def _check_device(self, stage: int) -> None:
        if self.step.devices is not None and stage >= len(self.step.devices):
            mark = self.cursor.mark
            where = mark.where if mark else self.begun_by or users_line()
            if self.result.planned_at is not None:
                where += f", set at {self.result.planned_at}"
            raise PlanError(f"{too_few_devices(stage + 1, len(self.step.devices))} ({where})")

    def met(self, mark: Mark) -> None:
        """Write down a mark, and the innermost call that it was first met in."""
        self.result.marks.setdefault(mark.where, self.calls.innermost)

    def told_apart(self) -> None:
        """Open the calls under way: run again, each would keep its micro-batch's state again."""
        for call in self.calls:
            call.open(f"it keeps state of its own for each micro-batch ({line()})")

    def moved(self, stage: int) -> None:
        """Open the calls under way: a mark moves the cursor, so none of them stays on one stage."""
        if self.run.sealed:
            checkpoint = "; torch.utils.checkpoint: pass use_reentrant=False"
            raise CrossingError(
                f"a mark inside the forward of autograd.Function {self.custom.last!r} asks for "
                f"stage {stage} ({users_line()}), but its backward runs as one, on one stage; "
                f"mark around it{checkpoint if self.custom.is_in_reentrant() else ''}"
            )
        if self.cursor.passes_over(stage, self.result.route):
            self.run.arrive()
        if self.hop >= 0:  # else the first hop drew
            self.draws.look()
            self.outside.look(self.hop)
        self.result.moves = True
        for call in self.calls:
            call.open(f"a mark inside of it moves the forward ({line()})")

    def look_outside(self) -> None:
        """Look whether the user's own code has changed its objects, before it runs something."""
        if (innermost := self.calls.innermost) is None or innermost.path in self.users:
            self.outside.look(self.hop_here())

    def look(self) -> None:
        """Look at what code may have changed, before that is put back."""
        self.look_outside()
        self.changes.at_operation(self.hop_here())

    def hop_here(self) -> int:
        """Return the hop that the user's code is on."""
        return self.run.place.hop_from(self.cursor.stage)

    # --- operations

    def operation(self) -> None:
        """Write down an operation, as a part of every call that is under way."""
        hop = self.run.arrive()
        info = self.result.hops[hop]
        info.operations += 1
        self.segments.operation()
        self._sources = {}
        self.calls.visit(hop, line())
        cursor = self.cursor
        is_between = not cursor.in_scope and (not cursor.is_marked or cursor.block_ended)
        if is_between and cursor.follow_marks:  # else a plan says where everything is
            after = None if cursor.mark is None else cursor.mark.where
            note_unmarked(self.result.unmarked, self.stage, users_line(), after)
        innermost = self.calls.innermost
        self.activations.at(hop, innermost, self.segments.current.index)
        if self.backward_code.packs(hop):
            info.whole = "it recomputes, or packs its saved tensors"
            info.reruns_forward = True

    def read(self, tensor: Tensor, reads: Reads) -> Tensor:
        """Note that an operation reads a tensor, or what a transform is given, and read it."""
        tensor = self.stand_in(tensor)
        inner = self.stand_in(inside_of_transforms(tensor))
        self._note_origin(inner)
        is_untagged = getattr(tensor, TAG, None) is None
        if not self.has_made(inner):
            self.late.memory.add(inner)
        tag: Tag | None = getattr(inner, TAG, None)
        is_first = isinstance(tag, RecordedTag) and tag.key is not self.key  # the first run's
        if self.step.graphs.cut and (is_first or tag is None or tag.key.is_beyond(self.key)):
            held = self.held.get(id(inner))
            if held is None and (is_first or not isinstance(inner, FakeTensor)):
                self.outside_tensors.read(inner, self.hop)
            if held is None or not held.is_buffer:
                self.outsiders.append((inner, version_of(inner)))
        try:
            return self._read(tensor, reads)
        except CrossingError as error:
            if not is_untagged:
                raise
            # A sealed module is not looked into (torch.func makes such tensors): see conclude.
            self.custom.fail(error.with_traceback(None))
            return tensor

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for a parameter or a buffer in a fake run."""
        return self.stand_ins.get(id(tensor), tensor)

    def _note_origin(self, tensor: Tensor) -> None:
        """Note where a tensor that is read comes from, and what that means for the calls."""
        key = id(tensor)
        if (held := self.held.get(key)) is not None:
            self.note_read(tensor, held)
        elif getattr(tensor, TAG, None) is not None and self.outside_tensors.knows(tensor):
            # A real run wrote to it, and it became this micro-batch's.
            self.outside_tensors.read(tensor, self.hop)
        newest = self.run.newest(tensor)
        tag: Tag | None = getattr(newest, TAG, None)
        if tag is not None and tag.key is self.key:  # not another run's, which wrote to it
            if isinstance(tag, RecordedTag):
                self._note_flow(newest, tag)
                self.calls.read_unreturned(tag, line())
            if not tag.is_constant(newest):
                self.calls.read_ungiven(key, newest, tag, line())
        if self.run.is_foreign(newest):
            self.read_view(newest)
            what = "a tensor" if held is None else held.name
            for call in self.calls.not_given(key, id(newest)):
                call.open(f"it reads {what} of another stage, no argument ({line()})")

    def _note_flow(self, tensor: Tensor, tag: RecordedTag) -> None:
        """Note which segment a tensor of this forward comes from, where it is read."""
        self._sources.update((id(call), call) for call in tag.sources)
        size = size_of(tensor)
        tag.flow = self.segments.flow(tag.flow, tag.segment, size, needs_grad=tensor.requires_grad)
        if tag.is_read:
            self.costs.add_gradient(tensor)
        tag.is_read = True

    def check_outsiders(self, func: Callable[..., Any], first: object) -> None:
        """Check after an operation if it wrote to what is neither an argument nor a buffer."""
        outsiders, self.outsiders = self.outsiders, []
        if self.outside_tensors.written_by(func, first, outsiders):
            self._refuse_write()

    def take_input(self, tensor: Tensor) -> Tensor:
        """Return an input of the forward as if it were made on its first hop."""
        value = self.run.take_input(tensor)
        setattr(value, TAG, RecordedTag(self.key, 0, 0, set(), (), 0))
        return value

    def made(self, tensor: Tensor) -> Tag | None:
        """Return the tag for a tensor that was made here."""
        if self.result.fake and not isinstance(tensor, FakeTensor):
            return None  # what a fake run writes to in place, and outlives the recording
        sources, segment = tuple(self._sources.values()), self.segments.current.index
        return RecordedTag(self.key, self.hop, self.stage, set(self.calls), sources, segment)

    def note_read(self, tensor: Tensor, held: TensorInfo) -> None:
        if held.hop is None:
            held.hop, held.stage, held.where = self.hop, self.stage, users_line()
            self.step.homes[id(tensor)] = ParameterHome(tensor, self.hop, self.stage, held.name)
        elif self.stage != held.stage and self.stage not in held.also_read_on:
            held.also_read_on.append(self.stage)
        if self.hop not in held.hops:
            held.hops.append(self.hop)
        self.segments.reads(held)
        self.costs.add_gradient(tensor)  # to `.grad`, or to that of another read
        home_hop = held.hop
        for call in self.calls:
            self.reads.setdefault(id(call), set()).add(home_hop)
            if held.is_buffer:
                call.buffers.add(held.name)

    def read_view(self, tensor: Tensor) -> None:
        """Note that another hop's tensor is read: if it is a view of what lasts, so is that."""
        for base in self.late.memory.behind(tensor):
            if (held := self.held.get(id(base))) is None:
                self.outside_tensors.read(base, self.hop)
            elif self.hop not in held.hops:
                held.hops.append(self.hop)
                held.view_read = held.view_read or users_line()

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether this forward made a tensor."""
        return is_made_by(tensor, self.key)

    def outlives(self, tensor: Tensor) -> bool:
        """Return whether a tensor was there before this forward."""
        is_known = id(tensor) in self.held or self.outside_tensors.knows(tensor)
        return is_known or not self.has_made(tensor)

    def gave(self, arguments: Any) -> bool:
        """Return whether a call in another thread (autograd's, or of the forward's own making) is a
        part of this recording: some of its arguments come from it."""
        return any(isinstance(t, FakeTensor) or self.has_made(t) for t in tensors(arguments))

    def wrote_across(self, tensor: Tensor) -> None:
        """Note that an operation wrote in place to a copy of a tensor of an earlier hop."""
        self.result.writes_across = True
        self.calls.wrote(tensor)

    def abandon(self) -> None:
        """Release everything, and end the cycle of the recorder, its run and its cursor."""
        self.run.abandon()
        self.step.settle()
        self.backward_code.forget()
        del self.outside  # it has met the stand-ins, which hold this
        self.run.place.listener = None
        self.cursor.on_mark = self.cursor.on_leave = self.cursor.on_tell_apart = None
        self.cursor.on_call = None

    def imported(self, tensor: Tensor, home_hop: int, name: str | None) -> None:
        """Write down that a tensor was copied to this hop."""
        if name is None and not self.late.memory.behind(tensor):
            self.late.crossed.imported(tensor, self.hop)
        way = home_hop, self.hop, self.step.route[home_hop], self.stage
        what = shape_of(tensor), dtype_text(tensor.dtype), size_of(tensor)
        grad = tensor.requires_grad and self.step.graphs.differentiable
        here = users_line(), self.calls.innermost
        self.result.crossings.append(CrossingInfo(*way, *what, grad, name, *here))

    # --- module calls

    def watched(
        self,
        path: str,
        kind: str,
        what: object,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call, and write it down."""
        with ours():
            given, closed, is_one = (args, kwargs), self._why_closed(), function is what
            call = self.calls.begin(path, kind, what, given, closed, is_function=is_one)
            if isinstance(what, torch.jit.ScriptModule):
                self.calls.refuse(SCRIPTED)
        result, kernels = None, self.costs.kernels
        try:
            result = function(*args, **kwargs)
            if call.hop is None and self.costs.kernels > kernels:
                with ours():
                    self._note_unseen((args, kwargs, read_by_script(what)), result)
            elif call.transforms and call.sealed:
                with ours():  # no function mode sees how torch.func unwraps its results
                    self.run.claims.claim(result, ())
            return result
        except BaseException:
            self.calls.failed_in = self.calls.failed_in or call
            raise
        finally:
            with ours():
                self.calls.end(call, result)

    def _note_unseen(self, given: Any, result: Any) -> None:
        """Write down operations in a call that no function mode saw, as those of a scripted module
        or an extension. Together they count as one."""
        self.operation()
        reads = Reads()
        for tensor in tensors(given):
            self.read(tensor, reads)
        self.run.claims.claim(result, reads.outside)

    def _why_closed(self) -> Iterator[str]:
        """Yield the reasons why no stage can begin with the call that begins here."""
        yield from self.calls.why_closed()
        if self.run.sealed:
            yield f"it is inside of autograd.Function {self.custom.last!r}"
        if self.backward_code.packs(max(self.hop, 0)):
            yield "it is inside of code that is recomputed, or that packs its saved tensors"

    def wrote(self, tensor: Tensor) -> None:
        """Note that an operation wrote to a tensor without counting up its version."""
        if (held := self.held.get(id(tensor))) is not None:
            held.written = True
        self.outside_tensors.wrote(tensor)

    def wrote_unseen(self, tensor: Tensor) -> None:
        """Note such a write to what is no running statistic."""
        self.wrote(tensor)
        if not getattr(self.held.get(id(tensor)), "is_buffer", False):
            self._refuse_write()

    def _refuse_write(self) -> None:
        self.calls.refuse(f"it writes to a tensor that is no argument and no buffer ({line()})")

    def given(self, operands: Iterable[Tensor]) -> None:
        """Note what an operation below autograd is given. Inside of a custom function nothing else
        shows which buffers it reads, and which tensors that are no arguments of it."""
        for tensor in operands if self.run.sealed else ():
            self.custom.read(tensor)
            held = self.held.get(id(tensor))
            if held is not None and held.is_buffer:
                for call in self.calls:
                    call.buffers.add(held.name)
            elif held is not None:
                if held.hop is None:
                    self.note_read(tensor, held)
                self.custom.read_parameter(held)

    def looked_at_graph(self, tensor: Tensor, hook: object) -> None:
        """Note that the forward asks for a tensor's graph, or registers a hook of the tensor."""
        if self.hop >= 0:
            self.result.hops[self.hop].whole = f"a hook, or a look at the graph ({line()})"
        tag: Tag | None = getattr(tensor, TAG, None)
        hop = max(self.hop if tag is None else tag.hop, 0)
        self.backward_code.looks_at_graph(hop)
        if callable(hook):
            self.backward_code.calls(hook, None, hop)

    def note_checkpoint(self, recompute: Callable[..., Any]) -> None:
        """Note a ``torch.utils.checkpoint``, and the code that runs its function again."""
        self.checkpointed_in.append(self.calls.innermost)
        self.backward_code.runs_again(recompute, max(self.hop, 0))

    def custom_function(self, name: str) -> None:
        """Note that a custom autograd function was applied, whose backward is not known."""
        self.result.hops[max(self.hop, 0)].reruns_forward = True
        self.custom.apply(name)
