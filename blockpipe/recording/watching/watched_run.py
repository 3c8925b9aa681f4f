"""Run a forward once with all watchers around the model, and remove them again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.modules import MISSING, STATE, StateWithoutStandIns
from ..._common.nested import map_tensors, tensors
from ..._common.progress import Progress
from ..._common.threads.thread_state import as_ours, theirs
from ..._torch.modules import COMPILED_CALL, is_compiled, no_cached_parametrizations
from ..._torch.tensors import version_of
from ...costs.meter import Meter
from ...crossing.step_context import Graphs, KnownForward, StepContext
from ...crossing.tags import was_written
from ...crossing.torch_patches import Eager, GeneratorStates, SettingsSet
from ...crossing.user_checkpoints import intercepting
from ...restoring.holders import Holder, container_of
from ...stages.cursor import set_cursor
from ..calls import hops_by_path
from ..entries import Hop, SharedChange
from ..outside.code_beside import CodeBeside
from ..outside.compared_members import unread_switches
from ..outside.outside_state import OutsideState
from ..plain_values.begun_anew import set_beside
from ..plain_values.evaluation.index_uses import IndexUses
from ..plain_values.kinds import traced_on, turning_values
from ..plain_values.missed.other_ways import note_by_size
from ..plain_values.shared_values import SharedValues
from ..plain_values.still_code import hooks_in, may_set_by
from ..plain_values.taken_in import made_in, made_since
from ..plain_values.tensors.shared_tensors import note_shared_tensors
from ..plain_values.tensors.tensor_uses import ForwardsTensors
from ..plain_values.used_attributes import used_attributes
from ..plain_values.values import back, note_kept
from ..plan_resolution import Stages
from ..reads import NamesRead
from ..recording import Recording
from ..sample import RecordRequest
from ..sealing import LEAVES, MAY_READ, calls_that_leave_tensors, conclude
from ..shared_changes import SharedChanges
from .backward_code import (
    ModuleHooksSeen,
    NodeHooksSeen,
    called_by_hooks,
    check_several,
    tensors_bound_to,
)
from .costs import note_split_backwards, roots_of
from .held import held_tensors, hops_reading
from .late.lasting_memory import LastingMemory
from .late.late_backwards import LateBackwards
from .late.late_reads import LateReads
from .late.outputs import is_written, lasting_behind, outputs_of
from .late.uses_inside import UsesInside
from .mode import PackingSeen, RecordedForward, RecordingMode, SwapsSeen
from .read_beside import ReadBeside
from .recorder import Recorder
from .saved_tensors import Activations, HooksRefusedError
from .watched_cursor import WatchedCursor, passed_over, unreached


@as_ours
@no_cached_parametrizations()
def run_watched(
    request: RecordRequest, is_second: bool, *, fake: bool, holders: list[Holder]
) -> Recording:
    """Run a forward once and write down what it does; only the cursor is put back.

    Args:
        request: the forward.
        is_second: whether it looks at the changes of a first run.
        fake: whether its tensors are fake.
        holders: the holders of the user's objects around the model.
    """
    model, planned = request.model, request.planned
    put_back, holders = holders, [*holders, *(made_since(holders) if is_second else ())]
    result = Recording(type(model).__name__, fake, planned=planned is not None)
    result.planned_at = None if planned is None else planned.where
    recorder = _watching(request, result, holders)
    recorder.late.crossed = request.crossed
    recorder.late.crossed.begins(is_second=is_second)
    beside = [*(hook.function for hook in request.hooks), *filter(None, [request.loss_fn])]
    traces = is_second or may_set_by(beside) or request.on_index is not None
    values = _watching_values(request, recorder, holders, put_back, fake=fake, traces=traces)
    versions = {id(t): (t, version_of(t)) for t in (*model.parameters(), *model.buffers())}
    _watch_calls(model, recorder, {} if planned is None else planned.stages)
    before = set_cursor(recorder.run.cursor)
    try:
        inputs = _as_inputs(recorder, (request.args, request.kwargs))
        given = [(tensor, version_of(tensor)) for tensor in tensors(inputs)]
        recorder.late.crossed.given(tensor for tensor, _ in given)
        output = _run(model, inputs, recorder, values)
        result.views_of_inputs = set(recorder.late.crossed.views)
        result.writes_inputs = any(t.is_inference() or was_written(t, at) for t, at in given)
        values.check()
        _note_backwards(request, recorder, output)
        kept = recorder.held.keys() | {id(tensor) for tensor, _ in given}
        result.outputs = list(outputs_of(output, kept))
        behind = [*lasting_behind(output, recorder)]
        _note_code_beside(request, recorder, values)
        _note_state(model, recorder, values, [*holders, *request.modes])
        found = calls_that_leave_tensors(model, output, recorder, request.loss_fn)
        recorder.opens[LEAVES] = [*found]
        _note_tensors(recorder, values, versions)
        result.shared_changes += _draws(model, recorder, values)
    finally:
        set_cursor(before)
        recorder.activations.on_saved = None  # a graph that stays keeps the hooks
        recorder.late.forget()
        recorder.abandon()
    if not result.hops:
        result.hops.append(Hop(0, 0, None, "the start"))
    try:
        conclude(model, recorder, versions)
    finally:
        recorder.activations.forget()
    result.overwrites_outputs = any(is_written(base, recorder) for base in behind)
    if planned is None:
        result.unreached = [*unreached(model, result), *passed_over(result.hops)]
    return result


def _watching_values(
    request: RecordRequest,
    recorder: Recorder,
    holders: list[Holder],
    put_back: list[Holder],
    *,
    fake: bool,
    traces: bool,
) -> SharedValues:
    """Make what watches the values of the user's that a forward reads and sets."""
    around, modules = [*holders, *request.modes], dict(request.model.named_modules())
    here = recorder.hop_here, lambda: recorder.calls.innermost
    values = SharedValues(around, put_back, modules, *here, fake=fake, traces=traces)
    values.known.asked.turned = request.turned
    values.known.ignore(h.owner for h in request.modes if container_of(h.owner) is not None)
    of_batch = [one.owner for one in made_in([*request.args, *request.kwargs.values()])]
    values.sizes.given(type(request.model).forward, of_batch)
    values.coverage.leave_out(of_batch)
    values.on_read = ReadBeside(recorder.key, here[0], recorder.calls.with_arguments).found
    values.indices = IndexUses(request.on_index)
    values.missed.lasts = values.untaken.lasts = recorder.outlives
    itself: Any = weakref.proxy(recorder)  # a cycle would keep what the forward has made
    values.known.libraries.before_undone = partial(Recorder.look, itself)
    return values


