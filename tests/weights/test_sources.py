"""Checkpoints that are damaged, hostile or not there."""

import json
import os

import pytest
import torch
from torch import nn

from blockpipe.errors import UsageError, WeightsError
from blockpipe.weights.safetensors_file import write_tensors
from blockpipe.weights.sources import open_weights

from .saved_models import make, pipeline, read

# --- bad checkpoints


@pytest.mark.parametrize(
    ("header", "count", "why"),
    [
        ('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', 4, "sizes and offsets"),
        ('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', 4, "sizes and offsets"),
        ('{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}', 4, "sizes and offsets"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', 4, "sizes and offsets"),
        ('{"a":{"dtype":"F32","shape":[0,18446744073709551616],"data_offsets":[0,0]}}', 0, "sizes"),
        ('{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', 4, "sizes and offsets"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 8, "end at"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8, "'a' is at"),
        (
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            '"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
            "'b' is at",
        ),
        ('{"__metadata__":{"a":1}}', 0, "from names to strings"),
        ('{"__metadata__":[1]}', 0, "from names to strings"),
        ('{"__metadata__":""}', 0, "from names to strings"),
        ('{"a":{"dtype":"F32","shape":"","data_offsets":[0,4]}}', 4, "are lists"),
        ('{"a":{"dtype":"F32","shape":{},"data_offsets":[0,4]}}', 4, "are lists"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":{"0":0,"4":4}}}', 4, "are lists"),
        (
            '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
            "the name .dtype. twice",
        ),
        ('{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4, "surrogates"),
        (f'{{"__metadata__":{"[" * 999}{"]" * 999}}}', 0, "nested more than 200 deep"),
        (f'{{"a":{{"dtype":"F32","shape":[{"9" * 5000}],"data_offsets":[0,4]}}}}', 4, "100 digits"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, count, why):
    """What the safetensors package refuses is refused here, and by nothing but our own error."""
    library = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(count))
    with pytest.raises(library.SafetensorError), library.safe_open(path, "pt") as file:
        file.keys()
    with pytest.raises(WeightsError, match=why):
        open_weights(path)


def test_a_shape_of_too_many_dimensions_is_refused(tmp_path):
    """It is refused before its sizes are multiplied; numbers of such length take long."""
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [2**62] * 200_000 + [0], "data_offsets": [0, 0]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match="200001 dimensions, of 64 at the most"):
        open_weights(path)


def test_extra_state_gets_no_memory_before_it_is_checked(tmp_path):
    """A hole in a file may be of any size, and so may the tensor that it pretends to be."""
    size = 2**40
    header = json.dumps(
        {"0._extra_state": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    with pytest.raises(WeightsError, match=r"1,073,741,824 bytes at the most, but .* has 1,099"):
        open_weights(path)


def test_a_header_in_utf_16_is_refused(tmp_path):
    """Python's json reads it; the format has UTF-8 only."""
    text = '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16")
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(WeightsError, match="UnicodeDecodeError"):
        open_weights(path)


def index_of(directory, weight_map):
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    """No file, an empty directory, two files without an index."""
    with pytest.raises(WeightsError, match=r"'.*none\.safetensors', which is not there"):
        open_weights(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match=r"without \*\.safetensors and \*\.safetensors\.index"):
        open_weights(tmp_path)
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(WeightsError, match="expected one checkpoint in .*, got .*pass the path"):
        open_weights(tmp_path)


def test_weights_of_wrong_types_are_refused():
    """Neither a path nor a mapping; a mapping of something else."""
    for weights in (3, [torch.zeros(1)], nn.Linear(1, 1)):
        with pytest.raises(
            UsageError, match="a path, or a mapping from names to tensors, for weights, got"
        ):
            pipeline(weights=weights)
    with pytest.raises(
        WeightsError, match=r"'model' is a OrderedDict \(.*; if the state dict is one of"
    ):
        pipeline(weights={"model": make().state_dict()})
    with pytest.raises(WeightsError, match="'a' is a tensor on the meta device, without values"):
        pipeline(weights={"a": torch.zeros(1, device="meta")})


def test_a_bad_index_is_refused(tmp_path):
    """No JSON, no weight_map, a missing shard, a tensor that its shard does not hold."""
    path = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 10**5, "9" * 5000):
        path.write_text(text)
        with pytest.raises(WeightsError, match="expected an index with a weight_map, got"):
            open_weights(tmp_path)
    index_of(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    write_tensors(tmp_path / "one.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(
        WeightsError, match=r"names \['two.safetensors'\], but .* fetch the missing"
    ):
        open_weights(tmp_path)
    write_tensors(tmp_path / "two.safetensors", {"c": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"says that \['b'\] are in \['two.safetensors'\]"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "sub/x.safetensors", "..", "", ".", "a" * 300, "{}/x.safetensors"]
)
def test_an_index_names_files_beside_it_alone(tmp_path, name):
    """No other file is opened because an index from elsewhere says so."""
    (tmp_path / "here" / "sub").mkdir(parents=True)
    for place in (".", "here/sub"):
        write_tensors(tmp_path / place / "x.safetensors", {"a": torch.zeros(1)})
    index_of(tmp_path / "here", {"a": name.format(tmp_path)})
    with pytest.raises(
        WeightsError, match="expected shards beside their index, .* 255 characters, got"
    ):
        open_weights(tmp_path / "here")


def test_a_shard_may_be_a_link(tmp_path):
    """As in Hugging Face's cache. A pipe, which would be waited for, is no shard."""
    (tmp_path / "here").mkdir()
    write_tensors(tmp_path / "blob", {"a": torch.ones(1)})
    (tmp_path / "here" / "x.safetensors").symlink_to("../blob")
    index_of(tmp_path / "here", {"a": "x.safetensors"})
    assert read(open_weights(tmp_path / "here")) == {"a": torch.ones(1)}
    (tmp_path / "here" / "x.safetensors").unlink()
    os.mkfifo(tmp_path / "here" / "x.safetensors")
    with pytest.raises(WeightsError, match="fetch the missing"):
        open_weights(tmp_path / "here")


def test_a_name_that_no_file_can_have_is_not_there():
    """A name too long, or with a zero byte, is not there, as any other."""
    for name in ("a" * 5000, "a\0b"):
        with pytest.raises(WeightsError, match="is not there"):
            open_weights(name)


def test_bad_torch_files_are_refused(tmp_path):
    """No checkpoint, one that is no mapping, the old format, code in it."""
    path = tmp_path / "x.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(WeightsError, match="cannot read .*save a state dict with torch.save"):
        open_weights(path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(WeightsError, match=r"tensors in .*, got list \(.*save model.state_dict"):
        open_weights(path)
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match="cannot read"):
        open_weights(path)
    torch.save(make(), path)
    with pytest.raises(WeightsError, match="cannot read .*UnpicklingError"):
        open_weights(path)
