"""Put out of reach, while a step runs, what only other processes have the values of.

A stage's code may come to read a weight of another stage after the recording: in a hook, or in a
branch that it takes later. In this process that weight is as it was at the beginning, and gets no
gradient. While a step runs, such a tensor is therefore of a class that answers what is the same in
every process, such as its shape, and refuses the rest. It stays the same object, so that it does
not matter what leads to it: a module, a list, a closure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._torch.modes import without_torch_functions
from ...errors import StateError

_SAME_EVERYWHERE = frozenset(
    [
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "stride"),
        *("dtype", "itemsize", "element_size", "nbytes", "layout", "device", "get_device"),
        *("requires_grad", "is_leaf", "is_contiguous", "is_floating_point", "is_complex", "names"),
        *("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_signed", "__hash__"),
    ]
)


def named_elsewhere(model: nn.Module, own: Iterable[Tensor]) -> dict[int, tuple[str, Tensor]]:
    """Return the parameters and buffers of a model that are none of a process's own, each with its
    name, by their ids."""
    here = {id(tensor) for tensor in own}
    held = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): (name, tensor) for name, tensor in held if id(tensor) not in here}


class OutOfReach:
    """The parameters and buffers of a model that are in none of some stages.

    Args:
        model: the user's model.
        stages: those that this process has.
    """

    def __init__(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        own = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
        self._named = named_elsewhere(model, own)
        self._kinds: dict[type, type] = {}

    @contextmanager
    def during(self) -> Iterator[None]:
        """Have code that reads one of them during the block raise :class:`StateError`."""
        before = [(tensor, type(tensor)) for _, tensor in self._named.values()]
        try:
            for tensor, kind in before:
                tensor.__class__ = self._refusing(kind)
            yield
        finally:
            for tensor, kind in before:
                tensor.__class__ = kind

    def _refusing(self, kind: type) -> type:
        """Make a class of tensors from another one; once for each."""
        if kind not in self._kinds:
            members = {
                "__torch_function__": classmethod(self._answer),
                "__module__": kind.__module__,
            }
            self._kinds[kind] = type(kind)(kind.__name__, (kind,), members)
        return self._kinds[kind]

    def _answer(
        self,
        cls: type,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if _asked(func) in _SAME_EVERYWHERE:
            with without_torch_functions():
                return func(*args, **given)
        read = (id(tensor) for tensor in tensors((args, given)))
        names = (self._named[key][0] for key in read if key in self._named)
        raise StateError(  # no TypeError, which operators take for "not implemented"
            "expected stages to read what their process has, got code that reads "
            f"{next(names, 'a tensor')!r}, whose value is in another process "
            f"({users_line()}), and did not when it was recorded; read it in each forward, on the "
            "way from the stage's inputs to its outputs"
        )


def _asked(func: Any) -> str:
    """The name of a function of tensors, or of the attribute that it gets."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name
