"""Random programs recomputed, and the corners of a recomputed call."""

import copy
import threading
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.crossing import recompute as checkpoints
from blockpipe.crossing.recompute import Recomputable
from blockpipe.devices import digests
from blockpipe.errors import CrossingError, PlanError, StateError, UsageError

from ..models import SCHEDULES, square
from ..parameter_sets import each_value
from ..parity import difference, plain_step
from ..stage_devices import equal, examples, stages
from ..strategies import Program, programs
from .recomputed_models import MODES, Layer, Wide, compared, layers, step


def test_a_function_that_reads_what_it_saved_twice():
    """Costs no second recomputation."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            assert ctx.saved_tensors is not None
            return gradient * ctx.saved_tensors[1]

    class Custom(Layer):
        def forward(self, x):
            for _ in range(4):
                x = Twice.apply(super().forward(x) * 0.1)
            return x

    net = nn.Sequential(Custom(8), bp.BeginBlock(Custom(8), stage=1))
    for layer in net:
        layer.norm = nn.LayerNorm(8)
    exact, _ = compared(net, torch.randn(16, 8), steps=1)
    assert exact
    assert [sum(layer.calls) / 4 for layer in net] == [4, 4]


def test_an_inner_gradient_leaves_nothing_behind():
    """R makes all of it again, although a part was read in the forward."""
    runs = []

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 1)

        def forward(self, x):
            runs.append(bp.is_recomputing())
            at = x.detach().requires_grad_()
            energy = self.b(self.a(at).tanh().sin()).sum()
            return x + torch.autograd.grad(energy, at, create_graph=True)[0]

    net = nn.Sequential(Force(), bp.BeginBlock(Force(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
    inner = 4  # each forward asks for its own gradient, which makes what it saved again
    assert sum(runs) == 4 + inner


@each_value(
    schedule=SCHEDULES,
    mode=MODES,
)
def test_a_first_module_that_writes_to_its_input(schedule, mode):
    """Micro-batches are slices of one batch: a write to one is none to the others."""

    class Scales(Wide):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    net = nn.Sequential(Scales(), bp.BeginBlock(Wide(), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(16, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint=mode)
    copied = x.clone()
    loss = pipe.forward_backward(x, loss_fn=square).loss
    expected = plain_step(plain, (copied,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


@settings(max_examples=examples(25), deadline=None)
@given(
    programs,
    st.integers(2, 4),
    st.sampled_from(SCHEDULES),
    st.sampled_from(["except_last", "always"]),
    st.booleans(),
)
def test_random_programs_recompute_to_plain_gradients(
    instructions, chunks, schedule, mode, isolate
):
    """Random programs over glue and modules have the plain loop's gradients."""
    torch.manual_seed(0)
    net = Program(instructions)
    plain = copy.deepcopy(net)
    x, index = torch.randn(8, 4), torch.randint(0, 4, (8,))

    def loss_fn(outputs):
        return sum(o.square().mean() for o in outputs)

    try:
        expected = plain_step(plain, (x.clone(), index), {}, None, loss_fn, chunks)
    except RuntimeError:
        assume(False)  # no program at all: what autograd needs is written in place
    try:
        count = bp.record(net, (x, index)).num_stages
        pipe = bp.Pipeline(
            net,
            devices=stages(count),
            chunks=chunks,
            schedule=schedule,
            checkpoint=mode,
            isolate=isolate,
        )
        loss = pipe.forward_backward(x, index, loss_fn=loss_fn).loss
    except (PlanError, CrossingError, StateError):
        # What is refused is refused without it, too.
        with pytest.raises((PlanError, CrossingError, StateError), match=":"):
            bp.Pipeline(
                Program(instructions),
                devices=stages(3),
                chunks=chunks,
                schedule=schedule,
                isolate=isolate,
            ).forward_backward(x, index, loss_fn=loss_fn)
        return
    assert difference(net, plain, loss, expected).same


class NoisyProgram(Program):
    """Draws random numbers in glue, and calls layers that do; batch norm where it can."""

    def __init__(self, instructions):
        super().__init__(instructions)
        self.noisy = nn.ModuleList(Layer(4, 0.4) for _ in range(4))
        for layer, norm in zip(self.noisy, self.norms, strict=True):
            layer.norm = norm

    def run(self, op, a, b, stage):
        if op.name in ("linear", "half"):
            return self.noisy[stage](a)  # a layer for each stage
        made = super().run(op, a, b, stage)
        return F.dropout(made, 0.3) if op.name in ("tanh", "mul") else made


