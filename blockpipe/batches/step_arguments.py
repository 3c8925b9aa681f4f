"""The arguments of one step, handed on as one value by what runs steps to time or compare them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepArguments:
    """The arguments of :meth:`Pipeline.forward_backward`, but for its options.

    Attributes:
        args: the forward's positional arguments.
        kwargs: the forward's keyword arguments.
        target: the second argument of ``loss_fn``; ``None`` if there is none.
        loss_fn: the loss of the model's output; ``None`` where the model returns its own.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[..., Any] | None = None
