"""What changes between a pipeline's forward and a backward that recomputes activations."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients
from ...stage_devices import stages


class Scales(nn.Module):
    """Asks for its mode, and has a bias, which no backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)).tanh()) * (3.0 if self.training else 1.0)


def _pipe(checkpoint: str, **options: object) -> tuple[bp.Pipeline, nn.Sequential]:
    net = bp.begin_blocks(nn.Sequential(Scales(), Scales()), {"1": 1})
    return bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint=checkpoint, **options), net


def _writes_a_weight(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[1].a.weight.mul_(2.0)


def _writes_a_bias(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[0].a.bias.add_(2.0)


def _loads(net: nn.Sequential) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})


def _swaps(net: nn.Sequential) -> None:
    net[1].a.weight.data = 2.0 * net[1].a.weight.data


def _replaces(net: nn.Sequential) -> None:
    net[1].b.weight = nn.Parameter(2.0 * net[1].b.weight.detach())


CHANGES = {
    "data": (_swaps, "'1.a.weight' was written to between"),
    "replaced": (_replaces, "'1.b.weight' was replaced between"),
    "weight": (_writes_a_weight, "'1.a.weight' was written to between"),
    "bias": (_writes_a_bias, "'0.a.bias' was written to between"),
    "state": (_loads, "was written to between"),
    "mode": (lambda net: net.eval(), r"was set to eval\(\) between"),
    "mode of a part": (lambda net: net[1].norm.eval(), r"'1.norm' was set to eval\(\) between"),
}


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_when_the_backward_recomputes_is_refused(change: str, warm: int) -> None:
    """The first step told of other numbers; from the second one on, they were taken silently."""
    does, message = CHANGES[change]
    pipe, net = _pipe("always")
    x = torch.randn(4, 4)
    for _ in range(warm):
        pipe(x).sum().backward()
    output = pipe(x)
    does(net)
    with pytest.raises(StateError, match=message):
        output.sum().backward()
    net.train()
    pipe(x).sum().backward()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_change_when_activations_are_kept_is_fine(checkpoint: str) -> None:
    """A mode, and a bias, are nothing that a backward reads."""
    pipe, net = _pipe(checkpoint)
    x = torch.randn(4, 4)
    if checkpoint == "except_last":
        pipe.chunks = 1  # the last one
    kept = pipe(x)
    kept.sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    output = pipe(x)
    net.eval()
    _writes_a_bias(net)
    output.sum().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_two_forwards_before_their_backwards_recompute() -> None:
    """Running statistics, which forwards write, are no reason to refuse."""
    pipe, net = _pipe("always")
    one, other = pipe(torch.randn(4, 4)), pipe(torch.randn(4, 4))
    (one.sum() + other.sum()).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


TABLE = {"k": 1.0}


class Reads(nn.Module):
    """Reads values of several kinds in a call that is recomputed, and one around it."""

    def __init__(self, reads: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.up, self.down, self.reads = nn.Linear(4, 8), nn.Linear(8, 4), reads
        self.scale, self.plain, self.other = 1.0, torch.ones(()), 1.0
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) * self.reads(self)).tanh().exp())


class Around(nn.Module):
    def __init__(self, reads: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.inner, self.last, self.scale = Reads(reads), nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bp.Block(stage=0):
            h = self.inner(x) * self.scale
        with bp.Block(stage=1):
            return self.last(h)


def _set(name: str) -> Callable[[Around], None]:
    return lambda net: setattr(net.inner, name, 2.0)


def _add(name: str) -> Callable[[Around], None]:
    return lambda net: getattr(net.inner, name).add_(1)


READS: dict[str, tuple[Any, Callable[[Around], None], str]] = {
    "attribute": (lambda m: m.scale, _set("scale"), r"inner\.scale was set"),
    "entry": (lambda m: TABLE["k"], lambda net: TABLE.update(k=2.0), "entry 'k' of a dict was set"),
    "buffer": (lambda m: m.mean, _add("mean"), r"'inner\.mean' was written to"),
    "tensor": (lambda m: m.plain, _add("plain"), r"no module registered .* was written to"),
}


@pytest.mark.every
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("kind", READS)
def test_so_is_a_value_that_a_recomputed_call_reads(kind: str, warm: int) -> None:
    """From the second step on, the numbers were others, once."""
    reads, change, message = READS[kind]
    TABLE["k"] = 1.0
    net = Around(reads)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    x = torch.randn(4, 4)
    for _ in range(warm):
        pipe(x).sum().backward()
    assert pipe.recording is None or pipe.recording.recomputable["inner"].is_recomputed
    output = pipe(x)
    change(net)
    with pytest.raises(StateError, match=f"{message} between"):
        output.sum().backward()


def test_what_only_others_read_may_be_set() -> None:
    """By code around what is recomputed, and by nobody."""
    net = Around(READS["attribute"][0])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    x = torch.randn(4, 4)
    for step in range(3):
        output, expected = pipe(x), plain(x)
        for one in (net, plain):
            one.scale, one.inner.other = 2.0 + step, 3.0
        output.sum().backward()
        expected.sum().backward()
    assert_same_gradients(net, plain)
