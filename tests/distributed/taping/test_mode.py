"""What a tape holds of the code between modules, and what is refused."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.distributed import build_stage

from ..chains import assert_like_plain
from ..models import Glue


def _random(_: Any, h: Tensor) -> Tensor:
    import random

    return h * random.random()


def _counts(net: Any, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return h


def _keeps(net: Any, h: Tensor) -> Tensor:
    net.kept = h * 2
    return h


def _reads_what_it_kept(net: Any, h: Tensor) -> Tensor:
    net.sum = getattr(net, "sum", None)
    net.sum = h.detach() if net.sum is None else net.sum + h.detach()
    return h + net.sum


_ONES = np.ones(4, dtype=np.float32)
_LOG: list[Tensor] = []
_MEANS = {"mean": torch.zeros(4)}
_FACTORS = itertools.cycle([1.0, 2.0])


class Square(torch.autograd.Function):
    """A user's function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


_square = Square.apply


def _squares(_: Any, h: Tensor) -> Tensor:
    return _square(h)


class Doubles(TorchDispatchMode):
    """Doubles each hyperbolic tangent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


def _doubles(_: Any, h: Tensor) -> Tensor:
    with Doubles():
        return h.tanh()


def _rounds(_: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return h.tanh() * h


def _seeds(_: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.rand(4)


def _forks(_: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return h + torch.rand(4)


def _asks_microbatch(_: Any, h: Tensor) -> Tensor:
    return h * (1 + (bp.current_microbatch() or 0))


def _collects(_: Any, h: Tensor) -> Tensor:
    _LOG.append(h.detach())
    return h


def _averages(_: Any, h: Tensor) -> Tensor:
    _MEANS["mean"] = _MEANS["mean"] * 0.5 + h.detach().mean(0)
    return h + _MEANS["mean"]


def _advances(_: Any, h: Tensor) -> Tensor:
    return h * next(_FACTORS)


def _switches(net: Any, h: Tensor) -> Tensor:
    net.second.is_on = True
    h = net.second(h)
    net.second.is_on = False
    return h


def _checkpoints(net: Any, h: Tensor) -> Any:
    return checkpoint(net.second, h.requires_grad_(), use_reentrant=True)


class Transforms(nn.Module):
    """Has torch.func between its modules."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        with bp.Block(1):
            if self.calls:
                others = {"weight": torch.ones(4, 4)}
                made: Tensor = torch.func.functional_call(self.second, others, h)
                return made
            return torch.vmap(torch.sin)(self.second(h).detach())


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        (True, "with parameters of their own.* got torch.func.functional_call between"),
        (False, r"that no operation returned \(as what torch.vmap"),
    ],
)
def test_a_transform_between_modules_is_refused_with_its_name(calls: bool, what: str) -> None:
    """A stage calls modules with their own parameters, and sees no operation of a transform."""
    with pytest.raises(bp.BlockpipeError, match=what):
        build_stage(Transforms(calls=calls), 0, torch.randn(3, 4))


def test_a_tensor_that_the_glue_keeps_is_kept_by_each_run():
    """In the place of an earlier one: whether there was one must not make a difference."""
    net, x = Glue(_keeps), torch.randn(3, 4)
    with torch.no_grad():
        net(torch.randn(1, 4))
    first, _ = assert_like_plain(net, x)
    for given in (x, 2 * x):
        assert torch.equal(first(given)[0] * 2, net.kept)


def _asks_what_it_kept(net: Any, h: Tensor) -> Tensor:
    net.sum = h * getattr(net, "sum", h).shape[0]
    return h + net.sum


@pytest.mark.parametrize("between", [_reads_what_it_kept, _asks_what_it_kept])
def test_a_tensor_that_the_glue_keeps_and_reads_again_is_refused(between: Any):
    """It would go from one micro-batch to the next."""
    net, x = Glue(between), torch.randn(3, 4)
    net(x)  # the tensor is there
    with pytest.raises(bp.BlockpipeError, match="leaves nothing behind .* sets 'sum'") as caught:
        build_stage(net, 0, x)
    line = between.__code__.co_firstlineno + 1
    assert f"test_mode.py:{line})" in str(caught.value)  # where it is set


