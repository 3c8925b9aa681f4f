"""A word on the wire for "no gradient".

Where a stage's backward has no gradient for one of its inputs, torch's engine sends zeros. The
stage before would then have gradients of zeros where a plain loop has ``None``, and an optimizer
moves parameters by those: momentum, weight decay. So a word is sent in their place: a tensor whose
elements are all one NaN with bits that no computation makes. A flag beside the gradients would be
one more message for each backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# By dtype: an integer of its size, and the bits, which are those of a quiet NaN.
_WORDS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_B10C_B10C_B10C),
    torch.float32: (torch.int32, 0x7FC5_B10C),
    torch.float16: (torch.int16, 0x7E5B),
    torch.bfloat16: (torch.int16, 0x7FDB),
}


def no_gradient(like: Tensor, device: torch.device) -> Tensor | None:
    """Return what is sent where there is no gradient.

    Args:
        like: a tensor of the gradient's shape and dtype.
        device: where it is.

    Returns:
        The word; ``None`` for a dtype that has none, such as those of eight bits.
    """
    found = torch.empty(like.shape, dtype=like.dtype, device=device)
    parts = torch.view_as_real(found) if found.is_complex() else found
    if parts.dtype not in _WORDS:
        return None
    kind, bits = _WORDS[parts.dtype]
    parts.view(kind).fill_(bits)
    return found


def is_no_gradient(received: Tensor | None) -> bool:
    """Return whether a tensor is the word for "no gradient", or is not there at all."""
    if received is None:
        return True
    parts = torch.view_as_real(received) if received.is_complex() else received
    if parts.dtype not in _WORDS or not parts.numel():
        return False
    kind, bits = _WORDS[parts.dtype]
    # Any one element tells a gradient from the word, but for a NaN that the user has made of bits.
    first = parts.detach()[(0,) * parts.dim()]
    if first.view(kind).item() != bits:
        return False
    return bool((parts.detach().view(kind) == bits).all())


def without_missing(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None]
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """Return a stage's outputs and their gradients, with ``None`` for both where none has come."""
    missing = [is_no_gradient(gradient) for gradient in gradients]
    return (
        tuple(None if no else output for output, no in zip(outputs, missing, strict=True)),
        tuple(None if no else given for given, no in zip(gradients, missing, strict=True)),
    )
