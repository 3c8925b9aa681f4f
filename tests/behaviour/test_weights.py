"""Checkpoints: read, checked, loaded, saved."""

import copy
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe._common.replaced_files import part_of
from blockpipe.errors import UsageError, WeightsError
from blockpipe.weights import save as saving
from blockpipe.weights.safetensors_file import DTYPES, read_entries, write_tensors
from blockpipe.weights.sources import _open_file, open_weights

from ..stage_devices import assert_close, equal, examples, stages

X, Y = torch.randn(8, 6), torch.randn(8, 6)


def make(cuts=(2, 4)):
    """Linear layers with a norm between, tied first and last, cut where asked."""
    net = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
    )
    net[4].weight = net[0].weight
    return bp.begin_blocks(net, {str(at): stage for stage, at in enumerate(cuts, 1)})


def pipeline(net=None, cuts=(2, 4), **options):
    return bp.Pipeline(
        make(cuts) if net is None else net,
        **{"devices": stages(len(cuts) + 1), "chunks": 2, **options},
    )


def step(pipe, optimizer):
    optimizer.zero_grad()
    loss = pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss).loss
    optimizer.step()
    return loss


def same_state(one, other):
    """Whether two state dicts are equal to the bit."""
    assert list(one) == list(other)
    return all(equal(one[name], other[name]) for name in one)


def copies(state):
    """What a state dict holds now."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def read(source):
    """Everything a source has."""
    tensors = {n: torch.empty(h.shape, dtype=h.dtype) for n, h in source.headers.items()}
    for name, tensor in tensors.items():
        source.read(name, tensor)
    return tensors


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
            assert "safetensors file was expected" in str(error)
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
    net = nn.Module()
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
        ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4, "there twice"),
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
    with pytest.raises(WeightsError, match=r"'.*none\.safetensors' is not there"):
        open_weights(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match=r"no \*\.safetensors and no \*\.safetensors\.index"):
        open_weights(tmp_path)
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(WeightsError, match="one checkpoint was expected in .*pass the path"):
        open_weights(tmp_path)


def test_weights_of_wrong_types_are_refused():
    """Neither a path nor a mapping; a mapping of something else."""
    for weights in (3, [torch.zeros(1)], nn.Linear(1, 1)):
        with pytest.raises(UsageError, match="a path, or a mapping from names to tensors, but"):
            pipeline(weights=weights)
    with pytest.raises(WeightsError, match="'model' is a OrderedDict; if the state dict is one of"):
        pipeline(weights={"model": make().state_dict()})
    with pytest.raises(WeightsError, match="'a' is a tensor on the meta device, without values"):
        pipeline(weights={"a": torch.zeros(1, device="meta")})


def test_a_bad_index_is_refused(tmp_path):
    """No JSON, no weight_map, a missing shard, a tensor that its shard does not hold."""
    path = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 10**5, "9" * 5000):
        path.write_text(text)
        with pytest.raises(WeightsError, match="index with a weight_map was expected"):
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
    with pytest.raises(WeightsError, match="shards are files beside their index, .* 255"):
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
    with pytest.raises(WeightsError, match="holds a list; save model.state_dict"):
        open_weights(path)
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match="cannot read"):
        open_weights(path)
    torch.save(make(), path)
    with pytest.raises(WeightsError, match="cannot read .*UnpicklingError"):
        open_weights(path)


# --- load_state_dict


def test_state_dicts_go_every_way():
    """From a pipeline to the plain model strictly and back, and to a pipeline of other cuts."""
    pipe = pipeline()
    step(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    state = copies(pipe.state_dict())
    plain = make()
    plain.load_state_dict(state, strict=True)
    assert same_state(plain.state_dict(), state)
    other = pipeline(cuts=(1, 2, 3, 4))
    other(X)
    other.load_state_dict(plain.state_dict())
    assert same_state(other.state_dict(), state)
    with torch.device("meta"):
        net = make(cuts=(3,))
    late = pipeline(net, cuts=(3,))
    assert late.load_state_dict(state).missing_keys == []
    assert_close(late.eval()(X), plain.eval()(X))


class Holds(nn.Module):
    """A module around a pipeline, with a parameter of its own."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe, self.scale = pipe, nn.Parameter(torch.ones(1))


