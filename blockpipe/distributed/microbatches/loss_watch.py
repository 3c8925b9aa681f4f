"""Refuse a loss function that reads what only other processes have.

It runs in the last stage's process. There the weights of other stages are not trained, and what
modules of other stages leave in their attributes comes from the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.overrides import TorchFunctionMode

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ..._torch.graph import leaves_of_graph
from ..._torch.patched_functions import torchs_own
from ..._torch.tensors import extent_of, memory_of, overlapping
from ...batches.losses import kind_of
from ...crossing.torch_patches import Replacement
from ...errors import StateError, UsageError
from .out_of_reach import named_elsewhere

_REMEDY = "compute it in the forward, and have the model return it"


class LossWatch:
    """A watch over the losses of one process.

    Args:
        model: the user's model.
        own: the parameters and buffers of this process's stages.
        left: attributes that modules of other processes set: a module, its path, and a name.
        is_alone: whether this process has all stages.
    """

    def __init__(
        self,
        model: nn.Module,
        own: Iterable[Tensor],
        left: Iterable[tuple[nn.Module, str, str]],
        *,
        is_alone: bool,
    ) -> None:
        self._seen: set[Any] = set()  # kinds of losses
        self._is_alone = is_alone
        self._weights = named_elsewhere(model, own)
        self._left = [*left]

    @contextmanager
    def watching(self, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
        """Watch a loss function, the first one of each kind.

        Raises:
            StateError: it reads what another process has.
            UsageError: it scales its loss by a scaler that knows of this process only.
        """
        kind = kind_of(loss_fn)
        if loss_fn is None or self._is_alone or kind in self._seen:
            yield
            return
        foreign = {**self._left_there(), **self._named_weights()}
        with _Scalers(), _ForeignReads(foreign, self._memory()):
            yield
        self._seen.add(kind)

    def _named_weights(self) -> dict[int, str]:
        return {key: repr(name) for key, (name, _) in self._weights.items()}

    def _memory(self) -> dict[int, list[tuple[str, Tensor]]]:
        """Those weights, by their storage: the loss may have a view of one, or its state dict."""
        found: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._weights.values():
            found.setdefault(memory_of(tensor), []).append((repr(name), tensor))
        return found

    def _left_there(self) -> dict[int, str]:
        """The tensors in attributes of modules that other processes call, by their ids."""
        return {
            id(tensor): f"{name!r} of {path or 'the model'!r}"
            for module, path, name in self._left
            for tensor in tensors(getattr(module, name, None))
        }

    def check(self, loss: Tensor, results: Iterable[Tensor]) -> None:
        """Raise :class:`StateError` for a loss with a gradient for a weight of another process."""
        if self._is_alone or not self._weights:
            return
        for leaf in leaves_of_graph([loss], before=results):
            if id(leaf) in self._weights:
                _refuse(repr(self._weights[id(leaf)][0]))


class _ForeignReads(TorchFunctionMode):
    """A mode in which some tensors must not be read.

    Args:
        foreign: their names by their ids.
        memory: more of them by their storage, where their views count as well.
    """

    def __init__(
        self, foreign: Mapping[int, str], memory: Mapping[int, list[tuple[str, Tensor]]]
    ) -> None:
        super().__init__()
        self._foreign = foreign
        self._memory = memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in tensors((args, kwargs)):
            if id(tensor) in self._foreign:
                _refuse(self._foreign[id(tensor)])
            for name, weight in self._memory.get(memory_of(tensor), ()):
                if overlapping([(*extent_of(tensor), ""), (*extent_of(weight), "")]):
                    _refuse(f"the memory of {name}")
        return torchs_own(func)(*args, **(kwargs or {}))


def _refuse(what: str) -> None:
    raise StateError(  # no TypeError, which operators take for "not implemented"
        f"expected a loss_fn of what the last stage's process has, got one that reads {what}, "
        f"whose value is in another process ({users_line()}); {_REMEDY}"
    )


class _Scalers(Replacement):
    """A replacement by which a loss scaler is refused that knows of one process only."""

    owner, name = torch.amp.GradScaler, "scale"

    def replacement(self) -> Any:
        return _scale


_original_scale: Any = torch.amp.GradScaler.scale


def _scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler):
        raise UsageError(
            "expected a scaler that all processes share, for one of them alone would skip a step, "
            f"got {type(scaler).__name__} ({users_line()}); use "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in its place"
        )
    return _original_scale(scaler, outputs)
