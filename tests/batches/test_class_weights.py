"""Losses that are means by class weights: the step's numbers are those of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import MicrobatchError
from blockpipe.replicas import Replicas

from ..stage_devices import assert_close, host, is_simulated, stages

WEIGHT = torch.tensor([0.1, 1.0, 5.0, 2.0])


def net(*, log: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    last = [nn.LogSoftmax(1)] if log else []
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), *last).double()
    return bp.begin_blocks(layers, {"2": 1})


def images(log: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1)).double()
    return bp.begin_blocks(layers, {"2": 1})


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.tensor([2, 2, 0, 0, 0, 1, 3, 0, 0, 1, 2])
    return torch.randn(len(y), 8, generator=generator, dtype=torch.float64), y


def pixels() -> tuple[Tensor, Tensor]:
    """Half of the last image is not to count, and nothing of the first one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (6, 4, 4), generator=generator)
    y[0], y[-1, :2] = 255, 255
    return x, y


def probabilities() -> tuple[Tensor, Tensor]:
    x, y = rows()
    return x, nn.functional.one_hot(y, 4).double() * 0.9 + 0.025


def ignored() -> tuple[Tensor, Tensor]:
    """The first micro-batch has no label that counts."""
    x, y = rows()
    y[:3] = -100
    y[5] = -100
    return x, y


CASES: dict[str, tuple[Any, Any, Any]] = {
    "classes": (net, rows, nn.CrossEntropyLoss(WEIGHT)),
    "negative log likelihood": (lambda: net(log=True), rows, nn.NLLLoss(WEIGHT)),
    "ignored": (net, ignored, nn.CrossEntropyLoss(WEIGHT)),
    "smoothed": (net, ignored, nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)),
    "pixels": (images, pixels, nn.CrossEntropyLoss(WEIGHT, ignore_index=255)),
    "probabilities": (net, probabilities, nn.CrossEntropyLoss(WEIGHT)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_whole_batchs_loss_and_gradients(case: str) -> None:
    make, batch, loss_fn = CASES[case]
    loss_fn = type(loss_fn)(
        WEIGHT.double(),
        ignore_index=loss_fn.ignore_index,
        **{"label_smoothing": loss_fn.label_smoothing} if case == "smoothed" else {},
    )
    x, y = batch()
    plain, piped = make(), make()
    expected = loss_fn(plain(x), y)
    expected.backward()
    pipe = bp.Pipeline(piped, devices=stages(2), chunks=4)
    loss = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    assert_close(host(loss), expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = [host(p.grad) for p in piped.parameters()]
    assert_close(gradients, [p.grad for p in plain.parameters()], rtol=1e-10, atol=1e-12)
    if not is_simulated():
        assert pipe.verify(x, target=y, loss_fn=loss_fn).ok


def test_copies_of_a_pipeline_share_by_class_weights_as_well() -> None:
    x, y = ignored()
    plain, copied = net(), net()
    loss_fn = nn.CrossEntropyLoss(WEIGHT.double())
    expected = loss_fn(plain(x), y)
    expected.backward()
    two = Replicas(copied, [stages(4)[:2], stages(4)[2:]], chunks=2)
    for _ in range(2):  # one copy after the other, and both at once
        copied.zero_grad()
        loss = two.forward_backward(x, target=y, loss_fn=loss_fn).loss
    assert_close(host(loss), expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = [host(p.grad) for p in copied.parameters()]
    assert_close(gradients, [p.grad for p in plain.parameters()], rtol=1e-10, atol=1e-12)


def test_a_loss_reduction_of_the_users_comes_first() -> None:
    x, y = rows()
    loss_fn = nn.CrossEntropyLoss(WEIGHT.double())
    pipe = bp.Pipeline(net(), devices=["cpu"] * 2, chunks=2, loss_reduction="sum")
    found = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    parts = [
        loss_fn(net()(rows), labels) for rows, labels in zip(x.split(6), y.split(6), strict=True)
    ]
    assert_close(found, sum(parts).detach(), rtol=1e-12, atol=0)


class Halved(nn.CrossEntropyLoss):
    """A subclass may average over anything."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) / 2


def test_a_hook_when_it_changes_the_targets_has_a_warning_with_the_remedy() -> None:
    """The weights are those of the targets before it; with the remedy the step is the batch's."""
    loss_fn = nn.CrossEntropyLoss(WEIGHT.double())
    loss_fn.register_forward_pre_hook(lambda _, args: (args[0], (args[1] + 1) % 4))
    model, (x, y) = net(), rows()
    wanted = loss_fn(model(x), y).detach()
    pipe = bp.Pipeline(model, devices=stages(2), chunks=3)
    with pytest.warns(UserWarning, match=r"forward hook.*test_class_weights\.py:\d+.*reduction="):
        pipe.forward_backward(x, target=y, loss_fn=loss_fn)
    pipe.loss_reduction = lambda args, kwargs, target: WEIGHT[(target.cpu() + 1) % 4].sum()
    assert_close(pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss, wanted)


class WithDefaults(nn.CrossEntropyLoss):
    """A subclass that averages as torch does."""

    def __init__(self) -> None:
        super().__init__(WEIGHT.double())


def test_a_subclass_with_torchs_forward_is_averaged_by_class_weights() -> None:
    (x, y), loss_fn = rows(), WithDefaults()
    expected = loss_fn(net()(x), y).detach()
    pipe = bp.Pipeline(net(), devices=stages(2), chunks=4)
    found = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    assert_close(host(found), expected, rtol=1e-12, atol=0)


def test_a_hook_when_it_changes_the_loss_has_a_warning() -> None:
    (x, y), loss_fn = rows(), nn.CrossEntropyLoss(WEIGHT.double())
    loss_fn.register_forward_hook(lambda _, args, loss: args[0].square().mean())
    pipe = bp.Pipeline(net(), devices=stages(2), chunks=3)
    with pytest.warns(UserWarning, match=r"has a forward hook.*loss_reduction="):
        pipe.forward_backward(x, target=y, loss_fn=loss_fn)


def _with_forward_of_its_own() -> nn.Module:
    loss_fn = nn.CrossEntropyLoss(WEIGHT.double())
    loss_fn.forward = Halved().forward
    return loss_fn


@pytest.mark.parametrize("make", [lambda: Halved(WEIGHT.double()), _with_forward_of_its_own])
def test_other_forwards_are_averaged_over_samples(make: Callable[[], nn.Module]) -> None:
    x, y = rows()
    loss_fn = make()
    pipe = bp.Pipeline(net(), devices=["cpu"] * 2, chunks=4)
    found = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    assert_close(found, loss_fn(net()(x), y).detach(), rtol=1e-12, atol=0)


def test_errors_are_the_losss_own() -> None:
    """A class that is not there is refused by the loss; a batch without labels that count, by the
    pipeline, where the plain loss is no number."""
    x, y = rows()
    loss_fn = nn.CrossEntropyLoss(WEIGHT.double())
    pipe = bp.Pipeline(net(), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        pipe.forward_backward(
            x, target=y.clone().fill_(7).index_fill(0, torch.tensor([0]), 1), loss_fn=loss_fn
        )
    with pytest.raises(MicrobatchError, match="not all 0"):
        pipe.forward_backward(x, target=torch.full_like(y, -100), loss_fn=loss_fn)
