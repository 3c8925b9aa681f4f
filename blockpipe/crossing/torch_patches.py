"""What of torch's is replaced while a step runs: where nothing else tells what a forward does.

Each replacement is entered by any number of threads, does nothing outside of a run, and is
taken off when the last of them leaves.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from .._common.threads.process_changes import ProcessChange
from .._common.threads.thread_state import enter_modes, leave_modes
from .._torch.compiler import CHOOSES, compiler
from .._torch.modes import how_many_function_modes
from .._torch.tensors import MAKE_SUBCLASS, FakeTensor
from .interception import active_mode, watched_register_hook
from .tags import GraphEntry

_STANDS_FOR = "_blockpipe_stands_for"  # of a replacement: the original


class _OnlyOne(ProcessChange):
    """A change of what is there once: each class has one object."""

    _only: ClassVar[Any] = None  # of its class

    def __new__(cls, *args: Any) -> Self:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cast(Self, cls._only)


class Eager(_OnlyOne):
    """The compiler's stance by which compiled modules run as they were written, so that their marks
    and reads are seen. It is every thread's: two that each set it back to what they found, one in
    the middle of the other, would leave it for good."""

    _before: Any = None  # sets back what it was

    def put_on(self) -> None:
        """Set the stance."""
        self._before = torch.compiler.set_stance("force_eager")

    def take_off(self) -> None:
        """Set it back."""
        before, self._before = self._before, None
        if before is not None:
            before.__exit__(None, None, None)


class Replacement(_OnlyOne):
    """A replacement of something of torch's, in place while any number of threads have it
    entered."""

    owner: Any
    name: str
    _original: Any  # as it is, unbound

    def __new__(cls, *args: Any) -> Self:
        is_first = cls._only is None
        only = super().__new__(cls, *args)
        if is_first:
            only._original = _as_it_is(cls.owner, cls.name)
        return only

    def replacement(self) -> Any:
        """Return what stands there meanwhile."""
        raise NotImplementedError

    def put_on(self) -> None:
        """Put the replacement in the place of the original."""
        self._original = _as_it_is(self.owner, self.name)
        setattr(self.owner, self.name, self.replacement())

    def take_off(self) -> None:
        """Put the original back."""
        setattr(self.owner, self.name, self._original)


def _as_it_is(owner: Any, name: str) -> Any:
    """Return an attribute of a class or module, unbound. ``inspect.getattr_static`` takes ten times
    as long, and each step asks several times."""
    for place in getattr(owner, "__mro__", (owner,)):
        if name in vars(place):
            return vars(place)[name]
    raise AttributeError(f"expected {owner!r} to have {name!r}")


class UnseenOperations(Replacement):
    """A replacement by which ``Tensor.as_subclass``, ``nn.Parameter(…)``, ``Tensor.set_``, and an
    assignment to a part of a complex tensor (``real``, ``imag``), are operations. No function mode
    sees them.

    The first two would read the tensor of another stage, and a parameter that is made in the
    forward would not say of which micro-batch it is. The others write to the tensor. torch sets the
    tensor's hooks meanwhile, which a mode sees, and to look at the view then waits for a lock that
    the same thread has.
    """

    owner, name = Tensor, "as_subclass"
    _before: dict[str, Any]

    def put_on(self) -> None:
        own = vars(Tensor)  # torch's are inherited
        self._before = {name: own[name] for name in _UNSEEN if name in own}
        for name, stand_in in _UNSEEN.items():
            setattr(Tensor, name, stand_in)

    def take_off(self) -> None:
        for name, stand_in in _UNSEEN.items():
            if vars(Tensor).get(name) is not stand_in:
                continue  # after an interrupt: it was not put on yet, or is off again
            if name in self._before:
                setattr(Tensor, name, self._before[name])
            else:
                delattr(Tensor, name)


class NoElements(Replacement):
    """A replacement of ``apply_`` on fake tensors, which raises: torch's own passes elements to a
    function of Python's, and reads them at an address that is none."""

    owner, name = FakeTensor, "apply_"

    def replacement(self) -> Any:
        return _apply_to_nothing


def _apply_to_nothing(tensor: Tensor, function: Callable[[Any], Any]) -> Tensor:
    raise NotImplementedError(f"a fake tensor has no elements for {function!r}")


def _part(original: Any) -> property:
    """Return a property in the place of a part of a complex tensor."""

    def assign(tensor: Tensor, value: Any) -> None:
        mode = active_mode()
        if mode is None or not mode.is_on():
            original.__set__(tensor, value)
        else:
            original.__get__(tensor)[...] = value

    return property(original.__get__, assign)


