"""The recording pass: one micro-batch's forward, watched.

It is a journey like every other, with every operation intercepted, inside modules too; so what it
sees is what a replay will do. With fake tensors it takes no device memory and does no arithmetic;
where a model reads values (``if x.sum() > 0``), it runs for real.

What a forward leaves behind is put back: every module's attributes, the buffers, random states.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.nn.utils.stateless import _reparametrize_module  # type: ignore[attr-defined]

from .blocks import Cursor, Mark, set_cursor
from .errors import BlockpipeError, CrossingError, PlanError, RecordingError
from .glue import CustomFunctions, Doors, Glue
from .journey import TAG, Home, Journey, JourneyKey, Step, Tag
from .plan import Assignment, StagePlan, gaps, too_few_devices
from .transfer import carry
from .tree import map_tensors, tensors
from .where import users_line

@dataclass
class Hop:
    """One unbroken visit of the forward to a stage."""

    index: int
    stage: int
    name: str | None
    where: str
    mark: int = 0  # which of the forward's marks it began with; 0: none
    operations: int = 0


@dataclass(eq=False)
class Call:
    """One call of a module: its path, which of its calls, and where it ran."""

    path: str
    kind: str
    call: int
    depth: int
    where: str
    hop: int | None = None  # of its first operation; None: it did nothing
    last_hop: int | None = None
    sealed: bool = True
    parent: Call | None = field(default=None, repr=False)
    stage: int = 0
    under_way: bool = field(default=True, repr=False)


@dataclass
class Held:
    """A parameter or buffer: all its names, its size, and who reads it."""

    names: list[str]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    elements: int
    trainable: bool
    is_buffer: bool
    stage: int = 0
    hop: int | None = None  # the first that reads it; None: no call does
    hops: list[int] = field(default_factory=list)  # all that read it
    also_read_on: list[int] = field(default_factory=list)  # stages other than its own
    written: bool = False  # in place, by the forward
    where: str = ""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass
class CrossingInfo:
    """A tensor read on another hop than the one it was made on, or lives on."""

    from_hop: int
    to_hop: int
    from_stage: int
    to_stage: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    needs_grad: bool
    what: str | None  # the name, for a parameter or buffer
    where: str


@dataclass
class Unmarked:
    """Operations that belong to no mark: before the first, or after an outermost block's end."""

    stage: int
    where: str
    operations: int
    after: str | None


@dataclass
class Recording:
    """What a forward does, stage by stage. Plain data: it holds no tensor and no module.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> recording.route, recording.num_stages, recording.crossings[0].bytes
        ([0, 1], 2, 128)
    """

    model: str
    fake: bool
    hops: list[Hop] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parameters: list[Held] = field(default_factory=list)
    buffers: list[Held] = field(default_factory=list)
    crossings: list[CrossingInfo] = field(default_factory=list)
    unmarked: list[Unmarked] = field(default_factory=list)
    sealed: dict[str, frozenset[int]] = field(default_factory=dict)
    custom_functions: list[str] = field(default_factory=list)
    recomputes: bool = False
    moves: bool = False  # whether a mark ever asked for another stage
    why_real: str | None = None
    types: dict[str, str] = field(default_factory=dict)

    @property
    def route(self) -> list[int]:
        """The stage of each hop."""
        return [hop.stage for hop in self.hops]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return max(self.route, default=0) + 1

    @property
    def plan(self) -> StagePlan:
        """Which module call is on which stage."""
        return StagePlan([Assignment(c.path, c.call, c.stage) for c in self.calls if c.path])

    @property
    def tied(self) -> list[Held]:
        """Parameters that have several names, or are read on several stages."""
        return [p for p in self.parameters if len(p.names) > 1 or p.also_read_on]

    @property
    def shared_state(self) -> list[Held]:
        """Buffers that the forward writes and that several hops read: micro-batches under way at
        once would mix in them."""
        return [b for b in self.buffers if b.written and len(b.hops) > 1]

    @property
    def unused(self) -> list[Held]:
        """Parameters that no call reads."""
        return [p for p in self.parameters if p.hop is None]

    def check(self, devices: int | None = None) -> None:
        """Raise one :class:`PlanError` for gaps in the stages, or too few devices."""
        problems = gaps(self.route)
        if devices is not None and self.num_stages > devices:
            marks = ", ".join(f"stage {h.stage} at {h.where}" for h in self.hops)
            problems.append(f"{too_few_devices(self.num_stages, devices)} ({marks})")
        elif problems:
            problems[-1] += " (" + ", ".join(f"stage {h.stage}: {h.where}" for h in self.hops) + ")"
        if problems:
            raise PlanError("; ".join(problems))

    def summary(self, devices: list[str] | None = None) -> str:
        """A table: modules with their stages, totals, crossings, warnings."""
        from .summary import summarize

        return summarize(self, devices)


