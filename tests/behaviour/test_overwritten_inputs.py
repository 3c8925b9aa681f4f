"""Inputs that the training loop overwrites between ``pipe(x)`` and its backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients
from ..stage_devices import assert_close, stages

Prepare = Callable[[Tensor], Tensor]

OPTIONS = [
    {},
    {"checkpoint": "always"},
    {"schedule": "sequential"},
    {"schedule": "uncut"},
    {"isolate": True},
]


class Net(nn.Module):
    """Reads its first argument on its first stage and its second one on its last."""

    def __init__(self, prepare: Prepare = lambda x: x) -> None:
        super().__init__()
        self.a, self.b, self.prepare = nn.Linear(4, 4), nn.Linear(4, 4), prepare

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(self.prepare(x)).tanh()
        with bp.Block(stage=1):
            return self.b(h) * weight


def _pipe(net: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(net, devices=[stages(1)[0]] * 2, chunks=3, **options)


def _batch() -> dict[str, Tensor]:
    """A batch that lies where it is read, so that nobody copies it."""
    where = stages(1)[0]
    return {"x": torch.randn(6, 4, device=where), "weight": torch.randn(6, 1, device=where)}


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("name", ["x", "weight"])
def test_an_input_when_it_is_overwritten_before_the_backward_is_torchs_error(
    name: str, options: dict[str, Any]
) -> None:
    """The plain loop raises that error too; here a note names the argument and the remedy."""
    pipe = _pipe(Net(), **options)
    for _ in range(2):
        batch = _batch()
        output = pipe(**batch)
        batch[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as failed:
            output.sum().backward()
        if options.get("schedule") != "uncut":
            notes = "\n".join(failed.value.__notes__)
            assert f"argument '{name}' was written to in place between the forward" in notes
            assert "run the backward before, or pass a copy" in notes


@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_input_that_needs_grad_when_it_is_overwritten_is_torchs_error(needs_grad: bool) -> None:
    """A leaf is overwritten under ``no_grad``; one slice of a larger tensor is an input as well."""
    pipe, batch = _pipe(Net()), _batch()
    batch["x"] = batch["x"].repeat(2, 1)[:6].requires_grad_(needs_grad)
    output = pipe(**batch)
    with torch.no_grad():
        batch["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_input_when_no_backward_needs_it_may_be_overwritten(options: dict[str, Any]) -> None:
    """The first operation saves nothing of it, so the plain loop's gradients come about."""
    net = Net(lambda x: x * 2)
    plain = copy.deepcopy(net)
    pipe, batch = _pipe(net, **options), _batch()
    output = pipe(**batch)
    plain.to(stages(1)[0])(**batch).sum().backward()
    batch["x"].zero_()
    output.sum().backward()
    assert_same_gradients(net, plain)


def test_inputs_when_the_stage_sanitizer_has_copied_them_may_be_overwritten() -> None:
    """Nothing reads the caller's memory behind the forward: neither does it under ``no_grad``."""
    pipe, batch = _pipe(Net(), isolate=True), _batch()
    output = pipe(**batch)
    batch["x"].zero_()
    output.sum().backward()
    with torch.no_grad():
        expected = pipe(**batch)
        batch["x"].add_(1)
    assert_close(expected, pipe(torch.zeros(6, 4), batch["weight"]).detach())


@pytest.mark.parametrize("overwritten", [False, True])
def test_an_input_when_the_forward_writes_to_it_is_an_error_only_for_the_callers_write(
    overwritten: bool,
) -> None:
    """A micro-batch's write to its slice is none to the slices of the others."""
    pipe, batch = _pipe(Net(lambda x: x.mul_(2))), _batch()
    output = pipe(**batch)
    if not overwritten:
        output.sum().backward()
        return
    batch["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_input_of_a_recomputed_call_when_it_is_overwritten_is_an_error() -> None:
    """The call would run again on other values."""
    net = bp.begin_blocks(nn.Sequential(_layers(), _layers()), {"1": 1})
    pipe, x = _pipe(net, checkpoint="always"), _batch()["x"]
    output = pipe(x)
    x.add_(1)
    with pytest.raises(StateError, match="write it after the backward") as failed:
        output.sum().backward()
    assert "argument 0 was written to in place" in "\n".join(failed.value.__notes__)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_an_input_when_a_hook_overwrites_it_within_a_step_is_torchs_error(schedule: str) -> None:
    """The hook runs in the backward of the last stage, and the first stage needs the values."""
    net, batch = Net(), _batch()
    pipe = _pipe(net, schedule=schedule)

    def overwrite(*_: Any) -> None:
        batch["x"].zero_()

    net.b.register_full_backward_hook(overwrite)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe.forward_backward(**batch, loss_fn=torch.sum)
