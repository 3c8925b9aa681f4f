"""The function mode that writes a tape.

If the glue asks for a tensor's shape, the answer is written as a constant, because a tape works for
one set of shapes. If it asks for a value, it is refused, because a tape has no branches. The
exceptions are a yes or no about the forward's arguments, such as whether a mask has padding, and a
size that follows from them: each run asks again, and fails if the answer is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._common.callsite import users_line
from ..._common.modules import named_slots
from ..._common.nested import leaves, map_leaves, tensors
from ..._common.threads.thread_state import (
    autocast_states,
    call_under,
    enter_modes,
    in_thread,
    leave_modes,
)
from ..._torch.graph import PythonNode
from ..._torch.modes import how_many_function_modes
from ..._torch.modules import buffers_of, parameters_of
from ..._torch.patched_functions import torchs_own
from ..._torch.tensors import FakeTensor, memory_of, version_of
from ...crossing.interception import ForwardMode, is_question
from ...errors import CrossingError, RecordingError
from ...recording.recording import Recording
from ...stages.cursor import Cursor
from .operation_watch import InsideMode, OperationWatch, drawn_outside, entered
from .tape import (
    REMEDY,
    Entry,
    Held,
    Meta,
    Outside,
    Slice,
    StageDevice,
    Tape,
    Value,
    no_argument,
    no_result,
    plain_values,
    references,
    size_question,
    tensors_in,
    view_of,
)

_SIZES = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "nbytes")),
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, torch.numel),
    ]
)
_BY_INDEX = frozenset([Tensor.__getitem__, Tensor.masked_select, torch.masked_select])
_HOOKS = frozenset(
    [Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook]
)
_GRAPH_NODE: Any = getattr(Tensor, "grad_fn").__get__  # noqa: B009 - for mypy it is a node
_BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_NUMBERS = (bool, int, float, complex)
_PLAIN = (
    *(*_NUMBERS, type(None), str, bytes, torch.dtype, torch.layout),
    *(torch.memory_format, torch.Generator, type, type(Ellipsis), slice, range, Enum),
)


class TapingMode(ForwardMode):
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
        self.inside = False  # of a sealed module; patched torch functions ask for it
        self.hop = -1
        self.sealed = recording.sealed
        self.cursor = cursor
        self.watch = OperationWatch()  # type: ignore[no-untyped-call]
        self._inside = InsideMode()
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
        self._given: set[int] = set()  # values that depend on the forward's arguments alone
        self._looked_at: set[int] = set()  # ids of tensors that the glue asked about
        self._asked: set[int] = set()  # values whose whole size each run asks for
        self._nodes: set[Any] = set()  # of custom functions whose calls were seen
        self._around = entered()
        self._drawn = drawn_outside()

    def __enter__(self) -> TapingMode:
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
        kwargs, func = dict(kwargs or {}), func if modes else torchs_own(func)
        if func == _GRAPH_NODE:
            if isinstance(args[0], nn.Parameter):  # a module asks, to register it
                self._refuse("a new parameter", f"call the model once before, or {REMEDY}")
            self._refuse("a look at the graph (grad_fn)")
        if is_question(func) and func not in _HOOKS:
            self._looked_at.update(id(tensor) for tensor in args[:1])
            if func in _SIZES:
                self._ask_size(func, args, kwargs)
            return call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)
        if func in _BACKWARDS:
            self._refuse("a backward inside of the forward")

        def call() -> Any:
            return call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)

        return self.note(func, None, args, kwargs, call)

    # --- patched torch functions call these

    def saw_custom_function(self, name: str, *, is_scripted: bool = False) -> None:
        """A custom autograd function is about to be called."""

    def call_sealed(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write a call down as one entry, without the operations inside it."""
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
        self.check_draws()
        around = leave_modes()
        theirs = [mode for mode in around if mode is not self]
        self.inside = True
        self._inside.path = str(path or getattr(function, "__qualname__", ""))

        def call() -> Any:
            with self._inside:
                if theirs:
                    return call_under(theirs, forward, args, kwargs)
                return forward(*args, **kwargs)

        asked = dict(self.cursor.keys)

        try:
            return self.note(function, path, args, kwargs, call, has_hooks=has_hooks)
        finally:
            self.inside = False
            self.cursor.keys = asked
            self._drawn = drawn_outside()
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
            self._given.add(self._number(leaf, -1))
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
        given = list(tensors_in((args, kwargs)))
        names = self.encoded(args), self.encoded(kwargs)
        versions = [version_of(tensor) for tensor in given]
        self.check_draws()
        if (around := entered()) != self._around and around:
            self._refuse(f"{around[-1]} around it")
        self.watch.begin()
        result = call()
        made = list(tensors(result))
        if not given and not made:
            return result  # the state of torch: it is noted with each entry
        entry = Entry(function, path, *names, [], self.arrive(), users_line())
        entry.grad, entry.has_hooks = torch.is_grad_enabled() == self.tape.grad, has_hooks
        autocast = tuple(autocast_states())
        entry.checkpoint = self.cursor.checkpoint
        entry.autocast = None if autocast == self._autocast else autocast
        written = [t for t, v in zip(given, versions, strict=True) if version_of(t) != v]
        entry.writes = [self._numbers[id(t)] for t in written if id(t) in self._numbers]
        self._nodes.update(t.grad_fn for t in (*written, *made))
        self._check_written(written)
        self._note_results(entry, result, given, made)
        self.tape.entries.append(entry)
        return result

    def _note_results(
        self, entry: Entry, result: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        """Note what a call has made, and whether that follows from constants or arguments alone."""
        is_glue = entry.module is None
        entry.plain = [] if is_glue else plain_values(result)
        is_fixed = is_glue and not self.watch.drew
        is_constant = is_fixed and all(map(self._is_constant, given))
        is_given = is_fixed and all(map(self._is_given, given))
        if is_given and not is_constant and isinstance(result, bool):
            entry.answer = result
        elif not is_constant:
            self._check_result(entry, result)
            self._constant.difference_update(entry.writes)
        if not is_given:
            self._given.difference_update(entry.writes)
        unsized = self.watch.made_unsized or any(map(self._unsized, given))
        is_sized = unsized and self._is_sized_by_given(entry.function, given)
        if not is_glue and self.watch.made_unsized:
            entry.shapes, unsized = [tuple(tensor.shape) for tensor in made], False
        for tensor in made:
            if id(tensor) in self._numbers or id(tensor) in self._held:
                entry.results.append(None)
                continue
            number = self._number(tensor, entry.hop)
            entry.results.append(number)
            if is_constant:
                self._constant.add(number)
            if is_given:
                self._given.add(number)
            if unsized:
                (self.tape.sized if is_sized else self.tape.unsized)[number] = users_line()

    def _is_sized_by_given(self, function: Callable[..., Any] | None, given: list[Tensor]) -> bool:
        """Whether the sizes of an operation's results depend on the forward's arguments alone."""
        sources = [tensor for tensor in given if self._unsized(tensor)]
        if self.watch.made_unsized:  # an index has the sizes, and not what it is an index into
            sources += given[1:] if function in _BY_INDEX else given
        return not (self.watch.made_unsized and self.watch.drew) and all(
            self._is_given(t) or self._numbers.get(id(t)) in self.tape.sized for t in sources
        )

    def _ask_size(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have each run ask for a size that depends on data again."""
        tensor, *dim = (*args, *kwargs.values())
        number = self._numbers.get(id(tensor), -1)
        if number in self.tape.unsized:
            self._refuse("a size that depends on data")
        if number in self.tape.sized and number not in self._asked:
            if func is not Tensor.size or not dim:
                dim = []
                self._asked.add(number)  # a run in which it has another size fails
            question = size_question(number, tensor.size(*dim), self.hop, users_line(), *dim)
            self.tape.entries.append(question)

    def note_kept(
        self, keep: Callable[[Tensor], None], old: object, new: object, where: str
    ) -> bool:
        """Have each run keep a tensor that the forward keeps in the place of another one, unless
        the forward could tell which one was there."""
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            return False
        number = self._numbers.get(id(new))
        if number is None or id(old) in self._looked_at:
            return False
        every = (r for entry in self.tape.entries for r in references((entry.args, entry.kwargs)))
        if any(isinstance(r, Outside) and r.tensor is old for r in every):
            return False
        hop = max(self.tape.made[number], 0)
        self.tape.entries.append(Entry(keep, None, (Value(number),), {}, [], hop, where))
        return True

    def _number(self, tensor: Tensor, hop: int) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self.tape.made.append(hop)
            self.tape.storages.append(memory_of(tensor))
            self.tape.views.append(view_of(tensor))
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
        raise no_argument(leaf)

    def _reference_to(self, tensor: Tensor) -> Value | Held | Outside:
        number = self._numbers.get(id(tensor))
        if number is not None:
            self._check_function(tensor.grad_fn)
            return Value(number)
        name = self._held.get(id(tensor))
        if name is not None:
            return Held(name)
        inside = self._inside.made.get(tensor)
        if inside is not None or (self._fake and isinstance(tensor, FakeTensor)):
            raise no_result(inside)
        if tensor.requires_grad:
            raise CrossingError(
                "expected parameters that a module registers, got a tensor that needs a gradient, "
                f"of shape {tuple(tensor.shape)}, from outside of the model ({users_line()}); "
                "register it as a parameter"
            )
        return Outside(tensor)

    # --- what a tape cannot hold

    def _check_function(self, node: Any) -> None:
        """Refuse a tensor that a custom function has made whose call was not seen."""
        if isinstance(node, PythonNode) and node not in self._nodes:
            name = type(node).__qualname__.removesuffix("Backward")
            raise RecordingError(
                f"expected calls of autograd functions by {name}.apply(…), got one whose apply was "
                f"kept under another name, by which the call cannot be seen ({users_line()}); call "
                f"{name}.apply(…), or {REMEDY}"
            )

    def _check_result(self, entry: Entry, result: Any) -> None:
        """Numbers that an operation returns are of its tensors' values."""
        if entry.module is not None and not self.watch.read_value:
            return  # sizes: a module without a look at values returns them anew each time
        for leaf in leaves(result):
            is_text = isinstance(leaf, str) and self.watch.read_value  # f"{x[0]:.3f}"
            if is_text or isinstance(leaf, _NUMBERS) or type(leaf).__name__ == "ndarray":
                self._refuse(f"a tensor's value ({entry.name})")

    def _check_written(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            if id(tensor) not in self._numbers and id(tensor) not in self._held:
                self._refuse("a write to a tensor that no module registered")

    def check_draws(self) -> None:
        """Refuse random numbers of Python's or NumPy's that the glue has drawn, seeds, and calls of
        ``current_microbatch``."""
        if not self.inside and self.cursor.keys:
            self._refuse("a call of current_microbatch()")
        if not self.inside and drawn_outside() != self._drawn:
            self._refuse("a random number of Python's or NumPy's, or a seed")

    def saw_generator_set(self, kind: str) -> None:
        """Refuse that the glue seeds a generator of the process, or gives it a state."""
        if not self.inside:
            name = {"torch": "torch", "random": "Python", "numpy": "NumPy"}[kind]
            self._refuse(
                f"a seed, or a state of {name}'s generator (torch.random.fork_rng sets one)"
            )

    def _is_constant(self, tensor: Tensor) -> bool:
        number = self._numbers.get(id(tensor))
        if number is None:
            return id(tensor) not in self._held
        return number in self._constant

    def _is_given(self, tensor: Tensor) -> bool:
        return self._is_constant(tensor) or self._numbers.get(id(tensor)) in self._given

    def _unsized(self, tensor: Tensor) -> bool:
        number = self._numbers.get(id(tensor), -1)
        return number in self.tape.unsized or (
            number in self.tape.sized and number not in self._asked
        )

    def _refuse(self, what: str, remedy: str = REMEDY) -> None:
        raise RecordingError(
            "expected a forward whose code between modules does the same for every micro-batch of "
            f"these shapes, got {what} at {users_line()}; {remedy}"
        )
