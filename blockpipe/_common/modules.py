"""The tensors and wrappers of a module of any class."""

from collections.abc import Iterator

from torch import Tensor, nn


def named_slots(model: nn.Module, slots: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every slot of a model that holds a tensor, tied tensors under each of their names.

    ``named_parameters(remove_duplicate=False)`` would list the slots of a module that is
    registered under two names twice.

    Args:
        model: the model.
        slots: the attribute that has a module's slots, such as ``"_buffers"``.
    """
    for path, module in model.named_modules():
        for key, tensor in getattr(module, slots).items():
            if tensor is not None:
                yield (f"{path}.{key}" if path else key), tensor


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` wraps a module, or compiled it in place."""
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


class StandIn:
    """A temporary replacement of a module's forward, which is not a change by the user."""
