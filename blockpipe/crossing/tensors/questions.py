"""The functions of torch that ask about a tensor, and need no copy of it for the answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PROPERTIES = """shape dtype ndim layout requires_grad grad_fn names is_sparse is_quantized
    is_mkldnn is_nested itemsize nbytes output_nr retains_grad"""
_METHODS = """size dim stride numel nelement ndimension element_size storage_offset is_contiguous
    is_floating_point is_complex is_signed is_conj is_neg __len__ has_names"""
_OTHER_PROPERTIES = "is_leaf is_meta _version"
_OTHER_METHODS = "__hash__ is_shared is_pinned is_inference is_same_size"


def _asked(properties: str, methods: str) -> frozenset[Any]:
    return frozenset(
        [getattr(Tensor, name).__get__ for name in properties.split() if hasattr(Tensor, name)]
        + [getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name)]
    )


ABOUT_VALUES: frozenset[Any] = _asked(_PROPERTIES, _METHODS).union(
    [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""Those that another micro-batch's tensor may answer otherwise."""

METADATA: frozenset[Any] = ABOUT_VALUES.union(
    _asked(_OTHER_PROPERTIES, _OTHER_METHODS), [torch.is_tensor]
)


def _is_a(kind: str, device: torch.device) -> bool:
    return device.type == kind


WHERE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.get_device: lambda device: -1 if device.index is None else device.index,
    torch.get_device: lambda device: -1 if device.index is None else device.index,
    **{
        getattr(Tensor, f"is_{kind}").__get__: partial(_is_a, kind)
        for kind in ("cpu", "cuda", "xpu", "mps")
    },
}
"""Where a tensor is, asked in one way or another: each answer follows from the device."""
