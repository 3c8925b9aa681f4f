"""What errors advise: the message names it, and with it the model trains as plain."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import PlanError, StateError, UsageError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


def trains_as_plain(net: nn.Module) -> bool:
    """Compare two steps of 1F1B, and what they leave, with the plain loop's."""
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="1f1b")
    for step in range(2):
        inputs, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        pipe.forward_backward(inputs, target=target, loss_fn=F.mse_loss)
        plain_step(plain, (inputs,), {}, target, F.mse_loss, 4)
    assert_same_gradients(net, plain)
    return True


class Remembers(nn.Module):
    """Each of two layers reads what the micro-batch before has left for it."""

    def __init__(self, memory: list[Tensor] | dict[int, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.memory = memory

    def forward(self, value: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                before = self.memory[stage]
                self.memory[stage] = value.detach().mean()
                value = layer(value) + before
        return value


def test_an_element_for_each_layer() -> None:
    """A list is refused; in a dictionary, memories are carried between micro-batches."""
    memory = [torch.zeros(()), torch.zeros(())]
    said = (
        r"changes a list, and sets it on hops \[0, 1\] .*a dictionary with an entry for each layer"
    )
    with pytest.raises(StateError, match=said):
        trains_as_plain(Remembers(memory))
    assert trains_as_plain(Remembers(dict(enumerate(memory))))


class Initialized(nn.Module):
    """The first forward alone sets a scale by its own values, as ActNorm does."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.by_data, self.is_initialized = by_data, False

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            value = self.first(value)
            if not self.is_initialized:
                with torch.no_grad():
                    (self.scale.data if self.by_data else self.scale).copy_(1 / value.std(0))
                self.is_initialized = True
            value = value * self.scale
        with bp.Block(1):
            return self.last(value)


def test_an_initialization_in_the_first_forward() -> None:
    """By ``.data`` it is refused; under ``no_grad``, or before the pipeline, it works."""
    said = r"'scale' on hop 0 .*under torch.no_grad\(\) .*run the plain model once before"
    with pytest.raises(StateError, match=said):
        trains_as_plain(Initialized(by_data=True))
    assert trains_as_plain(Initialized(by_data=False))
    ready = Initialized(by_data=True)
    ready(torch.randn(2, 4))
    assert trains_as_plain(ready)


class DropsLayers(nn.Module):
    """Leaves out layers at random: a marked layer with its mark, or inside of a block."""

    def __init__(self, marks_layers: bool, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.marks_layers, self.rate = marks_layers, rate
        if marks_layers:
            bp.begin_blocks(self, {"layers.1": 1, "layers.2": 2})

    def forward(self, value: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with contextlib.nullcontext() if self.marks_layers else bp.Block(stage):
                if stage != 1 or bool(torch.rand(()) >= self.rate):
                    value = value + layer(value)
        return value


@pytest.mark.filterwarnings("ignore:nothing ran on stage 1")
def test_a_layer_that_is_left_out_at_random() -> None:
    """A gap that it leaves names the mark that was skipped; inside of a block it may be left out,
    and what is drawn does not depend on the schedule."""
    inputs = torch.randn(8, 4)
    left_out = bp.record(DropsLayers(marks_layers=True, rate=1.0), inputs)
    said = r"'layers.1' is marked as stage 1 .*decide inside of a block"
    with pytest.raises(PlanError, match=said):
        left_out.check()
    grads = []
    for schedule in ("sequential", "1f1b"):
        torch.manual_seed(0)
        net = DropsLayers(marks_layers=False, rate=0.5)
        pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule)
        torch.manual_seed(1)
        for _ in range(2):
            pipe.forward_backward(inputs, target=inputs, loss_fn=F.mse_loss)
        grads.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *grads))


class DropsWeights(nn.Module):
    """Computes the first layer's weight in each forward."""

    def __init__(self, keeps_entry: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.raw = nn.Parameter(self.first.weight.detach().clone())
        self.keeps_entry = keeps_entry
        del self.first.weight
        self.compute()

    def compute(self) -> None:
        weight = self.raw * 0.5
        if self.keeps_entry:
            self.first._parameters["weight"] = weight  # type: ignore[assignment]
        else:
            self.first.weight = weight

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            self.compute()
            value = self.first(value)
        with bp.Block(1):
            return self.last(value)


def test_a_weight_that_is_computed_in_the_forward() -> None:
    """As an entry of ``_parameters`` it is refused; as a plain attribute it works."""
    with pytest.raises(
        UsageError, match=r"'first.weight'\] are computed .*\(del m.weight\) and set"
    ):
        bp.Pipeline(DropsWeights(keeps_entry=True), devices=stages(2), chunks=4)(torch.ones(8, 4))
    net = DropsWeights(keeps_entry=False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="1f1b")
    inputs = torch.randn(8, 4)
    pipe.forward_backward(inputs, target=inputs, loss_fn=F.mse_loss)
    grads = [p.grad for p in net.parameters()]
    pipe.unplace()
    net.zero_grad()
    F.mse_loss(net(inputs), inputs).backward()
    assert_close(grads, [p.grad for p in net.parameters()])
