"""Draws that neither the recording nor the first step has seen."""

import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.preparation import prepared
from blockpipe.replicas import Replicas

from ..stage_devices import stages

LOW, HIGH, Y = -torch.ones(8, 4), torch.ones(8, 4), torch.zeros(8, 3)
STEPS = (LOW, *[HIGH] * 5)


def _dropped(h: Tensor) -> Tensor:
    return F.dropout(h, 0.3)


def _scaled(h: Tensor) -> Tensor:
    return h * random.random()


class Net(nn.Module):
    """The last stage always draws, and one before it where the data say so."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            h = self.b(h)
            if x.sum() > 0:
                h = self.draw(h)
        with bp.Block(stage=2):
            return self.c(self.draw(h))


def _losses(draw: Callable[[Tensor], Tensor], schedule: str) -> list[float]:
    torch.manual_seed(0)
    random.seed(0)
    pipe = bp.Pipeline(Net(draw), devices=stages(3), chunks=4, schedule=schedule)
    run = pipe.forward_backward
    losses = [run(x, target=Y, loss_fn=F.mse_loss).loss.item() for x in STEPS]
    return [*losses, torch.randn(1).item(), random.random()]


@pytest.mark.cpu("whether stages overlap")
@pytest.mark.parametrize("draw", [_dropped, _scaled])
def test_one_by_one_all_schedules_draw_the_same(draw, monkeypatch):
    """Each hop was given the numbers of its micro-batch only if it was known to draw."""
    monkeypatch.setattr(prepared, "SMALL_HOP", float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [_losses(draw, schedule) for schedule in ("sequential", "1f1b", "gpipe")]
    assert results[0] == results[1] == results[2]


@pytest.mark.cpu("whether stages overlap")
@pytest.mark.parametrize("draw", [_dropped, _scaled])
def test_a_late_draw_is_told_and_later_steps_draw_the_same_in_each_run(draw):
    """Attack 19: all later steps went on by timing, and nobody was told."""
    results = []
    for _ in range(3):
        with pytest.warns(UserWarning, match="depended on timing; from the next step on") as seen:
            results.append(_losses(draw, "1f1b"))
        assert sum("depended on timing" in str(each.message) for each in seen) == 1
    for other in results[1:]:  # the second step is the late one
        assert other[0] == results[0][0]
        assert other[2:] == results[0][2:]


class Warm(nn.Linear):
    """Drops after two steps."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(super().forward(x), 0.3 * min((self.calls - 1) // 8, 1))


@pytest.mark.cpu("whether stages overlap")
def test_draws_that_begin_where_no_stage_drew_are_told():
    """Attack 43: what was known to draw was nobody, and so nobody was told."""
    layers = nn.Sequential(Warm(4, 8), Warm(8, 8), Warm(8, 3))
    for stage, layer in enumerate(layers):
        bp.BeginBlock(layer, stage=stage)
    pipe = bp.Pipeline(layers, devices=stages(3), chunks=4)
    [pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss) for _ in range(2)]
    with pytest.warns(UserWarning, match="depended on timing; from the next step on"):
        pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)
    pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)


@pytest.mark.cpu("whether stages overlap")
@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_numbers_of_pythons_and_numpys_that_begin_late_are_told(draw):
    """Attack 48: only torch's generators were compared where no stage had a stream."""

    class Scaled(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (draw() if self.calls > 8 else 1.0)

    layers = nn.Sequential(Scaled(4, 8), Scaled(8, 8), Scaled(8, 3))
    for stage, layer in enumerate(layers):
        bp.BeginBlock(layer, stage=stage)
    pipe = bp.Pipeline(layers, devices=stages(3), chunks=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss) for _ in range(2)]
    with pytest.warns(UserWarning, match="depended on timing; from the next step on"):
        pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)
    pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)


