"""Recomputation: the same numbers from fewer activations."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe._common.threads.thread_state import waiting_for_device

from ..behaviour.recomputed_models import MODES, Layer, again, layers, step
from ..models import SCHEDULES, square
from ..parameter_sets import every_pair
from ..parity import difference, plain_step
from ..stage_devices import equal, stages


def cubed(output):
    return output.pow(3).mean()


@every_pair(
    mode=MODES,
    schedule=SCHEDULES,
    p=[0.0, 0.4],
    isolate=[False, True],
)
def test_gradients_and_statistics_are_those_without(mode, schedule, p, isolate):
    """For each mode and schedule, with dropout and batch norm, over two steps: to the bit."""
    first = layers(p)
    other = copy.deepcopy(first)
    x = torch.randn(11, 16)
    torch.manual_seed(3)
    _, expected = step(first, x, steps=2, schedule="sequential")
    after = torch.rand(3)
    torch.manual_seed(3)
    _, loss = step(other, x, steps=2, schedule=schedule, checkpoint=mode, isolate=isolate)
    assert difference(other, first, loss, expected).same
    assert equal(torch.rand(3), after)


@pytest.mark.parametrize(("mode", "times"), [("never", 0), ("except_last", 3), ("always", 4)])
def test_how_often_layers_run_again(mode, times):
    """Counted on the micro-batches that there are."""
    net = layers()
    step(net, torch.randn(8, 16), checkpoint=mode)
    assert again(net) == [times] * 5


def test_except_last_counts_the_microbatches_there_are():
    """Two samples make two micro-batches, whatever was asked for; the last is not recomputed."""
    net = layers()
    pipe = bp.Pipeline(net.eval(), devices=stages(3), chunks=4, checkpoint="except_last")
    pipe.forward_backward(torch.randn(2, 16), loss_fn=square)
    assert again(net) == [1] * 5


@pytest.mark.parametrize(
    ("mark", "mode", "times"),
    [(True, "never", [0, 0, 4, 4, 0]), (False, "always", [4, 4, 0, 0, 4])],
)
def test_a_mark_decides_for_its_block(mark, mode, times):
    """checkpoint= of a mark overrides the pipeline's, until the next mark."""
    net = layers(checkpoint=mark)
    plain = copy.deepcopy(net)
    x = torch.randn(8, 16)
    _, loss = step(net, x, checkpoint=mode)
    assert again(net) == times
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