class Versioned(nn.Linear):
    """Notes the version of the state that it gets."""

    _version = 7
    seen = 0

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        Versioned.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def nested(place):
    net = nn.Sequential(Versioned(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = bp.Pipeline(bp.begin_blocks(net, {"2": 1}), devices=stages(2), chunks=2)
    if place:
        pipe(torch.randn(4, 4))
    return pipe


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("around", [Holds, torch.optim.swa_utils.AveragedModel])
def test_a_module_around_a_pipeline_loads_what_it_saved(around, placed):
    """By the plain model's names, as a pipeline; the versions of modules come too."""
    one, other = around(nested(placed)), around(nested(placed))
    state = one.state_dict()
    assert not any("module.module" in name for name in state)
    Versioned.seen = 0
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert Versioned.seen == 7
    assert same_state(other.state_dict(), state)
    del state[next(name for name in state if name.endswith("0.weight"))]
    assert len(other.load_state_dict(state, strict=False).missing_keys) == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


def test_a_module_around_a_pipeline_on_meta_loads_what_it_saved():
    """The values are there once it is placed."""
    one = Holds(nested(True))
    with torch.device("meta"):
        other = Holds(nested(False))
    other.scale = nn.Parameter(torch.ones(1))
    other.load_state_dict(one.state_dict())
    other.pipe.eval()(torch.randn(4, 4))
    assert same_state(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("placed", [False, True])
def test_a_state_dict_that_does_not_fit_changes_nothing(placed):
    """Every misfit is named, with its stage where the model is recorded, and both shapes."""
    pipe = pipeline()
    if placed:
        pipe(X)
    state = {n: t + 1 for n, t in pipe.state_dict().items()}
    del state["2.bias"]
    state["4.bias"] = torch.zeros(9)
    state["4.more"] = torch.zeros(2)
    before = copies(pipe.state_dict())
    with pytest.raises(WeightsError, match="does not fit") as caught:
        pipe.load_state_dict(state)
    stages = [f" (stage {n})" if placed else "" for n in (1, 2)]
    assert f"missing: '2.bias'{stages[0]}, float32[6]" in str(caught.value)
    assert f"wrong shape: '4.bias'{stages[1]}: [6] in the model, [9] in" in str(caught.value)
    assert f"unexpected: '4.more'{stages[1]}, float32[2]" in str(caught.value)
    assert same_state(pipe.state_dict(), before)


def test_a_load_that_is_not_strict_returns_the_keys():
    """Missing and unexpected keys are returned, wrong shapes raise all the same."""
    pipe = pipeline()
    state = pipe.state_dict()
    del state["2.bias"]
    state["more"] = torch.zeros(2)
    keys = pipe.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["2.bias"], ["more"])
    state["4.bias"] = torch.zeros(9)
    with pytest.raises(WeightsError, match=r"wrong shape: '4.bias'"):
        pipe.load_state_dict(state, strict=False)
    with torch.device("meta"):
        net = make()
    del state["4.bias"]
    late = pipeline(net, init="reset_parameters")
    keys = late.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["2.bias", "4.bias"], ["more"])
    with pytest.warns(UserWarning, match=r"'2.bias' .stage 1, .*\n  '4.bias' .stage 2"):
        late(X)
    assert equal(net[2].weight, state["2.weight"])


def test_one_name_of_a_tied_tensor_is_enough():
    """A strict load takes it, as checkpoints of Hugging Face have it."""
    pipe, state = pipeline(), make().state_dict()
    del state["4.weight"]
    pipe.load_state_dict(state)
    assert equal(pipe.module[4].weight, state["0.weight"])
    assert pipe.module[4].weight is pipe.module[0].weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_of_a_tied_tensor_that_are_missing_are_returned(device):
    """As a plain model does where it is not strict; ``safetensors.torch.load_model`` counts on it."""
    state, plain = make().state_dict(), make()
    del state["4.weight"], state["2.bias"]
    with torch.device(device):
        net = make()
    pipe = pipeline(net, init="reset_parameters" if device == "meta" else None)
    found = pipe.load_state_dict(state, strict=False)
    assert found == plain.load_state_dict(state, strict=False)
    assert found.missing_keys == ["2.bias", "4.weight"]


def test_models_with_hooks_of_their_own_load_as_plain():
    """Renamed keys and old versions load as into the plain model; what fails changes nothing."""

    class Renaming(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *args):
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
            super()._load_from_state_dict(state, prefix, *args)

    net = nn.Sequential(Renaming(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    pipe = pipeline(bp.begin_blocks(net, {"2": 1}), cuts=(2,))
    pipe(X)
    state = {n: t for n, t in pipe.state_dict().items() if not n.endswith("tracked")}
    state["0.kernel"] = state.pop("0.weight") + 1
    pipe.load_state_dict(state)  # without versions: before BatchNorm counted its batches
    assert equal(net[0].weight, state["0.kernel"])
    before = copies(pipe.state_dict())
    state["0.kernel"] = torch.zeros(2, 2)
    with pytest.raises(WeightsError, match="unexpected: '0.kernel' .stage 0., float32.2, 2."):
        pipe.load_state_dict(state)
    assert same_state(pipe.state_dict(), before)


class Renamed(nn.Linear):
    """Hears an old name of its weight, and has extra state."""

    note = "a"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, *rest):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def renamed():
    return bp.begin_blocks(nn.Sequential(Renamed(6, 6), nn.Linear(6, 6)), {"1": 1})


def test_a_state_dict_for_a_model_on_meta():
    """As into the plain model: renaming hooks and extra state are heard, strictly, at once."""
    plain = renamed()
    plain[0].note = "b"
    state = plain.state_dict()
    state["0.kernel"] = state.pop("0.weight")
    names = set(state)
    with torch.device("meta"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,))
    keys = pipe.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert set(state) == names
    assert_close(pipe(X), plain(X))
    assert net[0].note == "b"

    with torch.device("meta"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,), init="reset_parameters")
    del state["1.bias"]
    with pytest.raises(WeightsError, match="missing: '1.bias'"):
        pipe.load_state_dict(state)
    keys = pipe.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["1.bias"]
    with pytest.warns(UserWarning, match="lacks\n  '1.bias'"):
        pipe(X)
    assert equal(net[0].weight, state["0.kernel"])


