"""What copies of a pipeline are as a module: the model's parameters, state and modes.

They are no module themselves: ``.to(device)`` and the hooks of a module have no meaning for them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import Tensor, nn

from .module_interface import ModuleInterface


class CopiedInterface:
    """Has the model that is copied as ``module``, and the pipelines of the copies as ``pipes``."""

    module: nn.Module
    pipes: list[Any]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the model's own parameters, as :meth:`torch.nn.Module.parameters` does.

        Args:
            recurse: whether those of the modules inside are among them.
        """
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the model's own parameters with their names in the model.

        Args:
            *args: as for the method of :class:`torch.nn.Module`.
            **kwargs: as for that, too.
        """
        return self.module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the model's own buffers, which are the first copy's.

        Args:
            recurse: whether those of the modules inside are among them.
        """
        return self.module.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model's own buffers with their names in the model.

        Args:
            *args: as for the method of :class:`torch.nn.Module`.
            **kwargs: as for that, too.
        """
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Pipeline.state_dict`: the keys are the model's.

        Args:
            *args: as for the method of :class:`torch.nn.Module`.
            **kwargs: as for that, too.
        """
        return self.pipes[0].state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Pipeline.load_state_dict`; the copies get the values at the next step.

        Args:
            state_dict: as for that method.
            *args: its further arguments.
            **kwargs: its further arguments by name.
        """
        return self.pipes[0].load_state_dict(state_dict, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`torch.nn.Module.zero_grad`, of the model.

        Args:
            set_to_none: whether ``.grad`` becomes ``None``, and not zeros.
        """
        self.module.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Self:
        """Set the model's mode, which the copies get at the next step.

        Args:
            mode: whether it is training.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model to evaluation."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_") or name in ("module", "pipes"):
            raise AttributeError(text)
        first = self.pipes[0]
        if hasattr(type(first), name) and not hasattr(nn.Module, name):
            text += f"; each copy's pipeline has it: pipes[0].{name}"
        elif hasattr(self.module, name) and not hasattr(ModuleInterface, name):
            text += f"; the model has it: module.{name}"
        raise AttributeError(text)
