"""Modules that are given other parameters for a while: ``torch.func.functional_call``, also on a
module that the model reaches without having registered it."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import plain_step
from ..stage_devices import assert_close, is_simulated, stages


class Template(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() + x


class ReadsDirectly(Template):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.inner.weight)


Use = Callable[["Layers", int, Tensor], Tensor]


def in_a_list(net: "Layers", index: int, h: Tensor) -> Tensor:
    return functional_call(net.held[0], {"inner.weight": net.weights[index]}, (h,))


def in_an_object(net: "Layers", index: int, h: Tensor) -> Tensor:
    return functional_call(net.box.template, {"inner.weight": net.weights[index] * 2}, (h,))


def of_torchs_class(net: "Layers", index: int, h: Tensor) -> Tensor:
    return functional_call(net.held[0].inner, {"weight": net.weights[index]}, (h,))


def with_its_own_elsewhere(net: "Layers", index: int, h: Tensor) -> Tensor:
    return in_a_list(net, 0, h) if index == 0 else net.held[0](h)


class Layers(nn.Module):
    """A use of one template on each of two stages."""

    def __init__(self, template: Template, use: Use) -> None:
        super().__init__()
        template.requires_grad_(False)
        self.held, self.box, self.use = [template], SimpleNamespace(template=template), use
        self.a = nn.Linear(8, 8)
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.use(self, 0, self.a(x))
        with bp.Block(stage=1):
            return self.use(self, 1, h)


def pipe_of(net: nn.Module, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=4, **options)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("use", [in_a_list, in_an_object, of_torchs_class, with_its_own_elsewhere])
def test_a_template_that_two_stages_call_is_refused_although_nobody_registered_it(use: Use):
    match = r"parameters of a (Template|Linear) for a while.*on hops \[0, 1\] .*a module of its own"
    with pytest.raises(StateError, match=match):
        pipe_of(Layers(Template(), use)).forward_backward(torch.ones(8, 8), loss_fn=loss_of)


@pytest.mark.parametrize("use", [in_a_list, with_its_own_elsewhere])
def test_a_template_whose_parameters_are_read_without_a_call_is_refused(use: Use):
    net = Layers(ReadsDirectly(), use)
    net.template = net.held[0]
    match = r"the parameters of template for a while.*on hops \[0, 1\]"
    with pytest.raises(StateError, match=match):
        pipe_of(net).forward_backward(torch.ones(8, 8), loss_fn=loss_of)


def assigned(net: Layers, index: int, h: Tensor) -> Tensor:
    net.held[0].inner.weight = net.weights[index]
    return net.held[0](h)


def put_into_the_dictionary(net: Layers, index: int, h: Tensor) -> Tensor:
    slots = vars(net.held[0].inner)["_parameters"]
    slots["weight"] = net.weights[index]
    return net.held[0](h)


def lent_on_one_stage(net: Layers, index: int, h: Tensor) -> Tensor:
    slots = vars(net.held[0].inner)["_parameters"]
    own = slots["weight"]
    slots["weight"] = net.weights[0] if index == 0 else own
    h = net.held[0](h)
    slots["weight"] = own
    return h


@pytest.mark.parametrize("use", [assigned, put_into_the_dictionary, lent_on_one_stage])
def test_a_parameter_that_a_stage_replaces_in_a_module_of_nobodys_is_refused(use: Use):
    with pytest.raises(StateError, match=r"attribute 'weight' of a Linear.*a module of its own"):
        pipe_of(Layers(Template(), use)).forward_backward(torch.ones(8, 8), loss_fn=loss_of)


def on_one_stage(net: Layers, index: int, h: Tensor) -> Tensor:
    return in_a_list(net, 0, in_a_list(net, 1, h)) if index == 0 else h * 2


@pytest.mark.parametrize(
    ("use", "schedule"), [(on_one_stage, "1f1b"), (in_a_list, "sequential")], ids=["1f1b", "one"]
)
def test_a_template_of_one_stage_or_one_thread_is_as_in_the_plain_loop(use: Use, schedule: str):
    if is_simulated():
        pytest.skip("a template that nobody registered stays where it is")
    net = Layers(Template(), use)
    plain, own = copy.deepcopy(net), net.held[0].inner.weight
    x = torch.randn(8, 8)
    for _ in range(3):
        loss = pipe_of(net, schedule=schedule).forward_backward(x, loss_fn=loss_of).loss
        assert_close(loss, plain_step(plain, (x,), {}, None, loss_of, 4))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    assert net.held[0].inner.weight is own
