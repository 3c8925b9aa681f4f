"""What is on a module, whatever its class."""

from collections.abc import Iterator

from torch import Tensor, nn


def named_slots(model: nn.Module, slots: str) -> Iterator[tuple[str, Tensor]]:
    """Every place of a module that holds a tensor, once, tied tensors under each of their names.

    ``named_parameters(remove_duplicate=False)`` names a module that is registered twice twice.
    """
    for path, module in model.named_modules():
        for key, tensor in getattr(module, slots).items():
            if tensor is not None:
                yield (f"{path}.{key}" if path else key), tensor


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module, or compiled it in place."""
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


class StandIn:
    """What stands in for a module's forward for a while, and is no change of the user's."""