def test_a_state_dict_with_gaps_for_a_model_on_meta():
    """Not strict and without ``init=``: what nothing gives values to is named at once, and what has
    values keeps them."""
    net = make()
    state = {n: t for n, t in net.state_dict().items() if n != "2.bias"}
    with torch.device("meta"):
        late = pipeline(make())
    with pytest.raises(WeightsError, match="missing: '2.bias'"):
        late.load_state_dict(state, strict=False)
    late.module[2] = nn.Linear(6, 6)
    bp.begin_blocks(late.module, {"2": 1})
    bias = late.module[2].bias.detach().clone()
    assert late.load_state_dict(state, strict=False).missing_keys == ["2.bias"]
    late(X)
    assert equal(late.module[2].bias, bias)
    assert equal(late.module[2].weight, state["2.weight"])


@pytest.mark.parametrize("kind", ["mapping", "torch", "index", "safetensors"])
@pytest.mark.parametrize("meta", [False, True])
def test_extra_state_in_weights(tmp_path, kind, meta):
    """It goes through ``set_extra_state``; what no module asks for is unexpected."""
    plain = renamed()
    plain[0].note = torch.tensor([3.0]) if kind == "safetensors" else "b"
    state = plain.state_dict()
    torch.save(state, tmp_path / "x.pt")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "x.pt")}))
    if kind == "safetensors":
        write_tensors(tmp_path / "x.safetensors", state)
    files = {"mapping": state, "index": index, "torch": tmp_path / "x.pt"}
    weights = files.get(kind, tmp_path / "x.safetensors")
    with torch.device("meta" if meta else "cpu"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,), weights=weights)
    pipe(X)
    assert net[0].note == plain[0].note
    assert_close(pipe(X), plain(X))
    with torch.device("meta" if meta else "cpu"):
        other = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), {"1": 1})
    with pytest.raises(WeightsError, match="unexpected: '0._extra_state', for which no module"):
        pipeline(other, cuts=(1,), weights=weights, sample=((X,), {}))