class _RecordedTag(Tag):
    """A tag that knows inside which calls its tensor was made, and which of them returned it."""

    __slots__ = ("calls", "returned_by")

    def __init__(self, key: JourneyKey, hop: int, stage: int, calls: set[Call]) -> None:
        super().__init__(key, hop, stage)
        self.calls = calls
        self.returned_by: set[Call] = set()


class _WatchedCursor(Cursor):
    """A cursor that tells the recording when a mark moves it."""

    recorder: Recorder
    moves = 0

    def move(self, stage: int, mark: Mark | None) -> None:
        self.moves += 1
        if stage != self.stage:
            self.recorder.moved()
        super().move(stage, mark)
        if mark is not None:
            self.recorder.marked = True


class Recorder(Journey):
    """The journey of the recording pass."""

    def __init__(self, step: Step, cursor: _WatchedCursor, result: Recording) -> None:
        super().__init__(step, 0, cursor)
        cursor.recorder = self
        cursor.on_move = None
        self.cursor: _WatchedCursor = cursor
        self.result = result
        self.marked = False
        self.stack: list[tuple[Call, set[int], object]] = []
        self.held: dict[int, Held] = {}
        self.reads: dict[int, set[int]] = {}  # id of a call → hops its parameters live on
        self.writers: dict[int, set[int]] = {}
        self.recomputed_in: list[Call | None] = []
        self.custom_in: list[tuple[str, Call | None]] = []
        self.hook_calls: list[Call | None] = []
        self.untracked: list[tuple[CrossingError, Call | None]] = []
        self._ambient_hooks = _saved_tensor_hooks()

    # --- the route

    def next_hop(self, stage: int) -> int:
        return self.hop + 1

    def _cross(self, hop: int) -> None:
        stage = self.cursor.stage
        self._check_device(stage)
        self.step.route.append(stage)
        mark = self.cursor.mark
        self.result.hops.append(
            Hop(
                hop, stage, mark and mark.name, mark.where if mark else "the start",
                self.cursor.moves,
            )
        )
        super()._cross(hop)

    def _check_device(self, stage: int) -> None:
        if self.step.devices is not None and stage >= len(self.step.devices):
            mark = self.cursor.mark
            where = mark.where if mark else users_line()
            raise PlanError(f"{too_few_devices(stage + 1, len(self.step.devices))} ({where})")

    def moved(self) -> None:
        """A mark moves the cursor: no module whose call is under way stays on one stage."""
        self.result.moves = True
        for call, _, _ in self.stack:
            call.sealed = False

    # --- operations

    def operation(self) -> None:
        """An operation runs here: which calls is it a part of?"""
        hop = self.arrive()
        info = self.result.hops[hop]
        info.operations += 1
        for call, _, _ in self.stack:
            if call.hop is None:
                call.hop = hop
            elif call.last_hop != hop and call.last_hop is not None:
                call.sealed = False
            call.last_hop = hop
        if not self.cursor.in_scope and (not self.marked or self.cursor.block_ended):
            self._note_unmarked(hop)
        hooks = _saved_tensor_hooks()
        if hooks is not None and hooks is not self._ambient_hooks:
            self.hook_calls.append(self.stack[-1][0] if self.stack else None)

    def _note_unmarked(self, hop: int) -> None:
        last = self.result.unmarked[-1] if self.result.unmarked else None
        mark = self.cursor.mark
        after = mark.where if mark is not None else None
        if last is not None and last.stage == self.stage and last.after == after:
            last.operations += 1
        else:
            self.result.unmarked.append(Unmarked(self.stage, users_line(), 1, after))

    def local(self, tensor: Tensor) -> Tensor:
        original = tensor
        key = id(tensor)
        held = self.held.get(key)
        if held is not None:
            self._note_read(tensor, held)
        newest = self.newest(original)
        tag: Tag | None = getattr(newest, TAG, None)
        if isinstance(tag, _RecordedTag):
            for call in tag.calls - tag.returned_by:
                if not call.under_way:
                    call.sealed = False  # it came out by another way than the door: state, a list
        foreign = self.is_foreign(newest)
        found = super().local(tensor)
        if foreign:
            for call, given, _ in self.stack:
                if key not in given and id(newest) not in given:
                    call.sealed = False
        return found

    def _local_untagged(self, tensor: Tensor) -> Tensor:
        try:
            return super()._local_untagged(tensor)
        except CrossingError as error:
            # In a sealed module nobody will look (torch.func makes such tensors): see _conclude.
            call = self.stack[-1][0] if self.stack else None
            self.untracked.append((error.with_traceback(None), call))
            self._tag(tensor)
            return tensor

    def refuse_foreign(self, what: str, tensors_: Iterable[Tensor]) -> None:
        # What a call under way was given, its door will have imported.
        given: set[int] = set().union(*(known for _, known, _ in self.stack[1:]))
        super().refuse_foreign(what, [t for t in tensors_ if id(t) not in given])

    def _make_tag(self) -> Tag:
        return _RecordedTag(self.key, self.hop, self.stage, {c for c, _, _ in self.stack})

    def _note_read(self, tensor: Tensor, held: Held) -> None:
        if held.hop is None:
            held.hop, held.stage, held.where = self.hop, self.stage, users_line()
            self.step.homes[id(tensor)] = Home(tensor, self.hop, self.stage, held.name)
        elif self.stage != held.stage and self.stage not in held.also_read_on:
            held.also_read_on.append(self.stage)
        if self.hop not in held.hops:
            held.hops.append(self.hop)
        home_hop = held.hop
        for call, _, _ in self.stack:
            self.reads.setdefault(id(call), set()).add(home_hop)

    def note_import(self, tensor: Tensor, home_hop: int, name: str | None) -> None:
        stage = self.step.route[home_hop]
        self.result.crossings.append(
            CrossingInfo(
                home_hop, self.hop, stage, self.stage, tuple(tensor.shape), _dtype(tensor),
                tensor.numel() * tensor.element_size(),
                tensor.requires_grad and self.step.differentiable, name, users_line(),
            )
        )

    # --- module calls

    def begin_call(self, path: str, kind: str, module: object, args: Any) -> Call:
        """A module's forward begins."""
        call = Call(
            path, kind, self.count_call(module), len(self.stack), users_line(),
            parent=self.stack[-1][0] if self.stack else None, stage=self.cursor.stage,
        )
        self.result.calls.append(call)
        given = {id(t) for t in tensors(args)} | {id(self.newest(t)) for t in tensors(args)}
        self.stack.append((call, given, args))
        return call

    def end_call(self, call: Call, result: Any) -> None:
        """A module's forward ended."""
        self.stack.pop()
        call.under_way = False
        for tensor in tensors(result):
            tag = getattr(tensor, TAG, None)
            if isinstance(tag, _RecordedTag):
                tag.returned_by.add(call)
        call.stage = self.step.route[call.hop] if call.hop is not None else call.stage

    def custom_function(self, name: str) -> None:
        """A custom autograd function was applied."""
        self.custom_in.append((name, self.stack[-1][0] if self.stack else None))