def _watching(request: RecordRequest, result: Recording, holders: list[Holder]) -> Recorder:
    """Make the watchers of a forward, which know the model's parameters and do not run yet."""
    model, modules = request.model, dict(request.model.named_modules())
    graphs = Graphs(differentiable=torch.is_grad_enabled(), cut=request.cut, split=True)
    step = StepContext([], {}, request.devices, graphs, KnownForward())
    cursor = WatchedCursor(follow_marks=request.planned is None)
    activations = Activations([*model.parameters(), *model.buffers()])
    recorder = Recorder(step, cursor, result, activations, request.unhookable)
    recorder.calls.compiled = {path for path, module in modules.items() if is_compiled(module)}
    recorder.failed, recorder.check_interrupts = request.failed, request.signals.check
    step.on_checkpoint = recorder.backward_code.begins_checkpoint
    recorder.held, recorder.stand_ins = held_tensors(model, result), request.stand_ins
    memory = LastingMemory(recorder.held, [*model.parameters(), *model.buffers()])
    around = recorder.hop_here, lambda: recorder.costs.function, recorder.custom.is_in_reentrant
    reads = LateReads(memory, *around)
    told = recorder.hop_here, recorder.wrote_unseen
    recorder.late = LateBackwards(recorder.held, memory, reads, *told)
    recorder.late.inside = UsesInside(
        *(memory, recorder.held, recorder.outside_tensors),
        hop=lambda: recorder.hop,
        is_in_function=lambda: recorder.run.sealed > 0,
        is_packing=lambda: reads.packing > 0,
        reads=recorder.note_read,
        is_own=recorder.has_made,
    )
    activations.on_saved = reads.saved if graphs.differentiable else None
    recorder.changes, recorder.outside = SharedChanges(model), OutsideState(holders, modules)
    recorder.backward_code.beside = CodeBeside(modules)
    recorder.users = {p for p, module in modules.items() if is_users(type(module).__module__)}
    result.unhookable = sorted(request.unhookable)
    return recorder


