"""Activations in host memory. On the CPU the copies are made for these tests alone; streams need a
device, see test_cuda.py."""

import copy
import gc
import types
import weakref

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.crossing import host_stores as storing
from blockpipe.crossing import offload as offloading
from blockpipe.preparation.memory.measured import LiveBytes

from ..models import SCHEDULES, square
from ..parameter_sets import every_pair
from ..parity import difference, plain_step
from ..stage_devices import is_simulated, stages


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        # A view, an activation that saves its result, one that writes in place.
        hidden = self.a(x).view(-1, 4 * x.shape[1]).tanh()
        return x + self.norm(self.b((hidden + 1).sin().relu_()))


def layers():
    return bp.begin_blocks(nn.Sequential(*(Layer() for _ in range(4))), {"1": 1, "3": 2})


@pytest.fixture
def stores(monkeypatch):
    """Offload on the CPU too, tensors of any size; yields what went to the host."""
    made = []
    init = storing.Store.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(weakref.ref(self))

    # Blockpipe's own code, and not the forward's.
    code, names = watched.__code__, {"__name__": storing.__name__, "weakref": weakref}
    watched = types.FunctionType(code, names, closure=watched.__closure__)
    monkeypatch.setattr(offloading, "on_cpu_too", True)
    monkeypatch.setattr(offloading, "SMALLEST", 0)
    monkeypatch.setattr(storing.Store, "__init__", watched)
    return made


@every_pair(
    schedule=SCHEDULES,
    checkpoint=["never", "except_last", "always"],
    isolate=[False, True],
)
def test_gradients_are_those_without(stores, schedule, checkpoint, isolate):
    """To the bit, with recomputation too; every copy is gone after the step."""
    net = layers()
    plain = copy.deepcopy(net)
    x = torch.randn(16, 64)
    pipe = bp.Pipeline(
        net,
        devices=stages(3),
        chunks=4,
        schedule=schedule,
        checkpoint=checkpoint,
        offload=True,
        isolate=isolate,
    )
    gc.collect()
    gc.disable()
    try:
        loss = pipe.forward_backward(x, loss_fn=square).loss
        assert stores
        assert [ref for ref in stores if ref() is not None] == []
    finally:
        gc.enable()
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


def test_only_the_stages_that_are_named(stores):
    """Nothing of the others goes to the host; parameters never do."""
    net = layers()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, offload=[1])
    pipe.forward_backward(torch.randn(16, 64), loss_fn=square)
    per_microbatch = len(stores) / 4
    stores.clear()
    bp.Pipeline(copy.deepcopy(net), devices=stages(3), chunks=4, offload=True).forward_backward(
        torch.randn(16, 64), loss_fn=square
    )
    assert 0.4 < per_microbatch / (len(stores) / 4) < 0.6  # two of the four layers


def test_a_storage_goes_once(stores):
    """Whatever number of nodes saves views of it."""

    class Views(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sin() + y.view(-1).cos().view_as(y) + y.t().exp().t()

    net = nn.Sequential(Views(8, 8), bp.BeginBlock(nn.Linear(8, 8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, offload=[0])
    pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
    # y (for sin and cos), exp's result; the input too where it is not the caller's, but a copy
    assert len(stores) == 2 * (2 + is_simulated())


def test_what_is_away_is_not_on_the_device(stores):
    """While a micro-batch is away, its storages on the stage are free."""
    seen = []
    # Without source: a recording refuses code that reads on one stage what another one notes.
    count = eval("lambda: sum(ref() is not None for ref in seen)", {"seen": seen})

    class Noting(Layer):
        def forward(self, x):
            hidden = self.a(x)
            seen.append(weakref.ref(hidden.untyped_storage()))
            return self.b(hidden.exp().sin())

    class Looks(nn.Linear):
        def forward(self, x):
            alive.append(count())
            return super().forward(x)

    alive = []
    net = nn.Sequential(Noting(8), bp.BeginBlock(Looks(8, 8), stage=1))
    pipe = bp.Pipeline(
        net,
        devices=stages(2),
        chunks=4,
        offload=[0],
        schedule="gpipe",
        sample=(torch.ones(2, 8),),
    )
    seen.clear(), alive.clear()
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    assert max(alive) <= 1  # of the one that is under way


def test_on_the_cpu_nothing_is_done():
    """There is nothing to gain there."""
    net = layers()
    plain = copy.deepcopy(net)
    x = torch.randn(16, 64)
    with LiveBytes() as live:
        pipe = bp.Pipeline(net, devices=stages(3), chunks=4, offload=True)
        loss = pipe.forward_backward(x, loss_fn=square).loss
    assert live.peak
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


def test_the_callers_backward_gets_the_same_gradients(stores):
    """pipe(x), and the caller's own backward."""
    net = layers()
    plain = copy.deepcopy(net)
    x = torch.randn(16, 64)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, offload=True)
    square(pipe(x)).backward()
    expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, expected, expected).gradients < 1e-6
    assert stores
    stores.clear()
    with torch.no_grad():
        pipe(x)
    assert not stores


def test_a_write_behind_autograds_back_is_found(stores):
    """What a gradient needs was written in place on a stage that keeps it: an error, as plain."""

    class Writes(nn.Linear):
        def forward(self, x):
            y = super().forward(x).sin()
            z = y.square()
            y.mul_(2.0)
            return z + y

    net = nn.Sequential(Writes(8, 8), bp.BeginBlock(nn.Linear(8, 8), stage=1))
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(copy.deepcopy(net)(x)).backward()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, offload=[1])
    with pytest.raises(bp.BlockpipeError, match="written in place after it was saved"):
        pipe.forward_backward(x, loss_fn=square)


@pytest.mark.parametrize("wrong", ["all", 3, [0, -1], [True], [0.5]])
def test_what_names_no_stages_is_refused(wrong):
    """Before anything moves."""
    with pytest.raises(ValueError, match=r"expected True, False or a list of stages for offload"):
        bp.Pipeline(layers(), devices=stages(3), chunks=2, offload=wrong)


def test_offload_under_uncut_is_refused():
    """It has no backward of a stage's own."""
    with pytest.raises(TypeError, match="schedule='uncut' has one backward for all stages"):
        bp.Pipeline(layers(), devices=stages(3), chunks=2, offload=True, schedule="uncut")


def test_a_stage_that_is_not_there_is_refused():
    """As soon as the stages are known."""
    pipe = bp.Pipeline(layers(), devices=stages(3), chunks=2, offload=[5])
    with pytest.raises(
        ValueError, match=r"stages from 0 to 2 for offload, got \[5\] \(.*test_offload\.py"
    ):
        pipe.forward_backward(torch.randn(4, 64), loss_fn=square)


def test_torch_func_is_refused(stores):
    """It bears no hooks on what autograd saves: told by name."""

    class Func(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.func.vmap(torch.func.grad(torch.sum))(x)

    net = nn.Sequential(Func(8, 8), bp.BeginBlock(nn.Linear(8, 8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, offload=True)
    with pytest.raises(ValueError, match=r"torch.func does not allow, and \['0'\] use it"):
        pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
