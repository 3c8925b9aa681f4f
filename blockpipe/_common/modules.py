"""The tensors, paths and wrappers of a module of any class."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from .threads.model_turns import alone_with, is_recorded_elsewhere

R = TypeVar("R")
Slots = Mapping[str, Tensor | None]

MISSING = object()
"""In the place of an attribute that is not there."""


def all_slots(
    model: nn.Module, slots_of: Callable[[nn.Module], Slots]
) -> Iterator[tuple[str, Slots, str, Tensor]]:
    """Yield every slot of a model that holds a tensor, tied tensors under each of their names.

    ``named_parameters(remove_duplicate=False)`` would list the slots of a module that is
    registered under two names twice.

    Args:
        model: the model.
        slots_of: the slots of one module: ``parameters_of`` or ``buffers_of``.

    Yields:
        The name in the model, the slots of the module, the key there, and the tensor.
    """
    for path, module in model.named_modules():
        slots = slots_of(module)
        for key, tensor in slots.items():
            if tensor is not None:
                yield (f"{path}.{key}" if path else key), slots, key, tensor


def named_slots(
    model: nn.Module, slots_of: Callable[[nn.Module], Slots]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each of :func:`all_slots`."""
    for name, _, _, tensor in all_slots(model, slots_of):
        yield name, tensor


def paths_around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module or tensor, from the inside out, ``""`` last.

    Example:
        >>> list(paths_around("encoder.0.weight"))
        ['encoder.0', 'encoder', '']
    """
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_within(path: str, outer: str) -> bool:
    """Return whether a path is another one, or lies inside of it.

    Example:
        >>> is_within("encoder.10", "encoder"), is_within("encoder.10", "encoder.1")
        (True, False)
    """
    return outer in ("", path) or path.startswith(f"{outer}.")


def call_with_tensors(
    model: nn.Module, values: Mapping[str, Tensor], function: Callable[[], R]
) -> R:
    """Call a function while a model has other parameters and buffers.

    Args:
        model: gets its own again at the end.
        values: those that it has meanwhile, by name.
        function: may run the model, or what is more than that.
    """
    named = {f"model.{name}": tensor for name, tensor in values.items()}
    result: R = functional_call(_Around(model, function), named, (), tie_weights=False)
    return result


class _Around(nn.Module):
    """A module of which a call is a call of any function, and runs no hooks."""

    def __init__(self, model: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def __call__(self) -> Any:
        return self._function()


class OwnHook(partial[Any]):
    """A hook of Blockpipe's on a module: it does not change what the user's forward does."""


def forward_of(kind: type[nn.Module]) -> Any:
    """Return a class's forward, unbound: TorchScript's binds itself to no class."""
    return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))


class StandIn:
    """A temporary replacement of a module's forward, which is not a change by the user.

    A copy or pickle of the module does not take it along (:class:`StateWithoutStandIns`); one that
    a class of the user's makes by hand gets the forward.

    Attributes:
        forward: what it stands in for.
        own: the module's attribute in whose place it is; ``MISSING``: its class has it.
    """

    forward: Callable[..., Any]
    own: Any = MISSING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the forward does, and more."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Answer as the forward does: its name, its code, the module (``__self__``)."""
        if name == "forward":  # it is not set yet
            raise AttributeError(name)
        return getattr(self.forward, name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.forward,)


class StateWithoutStandIns(StandIn):
    """Stands in for a module's ``__getstate__`` while another one does for its forward.

    ``copy`` and ``pickle`` ask the module itself for it, and nothing of ours is in what they get:
    a thread that saves the model while a step runs would keep the step's stand-ins.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.module, memo).__getstate__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, STATE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_recorded_elsewhere(self.module):  # its parameters are fake
            with alone_with(self.module):
                return getattr(self.module, STATE)()
        state = type(self.module).__getstate__(self.module)
        return _without_stand_ins(state) if isinstance(state, dict) else state


class CopyWithoutStandIns(StandIn):
    """Stands in for the ``__deepcopy__`` of a module whose class has one, as torch gives one to
    modules with parametrizations: it may copy all attributes, whatever the state is.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = getattr(module, "__deepcopy__")  # noqa: B009 - a module's class has none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (memo,) = args
        before = dict(vars(self.module))
        made = type(self.module).__deepcopy__(self.module, memo)  # type: ignore[attr-defined]
        for name, value in _without_stand_ins(before).items():
            if before[name] is not value:
                vars(made)[name] = copy.deepcopy(value, memo)
        for name in before.keys() - _without_stand_ins(before).keys():
            vars(made).pop(name, None)
        return made


STATE = "__getstate__"
"""The attribute that :class:`StateWithoutStandIns` takes."""


def stand_ins_of_copies(module: nn.Module) -> Iterator[tuple[str, StandIn]]:
    """Yield what has to be on a module, by its attribute, beside a stand-in for its forward."""
    yield STATE, StateWithoutStandIns(module)
    if hasattr(type(module), "__deepcopy__"):
        yield "__deepcopy__", CopyWithoutStandIns(module)


def _without_stand_ins(state: dict[str, Any]) -> dict[str, Any]:
    found = dict(state)  # at once: a step may end meanwhile
    for name, value in list(found.items()):
        while isinstance(value, StandIn):
            value = value.own
        if value is MISSING:
            del found[name]
        else:
            found[name] = value
    return found


def _itself(value: Any) -> Any:
    return value
