"""The taping of a forward: one more watched run, in which sealed modules are single calls.

It follows a recording, which says what is sealed. What the glue asks of tensors is answered as it
is (a tape is for one set of shapes), and what depends on values is refused: a tape has no branches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._common.callsite import users_line
from .._common.modules import OwnHook, StandIn, named_slots
from .._common.nested import leaves, map_leaves, tensors
from .._common.thread_state import (
    autocast_states,
    call_under,
    enter_modes,
    in_thread,
    leave_modes,
)
from .._torch.modes import DispatchMode, how_many_function_modes
from .._torch.modules import (
    SLOTS,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
)
from .._torch.tensors import FakeTensor, OpOverload, storage_of, version_of
from ..crossing.interception import is_question
from ..crossing.torch_patches import Backwards, CustomFunctions, ScriptFunctions
from ..errors import CrossingError, RecordingError
from ..recording.plan_resolution import planned_stage
from ..recording.recording import Recording
from ..recording.sample import RecordRequest
from ..stages.cursor import Cursor, set_cursor
from ..stages.marks import mark_of
from .tape import Entry, Held, Meta, Outside, Slice, StageDevice, Tape, Value

_SIZES = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "nbytes")),
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        torch.numel,
    ]
)
_HOOKS = frozenset(
    [Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook]
)
_GRAPH_NODE: Any = getattr(Tensor, "grad_fn").__get__  # noqa: B009 - for mypy it is a node
_BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout),
    *(torch.memory_format, torch.Generator, type, type(Ellipsis), slice, range, Enum),
)
_REMEDY = "move it into a module that stays on one stage, whose inside is Python as ever"


def taped(
    request: RecordRequest, recording: Recording, device: torch.device, *, fake: bool
) -> Tape:
    """Run a forward, and write down what its glue does.

    Args:
        request: the forward, in surroundings that are put back afterwards.
        recording: of the same forward.
        device: the one that the model's tensors are on meanwhile.
        fake: whether they are fake ones.

    Raises:
        RecordingError: the glue does what a tape cannot hold.
    """
    model = request.model
    cursor = Cursor(follow_marks=request.planned is None)
    mode = _TapingMode(model, recording, cursor, device, fake=fake)
    stages = {} if request.planned is None else request.planned.stages
    before = set_cursor(cursor)
    states = _States(model, recording)
    places = []
    try:
        for path, module in model.named_modules():
            forward = _TapedForward(module.forward, path, module, mode, stages.get(path))
            places.append((module.__dict__, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        args, kwargs = map_leaves(mode.take_input, (request.args, request.kwargs))
        mode.tape.inputs = mode.encoded((args, kwargs))
        with ExitStack() as stack:
            for watch in (Backwards(), CustomFunctions(), ScriptFunctions(), mode.watch):
                stack.enter_context(watch)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(mode)
            output = model(*args, **kwargs)
        mode.check_python_draws()
        if mode.hop < 0:
            mode.arrive()
        mode.tape.output = mode.encoded(output)
    finally:
        set_cursor(before)
        for names, own in places:
            names.pop("forward", None)
            if own is not None:
                names["forward"] = own
    states.check()
    mode.note_metas()
    if mode.tape.route != recording.route:
        raise RecordingError(
            f"expected the recorded route {recording.route} again, got {mode.tape.route} "
            f"({users_line()}); a forward that takes another way each time has no fixed stages"
        )
    return mode.tape


class _TapingMode(TorchFunctionMode):
    """Writes every operation of the glue on a tape."""

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        cursor: Cursor,
        device: torch.device,
        *,
        fake: bool,
    ) -> None:
        super().__init__()
        self.tape = Tape([], None, grad=torch.is_grad_enabled())
        self.inside = False  # of a sealed module; what is patched of torch's asks for it
        self.hop = -1
        self.sealed = recording.sealed
        self.cursor = cursor
        self.watch = _Watch()  # type: ignore[no-untyped-call]
        self._inside = _InsideMode()
        self._device = device
        self._fake = fake
        self._autocast = tuple(autocast_states())
        self._held = {
            id(tensor): name
            for slots in (buffers_of, parameters_of)
            for name, tensor in reversed([*named_slots(model, slots)])
        }
        self._numbers: dict[int, int] = {}  # by the id of a tensor, its value
        self._tensors: list[Tensor] = []  # by value; alive, so that no other gets the id of one
        self._constant: set[int] = set()  # values that depend on nothing that changes
        self._python = _python_draws()

    def __enter__(self) -> _TapingMode:
        self._outer = in_thread.mode
        in_thread.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        in_thread.mode = self._outer

    def is_on(self) -> bool:
        """Whether it sees what is called here."""
        return not self.inside

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        modes: Sequence[TorchFunctionMode] = (),
    ) -> Any:
        if how_many_function_modes():
            around = leave_modes()
            try:
                theirs = [mode for mode in around if mode is not self]
                return self.__torch_function__(func, types, args, kwargs, theirs)
            finally:
                enter_modes(around)
        kwargs = dict(kwargs or {})
        if func == _GRAPH_NODE:
            self._refuse("a look at the graph (grad_fn)")
        if is_question(func) and func not in _HOOKS:
            if func in _SIZES:
                self._check_sized(args[0] if args else kwargs.get("input"))
            return call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)
        if func in _BACKWARDS:
            self._refuse("a backward inside of the forward")

        def call() -> Any:
            return call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)

        return self.note(func, None, args, kwargs, call)

    # --- what is patched of torch's calls these

    def saw_custom_function(self, name: str, *, is_scripted: bool = False) -> None:
        """A custom autograd function is about to be called."""

    def call_sealed(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write a call down as one, and nothing of what it does."""
        return self.apart(function, None, args, kwargs, function)

    def apart(
        self,
        function: Callable[..., Any] | None,
        path: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any],
        *,
        has_hooks: bool = False,
    ) -> Any:
        """Run a call without this mode, and write it down."""
        self.check_python_draws()
        around = leave_modes()
        theirs = [mode for mode in around if mode is not self]
        self.inside = True
        self._inside.path = str(path or getattr(function, "__qualname__", ""))

        def call() -> Any:
            with self._inside:
                if theirs:
                    return call_under(theirs, forward, args, kwargs)
                return forward(*args, **kwargs)

        try:
            return self.note(function, path, args, kwargs, call, has_hooks=has_hooks)
        finally:
            self.inside = False
            self._python = _python_draws()
            enter_modes(around)

    # --- the tape

    def arrive(self) -> int:
        """Be on the hop that the cursor asks for."""
        stage = self.cursor.stage
        if self.hop < 0 or stage != self.tape.route[-1]:
            self.hop += 1
            self.tape.route.append(stage)
            self.note_metas()
        return self.hop

    def next_hop(self) -> int:
        """The hop that the next operation will be on."""
        return self.hop + (self.hop < 0 or self.cursor.stage != self.tape.route[-1])

    def note_metas(self) -> None:
        """Note what all values are at the beginning of a hop, or at the end."""
        self.tape.metas.append({i: Meta.of(t) for i, t in enumerate(self._tensors)})

    def take_input(self, leaf: Any) -> Any:
        """Take an argument of the forward; parameters and buffers stay what they are."""
        if isinstance(leaf, Tensor) and id(leaf) not in self._held:
            self._number(leaf, -1)
        return leaf

    def encoded(self, value: Any) -> Any:
        """A nested value with references in the place of tensors."""
        return map_leaves(self._reference, value)

    def note(
        self,
        function: Callable[..., Any] | None,
        path: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
        *,
        has_hooks: bool = False,
    ) -> Any:
        """Run a call, and write it down."""
        given = list(_tensors_in((args, kwargs)))
        names = self.encoded(args), self.encoded(kwargs)
        versions = [version_of(tensor) for tensor in given]
        self.watch.begin()
        result = call()
        made = list(tensors(result))
        if not given and not made:
            return result  # the state of torch: it is noted with each entry
        entry = Entry(function, path, *names, [], self.arrive(), users_line())
        entry.grad, entry.has_hooks = torch.is_grad_enabled() == self.tape.grad, has_hooks
        autocast = tuple(autocast_states())
        entry.autocast = None if autocast == self._autocast else autocast
        written = [t for t, v in zip(given, versions, strict=True) if version_of(t) != v]
        entry.writes = [self._numbers[id(t)] for t in written if id(t) in self._numbers]
        self._check_written(written)
        is_constant = path is None and not self.watch.drew and all(map(self._is_constant, given))
        if not is_constant:
            self._check_result(entry, result)
            self._constant.difference_update(entry.writes)
        unsized = path is None and (self.watch.made_unsized or any(map(self._unsized, given)))
        if path is not None and self.watch.made_unsized:
            entry.shapes = [tuple(tensor.shape) for tensor in made]
        for tensor in made:
            known = id(tensor) in self._numbers or id(tensor) in self._held
            entry.results.append(None if known else self._number(tensor, entry.hop))
            if not known:
                number = self._numbers[id(tensor)]
                if is_constant:
                    self._constant.add(number)
                if unsized:
                    self.tape.unsized[number] = users_line()
        self.tape.entries.append(entry)
        return result

    def _number(self, tensor: Tensor, hop: int) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self.tape.made.append(hop)
            self.tape.storages.append(_storage(tensor))
        return number

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._reference_to(leaf)
        if isinstance(leaf, slice):
            parts = tuple(map(self._reference, (leaf.start, leaf.stop, leaf.step)))
            is_plain = all(isinstance(part, _PLAIN) for part in parts)
            return leaf if is_plain else Slice(parts)
        if isinstance(leaf, torch.device):
            return StageDevice() if leaf == self._device else leaf
        if isinstance(leaf, _PLAIN) or (callable(leaf) and not isinstance(leaf, nn.Module)):
            return leaf
        raise RecordingError(
            "expected tensors and plain values as arguments between modules, got "
            f"{type(leaf).__name__} ({users_line()}), which would be the same object for every "
            f"micro-batch; leave it out (use_cache=False, for a cache of keys and values), or "
            f"{_REMEDY}"
        )

    def _reference_to(self, tensor: Tensor) -> Value | Held | Outside:
        number = self._numbers.get(id(tensor))
        if number is not None:
            return Value(number)
        name = self._held.get(id(tensor))
        if name is not None:
            return Held(name)
        inside = self._inside.made.get(tensor)
        if inside is not None or (self._fake and isinstance(tensor, FakeTensor)):
            by = "that no operation returned" if inside is None else f"that {inside!r} made"
            raise RecordingError(
                f"expected tensors that calls return, got one {by} ({users_line()}), read as a "
                "state of something else; return it"
            )
        if tensor.requires_grad:
            raise CrossingError(
                "expected parameters that a module registers, got a tensor that needs a gradient, "
                f"of shape {tuple(tensor.shape)}, from outside of the model ({users_line()}); "
                "register it as a parameter"
            )
        return Outside(tensor)

    # --- what a tape cannot hold

    def _check_result(self, entry: Entry, result: Any) -> None:
        """Numbers that an operation returns are of its tensors' values."""
        if entry.module is not None and not self.watch.read_value:
            return  # sizes: a module without a look at values returns them anew each time
        for leaf in leaves(result):
            if isinstance(leaf, bool | int | float | complex) or type(leaf).__name__ == "ndarray":
                self._refuse(f"a tensor's value ({entry.name})")

    def _check_sized(self, tensor: object) -> None:
        if isinstance(tensor, Tensor) and self._unsized(tensor):
            self._refuse("a size that depends on data")

    def _check_written(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            if id(tensor) not in self._numbers and id(tensor) not in self._held:
                self._refuse("a write to a tensor that no module registered")

    def check_python_draws(self) -> None:
        """Refuse random numbers of Python's or NumPy's that the glue has drawn."""
        if not self.inside and _python_draws() != self._python:
            self._refuse("a random number of Python's or NumPy's")

    def _is_constant(self, tensor: Tensor) -> bool:
        number = self._numbers.get(id(tensor))
        if number is None:
            return id(tensor) not in self._held
        return number in self._constant

    def _unsized(self, tensor: Tensor) -> bool:
        return self._numbers.get(id(tensor), -1) in self.tape.unsized

    def _refuse(self, what: str) -> None:
        raise RecordingError(
            "expected a forward whose code between modules does the same for every micro-batch of "
            f"these shapes, got {what} at {users_line()}; {_REMEDY}"
        )


class _InsideMode(TorchFunctionMode):
    """Knows the tensors that are made inside of sealed modules."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.made = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_question(func):
            for tensor in tensors(result):
                self.made[tensor] = self.path
        return result


class _Watch(DispatchMode):
    """Notes which operations draw random numbers, which read a tensor's value, and which make
    tensors of sizes that depend on data; the function that calls them does not tell."""

    def begin(self) -> None:
        """Forget what was noted."""
        self.drew = self.made_unsized = self.read_value = False

    drew = made_unsized = read_value = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, OpOverload):
            self.read_value = self.read_value or torch.Tag.data_dependent_output in func.tags
            self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
            if torch.Tag.dynamic_output_shape in func.tags and not _is_by_numbers(func, args):
                self.made_unsized = True
        return func(*args, **(kwargs or {}))


def _is_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is an index whose result has a size that follows from its arguments' sizes."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors(args[1]))


class _TapedForward(StandIn):
    """Stands around every module's forward: a sealed one is written down as one call."""

    def __init__(
        self,
        forward: Callable[..., Any],
        path: str,
        module: nn.Module,
        mode: _TapingMode,
        stages: Mapping[int | None, int] | None,
    ) -> None:
        self.forward = forward
        self.path = path
        self.module = module
        self.mode = mode
        self.stages = stages
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode, call = self.mode, self._calls
        self._calls += 1
        if mode.inside:
            return self.forward(*args, **kwargs)
        if self.stages is not None:
            mode.cursor.move(planned_stage(self.stages, call, mode.cursor.stage), None)
        if mode.next_hop() in mode.sealed.get(self.path, ()):
            hooked = has_users_hooks(self.module)
            return mode.apart(None, self.path, args, kwargs, self.forward, has_hooks=hooked)
        return self.forward(*args, **kwargs)


def has_users_hooks(module: nn.Module) -> bool:
    """Whether hooks other than a mark run around a module's forward."""
    hooks = [*forward_pre_hooks_of(module).values(), *forward_hooks_of(module).values()]
    theirs = [hook for hook in hooks if not isinstance(hook, OwnHook)]
    return len(theirs) > (mark_of(module) is not None)


class _States:
    """What open modules hold before a forward, to see that it leaves nothing of its own there: the
    tape would not do it again."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        sealed = recording.sealed.keys()
        self._kept = [
            (path, module, _members(module))
            for path, module in model.named_modules()
            if not any(_is_in(path, outer) for outer in sealed)
        ]

    def check(self) -> None:
        """Raise :class:`RecordingError` for what has changed."""
        for path, module, before in self._kept:
            after = _members(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                if old is not new and (isinstance(new, Tensor) or isinstance(old, Tensor)):
                    same = False
                else:
                    same = old is new or bool(old == new)
                if not same:
                    raise RecordingError(
                        "expected a forward that leaves nothing behind between modules, got one "
                        f"that sets {name!r} of {path or 'the model'!r} ({users_line()}), which a "
                        f"replayed stage would not do; return it, or {_REMEDY}"
                    )


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _members(module: nn.Module) -> dict[str, Any]:
    own = {k: v for k, v in vars(module).items() if k not in (*SLOTS, "forward")}
    return {**own, **buffers_of(module)}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, those in slices too."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from _tensors_in((leaf.start, leaf.stop, leaf.step))


def _storage(tensor: Tensor) -> int:
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return -id(tensor)


def _python_draws() -> Any:
    numpy = sys.modules.get("numpy")
    legacy = None
    if numpy is not None:
        state = numpy.random.get_state()
        legacy = state[1].tobytes(), state[2]
    return random.getstate(), legacy
