"""Where the leaves of a batch's arguments are in the micro-batches', for the inputs' gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._common.nested import leaves
from .batch_dims import WHOLE, ArgumentDims, BatchDims, Name, PartlyWhole, Role, has_batch


@dataclass
class InputPlace:
    """The place of one of the batch's leaves in the micro-batches' arguments.

    Attributes:
        dim: the dim on which it was split; ``None``: it was not.
        leaves: for each micro-batch that has it or a piece of it, the index of that leaf.
    """

    dim: int | None
    leaves: dict[int, int]

    def only(self, m: int) -> "InputPlace":
        """Return its place in one micro-batch."""
        return InputPlace(self.dim, {m: self.leaves[m]} if m in self.leaves else {})


def input_places(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    sizes: Sequence[int],
    dims: BatchDims,
) -> list[InputPlace]:
    """Return the places of the leaves of a batch's arguments and its target, in order.

    Args:
        args: the positional arguments of :func:`split`.
        kwargs: its keyword arguments.
        target: its target.
        sizes: the sizes of the micro-batches that it made.
        dims: its ``batch_dims``.
    """
    size, count = sum(sizes), len(sizes)
    by = ArgumentDims(dims, kwargs)
    reached = [0] * count  # leaves of each micro-batch's arguments so far
    named: list[tuple[Name, Any]] = [*enumerate(args), *kwargs.items(), (Role.TARGET, target)]
    places = []
    for name, value in named:
        dim = by.of(name)
        if dim == "list":
            owners = [m for m, n in enumerate(sizes) for _ in range(n)]
            parts = [([m], item) for m, item in zip(owners, value, strict=True)]
        else:
            parts = [(list(range(count)), value)]
        for members, part in parts:
            split = _split_leaves(part, size, dim) if len(members) > 1 else {}
            for leaf_number, _ in enumerate(leaves(part)):
                found = {m: reached[m] for m in members}
                places.append(InputPlace(split.get(leaf_number), found))
                for m in members:
                    reached[m] += 1
    return places


def _split_leaves(value: Any, size: int, dim: Any) -> dict[int, int]:
    """Return the dim of each leaf of an argument that was split, by the leaf's number."""
    if dim is WHOLE:
        return {}
    given = [(number, t) for number, t in enumerate(leaves(value)) if isinstance(t, Tensor)]
    if isinstance(dim, PartlyWhole):
        return {number: dim.dim for at, (number, _) in enumerate(given) if at not in dim.whole}
    return {number: dim for number, t in given if has_batch(t.shape, size, dim)}
