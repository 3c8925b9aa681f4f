"""Numbers on modules that a training loop sets, and by which a forward turns."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.preparation.steering import Steering

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


class Counted(nn.Module):
    """A module of plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.warm_up, self.rate = 0, 3, 0.5


QUESTIONS = [
    lambda m: m.step >= m.warm_up,
    lambda m: m.warm_up <= m.step,
    lambda m: m.step % 3 == 0,
    lambda m: 10 - m.step > 4,
    lambda m: m.step / m.warm_up < 1.5,
    lambda m: min(m.step / 4, 1.0) == 1.0,
    lambda m: not m.step,
    lambda m: 2**m.step > 9,
    lambda m: m.step * 0.5 > 1,
    lambda m: m.step in (2, 4),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_what_was_asked_is_asked_again(ask):
    module = Counted()
    steering = Steering(module)
    module.step = 1
    assert steering.has_turned(())
    with steering.asked():
        ask(module)
    assert type(module.step) is int
    known = steering.answers()
    for step in range(8):
        module.step = step
        assert not steering.has_turned(()), "it is asked about by now"
        turned = ask(module) != ask_at(1, ask)
        assert not turned or steering.answers() != known


def ask_at(step: int, ask) -> bool:
    module = Counted()
    module.step = step
    return bool(ask(module))


def test_what_the_forward_counts_itself_is_nobody_elses_doing():
    module = Counted()
    steering = Steering(module)
    module.step += 1
    assert not steering.has_turned({".step"})


def test_numbers_that_are_asked_are_numbers():
    module = Counted()
    steering = Steering(module)
    module.step, module.rate = 2, 0.25
    assert steering.has_turned(())
    with steering.asked():
        x = torch.ones(2, 6) * module.step + module.rate
        assert x.view(module.step, -1).shape == (2, 6)
        assert torch.equal(x, torch.full((2, 6), 2.25))
        assert [*range(module.step)] == [0, 1]
        assert math.cos(module.rate) == math.cos(0.25)
        assert f"{module.step} {module.rate:.1f}" == "2 0.2"
        assert hash(module.step) == hash(2)
        for made in (copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))):
            assert type(made(module.step)) is int
            assert type(made(module.rate)) is float


class WarmsUp(nn.Module):
    """From a step on that the training loop counts, the second stage does otherwise."""

    def __init__(self, changed) -> None:
        super().__init__()
        self.a, self.b, self.changed, self.step = nn.Linear(4, 4), Late(), changed, 0
        self.b.whole = [self]  # no child of its own

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.changed is not None:
                self.changed(self, h)
        with bp.Block(stage=1):
            return self.b(h)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.register_buffer("ema", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole[0]
        return self.f(x) * (self.ema if whole.step >= 2 else 2.0)


def test_a_forward_that_turns_by_the_loops_count_trains_as_plain():
    net = WarmsUp(None)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    recordings = set()
    for step in range(5):
        net.step = plain.step = step
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        expected = plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
        assert_close(found.loss, expected)
        recordings.add(id(pipe.recording))
    assert_same_gradients(net, plain)
    assert len(pipe._preparer.known) == 2, "one for each answer"


def test_what_another_stage_begins_to_read_by_the_loops_count_is_refused():
    """It was wrong from run to run: the buffer is written on one stage all the time, and read by a
    sealed module of another one from the third step on."""

    def averages(net: WarmsUp, h: Tensor) -> None:
        with torch.no_grad():
            net.b.ema.lerp_(h.std(0), 0.5)

    net = WarmsUp(averages)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for net.step in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
    net.step = 2
    with pytest.raises(StateError, match=r"buffer 'b\.ema' is written by the forward and read on"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def test_a_copied_pipeline_follows_its_own_model():
    pipe = bp.Pipeline(WarmsUp(None), devices=stages(2), chunks=2)
    x = torch.randn(4, 4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    other = copy.deepcopy(pipe)
    other.module.step = 5
    other.module.b.whole = [other.module]
    with torch.no_grad():
        assert_close(other(x), other.module(x) if stages(2)[0] == "cpu" else other(x))