def test_a_mark_holds_to_the_end_of_its_block():
    """With Block too; the inner block's ends with it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(8) for _ in range(4))

        def forward(self, x):
            with bp.Block(0, checkpoint=True):
                x = self.layers[0](x)
                with bp.Block(1, checkpoint=False):
                    x = self.layers[1](x)
                x = self.layers[2](x)
            return self.layers[3](x)

    net = Net()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    assert [sum(layer.calls) for layer in net.layers] == [2, 0, 2, 0]


def test_a_mark_with_a_wrong_checkpoint_is_refused():
    """As soon as it is written."""
    with pytest.raises(
        bp.BlockpipeError, match=r"True, False, or None .*for checkpoint, got 'always'"
    ):
        bp.Block(0, checkpoint="always")


def test_an_unknown_mode_is_refused():
    """With those that there are."""
    with pytest.raises(
        TypeError, match=r"'never', 'except_last', 'always' for checkpoint, got 'sometimes'"
    ):
        bp.Pipeline(layers(), checkpoint="sometimes")


def test_the_schedule_has_the_recomputation_before_its_backward():
    """An R right before each B that needs one, and no other."""
    pipe, _ = step(layers(), torch.randn(8, 16), checkpoint="except_last")
    made = next(iter(pipe._preparer.known.values())).schedule("1f1b", 4)
    lane = [str(action) for action in made.lanes[0]]
    assert lane[:5] == ["F0.0", "F0.1", "F0.2", "R0.0", "B0.0"]
    assert lane[-1] == "B0.3"
    assert "R0.3" not in lane


def test_recomputation_starts_before_the_gradient_arrives():
    """The first stage's is done while the second stage's backward waits for it."""
    recomputed, in_time = threading.Event(), []

    class Watched(Layer):
        def forward(self, x):
            if bp.is_recomputing():
                recomputed.set()
            return super().forward(x)

    class Last(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad and bp.current_microbatch() == 0:
                y.register_hook(self.wait)
            return y

        def wait(self, gradient):
            with waiting_for_device():
                in_time.append(recomputed.wait(20))
            return gradient

    net = nn.Sequential(Watched(8), Last(8, 8))
    net[1] = bp.BeginBlock(net[1], stage=1, checkpoint=False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    assert in_time == [True]


class Spectral(nn.Module):
    """Reads and writes buffers in its forward: by spectral norm, and by an EMA of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("replaced", torch.ones(6))
        self.register_buffer("center", torch.ones(6))

    def forward(self, x):
        self.center = x.detach().mean(0)  # without a look at the last one
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.abs().mean(0))
        self.replaced = self.replaced * 0.5 + x.detach().mean(0)
        return self.down((self.up(self.layer(x) / self.scale) + self.replaced.sum()).tanh())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_buffers_are_as_if_it_ran_once(schedule, mode):
    """Those that are read and written, in place or by assignment, too."""
    net = nn.Sequential(Spectral(), bp.BeginBlock(Spectral(), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint=mode)
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


class Writer(nn.Module):
    """Writes to its input, in place, and saves much."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x, more=None):
        x.relu_()
        y = self.down(self.up(x).tanh().exp().sin())
        return y if more is None else y + more["mask"] + more["scale"]


class Then(nn.Module):
    """Saves much, but not its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(self.up(x.exp()).sin().tanh())


class Writes(nn.Module):
    """Inputs that are written: inside of the module, and by the glue after it."""

    def __init__(self):
        super().__init__()
        self.first, self.writer, self.then = nn.Linear(6, 6), Writer(), Then()

    def forward(self, x, mask):
        with bp.Block(0):
            x = self.first(x)
            more = {"mask": mask, "scale": 2, "nothing": None}
            y = self.writer(x, more=more)
        with bp.Block(1):
            z = self.then(y)
            y.add_(1.0)
            return z * y


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_that_are_written_are_kept(schedule):
    """With integer, missing and no-grad members beside them."""
    net = Writes()
    plain = copy.deepcopy(net)
    x, mask = torch.randn(8, 6), torch.randint(0, 2, (8, 6))
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=4, schedule=schedule, checkpoint="always", isolate=True
    )
    loss = pipe.forward_backward(x, mask, loss_fn=square).loss
    expected = plain_step(plain, (x, mask), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


def test_a_write_that_was_not_recorded_is_an_error():
    """It names the module, and what to do."""

    class Sometimes(Writer):
        writes = bytearray(1)  # whose content nobody compares

        def forward(self, x):
            return super().forward(x if self.writes[0] else x.clone())

    net = nn.Sequential(nn.Linear(6, 6), Sometimes(), bp.BeginBlock(nn.Linear(6, 6), stage=1))
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=2, checkpoint="always", sample=(torch.randn(4, 6),)
    )
    Sometimes.writes[0] = 1
    with pytest.raises(
        bp.BlockpipeError, match=r"written in place by module '1'.*checkpoint=False"
    ):
        pipe.forward_backward(torch.randn(4, 6), loss_fn=square)


def test_what_depends_on_something_else_is_an_error():
    """A module that saves other things when it runs again is named."""

    class Counting(Layer):
        def forward(self, x):
            return super().forward(torch.cat([x, x]) if bp.is_recomputing() else x)[: len(x)]

    net = nn.Sequential(Counting(8), bp.BeginBlock(nn.Linear(8, 8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    with pytest.raises(bp.BlockpipeError, match=r"module '0' on stage 0 saved .*is_recomputing"):
        pipe.forward_backward(torch.randn(4, 8), loss_fn=square)


def test_arguments_that_are_one_tensor_stay_one():
    """Attention asks whether query, key and value are the same object, and computes otherwise."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            with bp.Block(1):
                return self.attention(x, x, x, need_weights=False)[0]

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 5, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always", isolate=True)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


@pytest.mark.cpu("it is the CPU's autocast")
def test_a_recomputation_is_under_the_forwards_autocast():
    """The caller's, and what the forward enters around a call."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(8), Layer(8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                x = self.a(x)
            with bp.Block(1):
                return self.b(x)

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 8)
    for inline in (False, True):
        net.zero_grad(), plain.zero_grad()
        schedule = "sequential" if inline else "1f1b"
        pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always", schedule=schedule)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = pipe.forward_backward(x, loss_fn=square).loss
            plain_loss = torch.zeros(())
            for part in x.chunk(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    one = square(plain(part)) / 2
                with torch.autocast("cpu", enabled=False):
                    one.backward()
                plain_loss += one.detach()
        assert difference(net, plain, loss, plain_loss).same


@bp.BlockFunction(stage=1)
def head(layer, x, factor=1.0):
    """Saves intermediate results; a function as a block."""
    head.calls.append(bp.is_recomputing())
    return F.layer_norm(layer(x).exp().sin().tanh() * factor, (6,))


def test_a_block_function_is_recomputed_as_a_whole():
    """As a module is; its gradients are the plain loop's."""
    head.__wrapped__.calls = head.calls = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return head(self.last, self.first(x), factor=2.0)

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always", isolate=True)
    loss = pipe.forward_backward(x, loss_fn=cubed).loss  # the squares have a constant mean here
    assert sum(head.calls) == 4
    assert list(pipe.recording.sealed_functions.values()) == [frozenset({1})]
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, cubed, 4)).same
