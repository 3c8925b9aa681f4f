"""A model on the meta device gets memory and values, stage by stage."""

import copy
import json
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.errors import PlanError, RecordingError, UsageError, WeightsError

from ..stage_devices import assert_close, device_type, equal, stages
from .meta_models import Net, fill_scale, on_meta, pipeline, same_state

MIB = 2**20


X = torch.randn(4, 6)


# --- from a checkpoint


def test_a_meta_model_trains_as_the_plain_one():
    """Recorded, planned, loaded, trained: the gradients of the model that was never on meta."""
    plain = Net()
    net = on_meta()
    pipe = pipeline(net, weights=plain.state_dict(), init=fill_scale)
    loss = pipe.forward_backward(X, loss_fn=torch.sum).loss
    expected = sum(plain(half).sum() for half in X.chunk(2))
    expected.backward()
    for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert_close(got.grad, want.grad / 2, msg=name)
    assert_close(loss, expected.detach() / 2)


def test_parameters_stay_the_same_objects():
    """So an optimizer made on meta trains them; class, attributes, ties, hooks are kept."""

    class Marked(nn.Parameter):
        pass

    net = on_meta()
    net.b.weight = Marked(net.b.weight, requires_grad=False)
    net.b.weight.tag = "kept"
    seen = []
    net.b.bias.register_hook(lambda grad: seen.append("hook"))
    net.b.bias.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    before = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pipe = pipeline(net, weights=Net().state_dict(), init=fill_scale, sample=((X,), {}))
    assert all(before[name] is p for name, p in net.named_parameters())
    assert net.c.weight is net.a.weight
    assert isinstance(net.b.weight, Marked)
    assert (net.b.weight.tag, net.b.weight.requires_grad) == ("kept", False)
    old = net.a.weight.detach().clone()
    pipe.forward_backward(X, loss_fn=torch.sum)
    optimizer.step()
    assert not equal(net.a.weight, old)
    assert seen == ["hook", "post"] * 2


def test_a_weak_reference_and_a_graph_change_nothing():
    """torch's own swap would refuse: still the same object, and references to it are good."""
    net = on_meta()
    parameter = net.a.weight
    reference, view = weakref.ref(parameter), parameter.view(-1)
    pipe = pipeline(net, weights=Net().state_dict(), init=fill_scale)
    pipe.forward_backward(X, loss_fn=torch.sum)
    assert net.a.weight is net.c.weight is parameter is reference()
    assert (parameter.device.type, view.device.type) == (device_type(), "meta")
    assert parameter.grad is not None


@pytest.mark.cpu("the fused cell of an LSTM is CUDA's")
def test_modules_that_keep_lists_of_their_parameters():
    """An LSTM holds its parameters in a list too, and weak references to them."""

    def make():
        return nn.Sequential(nn.LSTM(6, 6, batch_first=True), First(), nn.Linear(6, 6))

    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    plain, net = make(), on_meta(make)
    before = list(net.parameters())
    bp.begin_blocks(net, {"2": 1})
    x = torch.randn(2, 3, 6)
    pipe = pipeline(net, devices=stages(2), weights=plain.state_dict())
    assert_close(pipe(x), plain(x))
    pipe.forward_backward(x, loss_fn=torch.sum)
    assert all(p.grad is not None for p in before)


def test_dtype_and_memory_format_are_the_models():
    """A checkpoint of another floating dtype is cast; strides stay."""

    def make():
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1))

    plain = make()
    net = on_meta(make).to(torch.bfloat16).to(memory_format=torch.channels_last)
    bp.begin_blocks(net, {"1": 1})
    strides = [p.stride() for p in net.parameters()]
    bp.materialize(
        net,
        bp.record(net, torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16)),
        stages(2),
        weights=plain.state_dict(),
    )
    assert [p.stride() for p in net.parameters()] == strides
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        assert equal(got, want.to(torch.bfloat16))


def test_one_name_of_a_tied_tensor_is_enough():
    """Under either name; both together are as ``load_state_dict`` has them: the last wins."""
    state = Net().state_dict()
    for given in ("a.weight", "c.weight"):
        net = on_meta()
        less = {n: t for n, t in state.items() if given == n or n not in ("a.weight", "c.weight")}
        pipeline(net, weights=less, init=fill_scale, sample=((X,), {}))
        assert equal(net.a.weight, state["a.weight"])
    untied = {**state, "c.weight": state["a.weight"] + 1}
    net, plain = on_meta(), Net()
    pipeline(net, weights=untied, init=fill_scale, sample=((X,), {}))
    plain.load_state_dict(untied)
    assert same_state(net, plain)


def test_a_module_registered_twice_is_filled_by_either_name():
    """Its state dict has both names, and so may a checkpoint."""

    def make():
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.Linear(6, 6), layer)

    plain, net = make(), on_meta(make)
    bp.begin_blocks(net, {"1": 1})
    pipeline(net, devices=stages(2), weights=plain.state_dict(), sample=((X,), {}))
    assert same_state(net, plain)
    assert net[0] is net[2]


