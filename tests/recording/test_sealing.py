"""On which hops a module runs sealed, from its calls alone."""

import copy
import time
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError
from blockpipe.recording.calls import Call
from blockpipe.recording.sealing import sealed_hops

from ..alike import DEVICE
from ..parity import assert_same_gradients, assert_trains_as_plain, plain_step
from ..stage_devices import assert_close, stages


def made(hop=None, last=None, *, sealed=True, parent=None):
    last = hop if last is None else last
    return Call("block", "Linear", 0, 0, "net.py:1", hop, last, sealed, parent)


def hops_of(*calls, with_parameters=()):
    return sealed_hops(calls, 4, {id(call) for call in with_parameters})


def test_a_call_with_parameters_seals_its_own_hop():
    """Its parameters live there."""
    call = made(2)
    assert hops_of(call, with_parameters=[call]) == {2}


def test_calls_without_parameters_seal_every_hop():
    """They may run anywhere."""
    assert hops_of(made(2)) == {0, 1, 2, 3}
    assert hops_of(made(0), made(2)) == {0, 1, 2, 3}


def test_one_call_with_parameters_binds_the_others_to_their_hops():
    """The module has parameters, though not each of its calls reads them."""
    one, other = made(1), made(3)
    assert hops_of(one, other, with_parameters=[other]) == {1, 3}


def test_an_open_call_takes_away_the_hops_that_it_spans():
    """There its inside is looked at, for every call."""
    sealed = made(1)
    assert hops_of(sealed, made(1, 2, sealed=False), with_parameters=[sealed]) == frozenset()
    assert hops_of(made(3), made(1, 2, sealed=False)) == {0, 3}


def test_only_open_calls_seal_nothing():
    """A path without sealed calls has no hop of its own, with parameters or without."""
    assert hops_of(made(1, sealed=False)) == frozenset()


def test_an_open_call_that_did_nothing_spans_the_first_hop():
    """It may be there that it does something in a step."""
    assert hops_of(made(2), made(sealed=False)) == {1, 2, 3}


@pytest.mark.parametrize("hop", [None, 1])
def test_calls_inside_of_sealed_ones_or_without_operations_need_no_forward(hop):
    """A sealed forward in the place of a call that does nothing would make a hop for it."""
    parent = made(1) if hop is not None else None
    assert hops_of(made(hop, parent=parent)) == frozenset()


def test_a_call_inside_of_an_open_one_is_sealed():
    """The parent is looked into, and finds it."""
    assert hops_of(made(1, parent=made(0, 1, sealed=False))) == {0, 1, 2, 3}


def test_ancestors_are_from_the_inside_out():
    """A call itself is none of them."""
    outer = made(0)
    middle = made(0, parent=outer)
    assert [*made(0, parent=middle).ancestors()] == [middle, outer]


@pytest.mark.parametrize("schedule", ["sequential", "1f1b"])
def test_attentions_that_a_model_collects_by_a_context_variable_are_trained(schedule: str):
    """Attack 22: a hook within a sealed layer puts them into a list that such a variable holds, so
    that no object within reach has them; the output does."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "eager"}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(
        bp.begin_blocks(net, {"model.layers.1": 1}), devices=stages(2), chunks=2, schedule=schedule
    )
    ids = torch.randint(0, 64, (4, 8))
    given = {"input_ids": ids, "output_attentions": True, "use_cache": False}
    found = pipe.forward_backward(**given, loss_fn=_of_attentions).loss
    expected = plain_step(
        plain, (), {**given, "input_ids": ids.to(DEVICE)}, None, _of_attentions, 2
    )
    assert_close(found, expected)
    assert_same_gradients(net, plain)


def _of_attentions(output: Any) -> Tensor:
    squares = [attention.square().mean() for attention in output.attentions]
    return torch.stack(squares).sum() + output.logits.square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(weights := self.layer(x).softmax(-1))
        return x * weights


class Collects(nn.Module):
    """Returns what its modules have appended to a list, and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Attends(), Attends()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept: list[Tensor] = []
        with bp.Block(stage=0):
            x = self.a(x, kept)
        with bp.Block(stage=1):
            return self.b(x, kept), kept


def _of_all(output: tuple[Tensor, list[Tensor]]) -> Tensor:
    return output[0].square().mean() + torch.stack(output[1]).square().mean()


@pytest.mark.parametrize("schedule", ["sequential", "1f1b"])
def test_what_only_the_loss_reads_of_a_list_is_trained(schedule: str):
    """Attack 22: it was refused, unless the forward read it as well."""
    net, x = Collects(), torch.randn(8, 4)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    found = pipe.forward_backward(x, loss_fn=_of_all).loss
    assert_close(found, plain_step(plain, (x.to(DEVICE),), {}, None, _of_all, 4))
    assert_same_gradients(net, plain)