class _RecordingGlue(Glue):
    journey: Recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _is_question(func):
            self.journey.operation()
        return super().__torch_function__(func, types, args, kwargs)

    def saw_custom_function(self, cls: type[torch.autograd.Function]) -> None:
        self.journey.operation()
        self.journey.custom_function(cls.__qualname__)


def _is_question(func: Callable[..., Any]) -> bool:
    from .glue import _DEVICE, _METADATA

    return func in _METADATA or func is _DEVICE


class _RecordingDoor:
    """Stands around every module's forward and writes the call down."""

    def __init__(
        self, forward: Callable[..., Any], path: str, module: nn.Module, recorder: Recorder,
        stages: Mapping[int, int] | None,
    ) -> None:
        self.forward = forward
        self.path = path
        self.module = module
        self.recorder = recorder
        self.stages = stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if self.stages is not None:
            call_number = recorder.count_call(self)
            recorder.cursor.move(self.stages.get(call_number, recorder.cursor.stage), None)
        call = recorder.begin_call(
            self.path, type(self.module).__name__, self.module, (args, kwargs)
        )
        result = None
        try:
            result = self.forward(*args, **kwargs)
            return result
        finally:
            recorder.end_call(call, result)


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class ModelState:
    """What a model's modules hold, to be put back: attributes, and containers one level down."""

    def __init__(self, model: nn.Module, *, values: bool) -> None:
        self._dicts = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
        self._containers = [
            (value, _copied(value))
            for names, _ in self._dicts
            for value in names.values()
            if isinstance(value, dict | list | set | deque)
        ]
        self._values: list[tuple[Tensor, Tensor]] = []
        if values:
            kept = {
                id(t): t
                for names, _ in self._dicts
                for value in (*names.get("_buffers", {}).values(), *names.values())
                if isinstance(t := value, Tensor)
            }
            self._values = [(t, t.detach().clone()) for t in kept.values()]

    def restore(self) -> None:
        """Put everything back, in place."""
        for names, before in self._dicts:
            if names.keys() != before.keys() or any(names[k] is not v for k, v in before.items()):
                names.clear()
                names.update(before)
        for container, before in self._containers:
            if isinstance(container, dict):
                container.clear()
                container.update(before)
            elif isinstance(container, set):
                container.clear()
                container.update(before)
            else:
                container.clear()
                container.extend(before)
        with torch.no_grad():
            for tensor, before in self._values:
                tensor.detach().copy_(before)


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return OrderedDict(container)
    return list(container) if not isinstance(container, set) else set(container)


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def record(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fake: bool = True,
    plan: StagePlan | None = None,
    devices: list[torch.device] | None = None,
    cut: bool = True,
) -> Recording:
    """Run a model's forward once and write down what is on which stage.

    The model is left as it was: parameters, buffers, attributes, random states.

    Args:
        model: a marked model (or an unmarked one: everything is on stage 0). On the meta device
            too.
        args: the forward's positional arguments; a single tensor may come bare.
        kwargs: its keyword arguments.
        fake: use fake tensors: no device memory, no arithmetic. A model that reads values is run
            for real instead, and :attr:`Recording.why_real` says what it asked for; with
            ``False`` it runs for real at once.
        plan: stages that override the marks.
        devices: where the stages of a placed model are.
        cut: whether autograd is cut between the stages, as all schedules but ``"uncut"`` do.

    Returns:
        A :class:`Recording`.

    Raises:
        RecordingError: the forward does what no pipeline can do, or does not run on the sample
            (then with the forward's own error as its cause).
        PlanError: the plan names a module that is not there.

    Example:
        >>> import torch, blockpipe as bp
        >>> print(bp.record(torch.nn.Linear(4, 2), torch.zeros(1, 4)).route)
        [0]
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    kwargs = dict(kwargs or {})
    if not isinstance(model, nn.Module):
        raise RecordingError(
            f"record takes an nn.Module, but {type(model).__name__} came ({users_line()})"
        )
    stages = _planned_stages(model, plan)
    why_real: str | None = None
    if fake:
        try:
            return _record_fake(model, tuple(args), kwargs, stages, devices, cut=cut)
        except BlockpipeError:
            raise
        except Exception as error:
            on_meta = any(p.device.type == "meta" for p in model.parameters())
            if on_meta:
                raise RecordingError(
                    f"{type(model).__name__}'s forward does not run on fake tensors made from the "
                    f"sample ({_signature(args, kwargs)}), and on the meta device it cannot run for "
                    f"real: {type(error).__name__}: {error}"
                ) from error
            why_real = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    recording = _record_real(model, tuple(args), kwargs, stages, devices, cut=cut)
    recording.why_real = why_real
    return recording


def record_on_fake_devices(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    placed: Recording,
    devices: list[torch.device],
    plan: StagePlan | None = None,
) -> Recording:
    """Record with every tensor on a fake device of its stage; they need not be there.

    Args:
        model: as for :func:`record`.
        args: as for :func:`record`.
        kwargs: as for :func:`record`.
        placed: an earlier recording: says which stage each parameter lives on.
        devices: one for each stage.
        plan: stages that override the marks.

    Raises:
        FakeTensorDeviceMismatchError: an operation got tensors of two devices.
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    homes = {
        name: devices[held.stage]
        for held in (*placed.parameters, *placed.buffers)
        for name in held.names
    }
    stages = _planned_stages(model, plan)
    kwargs = dict(kwargs or {})
    try:
        return _record_fake(model, tuple(args), kwargs, stages, devices, homes)
    except (BlockpipeError, FakeTensorDeviceMismatchError):
        raise
    except Exception as error:
        raise RecordingError(
            f"{type(model).__name__}'s forward does not run on fake tensors "
            f"({_signature(args, kwargs)}): {type(error).__name__}: {error}; a model that reads "
            "values can be checked by Pipeline(..., isolate=True)"
        ) from error


