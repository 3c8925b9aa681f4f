"""Arguments that have no dim of samples, or may have none."""

from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import blockpipe as bp
from blockpipe.errors import MicrobatchError

from ..stage_devices import assert_close, stages


class Takes(nn.Module):
    """Adds what the other argument says to the output."""

    def __init__(self, reads=lambda other: 0.0) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x, other=None):
        return self.b(self.a(x)) + self.reads(other)


def _rows() -> list[Tensor]:
    return [torch.randn(n, 4) for n in (3, 2, 2, 1)]


def _masked() -> Tensor:
    return torch.masked.masked_tensor(torch.ones(4, 4), torch.ones(4, 4) > 0)


KINDS = {
    "packed": (lambda: pack_sequence(_rows()), "a PackedSequence, .*padded tensor"),
    "nested": (lambda: torch.nested.nested_tensor(_rows()), "a nested tensor .*padded tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor(_rows(), layout=torch.jagged),
        "a nested tensor .*padded tensor",
    ),
    "masked": (_masked, "a MaskedTensor .*its mask"),
}


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize(("make", "match"), KINDS.values(), ids=KINDS)
def test_an_argument_without_a_dim_of_samples_when_it_is_to_be_split_is_refused(make, match):
    """The time steps of a PackedSequence were split as samples; the others were torch's errors."""
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    x, other = torch.randn(4, 4), make()
    for args, where in (
        ((other,), "argument 0"),
        ((x, other), "argument 1"),
        ((x, {"rows": [other]}), "argument 1"),
    ):
        with pytest.raises(MicrobatchError, match=rf"for {where}, got {match}.*: None\}}"):
            pipe(*args)
    with pytest.raises(MicrobatchError, match=f"for the target, got {match}"):
        pipe.forward_backward(x, target=other, loss_fn=lambda out, _: out.sum())


@pytest.mark.cpu("torch copies these to few kinds of devices")
@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize("make", [make for make, _ in KINDS.values()], ids=KINDS)
def test_an_argument_without_a_dim_of_samples_when_named_none_goes_whole(make):
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2, batch_dims={"other": None})
    assert pipe(torch.randn(4, 4), make()).shape == (4, 4)


@pytest.mark.cpu("the lengths in a PackedSequence have to stay on the host")
def test_a_packed_sequence_when_named_none_is_the_plain_models():
    """Its value, and not a part of it."""
    x, packed = torch.randn(4, 4), pack_sequence(_rows())
    model = Takes(lambda other: pad_packed_sequence(other)[0].mean())
    wanted = model(x, packed)
    pipe = bp.Pipeline(model, devices=stages(2), chunks=2, batch_dims={1: None})
    assert_close(pipe(x, packed), wanted)


@dataclass
class Batch:
    x: Tensor
    samples: Any


Record = namedtuple("Record", "x samples")

