"""The tensors and wrappers of a module of any class."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

R = TypeVar("R")


def named_slots(
    model: nn.Module, slots_of: Callable[[nn.Module], Mapping[str, Tensor | None]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every slot of a model that holds a tensor, tied tensors under each of their names.

    ``named_parameters(remove_duplicate=False)`` would list the slots of a module that is
    registered under two names twice.

    Args:
        model: the model.
        slots_of: the slots of one module: ``parameters_of`` or ``buffers_of``.
    """
    for path, module in model.named_modules():
        for key, tensor in slots_of(module).items():
            if tensor is not None:
                yield (f"{path}.{key}" if path else key), tensor


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
