"""What TorchScript keeps of a module: its attributes are in no dictionary of Python's."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import ConcreteModuleType


def names_in_script(module: nn.Module) -> list[str]:
    """Return the names of a scripted or traced module's own attributes, parameters and buffers."""
    kind = ConcreteModuleType.from_jit_type(module._c._type())  # type: ignore[operator, union-attr]
    return [*kind.get_attributes()]  # type: ignore[attr-defined]


def in_script(module: nn.Module, name: str) -> Any:
    """Return an attribute. Of a list or dictionary it is a copy, of a tensor the tensor itself."""
    return module._c.getattr(name)  # type: ignore[operator, union-attr]


def set_in_script(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute."""
    module._c.setattr(name, value)  # type: ignore[operator, union-attr]


def read_by_script(called: object) -> list[Tensor]:
    """Return the tensors that the code of a scripted module may read; none for anything else."""
    if not isinstance(called, torch.jit.ScriptModule):
        return []
    return [*called.parameters(), *called.buffers()]
