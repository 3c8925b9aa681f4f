"""Calls whose recomputation reads or writes state, or draws random numbers."""

import copy
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.devices import digests
from blockpipe.errors import StateError

from ..models import SCHEDULES, square
from ..parameter_sets import each_value
from ..parity import difference
from ..stage_devices import equal, stages
from .recomputed_models import MODES, Layer, Wide, compared


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_of_others_are_as_if_it_ran_once(schedule):
    """Those that a block function uses itself, and a child's that its parent holds."""

    class Child(Wide):
        def forward(self, x):
            with torch.no_grad():
                self.parent[0].scale.mul_(0.9).add_(x.abs().mean())
            return super().forward(x / self.parent[0].scale)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.child = Wide(), nn.Linear(8, 8), Child()
            self.register_buffer("ema", torch.ones(8))
            self.register_buffer("scale", torch.ones(()))
            self.norm = nn.BatchNorm1d(8)
            self.child.parent = [self]

        @bp.BlockFunction(stage=0)
        def features(self, x):
            with torch.no_grad():
                self.ema.mul_(0.9).add_(x.abs().mean(0))
            x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
            return self.first(x / self.ema)

        def forward(self, x):
            x = self.features(x)
            with bp.Block(1):
                return self.child(self.second(x))

    exact, pipe = compared(Net(), torch.randn(16, 8), schedule)
    assert exact
    assert all(about.pays for path, about in pipe.recording.recomputable.items() if "feat" in path)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_call_reads_besides_its_arguments_stays(schedule):
    """A tensor that the glue puts on the module is another one when the call would run again."""

    class Masked(Wide):
        def forward(self, x):
            return super().forward(x * self.mask)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.masked, self.last = Masked(), nn.Linear(8, 8)

        def forward(self, x):
            self.masked.mask = (x > 0).float()
            x = self.masked(x)
            self.masked.mask = None
            with bp.Block(1):
                return self.last(x)

    exact, pipe = compared(Net(), torch.randn(16, 8), schedule)
    assert exact
    assert "not given" in pipe.recording.recomputable["masked"].refuses


class Attribute(Wide):
    def __init__(self):
        super().__init__()
        self.seen = torch.ones(8)  # no buffer

    def forward(self, x, _):
        self.seen.mul_(0.9).add_(x.detach().abs().mean(0).to(self.seen.device))
        return super().forward(x / self.seen.to(x.device))


class Normalizes(Wide):
    def forward(self, x, _):
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm())
        return super().forward(x)


class Aliased(Wide):
    def forward(self, x, y):
        x.relu_()
        return super().forward(y) + x


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Attribute, "no argument and no buffer"),
        (Normalizes, "no argument and no buffer"),
        (Aliased, "arguments that share memory"),
    ],
)
def test_what_writes_elsewhere_is_not_run_again(module, why):
    """To an attribute, to a parameter, or through two arguments: it keeps its activations."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 8), module(), Wide()

        def forward(self, x):
            x = self.first(x)
            x = self.inner(x, x.view_as(x))
            with bp.Block(1):
                return self.last(x)

    net = Net()
    exact, pipe = compared(net, torch.randn(16, 8), "sequential")
    assert exact
    assert any(why in (about.refuses or "") for about in pipe.recording.recomputable.values())


@dataclasses.dataclass
class State:
    n: int
    seen: list


@pytest.mark.parametrize("make", [lambda: State(0, []), lambda: SimpleNamespace(n=0, seen=[])])
def test_arguments_that_are_changed_are_as_they_were(make):
    """Objects of the user's, lists inside of them: opened before the call, and before each rerun."""

    class Changes(Wide):
        def forward(self, x, state):
            state.n += 1
            state.seen.append(x.detach())
            return super().forward(x * state.n) * len(state.seen)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Changes(), Changes()

        def forward(self, x):
            state = make()
            x = self.a(x, state)
            with bp.Block(1):
                return self.b(x, state)

    assert compared(Net(), torch.randn(16, 8), "gpipe")[0]


