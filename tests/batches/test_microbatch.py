"""Splitting a batch and putting results together."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe._common.nested import leaves, tensors
from blockpipe.batches.joining import JoinedLeaf, join
from blockpipe.batches.microbatch import split, weights_of, weights_without_target
from blockpipe.errors import MicrobatchError

from ..stage_devices import assert_close, stages


class Pair(NamedTuple):
    a: torch.Tensor
    b: object


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    note: str


@given(st.integers(1, 20), st.integers(1, 8))
def test_split_then_join_is_the_identity(size, chunks):
    """Sizes are at most one apart, and nothing is lost or moved."""
    x = torch.arange(size * 2.0).reshape(size, 2)
    nested = {"x": x, "pair": Pair(x + 1, None), "record": Record(x + 2, "kept"), "n": 3}
    parts = split((nested,), {}, None, chunks)
    sizes = [p.size for p in parts]
    assert len(parts) == min(chunks, size)
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    joined, _ = join([p.args[0] for p in parts], sizes, weights_of(parts, "mean"), None)
    assert type(joined["pair"]) is Pair
    assert joined["record"].note == "kept"
    for got, wanted in zip(leaves(joined), leaves(nested), strict=True):
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


def test_a_tensor_of_another_size_goes_whole():
    """A tensor without the batch's size on dim 0 goes to every micro-batch."""
    x, table, scalar = torch.zeros(4, 2), torch.zeros(7, 2), torch.tensor(1.0)
    parts = split((x, table), {"scale": scalar}, None, 2)
    assert all(p.args[1] is table and p.kwargs["scale"] is scalar for p in parts)


def test_batch_dims_name_what_is_split_where():
    """A number, or a mapping by position and name."""
    x, mask = torch.zeros(3, 4), torch.zeros(4, 4)
    parts = split((x,), {"mask": mask}, None, 2, {0: 1, "mask": None})
    assert [p.args[0].shape for p in parts] == [(3, 2), (3, 2)]
    assert parts[0].kwargs["mask"] is mask
    assert split((x,), {}, None, 2, 1)[0].args[0].shape == (3, 2)


def test_what_is_left_out_is_no_list():
    """A call without a target, or without an optional argument, was refused for its named list."""
    dims = {"target": "list", "lengths": "list"}
    parts = split((torch.ones(4, 1),), {"lengths": None}, None, 2, dims)
    assert [(m.size, m.kwargs, m.target) for m in parts] == 2 * [(2, {"lengths": None}, None)]
    parts = split((torch.ones(4, 1),), {"lengths": [1, 2, 3, 4]}, list("abcd"), 2, dims)
    assert [(m.kwargs["lengths"], m.target) for m in parts] == [
        ([1, 2], ["a", "b"]),
        ([3, 4], ["c", "d"]),
    ]


def test_a_target_of_another_size_is_an_error():
    """A target is compared row by row, so it splits like the inputs."""
    with pytest.raises(
        MicrobatchError, match=r"the batch's 4 samples on dim 0 for the target, got \(3,\)"
    ):
        split((torch.zeros(4, 1),), {}, torch.zeros(3), 2)


def test_an_empty_batch_is_an_error():
    """There is no micro-batch of nothing."""
    with pytest.raises(MicrobatchError, match="at least one sample"):
        split((torch.zeros(0, 3),), {}, None, 2)


def test_weights_of_micro_batches_are_shares_ones_or_counts():
    """Shares of samples, ones, or shares of a callable's numbers."""
    parts = split((torch.zeros(5, 1),), {}, torch.tensor([1, -1, 1, 1, -1]), 2)
    assert weights_of(parts, "mean") == [0.6, 0.4]
    assert weights_of(parts, "sum") == [1.0, 1.0]
    assert weights_of(parts, lambda a, k, t: (t > 0).sum()) == [2 / 3, 1 / 3]
    with pytest.raises(MicrobatchError, match="not all 0"):
        weights_of(parts, lambda a, k, t: 0)


def test_a_batch_that_is_only_evaluated_may_count_nothing():
    """A test set has no labels; attack 39: the plain Trainer predicts it."""
    parts = split((torch.zeros(4, 1),), {}, torch.zeros(4), 2)
    counts = [lambda a, k, t: (t > 0).sum(), lambda a, k, t: -1, lambda a, k, t: t.none]
    for how, is_fine in zip(counts, [True, False, False], strict=True):
        with torch.no_grad():
            weights, problem = weights_without_target(parts, how)
        assert weights == [0.5, 0.5]
        assert (problem is None) is is_fine
        assert weights_without_target(parts, how)[1] is not None  # it might be trained


