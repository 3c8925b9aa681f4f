"""One model of the zoo, and the batches that several families share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Entry:
    """How to build a model and a batch for it.

    Attributes:
        name: unique in its family.
        build: the model, with random weights.
        batch: positional and keyword arguments of its forward.
        options: of :func:`tests.parity.compare`: ``batch_dims``, ``chunks``.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    options: dict[str, Any] = field(default_factory=dict)


def draw(*shape: int) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def draw_tokens(vocabulary: int, *shape: int) -> Tensor:
    """Token numbers from 3 on, the same at every call: those before are often special."""
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def images(size: int, batch: int = 6) -> Callable[[], Batch]:
    """A batch of square images as the only argument."""
    return lambda: ((draw(batch, 3, size, size),), {})


def named(make: Callable[[], dict[str, Any]]) -> Callable[[], Batch]:
    """A batch that is given by name."""
    return lambda: ((), make())


def without_zeros(model: nn.Module) -> nn.Module:
    """Weights that begin as zeros would hide the gradients of what is before them."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model
