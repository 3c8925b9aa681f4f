"""Where a model's values come from: a file, sharded files, or a mapping.

A source knows names, shapes and dtypes before it reads any data, so that a checkpoint can be
checked before anything changes; and it reads one tensor at a time. ``torch.load`` of a whole
checkpoint, the obvious way, needs the model's size in host memory once more.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.files.bounded_json import parse_json, read_text
from .._common.text import dtype_text
from ..costs.work import size_of
from ..errors import UsageError, WeightsError
from .safetensors_file import read_entries, read_tensor

Weights = str | os.PathLike[str] | Mapping[str, Tensor]

_MAPPED = 64 * 2**20  # bytes read of a mapped file before its pages are let go; a guess
LARGEST_EXTRA_STATE = 2**30
"""Bytes of one extra state in a safetensors file. Weights have to fit the model before they get any
memory; extra state may be of any shape, and its bytes may be a hole in the file."""

LONGEST_NAME = 255
"""Characters of a shard's name: what file systems take."""


@dataclass(frozen=True)
class Header:
    """The dtype and shape of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_text(self.dtype)}{list(self.shape)}"


class Source(Protocol):
    """Tensors by name, to be read one by one."""

    what: str  # for messages
    headers: dict[str, Header]
    extra: Collection[str]  # the names of what modules' get_extra_state gave

    def read(self, name: str, into: Tensor) -> None:
        """Fill a tensor of the same shape."""

    def read_extra(self, name: str) -> Any:
        """Return what a module's ``get_extra_state`` gave."""


def open_weights(weights: Weights) -> Source:
    """Return the source that ``weights=`` names, with its headers read and checked.

    Args:
        weights: a ``.safetensors`` file; a sharded checkpoint's directory, or its
            ``*.index.json``; any other file that ``torch.load(mmap=True, weights_only=True)``
            reads; or a mapping from names to tensors.

    Raises:
        UsageError: neither a path nor a mapping.
        WeightsError: nothing is there, or it is no checkpoint.
    """
    if isinstance(weights, Mapping):
        return InMemory(weights)
    if not isinstance(weights, str | os.PathLike):
        contract = "a path, or a mapping from names to tensors,"
        raise UsageError(expected(contract, weights, for_="weights"))
    if not os.fspath(weights):
        fix = "for the current directory pass '.'"
        raise UsageError(expected("a path", "", for_="weights", fix=fix))
    path = Path(weights)
    if os.path.isdir(path):
        path = _checkpoint_in(path)
    if not os.path.isfile(path):  # False for a name too long, too, where Path's raises
        raise WeightsError(
            f"expected a checkpoint, got {str(path)!r}, which is not there ({users_line()})"
        )
    return Shards(path) if path.name.endswith(".index.json") else _open_file(path)


