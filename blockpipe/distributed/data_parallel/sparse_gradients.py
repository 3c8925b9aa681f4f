"""Sums of sparse gradients over processes, as those of ``nn.Embedding(sparse=True)``.

They are sent dense, for every process needs a tensor of one size. A sum of sparse ones is sparse
again, as in a plain loop, because optimizers treat the two differently.
"""

from __future__ import annotations

from torch import Tensor

NONE, SPARSE, DENSE = 0, 1, 2
"""Kinds of gradients; that of a sum is the largest of its parts'."""


def kind_of_gradient(parameter: Tensor) -> int:
    """Return the kind of a parameter's gradient."""
    if parameter.grad is None:
        return NONE
    return SPARSE if parameter.grad.is_sparse else DENSE


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as it is sent."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def of_kind(summed: Tensor, kind: int) -> Tensor:
    """Return a sum as a gradient of its kind; a sparse one has those rows that are not zero."""
    return summed.to_sparse(1) if kind == SPARSE else summed


def added(earlier: Tensor, now: Tensor) -> Tensor:
    """Return the sum of two gradients; torch adds a sparse tensor to a dense one only."""
    return now + earlier if earlier.is_sparse else earlier + now
