"""A model's weights as safetensors, in Hugging Face's layout, one tensor in host memory at a time.

``model.safetensors``, or shards with ``model.safetensors.index.json``. Everything is written
under other names first, forced to the disk, and renamed at the end, so that a failure leaves what
was there.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.checks import expected, is_integer
from .._common.files.replaced_files import part_of, remove_abandoned
from ..costs.work import size_of
from ..errors import UsageError, WeightsError
from .safetensors_file import check_savable, write_tensors
from .sources import is_extra

_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")


def save_weights(
    model: nn.Module, directory: str | os.PathLike[str], stages: Mapping[str, int], max_bytes: int
) -> None:
    """Write a model's state dict into a directory, in place of an earlier one.

    Args:
        model: whose; tied tensors are written once.
        directory: where to; made if it is not there.
        stages: from names to stages: tensors are written stage after stage.
        max_bytes: of one file, unless a single tensor is larger.

    Raises:
        UsageError: an argument that cannot be.
        WeightsError: what safetensors cannot hold, or tensors without values.
    """
    write_shards(directory, shards_of(model, stages, max_bytes))


def shards_of(
    model: nn.Module, stages: Mapping[str, int], max_bytes: int, *, has_values: bool = True
) -> list[dict[str, Tensor]]:
    """Return the tensors of each file.

    Args:
        model: whose.
        stages: from names to stages.
        max_bytes: of one file, unless a single tensor is larger.
        has_values: whether all of them must have values, and not only shapes.

    Raises:
        UsageError: no number of bytes.
        WeightsError: what safetensors cannot hold, or tensors without values.
    """
    if not is_integer(max_bytes, 1):
        raise UsageError(expected("a positive integer", max_bytes, for_="max_shard_bytes"))
    return _shards(_savable(model, stages, has_values=has_values), max_bytes)


def write_shards(
    directory: str | os.PathLike[str],
    shards: list[dict[str, Tensor]],
    read: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Write the files, one after the other.

    Args:
        directory: where to; made if it is not there.
        shards: the tensors of each file.
        read: gets the values of one file's tensors, where those in ``shards`` may have none.

    Raises:
        UsageError: the directory cannot be one.
    """
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    if not os.fspath(directory):
        fix = "for the current directory pass '.'"
        raise UsageError(expected("the path of a directory", "", for_="directory", fix=fix))
    target = Path(directory)
    if target.is_file() or (target.suffix == ".safetensors" and not target.exists()):
        raise UsageError(
            f"expected a directory, for one file or several, got {str(target)!r}, which is "
            f"{'a file' if target.is_file() else 'the name of one'} ({users_line()}); pass "
            f"{str(target.parent)!r}: the file there is model.safetensors"
        )
    target.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target, _OURS.pattern)
    written = {name: part_of(target / name) for name in names}
    try:
        for name, shard in zip(names, shards, strict=True):
            write_tensors(written[name], read(shard))
        if count > 1:
            index = "model.safetensors.index.json"
            written[index] = part_of(target / index)
            with written[index].open("x", encoding="utf-8") as file:
                file.write(_index(names, shards))
                file.flush()
                os.fsync(file.fileno())
        _put(target, written)
    finally:
        for part in written.values():
            part.unlink(missing_ok=True)


def _put(target: Path, written: Mapping[str, Path]) -> None:
    # What a loader looks for comes last, so that it finds the whole of the old checkpoint until it
    # finds the whole of the new one:
    #
    #     old           new             in between a loader reads
    #     one file      one file        old, then new
    #     one file      shards          old, until its file is removed at the end
    #     n shards      one file        old, then new: the one file is looked for first
    #     n shards      m shards        old, until the index is replaced
    #     n shards      n shards        none: the names collide, and half of each is worse
    if len(written) > 1 and any((target / name).exists() for name in written if _is_shard(name)):
        (target / "model.safetensors.index.json").unlink(missing_ok=True)
    for name, part in written.items():
        part.replace(target / name)
    old = [p for p in target.iterdir() if _OURS.fullmatch(p.name) and p.name not in written]
    for path in sorted(old, key=lambda path: _is_shard(path.name)):  # what names others goes first
        path.unlink()


def _is_shard(name: str) -> bool:
    return "-of-" in name


def _savable(model: nn.Module, stages: Mapping[str, int], *, has_values: bool) -> dict[str, Tensor]:
    """Return the tensors by their first names, stage after stage."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_extra(name):
            raise WeightsError(
                f"safetensors holds parameters and buffers, but {name!r} comes from a module's "
                "get_extra_state; save it by torch.save(pipe.state_dict(), …)"
            )
        if has_values or not value.is_meta:
            check_savable(name, value)
        found.setdefault(id(value), (name, value))
    return dict(sorted(found.values(), key=lambda item: stages.get(item[0], 0)))


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = size_of(tensor)
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _index(names: list[str], shards: list[dict[str, Tensor]]) -> str:
    where = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
    total = sum(size_of(tensor) for shard in shards for tensor in shard.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