class Leaves(nn.Module):
    """Leaves what it has computed, without a gradient path, for the loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.kept: dict[str, Any] = {"load": torch.ones(4)}
        self.register_buffer("aux", torch.ones(4))
        self.load = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).relu()
        load = (h > 0).sum(0) if self.how == "counts" else h.detach().mean(0)
        if self.how == "buffer":
            self.aux = load
        elif self.how == "entry":
            self.kept["load"] = load
        elif self.how == "nested":
            self.kept["layers"] = [(types.SimpleNamespace(load=load),)]
        else:
            self.load = load
        return h

    def left(self) -> Tensor:
        if self.how == "nested":
            return self.kept["layers"][0][0].load
        return {"buffer": self.aux, "entry": self.kept["load"]}.get(self.how, self.load)


class Slow(nn.Linear):
    """The first stage is at a later micro-batch meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("how", ["attribute", "counts", "buffer", "entry", "nested"])
def test_a_loss_that_reads_what_a_sealed_module_has_left_is_refused(how: str, schedule: str):
    """Nobody saw its operations, so that the tensor did not say which micro-batch it was of."""
    net = nn.Sequential(Leaves(how), Slow(4, 4))
    net = bp.begin_blocks(net, {"1": 1})
    first = net[0]

    def loss(output: Tensor) -> Tensor:
        return (output * first.left()).square().mean()

    def train() -> None:
        for _ in range(3):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=loss)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"belongs to micro-batch \d of this step|reads it"):
        train()


def test_a_compiled_module_that_leaves_a_tensor_for_the_loss_says_so() -> None:
    """The error said that it spans stages, and named one."""
    net = nn.Sequential(Leaves("attribute"), nn.Linear(4, 4))
    first, net[0] = net[0], torch.compile(net[0], backend="eager")
    pipe = bp.Pipeline(bp.begin_blocks(net, {"1": 1}), devices=stages(2), chunks=2)
    with pytest.raises(CrossingError, match=r"'0' has to be looked into: it leaves a tensor"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=lambda y: (y * first.load).mean())


class Picks(nn.Module):
    """Runs one layer of several, or a weight out of a list."""

    def __init__(self, layers: nn.ModuleList, weights: list[Tensor]) -> None:
        super().__init__()
        self.layers, self.weights = layers, weights

    def forward(self, h: Tensor, which: int) -> Tensor:
        if self.weights:
            return h @ self.weights[which]
        return self.layers[which](h)


class Pool(nn.Module):
    """The second stage has a layer of its own, and for wild data the first one's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        weights = [layer.weight for layer in layers] if kind == "weights" else []
        self.first, self.second = layers[0], Picks(layers, weights)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor) -> Tensor:
        which = int(x.max() < 50)
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            return self.second(h, which)


@pytest.mark.parametrize("kind", ["layers", "weights"])
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_a_module_with_a_layer_of_another_stage_is_looked_into(kind: str, schedule: str):
    """Data may choose it: the hook has run once for each stage, on a part of the gradient."""
    net, plain = Pool(kind), Pool(kind)  # a copy would have no hooks
    plain.load_state_dict(net.state_dict())
    _trains_alike(net, plain, schedule)


def _trains_alike(net: nn.Module, plain: nn.Module, schedule: str) -> None:
    """The data of one micro-batch are wild in the third step."""
    x = torch.randn(8, 4)
    wild = x.clone()
    wild[4] += 100
    assert_trains_as_plain(net, plain, [x, x, wild], x, 3, schedule)


class Chosen(nn.Module):
    """Reads one of the tensors that an object has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor, kept: types.SimpleNamespace, which: int) -> Tensor:
        return self.linear(h) + kept.states[which]


class Kept:
    pass


class Carries(nn.Module):
    """A module of the second stage is given an object with a state of each; data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.b, self.chosen = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), Chosen()

    def forward(self, x: Tensor) -> Tensor:
        kept = Kept()
        with bp.Block(stage=0):
            first = x + self.offset
            first.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        with bp.Block(stage=1):
            second = self.b(first * 2)
            kept.states = [second, first]
            return self.chosen(second, kept, int(x.max() > 50))


def test_a_module_that_is_given_an_object_with_another_stages_tensor_is_looked_into():
    """Its graph went straight into the other stage's, and the hook ran twice."""
    net = Carries()
    _trains_alike(net, copy.deepcopy(net), "1f1b")