def _watch_calls(model: nn.Module, recorder: Recorder, stages: Stages) -> None:
    """Put stand-ins on the modules, which report their calls; the caller restores the modules."""
    for path, module in model.named_modules():
        names, forward = module.__dict__, module.forward
        if isinstance(forward, RecordedForward):
            forward = forward.forward  # this is the second run
        stand_in = RecordedForward(forward, path, module, recorder, stages.get(path))
        own = names.get("forward", MISSING)
        stand_in.own = own.own if isinstance(own, RecordedForward) else own
        names[STATE], names["forward"] = StateWithoutStandIns(module), stand_in
        names.pop(COMPILED_CALL, None)


def _run(model: nn.Module, inputs: Any, recorder: Recorder, values: SharedValues) -> Any:
    """Call the model while all watchers run, and return its output."""
    args, kwargs = inputs
    meter = Meter(recorder.costs.spent, recorder.costs.waited, *_told_below(recorder))
    meter.gathers, meter.made = partial(_gathers, recorder), recorder.late.inside.made
    meter.computes = lambda body: recorder.backward_code.computes(body, max(recorder.hop, 0))
    about, modules = f"recording {recorder.result.model}", sum(1 for _ in model.modules())
    with Progress(about, modules, "module calls") as recorder.calls.progress:
        with (
            intercepting(),
            GeneratorStates(),
            SettingsSet(),
            NodeHooksSeen(),
            ModuleHooksSeen(),
            PackingSeen(),
            SwapsSeen(),
            Eager(),
            _watched(recorder),
        ):
            with theirs(), RecordingMode(recorder), meter, values.watching():
                output = model(*args, **kwargs)
            recorder.run.notice_writes()
            for tensor in tensors(output):
                newest = recorder.run.newest(tensor)
                is_own = recorder.has_made(newest) or id(newest) in recorder.held
                if recorder.run.is_foreign(newest) or not is_own:
                    recorder.read_view(newest)
                if not recorder.late.memory.behind(newest):
                    recorder.late.crossed.returned(newest)
    return output


def _gathers(recorder: Recorder) -> bool:
    """Note a collective; return whether to leave it out. Other processes may not record now, and
    fake tensors make none."""
    recorder.changes.at_collective(recorder.hop)
    return not recorder.result.fake


def _told_below(recorder: Recorder) -> tuple[Callable[..., None], ...]:
    """Return what is told of draws, statistics, arguments, writes and reads below autograd."""
    late = recorder.late

    def wrote(tensor: Tensor) -> None:
        recorder.late.inside.writing([recorder.stand_in(tensor)])
        for held in late.updates(tensor):
            recorder.wrote(held)

    def writing(written: Iterable[Tensor]) -> None:
        written = [*written]
        recorder.late.inside.writing(map(recorder.stand_in, written))
        recorder.late.crossed.writing(written, recorder.hop)
        for tensor in written:
            if late.memory.place_of(tensor) is None:
                late.crossed.filled(tensor)
        late.writing(written)

    def given(operands: Iterable[Tensor]) -> None:
        operands = [*operands]
        recorder.late.inside.given(map(recorder.stand_in, operands))
        recorder.given(operands)

    fills = partial(recorder.calls.refuse, "autograd saves its noise before it is drawn (RReLU)")
    return recorder.draws.drew, wrote, given, writing, fills, late.reading