def test_some_stages_alone_are_filled():
    """One process's share; a tied tensor goes to every stage that reads it."""
    plain, net = Net(), on_meta()
    recording = bp.record(net, X)
    bp.materialize(
        net, recording, stages(3), weights=plain.state_dict(), init=fill_scale, stages=[2]
    )
    there = {name for name, p in net.named_parameters() if not p.is_meta}
    assert there == {"a.weight", "c.bias"}
    assert net.scale.is_meta
    bp.materialize(
        net, recording, stages(3), weights=plain.state_dict(), init=fill_scale, stages=[0, 1]
    )
    assert same_state(net, plain)


def test_weights_of_a_model_that_has_values():
    """They are loaded where its tensors are, at once, once."""
    plain, net = Net(), Net()
    pipe = pipeline(net, weights=plain.state_dict())
    assert same_state(net, plain)
    pipe(X)
    with torch.no_grad():
        net.a.weight.zero_()
    pipe.unplace()
    pipe(X)
    assert not net.a.weight.any()


def test_misfits_are_all_named_and_nothing_changes():
    """Missing, unexpected and wrong-shaped tensors, with stages and both shapes, in one error."""
    state = Net().state_dict()
    del state["b.bias"]
    state["c.bias"] = torch.zeros(7)
    state["b.extra"] = torch.zeros(3)
    for net in (on_meta(), Net()):
        before = {
            n: (id(t), t.device, t._version) for n, t in net.state_dict(keep_vars=True).items()
        }
        with pytest.raises(WeightsError, match="does not fit") as caught:
            bp.materialize(net, bp.record(net, X), stages(3), weights=state)
        said = str(caught.value)
        assert "missing: 'b.bias' (stage 1), float32[6]\n" in said
        assert "unexpected: 'b.extra' (stage 1), float32[3]\n" in said
        assert "wrong shape: 'c.bias' (stage 2): [6] in the model, [7] in the checkpoint\n" in said
        assert ("'scale' (stage 1), float32[6], not persistent: it needs init=" in said) == (
            net.scale.is_meta
        )
        after = {
            n: (id(t), t.device, t._version) for n, t in net.state_dict(keep_vars=True).items()
        }
        assert after == before


# --- the pipeline's own


def test_a_meta_model_without_weights_or_init_is_refused():
    """A meta model cannot be placed, and the message says what to pass."""
    with pytest.raises(PlanError, match="pass weights=… .a checkpoint. or init=…"):
        pipeline(on_meta(), sample=((X,), {}))


def test_wrong_options_are_refused_before_anything_moves():
    """Before anything moves."""
    with pytest.raises(UsageError, match="has some already"):
        pipeline(Net(), init="reset_parameters")
    with pytest.raises(UsageError, match="'reset_parameters' for init, got 'reset'"):
        pipeline(on_meta(), init="reset")
    net = on_meta()
    recording = bp.record(net, X)
    with pytest.raises(
        UsageError, match=r"expected weights= or init=, got neither .*; pass weights="
    ):
        bp.materialize(net, recording, stages(3))
    with pytest.raises(UsageError, match=r"from 0 to 2, .* for stages, got 3 "):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=[3])
    with pytest.raises(UsageError, match=r"a list of some of 0\.\.2 for stages, got 1 "):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=1)
    with pytest.raises(UsageError, match=r"from 0 to 2, .* for stages, got True "):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=[True])
    with pytest.raises(UsageError, match=r"a path for weights, got '' .*pass '\.'"):
        pipeline(net, weights="")
    with pytest.raises(PlanError, match="3 stages|stage 2"):
        bp.materialize(net, recording, stages(2), init=fill_scale)
    other = on_meta(lambda: nn.Sequential(nn.Linear(6, 6)))
    with pytest.raises(UsageError, match="one that differs in .*record the model anew"):
        bp.materialize(other, recording, stages(3), init=fill_scale)


def test_meta_models_record_as_on_the_cpu():
    """What a forward makes itself, without a device, fits in."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(8, 6)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            h = x + self.places(torch.arange(x.shape[1]))
            with bp.Block(1):
                return self.head(h)

    recording = bp.record(on_meta(Positions), torch.zeros(2, 8, 6))
    assert recording.route == [0, 1]
    assert recording.why_real is None


def test_a_meta_buffer_alone_cannot_run_for_real():
    """A forward that reads values is refused with the reason, as with parameters on meta."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("k", torch.ones(6, device="meta"))

        def forward(self, x):
            x = self.a(x) * self.k
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(RecordingError, match="on the meta device it cannot run for real"):
        bp.record(Half(), X)


def test_parameters_filled_under_inference_mode_can_be_trained():
    """The parameters can be trained afterwards."""
    net = on_meta()
    pipe = pipeline(net, weights=Net().state_dict(), init=fill_scale).eval()
    with torch.inference_mode():
        pipe(X)
    pipe.train().forward_backward(X, loss_fn=torch.sum)
    assert net.a.weight.grad is not None


