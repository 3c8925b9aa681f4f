"""Tensors whose size follows from the data: what a mask takes out, and what is computed of it.

Seen in a forward that runs for real alone: fake tensors have no such sizes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...._common.nested import tensors
from ....crossing.tags import TAG

_FIND = frozenset(
    [
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "pack_padded_sequence"),
        *("repeat_interleave", "one_hot", "nms", "tensor_split", "_unique2", "nonzero_static"),
        *(
            "unique_dim",
            "batched_nms",
            "to_sparse",
            "histogramdd",
            "from_numpy",
            "tensor",
            "as_tensor",
        ),
    ]
)
_TAKES = "__getitem__"


def note_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Note after an operation whether the size of its results follows from the data."""
    found = [tag for one in tensors(result) if (tag := _tag_of(one)) is not None]
    if found and (_finds(function, args) or any(map(has_size_by_data, tensors((args, kwargs))))):
        for tag in found:
            tag.has_size_by_data = True


def has_size_by_data(tensor: Tensor) -> bool:
    """Return whether the size of a tensor follows from the data."""
    tag = _tag_of(tensor)
    return tag is not None and tag.has_size_by_data


def _tag_of(tensor: Tensor) -> Any:
    tag = getattr(tensor, TAG, None)
    return tag if hasattr(tag, "has_size_by_data") else None


def _finds(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    name = getattr(function, "__name__", "").partition(".")[0]
    if name == _TAKES and len(args) > 1:
        ats = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(_is_mask(at) for at in ats)
    return name in _FIND or (name == "where" and len(args) == 1)


def _is_mask(at: Any) -> bool:
    if isinstance(at, Tensor):
        return at.dtype in (torch.bool, torch.uint8)
    return isinstance(at, list) and bool(at) and all(isinstance(one, bool) for one in at)
