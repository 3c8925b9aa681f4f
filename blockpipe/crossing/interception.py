"""Interception: what stands between the user's ``forward`` and its run.

The *glue* is a ``TorchFunctionMode`` that is active in the Python between module calls. It sees
each operation before autograd does, and can hand it another tensor. A dispatch mode was no
alternative: it sits below autograd, so it sees operations whose graph has been built already, on
the wrong tensors.

What Blockpipe itself does to a tensor never goes through the glue, nor through a mode of the
user's: wherever code of the user's comes to ours (an operation, a sealed call, a mark, a hook on
what is saved), all function modes are left first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from .._common.callsite import users_line
from .._common.nested import map_tensors, tensors
from .._common.threads.thread_state import (
    call_under,
    enter_modes,
    in_thread,
    leave_modes,
    waiting_for_device,
)
from .._torch.graph import saved_tensor_hooks
from .._torch.modes import function_mode_at, how_many_function_modes
from .._torch.patched_functions import torchs_own
from ..errors import CrossingError, StateError
from .callbacks import CALLS_BACK, seen_by
from .microbatch_run import MicrobatchRun, Reader
from .step_context import Seal
from .tensors.place import Reads
from .tensors.questions import ABOUT_VALUES, METADATA, WHERE
from .tensors.tensor_import import check_asked

_register_hook = Tensor.register_hook
_NOTHING = nullcontext()
_BARE = Seal()


def watched_register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Replace ``Tensor.register_hook`` in a sealed module, where no mode sees it, and note the
    hook."""
    mode = active_mode()
    if mode is not None and mode.inside:
        mode.run.gradients.hooked.add(mode.run.hop)
    return _register_hook(tensor, hook)  # type: ignore[no-untyped-call]


# They belong on the tensor itself.
_HOOKS = frozenset(
    [
        _register_hook,
        watched_register_hook,
        Tensor.retain_grad,
        Tensor.register_post_accumulate_grad_hook,
    ]
)
# The ``.grad`` of a tensor, by both of its names; a copy of the tensor has none.
_GRADS: Any = (Tensor.grad, Tensor._grad)
_READS_GRADIENT = frozenset(_grad.__get__ for _grad in _GRADS)
_SETS_GRADIENT = frozenset(set_ for _grad in _GRADS for set_ in (_grad.__set__, _grad.__delete__))
# Nothing that a copy could stand in for: what replaces a tensor's data or history, and backwards.
_ON_ITSELF: frozenset[Any] = frozenset(
    [
        Tensor.data.__set__,  # type: ignore[attr-defined]
        Tensor.detach_,
        Tensor.resize_,
        Tensor.set_,
        Tensor.requires_grad_,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        *_SETS_GRADIENT,
    ]
)
# Writes that autograd does not count. What others have saved of the tensor, and copies on other
# stages, are of the values before.
_UNCOUNTED = frozenset([Tensor.apply_, Tensor.map_, Tensor.map2_])
# What autograd counts, in the place of what it does not: other stages have copies.
_COUNTED = {Tensor.data.__get__: Tensor.detach}  # type: ignore[attr-defined]
_QUESTIONS = METADATA.union(_HOOKS, WHERE)
_ANSWERED = _QUESTIONS | _READS_GRADIENT
_LOOKS_AT_GRAPH = _HOOKS | {getattr(Tensor, name).__get__ for name in ("grad_fn",)}


def _count_write(tensor: Tensor) -> None:
    if not tensor.is_inference():
        increment_version(tensor)


def is_question(function: Callable[..., Any]) -> bool:
    """Return whether a torch function asks about a tensor, and computes nothing."""
    return function in _QUESTIONS


def looks_at_graph(function: Callable[..., Any]) -> bool:
    """Return whether a torch function hooks into a tensor's graph, or asks for it."""
    return function in _LOOKS_AT_GRAPH


def uses_gradient(function: Callable[..., Any]) -> bool:
    """Return whether a torch function asks for the ``.grad`` of a tensor, or sets it."""
    return function in _READS_GRADIENT or function in _SETS_GRADIENT


def active_mode() -> "CrossingMode | None":
    """Return the mode of this thread; ``None`` outside of a run."""
    mode: CrossingMode | None = in_thread.mode
    return mode


