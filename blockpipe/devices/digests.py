"""What tells a tensor's values from others, compared where they are.

A comparison that the host reads makes it wait for the device, and a model's first step has hundreds
of them. So on an accelerator all of a step stay on their devices until its end, and are read at
once; on the CPU, where there is nothing to wait for, each is read at once.
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
    """Those of one step."""

    def __init__(self) -> None:
        self._pending: dict[torch.device, list[tuple[Tensor, Callable[[], StateError]]]] = {}
        self._weights: dict[tuple[int, torch.dtype, torch.device, int], Tensor] = {}

    def compare(self, one: Tensor, other: Tensor, error: Callable[[], StateError]) -> None:
        """Compare two digests; what they have to say otherwise is raised now or by
        :meth:`conclude`."""
        found = agree(one, other)
        if is_asynchronous(found.device):
            self._pending.setdefault(found.device, []).append((found, error))
        elif not found:
            raise error()

    def conclude(self) -> None:
        """Read what is pending, once for each device.

        Raises:
            StateError: the first that does not agree, with a note of how many there are.
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
        """Three numbers that tell a tensor's values, and their order, from others: their sum, a sum
        with weights, and of floating-point ones the norm. ``None`` where there is no adding up."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        with without_torch_functions(), copying(), torch.no_grad():
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            if value.dtype == torch.uint8 or (
                value.dtype.itemsize == 1 and value.is_floating_point()
            ):
                return None  # a library's scratch memory, or nothing that sums
            if not value.is_floating_point():
                total = value.sum(dtype=torch.int64)
                return torch.stack([total, self._weighted(value, torch.int64)])
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            norm = torch.linalg.vector_norm(value, dtype=dtype)
            return torch.stack([value.sum(dtype=dtype), self._weighted(value, dtype), norm])

    def _weighted(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum with weights that depend on each of an element's indices."""
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
        """Around 0, so that what is the same everywhere does not hide the rest, and in no pattern
        that a shift could keep. Made once in a step, and on each stream that reads them."""
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
    """Whether two digests are of the same values, as a tensor on their device: within what
    operations that add up in no fixed order differ by; integers exactly."""
    with without_torch_functions(), torch.no_grad():
        same = one == other
        if one.is_floating_point():
            tolerance = 1e-5 if one.device.type == "cpu" else 1e-2
            # Sums may cancel: what they may be off by is a part of the norm.
            allowed = tolerance * (1 + one[2].nan_to_num() + other.abs())
            is_close = ((one - other).abs() <= allowed) & other.isfinite()
            same = same | is_close | (one.isnan() & other.isnan())
        return same.all()
