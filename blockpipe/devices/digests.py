"""Digests of tensors' values, compared on their devices.

A comparison that the host reads makes it wait for the device, and a model's first step has hundreds
of them. So on an accelerator all comparisons of a step stay on their devices until its end, and are
read together; on the CPU, where there is nothing to wait for, each is read immediately.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.modes import without_torch_functions
from ..errors import StateError
from .devices import current_stream, is_asynchronous
from .ownership import copying

_PRIME = 1_000_003
# Elements that are weighted at once: the products are a copy of them, 32 MiB in double precision.
_AT_ONCE = 1 << 22


class Comparisons:
    """The comparisons of one step."""

    def __init__(self) -> None:
        self._pending: dict[torch.device, list[tuple[Tensor, Callable[[], StateError]]]] = {}
        self._weights: dict[tuple[int, torch.dtype, torch.device, int], Tensor] = {}

    def compare(self, one: Tensor, other: Tensor, error: Callable[[], StateError]) -> None:
        """Compare two digests. If they differ, the error is raised now or by :meth:`conclude`.

        Args:
            one: a digest.
            other: the other one, on the same device.
            error: makes the error.
        """
        found = agree(one, other)
        if is_asynchronous(found.device):
            self._pending.setdefault(found.device, []).append((found, error))
        elif not found:
            raise error()

    def conclude(self) -> None:
        """Read the pending comparisons, once for each device.

        Raises:
            StateError: the first pair differs; a note has the number of all that do.
        """
        pending, self._pending = self._pending, {}
        errors: list[Callable[[], StateError]] = []
        for of_device in pending.values():
            with without_torch_functions(), copying():
                agreed = torch.stack([found for found, _ in of_device]).tolist()
            errors += [
                error for (_, error), is_same in zip(of_device, agreed, strict=True) if not is_same
            ]
        if errors:
            first = errors[0]()
            if len(errors) > 1:
                first.add_note(f"blockpipe: and so with {len(errors) - 1} more in this step")
            raise first

    def digest(self, tensor: Tensor) -> Tensor | None:
        """Return three numbers that distinguish a tensor's values and their order: the sum, a sum
        with weights, and the norm of floating-point values; ``None``: they cannot be added."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        with without_torch_functions(), copying(), torch.no_grad():
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            if value.dtype == torch.uint8 or (
                value.dtype.itemsize == 1 and value.is_floating_point()
            ):
                return None  # a library's scratch memory, or a type without sums
            if not value.is_floating_point():
                total = value.sum(dtype=torch.int64)
                return torch.stack([total, self._weighted(value, torch.int64)])
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            norm = torch.linalg.vector_norm(value, dtype=dtype)
            return torch.stack([value.sum(dtype=dtype), self._weighted(value, dtype), norm])

    def _weighted(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum with weights that depend on each of an element's indices."""
        if value.numel() == 0:
            return value.sum(dtype=dtype)
        value = value.squeeze()
        value = value if value.dim() else value[None]
        sums = []
        for part in value.chunk(-(-value.numel() // _AT_ONCE)):
            for size in reversed(value.shape[1:]):
                part = (part * self._weights_of(size, dtype, value.device)).sum(-1)
            sums.append(part)
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        return (total * self._weights_of(value.shape[0], dtype, value.device)).sum()

    def _weights_of(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return weights around 0, so that a constant does not hide the rest, without a pattern
        that a shift could keep. They are made once in a step on each stream that reads them."""
        stream = current_stream(device)
        key = size, dtype, device, -1 if stream is None else stream.stream_id
        found = self._weights.get(key)
        if found is None:
            index = torch.arange(size, device=device)
            found = (7919 * index * index + 104729 * index) % _PRIME - _PRIME // 2
            found = found if dtype == torch.int64 else found.to(dtype) / _PRIME
            self._weights[key] = found
        return found


def agree(one: Tensor, other: Tensor) -> Tensor:
    """Return whether two digests are of the same values, as a tensor on their device.

    Integers agree exactly, others within the differences of operations that add up in any order.
    """
    with without_torch_functions(), torch.no_grad():
        same = one == other
        if one.is_floating_point():
            tolerance = 1e-5 if one.device.type == "cpu" else 1e-2
            # Sums may cancel, so the tolerance is a part of the norm.
            allowed = tolerance * (1 + one[2].nan_to_num() + other.abs())
            is_close = ((one - other).abs() <= allowed) & other.isfinite()
            same = same | is_close | (one.isnan() & other.isnan())
        return same.all()
