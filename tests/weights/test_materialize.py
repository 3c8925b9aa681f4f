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

MIB = 2**20
X = torch.randn(4, 6)


class Net(nn.Module):
    """Three stages, a tied weight, buffers of both kinds, a skip."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x):
        h = self.norm(self.a(x))
        with bp.Block(1):
            h = self.b(h) * self.scale
        with bp.Block(2):
            return self.c(h) + x


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


def fill_scale(module):
    """What an ``init=`` does for ``Net``'s buffer."""
    if isinstance(module, Net):
        module.scale.fill_(2.0)


def pipeline(net, **options):
    return bp.Pipeline(net, **{"devices": stages(3), "chunks": 2, **options})


def same_state(one, other):
    """Whether two models hold the same tensors, buffers that are not persistent too."""
    pairs = [dict((*m.named_parameters(), *m.named_buffers())) for m in (one, other)]
    assert pairs[0].keys() == pairs[1].keys()
    return all(equal(pairs[0][name], pairs[1][name]) for name in pairs[0])


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


# --- from a function


@pytest.mark.cpu("devices draw other numbers than the CPU, where models are built")
def test_reset_parameters_gives_what_building_gives():
    """The modules' own, in the order of building: to the bit, after the same seed."""

    def make():
        return nn.Sequential(
            nn.Embedding(5, 6),
            nn.MultiheadAttention(6, 2, batch_first=True),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
        )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = make()

        def forward(self, tokens):
            h = self.parts[0](tokens)
            with bp.Block(1):
                h = self.parts[2](self.parts[1](h, h, h)[0])
                return self.parts[3](h)

    torch.manual_seed(3)
    plain = Model()
    net = on_meta(Model)
    torch.manual_seed(3)
    pipeline(
        net,
        devices=stages(2),
        init="reset_parameters",
        sample=((torch.zeros(4, 2, dtype=torch.long),), {}),
    )
    assert same_state(net, plain)


@pytest.mark.parametrize("way", ["in place", ".data", "another object", ".data ="])
def test_every_way_of_init_to_write_counts(way):
    """In place, through ``.data``, by another parameter, by another storage."""

    def init(module):
        for key, p in module._parameters.items():
            if way == "in place":
                p.fill_(3.0)
            elif way == ".data":
                p.data.fill_(3.0)
            elif way == "another object":
                setattr(module, key, nn.Parameter(torch.full_like(p, 3.0)))
            else:
                p.data = torch.full_like(p, 3.0)

    net = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    bp.begin_blocks(net, {"1": 1})
    before = list(net.parameters())
    pipeline(net, devices=stages(2), init=init, sample=((X,), {}))
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert all((p == 3.0).all() for p in before)


def test_weights_win_over_init():
    """``init`` is called for what a checkpoint lacks, and what it writes over is read again."""
    plain, net, called = Net(), on_meta(), []
    state = plain.state_dict()
    del state["b.bias"]

    def init(module):
        called.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(9.0)

    with pytest.warns(UserWarning, match="lacks\n  'b.bias' .stage 1, float32.6..\nof Net;"):
        pipeline(net, weights=state, init=init, sample=((X,), {}))
    assert called == ["Linear", "Net"]
    assert (net.b.bias == 9.0).all()
    assert equal(net.b.weight, plain.b.weight)


def test_init_is_called_for_what_is_above():
    """A model's function may initialize its children's tensors from a parent that owns none; what
    was loaded below it is read again. The modules' own methods are for their owners alone."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def reset_parameters(self):
            for p in self.parameters():
                p.zero_()

        def forward(self, x):
            return self.b(self.a(x))

    called = []

    def init(module):
        called.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Parent):
            module.a.weight.data = torch.full((6, 6), 3.0)
            module.b.weight = nn.Parameter(torch.full((6, 6), 4.0))

    def make():
        return bp.begin_blocks(nn.Sequential(Parent(), Parent(), nn.Linear(6, 6)), {"1": 1})

    net = on_meta(make)
    kept = net[0].b.weight
    pipeline(net, devices=stages(2), init=init, sample=((X,), {}))
    assert called == ["Linear", "Linear", "Parent"] * 2 + ["Linear", "Sequential"]
    assert (net[0].a.weight == 3.0).all()
    assert (net[0].b.weight == 4.0).all()
    assert net[0].b.weight is kept

    plain, net = make(), on_meta(make)
    state = {n: t for n, t in plain.state_dict().items() if n != "0.a.bias"}
    with pytest.warns(UserWarning, match=r"lacks\n  '0.a.bias'"):
        pipeline(net, devices=stages(2), weights=state, init=init, sample=((X,), {}))
    assert all(equal(net.state_dict()[name], t) for name, t in state.items())

    net = on_meta(make)
    pipeline(net, devices=stages(2), init="reset_parameters", sample=((X,), {}))
    assert net[0].a.weight.any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_hugging_face_model_is_initialized_as_if_built(kind):
    """By its own ``_init_weights``: every tensor has the spread that building gives it."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 32, (4, 8))
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=64, n_layer=8, n_head=4, vocab_size=200, n_positions=32,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        make, sample = (lambda: transformers.GPT2LMHeadModel(config)), {"input_ids": ids}
    else:
        config = transformers.T5Config(
            d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=200
        )
        make = lambda: transformers.T5ForConditionalGeneration(config)  # noqa: E731
        sample = {"input_ids": ids, "decoder_input_ids": ids}
    plain, net = make(), on_meta(make)
    bp.materialize(net, bp.record(net, (), sample), stages(1), init=net._init_weights)
    tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in (plain, net)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, want in tensors[0].items():
        want, got = want.detach().float(), tensors[1][name].detach().float()
        if want.numel() > 100:
            factor = float(got.std() / want.std()) if want.any() else 1 + float(got.abs().max())
            assert 0.8 < factor < 1.25, name
        else:
            assert abs(float(got.mean() - want.mean())) < 0.3, name