def _planned_stages(
    model: nn.Module, plan: StagePlan | None
) -> dict[str, dict[int, int]]:
    if plan is None:
        return {}
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    unknown = sorted({a.path for a in plan.assignments} - paths)
    if unknown:
        raise PlanError(
            f"the plan assigns {unknown[:5]}, which {type(model).__name__} does not have; "
            "make the plan from a recording of this model"
        )
    stages: dict[str, dict[int, int]] = {}
    for assignment in plan.assignments:
        stages.setdefault(assignment.path, {})[assignment.call] = assignment.stage
    return stages


def _record_fake(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stages: dict[str, dict[int, int]],
    devices: list[torch.device] | None,
    homes: Mapping[str, torch.device] | None = None,
    *,
    cut: bool = True,
) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def faked(tensor: Tensor, device: torch.device | None = None) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        found = fakes.get(id(tensor))
        if found is None:
            found = mode.from_tensor(tensor)
            if device is not None:
                with mode, torch.no_grad():
                    moved = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )
                found = moved.requires_grad_(tensor.requires_grad)
                if isinstance(tensor, nn.Parameter):
                    found = nn.Parameter(found, tensor.requires_grad)
            fakes[id(tensor)] = found
        return found

    state = ModelState(model, values=False)
    swapped = {
        name: faked(tensor, None if homes is None else homes.get(name))
        for name, tensor in (*named_slots(model, "_parameters"), *named_slots(model, "_buffers"))
    }
    try:
        with _random_states(), _reparametrize_module(model, swapped, tie_weights=False):
            # A meta model takes any sample: only its shapes count.
            on_meta = any(t.device.type == "meta" for t in swapped.values())
            sample_device = torch.device("meta") if on_meta else None
            fake_args, fake_kwargs = map_tensors(
                lambda t: faked(t, sample_device), (args, kwargs)
            )
            with mode:
                return _run(model, fake_args, fake_kwargs, stages, devices, fake=True, cut=cut)
    finally:
        state.restore()