class ForwardMode(TorchFunctionMode):
    """The mode of a forward, which torch's patched functions tell what is called. Here nothing
    comes of it; a recording writes it down."""

    def call_inner(
        self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Apply a custom autograd function in a sealed call."""
        return apply(*args, **kwargs)

    def saw_node_hook(self, hook: Callable[..., Any]) -> None:
        """Note a hook of a node."""

    def saw_module_hooks(self, module: nn.Module, hooks: Iterable[Callable[..., Any]]) -> None:
        """Note the hooks that a backward calls around a module."""

    def saw_checkpoint(self, recompute: Callable[..., Any]) -> None:
        """Note a ``torch.utils.checkpoint`` in the glue, and what runs its function again."""

    def saw_setting(self) -> None:
        """Note that a setting of torch or of the process may have changed."""

    def saw_generator_set(self, kind: str) -> None:
        """Note that torch's, Python's or numpy's generator is given a state."""


class CrossingMode(ForwardMode):
    """Hands every operation in the glue what it may read, and claims what it makes.

    Its own reading goes through no function mode: see the module's docstring.

    Args:
        run: whose forward it is.
    """

    def __init__(self, run: MicrobatchRun) -> None:
        super().__init__()
        self.run = run
        self.inside = False  # of a sealed module, where this mode is off
        self._local = run.reader()
        self._claims = run.claims
        self._is_mixed = run.step.is_mixed
        self._waiting = run.step.known.waiting

    def __enter__(self) -> "CrossingMode":
        self._hooks = saved_tensor_hooks()
        self._outer = in_thread.mode
        in_thread.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        self.run.cursor.on_call = self.call_function
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self.run.cursor.on_call = None
        in_thread.mode = self._outer
        self._outer = None

    def is_on(self) -> bool:
        """Whether the mode sees what is called here."""
        return any(function_mode_at(i) is self for i in range(how_many_function_modes()))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        modes: Sequence[TorchFunctionMode] = (),
    ) -> Any:
        if how_many_function_modes():
            return self.apart(func, types, args, kwargs)
        run, claims, kwargs, given = self.run, self._claims, kwargs or {}, args
        # The user's modes are given what is there, as in the plain loop.
        func = func if modes else torchs_own(func)
        if func in _ANSWERED:
            return self._answered(func, args, kwargs, modes)
        run.arrive()
        if func in CALLS_BACK:
            args, kwargs = seen_by(self, args, kwargs)
        reads = Reads()
        local = run.handed(func, args, kwargs, self._local) if func in _ON_ITSELF else self._local
        args = tuple(
            [
                local(a, reads)
                if isinstance(a, Tensor)
                else _all_local(local, a, reads)
                if isinstance(a, list | tuple)
                else a
                for a in args
            ]
        )
        if kwargs:
            kwargs = {name: _any_local(local, value, reads) for name, value in kwargs.items()}
        func = _COUNTED.get(func, func) if reads else func
        constants = claims.constants_read(func, args, kwargs)
        with waiting_for_device() if self._waiting and func.__name__ in self._waiting else _NOTHING:
            result = call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)
        if func in _UNCOUNTED:
            _count_write(args[0])
        if reads:
            run.check_written(reads)
        if self._is_mixed and self._asks_for_host(func, args, kwargs):
            result = claims.keep_on_host(result, args, reads.outside)
        if constants is not None:
            claims.claim_constant(result, func, constants, reads.outside)
        claims.claim(result, reads.outside)
        return self._as_given(result, given[0]) if args and result is args[0] else result

    def _as_given(self, result: Any, given: Any) -> Any:
        """Return what an operation was given and has returned as the user's code knows it:
        ``h.contiguous() is h`` of a tensor that crossed."""
        return given if given is result or self.run.has_made(given) else result

    def apart(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Do the same where there are modes of the user's, which are for what ``func`` does."""
        modes = leave_modes()
        theirs = [mode for mode in modes if mode is not self]
        try:
            return self.__torch_function__(func, types, args, kwargs, theirs)
        finally:
            enter_modes(modes)

    def _asks_for_host(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Return whether an operation says explicitly that its result be on the host, or reads
        nothing else. The device that a stage on the CPU was given as its own does not count."""
        device = kwargs.get("device", args[1] if func is Tensor.to and len(args) > 1 else None)
        if isinstance(device, str):
            device = torch.device(device)
        elif device is self.run.step.device_of(self.run.stage):
            return False
        if func is Tensor.cpu or (isinstance(device, torch.device) and device.type == "cpu"):
            return True
        given = list(tensors((args, kwargs)))
        return bool(given) and all(map(self.run.step.stays, given))

    def _answered(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        modes: Sequence[TorchFunctionMode],
    ) -> Any:
        """Return the answer to a question, which needs no copy. A tensor's device is the one on
        which the stage that asks would read it."""
        run = self.run
        if func in _READS_GRADIENT:
            return self._gradient(func, args[0], modes)
        if func in _HOOKS or run.writes.reached_back:
            args = (run.newest(args[0]), *args[1:])
        if func in ABOUT_VALUES and args:
            check_asked(args[0], run.place, max(run.cursor.stage, 0), run.step.constants)
        if func in _LOOKS_AT_GRAPH:
            run.gradients.hooked.add(hop := run.hop_of(args[0]))
            if func is Tensor.retain_grad:
                run.gradients.keep(args[0], hop)
        where = WHERE.get(func)
        if where is None:
            return call_under(modes, func, args, kwargs) if modes else func(*args, **kwargs)
        return where(run.device_of(args[0] if args else kwargs["input"]))

    def _gradient(
        self, func: Callable[..., Any], tensor: Tensor, modes: Sequence[TorchFunctionMode]
    ) -> Any:
        """Return the ``.grad`` of the tensor itself, wherever it is: it crosses when it is read."""
        self.run.arrive()
        step, home = self.run.step, self.run.step.homes.get(id(tensor))
        if home is not None and home.stage != self.run.stage and step.constants is not None:
            raise StateError(
                f"the forward or the loss reads the .grad of {home.name!r}, of stage {home.stage}, "
                f"on stage {self.run.stage} ({users_line()}): which backwards were there by then "
                "depends on timing; read it between steps, or use schedule='sequential'"
            )
        holder = self.run.holder_of_gradient(tensor, self._local)
        gradient = call_under(modes, func, (holder,), {}) if modes else func(holder)
        if gradient is not None:
            self._claims.claim_gradient(gradient, holder)
        return gradient

    def read(self, tensor: Tensor) -> Tensor:
        """Return the tensor that an operation here is given in the place of another; function modes
        are off."""
        if self.inside:
            return tensor
        self.run.arrive()
        return self._local(tensor, Reads())

    def read_aside(self, tensor: Tensor) -> Tensor:
        """Return the same in the middle of the glue, where modes are on."""
        modes = leave_modes()
        try:
            return self.read(tensor)
        finally:
            enter_modes(modes)

    def saw_custom_function(self, name: str, *, is_scripted: bool = False) -> None:
        """Note a custom autograd function, or a scripted one, in the glue; a recording writes it
        down. Of a function that the recording has not met, nobody knows whether its backward can be
        split, and whether a checkpoint reads what it was not given.

        Raises:
            CrossingError: it is a reentrant checkpoint that the recording has not met.
        """
        run = self.run
        if name in run.step.known.custom_functions or not run.step.graphs.cut:
            return
        run.gradients.hooked.add(run.arrive())
        if name == "CheckpointFunction":
            raise CrossingError(
                "expected what the recorded forward does, got a reentrant torch.utils.checkpoint "
                f"that it had not on stage {run.stage} ({users_line()}); pass "
                "use_reentrant=False, or give Pipeline a sample that takes this way"
            )

    def call_function(
        self, key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that is a block; like a module, it may be sealed."""
        run = self.run
        seal = run.step.known.sealed_functions.get(key)
        if self.inside or seal is None or not seal.hops or not run.is_sealed(seal.hops):
            return function(*args, **kwargs)
        return self.call_sealed(function, args, kwargs, seal)

    def call_sealed(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seal: Seal = _BARE,
    ) -> Any:
        """Call something without intercepting its operations; tensors are looked at on the way in
        and out only.

        Args:
            function: the module's forward, or the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            seal: how it is called.
        """
        run, spec = self.run, seal.recompute
        modes: Sequence[TorchFunctionMode] = leave_modes()
        theirs = () if modes == [self] else [mode for mode in modes if mode is not self]
        self.inside = True
        try:
            run.arrive()
            own, reads, read = _Containers(), Reads(), self._local

            def local(tensor: Tensor) -> Tensor:
                return read(tensor, reads)

            args = tuple(
                [local(a) if isinstance(a, Tensor) else own.localize(local, a) for a in args]
            )
            kwargs = own.localize(local, kwargs) if kwargs else kwargs
            recomputed = None
            if spec is not None and run.is_recomputing() and saved_tensor_hooks() == self._hooks:
                recomputed = run.recomputed(spec, function, args, kwargs, theirs)
            run.sealed += 1
            try:
                with waiting_for_device() if seal.waits else _NOTHING:
                    if recomputed is not None:
                        result = recomputed.run(args, kwargs)
                    elif theirs:
                        result = call_under(theirs, function, args, kwargs)
                    else:
                        result = function(*args, **kwargs)
                if reads:
                    run.check_written(reads)
            finally:
                run.sealed -= 1
                own.write_back()
            if seal.constants:
                self._claims.claim_constants(result, seal.constants, seal.name, reads.outside)
            self._claims.claim(result, reads.outside)
            return result
        finally:
            self.inside = False
            enter_modes(modes)


def _any_local(local: Reader, value: Any, reads: Reads) -> Any:
    if isinstance(value, Tensor):
        return local(value, reads)
    return _all_local(local, value, reads) if isinstance(value, list | tuple) else value


def _all_local(local: Reader, value: Any, reads: Reads) -> Any:
    return map_tensors(lambda tensor: local(tensor, reads), value)


class _Containers:
    """Lists and dicts that had to be rebuilt for a sealed call; what the callee adds to them goes
    back."""

    def __init__(self) -> None:
        self._rebuilt: list[tuple[Any, Any, Any]] = []

    def localize(self, function: Callable[[Tensor], Tensor], value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if type(value) is tuple:
            items = [self.localize(function, item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else tuple(items)
        new = map_tensors(function, value)
        if new is not value and type(value) in (list, dict):
            self._rebuilt.append((value, new, new.copy()))
        return new

    def write_back(self) -> None:
        for original, given, before in self._rebuilt:
            if type(original) is dict:
                for key in before.keys() - given.keys():
                    original.pop(key, None)
                original.update(
                    {k: v for k, v in given.items() if k not in before or before[k] is not v}
                )
            elif len(given) != len(before) or any(
                a is not b for a, b in zip(given, before, strict=True)
            ):
                original[:] = given