@pytest.mark.parametrize(
    ("between", "what"),
    [
        (lambda _, h: h * 2 if h.sum() > 0 else h, "a tensor's value"),
        (lambda _, h: h * h.max().item(), "a tensor's value"),
        (lambda _, h: h + torch.as_tensor(h.detach().numpy() * 2), "a tensor's value"),
        (lambda _, h: h + h[h > 0].shape[0], "a size that depends on data"),
        (
            lambda net, h: h + net.second(h[h > 0].view(-1, 1) + h[0]).shape[0],
            "a size that depends",
        ),
        (lambda _, h: h * torch.rand(()).item(), "a tensor's value"),
        (lambda _, h: h * float(f"{h[0, 0]:.3f}"), "a tensor's value"),
        (_random, "a random number of Python's"),
        (lambda _, h: nn.Linear(4, 4)(h), "a new parameter"),
        (_seeds, "a seed, or a state of torch's generator"),
        (_forks, "a seed, or a state of torch's generator"),
        (_squares, r"by Square.apply\(…\), got one whose apply was kept under another name"),
        (_asks_microbatch, r"a call of current_microbatch\(\)"),
        (_doubles, "got the mode Doubles around it"),
        (_rounds, "got saved-tensor hooks _rounds.* around it"),
        (
            _collects,
            "sets nothing but its own variables, .* got one that sets a list .* once before",
        ),
        (_averages, "got one that sets entry 'mean' of a dict"),
        (_advances, "got one that sets"),
        (_switches, r"got one that sets second\.is_on"),
        (
            _counts,
            "leaves nothing behind between modules, got one that sets 'calls' .* once before",
        ),
        (_checkpoints, "got Linear .* call it there, and recompute it by"),
        (lambda _, h: h * torch.tensor(_ONES), "got ndarray .* register it as a buffer"),
        (_keeps, "sets 'kept' of 'the model'.*call the model once before"),
        (lambda _, h: h + torch.autograd.grad(h.sum(), h)[0], "a backward inside of the forward"),
    ],
)
def test_glue_that_cannot_be_replayed_is_refused(between: Any, what: str) -> None:
    """With the line, where there is one."""
    with pytest.raises(bp.BlockpipeError, match=what) as caught:
        build_stage(Glue(between), 0, torch.randn(3, 4))
    assert "test_mode.py:" in str(caught.value)


class Once(nn.Module):
    """A hook of the first layer removes itself, as one that initializes by data."""

    def __init__(self, *, is_pre: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        adds = self.first.register_forward_pre_hook if is_pre else self.first.register_forward_hook
        self.handle = adds(self.initialize)

    def initialize(self, layer: nn.Module, *_: object) -> None:
        with torch.no_grad():
            layer.weight.div_(2)
        self.handle.remove()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            return self.second(h)


@pytest.mark.parametrize("is_pre", [True, False])
def test_a_hook_that_removes_itself_is_refused(*, is_pre: bool) -> None:
    """A stage ran it in each micro-batch of each step."""
    net, x = Once(is_pre=is_pre), torch.randn(3, 4)
    with pytest.raises(
        bp.BlockpipeError, match=r"removes a hook of 'first' .*once before"
    ) as caught:
        build_stage(net, 0, x)
    assert "test_mode.py:" in str(caught.value)
    net(x)
    assert_like_plain(net, x)


def test_one_inside_of_a_module_on_one_stage_runs_as_it_is() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(3, 4)
    net = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Linear(4, 4))

    def halve(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        handle.remove()
        return (args[0] / 2,)

    handle = layer.register_forward_pre_hook(halve)
    stage = build_stage(bp.begin_blocks(net, {"1": 1}), 0, x)
    for given in (x / 2, x):
        [found] = stage(x)
        torch.testing.assert_close(found, nn.functional.linear(given, *layer.parameters()).tanh())


class Keeps(nn.Linear):
    """Sets plain values: one in each call, and one that all calls agree about."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.rows = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rows is None:
            self.rows = x.shape[0]
        return super().forward(x)


class Reads(nn.Module):
    """Multiplies by what a module has set."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second, self.name = nn.Linear(4, 4), Keeps(), name

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            h = self.first(x)
        with bp.Block(1):
            h = self.second(h)
            return h * (self.second.calls if self.name == "calls" else self.second.rows)


def test_a_value_that_a_module_sets_and_code_between_modules_reads_is_refused_when_it_changes():
    """Each forward has another one there, and the tape one of them."""
    x = torch.randn(3, 4)
    with pytest.raises(bp.BlockpipeError, match=r"reads what a module changes: second\.calls"):
        build_stage(Reads("calls"), 0, x)
    assert_like_plain(Reads("rows"), x)