def test_extra_state_is_the_models_own():
    """What is no tensor goes through ``set_extra_state``."""

    class Extra(nn.Linear):
        note = "a"

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    one, other = (pipeline(nn.Sequential(Extra(6, 6)), cuts=()) for _ in range(2))
    one.module[0].note = "b"
    other.load_state_dict(one.state_dict())
    assert other.module[0].note == "b"
    state = {n: t + 1 for n, t in one.state_dict().items() if not n.endswith("state")}
    before = copies(dict(other.module.named_parameters()))
    with pytest.raises(WeightsError, match="missing: '0._extra_state'"):
        other.load_state_dict(state)
    with pytest.raises(WeightsError, match="missing: '0.weight'"):
        other.load_state_dict({**state, "0._extra_state": {"note": "c"}, "0.weight": [1.0]})
    with pytest.raises(WeightsError, match="unexpected: 'epoch', a int"):
        other.load_state_dict({**state, "0._extra_state": {"note": "c"}, "epoch": 3})
    assert same_state(dict(other.module.named_parameters()), before)
    with pytest.raises(
        WeightsError, match="'0._extra_state' comes from a module's get_extra_state"
    ):
        one.save_weights("never-made")
    assert not os.path.exists("never-made")


def test_a_lazy_model_gets_its_shapes_from_the_dictionary():
    """Its shapes come with the dictionary, as for the plain model."""
    pipe = pipeline(nn.Sequential(nn.LazyLinear(6)), cuts=())
    state = {"0.weight": torch.ones(6, 3), "0.bias": torch.zeros(6)}
    pipe.load_state_dict(state)
    assert equal(pipe.module[0].weight, state["0.weight"])


def test_assign_and_wrong_kinds_are_refused():
    """They would take the parameters off their stages."""
    pipe = pipeline()
    with pytest.raises(UsageError, match="stay the same objects .* leave it out"):
        pipe.load_state_dict(pipe.state_dict(), assign=True)
    with pytest.raises(UsageError, match="str came; for a file call load_weights"):
        pipe.load_state_dict("model.pt")


# --- files, in and out


@pytest.mark.parametrize("kind", ["file", "directory", "index", "torch", "bin", "mapping"])
def test_every_kind_of_weights_loads_into_every_kind_of_model(tmp_path, kind):
    """Into a model on meta, into a placed one, and into one that is neither."""
    plain = make()
    saving.save_weights(plain, tmp_path, {}, 10**9 if kind == "file" else 200)
    torch.save(plain.state_dict(), tmp_path / "x.pt")
    where = {"weight_map": dict.fromkeys(plain.state_dict(), "x.pt")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    weights = {
        "bin": tmp_path / "pytorch_model.bin.index.json",
        "file": tmp_path / "model.safetensors",
        "directory": str(tmp_path),
        "index": tmp_path / "model.safetensors.index.json",
        "torch": tmp_path / "x.pt",
        "mapping": plain.state_dict(),
    }[kind]
    with torch.device("meta"):
        net = make()
    pipes = pipeline(net, weights=weights), pipeline(), pipeline()
    pipes[0](X.clone())
    pipes[0].load_state_dict(plain.state_dict())  # the running statistics of that call
    pipes[1](X)
    for pipe in pipes[1:]:
        pipe.load_weights(weights)
    for pipe in pipes:
        assert same_state(pipe.state_dict(), plain.state_dict())
    pipes[2](X)
    with torch.device("meta"):
        late = pipeline(make())
    late.load_weights(weights)
    assert_close(late.eval()(X), plain.eval()(X))


def test_what_is_loaded_later_wins():
    """Weights given to the constructor do not come back over a later load."""
    first, second = make(), make()
    pipe = pipeline(make(), weights=first.state_dict())
    pipe.load_state_dict(second.state_dict())
    pipe.eval()(X)
    assert same_state(pipe.state_dict(), second.state_dict())


def test_load_weights_checks_first(tmp_path):
    """A misfit changes nothing."""
    pipe = pipeline()
    pipe(X)
    before = copies(pipe.state_dict())
    state = {**make().state_dict(), "0.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(
        WeightsError, match=r"x.pt does not fit:\n  wrong shape: '0.bias' .stage 0."
    ):
        pipe.load_weights(tmp_path / "x.pt")
    assert same_state(pipe.state_dict(), before)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_copied_is_found_first():
    """Sparse, quantized and meta sources, expanded targets, other kinds of numbers."""
    quantized = torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 0, torch.qint8)
    odd = {
        "of torch.sparse_coo: pass its to_dense": torch.eye(6).to_sparse(),
        "that is quantized: pass its dequantize": quantized,
        "on the meta device, without values": torch.zeros(6, 6, device="meta"),
    }
    pipe = pipeline()
    before = copies(pipe.state_dict())
    state = {n: t + 1 for n, t in before.items()}
    for why, value in odd.items():
        for load in (pipe.load_weights, pipe.load_state_dict):
            with pytest.raises(WeightsError, match=f"'2.weight' is a tensor {why}"):
                load({**state, "2.weight": value})
    kinds = {
        "2.weight": torch.ones(6, 6, dtype=torch.int8),
        "1.num_batches_tracked": torch.ones(()),
    }
    for name, value in kinds.items():
        with pytest.raises(WeightsError, match=f"wrong kind: '{name}'"):
            pipe.load_weights({**state, name: value})
    assert same_state(pipe.state_dict(), before)

    pipe.module.register_buffer("wide", torch.zeros(1).expand(4))
    before = copies(pipe.state_dict())
    for load in (pipe.load_weights, pipe.load_state_dict):
        with pytest.raises(WeightsError, match="cannot be copied: 'wide' is expanded"):
            load({**state, "wide": torch.ones(4)})
    assert same_state(pipe.state_dict(), before)