@settings(max_examples=examples(25), deadline=None)
@given(
    programs,
    st.integers(2, 4),
    st.sampled_from(SCHEDULES),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_random_programs_that_draw_recompute_as_sequential(
    instructions, chunks, schedule, mode, isolate
):
    """With dropout and batch norm: as sequential, without recomputation."""
    results = []
    x, index = torch.randn(8, 4), torch.randint(0, 4, (8,))
    for options in ({}, {"schedule": schedule, "checkpoint": mode, "isolate": isolate}):
        torch.manual_seed(0)
        net = NoisyProgram(instructions)
        pipe = bp.Pipeline(
            net, **{"devices": stages(3), "chunks": chunks, "schedule": "sequential", **options}
        )
        try:
            for _ in range(2):
                loss = pipe.forward_backward(
                    x.clone(),
                    index,
                    loss_fn=lambda outputs: sum(o.square().mean() for o in outputs),
                ).loss
        except (PlanError, CrossingError, StateError, UsageError):
            assume(False)  # UsageError: no output needs grad
        except RuntimeError as error:
            assert "inplace" in str(error) or "in-place" in str(error)
            assume(False)
        results.append((net, loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same


def test_frames_are_made_where_it_recomputes_only(monkeypatch):
    """Never means never: not even the hooks are on."""
    made = []
    monkeypatch.setattr(
        checkpoints.RecomputedCall, "run", lambda self, args, kwargs: made.append(self) or 1 / 0
    )
    step(layers(), torch.randn(8, 16), checkpoint="never")
    assert not made


@pytest.mark.parametrize(
    "place", ["call", "argument", "buffer", "digest", "collect", "surroundings"]
)
def test_a_failure_in_a_recomputation_locks_nobody_out(place, monkeypatch):
    """Wherever it comes: another thread can run the call again, and gets what was saved."""
    net = nn.BatchNorm1d(8)
    wrong = []

    def function(x):
        if wrong == ["call"]:
            raise KeyboardInterrupt
        return net(x).exp()

    def fails(*_, **__):
        raise KeyboardInterrupt

    again = checkpoints.RecomputeSpec(
        "it",
        Recomputable(),
        [(net._buffers, "running_mean", True), (net._buffers, "running_var", True)],
        [],
    )
    comparisons = digests.Comparisons()
    x = torch.randn(4, 8)
    call = checkpoints.SealedCall(function, (x,), {})
    frame = checkpoints.RecomputedCall(again, call, [], comparisons=comparisons)
    y = frame.run((x,), {})
    mean = net.running_mean.clone()
    with monkeypatch.context() as patch:
        wrong.append(place)
        if place == "argument":
            patch.setattr(checkpoints.SavedArgument, "entered", fails)
        elif place == "buffer":
            patch.setattr(checkpoints, "_copy_of", fails)
        elif place == "digest":
            patch.setattr(comparisons, "digest", fails)
        elif place == "collect":
            patch.setattr(checkpoints.RecomputedCall, "collect", fails)
        elif place == "surroundings":
            patch.setattr(frame._surroundings, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            frame.recompute()
    wrong.clear()
    assert equal(net.running_mean, mean)
    thread = threading.Thread(target=frame.recompute, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    y.sum().backward()
    assert equal(net.weight.grad.isfinite(), torch.ones(8, dtype=torch.bool))


class Takes(nn.Linear):
    """Changes the set and the deque that it is given."""

    def forward(self, x, seen, left):
        factor = left.pop() if "here" not in seen else 7.0
        seen.add("here")
        return (super().forward(x) * factor).tanh()


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Takes(4, 4), Takes(4, 4)

    def forward(self, x):
        with bp.Block(0):
            x = self.a(x, set(), deque([2.0]))
        with bp.Block(1):
            return self.b(x, set(), deque([3.0]))


def assert_recomputes_as_plain(net):
    """Two steps of a model in two stages, everything recomputed."""
    plain, x = copy.deepcopy(net), torch.randn(6, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, checkpoint="always")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 3)
        assert difference(net, plain, loss, expected).same


def test_a_set_and_a_deque_are_given_again_as_they_were():
    """The recomputed call sees what the first one was given, not what that left."""
    assert_recomputes_as_plain(Gives())


class CleansUp(nn.Linear):
    """Saves a tensor more where it does not come to its end."""

    def forward(self, x):
        try:
            return super().forward(x).tanh()
        except BaseException:
            self.weight.exp()
            raise


def test_what_is_saved_after_the_last_tensor_that_is_needed():
    """Running again ends there; what cleans up behind it does no harm."""
    net = nn.Sequential(CleansUp(4, 4), CleansUp(4, 4))
    assert_recomputes_as_plain(bp.begin_blocks(net, {"1": 1}))
