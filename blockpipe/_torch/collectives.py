"""Operations of ``torch.distributed`` that several processes make together."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_IN_PLACE, _FUNCTIONAL = "c10d", "_c10d_functional"  # namespaces of torch's operations
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


def is_collective(func: Any) -> bool:
    """Return whether an operation below autograd is one, and there are other processes."""
    namespace = getattr(func, "namespace", None)
    if namespace not in (_IN_PLACE, _FUNCTIONAL) or func.__name__.partition(".")[0] in _LOCAL:
        return False
    distributed = sys.modules["torch.distributed"]
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def made_alone(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what such an operation returns, without the other processes: tensors that it would
    write to are as they were, and new ones are zero."""
    result = func._op_dk(torch._C.DispatchKey.Meta, *args, **kwargs)
    if func.namespace == _FUNCTIONAL:
        for made in result if isinstance(result, list | tuple) else [result]:
            if isinstance(made, Tensor):
                made.zero_()
    return result