def test_unplace_leaves_it_where_it_is():
    """There is no going back to the meta device; placed anew it keeps its values."""
    net = on_meta()
    pipe = pipeline(net, weights=Net().state_dict(), init=fill_scale)
    out = pipe.eval()(X)
    assert pipe.unplace() is net
    assert all(p.device.type == device_type() for p in net.parameters())
    assert equal(pipe(X), out)


@pytest.mark.parametrize("placed", [False, True])
def test_copies_of_a_meta_model_get_their_values(placed):
    """Before it is placed, the copy gets its values by itself; after, it has them."""
    plain = Net().eval()
    pipe = pipeline(on_meta(), weights=plain.state_dict(), init=fill_scale).eval()
    if placed:
        pipe(X)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert_close(twin(X), plain(X))
        assert twin.module.c.weight is twin.module.a.weight


def test_what_has_values_keeps_them():
    """What has values keeps them where the function does not write."""
    net = Net()
    head = net.b.weight.detach().clone()
    net.c = on_meta(lambda: nn.Linear(6, 6))
    pipe = pipeline(net, init="reset_parameters")
    pipe.forward_backward(X, loss_fn=F.mse_loss, target=X)
    assert equal(net.b.weight, head)
    assert not net.c.weight.is_meta


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_values_go_straight_to_a_cuda_device(tmp_path):
    """From a file straight to the device, cast on the way; back on the host by the file."""
    plain, net = Net(), on_meta().to(torch.bfloat16)
    bp.Pipeline(plain).save_weights(tmp_path)
    x = X.to(torch.bfloat16)
    pipe = pipeline(net, devices=["cuda"] * 3, weights=tmp_path, init=fill_scale, sample=((x,), {}))
    assert {t.device.type for t in (*net.parameters(), *net.buffers())} == {"cuda"}
    assert equal(net.a.weight.cpu(), plain.a.weight.to(torch.bfloat16))
    pipe.forward_backward(x, loss_fn=torch.sum)
    pipe.save_weights(tmp_path)
    again = bp.Pipeline(Net())
    again.load_weights(tmp_path)
    assert equal(again.module.b.weight, net.b.weight.cpu().float())


# --- memory


def limited(what: str, directory: Path) -> dict:
    """Run ``tests/limited.py``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.limited", what, str(directory)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, limits RLIMIT_DATA")


@pytest.mark.slow
@linux
def test_a_model_twice_the_memory_limit(tmp_path):
    """Recorded, planned and loaded by one process a stage, each under the limit."""
    figures = limited("stages", tmp_path)
    assert figures["parameters"] >= 2 * figures["limit"]
    assert figures["planned"]
    assert all(process["loaded"] for process in figures["processes"])
    largest = max(process["resident"] for process in figures["processes"])
    print(
        f"parameters {figures['parameters'] / MIB:.0f} MiB, limit {figures['limit'] / MIB:.0f} "
        f"MiB, a stage {figures['stage'] / MIB:.0f} MiB, {len(figures['processes'])} stages: "
        f"largest resident set {largest / MIB:.0f} MiB"
    )
    assert largest <= figures["before"] + figures["stage"] + 64 * MIB
    assert max(process["data"] for process in figures["processes"]) <= figures["limit"]
    assert "memory" in figures["whole"]["refused"]  # the limit does limit
    assert not figures["whole"]["loaded"]


@pytest.mark.slow
@linux
def test_no_more_than_one_tensor_twice(tmp_path):
    """From safetensors nothing is held twice, cast or from ``torch.save`` one tensor's worth."""
    figures = limited("peak", tmp_path)
    layer = figures["layer"]
    more = {kind: figures[kind]["more"] for kind in ("same", "half", "net.pt")}
    print({kind: f"{taken / MIB:.0f} MiB" for kind, taken in more.items()})
    assert all(figures[kind]["loaded"] for kind in more)
    assert more["same"] < layer / 2
    assert more["half"] < layer
    assert more["net.pt"] < 2 * layer


@pytest.mark.parametrize("how", ["parameter", "buffer"])
def test_tensors_of_one_memory_on_meta_get_one_each_with_a_warning(how):
    """They were parted without a word; built with values, one sees what is written to the other."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if how == "parameter":
            net[1].weight = nn.Parameter(net[0].weight.data)
        else:
            net[1].register_buffer("frozen", net[0].weight.detach())
    bp.begin_blocks(net, {"1": 1})
    weights = {name: torch.zeros(t.shape) for name, t in net.state_dict().items()}
    with pytest.warns(UserWarning, match=r"'0\.weight' and '1\.(weight|frozen)' have one memory"):
        bp.materialize(net, bp.record(net, torch.zeros(1, 4)), ["cpu"] * 2, weights=weights)