def test_a_disk_that_fails_in_the_middle(monkeypatch):
    """The error says that the model holds a part."""
    pipe, state = pipeline(), make().state_dict()

    def read(source, name, into):
        if name == "2.weight":
            raise OSError("Input/output error")
        into.copy_(state[name])

    monkeypatch.setattr("blockpipe.weights.sources.InMemory.read", read)
    with pytest.raises(OSError, match="Input/output") as caught:
        pipe.load_weights(state)
    assert caught.value.__notes__ == ["blockpipe: the model now holds a part of the checkpoint"]


@pytest.mark.parametrize("longer", ["checkpoint", "model"])
def test_names_that_a_wrapper_made_longer_are_explained_quickly(longer):
    """The common prefix is said, and looking for it takes no time in a large model."""
    net = nn.ModuleDict({"layers": nn.ModuleList(nn.BatchNorm1d(1) for _ in range(1500))})
    inner = net.state_dict()
    outer = nn.ModuleDict({"module": net})
    given = {"checkpoint": outer.state_dict(), "model": inner}[longer]
    pipe = bp.Pipeline(net if longer == "checkpoint" else outer)
    start = time.process_time()
    with pytest.raises(WeightsError, match=f"name of the {longer} begins with 'module.'"):
        pipe.load_weights(given)
    assert time.process_time() - start < 5  # it was a minute


def test_mapped_files_are_let_go(tmp_path, monkeypatch):
    """A file of ``torch.save`` is mapped anew after so many bytes, and reads the same."""
    monkeypatch.setattr("blockpipe.weights.sources._MAPPED", 100)
    plain = make()
    torch.save(plain.state_dict(), tmp_path / "x.pt")
    pipe = pipeline()
    pipe.load_weights(tmp_path / "x.pt")
    assert same_state(pipe.state_dict(), plain.state_dict())


