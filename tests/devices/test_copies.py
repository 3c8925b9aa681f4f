"""Copies between devices: when they begin, who waits for them, and what must not be written before.

On the simulated accelerator a missing wait is a race, which fails the test that made it."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.devices.copies import send
from blockpipe.devices.copy_lifetimes import CopySources
from blockpipe.devices.devices import is_asynchronous

from ..models import WITH_INTERLEAVED, square
from ..parameter_sets import each_value, every_pair
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, is_simulated, stages


class ComesBack(nn.Module):
    """Writes on stage 0 to a tensor that stage 1 has copied."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with bp.Block(stage=0):
            a = self.a(x) * 1
        with bp.Block(stage=1):
            b = a.neg() + self.b.bias
        with bp.Block(stage=0):
            a.mul_(2)
            c = a + b
        with bp.Block(stage=1):
            return self.b(c) + a


class Tied(nn.Module):
    """Reads the weight of stage 0 on stages 1 and 2 as well."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x):
        with bp.Block(stage=0):
            x = self.a(x).tanh()
        with bp.Block(stage=1):
            x = self.b(x).tanh()
        with bp.Block(stage=2):
            return self.c(x)


def chain(count: int = 3) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    return bp.begin_blocks(net, {str(i): i for i in range(1, count)})


@each_value(schedule=WITH_INTERLEAVED, checkpoint=["never", "always"])
def test_a_write_on_the_own_stage_waits_for_the_copies(schedule, checkpoint):
    """A forward that comes back to stage 0 writes in place to what stage 1 copies."""
    net = ComesBack()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint=checkpoint)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(3):
        loss = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss).loss
        expected = plain_step(plain, (x,), {}, y, F.mse_loss, 4)
    assert_close(loss, expected)
    assert_same_gradients(net, plain)


@each_value(at=[0, 1, 2, 3], how=["forward_backward", "pipe(x)", "no_grad"])
def test_inputs_may_be_filled_anew_after_the_step(at, how):
    """The caller's batch and target, on whatever device, are the caller's again."""
    net = chain()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    device = stages(4)[at]  # the last one has no stage
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    static_x, static_y = x.to(device, copy=True), y.to(device, copy=True)
    for _ in range(3):
        if how == "forward_backward":
            pipe.forward_backward(static_x, target=static_y, loss_fn=F.mse_loss)
        elif how == "pipe(x)":
            out = pipe(static_x)
            F.mse_loss(out, static_y.to(out.device)).backward()
        else:
            with torch.no_grad():
                out = pipe(static_x)
        static_x.fill_(torch.nan)
        static_y.fill_(torch.nan)
        static_x.copy_(x)
        static_y.copy_(y)
        plain_step(plain, (x,), {}, y, F.mse_loss, 4)
    if how == "no_grad":
        assert_close(out, plain.cpu()(x))
    else:
        assert_same_gradients(net, plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_may_be_written_after_a_forward_without_grad(frozen):
    """What other stages have copied of a tied weight is what it was before the update."""
    net = Tied()
    if frozen:
        net.requires_grad_(False)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    x = torch.randn(12, 8)
    pairs = []
    with torch.no_grad():
        for _ in range(3):
            pairs.append((pipe(x), plain(x)))  # looked at later: a look would wait
            for parameter in (*net.parameters(), *plain.parameters()):
                parameter.mul_(0.5)
    for ours, theirs in pairs:
        assert_close(ours, theirs)


def test_weights_may_be_written_after_a_step():
    """The optimizer's step follows the copies of tied weights."""
    net = Tied()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    ours, theirs = (torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (net, plain))
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(4):
        ours.zero_grad(), theirs.zero_grad()
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, y, F.mse_loss, 4)
        ours.step(), theirs.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_on_the_cpu(at, schedule):
    """What goes to the host and comes from it is copied before its memory is used again."""
    net = chain()
    plain = copy.deepcopy(net)
    devices = stages(3)
    devices[at] = "cpu"
    pipe = bp.Pipeline(net, devices=devices, chunks=6, schedule=schedule)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, y, F.mse_loss, 6)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "no_grad"])