def _note_backwards(request: RecordRequest, recorder: Recorder, output: Any) -> None:
    """Write down what the graphs of the hops tell of their backwards."""
    if not recorder.step.graphs.differentiable:
        return  # under no_grad, where an alias of a leaf needs grad and has no place in a graph
    roots = roots_of(recorder.run, output)
    note_split_backwards(recorder.run, recorder.result, roots)
    for hop, begins in roots.items() if request.cut else ():
        recorder.backward_code.has_graph(hop, [edge.node for edge, _ in begins])


def _note_code_beside(request: RecordRequest, recorder: Recorder, values: SharedValues) -> None:
    """Write down what the code that autograd calls sets and reads in the backwards of hops, that
    of the user's operators, and that of the loss on the last one."""
    operators = [*recorder.backward_code.operators.values()]
    for body, given, hop in (*((body, None, hop) for body, hop in operators), *request.beside):
        values.runs_beside(body, given, hop, lasts=True)
    if not values.traces:
        recorder.result.changes_unseen = may_set_by(body for body, _ in operators)
    if recorder.step.graphs.differentiable:
        hooks = {(id(one.function), one.name): one for one in request.hooks}
        for added in hooks_in(request.model):  # by the forward
            hooks.setdefault((id(added.function), added.name), added)
        found = called_by_hooks(hooks.values(), recorder.result, recorder.step.adopted())
        called = [*found, *recorder.backward_code.called]
        recorder.result.code_in_backward = {one.hop for one in called} | values.untaken.calls_late
        if request.cut:
            check_several((one.function, one.hop) for one in called)
        # No walk through the model finds what hooks of parameters use.
        lasting = {id(one.function) for one in request.hooks}
        for function, given, hop in called:
            values.runs_beside(function, given, back(hop), lasts=id(function) in lasting)
            recorder.backward_code.beside.note(function, given, hop)
            for tensor in tensors_bound_to(function):
                recorder.late.reads.in_code(tensor, hop, recorder.result.hops[hop].where)
        if recorder.backward_code.around is not None:
            pack, unpack = recorder.backward_code.around
            for hop in range(len(recorder.result.hops)):
                values.runs_beside(pack, None, hop, lasts=True)
                values.runs_beside(unpack, None, back(hop), lasts=True)
        if not values.traces:  # the second run traces the reads of what these set
            recorder.result.changes_unseen |= may_set_by(one.function for one in called)
        _note_late(recorder, values)
    if request.loss_fn is not None:
        hop = max(recorder.hop, 0)
        values.loss_runs(request.loss_fn, hop, cut=request.cut)
        recorder.backward_code.beside.note(request.loss_fn, None, hop)


def _note_tensors(
    recorder: Recorder, values: SharedValues, versions: Mapping[int, tuple[Tensor, int]]
) -> None:
    """Write down the tensors that code which did not run would share with the forward."""
    forward = ForwardsTensors(
        recorder.held,
        recorder.outside_tensors.found(),
        recorder.stand_ins,
        [tensor for tensor, _ in versions.values()],
        lambda tensor: version_of(tensor) != versions[id(tensor)][1],
    )
    note_shared_tensors(recorder.result, forward, values.tensors, values.missed, values.untaken)
    recorder.opens[MAY_READ] = [*values.untaken.calls(forward)]


def _note_late(recorder: Recorder, values: SharedValues) -> None:
    """Write down what backwards must not come after, of which the next forward is one."""
    late = recorder.late
    for tensor, hop, where in values.tensors.read_late:
        if not late.memory.knows(recorder.stand_in(tensor)):  # else it is no alias
            late.reads.in_code(tensor, hop, where)
    for written in (*values.untaken.may_write(), *values.missed.statistics):
        late.may_write(*written)
    for read in values.missed.again:
        late.reads.in_code(*read)
    learned = (tensor for tensor, _, _ in values.missed.statistics)
    for statistic in (*values.untaken.may_read_late(), *learned):
        late.reads.may_read(statistic)
    recorder.result.late_backwards = list(late.found())
    recorder.result.late_if_packed = list(late.found_if_packed())


