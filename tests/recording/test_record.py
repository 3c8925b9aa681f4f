"""The recording: what it sees, and that the model does not notice."""

import copy

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import IsolationError, RecordingError
from blockpipe.testing import dry_run


class Tied(nn.Module):
    """An embedding whose weight is the output projection's, a buffer, an unused parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(8))
        self.calls = 0
        self.cache = {}

    def forward(self, ids):
        self.calls += 1
        x = self.embed(ids)
        self.cache["x"] = x
        with bp.Block(1, name="top"):
            return self.head(self.body(x) * self.scale)


def test_what_a_recording_holds():
    """Route, calls, tied and unused parameters, crossings with bytes, lines of the user's."""
    recording = bp.record(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert recording.route == [0, 1]
    assert [c.path for c in recording.calls] == ["", "embed", "body", "body.0", "body.1", "head"]
    (tied,) = recording.tied
    assert tied.names == ["embed.weight", "head.weight"]
    assert (tied.stage, tied.also_read_on, tied.bytes) == (0, [1], 11 * 8 * 4)
    assert [p.name for p in recording.unused] == ["unused"]
    assert [(c.shape, c.bytes, c.what) for c in recording.crossings] == [
        ((2, 3, 8), 192, None),
        ((11, 8), 352, "embed.weight"),
    ]
    assert "test_record.py:" in recording.crossings[0].where
    assert recording.hops[1].name == "top"
    assert "test_record.py:" in recording.hops[1].where
    assert recording.sealed["body"] == {1}
    assert "head" not in recording.sealed  # it reads stage 0's weight
    assert recording.unmarked[0].stage == 0


def test_a_recording_leaves_no_trace():
    """Attributes, caches, buffers and random states are as before; nothing fake stays."""
    net = Tied()
    state, random_state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    bp.record(net, torch.zeros(2, 3, dtype=torch.long))
    assert (net.calls, net.cache) == (0, {})
    assert net.head.weight is net.embed.weight
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in state.items())
    assert "forward" not in net.__dict__


def test_buffers_of_a_real_run_are_put_back():
    """A model that reads values runs for real, and its statistics do not move."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout()

        def forward(self, x):
            if x.sum() > 0:
                x = x + 1
            return self.drop(self.norm(x))

    net = Reads()
    random_state = torch.get_rng_state()
    recording = bp.record(net, torch.randn(4, 4))
    assert not recording.fake
    assert "DataDependent" in recording.why_real
    assert net.norm.num_batches_tracked == 0
    assert not bp.record(net, torch.randn(4, 4), fake=False).fake
    torch.set_rng_state(random_state)


def test_a_meta_model_is_recorded():
    """No memory is needed, and any sample will do."""
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(4, 1 << 20), nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 4)
        )
    bp.begin_blocks(net, {"1": 1, "2": 2})
    for device in ("cpu", "meta"):
        recording = bp.record(net, torch.zeros(2, 4, device=device))
        assert recording.route == [0, 1, 2]
    assert recording.parameters[2].bytes == 4 << 40
    assert "4096.0 GiB" in str(recording.summary())


def test_a_sample_that_does_not_fit_is_named_with_its_shapes():
    """The error has the sample's shapes and the forward's own error."""
    with pytest.raises(
        RecordingError, match=r"Linear's forward fails on the sample \(float32\[2, 3\]\)"
    ):
        bp.record(nn.Linear(4, 4), torch.zeros(2, 3))


def test_a_compiled_part_on_one_stage_is_sealed():
    """A compiled module runs as it does today; one that spans stages is refused."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0] = torch.compile(net[0], backend="eager")
    net[1] = bp.BeginBlock(net[1], stage=1)
    x = torch.randn(4, 4)
    assert bp.record(net, x).sealed["0"] == {0}
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    expected = torch.cat([net(x[:2]), net(x[2:])])
    assert torch.equal(pipe(x), expected)
    whole = torch.compile(nn.Sequential(nn.Linear(4, 4), net[1]), backend="eager")
    with pytest.raises(bp.BlockpipeError, match="spans stages"):
        bp.record(nn.Sequential(whole), x)


def test_dry_run_finds_a_missing_device():
    """On the CPU ``torch.ones(4)`` is right; with a device a stage it is not."""

    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            with bp.Block(1):
                return self.b(x) + torch.ones(4)

    net = Forgets()
    with pytest.raises(IsolationError, match=r"cuda:1(,| and) cpu.*test_record\.py:\d+"):
        dry_run(net, torch.zeros(2, 4))
    bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, isolate=True)(torch.zeros(2, 4))


def test_dry_run_follows_tied_parameters_and_skips():
    """Crossings move to their reader's device, parameters too."""
    assert dry_run(Tied(), torch.zeros(2, 3, dtype=torch.long)).route == [0, 1]


def test_the_sanitizer_finds_a_tensor_read_behind_the_door():
    """A sealed module that reads another stage's storage in a way the glue cannot see."""
    shared = torch.ones(4)

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * Hidden.other

        @staticmethod
        def backward(ctx, g):
            return g

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            Hidden.other = h.detach() if bp.current_microbatch() is not None else shared
            with bp.Block(1):
                return Hidden.apply(self.b(h))

    with pytest.raises(IsolationError, match="touches a tensor .* that stage 0 owns"):
        bp.Pipeline(Net(), devices=["cpu"] * 2, chunks=2, isolate=True)(torch.ones(4, 4))


def test_the_summary_adds_up_to_the_model():
    """The printed totals are the model's own."""
    net = Tied()
    recording = bp.record(net, torch.zeros(2, 3, dtype=torch.long))
    text = str(recording.summary(["cpu", "cpu"]))
    total = sum(p.numel() for p in net.parameters())
    assert sum(p.elements for p in recording.parameters) == total
    assert f"{total:,}" in text
    assert "tied: embed.weight = head.weight lives on stage 0" in text
    assert "no call reads unused" in text


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x, lengths):
        with bp.Block(0):
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            h = torch.nested.nested_tensor_from_jagged(self.a(x.flatten(0, 1)), offsets)
        with bp.Block(1):
            return self.b(h).values().square().mean()


@pytest.mark.filterwarnings("ignore")  # torch's own, of nested tensors
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_jagged_tensor_that_crosses(schedule):
    """It is recorded by a real run, and trains on the CPU."""
    net, lengths = Ragged(), torch.full((4,), 3)
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    net(x, lengths).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, schedule=schedule)
    pipe.forward_backward(x, lengths)
    assert not pipe.recording.fake
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)