def test_what_has_been_copied_is_let_go(schedule):
    """As soon as nobody copies it or reads the copy, however far the host is ahead: the number of
    micro-batches does not count, on neither side."""
    devices = [torch.device(stage) for stage in stages(2)]
    training = schedule != "no_grad"
    if not is_asynchronous(devices[0]):
        pytest.skip("the CPU's allocator does not count")

    def peaks(chunks: int) -> list[int]:
        net = chain(2).requires_grad_(training)
        options = {"schedule": schedule} if training else {}
        pipe = bp.Pipeline(net, devices=devices, chunks=chunks, **options)
        x = torch.randn(1024 * chunks, 8)
        for _ in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
                torch.accelerator.reset_peak_memory_stats(device)
            simulated.sleep(200_000)  # on the first of them: the host queues the whole step
            if training:
                pipe.forward_backward(x, loss_fn=square)
            else:
                with torch.no_grad():
                    pipe(x)
        stats = map(torch.accelerator.memory_stats, devices)
        return [each["active_bytes.all.peak"] for each in stats]

    from .. import simulated

    torch.accelerator.set_device_index(0)
    few, many = peaks(6), peaks(24)
    if not training:  # the outputs of all are there at the end
        outputs = 1024 * 8 * 4 * 18 * 2
        many[1] -= outputs
    assert all(a < 1.5 * b for a, b in zip(many, few, strict=True)), (few, many)


INSIDE, MET = threading.Lock(), list[str]()


class Alone(nn.Linear):
    """Notes whether another one runs."""

    def forward(self, x):
        if not INSIDE.acquire(blocking=False):
            MET.append("another one")
            return super().forward(x)
        time.sleep(0.002)  # whoever may run now does
        INSIDE.release()
        return super().forward(x).tanh()


class Asks(nn.Module):
    """The glue asks the device for a value on each stage: others may run meanwhile."""

    def __init__(self, *, asks):
        super().__init__()
        self.layers = nn.ModuleList(Alone(8, 8) for _ in range(4))
        self.asks = asks

    def forward(self, x):
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                if self.asks:
                    float(x.detach().sum())
                x = layer(x)
        return x


@pytest.mark.skipif(not is_simulated(), reason="needs an asynchronous device: --simulated")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_forward_code_for_accelerators_runs_in_one_thread_at_a_time(asks, checkpoint):
    """Recomputations too."""
    MET.clear()
    pipe = bp.Pipeline(Asks(asks=asks), devices=stages(4), chunks=8, checkpoint=checkpoint)
    for _ in range(2):
        pipe.forward_backward(torch.randn(16, 8), loss_fn=square)
    assert not MET


def test_a_forward_without_its_backward():
    """Graphs that are dropped free what is still being copied in order."""
    net = chain()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    x = torch.randn(12, 8)
    for _ in range(5):
        out = pipe(x)
        del out
    assert_close(pipe(x).cpu(), copy.deepcopy(net).cpu()(x))


def test_a_failed_step_frees_in_order():
    """A step that fails half-way leaves nothing behind that is still being copied."""
    net = chain()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    x, y = torch.randn(12, 8), torch.randn(12, 8)

    def fails(output, target):
        raise ValueError("no loss today")

    for _ in range(3):
        with pytest.raises(ValueError, match="no loss today"):
            pipe.forward_backward(x, target=y, loss_fn=fails)
    net.zero_grad()
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    plain_step(plain, (x,), {}, y, F.mse_loss, 4)
    assert_same_gradients(net, plain)


def test_a_step_that_fails_on_the_cpu_frees_in_order():
    """Gradients on their way to the host, which nobody comes to wait for."""
    net = chain(2)
    devices = stages(2)
    devices[0] = "cpu"
    pipe = bp.Pipeline(net, devices=devices, chunks=6, schedule="gpipe")
    x = torch.randn(12, 8)
    pipe.forward_backward(x, loss_fn=square)

    def fails(gradient):
        raise ValueError("not this one")

    handle = net[0].weight.register_hook(fails)
    with pytest.raises(ValueError, match="not this one"):
        pipe.forward_backward(x, loss_fn=square)
    handle.remove()
    for _ in range(12):
        torch.ones(2, 8, device=devices[1])