def _record_real(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stages: dict[str, dict[int, int]],
    devices: list[torch.device] | None,
    *,
    cut: bool,
) -> Recording:
    state = ModelState(model, values=True)
    try:
        with _random_states():
            # Copies: the forward may write to its inputs, and it will run again.
            args, kwargs = map_tensors(_copy_of, (args, kwargs))
            return _run(model, args, kwargs, stages, devices, fake=False, cut=cut)
    except BlockpipeError:
        raise
    except Exception as error:
        raise RecordingError(
            f"{type(model).__name__}'s forward fails on the sample ({_signature(args, kwargs)}): "
            f"{type(error).__name__}: {error}; pass what the forward takes"
        ) from error
    finally:
        state.restore()


def _copy_of(tensor: Tensor) -> Tensor:
    return carry(tensor, None, copy=True).requires_grad_(tensor.requires_grad)


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stages: dict[str, dict[int, int]],
    devices: list[torch.device] | None,
    *,
    fake: bool,
    cut: bool,
) -> Recording:
    result = Recording(type(model).__name__, fake)
    cursor = _WatchedCursor(follow_marks=not stages)
    differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    step = Step([], {}, devices, differentiable=differentiable, cut=cut)
    recorder = Recorder(step, cursor, result)
    _hold(model, recorder, devices)
    versions = {id(b): (b, b._version) for b in model.buffers() if not b.is_inference()}
    doors: list[tuple[nn.Module, bool, Any]] = []
    for path, module in model.named_modules():
        result.types[path] = type(module).__name__
        names = module.__dict__
        names["forward"] = _RecordingDoor(module.forward, path, module, recorder, stages.get(path))
        names.pop("_compiled_call_impl", None)
    before = set_cursor(cursor)
    try:
        args, kwargs = _as_inputs(recorder, (args, kwargs))
        with CustomFunctions(), _eager(), _RecordingGlue(recorder):
            output = model(*args, **kwargs)
            for tensor in tensors(output):
                recorder.newest(tensor)
    finally:
        set_cursor(before)
        recorder.abandon()
        del doors
    if not result.hops:
        result.hops.append(Hop(0, 0, None, "the start"))
    _conclude(model, recorder, versions)
    return result


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled modules run as they were written, so that their marks and reads are seen."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _as_inputs(recorder: Recorder, value: Any) -> Any:
    """Inputs are made on hop 0, before there is one: tagged so, on stage 0's device."""
    memo: dict[int, Tensor] = {}

    def taken(tensor: Tensor) -> Tensor:
        if id(tensor) in recorder.held:
            return tensor
        if id(tensor) not in memo:
            memo[id(tensor)] = recorder.take_input(tensor)
        return memo[id(tensor)]

    return map_tensors(taken, value)


