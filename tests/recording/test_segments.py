"""What a recording says of each call and between calls: pieces, flows, and where arguments came from."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.costs.work import Work
from blockpipe.recording.calls import Segment


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = torch.relu(self.b(y))
        return self.c(z + y)


def test_flows_say_where_tensors_are_made_and_read() -> None:
    """The skip from ``a`` to the sum in ``b``'s piece, and the sum itself, are flows with their bytes."""
    recording = bp.record(Residual(), torch.zeros(4, 8))
    names = [[recording.calls[c].path for c in segment.calls] for segment in recording.segments]
    assert names == [["", "a"], ["b"], ["c"]]
    assert [(f.made, f.read, f.bytes) for f in recording.flows] == [(0, [1], 128), (1, [2], 128)]


def test_a_tensor_read_in_many_pieces_is_one_flow() -> None:
    class Net(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.c(self.b(y) + y) + y

    flows = bp.record(Net(), torch.zeros(4, 8)).flows
    assert [(f.made, f.read) for f in flows] == [(0, [1, 2]), (1, [2])]


def test_arguments_know_the_calls_they_came_from() -> None:
    """Through glue, too: the sum is ``b``'s and ``a``'s."""
    calls = {call.path: call for call in bp.record(Residual(), torch.zeros(4, 8)).calls}
    came_from = {path: [c.path for c in call.inbound] for path, call in calls.items()}
    assert came_from == {"": [], "a": [], "b": ["a"], "c": ["b", "a"]}


def test_a_container_gives_what_its_last_module_made() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    calls = {call.path: call for call in bp.record(net, torch.zeros(1, 4)).calls}
    assert [c.path for c in calls["1"].inbound] == ["0"]
    assert [c.path for c in calls["0.1"].inbound] == ["0.0"]


@pytest.mark.parametrize("stage", [0, 1])
def test_pieces_add_up_to_the_hops(stage: int) -> None:
    """What pieces cost is what the hops cost, however the model is marked."""
    net = torchvision.models.resnet18()
    net.layer3 = bp.BeginBlock(net.layer3, stage=stage)
    recording = bp.record(net, torch.zeros(2, 3, 64, 64))
    for name in ("operations", "kernels", "flops"):
        of_pieces = sum(getattr(segment, name) for segment in recording.segments)
        assert of_pieces == pytest.approx(sum(getattr(hop, name) for hop in recording.hops)), name
    parts = [Work(), Work(), Work()]
    of_root = [Segment(0, work=work) for work in recording.calls[0].work.values()]
    for whole, those in zip(parts, (recording.segments, recording.hops, of_root), strict=True):
        for part in those:
            whole.add(part.work)
    assert parts[0] == parts[1] == parts[2]
    saved = sum(saved.bytes for saved in recording.saved)
    assert saved == sum(hop.never.bytes - hop.never.shared for hop in recording.hops)
    assert recording.calls[0].saved_bytes == sum(hop.never.bytes for hop in recording.hops)


def test_every_parameter_is_read_in_some_piece() -> None:
    recording = bp.record(torchvision.models.resnet18(), torch.zeros(2, 3, 64, 64))
    read = {name for segment in recording.segments for name in segment.held}
    assert read == {h.name for h in (*recording.parameters, *recording.buffers)}


def test_no_stage_begins_inside_of_a_compiled_module_or_a_recomputed_region() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=False)

    net = Net()
    net.a.compile(backend="eager")
    recording = bp.record(net, torch.zeros(2, 4, requires_grad=True))
    why = {recording.calls[p.calls[-1]].path: p.why_not for p in recording.segments}
    assert why["a.1"] == "it is inside of compiled module a"
    assert "recomputed" in (why["b.1"] or "")


def test_a_nested_block_gives_back_the_outer_mark() -> None:
    """After it, the mark in effect is the outer one again: its line, its name."""

    class Net(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0, name="outer"):
                with bp.Block(stage=1, name="inner"):
                    x = self.a(x)
                return self.c(self.b(x))

    calls = {call.path: call for call in bp.record(Net(), torch.zeros(4, 8)).calls}
    assert [calls[p].mark_name for p in "abc"] == ["inner", "outer", "outer"]
    assert calls["b"].mark is not None
    assert "test_segments.py" in calls["b"].mark