def test_shards_follow_the_stages(tmp_path):
    """Shards follow the stages, so that a process reads few files."""
    pipe = pipeline()
    pipe(X)
    pipe.save_weights(tmp_path, max_shard_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stage_of = {
        n: h.stage for h in (*pipe.recording.parameters, *pipe.recording.buffers) for n in h.names
    }
    stages = [stage_of[n] for n, _ in sorted(index["weight_map"].items(), key=lambda item: item[1])]
    assert stages == sorted(stages)
    assert "4.weight" not in index["weight_map"]  # tied to 0.weight


def test_saving_replaces_what_was_there(tmp_path):
    """Fewer or more shards: no file of the earlier checkpoint stays to be read; others do."""
    (tmp_path / "config.json").write_text("{}")
    pipe = pipeline()
    for limit in (100, 10**9, 200):
        pipe.save_weights(tmp_path, max_shard_bytes=limit)
        names = {path.name for path in tmp_path.iterdir()}
        assert "config.json" in names
        assert ("model.safetensors" in names) == (limit == 10**9)
        assert ("model.safetensors.index.json" in names) == (limit != 10**9)
        assert len({name.rpartition("-of-")[2] for name in names if "-of-" in name}) <= 1
        pipe.load_weights(tmp_path)
    with pytest.raises(UsageError, match="max_shard_bytes is a number of bytes from 1 on, but 0"):
        pipe.save_weights(tmp_path, max_shard_bytes=0)


def test_a_failure_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """A disk that fills up in the second shard."""
    pipe = pipeline()
    pipe.save_weights(tmp_path, max_shard_bytes=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def full(path, tensors):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        write_tensors(path, tensors)

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        pipe.save_weights(tmp_path, max_shard_bytes=200)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [10**9, 100])
def test_a_checkpoint_is_read_as_it_was_opened(tmp_path, limit):
    """Another one is saved in its place before a tensor is read: what was opened stays whole."""
    first, second = pipeline(), pipeline()
    first.save_weights(tmp_path, max_shard_bytes=limit)
    source = open_weights(tmp_path)
    second.save_weights(tmp_path, max_shard_bytes=limit)
    for name, value in first.state_dict().items():
        if name in source.headers:  # tied tensors are there once
            read = torch.zeros(value.shape)
            source.read(name, read)
            assert equal(read, value)


def test_shards_that_are_replaced_while_they_are_opened_are_an_error(tmp_path, monkeypatch):
    """The index is of one checkpoint, and a file may be of the next."""
    first, second = pipeline(), pipeline()
    first.save_weights(tmp_path, max_shard_bytes=100)
    opened, original = [], _open_file

    def opening(path):
        if len(opened) == 1:
            second.save_weights(tmp_path, max_shard_bytes=100)
        opened.append(path)
        return original(path)

    monkeypatch.setattr("blockpipe.weights.sources._open_file", opening)
    with pytest.raises(WeightsError, match="replaced while its files were opened"):
        open_weights(tmp_path)
    assert len(opened) > 2


def test_a_torch_file_that_is_replaced_is_an_error(tmp_path):
    """It is mapped anew from time to time: never another one."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(4, 4)}, path)
    source = open_weights(path)
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match="replaced while it was being read"):
        source.read("a", torch.empty(4, 4))


def test_two_that_save_at_once_write_to_files_of_their_own(tmp_path, monkeypatch):
    """Also where both are process 1, in containers; what a killed one left is removed in time."""
    parts = {part_of(tmp_path / "model.safetensors") for _ in range(100)}
    assert len(parts) == 100
    left, fresh, other = parts.pop(), parts.pop(), tmp_path / ".model.safetensors.mine.part"
    for path in (left, fresh, other):
        path.touch()
    for path in (left, other):
        os.utime(path, (1, 1))
    pipeline().save_weights(tmp_path)
    assert [path.exists() for path in (left, fresh, other)] == [False, True, True]


def test_no_directory_is_no_working_directory():
    """An empty path is refused."""
    with pytest.raises(UsageError, match="empty one came"):
        pipeline().save_weights("")


def test_a_plan_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    """A full disk loses nothing, and leaves nothing."""
    path = tmp_path / "plan.json"
    first, second = bp.StagePlan([]), bp.StagePlan([bp.Assignment("a", 0, 0)])
    first.save(path)

    def full(file):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        second.save(path)
    assert bp.StagePlan.load(path) == first
    assert list(tmp_path.iterdir()) == [path]


def test_saving_a_plan_removes_what_a_killed_one_left(tmp_path):
    """Only of this plan, and only what has not been written to for an hour."""
    path = tmp_path / "plan.json"
    left, fresh, other = part_of(path), part_of(path), part_of(tmp_path / "plan2.json")
    for part in (left, fresh, other):
        part.touch()
    for part in (left, other):
        os.utime(part, (1, 1))
    bp.StagePlan([]).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, other])


@pytest.mark.parametrize("limits", [(10**9, 200), (100, 200), (200, 10**9), (10**9, 10**9)])
@pytest.mark.parametrize("failing", ["replace", "unlink"])
def test_a_failure_while_renaming_leaves_a_whole_checkpoint(tmp_path, monkeypatch, limits, failing):
    """At every single rename and removal the directory holds a whole checkpoint, old or new."""
    first, second = pipeline(), pipeline()
    states = [copies(pipe.state_dict()) for pipe in (first, second)]
    original = getattr(Path, failing)
    for last in range(20):
        first.save_weights(tmp_path, max_shard_bytes=limits[0])
        left = iter(range(last))

        def fails(path, *args, left=left, **options):
            if path.name.endswith(".part") == (failing == "replace"):
                next(left)
            return original(path, *args, **options)

        monkeypatch.setattr(Path, failing, fails)
        try:
            second.save_weights(tmp_path, max_shard_bytes=limits[1])
            break
        except StopIteration:
            monkeypatch.setattr(Path, failing, original)
            found = pipeline()
            found.load_weights(tmp_path)
            assert any(same_state(found.state_dict(), state) for state in states)
    else:
        pytest.fail("never saved")


def test_as_many_shards_again_fail_without_mixing(tmp_path, monkeypatch):
    """Their names collide: rather no checkpoint for a moment than half of each."""
    pipe = pipeline()
    pipe.save_weights(tmp_path, max_shard_bytes=200)
    monkeypatch.setattr(Path, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        pipe.save_weights(tmp_path, max_shard_bytes=200)
    with pytest.raises(WeightsError, match="without one index for them"):
        pipe.load_weights(tmp_path)


def test_what_cannot_be_saved(tmp_path):
    """A model without values, a dtype that the format does not have."""
    with torch.device("meta"):
        pipe = pipeline(make())
    with pytest.raises(WeightsError, match="'0.weight' is on the meta device"):
        pipe.save_weights(tmp_path)
    odd = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(WeightsError, match="'weight' is torch.complex128"):
        bp.Pipeline(odd).save_weights(tmp_path)
    named = nn.Linear(2, 2)
    named.register_buffer("__metadata__", torch.zeros(1))
    with pytest.raises(WeightsError, match="keeps '__metadata__' for itself"):
        bp.Pipeline(named).save_weights(tmp_path)
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    wrapped = nn.Linear(2, 2)
    wrapped.weight = nn.Parameter(two(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(WeightsError, match="'weight' is a .*keeps its values in other tensors"):
        bp.Pipeline(wrapped).save_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_checkpoints_go_both_ways(tmp_path, kind):
    """A model built on meta loads what ``save_pretrained`` wrote, by its own ``_init_weights`` for
    the rest; what the pipeline saves, ``from_pretrained`` and safetensors' ``load_model`` read."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_model

    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=32, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        mark = "model.layers.1"
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, use_cache=False,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        mark = "transformer.h.1"
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(config)
    bp.begin_blocks(net, {mark: 1})
    ids = torch.randint(0, 32, (4, 8))
    pipe = bp.Pipeline(
        net,
        devices=stages(2),
        chunks=2,
        weights=tmp_path / "theirs",
        init=net._init_weights,
        sample=((), {"input_ids": ids}),
    ).eval()
    assert same_state(net.state_dict(), plain.state_dict())
    assert_close(pipe(input_ids=ids).logits, plain(input_ids=ids).logits)
    pipe.save_weights(tmp_path / "ours", max_shard_bytes=5000)
    config.save_pretrained(tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same_state(back.state_dict(), plain.state_dict())
    pipe.save_weights(tmp_path / "one")
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    load_model(fresh, tmp_path / "one" / "model.safetensors")
    assert same_state(fresh.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_buffers_that_timm_saves_in_no_checkpoint_are_reset():
    """Buffers that no checkpoint holds come from the modules' ``reset_parameters``."""
    timm = pytest.importorskip("timm")
    plain = timm.create_model("levit_128s")
    with torch.device("meta"):
        net = timm.create_model("levit_128s")
    bp.begin_blocks(net, {"stages.1": 1})
    images = torch.zeros(4, 3, 224, 224)
    weights = plain.state_dict()
    pipeline(net, cuts=(0,), weights=weights, init="reset_parameters", sample=((images,), {}))
    for pair in zip(plain.named_buffers(), net.named_buffers(), strict=True):
        assert equal(pair[0][1], pair[1][1]), pair[0][0]


# --- resuming


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_is_equal_to_the_bit(name, tmp_path):
    """Weights, optimizer state and learning-rate scheduler, saved and loaded in another cut."""

    def start(cuts, **options):
        torch.manual_seed(1)
        pipe = pipeline(cuts=cuts, **options)
        optimizer = OPTIMIZERS[name](pipe.parameters())
        return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    pipe, optimizer, scheduler = start((2, 4))
    losses = []
    for n in range(6):
        losses.append(step(pipe, optimizer))
        scheduler.step()
        if n == 2:
            pipe.save_weights(tmp_path)
            states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(states, tmp_path / "training.pt")

    pipe2, optimizer, scheduler = start((1, 2, 3), weights=tmp_path)
    saved = torch.load(tmp_path / "training.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    for expected in losses[3:]:
        assert equal(step(pipe2, optimizer), expected)
        scheduler.step()
    assert same_state(pipe2.state_dict(), pipe.state_dict())


def test_training_resumed_from_meta_is_equal(tmp_path):
    """The model on meta, placed by its sample; then the optimizer loads what was saved."""
    pipe = pipeline()
    optimizer = OPTIMIZERS["adam"](pipe.parameters())
    step(pipe, optimizer)
    state, weights = copy.deepcopy(optimizer.state_dict()), copies(pipe.state_dict())
    expected = step(pipe, optimizer), step(pipe, optimizer)
    with torch.device("meta"):
        net = make((1, 3))
    late = pipeline(net, cuts=(1, 3), weights=weights, sample=((X,), {}))
    optimizer = OPTIMIZERS["adam"](late.parameters())
    optimizer.load_state_dict(state)
    assert equal(step(late, optimizer), expected[0])
    assert equal(step(late, optimizer), expected[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_loaded_on_meta_is_refused(name):
    """It has no values any more: the next step says so, instead of training with what it lost."""
    pipe = pipeline()
    optimizer = OPTIMIZERS[name](pipe.parameters())
    step(pipe, optimizer)
    with torch.device("meta"):
        net = make()
    late = pipeline(net, weights=copies(pipe.state_dict()))
    saved, optimizer = optimizer.state_dict(), OPTIMIZERS[name](late.parameters())
    optimizer.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(UsageError, match="is on the meta device: .* after the placement .pass sam"):
        step(late, optimizer)
    optimizer.load_state_dict(saved)
    step(late, optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_of_model_and_optimizer_round_trip(tmp_path):
    """``torch.distributed.checkpoint`` saves and loads a pipeline's model and optimizer."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    pipe = pipeline()
    optimizer = OPTIMIZERS["adam"](pipe.parameters())
    step(pipe, optimizer)
    model_state, optimizer_state = get_state_dict(pipe.module, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    expected = step(pipe, optimizer), step(pipe, optimizer)

    other = pipeline(cuts=(1, 3))
    other(X)
    optimizer = OPTIMIZERS["adam"](other.parameters())
    model_state, optimizer_state = get_state_dict(other.module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other.module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert equal(step(other, optimizer), expected[0])
    assert equal(step(other, optimizer), expected[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_takes_the_pipeline_itself(tmp_path):
    """It is stateful: ``dcp.save`` and ``dcp.load`` take it as it is, in other cuts too."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    pipe, other = pipeline(), pipeline(cuts=(1, 3))
    pipe(X)
    dcp.save({"model": pipe}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": other}, checkpoint_id=tmp_path, no_dist=True)
    assert same_state(other.state_dict(), pipe.state_dict())