class NowAndThen(nn.Linear):
    """Runs in a checkpoint in each second forward, which draws nothing."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        own = super().forward
        return checkpoint(own, x, use_reentrant=False) if self.calls % 2 == 0 else own(x)


@pytest.mark.cpu("whether stages overlap")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_checkpoint_that_no_recording_has_met_leaves_other_stages_their_numbers(schedule):
    """Attack 49: to run it again sets the generator's state, while another stage drew."""

    def losses(schedule: str) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(NowAndThen(16, 16), nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3)))
        bp.begin_blocks(layers, {"1": 1})
        pipe = bp.Pipeline(layers, devices=stages(2), chunks=8, schedule=schedule)
        x, y = torch.randn(32, 16), torch.randn(32, 3)
        return [
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss).loss.item() for _ in range(4)
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = losses("sequential")
        for _ in range(3):
            assert losses(schedule) == expected


class Slow(Net):
    """Leaves others time between the stretches that draw."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = F.dropout(self.a(x), 0.1)
        with bp.Block(stage=1):
            time.sleep(0.005)
            h = self.b(h)
        with bp.Block(stage=2):
            return self.c(h)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_thread_that_draws_meanwhile_is_told(schedule: str):
    """Attack 21: a step sets the generators, and sets them back: a fifth of the numbers that a
    thread drew for its augmentations had come before."""
    pipe = bp.Pipeline(Slow(_dropped), devices=stages(3), chunks=4, schedule=schedule)
    pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.wait(0.001):
            torch.rand(2)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with pytest.warns(UserWarning, match="another thread"):
            [pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss) for _ in range(10)]
    finally:
        is_over.set()
        thread.join()


class Waits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return super().forward(x)


def test_pipelines_at_the_same_time_are_not_taken_for_draws():
    """Each of two replicas' first steps set the generators, and the other one warned."""
    torch.set_num_threads(4)
    for _ in range(3):
        net = bp.begin_blocks(nn.Sequential(Waits(4, 4), Waits(4, 4)), {"1": 1})
        both = Replicas(net, [stages(2)] * 2, chunks=4)
        for _ in range(4):
            both.forward_backward(torch.randn(16, 4), loss_fn=torch.sum)


def _numpys(seed: int) -> Tensor:
    np.random.seed(seed)
    return torch.as_tensor(np.random.permutation(8)).float()


def _pythons(seed: int) -> Tensor:
    random.seed(seed)
    return torch.tensor([random.random() for _ in range(8)])


def _torchs(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.rand(8)


class Seeding(nn.Module):
    """Each stage has a mask from a fixed seed, as BigBird's layers do in training."""

    def __init__(self, mask: Callable[[int], Tensor], ats: Sequence[int]) -> None:
        super().__init__()
        self.a, self.b, self.mask, self.ats = nn.Linear(4, 8), nn.Linear(8, 3), mask, ats

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            h = h + self.mask(1).to(h.device) if 0 in self.ats else h
        with bp.Block(stage=1):
            return self.b(h + self.mask(2).to(h.device) if 1 in self.ats else h)


DRAWS = {_numpys: np.random.rand, _pythons: random.random, _torchs: lambda: float(torch.rand(()))}


# On accelerators ``torch.manual_seed`` seeds the generators of other stages' devices, too.
@pytest.mark.filterwarnings("ignore:while a step ran, something else than its forwards has drawn")
@pytest.mark.parametrize("mask", DRAWS)
@pytest.mark.parametrize("ats", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "sequential")])
@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices:UserWarning")
def test_a_forward_that_seeds_when_it_leaves_the_generator_where_it_was_leaves_it_there(
    mask: Callable[[int], Tensor], ats: Sequence[int], chunks: int, schedule: str
) -> None:
    """Attack 44: the second step began where the first one had ended, and ended there. Nobody was
    thought to have drawn, and the caller's next numbers were others."""
    draw, net = DRAWS[mask], Seeding(mask, ats)
    mask(0)
    for part in LOW.chunk(chunks):
        net(part)
    want = draw()
    mask(0)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=chunks, schedule=schedule)
    for _ in range(3):
        pipe.forward_backward(LOW, target=Y, loss_fn=F.mse_loss)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        assert draw() == want
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