def _open_file(path: Path) -> Source:
    return TensorFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _checkpoint_in(directory: Path) -> Path:
    # A whole file comes first, as in Hugging Face's loaders.
    for pattern in ("model.safetensors", "*.safetensors.index.json", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = [path.name for path in found]
            raise WeightsError(
                f"expected one checkpoint in {str(directory)!r}, got {names[:5]} without one index "
                f"for them ({users_line()}); pass the path of the file or of its index"
            )
    raise WeightsError(
        f"expected a checkpoint in {str(directory)!r}, got a directory without *.safetensors and "
        f"*.safetensors.index.json ({users_line()}); pass the path of a file"
    )


class InMemory:
    """A mapping from names to tensors, a state dict for example."""

    def __init__(self, tensors: Mapping[str, Any], what: str = "the given mapping") -> None:
        self.what = what
        self.extra: Collection[str] = dict.fromkeys(filter(is_extra, tensors))
        self.headers = _headers(tensors, what)
        self._tensors = tensors

    def read(self, name: str, into: Tensor) -> None:
        into.detach().copy_(self._tensors[name])

    def read_extra(self, name: str) -> Any:
        return self._tensors[name]


class TensorFile:
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.what = str(path)
        self._path = path
        # Kept open: another file may be put under this name meanwhile, and this one stays whole.
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._entries = read_entries(self._file, path)
        self.headers = {
            n: Header(e.shape, e.dtype) for n, e in self._entries.items() if not is_extra(n)
        }
        self.extra: Collection[str] = dict.fromkeys(filter(is_extra, self._entries))
        for name in self.extra:
            size = self._entries[name].size
            if size > LARGEST_EXTRA_STATE:
                raise WeightsError(
                    f"extra state is {LARGEST_EXTRA_STATE:,} bytes at the most, but in "
                    f"{self.what!r} {name[:LONGEST_NAME]!r} has {size:,}; if it is meant so, pass "
                    "a mapping that has it"
                )

    def read(self, name: str, into: Tensor) -> None:
        read_tensor(self._file, self._path, self._entries[name], into)

    def read_extra(self, name: str) -> Any:
        entry = self._entries[name]
        made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read(name, made)
        return made

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()


class TorchFile:
    """A file of ``torch.save``, mapped. Pages that were read stay resident as long as the mapping,
    so the file is mapped anew from time to time."""

    def __init__(self, path: Path) -> None:
        self.what = str(path)
        self._path = path
        self._tensors: dict[str, Tensor] | None = None
        self._read = 0
        self._version = _version(path)
        loaded = self._load()
        self.headers = _headers(loaded, self.what)
        self._extra = {name: value for name, value in loaded.items() if is_extra(name)}
        self.extra: Collection[str] = self._extra

    def read(self, name: str, into: Tensor) -> None:
        if self._tensors is None:
            self._tensors = self._load()
        tensor = self._tensors[name]
        into.detach().copy_(tensor)
        self._read += size_of(tensor)
        if self._read >= _MAPPED:
            self._tensors, self._read = None, 0

    def read_extra(self, name: str) -> Any:
        return self._extra[name]

    def _load(self) -> dict[str, Tensor]:
        if _version(self._path) != self._version:
            raise WeightsError(
                f"{self.what!r} was replaced while it was being read: the model may have a part of "
                "each; load again when nobody saves there"
            )
        try:
            loaded = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise WeightsError(
                f"expected a checkpoint, got {self.what!r}, which torch.load(mmap=True, "
                f"weights_only=True) cannot read ({type(error).__name__}: {error}); save a state "
                "dict with torch.save, or as safetensors"
            ) from error
        if not isinstance(loaded, Mapping):
            raise WeightsError(
                f"expected a mapping from names to tensors in {self.what!r}, got "
                f"{type(loaded).__name__} ({users_line()}); save model.state_dict()"
            )
        return dict(loaded)


def _version(path: Path) -> tuple[int, ...]:
    """Return what differs once a file is written to, or another one is put in its place."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Shards:
    """A checkpoint of several files, with the index that says what is where."""

    def __init__(self, index: Path) -> None:
        self.what = str(index)
        before = _version(index)
        where = _weight_map(index)
        names = sorted(set(where.values()))
        _check_beside(names, index)
        missing = [name for name in names if not os.path.isfile(index.parent / name)]
        try:
            files = {name: _open_file(index.parent / name) for name in names if not missing}
        except FileNotFoundError:  # it has gone since
            files = {}
        # Who saves over a checkpoint takes its index away before any of its files.
        if not index.is_file() or _version(index) != before:
            raise WeightsError(
                f"{self.what!r} was replaced while its files were opened, so that they may be of "
                "two checkpoints; load again when nobody saves there"
            )
        if len(files) < len(names):
            raise WeightsError(
                f"the index {self.what!r} names {missing[:5]}, but {str(index.parent)!r} does not "
                "hold them; fetch the missing shards"
            )
        self._files = {name: files[file] for name, file in where.items()}
        absent = sorted(
            n
            for n, file in self._files.items()
            if n not in (file.extra if is_extra(n) else file.headers)
        )
        if absent:
            raise WeightsError(
                f"the index {self.what!r} says that {absent[:5]} are in "
                f"{sorted({where[n] for n in absent})}, but they are not; fetch index and shards "
                "of one checkpoint"
            )
        self.headers = {n: file.headers[n] for n, file in self._files.items() if not is_extra(n)}
        self.extra: Collection[str] = dict.fromkeys(filter(is_extra, self._files))

    def read(self, name: str, into: Tensor) -> None:
        self._files[name].read(name, into)

    def read_extra(self, name: str) -> Any:
        return self._files[name].read_extra(name)


def _check_beside(names: Collection[str], index: Path) -> None:
    """Raise an error for shards anywhere but in the index's own directory: an index from elsewhere
    must not say which files are opened. Links in that directory were put there by its owner, as
    Hugging Face's cache does."""
    wrong = [n for n in names if n in ("", "..") or len(n) > LONGEST_NAME or Path(n).name != n]
    if wrong:
        raise WeightsError(
            f"expected shards beside their index, with names of at most {LONGEST_NAME} "
            f"characters, got {[name[:LONGEST_NAME] for name in wrong[:5]]} in {str(index)!r} "
            f"({users_line()}); move them there, and name them so"
        )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = parse_json(read_text(index))["weight_map"]
        if all(isinstance(file, str) for file in where.values()):
            return dict(where)
        raise TypeError("weight_map is from names to names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"expected an index with a weight_map, got {str(index)!r} "
            f"({type(error).__name__}: {error}); fetch or save it again"
        ) from error


def is_extra(name: object) -> bool:
    """Return whether a name is that of extra state, which a module's ``get_extra_state`` gave and
    which may be of any type and shape."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def _headers(loaded: Mapping[str, Any], what: str) -> dict[str, Header]:
    tensors = {name: value for name, value in loaded.items() if not is_extra(name)}
    wrong = [
        f"{name!r} is {_kind(value)}"
        for name, value in tensors.items()
        if not isinstance(name, str) or not isinstance(value, Tensor) or why_unreadable(value)
    ]
    if wrong:
        raise WeightsError(
            f"expected a mapping from names to tensors, got {what} in which "
            f"{', '.join(wrong[:5])} ({users_line()}); if the state dict is one of several "
            "entries, pass that entry"
        )
    return {name: Header(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {why_unreadable(value) or ''}".rstrip()
    return f"a {type(value).__name__}"


def why_unreadable(tensor: Tensor) -> str | None:
    """Return why a dense tensor cannot be filled from another one, if so."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.layout is not torch.strided:
        return f"of {tensor.layout}: pass its to_dense()"
    return "that is quantized: pass its dequantize()" if tensor.is_quantized else None