def named_slots(model: nn.Module, slots: str) -> Iterator[tuple[str, Tensor]]:
    """Every place of a module that holds a tensor, once, tied tensors under each of their names.

    ``named_parameters(remove_duplicate=False)`` names a module that is registered twice twice.
    """
    for path, module in model.named_modules():
        for key, tensor in getattr(module, slots).items():
            if tensor is not None:
                yield (f"{path}.{key}" if path else key), tensor


def _hold(
    model: nn.Module, recorder: Recorder, devices: list[torch.device] | None
) -> None:
    for is_buffer, slots in ((False, "_parameters"), (True, "_buffers")):
        for name, tensor in named_slots(model, slots):
            held = recorder.held.get(id(tensor))
            if held is not None:
                held.names.append(name)
                continue
            held = Held(
                [name], tuple(tensor.shape), _dtype(tensor),
                tensor.numel() * tensor.element_size(), tensor.numel(),
                tensor.requires_grad, is_buffer,
            )
            recorder.held[id(tensor)] = held
            (recorder.result.buffers if is_buffer else recorder.result.parameters).append(held)


def _conclude(
    model: nn.Module, recorder: Recorder, versions: dict[int, tuple[Tensor, int]]
) -> None:
    """What follows from the whole run: who is sealed, where unread parameters live, what is wrong."""
    result = recorder.result
    for key, (buffer, version) in versions.items():
        held = recorder.held.get(key)
        if held is not None:
            held.written = buffer._version != version
    good: dict[str, set[int]] = {}
    bad: dict[str, set[int]] = {}
    everywhere: set[str] = set()
    needs_door: set[str] = set()
    with_parameters: dict[str, bool] = {}
    every_hop = set(range(len(result.hops)))
    for call in result.calls:
        visited = {h for h in (call.hop, call.last_hop) if h is not None}
        if call.sealed:
            good.setdefault(call.path, set()).update(visited)
            if id(call) not in recorder.reads:
                everywhere.add(call.path)
            else:
                with_parameters[call.path] = True
        else:
            first = call.hop if call.hop is not None else 0
            last = call.last_hop if call.last_hop is not None else first
            bad.setdefault(call.path, set()).update(range(first, last + 1))
        if call.parent is None or not call.parent.sealed:
            needs_door.add(call.path)
    for path in needs_door:
        hops = set(good.get(path, set()))
        if path in everywhere and path not in with_parameters:
            hops = set(every_hop)
        hops -= bad.get(path, set())
        if hops:
            result.sealed[path] = frozenset(hops)
    _place_unread(model, recorder)
    sealed_calls = {id(c) for c in result.calls if _in_sealed(c)}
    result.recomputes = any(c is None or id(c) not in sealed_calls for c in recorder.hook_calls)
    result.custom_functions = sorted(
        {name for name, c in recorder.custom_in if c is None or id(c) not in sealed_calls}
    )
    for error, untracked_in in recorder.untracked:
        if not _in_sealed(untracked_in):
            raise error
    for path, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl")
        if compiled and path in bad:
            raise CrossingError(
                f"compiled module {path or '(the model)'!r} spans stages "
                f"{sorted({result.hops[h].stage for h in bad[path]})}, but a compiled call runs as "
                "a whole; compile its parts (one stage each) instead"
            )


def _in_sealed(call: Call | None) -> bool:
    while call is not None:
        if call.sealed:
            return True
        call = call.parent
    return False


def _place_unread(model: nn.Module, recorder: Recorder) -> None:
    """A parameter that no call reads lives where its module runs, or the nearest one around it."""
    stage_of = {call.path: call.stage for call in reversed(recorder.result.calls)}
    for held in recorder.held.values():
        if held.hop is not None:
            continue
        path = held.name
        while path and path not in stage_of:
            path = path.rpartition(".")[0]
        held.stage = stage_of.get(path, 0)


def _signature(args: Any, kwargs: Any) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{_dtype(value)}{list(value.shape)}"
        return repr(value)[:40]

    parts = [shown(a) for a in args] + [f"{k}={shown(v)}" for k, v in kwargs.items()]
    return ", ".join(parts)
