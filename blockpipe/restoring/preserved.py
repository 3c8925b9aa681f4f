"""Keep a model unchanged by steps that measure or verify it, and are not a part of its training.

A recording restores what a forward changes (:mod:`blockpipe.restoring.model_state`). A step changes
more: gradients, parameters (``nn.Embedding(max_norm=…)`` writes to its weight) and random
generators. Hooks that update parameters in the backward would even train the model.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.graph import stepping_hooks
from ..devices.rng_streams import Source, preserve_rng
from .copies.whole_copies import copied_whole
from .held_signals import RestoredWhole
from .model_state import ModelState


class PreservedModel:
    """The parameters and gradients of some modules when this was made, and their other state as it
    is before each run.

    Args:
        modules: the model, and any other module with parameters, such as a loss.
        sources: the generators that a step may draw from; Python's and numpy's are added.
        given: the arguments of the step, which a forward may change.
    """

    def __init__(
        self, modules: Sequence[nn.Module], sources: Sequence[Source], given: Iterable[Any] = ()
    ) -> None:
        self._modules, self._given = modules, [*given]
        host = ["random", *(["numpy"] if "numpy" in sys.modules else [])]
        self.sources: list[Source] = [*dict.fromkeys([*sources, *host])]
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        self._gradients = [(p, p.grad) for p in parameters]
        # On the host, because a model may nearly fill its devices.
        self._values = [
            (p, p.data, p.detach().to("cpu", copy=True)) for p in parameters if not p.is_inference()
        ]
        self._steppers: list[dict[Any, Any]] = [
            hooks for p in parameters if (hooks := stepping_hooks(p)) is not None
        ]

    def run(self) -> RestoredWhole[None]:
        """Run a block that begins without gradients, and restore everything even if it fails."""
        return RestoredWhole(
            preserve_rng(self.sources),
            restored_state(self._modules, self._given),
            self._without_gradients(),
        )

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        steppers = [dict(hooks) for hooks in self._steppers]
        try:
            for hooks in self._steppers:
                hooks.clear()  # an optimizer's step in the backward
            for parameter, _ in self._gradients:
                parameter.grad = None
            yield
        finally:
            self._put_back_values()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            for hooks, before in zip(self._steppers, steppers, strict=True):
                hooks.update(before)

    def _put_back_values(self) -> None:
        # A version does not say whether a forward has written to them: it may write to .data.
        with torch.no_grad():
            for parameter, data, value in self._values:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if not torch.equal(data.to("cpu"), value):
                    data.copy_(value)


@contextmanager
def restored_state(modules: Sequence[nn.Module], given: Iterable[Any] = ()) -> Iterator[None]:
    """Restore what :class:`ModelState` keeps, as it is when this is entered: handlers of signals
    may have set something before. Twice: what was made goes in the first, and finalizers run
    (``__del__``)."""
    state = ModelState(*modules, values=True, others=given)
    with state, state:
        yield


def moved_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module with all of its tensors on a device.

    Each tensor is copied once, straight to the device; the old device needs no room for a copy.

    Args:
        module: the module to copy; it is returned itself if all of its tensors are there already.
        device: the device of the copy.
    """
    slots = [*module.parameters(), *module.buffers()]
    if all(tensor.device == device for tensor in slots):
        return module
    memo: dict[int, Any] = {}
    for tensor in slots:
        moved: Tensor = tensor.detach().to(device, copy=True)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        memo[id(tensor)] = moved
    return copied_whole(module, memo)


def fresh_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a leaf with a tensor's values, for a forward that may write to its inputs.

    Args:
        tensor: the tensor to copy; the copy needs a gradient if it does.
        device: the device of the copy.
    """
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