def test_a_module_that_counts_is_found_in_the_first_step():
    """Python state that its result depends on is nothing that anybody sees: the values are."""

    class Counts(Wide):
        n = 0

        def forward(self, x):
            self.n += 1
            return super().forward(x * self.n)

    net = nn.Sequential(Counts(), bp.BeginBlock(Wide(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always")
    # Of two watchers, an accelerator's is the later one.
    expected = r"'0' on stage 0 .*(with other numbers|set it once more) when it was"
    with pytest.raises(bp.BlockpipeError, match=expected):
        pipe.forward_backward(torch.randn(16, 8), loss_fn=square)


@each_value(
    dtype=[torch.float32, torch.int64, torch.bool, torch.complex64],
    shape=[(64,), (16, 4), (4, 16), (2, 3, 8)],
)
def test_a_digest_tells_orders_apart(dtype, shape):
    """A permutation has the same sum and norm; one other element of many is seen too."""
    if dtype == torch.bool:
        tensor = (
            F.one_hot(torch.randperm(shape[-1]))[: shape[0]].bool()
            if len(shape) == 2
            else (torch.rand(shape) > 0.5)
        )
    elif dtype == torch.int64:
        tensor = torch.randint(100, shape)
    else:
        tensor = F.layer_norm(torch.randn(shape), shape[-1:]).to(dtype)  # all rows have one sum
    agree, digest = digests.agree, digests.Comparisons().digest
    assert agree(digest(tensor), digest(tensor.clone()))
    for dim, size in enumerate(shape):
        moved = tensor.roll(1, dim)
        if size > 1 and not equal(moved, tensor):
            assert not agree(digest(tensor), digest(moved))
    one = tensor.clone()
    one.view(-1)[3] = ~one.view(-1)[3] if dtype == torch.bool else one.view(-1)[3] + 1
    assert not agree(digest(tensor), digest(one))


def test_a_shuffle_of_its_own_is_found_in_the_first_step():
    """What is saved is the same but for its order, the shuffle itself too."""

    class Shuffles(Wide):
        rng = random.Random(0)

        def forward(self, x):
            return super().forward(x.sigmoid()[self.rng.sample(range(len(x)), len(x))])

    net = nn.Sequential(nn.Linear(8, 8), Shuffles(), bp.BeginBlock(Wide(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    with pytest.raises(StateError, match=r"'1' on stage 0 .*with other numbers when it was"):
        pipe.forward_backward(torch.randn(64, 8), loss_fn=square)


class Reentrant(Wide):
    """Its statistics are read and written inside of an autograd function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, x):
        run = lambda x: super(Reentrant, self).forward(self.norm(x))  # noqa: E731
        y = checkpoint(run, x, use_reentrant=True)
        return y.tanh() * y.sigmoid()


class Appears(Wide):
    """A buffer that is None until the first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x):
        self.seen = torch.ones(()) if self.seen is None else self.seen.add_(1)
        return super().forward(x) / self.seen.clone()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_buffers_that_a_reentrant_checkpoint_reads_and_writes_again_are_refused(mode):
    """The next micro-batch has read them before the backward writes."""
    net = nn.Sequential(nn.Linear(8, 8), Reentrant(), bp.BeginBlock(Reentrant(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint=mode)
    x = torch.randn(16, 8)
    with pytest.raises(StateError, match="is written in a backward, by a hook or by torch.utils"):
        pipe.forward_backward(x, loss_fn=square)


@pytest.mark.parametrize(
    ("module", "schedule"),
    [(Reentrant, "sequential"), *((Appears, schedule) for schedule in SCHEDULES)],
)
def test_buffers_that_no_operation_of_the_glue_reads(module, schedule):
    """They are as if it had run once, too."""
    net = nn.Sequential(nn.Linear(8, 8), module(), bp.BeginBlock(module(), stage=1))
    x, results = torch.randn(16, 8), []
    for mode in ("never", "always"):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(model, devices=stages(2), chunks=4, schedule=schedule, checkpoint=mode)
        results += [(model, pipe.forward_backward(x, loss_fn=square).loss) for _ in range(2)][1:]
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same
    assert pipe.recording.recomputable["1"].is_recomputed


@each_value(
    schedule=SCHEDULES,
    mode=MODES,
)
def test_dropout_that_begins_later(schedule, mode):
    """It drew nothing when the model was recorded; from its second step on it is as any other."""
    results = []
    x = torch.randn(16, 8)
    net = nn.Sequential(Layer(8), bp.BeginBlock(Layer(8), stage=1))
    for options in ({"schedule": "sequential"}, {"schedule": schedule, "checkpoint": mode}):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(model, devices=stages(2), chunks=4, **options)
        pipe.forward_backward(x, loss_fn=square)
        for layer in model:
            layer.drop.p = 0.5
        pipe.forward_backward(x, loss_fn=square)  # noticed
        model.load_state_dict(net.state_dict())
        model.zero_grad()
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same


@pytest.mark.parametrize("mode", MODES[1:])
def test_dropout_that_begins_later_is_replayed_at_once(mode):
    """In that very step, too, what is made again has the masks that it had."""
    net = nn.Sequential(Layer(8), bp.BeginBlock(Layer(8), stage=1))
    x = torch.randn(16, 8)
    results = []
    for checkpoint_ in ("never", mode):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(
            model, devices=stages(2), chunks=4, schedule="sequential", checkpoint=checkpoint_
        )
        pipe.forward_backward(x, loss_fn=square)
        for layer in model:
            layer.drop.p = 0.5
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    assert difference(results[1][0], results[0][0], results[1][1], results[0][1]).same


def test_drawing_that_no_attribute_tells_of_is_replayed_at_once():
    """No recording says that it draws: what is made again finds the device's generator all the
    same."""
    rate = [0.0]

    class Draws(nn.Linear):
        def forward(self, x):
            x = super().forward(x).tanh()
            return F.dropout(x, rate[0]) if rate[0] else x

    net = nn.Sequential(Draws(8, 8), bp.BeginBlock(Draws(8, 8), stage=1))
    x, results = torch.randn(8, 8), []
    for mode in ("never", "always"):
        model, rate[0] = copy.deepcopy(net), 0.0
        options = {"schedule": "sequential", "checkpoint": mode}
        pipe = bp.Pipeline(model, devices=stages(2), chunks=2, **options)
        pipe.forward_backward(x, loss_fn=square)
        rate[0] = 0.5
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same
