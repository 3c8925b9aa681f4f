"""The tensors, paths and wrappers of a module of any class."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

R = TypeVar("R")
Slots = Mapping[str, Tensor | None]


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


class StandIn:
    """A temporary replacement of a module's forward, which is not a change by the user."""
