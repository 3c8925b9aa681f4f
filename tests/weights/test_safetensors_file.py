"""The safetensors format, written and read."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.errors import WeightsError
from blockpipe.weights import save as saving
from blockpipe.weights.safetensors_file import DTYPES, read_entries, write_tensors
from blockpipe.weights.sources import open_weights

from ..stage_devices import examples
from .saved_models import copies, read, same_state

# --- the format


def tensors_of(draw_dtypes, shapes):
    made = {}
    for number, (dtype, shape) in enumerate(zip(draw_dtypes, shapes, strict=True)):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        made[f"tensor.{number} ü"] = raw.view(dtype).reshape(shape)
    return made


def as_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


some_tensors = st.lists(
    st.tuples(
        st.sampled_from(sorted(DTYPES.values(), key=str)),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=6,
).map(lambda pairs: tensors_of([d for d, _ in pairs], [s for _, s in pairs]))


@given(some_tensors)
@settings(max_examples=examples(60), deadline=None)
def test_safetensors_files_round_trip_to_the_byte(tensors):
    """Every dtype and shape, 0-d and empty ones too, to the byte."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        write_tensors(path, tensors)
        found = read(open_weights(path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(found[name]) == as_bytes(tensor)


@given(some_tensors)
@settings(max_examples=examples(40), deadline=None)
def test_the_safetensors_package_reads_and_writes_the_same(tensors):
    """Files go both ways."""
    library = pytest.importorskip("safetensors.torch")
    tensors = {n: t for n, t in tensors.items() if t.dtype not in _UNKNOWN_TO_THE_LIBRARY}
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Path(directory) / "ours.safetensors", Path(directory) / "theirs.safetensors"
        write_tensors(ours, tensors)
        library.save_file(tensors, theirs)
        pairs = (library.load_file(ours), read(open_weights(theirs)))
        for found in pairs:
            assert found.keys() == tensors.keys()
            assert all(as_bytes(found[n]) == as_bytes(t) for n, t in tensors.items())


_UNKNOWN_TO_THE_LIBRARY = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_damaged_file_is_an_error_or_reads(data):
    """A changed or cut file never reads past its end, and never raises anything else."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        write_tensors(path, {"a": torch.arange(6.0), "b": torch.ones(2, 2)})
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            source = open_weights(path)
        except WeightsError as error:
            assert "expected a safetensors file" in str(error)
        else:
            read(source)


@given(
    st.integers(1, 3000),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
@settings(max_examples=examples(50), deadline=None)
def test_shards_of_any_size_round_trip(limit, sizes, tied, dtype):
    """Any shard size, tied or not: each file within the limit or one tensor, and all comes back."""
    net = nn.Sequential()
    for number, size in enumerate(sizes):
        value = torch.randint(-9, 9, (size, 3)).to(dtype)
        net.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=False))
    if tied:
        net.register_parameter("tie", net.p0)
    before = copies(net.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        saving.save_weights(net, directory, {}, limit)
        written = 0
        for path in Path(directory).glob("*.safetensors"):
            with path.open("rb") as file:
                entries = read_entries(file, path)
            taken = sum(e.end - e.begin for e in entries.values())
            assert taken <= limit or len(entries) == 1
            written += len(entries)
        assert written == len(sizes)
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        pipe = bp.Pipeline(twin)
        pipe.load_weights(directory)
        assert same_state(pipe.state_dict(), before)


class Views(nn.Module):
    """Buffers that are turned around on reading."""

    def __init__(self):
        super().__init__()
        self.register_buffer("conj", torch.tensor([1 + 2j, 3 + 4j]).conj())
        self.register_buffer("neg", torch.tensor([1 + 2j, 3 + 4j]).conj().imag)
        self.register_buffer("plain", torch.tensor([1 + 2j, 3 + 4j]))

    def forward(self, x):
        return x * self.neg.sum() * self.conj.imag.sum()


def test_conjugated_and_negated_views_are_saved_as_they_show(tmp_path):
    """What is written is what the tensor shows, and what is read is what it shows then."""
    library = pytest.importorskip("safetensors.torch")
    net, other = Views(), Views()
    assert net.conj.is_conj()
    assert net.neg.is_neg()
    bp.Pipeline(net).save_weights(tmp_path)
    found = library.load_file(tmp_path / "model.safetensors")
    assert same_state({n: found[n] for n in net.state_dict()}, net.state_dict())
    state = {n: t.resolve_conj().resolve_neg() * 3 for n, t in net.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path / "model.safetensors", state)
    bp.Pipeline(other).load_weights(tmp_path)
    assert same_state(other.state_dict(), state)
