"""Safetensors files, one tensor at a time.

The format is eight bytes of length, a JSON header, and the tensors' bytes. It is read and written
here because the ``safetensors`` package maps a file as a whole: the pages that were read stay
resident, and the mapping counts in full against a limit on the process's memory. Here the bytes
of a tensor go from the file straight into the tensor, and from the tensor into the file.
"""

import ctypes
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._common.files.bounded_json import LARGEST_TEXT, parse_json
from ..costs.work import size_of
from ..errors import WeightsError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
MOST_DIMENSIONS = 64  # as many as torch's reductions take
_LONGEST_REASON = 300  # characters of a message that quotes a file


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its dtype and shape, and where its bytes are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.end - self.begin


def read_entries(file: BinaryIO, path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file, read from its header alone.

    Args:
        file: open for reading, at its beginning.
        path: for messages.

    Raises:
        WeightsError: it is no safetensors file, or a part of one.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    start = 8 + length
    if size < 8 or length > LARGEST_TEXT or start > size:
        raise _corrupt(
            path,
            f"its header would be {length:,} bytes long, of {size:,} in all; {LARGEST_TEXT:,} is "
            "the limit",
        )
    text = b""
    while len(text) < length and (more := file.read(length - len(text))):
        text += more
    try:
        header = parse_json(text.decode("utf-8"))  # bytes may be UTF-16 to json
        metadata = header.pop(_METADATA, None)
        if not (metadata is None or _is_of_strings(metadata)):
            raise TypeError(f"{_METADATA} is from names to strings")
        entries = {name: _entry(found, start) for name, found in header.items()}
        _check_whole(entries, start, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    return entries


def _is_of_strings(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _corrupt(path: Path, why: str) -> WeightsError:
    return WeightsError(
        f"expected a safetensors file, got {str(path)!r}, which is none, or not the whole of one "
        f"({why[:_LONGEST_REASON]}); fetch or save it again"
    )


def _check_whole(entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Check that the tensors lie one after another up to the end: no byte is hidden, and none is
    two tensors'."""
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(f"{name!r} is at {entry.begin}, and what is before it ends at {end}")
        end = entry.end
    if end != size:
        raise ValueError(f"its tensors end at {end}, of {size} bytes")


def _entry(found: Mapping[str, Any], start: int) -> TensorEntry:
    dtype = DTYPES.get(found["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {found['dtype']!r} is not known here")
    if not isinstance(found["shape"], list) or not isinstance(found["data_offsets"], list):
        raise TypeError(f"shape and data_offsets are lists, not {found!r}")
    shape, (begin, end) = tuple(found["shape"]), found["data_offsets"]
    if len(shape) > MOST_DIMENSIONS:  # the product of more takes long
        raise ValueError(f"{len(shape)} dimensions, of {MOST_DIMENSIONS} at the most")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"sizes and offsets are {shape}, {begin!r} and {end!r}")
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise ValueError(f"{expected} bytes of {found['dtype']}{list(shape)} at {begin}..{end}")
    return TensorEntry(shape, dtype, start + begin, start + end)


def read_tensor(file: BinaryIO, path: Path, entry: TensorEntry, into: Tensor) -> None:
    """Read one tensor into another of its shape, on any device and of any dtype.

    Nothing else is allocated where dtype and memory are alike, and one tensor of host memory
    elsewhere.

    Args:
        file: whose header gave the entry, and not a later one of its name; unbuffered.
        path: for messages.
        entry: where the tensor is.
        into: what to fill.
    """
    alike = into.device.type == "cpu" and into.dtype == entry.dtype and into.is_contiguous()
    # What a view turns around on reading, and what a subclass keeps elsewhere, a copy knows.
    alike = alike and not into.is_conj() and not into.is_neg() and _has_memory(into)
    buffer = into.detach() if alike else torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    file.seek(entry.begin)
    bytes_ = _bytes_of(buffer)
    while bytes_:  # a read gives 2 GiB at the most
        count = file.readinto(bytes_)  # type: ignore[attr-defined]
        if not count:
            raise _corrupt(path, "it has become shorter")
        bytes_ = bytes_[count:]
    if alike:
        torch.autograd.graph.increment_version(into)
    else:
        into.detach().copy_(buffer)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file of savable tensors; at most one is copied at a time."""
    # The largest items first: so each is aligned in the file, as readers that map it need.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + size_of(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in ordered.values():
            with torch.no_grad():
                host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            _write_all(file, _bytes_of(host))
        os.fsync(file.fileno())  # or a rename may reach the disk before what it names


def check_savable(name: str, tensor: Tensor) -> None:
    """Raise :class:`WeightsError` for a tensor that the format cannot hold, or that has no
    values."""
    if name == _METADATA:
        raise WeightsError(
            f"safetensors keeps {_METADATA!r} for itself, but a tensor has that name; rename it"
        )
    if tensor.is_meta:
        raise WeightsError(
            f"only values can be saved, but {name!r} is on the meta device; load or initialize "
            "the model first (a pipeline does so at its first call, or from sample=)"
        )
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise WeightsError(
            f"safetensors holds dense tensors of {sorted(DTYPES)}, but {name!r} is "
            f"{tensor.dtype} ({tensor.layout}); save it by torch.save(pipe.state_dict(), …)"
        )
    if not _has_memory(tensor):
        raise WeightsError(
            f"safetensors holds plain tensors, but {name!r} is a {type(tensor).__name__}, which "
            "keeps its values in other tensors; save it by torch.save(pipe.state_dict(), …)"
        )


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor with values has them itself; a subclass may wrap others."""
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _write_all(file: Any, bytes_: memoryview) -> None:
    while bytes_:
        bytes_ = bytes_[file.write(bytes_) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous host tensor's memory, which lives no longer than the tensor."""
    if sys.byteorder != "little":
        raise WeightsError("safetensors files are little-endian, and this machine is not")
    size = size_of(tensor)
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
