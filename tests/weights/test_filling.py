"""Models on the meta device that a function fills."""

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import WeightsError

from ..stage_devices import equal, stages
from .meta_models import Net, fill_scale, on_meta, pipeline, same_state

X = torch.randn(4, 6)


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