def _draws(model: nn.Module, recorder: Recorder, values: SharedValues) -> Iterable[SharedChange]:
    """The draws of code beside the forward from a generator that is also drawn from elsewhere."""
    if len(recorder.result.hops) < 2:
        return ()
    return values.draws.shared(recorder.draws.generators, one_each=_is_accelerated(model))


def _is_accelerated(model: nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type not in ("cpu", "meta")


def _note_state(
    model: nn.Module, recorder: Recorder, values: SharedValues, holders: list[Holder]
) -> None:
    """Write down the state that the forward has changed, and the values that it does not read."""
    result, known = recorder.result, values.known
    recorder.outside.look(recorder.hop)
    read_on = partial(hops_reading, recorder.held, recorder.outside_tensors)
    reads = NamesRead((holder.owner for holder in holders), model.modules())
    for of_module in recorder.changes.set_by_libraries(result):
        values.known.changed(*of_module)
    for change in recorder.outside.changed():
        values.known.changed(*change)
        result.changes_unseen |= not values.traces
    every = [value for value, _, _ in known.each()]
    note_kept(every, recorder.backward_code.held())
    result.shared_changes = [
        *recorder.changes.found(result, recorder.held, reads, read_on),
        *recorder.outside.found(result, reads, read_on, partial(traced_on, known)),
        *recorder.outside_tensors.shared(),
        *recorder.backward_code.beside.shared(len(result.hops), hops_by_path(result.calls)),
        *known.found(reads, result, recorder.held),
        *recorder.backward_code.read_by_libraries(model, result),
    ]
    result.changes_unseen |= known.asked.turn_later()
    note_by_size(known, reads, result, recorder.held)
    result.way = values.way(reads, recorder.draws.generators)
    recorder.sets, recorder.carries = [*known.sets_by_call()], [*known.reads_by_call()]
    result.carried = list(values.known.carried(reads))
    result.turning = [*turning_values(known, reads, values.lasting.first)]
    modules = dict(model.named_modules(remove_duplicate=False))
    result.attributes = [*used_attributes(known, reads, modules, result)]
    result.outside = recorder.outside_tensors.found()
    result.may_toggle = values.toggles or recorder.changes.toggles
    result.sets, result.changed = {**recorder.outside.sets, **values.sets}, recorder.outside.places
    result.only_read, result.may_set = known.only_read(), dict(values.untaken.sets)
    result.read_in, result.assigned = known.read_in(), known.assigned()
    result.switches = recorder.changes.switches
    result.collects = recorder.outside.collects or values.known.looks_up
    result.unread, result.set_beside = set(unread_switches(model, reads)), set_beside(every)
    result.read_by_loss |= known.read_by_loss()


@contextlib.contextmanager
def counting_writes() -> Iterator[None]:
    """Record without gradients instead of in inference mode, whose tensors count no versions."""
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextlib.contextmanager
def _watched(recorder: Recorder) -> Iterator[None]:
    recorder.begin()
    try:
        yield
    except RuntimeError as error:
        call = recorder.calls.failed_in
        path = "" if call is None else call.path
        if "support saved tensor hooks" in str(error) and path not in recorder.calls.unhookable:
            raise HooksRefusedError(path) from error
        raise
    finally:
        recorder.end()


def _as_inputs(recorder: Recorder, value: Any) -> Any:
    """Tag the inputs as made on hop 0, before there is one, on stage 0's device."""
    memo: dict[int, Tensor] = {}

    def taken(tensor: Tensor) -> Tensor:
        if id(tensor) in recorder.held:
            return tensor
        if id(tensor) not in memo:
            memo[id(tensor)] = recorder.take_input(tensor)
        return memo[id(tensor)]

    inputs = map_tensors(taken, value)
    recorder.activations.inputs(memo.values())
    return inputs