SAMPLES = {
    "arrays": [np.ones(1 + n % 3) for n in range(4)],
    "objects": [SimpleNamespace(n=n) for n in range(4)],
    "objects of two classes": [SimpleNamespace(n=1), Record(1, 2), SimpleNamespace(n=2), None],
    "tuple of lists": ([1.0], [1.0, 2.0], [3.0], [4.0]),
    "lists, one empty": [[1.0], [1.0, 2.0], [3.0], []],
    "numbers and tensors": [1.0, torch.tensor(2.0), 3.0, torch.tensor(4.0)],
    "mappings, some none": [{"n": torch.ones(1)}, None, {"n": torch.ones(2)}, None],
    "tuple of mappings, some none": ({"n": torch.ones(1)}, None, {"n": torch.ones(2)}, None),
    "tuple of tensors, some none": (torch.ones(2), None, torch.ones(3), None),
    "tuple of texts, some none": ("a", None, "b", "c"),
    "boxes, some empty": [torch.ones(2, 4), torch.tensor([]), torch.ones(1, 4), torch.tensor([])],
    "deque": deque([1.0, 2.0, 3.0, 4.0]),
    "tensors of as many rows": [torch.full((4, 4), 1.0) for _ in range(4)],
    "ragged": _rows(),
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_sequence_with_an_item_for_each_sample_when_not_named_is_refused(samples: Any) -> None:
    """Each micro-batch got all of it, and paired its samples with the first items."""
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    x = torch.randn(4, 4)
    for other in (samples, {"n": samples}, Batch(x, samples), Record(x, samples)):
        with pytest.raises(MicrobatchError, match=r"argument 1 (may be|has a \w+ inside that may)"):
            pipe(x, other)
    with pytest.raises(MicrobatchError, match="the target may be a list of 4 samples"):
        pipe.forward_backward(x, target=samples, loss_fn=lambda out, _: out.sum())


COLLATED = {
    "texts": [("a", "b"), ("c", "d")],
    "texts of mappings": [{"n": ("a", "b")}],
    "texts and numbers": [("a", 1), ("b", 2)],
    "records": [(("a", "b"), "c"), (("d", "e"), "f")],
}


@pytest.mark.parametrize("records", COLLATED.values(), ids=COLLATED)
def test_columns_of_plain_values_in_a_list_when_not_named_are_refused(records: Any) -> None:
    """Torch's collate function makes them; each micro-batch got all names and all paths."""
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    rows = [(torch.randn(4), records[n % len(records)]) for n in range(4)]
    x, other = torch.utils.data.default_collate(rows)
    for given in (other, {"n": other}, [other]):
        with pytest.raises(
            MicrobatchError, match=r"argument 1 has a \w+ inside that may be a list"
        ):
            pipe(x, given)
    with pytest.raises(MicrobatchError, match="the target has a .* may be a list of 4 samples"):
        pipe.forward_backward(x, target=other, loss_fn=lambda out, _: out.sum())


def test_columns_of_numbers_in_a_list_when_they_are_long_are_refused():
    """Up to four numbers may be a size or a box; a list of five for five samples is a column."""
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    with pytest.raises(
        MicrobatchError, match="argument 1 has a list inside that may be a list of 5"
    ):
        pipe(torch.randn(5, 4), [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])


MASK = torch.ones(3, 3)


@pytest.mark.parametrize(
    "whole",
    [
        (2, 2, 1, 1),
        ("mean", None, 3, True),
        ("mean", None, None, None),
        (torch.ones(4, 4), torch.ones(4, 4), None, None),
        [torch.ones(4, 4), 0.5, None, 1],
        [[64, 64, 1, 1], [32, 32, 1, 1], [16, 16, 1, 1]],
        [[(64, 64)] * 4] * 2,
        [["the", "cat", "is", "on"], ["a", "b"], ["c"]],
        (MASK, None, MASK, None),
        (torch.ones(1, 4, 2), None, torch.ones(1, 4, 2), None),
        (torch.ones(2, 4, 2), None, torch.ones(1, 1, 4, 4), None),
        SimpleNamespace(n=4),
    ],
    ids=str,
)
def test_what_is_no_list_of_samples_goes_on_as_before(whole: Any) -> None:
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    assert pipe(torch.randn(4, 4), whole).shape == (4, 4)


class Slots:
    __slots__ = ("loc",)

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc


class Stored:
    """Keeps its tensors as torch_geometric's data does."""

    def __init__(self, loc: Tensor) -> None:
        self.__dict__["loc"] = {"inside": loc}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["loc"][name]


ROWS = [
    lambda y: Normal(y, 1.0),
    lambda y: SimpleNamespace(loc=y),
    lambda y: SimpleNamespace(loc=y.numpy()),
    Slots,
    Stored,
]


@pytest.mark.parametrize("kind", [deque, frozenset])
def test_a_collection_of_tensors_that_is_not_split_is_refused(kind: Any) -> None:
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=2)
    with pytest.raises(MicrobatchError, match=f"(?s)got {kind.__name__}.*'other': None"):
        pipe(torch.randn(4, 4), other=kind([torch.randn(4, 4)]))


@pytest.mark.parametrize("of_rows", ROWS)
def test_an_object_with_rows_of_the_batch_is_refused(of_rows: Any) -> None:
    """Each sample was compared with all rows, where a micro-batch of one broadcasts."""
    pipe = bp.Pipeline(Takes(), devices=stages(2), chunks=4)
    x, other = torch.randn(4, 4), of_rows(torch.randn(4, 4))
    match = r"4 samples for the target.*test_unsplittable.py:\d+.*'loc' has that many.*: None\}"
    with pytest.raises(MicrobatchError, match=match):
        pipe.forward_backward(x, target=other, loss_fn=lambda out, _: out.sum())
    named = bp.Pipeline(Takes(), devices=stages(2), chunks=4, batch_dims={"other": None})
    assert named(x, other).shape == (4, 4)
