"""Outputs whose memory the next micro-batch writes to, and other memory and sizes that last."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

import blockpipe as bp
from blockpipe.errors import MicrobatchError

from ..stage_devices import assert_close, host, stages

X = torch.arange(64.0).view(16, 4) / 64


class Filled(nn.Module):
    """Fills memory of its own with the output, and returns it."""

    def __init__(self, fill: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.fill = nn.Linear(4, 4), nn.Linear(4, 4), fill
        self.register_buffer("out", torch.zeros(4, 4))
        self.register_buffer("weights", torch.ones(3, 5))
        self.by_size: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        with bp.Block(stage=0):
            x = self.a(x).tanh()
        with bp.Block(stage=1):
            return self.fill(self, self.b(x))


def _buffer(net: Any, out: Tensor) -> Tensor:
    net.out.copy_(out.detach())
    return net.out


def _by_out(net: Any, out: Tensor) -> Tensor:
    return torch.mul(out.detach(), 1.0, out=net.out)


def _view(net: Any, out: Tensor) -> Tensor:
    net.out[: len(out)].copy_(out.detach())
    return net.out[: len(out)]


def _beside(net: Any, out: Tensor) -> dict[str, Tensor]:
    net.out.copy_(out.detach())
    return {"logits": out, "kept": net.out}


def _by_size(net: Any, out: Tensor) -> Tensor:
    if len(out) not in net.by_size:
        net.by_size[len(out)] = torch.empty_like(out)
    return net.by_size[len(out)].copy_(out.detach())


FILLS = [_buffer, _by_out, _view, _beside, _by_size]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_micro_batch_has_its_rows(
    fill: Callable[[Any, Tensor], Any], schedule: str, mode: Any
) -> None:
    net = Filled(fill)
    with torch.no_grad():
        expected = net.b(net.a(X).tanh())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        with mode():
            got = pipe(X)
        for tensor in got.values() if isinstance(got, dict) else (got,):
            assert_close(host(tensor), expected)


def test_outputs_of_a_training_step_have_their_rows() -> None:
    net = Filled(_beside)
    expected = net.b(net.a(X).tanh()).detach()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    result = pipe.forward_backward(
        X, target=X, loss_fn=lambda out, y: mse_loss(out["logits"], y), return_outputs=True
    )
    assert_close(host(result.outputs["kept"]), expected)


def _weights(net: Any, out: Tensor) -> tuple[Tensor, Tensor]:
    net.weights.mul_(0.5)
    return out, net.weights


def test_a_tensor_that_has_no_samples_is_returned_once() -> None:
    net = Filled(_weights)
    with torch.no_grad():
        _, got = bp.Pipeline(net, devices=stages(2), chunks=4)(X)
    assert_close(host(got), torch.full((3, 5), 0.5**4))


class Static(nn.Module):
    """Its second stage computes with numpy, in memory that it has for all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), numpy.zeros((4, 4), "float32")

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
        with bp.Block(stage=1):
            numpy.tanh(x.detach().cpu().numpy(), out=self.out)
            return self.b(torch.as_tensor(self.out).to(x.device))


@pytest.mark.cpu("a recording for real is the host's")
def test_an_array_for_all_micro_batches_is_fine_without_gradients() -> None:
    net = Static()
    with torch.no_grad():
        expected = net.b(net.a(X).tanh())
        assert_close(bp.Pipeline(net, devices=stages(2), chunks=4)(X), expected)


class Resized(nn.Module):
    def __init__(self, size: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.ask = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1), size
        self.size: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.size = self.ask(x)
            x = self.a(x)[..., ::2, ::2]
        with bp.Block(stage=1):
            return interpolate(self.b(x), size=self.size)


class Sides(NamedTuple):
    """The sides of an image."""

    height: int
    width: int


@pytest.mark.parametrize(
    "size",
    [
        lambda x: x.shape[2:],
        lambda x: x.size()[2:],
        lambda x: tuple(x.shape[2:]),
        lambda x: Sides(*x.shape[2:]),
        lambda x: next(frame.shape[-2:] for frame in (x, x[:1])),
    ],
)
def test_a_size_of_torchs_may_be_kept_for_a_later_stage(size: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    net = Resized(size)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for side in (16, 16, 24, 24, 16):
        loss = pipe.forward_backward(
            torch.ones(8, 3, side, side), loss_fn=lambda out: out.square().mean()
        ).loss
        assert loss.isfinite()
    assert tuple(net.size) == (16, 16)


def _scores(net: Any, out: Tensor) -> list[float]:
    net.scores.clear()
    net.scores.extend(row.max().item() for row in out)
    return net.scores  # type: ignore[no-any-return]


def _history(net: Any, out: Tensor) -> tuple[Tensor, list[float]]:
    net.scores.append(1.0)
    return out, net.scores


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_each_micro_batch_has_its_own_list(schedule: str) -> None:
    net = Filled(_scores)
    net.scores = []  # type: ignore[assignment]
    with torch.no_grad():
        expected = [row.max().item() for row in net.b(net.a(X).tanh())]
        dims = {"output": "list"}
        pipe = bp.Pipeline(
            net,
            devices=stages(2),
            chunks=4,
            schedule=schedule,
            batch_dims=dims,  # type: ignore[arg-type]
        )
        assert pipe(X) == pytest.approx(expected)


def test_a_list_that_grows_from_forward_to_forward_cannot_be_joined() -> None:
    net = Filled(_history)
    net.scores = []  # type: ignore[assignment]
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with torch.no_grad(), pytest.raises(MicrobatchError, match="as many members|the same members"):
        pipe(X)


def _array(net: Any, out: Tensor) -> Any:
    net.array[:] = out.detach().cpu().numpy()
    return [net.array]


@pytest.mark.cpu("arrays are the host's")
def test_each_micro_batch_has_its_own_array() -> None:
    net = Filled(_array)
    net.array = numpy.zeros((4, 4), "float32")  # type: ignore[assignment]
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, batch_dims={"output": None})
    with torch.no_grad():
        expected = net.b(net.a(X).tanh()).numpy()
        found = numpy.concatenate([array for (array,) in pipe(X)])
    assert numpy.allclose(found, expected)


class Placed(nn.Module):
    """Keeps for a later stage where, and of which kind, its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.device, self.kind = x.device, x.dtype
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x) + torch.ones(4, device=self.device, dtype=self.kind)


@pytest.mark.cpu("the first stage's device is not the second one's")
def test_a_device_and_a_dtype_may_be_kept_for_a_later_stage() -> None:
    net = Placed()
    with torch.no_grad():
        expected = net.b(net.a(X)) + 1
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
        for _ in range(2):
            assert_close(host(pipe(X)), expected)
