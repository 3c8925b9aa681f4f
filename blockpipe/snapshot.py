"""What a recording changes, put back: modules' attributes, buffers, their generators.

A forward counts, caches and draws; a recording must leave no trace of that, nor fake tensors on
``self`` which the next real call would return.
"""

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn


class ModelState:
    """What a model's modules hold, to be put back: attributes, containers one level down, and the
    states of generators."""

    def __init__(self, model: nn.Module, *, values: bool) -> None:
        self._dicts = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
        self._containers = [
            (value, _copied(value))
            for names, _ in self._dicts
            for value in names.values()
            if isinstance(value, dict | list | set | deque)
        ]
        self._generators = [
            (value, value.get_state())
            for names, _ in self._dicts
            for value in names.values()
            if isinstance(value, torch.Generator)
        ]
        self._values: list[tuple[Tensor, Tensor]] = []
        if values:
            kept = {
                id(t): t
                for names, _ in self._dicts
                for value in (*names.get("_buffers", {}).values(), *names.values())
                if isinstance(t := value, Tensor)
            }
            self._values = [(t, t.detach().clone()) for t in kept.values()]

    def restore(self) -> None:
        """Put everything back, in place."""
        for names, before in self._dicts:
            if names.keys() != before.keys() or any(names[k] is not v for k, v in before.items()):
                names.clear()
                names.update(before)
        for container, before in self._containers:
            if isinstance(container, dict | set):
                container.clear()
                container.update(before)
            else:
                container.clear()
                container.extend(before)
        for generator, state in self._generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.detach().copy_(value)


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return OrderedDict(container)
    return list(container) if not isinstance(container, set) else set(container)