@pytest.mark.filterwarnings("ignore:a checkpoint holds every parameter")
def test_what_a_checkpoint_lacks_is_said():
    """With ``init=`` in a warning, once, with stages; not persistent buffers are in none. A model
    that has values was initialized by nobody here: there the gap is an error."""
    state = Net().state_dict()
    less = {n: t for n, t in state.items() if not n.startswith("b.")}

    def init(module):
        fill_scale(module)
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    pipe = pipeline(on_meta(), weights=less, init=init)
    with pytest.warns(UserWarning, match="init= gave them values") as caught:
        pipe(X)
    (said,) = [str(w.message) for w in caught]
    assert "'b.weight' (stage 1" in said
    assert "'b.bias' (stage 1" in said
    assert said.count("stage") == 2
    live = Net()
    with pytest.raises(WeightsError, match="missing: 'b.weight'"):
        pipeline(live, weights=less, init=init, sample=((X,), {}))
    live.a, live.c = on_meta(lambda: nn.Linear(6, 6)), on_meta(lambda: nn.Linear(6, 6))
    with pytest.raises(WeightsError, match="missing: 'b.weight'"):
        pipeline(live, weights=less, init=init, sample=((X,), {}))


def test_an_init_that_replaces_and_fails_leaves_the_objects():
    """The parameters are those from before, on the meta device again."""
    net = on_meta()
    before = dict(net.named_parameters())

    def init(module):
        module.weight = nn.Parameter(torch.ones(6, 6))
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        pipeline(net, init=init, sample=((X,), {}))
    assert all(p is before[name] and p.is_meta for name, p in net.named_parameters())


def test_what_init_leaves_out_is_named():
    """With its stage and the remedy; the model is then on the meta device again."""
    net = on_meta()
    with pytest.raises(WeightsError, match=r"nothing gave any to\n  'scale' \(stage 1") as caught:
        pipeline(net, init="reset_parameters", sample=((X,), {}))
    assert "pass it as init=" in str(caught.value)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))


def test_a_failing_init_leaves_the_model_on_meta():
    """Memory without values must not pass for a model at the next call."""
    net = on_meta()

    def init(module):
        raise KeyError("no")

    pipe = pipeline(net, init=init)
    with pytest.raises(KeyError, match="no") as caught:
        pipe(X)
    assert any("in init= for a Linear" in note for note in caught.value.__notes__)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert net.c.weight is net.a.weight


def test_a_disk_that_fails_where_a_part_had_values(monkeypatch):
    """What was on meta is so again; the rest may be the checkpoint's, and the error says so."""
    net, state = Net(), Net().state_dict()
    net.b = on_meta(lambda: nn.Linear(6, 6))

    def read(source, name, into):
        if name == "b.weight":
            raise OSError("Input/output error")
        into.copy_(state[name])

    monkeypatch.setattr("blockpipe.weights.sources.InMemory.read", read)
    with pytest.raises(OSError, match="Input/output") as caught:
        pipeline(net, weights=state, sample=((X,), {}))
    assert any("now holds a part of the checkpoint" in note for note in caught.value.__notes__)
    assert net.b.weight.is_meta


def test_a_plain_attribute_on_meta_is_named():
    """It is neither parameter nor buffer: nothing can give it values."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.shift = torch.ones(6)

        def forward(self, x):
            return self.a(x)

    with pytest.raises(WeightsError, match="'shift', which is neither a parameter nor a buffer"):
        pipeline(on_meta(Held), devices=stages(1), init="reset_parameters", sample=((X,), {}))


# --- the pipeline's own


def test_a_meta_model_without_weights_or_init_is_refused():
    """A meta model cannot be placed, and the message says what to pass."""
    with pytest.raises(PlanError, match="pass weights=… .a checkpoint. or init=…"):
        pipeline(on_meta(), sample=((X,), {}))


def test_wrong_options_are_refused_before_anything_moves():
    """Before anything moves."""
    with pytest.raises(UsageError, match="has some already"):
        pipeline(Net(), init="reset_parameters")
    with pytest.raises(UsageError, match="or 'reset_parameters', but 'reset' came"):
        pipeline(on_meta(), init="reset")
    net = on_meta()
    recording = bp.record(net, X)
    with pytest.raises(UsageError, match="where values come from; pass weights="):
        bp.materialize(net, recording, stages(3))
    with pytest.raises(UsageError, match="stages are 0..2 of the recording, but 3 came"):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=[3])
    with pytest.raises(UsageError, match=r"stages are a list of some of 0..2, but 1 came"):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=1)
    with pytest.raises(UsageError, match=r"stages are 0..2 of the recording, but True came"):
        bp.materialize(net, recording, stages(3), init=fill_scale, stages=[True])
    with pytest.raises(UsageError, match="weights is a path, but an empty one came"):
        pipeline(net, weights="")
    with pytest.raises(PlanError, match="3 stages|stage 2"):
        bp.materialize(net, recording, stages(2), init=fill_scale)
    other = on_meta(lambda: nn.Sequential(nn.Linear(6, 6)))
    with pytest.raises(UsageError, match="it differs in .*record the model anew"):
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