def test_join_keeps_reduces_and_lists():
    """Scalars are weighted, equal things kept, different things listed."""
    weight, mask = torch.ones(9), torch.ones(9).bool
    results = [
        (torch.tensor(1.0), "same", 1, weight, mask(), torch.ones(9), torch.tensor(2)),
        (torch.tensor(3.0), "same", 2, weight, mask(), torch.ones(9), torch.tensor(2)),
    ]
    joined, joints = join(results, [3, 1], [0.75, 0.25], None)
    assert joined[0] == 1.5
    assert joined[1:3] == ("same", [1, 2])
    assert joined[3] is weight
    assert joined[4].shape == (9,)
    kinds = ["sum", "same", "list", "same", "same", "list", "list"]
    assert [joint.how for joint in joints] == kinds


def test_what_has_no_weight_counts_for_nothing():
    """Neither its value, which may be no number, nor its gradient."""
    parts = [torch.tensor(2.0), torch.tensor(torch.nan)]
    joint = JoinedLeaf.of(parts, [1, 1], [1.0, 0.0], 0, [0, 0])
    assert joint.value(None) == 2
    assert joint.gradients(torch.tensor(3.0)) == [3, None]


def test_join_of_different_structures_is_an_error():
    """Members would be misaligned."""
    with pytest.raises(MicrobatchError, match=r"as many members .* got \[1, 2\]"):
        join([(1,), (1, 2)], [1, 1], [0.5, 0.5], None)


def test_mappings_with_keys_in_another_order_are_joined_by_key():
    """As of a model that returns the heads of those tasks that occur in the micro-batch."""
    first = {"a": torch.zeros(2, 1), "b": torch.ones(2, 1)}
    joined, joints = join([first, {"b": first["b"], "a": first["a"]}], [2, 2], [0.5, 0.5], None)
    assert {name: value.unique().tolist() for name, value in joined.items()} == {"a": [0], "b": [1]}
    assert [joint.places for joint in joints] == [[(0, 0), (1, 1)], [(0, 1), (1, 0)]]
    with pytest.raises(MicrobatchError, match=r"output\['b'\] in .* 0 and output\['a'\] in .* 1"):
        join([{"b": first["b"]}, {"a": first["a"]}], [2, 2], [0.5, 0.5], None)


def test_a_tensor_of_all_micro_batches_when_it_has_as_many_rows_is_kept():
    """A part of it is no such tensor: each micro-batch has one of its own."""
    weight = nn.Parameter(torch.ones(2, 1))
    assert join([weight, weight.detach()], [2, 2], [0.5, 0.5], None)[0] is weight
    for part in (weight[:1], torch.ones(1).expand(2, 1)):
        size = len(part)
        assert len(join([part, part.view_as(part)], [size, size], [0.5, 0.5], None)[0]) == 2 * size


def test_sizes_that_differ_are_listed_dim_by_dim():
    joined, _ = join([torch.Size([3, 4]), torch.Size([2, 4])], [3, 2], [0.6, 0.4], None)
    assert joined == ([3, 2], 4)


def test_outputs_of_different_widths_are_named():
    """With the micro-batches, and what to do."""
    widths = [{"h": torch.zeros(2, 4), "w": [torch.zeros(2, n)]} for n in (3, 3, 5)]
    match = (
        r"output\['w'\]\[0\] with the shape \[2, 3\] in micro-batch 0 and \[2, 5\] in micro-batch 2 "
        r"\(.*test_microbatch.py:\d+\); pad .* batch_dims=\{'output': …\}"
    )
    with pytest.raises(MicrobatchError, match=match):
        join(widths, [2, 2, 2], [1 / 3] * 3, None)