_original_as_subclass: Any = Tensor.as_subclass
original_set: Any = Tensor.set_
_original_make_subclass: Any = getattr(Tensor, MAKE_SUBCLASS)


@functools.wraps(_original_as_subclass)
def _as_subclass(*args: Any) -> Any:
    mode = active_mode()
    # A subclass's own way to do an operation calls it, too, where all modes are off.
    if mode is None or not mode.is_on() or not how_many_function_modes():
        return _original_as_subclass(*args)
    return mode.__torch_function__(_original_as_subclass, (), args, {})


@functools.wraps(original_set)
def _set(*args: Any, **kwargs: Any) -> Any:
    mode, caller = active_mode(), str(sys._getframe(1).f_globals.get("__name__"))
    # torch makes fake tensors by it.
    if mode is None or not mode.is_on() or caller.startswith("torch."):
        return original_set(*args, **kwargs)
    return mode.__torch_function__(original_set, (), args, kwargs)


@functools.wraps(_original_make_subclass)
def _make_subclass(kind: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    mode = active_mode()
    if mode is None or not issubclass(kind, nn.Parameter):
        return _original_make_subclass(kind, data, *args, **kwargs)
    data = mode.read_aside(data) if mode.is_on() else data
    result = _original_make_subclass(kind, data, *args, **kwargs)
    mode.run.claims.claim_leaf(result)
    return result


_UNSEEN = {
    **{name: _part(_as_it_is(Tensor, name)) for name in ("real", "imag")},
    "as_subclass": _as_subclass,
    "set_": _set,
    MAKE_SUBCLASS: staticmethod(_make_subclass),
}


class TensorHooks(Replacement):
    """A replacement by which ``Tensor.register_hook`` in sealed modules is noticed.

    The two parts of a split backward both begin where a gradient arrives, and would both call the
    hook that is there: the backward of such a hop is run whole. There is no asking a node of the
    graph for its hooks.
    """

    owner, name = Tensor, "register_hook"

    def replacement(self) -> Any:
        return watched_register_hook


class Backwards(Replacement):
    """A replacement by which ``torch.autograd.backward`` in the glue is an operation, as
    ``Tensor.backward`` is: function modes see the one, and of the other only what it makes
    itself."""

    owner, name = torch.autograd, "backward"

    def replacement(self) -> Any:
        return _backward


_original_backward: Any = torch.autograd.backward


@functools.wraps(_original_backward)
def _backward(*args: Any, **kwargs: Any) -> Any:
    mode = active_mode()
    if mode is None or not mode.is_on():
        return _original_backward(*args, **kwargs)
    return mode.__torch_function__(_original_backward, (), args, kwargs)


vars(_backward)[_STANDS_FOR] = _original_backward


class CustomFunctions(Replacement):
    """A replacement by which ``autograd.Function.apply`` in the glue is a sealed call.

    A function mode sees the operations inside a custom function's forward, but not its ``apply``:
    the function would differentiate one tensor while the mode replaced another. There is no hook
    for it, so ``apply`` itself is stood in for.
    """

    owner, name = torch.autograd.Function, "apply"

    def replacement(self) -> Any:
        return classmethod(_apply)


_original_apply: Any = torch.autograd.Function.__dict__["apply"]


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    original = _original_apply.__get__(None, cls)
    mode = active_mode()
    if mode is None or cls is GraphEntry:
        return original(*args, **kwargs)
    if mode.inside or not mode.is_on():  # as in a backward that is an operation of the forward
        return mode.call_inner(original, args, kwargs)
    mode.saw_custom_function(cls.__qualname__)
    return mode.call_sealed(original, args, kwargs)


class ScriptFunctions(Replacement):
    """A replacement by which functions under ``torch.jit.script`` in the glue are sealed calls; no
    function mode sees what TorchScript's interpreter runs."""

    owner, name = torch.jit.ScriptFunction, "__call__"

    def replacement(self) -> Any:
        return _call_scripted


_original_script_call: Any = torch.jit.ScriptFunction.__call__


def _call_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    original = functools.partial(_original_script_call, function)
    mode = active_mode()
    if mode is None or mode.inside or not mode.is_on():
        return original(*args, **kwargs)
    mode.saw_custom_function(function.name, is_scripted=True)
    return mode.call_sealed(original, args, kwargs)


class FastPaths(Replacement):
    """A replacement by which ``torch.overrides.has_torch_function``, asked in the glue, does not
    count our mode: with any mode, ``nn.TransformerEncoder`` leaves out its fast path, whose results
    are others where a mask says that there is padding. A recording has none: fake tensors cannot do
    what is on that path."""

    owner, name = torch.overrides, "has_torch_function"

    def replacement(self) -> Any:
        return _has_torch_function


_original_has_torch_function: Any = torch.overrides.has_torch_function


def _has_torch_function(relevant_args: Any) -> bool:
    mode = active_mode()
    if mode is None or mode.run.place.listener is not None or not mode.is_on():
        return bool(_original_has_torch_function(relevant_args))
    modes = leave_modes()
    try:
        others = any(one is not mode for one in modes)
        return others or bool(_original_has_torch_function(relevant_args))
    finally:
        enter_modes(modes)


class AsWritten(Replacement):
    """A replacement by which functions under ``torch.compile`` in the glue run as written: the
    compiler would trace what the mode does for one micro-batch, and do it again for others. To be
    entered where the compiler is imported."""

    name = CHOOSES

    def __new__(cls) -> Self:
        cls.owner = compiler()
        return super().__new__(cls)

    def replacement(self) -> Any:
        chooses = self._original

        def choose(callback: Any) -> Any:
            mode = active_mode()
            return chooses(callback) if mode is None or not mode.is_on() else None

        return choose


class _SeenCalls(_OnlyOne):
    """Replacements by which it is noticed that functions of some modules are called."""

    _functions: ClassVar[tuple[tuple[str, str, str], ...]]  # their modules and names, with a kind
    _put: tuple[tuple[Any, str, Any, Any], ...] = ()  # owners and names, originals, replacements

    def put_on(self) -> None:
        """Replace those of imported modules."""
        found = ((sys.modules.get(module), name, kind) for module, name, kind in self._functions)
        self._put = tuple(
            (owner, name, original, self._noting(original, kind))
            for owner, name, kind in found
            if owner is not None and (original := vars(owner).get(name)) is not None
        )
        for owner, name, _, stand_in in self._put:
            setattr(owner, name, stand_in)

    def take_off(self) -> None:
        """Put them back, unless somebody has replaced them meanwhile."""
        for owner, name, original, stand_in in self._put:
            if vars(owner).get(name) is stand_in:
                setattr(owner, name, original)
        self._put = ()

    def _noting(self, original: Any, kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = active_mode()
            if mode is None:
                return original(*args, **kwargs)
            return self._called(mode, kind, functools.partial(original, *args, **kwargs))

        functools.update_wrapper(call, original)
        vars(call)[_STANDS_FOR] = original
        return call

    def _called(self, mode: Any, kind: str, call: Callable[[], Any]) -> Any:
        """Tell the mode of a call, and make it."""
        raise NotImplementedError


class GeneratorStates(_SeenCalls):
    """Replacements by which it is noticed that code gives a state or a seed to a generator of the
    process: ``fork_rng``, or a context manager that draws by a seed and sets back what was there.
    It would do so for those who draw at the same time, and the state alone does not show it."""

    _functions = (
        ("torch", "set_rng_state", "torch"),
        ("torch.random", "set_rng_state", "torch"),
        ("random", "seed", "random"),
        ("random", "setstate", "random"),
        ("numpy.random", "seed", "numpy"),
        ("numpy.random", "set_state", "numpy"),
    )

    def _called(self, mode: Any, kind: str, call: Callable[[], Any]) -> Any:
        mode.saw_generator_set(kind)
        return call()


SETTERS = (
    *(("os", "chdir"), ("locale", "setlocale"), ("torch", "set_deterministic")),
    *(("torch", "set_default_dtype"), ("torch", "set_num_threads")),
    *(("torch", "use_deterministic_algorithms"), ("torch", "set_deterministic_debug_mode")),
    *(("torch", "set_float32_matmul_precision"), ("torch.backends.mha", "set_fastpath_enabled")),
    ("torch.autograd.anomaly_mode", "set_detect_anomaly"),
)
"""The functions that set something of torch or of the process, with their modules."""


class SettingsSet(_SeenCalls):
    """Replacements by which it is noticed that code changes a setting of torch or of the process,
    also if it sets that back before the next operation: others may run under it meanwhile."""

    _functions = tuple((module, name, "") for module, name in SETTERS)

    def _called(self, mode: Any, kind: str, call: Callable[[], Any]) -> Any:
        result = call()
        mode.saw_setting()
        return result


def original_of(value: object) -> object:
    """Return the function that a replacement stands for; any other value as it is."""
    return vars(value).get(_STANDS_FOR, value) if isinstance(value, types.FunctionType) else value
