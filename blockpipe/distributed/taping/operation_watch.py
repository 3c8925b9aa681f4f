"""Watch operations below torch functions: whether they draw random numbers or read values, and the
tensors that they make inside of sealed modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..._common.nested import tensors
from ..._torch.graph import saved_tensor_hooks
from ..._torch.modes import DispatchMode, dispatch_modes
from ..._torch.patched_functions import torchs_own
from ..._torch.tensors import OpOverload
from ...crossing.interception import is_question


class InsideMode(TorchFunctionMode):
    """A mode that knows the tensors made inside of sealed modules."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.made = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = torchs_own(func)(*args, **(kwargs or {}))
        if not is_question(func):
            for tensor in tensors(result):
                self.made[tensor] = self.path
        return result


class OperationWatch(DispatchMode):
    """A mode that notes the operations that draw random numbers, read a tensor's value, or make
    tensors of sizes that depend on data. The names of torch functions do not tell that."""

    def begin(self) -> None:
        """Clear all notes."""
        self.drew = self.made_unsized = self.read_value = False

    drew = made_unsized = read_value = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, OpOverload):
            self.read_value = self.read_value or torch.Tag.data_dependent_output in func.tags
            self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
            if torch.Tag.dynamic_output_shape in func.tags and not _is_by_numbers(func, args):
                self.made_unsized = True
        return func(*args, **(kwargs or {}))


def _is_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is an index whose result has a size that follows from its arguments' sizes."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors(args[1]))


def drawn_outside() -> Any:
    """Return the states of Python's and NumPy's random numbers, and the seed of torch's."""
    numpy, seed = sys.modules.get("numpy"), torch.default_generator.initial_seed()
    if numpy is None:
        return random.getstate(), seed
    state = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2], seed


def entered() -> list[str]:
    """Return what the user's code has entered that changes operations or what they save, beside
    function modes. What torch's checkpoints and ``save_on_cpu`` enter changes no number."""
    modes = [type(mode) for mode in dispatch_modes()]
    hooks = saved_tensor_hooks() or ()
    kinds = [
        *(("the mode", kind) for kind in modes),
        *(("saved-tensor hooks", h) for h in hooks[:1]),
    ]
    return [
        f"{what} {getattr(kind, '__qualname__', kind)}"
        for what, kind in kinds
        if not f"{getattr(kind, '__module__', '')}.".startswith(("torch.", "blockpipe."))
    ]