@pytest.mark.parametrize("container", [list, lambda t: dict(enumerate(t))])
def test_what_has_no_batch_goes_whole_inside_of_containers_too(container):
    """A 0-d tensor, and one of another size, beside one that is split."""
    x, scalar, table = torch.arange(4), torch.tensor(2.0), torch.ones(3, 2)
    parts = split((container([x, scalar, table]),), {}, None, 2)
    for i, part in enumerate(parts):
        segment, same_scalar, same_table = tensors(part.args)
        assert segment.tolist() == [2 * i, 2 * i + 1]
        assert same_scalar is scalar
        assert same_table is table


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        count = torch.tensor(len(h))
        found = {"max": h.max(), "state": h[None], "count": count, "weight": self.a.weight}
        return {"loss": h.mean(), "h": h, "mask": h > 0, **found}


def test_the_summary_names_outputs_that_are_no_batch():
    """What it says of each is what becomes of it; the loss, and what is one for all, are not named."""
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(Outputs(), devices=["cpu"], chunks=2)
    notes = pipe.summary(x).notes
    assert "output 'max': one number per micro-batch, averaged by loss_reduction" in notes
    said = "output 'state', output 'count': no entry per sample; a list with one per micro-batch"
    assert said in notes
    assert not any("loss'" in note or "'h'" in note or "'weight'" in note for note in notes)
    joined = pipe(x)
    assert joined["max"] == (joined["h"][:4].max() + joined["h"][4:].max()) / 2
    assert [type(joined[name]) for name in ("state", "count")] == [list, list]
    pipe(x)
    assert said in pipe.summary().notes  # of what was recorded last
    assert said not in bp.Pipeline(Outputs(), devices=["cpu"]).summary(x).notes


def test_a_state_that_is_joined_on_its_own_dimension_is_not_named():
    class Both(nn.Module):
        def forward(self, x):
            return x[None], x[None] * 2

    pipe = bp.Pipeline(Both(), devices=["cpu"], chunks=2, batch_dims={"output": 1})
    x = torch.randn(8, 4)
    assert not any("output 0" in note for note in pipe.summary(x).notes)
    assert pipe(x)[0].shape == (1, 8, 4)


def test_outputs_that_are_not_to_be_joined_are_a_list():
    """Each micro-batch's, whatever is in it; gradients find their way back."""
    net = nn.Linear(4, 2)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=["cpu"], chunks=2, batch_dims={"output": None})
    x = torch.randn(5, 4)
    parts = pipe(x)
    assert [part.shape for part in parts] == [(3, 2), (2, 2)]
    (parts[0].sum() * 2 + parts[1].sum()).backward()
    expected = [plain(part) for part in x.split([3, 2])]
    (expected[0].sum() * 2 + expected[1].sum()).backward()
    torch.testing.assert_close(net.weight.grad, plain.weight.grad)
    result = pipe.forward_backward(x, loss_fn=torch.sum, return_outputs=True)
    torch.testing.assert_close(torch.cat(result.outputs), plain(x))
    assert "no entry for each sample" not in str(pipe.summary())
    assert pipe.verify(x)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x):
        y = self.b(self.a(x))
        return {"loss": y.square().mean(), "y": y.t()}


@pytest.mark.parametrize("dims", [{"output": -1}, {"x": -2, "output": 1}, {0: -2, "output": -1}])
def test_a_dim_when_counted_from_the_last_is_looked_up_in_every_tensor(dims):
    """A 0-d output has none: that was Python's IndexError."""
    model, x = Turned(), torch.randn(5, 4)
    wanted = model(x)
    assert_close(bp.Pipeline(model, devices=stages(2), chunks=2, batch_dims=dims)(x), wanted)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_of_the_output_when_no_output_has_it_is_refused(dim):
    """Outputs became lists."""
    pipe = bp.Pipeline(Turned(), devices=stages(2), chunks=2, batch_dims={"output": dim})
    with pytest.raises(MicrobatchError, match=rf"samples on dim {dim}, .*got \(4, 3\).*or None"):
        pipe(torch.randn(5, 4))


def test_an_argument_that_decides_the_size_is_named_where_the_target_does_not_fit():
    """``mask`` of one row comes first: the batch has one sample."""
    x = torch.ones(7, 4)
    match = r"got \(7, 4\).*the size of argument 'mask'.*\{'mask': None\}"
    with pytest.raises(MicrobatchError, match=match):
        split((), {"mask": torch.ones(1, 5), "x": x}, x, 2)


@pytest.mark.parametrize("weight", ["3", True])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(MicrobatchError, match="finite weights from 0 on"):
        weights_of(split((torch.ones(4),), {}, None, 2), lambda *_: weight)
