"""What ``_torch/tensors.py`` relies on."""

import itertools
import logging
import weakref

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor, nn

from blockpipe._torch import tensors


def test_version_of():
    tensor = torch.ones(2)
    view, before = tensor[:1], tensors.version_of(tensor)
    view.add_(1)
    assert tensors.version_of(tensor) == tensors.version_of(view) == before + 1, (
        "torch no longer counts writes to shared memory, by which copies are found to be out of date"
    )
    with torch.inference_mode():
        assert tensors.version_of(torch.ones(1)) == -1


def test_storage_id():
    tensor, other = torch.ones(2), torch.ones(2)
    key = tensors.storage_id(tensor.untyped_storage())
    assert key == tensors.storage_id(tensor[1:].untyped_storage()), (
        "torch's views have other storages"
    )
    assert key != tensors.storage_id(other.untyped_storage())


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_storages_without_memory_have_ids(device):
    with tensors.FakeTensorMode() if device == "fake" else torch.device("meta"):
        one, other = torch.ones(2), torch.ones(2)
    keys = {tensors.storage_id(t.untyped_storage()) for t in (one, one.view(2, 1), other)}
    assert len(keys) == 2, "torch's storages without memory cannot be told apart by _cdata any more"


def test_holders_of():
    tensor = torch.ones(2)
    alone = tensors.holders_of(tensor.untyped_storage())
    view = tensor[1:]
    shared = tensors.holders_of(tensor.untyped_storage())
    assert (alone, shared) == (2, 3), (
        "torch no longer counts a storage's tensors and Python's own object of it, by which memory "
        "goes back to a copy stream"
    )
    del view


def test_of_class_of():
    parameter = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        made = tensors.of_class_of(parameter, torch.zeros(2))
    assert type(made) is nn.Parameter
    assert made.requires_grad
    assert made.is_leaf
    with torch.no_grad():
        made.add_(1)
    (2 * made).sum().backward()
    assert made.grad.tolist() == [2, 2], "torch's _make_subclass no longer makes leaves"

    class Buffer(Tensor):
        pass

    with torch.no_grad():
        buffer = tensors.of_class_of(torch.ones(2).as_subclass(Buffer), torch.zeros(2))
    buffer.add_(1)  # a view made under no_grad could not be written to here
    assert type(buffer) is Buffer


def test_swap_contents_keeps_objects_and_weak_references():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    reference = weakref.ref(one)
    tensors.swap_contents(one, other)
    assert one.tolist() == [0, 0, 0], "torch no longer swaps what tensors hold"
    assert other.tolist() == [1, 1]
    assert reference() is one


def test_fake_tensors():
    with tensors.FakeTensorMode() as mode:
        made = torch.ones(2)
        with tensors.unset_fake_temporarily():
            real = torch.ones(2)
        again = torch.ones(2)
    assert isinstance(made, tensors.FakeTensor)
    assert made.fake_mode is mode, "torch's fake tensors no longer know their mode"
    assert not isinstance(real, tensors.FakeTensor), "torch's unset_fake_temporarily no longer does"
    assert isinstance(again, tensors.FakeTensor)


def test_the_log_of_fake_tensors():
    assert logging.getLogger(tensors.FAKE_TENSOR_LOG).name == tensors.FakeTensor.__module__, (
        "torch's fake tensors are in another module, and so log elsewhere: recordings would be noisy"
    )


def test_operators():
    add = torch.ops.aten.add_.Tensor
    assert isinstance(add, tensors.OpOverload)
    schema = tensors.schema_of(add)
    named = {argument.name: argument for argument in schema.arguments}
    assert schema.is_mutable
    assert named["self"].alias_info.is_write, "torch's schemas no longer say what is written to"
    assert named["other"].alias_info is None
    assert named["alpha"].has_default_value()
    assert named["alpha"].default_value == 1
    assert add.overloadpacket is torch.ops.aten.add_


@pytest.mark.parametrize(
    ("operation", "reads"),
    [
        (torch.ops.aten.mul.Tensor, True),
        (torch.ops.aten.add_.Tensor, True),
        (torch.ops.aten.t.default, False),
        (torch.ops.aten.detach.default, False),
        (torch.ops.prim.device.default, False),
    ],
)
def test_reads_memory(operation, reads):
    assert tensors.reads_memory(operation) is reads, "torch's schemas no longer tell views apart"


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        (("cpu",), {}, (torch.device("cpu"), None, None)),
        ((torch.float64,), {}, (None, torch.float64, None)),
        (("cuda:1", torch.float16), {}, (torch.device("cuda:1"), torch.float16, None)),
        ((), {"device": "meta"}, (torch.device("meta"), None, None)),
        ((torch.ones(1, device="meta"),), {}, (torch.device("meta"), torch.float32, None)),
        ((), {"memory_format": torch.channels_last}, (None, None, torch.channels_last)),
    ],
)
def test_arguments_of_to(args, kwargs, found):
    assert tensors.arguments_of_to(*args, **kwargs) == found, (
        "torch reads the arguments of Module.to otherwise: a pipeline may be moved to a device"
    )


@drawn(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=8))
def test_what_overlaps_is_grouped_when_it_does_so_by_way_of_others(given):
    """Beside the bytes: those of a group are one run, and no group of two is left out."""
    extents = [(begin, begin + size, at) for at, (begin, size) in enumerate(given)]
    groups = tensors.overlapping(extents)
    of = {at: number for number, group in enumerate(groups) for at in group}
    assert all(len(group) > 1 for group in groups)
    for (begin, end, one), (begins, ends, other) in itertools.combinations(extents, 2):
        if begin < ends and begins < end:
            assert of[one] == of[other]
    for group in groups:
        held = {byte for at in group for byte in range(*extents[at][:2])}
        assert len(held) == max(held) - min(held) + 1


def test_an_extent_is_counted_in_bytes_of_the_storage():
    whole = torch.zeros(4, 6, dtype=torch.float64)
    assert tensors.extent_of(whole[1:3, 2:4]) == ((6 + 2) * 8, (2 * 6 + 3 + 1) * 8)
    assert tensors.extent_of(whole.t()) == (0, 4 * 6 * 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3),
        lambda: torch.arange(3).expand(2, 3),
        lambda: torch.tensor(1.0).expand(4),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor([1.0, torch.nan, torch.inf]),
        lambda: torch.tensor([1 + 2j, 3j]).conj(),
        lambda: torch.arange(6.0)[::2],
        lambda: torch.tensor(2.0),
        lambda: torch.zeros(0, 3),
        lambda: torch.eye(2).to_sparse(),
    ],
)
def test_what_has_not_changed_keeps_its_version_and_its_memory_is_not_written(make, monkeypatch):
    tensor = make()
    value, version = tensor.detach().clone(), tensors.version_of(tensor)
    written, copy = [], Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda *args: written.append(args) or copy(*args))
    tensors.put_back(tensor, value, version)
    assert tensors.version_of(tensor) == version
    assert len(written) == (tensor.layout is torch.sparse_coo)  # whose bits are not looked at


@pytest.mark.parametrize("changed", [torch.nan, -0.0, 3.0])
def test_what_has_changed_has_its_value_and_its_version_again(changed):
    tensor = torch.tensor([0.0, 1.0])
    value, version = tensor.clone(), tensors.version_of(tensor)
    tensor[0] = changed
    tensors.put_back(tensor, value, version)
    assert tensor.tolist() == [0.0, 1.0]
    assert not tensor.signbit().any()
    assert tensors.version_of(tensor) == version
