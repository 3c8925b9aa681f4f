"""The states of random generators as one tensor, which goes from process to process.

Of a fixed size, for a receiver has to know it before; so each state is packed, and not pickled.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...devices.rng_streams import Source, States

_PYTHON = struct.Struct("<B625I?d")  # version, words and position, and a second normal number
_NUMPY = struct.Struct("<624IIId")  # words, position, and a second normal number


def size_of_states(sources: Sequence[Source]) -> int:
    """Return the bytes of these generators' states."""
    return sum(_size(source) for source in sources)


def packed(states: States, sources: Sequence[Source], device: torch.device) -> Tensor:
    """Return the states of these generators as one tensor on a device."""
    parts = [_bytes(source, states[source]) for source in sources]
    return torch.cat(parts).to(device)


def unpacked(tensor: Tensor, sources: Sequence[Source]) -> States:
    """Return the states that a tensor holds."""
    sizes = [_size(source) for source in sources]
    parts = tensor.detach().cpu().split(sizes)
    return {s: _state(s, part) for s, part in zip(sources, parts, strict=True)}


def _size(source: Source) -> int:
    if source == "random":
        return _PYTHON.size
    if source == "numpy":
        return _NUMPY.size
    return torch.default_generator.get_state().numel()


def _bytes(source: Source, state: Any) -> Tensor:
    if source == "random":
        version, words, gauss = state
        data = _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)
    elif source == "numpy":
        _, words, position, has_gauss, gauss = state
        data = _NUMPY.pack(*words.tolist(), position, has_gauss, gauss)
    else:
        found: Tensor = state
        return found
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _state(source: Source, part: Tensor) -> Any:
    if source == "random":
        version, *words, has_gauss, gauss = _PYTHON.unpack(bytes(part.tolist()))
        state = version, tuple(words), gauss if has_gauss else None
        random.Random().setstate(state)  # for its errors
        return state
    if source == "numpy":
        *words, position, has_gauss, gauss = _NUMPY.unpack(bytes(part.tolist()))
        import numpy as np  # it is there, for a process has drawn from it

        return "MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss
    return part.clone()
