"""Copies and pickles of a model that are made while a recording or a step runs."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import assert_close, stages


def saved(net: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy,
    copy.copy,
    saved,
    lambda net: pickle.loads(pickle.dumps(net)),
]


class OwnState(nn.Linear):
    """A layer that leaves something out of its state."""

    left_out = True

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "left_out"}


class OwnCopy(nn.Linear):
    """A layer that copies its attributes by hand."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnCopy":
        made = OwnCopy.__new__(OwnCopy)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class Net(nn.Module):
    """Two stages of all kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), OwnState(4, 4))
        self.b = nn.Sequential(nn.Linear(4, 4), OwnCopy(4, 4))
        self.a[2].left_out = False

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            x = self.a(x)
        with bp.Block(1):
            return self.b(x)


def assert_users(net: nn.Module) -> None:
    """Nothing of Blockpipe's is in a model."""
    for path, module in net.named_modules():
        ours = {k for k, v in vars(module).items() if type(v).__module__.startswith("blockpipe")}
        assert not ours, path
        assert not vars(module).keys() & {"forward", "__getstate__", "__deepcopy__"}, path


def pipeline(net: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=2, **options)


def step(pipe: bp.Pipeline) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    return pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss


@contextmanager
def in_step(pipe: bp.Pipeline) -> Iterator[None]:
    """What stands around a step."""
    step(pipe)
    (prepared,) = pipe._preparer.known.values()
    with prepared.sealed_forwards, prepared.sealed_forwards.following:
        assert any("forward" in vars(module) for module in pipe.module.modules())
        yield


@pytest.mark.cpu("it is about copies of modules")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_copy_that_is_made_in_a_step_is_the_users(planned: bool, deferred: bool):
    """It has no stand-ins, and a pipeline over it does what one over the model does."""
    net = Net()
    plan = pipeline(net, sample=(torch.ones(4, 4),)).plan if planned else None
    pipe = pipeline(net, plan=plan, deferred_batch_norm=deferred)
    with in_step(pipe):
        made = [way(net) for way in WAYS if way is not copy.copy]
        part = copy.copy(net.a[0])
    assert_users(part)
    net.zero_grad()
    expected = step(pipe)
    for copied in made:
        assert_users(copied)
        assert copied.a[2].left_out
        assert_close(step(pipeline(copied, plan=plan, deferred_batch_norm=deferred)), expected)
    assert_users(net)


@pytest.mark.cpu("it is about copies of modules")
def test_a_copy_that_is_made_in_a_step_has_the_models_own_forward():
    """An attribute in whose place a stand-in is goes into the copy."""
    net = Net()
    net.a[0].forward = doubled
    with in_step(pipeline(net)):
        made = [way(net.a[0]) for way in WAYS]
    assert [layer.forward for layer in made] == [doubled] * len(made)
    assert not any("__getstate__" in vars(layer) for layer in made)


@pytest.mark.cpu("it is about copies of modules")
def test_a_copy_of_a_parametrized_model_that_is_made_in_a_step():
    """Torch gives modules with parametrizations a way of their own to be copied."""
    net = Net()
    net.b = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    pipe = pipeline(net)
    with in_step(pipe):
        made = copy.deepcopy(net)
    assert_users(made)
    assert_close(step(pipeline(made)), step(pipe))


def doubled(x: Tensor) -> Tensor:
    """What a module's own forward does."""
    return x * 2


class Copies(nn.Module):
    """Computes with a copy of a layer, made in the forward."""

    def __init__(self, way: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            x = self.way(self.a)(x) + self.a(x)
        with bp.Block(1):
            return self.b(x)


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy])
def test_a_forward_that_copies_a_layer(way: Callable[[nn.Module], nn.Module]):
    """A copy that the forward makes and calls is plain, in a recording and in steps."""
    net = Copies(way)
    expected = F.mse_loss(net(torch.ones(4, 4)), torch.ones(4, 4))
    pipe = pipeline(net)
    for _ in range(2):
        result = pipe.forward_backward(
            torch.ones(4, 4), target=torch.ones(4, 4), loss_fn=F.mse_loss
        )
        assert_close(result.loss, expected)
    assert_users(net)