def test_what_is_lent_is_settled_once():
    """An owner's streams wait for the copies of its tensors, and then nothing is kept."""
    device, other = map(torch.device, stages(2))
    lent = CopySources()
    source = torch.ones(4, device=device)
    lent.add("a", send(source, other))
    assert bool(lent) == is_asynchronous(device)
    lent.settle("b")
    lent.settle_on(other)
    assert bool(lent) == is_asynchronous(device)
    lent.settle("a")
    assert not lent
    source.mul_(2)  # a race, unless it was waited for


class Revisits(nn.Module):
    """Reads on a later hop what an earlier hop of the same device was sent."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way

    def forward(self, x, extra):
        first, second, third, last = self.way
        with bp.Block(stage=first):
            h = self.a(x)
        with bp.Block(stage=second):
            y = self.b(h) + extra
        with bp.Block(stage=third):
            y = y * extra
        with bp.Block(stage=last):
            return y + extra + h


@every_pair(
    way=[(0, 1, 0, 0), (0, 1, 2, 0), (0, 1, 1, 0), (0, 1, 1, 1)],
    schedule=["1f1b", "gpipe", "sequential", "interleaved", "uncut"],
    at=[0, 3],
)
def test_what_was_sent_is_there_until_it_was_read_for_the_last_time(way, schedule, at):
    """Without gradients nobody but the forward keeps it; inputs may come from anywhere."""
    net = Revisits(way)
    x, extra = torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad():
        expected = net(x, extra)
    count = max(way) + 1
    for devices in (stages(count), stages(count)[::-1]):
        pipe = bp.Pipeline(copy.deepcopy(net), devices=devices, chunks=4, schedule=schedule)
        there = stages(4)[at]
        for _ in range(3):
            with torch.no_grad():
                assert_close(pipe(x.to(there), extra), expected)
            with torch.inference_mode():
                assert_close(pipe(x, extra.to(there)), expected)


class Keeps(nn.Linear):
    """Reads in each micro-batch what the one before was given, once it is told to."""

    def __init__(self):
        super().__init__(8, 8)
        self.kept = None

    def forward(self, x):
        y = super().forward(x)
        if self.kept is not None:
            y = y + self.kept.pop()
            self.kept.append(x.detach())
        return y


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_that_the_model_keeps_is_there_until_it_lets_go_of_it(grad):
    """After its hop is over, too."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(8, 8), Keeps()), {"1": 1})
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=6)
    x = torch.randn(12, 8)
    with torch.set_grad_enabled(grad):
        pipe(x)
        for module in (net[1], plain[1]):
            module.kept = [torch.zeros(2, 8, device=module.weight.device)]
        for _ in range(3):
            expected = torch.cat([plain(part) for part in x.split(2)])
            assert_close(pipe(x), expected)


@pytest.mark.parametrize("what", ["input", "target"])
@pytest.mark.parametrize("drops", [False, True])
def test_one_device_and_a_batch_on_another(what, drops):
    """A step in one thread lets the caller have its tensors when they were copied, too."""
    net = chain(2)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(1) * 2, chunks=2)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(3):
        given = (x if what == "input" else y).to(stages(4)[3], copy=True)
        args, target = ((given,), y) if what == "input" else ((x,), given)
        pipe.forward_backward(*args, target=target, loss_fn=F.mse_loss)
        if not drops:
            given.fill_(torch.nan)
        del given, args, target
        plain_step(plain, (x,), {}, y, F.mse_loss, 2)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("model_at", [None, 0, 3])
@pytest.mark.parametrize("batch_at", [None, 0, 1])
def test_a_recording_that_runs_for_real_takes_its_batch_from_anywhere(model_at, batch_at):
    """As one on fake tensors does."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h) * (1 + h.detach().mean().item())

    net, x = Reads(), torch.randn(8, 8)
    plain = copy.deepcopy(net)
    where = [None if at is None else stages(4)[at] for at in (model_at, batch_at)]
    pipe = bp.Pipeline(net.to(where[0] or "cpu"), devices=stages(2), chunks=2)
    for _ in range(2):
        pipe.forward_backward(x.to(where[1] or "cpu"), loss_fn=square)
        plain_step(plain, (x,), {}, None, square, 2)
    assert pipe.recording.why_real
    assert_same_gradients(net, plain)
